"""GPT-2's vocabulary: OpenAI's ids, exact bytes, the same in tiktoken, tokenizers and transformers, and on disk."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import regex
import tiktoken
import tiktoken_ext.openai_public
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oracle_tokenizer import bpe_ids
from tiny_runs import command, lines_of, train, write_corpus

from gptlab.config.errors import UserError
from gptlab.config.run import DataConfig, TokenizerConfig
from gptlab.data import prepare as prepare_module
from gptlab.data.prepare import prepare
from gptlab.data.tokenizer import bpe, gpt2
from gptlab.data.tokenizer.base import byte_characters
from gptlab.data.tokenizer.bpe import safe_parts
from gptlab.data.tokenizer.gpt2 import Gpt2Tokenizer, gpt2_tokenizer
from gptlab.data.tokenizer.tokenizer import load_tokenizer, train_tokenizer

ROOT = Path(__file__).parents[3]
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
"""Of OpenAI's encoder.json; tiktoken's `openai_public.py` names it."""
OPENAI_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # openai/gpt-2, src/encoder.py
)

# fmt: off
SNIPPETS = [
    "<|bos|>", "<|endoftext|>", "hello world", "don't", "WE'LL", "'THE'SO", "'s", "I'\u017f",
    "def f(x):\n    return x\n", "\r", "\r\n", "\n\n\n", "\n ", " \n", "\t\t", " ", "  ", "     ", "\u00a0",
    "\u3000", "\u2028", "\x1c", "\x85", "\v",
    "\0", "1", "1234567890", " 42", "३४५", "½", "\u216b", "naïve", "e\u0301", "中文字符", "日本語", "العربية", "हिन्दी",
    "😀", "👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "\ufeff", "\ufffd", "\U0010ffff", "_", "__init__", "====", "!?",
    "aaaa", "--", "\u200d", "A",
]
# fmt: on
NASTY = " ".join(SNIPPETS) * 2

texts = st.one_of(st.text(), st.lists(st.sampled_from(SNIPPETS)).map("".join))
many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)


@pytest.fixture(scope="module")
def ours() -> Gpt2Tokenizer:
    return gpt2_tokenizer()


@pytest.fixture(scope="module")
def vocabulary(ours: Gpt2Tokenizer) -> dict[str, int]:
    return ours.to_json()["model"]["vocab"]


@pytest.fixture(scope="module")
def hf(ours: Gpt2Tokenizer, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    """Hugging Face's GPT-2, from the parts that its own class is made of."""
    merges = [tuple(merge) for merge in ours.to_json()["model"]["merges"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.fixture(scope="module")
def published(ours: Gpt2Tokenizer) -> tiktoken.Encoding:
    """tiktoken's GPT-2: its own pattern; the ranks are ours, since its file would come from the network."""
    ranks = {ours.decode_bytes([index]): index for index in range(50_256)}
    return tiktoken.Encoding(
        "gpt2", pat_str=tiktoken_ext.openai_public.r50k_pat_str, mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 50_256}, explicit_n_vocab=50_257,
    )  # fmt: skip


@pytest.fixture(scope="module")
def openai_files(vocabulary: dict[str, int]) -> dict[str, bytes]:
    """encoder.json and vocab.bpe under the names that transformers gives them."""
    merges = (ROOT / "gptlab" / "data" / "tokenizer" / gpt2.MERGES_FILE).read_bytes()
    return {"vocab.json": json.dumps(vocabulary).encode(), "merges.txt": gzip.decompress(merges)}


@pytest.fixture
def openai_folder(openai_files: dict[str, bytes], tmp_path: Path) -> Path:
    folder = tmp_path / "openai"
    folder.mkdir()
    for name, content in openai_files.items():
        (folder / name).write_bytes(content)
    return folder


# --- ids and bytes ---


def test_every_id_is_openais(vocabulary: dict[str, int]) -> None:
    """Written as OpenAI wrote it, the vocabulary is their encoder.json byte for byte."""
    assert hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest() == ENCODER_SHA256


def test_known_ids(ours: Gpt2Tokenizer) -> None:
    assert (ours.kind, ours.vocab_size, ours.bos_id, ours.bos_token) == ("gpt2", 50_257, 50_256, "<|endoftext|>")
    known = {
        "Hello world": [15496, 995], " the": [262], "!": [0], "\n": [198], " ": [220], "\0": [188], "\n\n": [628],
        "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29],
    }  # fmt: skip
    assert {text: ours.encode(text).tolist() for text in known} == known
    assert ours.decode([50_256, *ours.encode("x"), 50_256]) == "x"
    assert ours.token_bytes[[262, 50_256]].tolist() == [4, 0]
    assert 50_256 not in ours.encode(NASTY)


@given(text=texts)
@many
def test_bytes_are_exact(ours: Gpt2Tokenizer, text: str) -> None:
    ids = ours.encode(text)
    assert ids.dtype == np.int32
    assert ours.decode_bytes(ids) == text.encode()
    assert ours.token_bytes[ids].sum() == len(text.encode())


@given(text=texts)
@example(text=NASTY)
@many
def test_ids_equal_those_of_tokenizers_tiktoken_and_the_textbook(
    ours: Gpt2Tokenizer, hf: tokenizers.Tokenizer, published: tiktoken.Encoding, text: str
) -> None:
    ids = ours.encode(text).tolist()
    assert ids == hf.encode(text).ids
    assert ids == published.encode_ordinary(text)
    # The `regex` module knows older Unicode than the two engines; what it calls unassigned may be a letter to them.
    if all(ord(character) < 0x3000 or character in NASTY for character in text):
        pieces = regex.findall(OPENAI_PATTERN, text)
        assert ids == [token for piece in pieces for token in published._encode_single_piece(piece)]


def test_merges_are_applied_as_in_the_textbook(ours: Gpt2Tokenizer) -> None:
    place = sorted(range(256), key=byte_characters().__getitem__)  # of the ids 0..255; the oracle has them in order
    for text in ("Hello world, it's 2019!\n\n  naïve 😀", "unbelievably"):
        expected = [
            place.index(index) if index < 256 else index for index in bpe_ids(text, OPENAI_PATTERN, ours.merges)
        ]
        assert ours.encode(text).tolist() == expected


def test_both_engines_know_the_same_unicode(ours: Gpt2Tokenizer, hf: tokenizers.Tokenizer) -> None:
    """Code points between a letter, a digit and a space: the two regex engines could class one differently. Every one:
    test_tokenizer.py, whose engines these are; here a seventh of them, by this pattern."""
    some = [*range(0, 0xD800, 7), *range(0xE000, 0x32400, 7), *range(0xE0000, 0xE0200)]
    for start in range(0, len(some), 1 << 14):
        text = "".join(f"a{chr(code)}1{chr(code)} " for code in some[start : start + (1 << 14)])
        assert ours.encode(text).tolist() == hf.encode_batch_fast([text])[0].ids


def test_lone_surrogates_are_refused(ours: Gpt2Tokenizer) -> None:
    with pytest.raises(UserError, match="lone surrogate"):
        ours.encode("a\ud800b")


# --- long texts ---


@given(text=texts, characters=st.integers(1, 9))
@example(text="a\n\nb" * 5, characters=1).via("two newlines are two pieces before a letter, one at an end")
@example(text="1\n2 !\n\n?\r\n" * 5, characters=1).via("digits and signs before blanks")
@many
def test_safe_parts_change_no_id(ours: Gpt2Tokenizer, text: str, characters: int) -> None:
    parts = list(safe_parts(text, ours.pre_tokenizer, characters))
    assert "".join(parts) == text
    assert np.array_equal(np.concatenate([ours.encode(part) for part in parts]), ours.encode(text))


def test_long_documents_are_encoded_in_parts(ours: Gpt2Tokenizer) -> None:
    generator = random.Random(1)
    text = " ".join("".join(generator.choices(SNIPPETS, k=20)) for _ in range(9000))
    assert len(list(safe_parts(text, ours.pre_tokenizer))) >= 3
    assert max(map(len, safe_parts(text, ours.pre_tokenizer))) < 1.1 * bpe.PART_CHARACTERS
    assert np.array_equal(ours.encode(text), ours._encode_part(text))


@given(text=st.text(alphabet=" \t\n\r\u00a0\u3000\x1ca1.é'", max_size=30))
@example(text="a   \rb  \n").via("newlines are blanks like the others")
@example(text=".\n   a   ").via("the last blank goes with a letter; at the end there is none")
@many
def test_taking_out_long_blanks_changes_no_id(ours: Gpt2Tokenizer, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "LONG_BLANK", 2)
        pieces = [ours._ids(encoding, piece) for encoding, piece in ours._around_blanks(text)]
    assert np.array_equal(np.concatenate(pieces), ours.encode(text))


@pytest.mark.parametrize(
    "text",
    ["7" * 200_000, " " * 1_000_000, "x" + " \n" * 500_000 + "x\n", "\u3000" * 350_000 + "é"],
    ids=["digits", "spaces", "blanks", "wide"],
)  # fmt: skip
def test_long_texts_without_a_break(ours: Gpt2Tokenizer, hf: tokenizers.Tokenizer, text: str) -> None:
    """tiktoken's regex gives up on some of these. More of them: test_tokenizer.py, by the same engine."""
    ids = ours.encode(text)
    assert ours.decode_bytes(ids) == text.encode()
    assert ids.tolist() == hf.encode_batch_fast([text])[0].ids


# --- on disk ---


def test_save_and_load(ours: Gpt2Tokenizer, tmp_path: Path) -> None:
    ours.save(tmp_path)
    assert load_tokenizer(tmp_path) is ours
    assert pickle.loads(pickle.dumps(ours)) is ours  # a worker process makes its own


def test_transformers_loads_what_is_saved_and_agrees(ours: Gpt2Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours.save(tmp_path)
    generator = random.Random(1)
    some = ["", "a<|endoftext|> b", NASTY, *("".join(generator.choices(SNIPPETS, k=20)) for _ in range(50))]
    for loader in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        theirs = loader.from_pretrained(tmp_path)
        assert (len(theirs), theirs.bos_token_id, theirs.eos_token_id) == (50_257, 50_256, 50_256)
        for text in some:
            ids = ours.encode(text).tolist()
            assert theirs(text, add_special_tokens=False)["input_ids"] == ids
            assert theirs.decode(ids) == text
    theirs.save_pretrained(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again") is ours


def test_transformers_folders_load(ours: Gpt2Tokenizer, openai_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert load_tokenizer(openai_folder) is ours
    theirs = transformers.GPT2Tokenizer.from_pretrained(openai_folder)
    assert theirs("Hello world")["input_ids"] == [15496, 995]
    theirs.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved") is ours
    (openai_folder / "merges.txt").write_bytes((openai_folder / "merges.txt").read_bytes().replace(b"\n", b"\r\n"))
    assert load_tokenizer(openai_folder) is ours


@pytest.fixture(scope="module")
def hub_form(ours: Gpt2Tokenizer) -> str:
    """tokenizer.json as the hub's gpt2 has had it since 2019: merges as lines, parts of today left out."""
    content = ours.to_json()
    model = content["model"]
    model |= {"merges": [" ".join(merge) for merge in model["merges"]]}
    model |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    for part in ("type", "byte_fallback", "ignore_merges"):
        del model[part]
    special = {"id": 50_256, "special": True, "content": "<|endoftext|>", "lstrip": False, "normalized": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    content |= {"added_tokens": [special], "pre_tokenizer": byte_level, "post_processor": dict(byte_level)}
    return json.dumps(content)


def test_the_hubs_file_loads(ours: Gpt2Tokenizer, hub_form: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(hub_form)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    assert load_tokenizer(tmp_path) is ours


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "prefix space": lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
    "no regex": lambda c: c["pre_tokenizer"].update(use_regex=False),
    "an added token": lambda c: c["added_tokens"].append({"id": 50_257, "content": "<|im_start|>"}),
    "added token no object": lambda c: c.update(added_tokens=[5]),
    "an entry more": lambda c: c["model"]["vocab"].update({"<|pad|>": 50_257}),
    "another name": lambda c: c["model"]["vocab"].update({"<|eot|>": c["model"]["vocab"].pop("<|endoftext|>")}),
    "two ids swapped": lambda c: c["model"]["vocab"].update(a=65, b=64),
    "a merge less": lambda c: c["model"]["merges"].pop(),
    "merges swapped": lambda c: c["model"]["merges"].insert(0, c["model"]["merges"].pop()),
    "merge a number": lambda c: c["model"]["merges"].append(5),
    "normalizer": lambda c: c.update(normalizer={"type": "NFC"}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_other_vocabularies_are_refused(
    hub_form: str, tmp_path: Path, damage: Callable[[dict[str, Any]], object]
) -> None:
    content = json.loads(hub_form)
    damage(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"tokenizer\.json is neither a tokenizer that gptlab wrote nor") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("vocab.json", lambda data: data.replace(b'"!": 0', b'"!": 50257'), "its entries differ from GPT-2's"),
        ("vocab.json", lambda data: b"[" + data + b"]", "not an object"),
        ("merges.txt", lambda data: data[:-10], "its merges differ from GPT-2's"),
        ("merges.txt", lambda data: b"\xff" + data, "its merges differ"),
        ("merges.txt", None, "cannot read merges.txt"),
        ("tokenizer_config.json", lambda data: b'{"add_prefix_space": true}', "add_prefix_space"),
        ("added_tokens.json", lambda data: b'{"<|im_start|>": 50257}', "more entries"),
    ],
)
def test_other_vocabulary_files_are_refused(
    openai_folder: Path, name: str, change: Callable[[bytes], bytes] | None, expected: str
) -> None:
    path = openai_folder / name
    data = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    if change is not None:
        path.write_bytes(change(data))
    with pytest.raises(UserError, match=expected) as caught:
        load_tokenizer(openai_folder)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


# --- as part of gptlab ---


def test_the_merges_and_their_license_are_in_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    copytree(ROOT / "gptlab/data", source / "gptlab/data", ignore=ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = ZipFile(wheel).namelist()
    assert {"gptlab/data/tokenizer/gpt2_merges.txt.gz", "gptlab/data/tokenizer/gpt2_merges.LICENSE.txt"} <= set(names)
    assert sum("license" in name.lower() for name in names) >= 2


def test_a_damaged_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2, "MERGES_SHA256", "0" * 64)
    with pytest.raises(UserError, match="install gptlab again"):
        Gpt2Tokenizer()
    monkeypatch.setattr(gpt2, "MERGES_FILE", "gpt2.py")
    with pytest.raises(UserError, match="install gptlab again"):
        Gpt2Tokenizer()


def test_it_is_made_once_and_fast() -> None:
    started = time.process_time()
    Gpt2Tokenizer()
    assert time.process_time() - started < 1.5  # 0.2 s, measured on a quiet machine
    assert gpt2_tokenizer() is gpt2_tokenizer()


def test_preparing_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path / "corpus")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("GPT-2's tokenizer is not trained")

    monkeypatch.setattr(prepare_module, "train_tokenizer", never)
    data = DataConfig(source=(str(corpus),), cache_dir=str(tmp_path / "cache"), val_fraction=0.2)
    prepared = prepare(data, TokenizerConfig(kind="gpt2"))
    assert prepared.tokenizer is gpt2_tokenizer()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["tokens"]
    tokens = prepared.train.read(0, prepared.train.n_tokens)
    assert tokens[0] == 50_256
    lines = (corpus / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    n_bytes = sum(len(json.loads(line)["text"].encode()) for line in lines)
    assert prepared.train.n_bytes + prepared.val.n_bytes == n_bytes
    assert prepared.statistics["tokenizer"]["vocab_size"] == 50_257


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path / "cache"))
    corpus, out = write_corpus(tmp_path / "corpus"), tmp_path / "out"
    assert command(["tokenizer", "train", "--kind", "gpt2", "--data", corpus, "--out", out])[0] == 0
    code, shown, _ = command(["tokenizer", "eval", out, "--data", corpus])
    assert code == 0
    assert "gpt2 tokenizer of 50,257 entries" in shown
    assert "every document comes back byte for byte" in shown
    code, shown, _ = command(["data", "prepare", "--data", corpus, "--tokenizer", "gpt2", "--val-fraction", "0.2"])
    assert code == 0
    assert "gpt2 50,257" in command(["data", "list"])[1]
    code, shown, _ = command(["plan", "quickstart", "--depth", "1", "--steps", "1", "--tokenizer.kind", "gpt2"])
    assert code == 0
    assert "50,257 entries (GPT-2's vocabulary)" in shown


def test_a_run_trains_with_it(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    few = {"batch__total_tokens": 4 * 32, "eval__micro_sequences": 4, "eval__tokens": 128, "sample__max_tokens": 1}
    run = train(tmp_path, "run", tokenizer__kind="gpt2", steps=2, checkpoint__every_steps=2, **few)
    assert load_tokenizer(run / "tokenizer") is gpt2_tokenizer()
    assert [line["step"] for line in lines_of(run, "train")] == [1, 2]
    code, shown, error = command(["sample", run, "--prompt", "the fox", "--max-tokens", "3"])
    assert (code, error) == (0, "")
    assert shown.startswith("the fox")


def test_training_a_tokenizer_of_this_kind_reads_no_text(ours: Gpt2Tokenizer) -> None:
    def unread() -> Any:
        raise AssertionError("no text is needed")
        yield

    assert train_tokenizer(TokenizerConfig(kind="gpt2"), unread(), bos=True) is ours
