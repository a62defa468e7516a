"""Preparation: the right tokens, made once, found again, and never trained on when damaged."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gptlab.config.errors import ConfigError, UserError
from gptlab.config.run import DataConfig, TokenizerConfig
from gptlab.data import prepare as module
from gptlab.data.corpus.documents import split_documents
from gptlab.data.prepare import PreparedData, prepare
from gptlab.data.rows import make_rows, validation_rows
from gptlab.data.token_fate import token_fate
from gptlab.data.tokens.shards import TokenSplit
from gptlab.runtime.records.console import Console

BYTE = TokenizerConfig(kind="byte")
CHAR = TokenizerConfig(kind="char")
BPE = TokenizerConfig(kind="bpe", vocab_size=280)


def document(number: int) -> str:
    return (
        f"Document {number} says: " + " ".join(f"word{(number * 7 + i) % 23}é" for i in range(5 + number % 11)) + "\n"
    )


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:03}.txt").write_text(document(number), encoding="utf-8")
    return folder


def config(texts: Path, **more: object) -> DataConfig:
    settings = {"source": (str(texts),), "cache_dir": str(texts.parent / "cache"), "val_fraction": 0.1, **more}
    return DataConfig(**settings)  # type: ignore[arg-type]


def documents_of(prepared: PreparedData, split: TokenSplit) -> list[str]:
    starts = split.document_starts.tolist()
    return [prepared.tokenizer.decode(split.read(a, b - a)) for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("tokenizer", [BYTE, CHAR, BPE], ids=lambda t: t.kind)
def test_shards_hold_the_corpus(texts: Path, tokenizer: TokenizerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 200)  # several batches
    data = config(texts)
    prepared = prepare(data, tokenizer)
    expected: dict[str, list[str]] = {"train": [], "val": []}
    for side, text in split_documents(module.open_corpus(data), data.split, data.val_fraction):
        expected[side].append(text)
    for side, split in (("train", prepared.train), ("val", prepared.val)):
        assert documents_of(prepared, split) == expected[side]
        assert split.n_documents == len(expected[side]) > 0
        assert split.n_bytes == sum(len(text.encode()) for text in expected[side])
        # Every document begins with BOS; the lengths that bits per byte will use add up to the text's bytes.
        everything = split.read(0, split.n_tokens)
        assert (everything[split.document_starts[:-1]] == prepared.tokenizer.bos_id).all()
        assert prepared.tokenizer.token_bytes[everything].sum() == split.n_bytes
        assert prepared.statistics[side]["tokens"] == split.n_tokens
    assert prepared.statistics["skipped"] == {}


def test_a_second_call_makes_nothing(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(config(texts), BPE)
    for name in ("train_tokenizer", "SplitWriter"):
        monkeypatch.setattr(module, name, None)
    second = prepare(config(texts), BPE)
    assert (second.folder, second.fingerprint, second.statistics) == (first.folder, first.fingerprint, first.statistics)
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert np.array_equal(first.train.read(0, first.train.n_tokens), second.train.read(0, second.train.n_tokens))


def test_statistics_are_of_this_corpus_where_another_has_the_same_content(texts: Path, tmp_path: Path) -> None:
    first = prepare(config(texts), BYTE)
    copy = tmp_path / "copy"
    shutil.copytree(texts, copy)
    (copy / "up").symlink_to(tmp_path)
    second = prepare(config(copy), BYTE)
    assert second.folder == first.folder
    assert (first.statistics["corpus"], second.statistics["corpus"]) == (str(texts), str(copy))
    assert second.statistics["read"] == "60 documents from 60 files; not read: 1 linked folder"
    assert "not read" not in prepare(config(texts), BYTE).statistics["read"]


def test_whatever_changes_the_tokens_changes_the_fingerprint(texts: Path) -> None:
    seen = {
        prepare(data, tokenizer).fingerprint
        for data, tokenizer in [
            (config(texts), BPE),
            (config(texts), TokenizerConfig(vocab_size=281)),
            (config(texts), BYTE),
            (config(texts, split="tail"), BPE),
            (config(texts, val_fraction=0.2), BPE),
            (config(texts), CHAR),
            (config(texts, rows="random"), CHAR),  # without BOS
        ]
    }
    (texts / "000.txt").write_text("changed\n")
    seen.add(prepare(config(texts), BPE).fingerprint)
    assert len(seen) == 8
    same = [prepare(config(texts, rows=rows, long_documents="crop"), BPE) for rows in ("packed", "random")]
    assert len({p.fingerprint for p in same} | seen) == 8


def test_the_tail_of_one_text_as_nanogpt_splits_it(tmp_path: Path) -> None:
    text = "".join(document(number) for number in range(40))
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    data = config(tmp_path / "one.txt", split="tail", rows="random")
    prepared = prepare(data, CHAR)
    cut = int(len(text) * 0.9)
    characters = sorted(set(text))
    ids = {character: i for i, character in enumerate(characters)}
    assert prepared.tokenizer.bos_id is None
    assert prepared.train.read(0, prepared.train.n_tokens).tolist() == [ids[c] for c in text[:cut]]
    assert prepared.val.read(0, prepared.val.n_tokens).tolist() == [ids[c] for c in text[cut:]]
    rows = validation_rows(prepared.val, 16, None)
    inputs, targets = rows.read(0, np.arange(rows.rows_per_epoch))
    assert inputs[0].tolist() == [ids[c] for c in text[cut : cut + 16]]
    assert targets[targets >= 0].tolist() == [ids[c] for c in text[cut + 1 :]]


def test_a_split_that_few_documents_make_uneven_is_reported(texts: Path, tmp_path: Path) -> None:
    """Of two documents one validates: the note or all the rest, as its hash says."""

    def reported(*sources: Path, **more: object) -> tuple[PreparedData, str]:
        data, out = config(texts, source=tuple(map(str, sources)), **more), io.StringIO()
        return prepare(data, BYTE, console=Console(stream=out)), out.getvalue()

    long, note = tmp_path / "long.txt", tmp_path / "note.md"
    long.write_text("".join(document(number) for number in range(200)), encoding="utf-8")
    for content, n_bytes in (("Note 0\n", long.stat().st_size), ("Note 1\n", 7)):
        note.write_text(content)
        prepared, says = reported(long, note)
        assert prepared.val.n_bytes == n_bytes
        assert f"warning: {n_bytes:,} of the {long.stat().st_size + 7:,} bytes" in says
        assert "--data.split tail" in says
    for well_divided in (reported(long, note, split="tail"), reported(long, val_source=(str(note),)), reported(texts)):
        assert "warning" not in well_divided[1]


def test_a_text_too_short_for_a_tokenizer_is_told_of_the_tail(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("".join(document(number) for number in range(200)), encoding="utf-8")
    (tmp_path / "note.md").write_text("Note 0\n")
    with pytest.raises(UserError, match=r"not give that many entries; .*--data\.split tail"):
        prepare(config(tmp_path / "*.*"), BPE)


def test_a_character_that_only_validation_has_is_in_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("ab" * 90 + "xyz" * 5)
    prepared = prepare(config(tmp_path / "one.txt", split="tail", rows="random"), CHAR)
    assert prepared.tokenizer.vocab_size == 5


def test_a_tokenizer_learns_from_all_parts_of_a_folder_of_text(tmp_path: Path) -> None:
    """Of JSONL, where the size of the text is not known, it learns from the beginning."""
    documents = ["abab\n"] * 20 + ["cdcd\n"] * 20
    folder = tmp_path / "texts"
    folder.mkdir()
    for index, text in enumerate(documents):
        (folder / f"{index:02}.txt").write_text(text)
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (folder / "z.bin.txt").write_bytes(b"\xff" * 4000)  # skipped
    few = TokenizerConfig(vocab_size=259, train_bytes=60)
    for source, learned in ((folder, {b"ab", b"cd"}), (records, {b"ab", b"abab"})):
        assert {*prepare(config(source, split="tail"), few).tokenizer.tokens[256:258]} == learned


def test_a_tokenizer_from_a_folder_is_used_as_it_is(texts: Path, tmp_path: Path) -> None:
    prepare(config(texts), BPE).tokenizer.save(tmp_path / "kept")
    (texts / "new.txt").write_text(document(61), encoding="utf-8")
    given = prepare(config(texts), TokenizerConfig(path=str(tmp_path / "kept")))
    assert given.tokenizer.vocab_size == 280
    assert documents_of(given, given.train)[0] == document(0)
    with pytest.raises(UserError):
        prepare(config(texts), TokenizerConfig(path=str(tmp_path / "nowhere")))


def spoil(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def flipped(place: int) -> Callable[[Path], object]:
    """One bit of the byte at `place`."""
    return spoil(lambda c: c[:place] + bytes([c[place] ^ 1]) + c[place:][1:])


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a shard cut short": ("train_000000.bin", spoil(lambda content: content[:-2])),
    "a longer shard": ("train_000000.bin", spoil(lambda content: content + content[-2:])),
    "a flipped bit in a shard": ("train_000000.bin", flipped(2000)),
    "a shard of zeros": ("train_000000.bin", spoil(lambda content: bytes(len(content)))),
    "an empty shard": ("val_000000.bin", spoil(lambda _: b"")),
    "the other shard": ("train_000000.bin", lambda f: f.write_bytes((f.parent / "val_000000.bin").read_bytes())),
    "no shard": ("train_000000.bin", Path.unlink),
    "a shard that is a link": ("val_000000.bin", lambda f: f.rename(f.parent / "x") and f.symlink_to(f.parent / "x")),
    "a flipped bit in the document index": ("train_documents.npy", flipped(150)),
    "no document index": ("train_documents.npy", Path.unlink),
    "a flipped bit in the hashes": ("val_hashes.npy", flipped(-1)),
    "no hashes": ("val_hashes.npy", Path.unlink),
    "no manifest": ("manifest.json", Path.unlink),
    "half a manifest": ("manifest.json", spoil(lambda content: content[:40])),
    "other counts in the manifest": ("manifest.json", spoil(lambda c: c.replace(b'"shards": 1', b'"shards": 2'))),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_tokens_are_noticed_named_and_made_again(texts: Path, kind: str) -> None:
    good = prepare(config(texts), BYTE)
    files = {path.name: path.read_bytes() for path in good.folder.iterdir()}
    name, damage = DAMAGES[kind]
    damage(good.folder / name)
    shown = io.StringIO()
    with Console(stream=shown) as console:
        again = prepare(config(texts), BYTE, console=console)
    assert f"damaged tokens of {texts} in {good.folder} (" in shown.getvalue()
    assert {path.name: path.read_bytes() for path in again.folder.iterdir()} == files


@pytest.mark.parametrize("kind", ["a link", "a link to nothing", "a file"])
def test_tokens_whose_folder_is_none_are_made_again(texts: Path, tmp_path: Path, kind: str) -> None:
    """Whoever keeps them on another disk has a link."""
    good = prepare(config(texts), BYTE)
    files = {path.name: path.read_bytes() for path in good.folder.iterdir()}
    far = good.folder.rename(tmp_path / "far")
    if kind == "a file":
        good.folder.touch()
    else:
        good.folder.symlink_to(far)
        assert prepare(config(texts), BYTE).folder == good.folder
        assert good.folder.is_symlink()
        flipped(2000)(far / "train_000000.bin")
    if kind == "a link to nothing":
        far.rename(tmp_path / "farther")
    shown = io.StringIO()
    with Console(stream=shown) as console:
        again = prepare(config(texts), BYTE, console=console)
    assert f"damaged tokens of {texts} in {good.folder} (" in shown.getvalue()
    assert {path.name: path.read_bytes() for path in again.folder.iterdir()} == files
    assert far.exists() == (kind != "a link to nothing"), "what a link leads to is not the cache's"


@pytest.mark.parametrize("name", ["row_segments.npy", "segment_starts.npy", "segment_lengths.npy"])
def test_a_damaged_packing_is_planned_again(texts: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptlab.data.rows.KEPT_DOCUMENTS", 1)
    prepared = prepare(config(texts), BYTE)

    def read() -> np.ndarray:
        rows = make_rows(prepared.train, config(texts), 32, prepared.tokenizer.bos_id, 1, prepared.folder)
        return rows.read(0, np.arange(rows.rows_per_epoch))[0]

    expected = read()
    (plan,) = (prepared.folder / "plans").glob("cut-*")
    flipped(-8)(plan / name)
    assert np.array_equal(read(), expected)


def test_a_damaged_tokenizer_is_trained_again(texts: Path) -> None:
    good = prepare(config(texts), BPE)
    (kept,) = (texts.parent / "cache" / "tokenizers").glob("*/tokenizer.json")
    kept.write_text(kept.read_text()[:-20])
    assert prepare(config(texts), BPE).fingerprint == good.fingerprint


def test_a_preparation_that_was_killed_is_done_again(texts: Path) -> None:
    script = (
        "import os, sys\n"
        "from gptlab.config.run import DataConfig, TokenizerConfig\n"
        "from gptlab.data import prepare as module\n"
        "from gptlab.data.tokens.shards import SplitWriter\n"
        "def killed(self):\n"
        "    os._exit(9)\n"
        "SplitWriter.close = killed\n"
        "data = DataConfig(source=(sys.argv[1],), cache_dir=sys.argv[2], val_fraction=0.1)\n"
        "module.prepare(data, TokenizerConfig(kind='byte'))\n"
    )
    command = [sys.executable, "-c", script, str(texts), str(texts.parent / "cache")]
    assert subprocess.run(command, check=False).returncode == 9
    tokens = texts.parent / "cache" / "tokens"
    assert [p.suffix for p in tokens.iterdir() if p.is_dir()] == [".tmp"]
    prepared = prepare(config(texts), BYTE)
    assert len(documents_of(prepared, prepared.train)) == prepared.statistics["train"]["documents"]
    assert [p for p in tokens.iterdir() if p.is_dir()] == [prepared.folder]


def test_a_refused_preparation_leaves_nothing(texts: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        prepare(config(texts), TokenizerConfig(vocab_size=100_000))
    leftovers = [p for p in (texts.parent / "cache").rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert leftovers == []


def test_a_cache_that_cannot_be_written_is_one_line(texts: Path) -> None:
    (texts.parent / "cache").touch()  # a file where the folder should be: refused to root, too
    with pytest.raises(UserError, match=r"cannot keep the tokens of .* in .*cache"):
        prepare(config(texts), BYTE)


def test_plans_are_kept_beside_the_tokens(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptlab.data.rows.KEPT_DOCUMENTS", 1)
    prepared = prepare(config(texts), BYTE)
    rows = make_rows(prepared.train, config(texts), 32, prepared.tokenizer.bos_id, 1, prepared.folder)
    assert token_fate(rows).cropped == 0
    assert (prepared.folder / "plans").is_dir()
    assert prepare(config(texts), BYTE).folder == prepared.folder  # they do not count as damage
