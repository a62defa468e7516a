"""Tokens that others made: read where they lie, exactly, checked once, and trained on from the command line."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as tiny

from gptlab.config.errors import UserError
from gptlab.config.run import DataConfig, TokenizerConfig
from gptlab.data import prepare as module
from gptlab.data.corpus import known_corpora
from gptlab.data.corpus.known_corpora import HubFiles, HubRecord, KnownCorpus, RemoteFile, Verified, write_record
from gptlab.data.packing import IGNORED
from gptlab.data.prepare import PreparedData, prepare
from gptlab.data.rows import make_rows, validation_rows
from gptlab.data.token_fate import token_fate
from gptlab.data.tokenizer.tokenizer import ByteTokenizer
from gptlab.data.tokens import foreign_files
from gptlab.data.tokens.shards import TokenSplit
from gptlab.runtime.files import cache as file_hashes

BOS = 256
"""Of the byte tokenizer, whose ids are easy to know."""
BYTE = TokenizerConfig(kind="byte")
CHAR = TokenizerConfig(kind="char")

TEXT = "".join(f"Speaker {number % 7}: to be, or not to be {number}; père Noël →\n" for number in range(200))


def write_nanogpt(folder: Path, text: str = TEXT, characters: str | None = None) -> dict[str, int]:
    """What nanoGPT's data/shakespeare_char/prepare.py writes; `characters`: the table, else sorted. Returns stoi."""
    folder.mkdir(parents=True)
    chars = sorted(set(text)) if characters is None else list(characters)
    stoi = {ch: i for i, ch in enumerate(chars)}
    itos = dict(enumerate(chars))
    n = len(text)
    for name, part in (("train", text[: int(n * 0.9)]), ("val", text[int(n * 0.9) :])):
        np.array([stoi[c] for c in part], dtype=np.uint16).tofile(folder / f"{name}.bin")
    with (folder / "meta.pkl").open("wb") as stream:
        pickle.dump({"vocab_size": len(chars), "itos": itos, "stoi": stoi}, stream)
    return stoi


def shard(path: Path, ids: Any, *, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    """One file as llm.c's dev/data/data_common.py writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.asarray(ids, dtype=dtype)
    path.write_bytes(struct.pack("<256i", magic, version, len(tokens), *[0] * 253) + tokens.tobytes())
    return path


def shard32(path: Path, ids: Any) -> Path:
    return shard(path, ids, magic=20240801, version=7, dtype="<u4")


def config(tmp_path: Path, *sources: Path | str, **more: Any) -> DataConfig:
    settings = {"source": tuple(map(str, sources)), "cache_dir": str(tmp_path / "cache"), "rows": "sequential", **more}
    return DataConfig(**settings)


def everything(split: TokenSplit) -> list[int]:
    return split.read(0, split.n_tokens).tolist()


def refusal(data: DataConfig, tokenizer: TokenizerConfig = BYTE) -> str:
    with pytest.raises(UserError) as error:
        prepare(data, tokenizer)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_nanogpt_folder_is_what_its_text_gives(tmp_path: Path) -> None:
    stoi = write_nanogpt(tmp_path / "shakespeare_char")
    (tmp_path / "shakespeare_char" / "input.txt").write_text(TEXT, encoding="utf-8")  # as in nanoGPT's own folder
    (tmp_path / "one.txt").write_text(TEXT, encoding="utf-8", newline="\n")
    given = prepare(config(tmp_path, tmp_path / "shakespeare_char", rows="random"), CHAR)
    own = prepare(config(tmp_path, tmp_path / "one.txt", split="tail", val_fraction=0.1, rows="random"), CHAR)
    assert everything(given.train) == everything(own.train) == [stoi[c] for c in TEXT[: int(len(TEXT) * 0.9)]]
    assert everything(given.val) == everything(own.val)
    assert given.tokenizer.fingerprint == own.tokenizer.fingerprint
    assert given.tokenizer.bos_id is None
    for side in ("train", "val"):
        counts = ("tokens", "documents", "bytes", "shards")
        assert [given.statistics[side][key] for key in counts] == [own.statistics[side][key] for key in counts]
    rows = [validation_rows(prepared.val, 16, None) for prepared in (given, own)]
    for one, other in zip(*(source.read(0, np.arange(source.rows_per_epoch)) for source in rows), strict=True):
        assert np.array_equal(one, other)


def test_a_table_in_any_order_is_kept_id_for_id(tmp_path: Path) -> None:
    characters = "".join(sorted(set(TEXT), reverse=True))
    stoi = write_nanogpt(tmp_path / "folder", characters=characters)
    prepared = prepare(config(tmp_path, tmp_path / "folder"), CHAR)
    assert prepared.tokenizer.encode("to be →").tolist() == [stoi[c] for c in "to be →"]
    assert prepared.tokenizer.decode(prepared.val.read(0, 30)) == TEXT[int(len(TEXT) * 0.9) :][:30]
    prepared.tokenizer.save(tmp_path / "kept")
    again = prepare(config(tmp_path, tmp_path / "folder"), TokenizerConfig(path=str(tmp_path / "kept")))
    assert (again.fingerprint, again.folder) == (prepared.fingerprint, prepared.folder)
    assert again.tokenizer.encode("to be →").tolist() == [stoi[c] for c in "to be →"]


@pytest.mark.parametrize("how", ["folder", "glob", "files", "val_source", "val folder"])
def test_shards_by_name(tmp_path: Path, how: str) -> None:
    """As modded-nanogpt names them: the one with `val` in its name validates, the others train in order."""
    folder = tmp_path / "fineweb10B"
    second = shard32(folder / "fineweb_train_000002.bin", [6, 7])
    first = shard(folder / "fineweb_medieval_01.bin", [1, 2, 3, 4, 5])  # `val` within a word is no mark
    val = shard(folder / "fineweb_val_000000.bin", [9, 8, 7])
    other = shard(tmp_path / "other" / "part.bin", [11, 12])
    data = {
        "folder": config(tmp_path, folder),
        "glob": config(tmp_path, folder / "*.bin"),
        "files": config(tmp_path, first, second, val),
        "val_source": config(tmp_path, folder, val_source=(str(other),)),
        "val folder": config(tmp_path, folder, val_source=(str(other.parent),)),
    }[how]
    prepared = prepare(data, BYTE)
    assert everything(prepared.train) == [1, 2, 3, 4, 5, 6, 7]
    assert everything(prepared.val) == ([11, 12] if how.startswith("val") else [9, 8, 7])
    assert prepared.statistics["train"] == {"tokens": 7, "documents": 1, "bytes": 7, "shards": 2}
    rows = make_rows(prepared.train, data, 2, prepared.tokenizer.bos_id, 0, None)
    inputs, targets = rows.read(0, np.arange(rows.rows_per_epoch))
    assert inputs.tolist() == [[1, 2], [3, 4], [5, 6]]  # the last one across the border of two shards
    assert targets.tolist() == [[2, 3], [4, 5], [6, 7]]


def test_what_validates_does_not_train(tmp_path: Path) -> None:
    paths = [shard(tmp_path / "s" / f"part_{number}.bin", [number, number]) for number in range(3)]
    assert "no file validates" in refusal(config(tmp_path, tmp_path / "s"))
    assert "data.val_source" in refusal(config(tmp_path, tmp_path / "s" / "*.bin"))
    prepared = prepare(config(tmp_path, tmp_path / "s", val_source=(str(paths[1]),)), BYTE)
    assert everything(prepared.train) == [0, 0, 2, 2]
    assert everything(prepared.val) == [1, 1]
    assert "no file is left to train on" in refusal(config(tmp_path, paths[0], val_source=(str(tmp_path / "s"),)))


def test_validation_is_the_speedruns(tmp_path: Path) -> None:
    """Its loader (B, T) over one shard: x = tokens[p : p + B T], y = tokens[p + 1 : p + B T + 1], p += B T; BOS counts
    as a target, and 10,485,760 tokens are the first ones of the shard."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 257, size=500)
    tokens[::50] = BOS
    shard(tmp_path / "s" / "x_val_0.bin", tokens)
    shard(tmp_path / "s" / "x_train_0.bin", tokens[:100])
    prepared = prepare(config(tmp_path, tmp_path / "s"), BYTE)
    rows_a_batch, length, batches = 4, 8, 5
    expected = []
    for batch in range(batches):
        position = batch * rows_a_batch * length
        buffer = tokens[position : position + rows_a_batch * length + 1].tolist()
        for row in range(rows_a_batch):
            at = row * length
            expected.append((buffer[at : at + length], buffer[at + 1 : at + length + 1]))
    rows = validation_rows(prepared.val, length, prepared.tokenizer.bos_id, batches * rows_a_batch * length)
    inputs, targets = rows.read(0, np.arange(rows.rows_per_epoch))
    assert list(zip(inputs.tolist(), targets.tolist(), strict=True)) == expected
    whole = validation_rows(prepared.val, length, prepared.tokenizer.bos_id)
    targets = whole.read(0, np.arange(whole.rows_per_epoch))[1]
    assert targets[targets != IGNORED].tolist() == tokens[1:].tolist()


@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 7], [5, 6]])
def test_packed_rows_find_documents_at_bos(tmp_path: Path, cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_files, "BLOCK_TOKENS", 3)
    tokens = np.array([5, BOS, 1, 2, BOS, BOS, 3, BOS, 1, 2])  # "5" stands before the first document
    for number, part in enumerate(np.split(tokens, cuts)):
        shard(tmp_path / "s" / f"train_{number}.bin", part)
    shard(tmp_path / "s" / "val.bin", [BOS, 7, 8, BOS, 9])
    data = config(tmp_path, tmp_path / "s", rows="packed")
    prepared = prepare(data, BYTE)
    assert prepared.train.document_starts.tolist() == [1, 4, 5, 7, 10]
    hashes = prepared.train.content_hashes.tolist()
    assert hashes[0] == hashes[3]  # the same document twice
    assert len(set(hashes)) == 3
    assert prepared.statistics["train"] == {"tokens": 10, "documents": 4, "bytes": 6, "shards": len(cuts) + 1}
    rows = make_rows(prepared.train, data, 3, BOS, 0, None)
    fate = token_fate(rows)
    assert (fate.total, fate.cropped) == (10, 1)
    targets = rows.read(0, np.arange(rows.rows_per_epoch))[1]
    assert sorted(targets[(targets != IGNORED) & (targets != BOS)].tolist()) == [1, 1, 2, 2, 3]
    held_out = validation_rows(prepared.val, 3, BOS)
    targets = held_out.read(0, np.arange(held_out.rows_per_epoch))[1]
    assert sorted(targets[targets != IGNORED].tolist()) == [7, 8, 9]
    # The cuts do not show in the document index.
    whole = prepare(config(tmp_path, shard(tmp_path / "t" / "w.bin", tokens), rows="packed",
                           val_source=(str(tmp_path / "s" / "val.bin"),)), BYTE)  # fmt: skip
    assert whole.train.content_hashes.tolist() == hashes


def test_packed_rows_need_documents(tmp_path: Path) -> None:
    shard(tmp_path / "s" / "train.bin", [1, 2, 3])
    shard(tmp_path / "s" / "val.bin", [BOS, 1, 2, 3])
    message = refusal(config(tmp_path, tmp_path / "s", rows="packed"))
    assert "train.bin: no BOS begins a document" in message
    assert "--data.rows random or sequential (gptlab data: --rows)" in message


def wrong_files(folder: Path) -> dict[str, tuple[bytes, str]]:
    good = shard(folder / "good.bin", [1, 2, 3]).read_bytes()
    return {
        "magic": (bytes(4) + good[4:], "it begins with 0, version 1, and llm.c's shards with 20240520, version 1"),
        "raw tokens": (bytes(4000), "it begins with 0, version 0"),
        "empty file": (b"", "it begins with 0, version 0"),
        "header cut": (good[:1000], "its header says 3 tokens of 2 bytes, and after it are 0 bytes"),
        "version": (good[:4] + struct.pack("<i", 2) + good[8:], "it begins with 20240520, version 2"),
        "version of the other kind": (struct.pack("<2i", 20240801, 1) + good[8:], "it begins with 20240801, version 1"),
        "no token": (good[:8] + bytes(4) + good[12:1024], "is empty"),
        "length": (good + b"\0\0", "its header says 3 tokens of 2 bytes, and after it are 8 bytes"),
        "truncated": (good[:-2], "its header says 3 tokens of 2 bytes, and after it are 4 bytes"),
        "odd": (good[:-1], "after it are 5 bytes"),
        "negative length": (good[:8] + struct.pack("<i", -3) + good[12:], "its header says -3 tokens"),
        "uint32 behind uint16's header": (good + b"\0" * 6, "3 tokens of 2 bytes, and after it are 12 bytes"),
    }


def test_a_shard_that_is_none_is_one_line(tmp_path: Path) -> None:
    val = shard(tmp_path / "val.bin", [1, 2])
    path = tmp_path / "wrong" / "train.bin"
    for kind, (content, message) in wrong_files(tmp_path / "good").items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        for source in (path, path.parent / "*.bin"):
            told = refusal(config(tmp_path, source, val_source=(str(val),)))
            assert str(path) in told, kind
            assert message in told, kind
    shard(tmp_path / "wrong" / "more_train.bin", [1, 2])
    assert "train.bin" in refusal(config(tmp_path, tmp_path / "wrong", val_source=(str(val),)))


def test_a_folder_of_nothing_but_wrong_shards_says_so(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for name in ("a_train.bin", "a_val.bin"):
        (tmp_path / "s" / name).write_bytes(bytes(5000))
    assert "a_train.bin is not a token shard" in refusal(config(tmp_path, tmp_path / "s"))


def test_nanogpt_files_that_are_none_are_one_line(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "good")
    for name, content, message in [
        ("train.bin", b"abc", "tokens are two bytes each (uint16), and 3 bytes are odd"),
        ("val.bin", b"", "val.bin is empty"),
        ("val.bin", None, "no file validates: a nanoGPT folder has val.bin"),
        ("meta.pkl", b"cos\nsystem\n(S'true'\ntR.", "meta.pkl is not a plain table: its opcode GLOBAL"),
        ("meta.pkl", pickle.dumps({"vocab_size": 3}), "meta.pkl is not a table of characters"),
        ("meta.pkl", None, "tokenizer.kind = 'char'"),
    ]:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        if content is None:
            (tmp_path / "bad" / name).unlink()
        else:
            (tmp_path / "bad" / name).write_bytes(content)
        assert message in refusal(config(tmp_path, tmp_path / "bad"), CHAR)


@pytest.mark.parametrize("side", ["train", "val"])
@pytest.mark.parametrize("wide", [False, True])
def test_an_id_over_the_vocabulary_is_one_line(
    tmp_path: Path, side: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_files, "BLOCK_TOKENS", 8)
    wrong = 4_000_000_000 if wide else 257
    ids = {"train": [1] * 40, "val": [2] * 40}
    ids[side][21] = wrong
    for name, tokens in ids.items():
        (shard32 if wide else shard)(tmp_path / "s" / f"x_{name}.bin", tokens)
    message = refusal(config(tmp_path, tmp_path / "s"))
    assert f"x_{side}.bin: token 21 is id {wrong}, and the vocabulary has 257 entries (byte)" in message
    assert not list((tmp_path / "cache" / "tokens").glob("[!.]*"))
    shard(tmp_path / "s" / f"x_{side}.bin", [256])  # the largest there is
    prepare(config(tmp_path, tmp_path / "s"), BYTE)


def test_tokens_are_not_copied_and_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", "val"):
        shard(tmp_path / "s" / f"{name}.bin", np.arange(100_000) % 256)
    data = config(tmp_path, tmp_path / "s")
    scanned = []
    scan = module.scan

    def counting_scan(*arguments: Any) -> Any:
        scanned.append(arguments[3])
        return scan(*arguments)

    monkeypatch.setattr(module, "scan", counting_scan)
    first = prepare(data, BYTE)
    assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file()) < 2_000
    second = prepare(data, BYTE)
    assert scanned == ["train", "val"]
    assert (first.fingerprint, first.folder, first.statistics) == (second.fingerprint, second.folder, second.statistics)
    os.utime(tmp_path / "s" / "train.bin", ns=(1, 1))  # written again, perhaps
    third = prepare(data, BYTE)
    assert scanned == ["train", "val"] * 2
    assert third.fingerprint == first.fingerprint


def test_the_fingerprint_is_that_of_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hashes, "REMEMBERED_BYTES", 10_000)
    small, large = np.arange(1000) % 256, np.arange(50_000) % 251

    def fingerprint(name: str, train: Any, val: Any, **more: Any) -> str:
        shard(tmp_path / name / f"{name}_val.bin", val)
        shard(tmp_path / name / f"{name}_train.bin", train)
        return prepare(config(tmp_path, tmp_path / name, **more), BYTE).fingerprint

    original = fingerprint("a", large, small)
    assert fingerprint("b", large, small) == original  # a copy elsewhere, under another name
    assert fingerprint("b", large, small, split="tail", val_fraction=0.3) == original  # these are unused
    others = [
        fingerprint("c", small, large), fingerprint("d", large[::-1], small), fingerprint("e", large, small[::-1]),
        fingerprint("f", large[:-1], small), fingerprint("g", [BOS, *large], [BOS, *small]),
        fingerprint("g", [BOS, *large], [BOS, *small], rows="packed"),
    ]  # fmt: skip
    assert len({original, *others}) == 7


def test_tokens_and_text_do_not_mix(tmp_path: Path) -> None:
    shard(tmp_path / "s" / "x_train.bin", [1, 2])
    shard(tmp_path / "s" / "x_val.bin", [1, 2])
    (tmp_path / "a.txt").write_text("text")
    for data in (
        config(tmp_path, tmp_path / "s", tmp_path / "a.txt"),
        config(tmp_path, "stdlib", tmp_path / "s"),
        config(tmp_path, tmp_path / "s", val_source=(str(tmp_path / "a.txt"),)),
        config(tmp_path, tmp_path / "a.txt", val_source=(str(tmp_path / "s"),)),
    ):
        assert "this is text, and" in refusal(data)
    write_nanogpt(tmp_path / "n")
    assert "use tokens of one vocabulary" in refusal(config(tmp_path, tmp_path / "s", tmp_path / "n"), CHAR)
    assert "no file matches" in refusal(config(tmp_path, tmp_path / "none_*.bin"))
    assert "no such file" in refusal(config(tmp_path, tmp_path / "none.bin"))


def test_a_folder_of_text_with_some_bin_is_text(tmp_path: Path) -> None:
    folder = tiny.write_corpus(tmp_path / "corpus")
    (folder / "image.bin").write_bytes(bytes(2000))
    assert prepare(config(tmp_path, folder, rows="packed"), BYTE).statistics["train"]["documents"] > 1


def test_gptlabs_own_shards_are_a_source(tmp_path: Path) -> None:
    folder = tiny.write_corpus(tmp_path / "corpus", documents=40)
    own = prepare(config(tmp_path, folder, rows="packed"), TokenizerConfig(vocab_size=280))
    own.tokenizer.save(tmp_path / "tokenizer")
    kept = TokenizerConfig(path=str(tmp_path / "tokenizer"))
    given = prepare(config(tmp_path, own.folder, rows="packed"), kept)
    for one, other in ((own.train, given.train), (own.val, given.val)):
        assert everything(one) == everything(other)
        assert one.document_starts.tolist() == other.document_starts.tolist()
        assert one.n_bytes == other.n_bytes
    assert given.tokenizer.fingerprint == own.tokenizer.fingerprint
    message = refusal(config(tmp_path, own.folder), TokenizerConfig())  # GPT-2's ids would be other words
    assert "gptlab made these tokens with a bpe tokenizer of 280 entries" in message


def test_which_tokenizer_the_tokens_are_of(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "n")
    ByteTokenizer().save(tmp_path / "bytes")
    named = TokenizerConfig(path=str(tmp_path / "bytes"))
    assert prepare(config(tmp_path, tmp_path / "n"), TokenizerConfig()).tokenizer.kind == "char"
    assert prepare(config(tmp_path, tmp_path / "n"), named).tokenizer.kind == "byte"
    assert "its tokens are characters (nearest valid: char)" in refusal(config(tmp_path, tmp_path / "n"))
    shard32(tmp_path / "s" / "x_train.bin", [1, 2])
    shard32(tmp_path / "s" / "x_val.bin", [1, 2])
    assert "x_train.bin: uint32 tokens are not GPT-2's" in refusal(config(tmp_path, tmp_path / "s"), TokenizerConfig())
    assert "tokenizer.path" in refusal(config(tmp_path, tmp_path / "s"), TokenizerConfig())
    assert prepare(config(tmp_path, tmp_path / "s"), named).tokenizer.kind == "byte"


def test_without_meta_pkl_tokens_are_gpt2s(tmp_path: Path) -> None:
    """As data/openwebtext/prepare.py and llm.c write them: `<|endoftext|>` (50256) is the BOS of packed rows."""
    folder = tmp_path / "openwebtext"
    folder.mkdir()
    ids = [15496, 995, 50256, 464, 2068, 7586, 21831, 50256]  # "Hello world", "The quick brown fox"
    for name in ("train", "val"):
        np.array(ids * 20, dtype=np.uint16).tofile(folder / f"{name}.bin")
        shard(tmp_path / "s" / f"x_{name}.bin", ids * 20)
    for source in (folder, tmp_path / "s"):
        prepared = prepare(config(tmp_path, source), TokenizerConfig())
        assert (prepared.tokenizer.vocab_size, prepared.tokenizer.bos_id) == (50257, 50256)
        assert prepared.tokenizer.decode(prepared.train.read(0, 8)) == "Hello worldThe quick brown fox"
        assert prepared.train.n_bytes == 20 * len("Hello worldThe quick brown fox")
        packed = prepare(config(tmp_path, source, rows="packed"), TokenizerConfig(kind="gpt2"))
        assert packed.train.n_documents == 40
    np.array([50257], dtype=np.uint16).tofile(folder / "val.bin")
    assert "token 0 is id 50257, and the vocabulary has 50257 entries" in refusal(
        config(tmp_path, folder), TokenizerConfig()
    )


@pytest.mark.parametrize("suffix", ["bin", "jsonl"])
def test_a_corpus_by_name_validates_on_what_its_lineage_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Three files of the hub as they lie after their download; the table says which of them validates."""
    place = HubFiles(repo="lab/corpus", files=f"*.{suffix}", validation=f"part_1.{suffix}")
    known = KnownCorpus(
        name="known", what="", lineage="", place=place, license="", default_files=2, all_files=2, file_bytes=9
    )
    monkeypatch.setattr(known_corpora, "CORPORA", (known,))
    files, verified = {}, {}
    for number, text in enumerate(["a", "b", "c"]):
        path = tmp_path / "hub" / f"part_{number}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        if suffix == "bin":
            shard(path, [ord(text)] * 3)
        else:
            path.write_text(json.dumps({"text": text * 3}) + "\n")
        files[path.name] = RemoteFile(path.stat().st_size, None, "")
        verified[path.name] = Verified(hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
    write_record(
        place, HubRecord("lab/corpus", None, "0" * 40, str(tmp_path / "hub"), files, verified), tmp_path / "cache"
    )
    prepared = prepare(config(tmp_path, "known"), BYTE)
    assert prepared.tokenizer.decode(everything(prepared.train)) == "aaaccc"
    assert prepared.tokenizer.decode(everything(prepared.val)) == "bbb"
    other = prepare(
        config(tmp_path, "known", hub_files=1, val_source=(str(tmp_path / "hub" / f"part_2.{suffix}"),)), BYTE
    )
    assert prepared.tokenizer.decode(everything(other.train) + everything(other.val)) == "aaaccc"


def train_flags(source: Any, **changes: Any) -> dict[str, Any]:
    return {"data.source": source, "data.rows": "random", "tokenizer.kind": "bpe", "sample.prompts": ["to "], **changes}


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Flags for each kind of tokens."""
    write_nanogpt(tmp_path / "characters")
    ByteTokenizer().save(tmp_path / "bytes")
    raw = tmp_path / "raw"
    raw.mkdir()
    ids = np.concatenate([[BOS, *line.encode()] for line in TEXT.splitlines()])
    for name, part in (("train", ids[:-2000]), ("val", ids[-2000:])):
        part.astype(np.uint16).tofile(raw / f"{name}.bin")
    shard(tmp_path / "s" / "text_train_1.bin", ids[:4000])
    shard(tmp_path / "s" / "text_train_2.bin", ids[4000:-2000])
    shard(tmp_path / "s" / "text_val_0.bin", ids[-2000:])
    named = {"tokenizer.path": tmp_path / "bytes"}
    return {
        "characters": train_flags(tmp_path / "characters"),
        "raw": train_flags(raw, **named),
        "shards": train_flags(f"{tmp_path}/s/*.bin", **named) | {"data.rows": "packed"},
    }


@pytest.mark.parametrize("kind", ["characters", "raw", "shards"])
def test_train_resume_and_eval(tmp_path: Path, sources: dict[str, dict[str, Any]], kind: str) -> None:
    flags = sources[kind]
    straight = tiny.arguments(tmp_path, "straight", flags)
    code, out, err = tiny.command(["train", *straight])
    assert code == 0, err
    assert ("(char)" if kind == "characters" else "(byte)") in out
    with tiny.killed_at("train", 6):
        tiny.command(["train", *tiny.arguments(tmp_path, "killed", flags)])
    code, _, err = tiny.command(["train", "--resume", tmp_path / "killed"])
    assert code == 0, err
    assert tiny.differences(tiny.outcome(tmp_path / "straight"), tiny.outcome(tmp_path / "killed")) == []
    code, out, err = tiny.command(["eval", tmp_path / "straight"])
    assert code == 0, err
    last = tiny.lines_of(tmp_path / "straight", "eval")[-1]
    assert f"val_loss: {last['val_loss']:.6f}" in out
    assert "is not what it was" not in err


def test_other_tokens_do_not_resume(tmp_path: Path, sources: dict[str, dict[str, Any]]) -> None:
    with tiny.killed_at("train", 6):
        tiny.command(["train", *tiny.arguments(tmp_path, "run", sources["shards"])])
    shard(tmp_path / "s" / "text_train_2.bin", [BOS, 65, 66, 67] * 2000)
    code, _, err = tiny.command(["train", "--resume", tmp_path / "run"])
    assert code == 2
    assert "the data is not what" in err


def test_data_commands_show_tokens(tmp_path: Path, sources: dict[str, dict[str, Any]]) -> None:
    flags = sources["shards"]
    n_train = len(TEXT) + sum(len(line.encode()) - len(line) for line in TEXT.splitlines()) - 2000
    words = ["--data", flags["data.source"], "--tokenizer", flags["tokenizer.path"], "--cache-dir", tmp_path / "cache"]
    code, out, err = tiny.command(["data", "prepare", *words])
    assert code == 0, err
    train, val = (
        next(line for line in out.splitlines() if line.startswith(side)) for side in ("train: ", "validation: ")
    )
    assert f" {n_train:,} tokens" in train
    assert " 2,000 tokens" in val
    code, out, err = tiny.command(["train", *tiny.arguments(tmp_path, "looked-at", flags | {"eval.only": True})])
    assert code == 0, err
    assert f": {n_train:,} training tokens, 2,000 validation tokens, " in out
    code, out, err = tiny.command(["data", "inspect", *words, "--seq-len", "64"])
    assert code == 0, err
    assert "by file" in out
    assert "<BOS>Speaker" in out
    code, out, err = tiny.command(["data", "inspect", "--data", tmp_path / "characters", "--rows", "random"])
    assert code == 0, err
    assert "char, " in out
    code, out, err = tiny.command(["data", "list", "--cache-dir", tmp_path / "cache"])
    assert code == 0, err
    assert "by file" in out


def prepared_of(tmp_path: Path, texts: list[str], validation: list[str], **more: Any) -> PreparedData:
    for name, documents in (("texts", texts), ("validation", validation)):
        (tmp_path / name).mkdir(exist_ok=True)
        for number, text in enumerate(documents):
            (tmp_path / name / f"{number:02}.txt").write_text(text, encoding="utf-8", newline="\n")
    data = config(tmp_path, tmp_path / "texts", val_source=(str(tmp_path / "validation"),), rows="packed", **more)
    return prepare(data, more.pop("tokenizer", BYTE))


def test_validation_text_of_its_own(tmp_path: Path) -> None:
    prepared = prepared_of(tmp_path, ["one", "two", "three", "two", ""], ["two", "vier", "vier"])
    sides = [prepared.tokenizer.decode(split.read(0, split.n_tokens)) for split in (prepared.train, prepared.val)]
    assert sides == ["onethree", "twoviervier"]
    assert prepared.statistics["skipped"] == {"also in validation": 2, "empty": 1}
    (tmp_path / "validation" / "02.txt").write_text("fünf", encoding="utf-8")
    changed = prepared_of(tmp_path, [], [])
    assert changed.fingerprint != prepared.fingerprint
    same = prepare(config(tmp_path, tmp_path / "texts", val_source=(str(tmp_path / "validation"),), split="tail"), BYTE)
    assert same.fingerprint == changed.fingerprint  # how to hold out is not used
    own = prepare(config(tmp_path, tmp_path / "texts"), BYTE)
    assert own.fingerprint not in (same.fingerprint, prepared.fingerprint)
    characters = prepare(config(tmp_path, tmp_path / "texts", val_source=(str(tmp_path / "validation"),)), CHAR)
    assert characters.tokenizer.encode("fünf").size == 4  # has them from validation only


def test_validation_text_that_leaves_nothing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"texts: nothing is left to train on, all of it is in data\.val_source too"):
        prepared_of(tmp_path, ["one", "two"], ["two", "one", "three"])
