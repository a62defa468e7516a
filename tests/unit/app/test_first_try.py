"""What people try first: their own text in one file, with whatever tokenizer, and no prompts at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as tiny
from hypothesis import given
from hypothesis import strategies as st

from gptlab.config.errors import UserError
from gptlab.config.run import DataConfig, TokenizerConfig
from gptlab.data.prepare import PreparedData, prepare
from gptlab.data.tokenizer.tokenizer import CharTokenizer
from gptlab.data.tokens.shards import TokenSplit
from gptlab.eval.sampling import PROMPT_CHARACTERS, validation_prompts
from gptlab.runtime.records.console import Console

BOOK = "".join(f"Chapter {n}\n\nIt was the {n}th of the month, and père Noël took a nap.\n" for n in range(60))
BYTE = TokenizerConfig(kind="byte")


def one_document(folder: Path, kind: str) -> Path:
    (folder / "book").mkdir()
    if kind == "JSONL of one record":
        (folder / "book.jsonl").write_text(json.dumps({"text": BOOK}), encoding="utf-8")
        return folder / "book.jsonl"
    (folder / "book" / "book.txt").write_text(BOOK, encoding="utf-8")
    return folder / "book" if kind == "folder of one file" else folder / "book" / "book.txt"


def prepared(
    source: Path, tokenizer: TokenizerConfig = BYTE, console: Console | None = None, **more: Any
) -> PreparedData:
    data = DataConfig(source=(str(source),), cache_dir=str(source.parent / "cache"), **more)
    return prepare(data, tokenizer, console=console)


@pytest.mark.parametrize("kind", ["text file", "folder of one file", "JSONL of one record"])
def test_one_document_is_divided_at_its_tail_and_that_is_said(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = one_document(tmp_path, kind)
    with Console() as console:
        found = prepared(source, console=console, split="hash")
    assert "is one document, so its last 5% validate (hash needs two documents)" in capsys.readouterr().out
    asked = prepared(source, split="tail")
    assert (found.split, found.fingerprint, found.folder) == ("tail", asked.fingerprint, asked.folder)
    sides = [found.tokenizer.decode(s.read(1, s.n_tokens - 1)) for s in (found.train, found.val)]
    assert "".join(sides) == BOOK
    assert len(sides[0]) == int(len(BOOK) * 0.95)


def test_two_documents_are_divided_by_their_hashes_and_copies_of_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text('{"text": "one"}\n{"text": "other"}\n')
    assert prepared(tmp_path / "two.jsonl").split == "hash"
    (tmp_path / "two.jsonl").write_text('{"text": "one"}\n{"text": "one"}\n')
    with pytest.raises(
        UserError,
        match=r"all 2 are the same; --data\.split tail \(gptlab data: --split tail\) validates on text that tr",
    ):
        prepared(tmp_path / "two.jsonl")


def test_a_run_on_one_file_is_resumed_repeated_and_measured_on_the_same_tail(tmp_path: Path) -> None:
    book = one_document(tmp_path, "text file")
    flags = {"data.source": book, "tokenizer.kind": "char", "sample.prompts": [], "sample.from-validation": 3}
    code, out, err = tiny.command(["train", *tiny.arguments(tmp_path, "straight", flags)])
    assert code == 0, err
    assert "is one document, so its last 15% validate" in out
    assert "read      1 document from 1 file\n" in out
    assert json.loads((tmp_path / "straight" / "config.json").read_text())["data"]["split"] == "tail"
    with tiny.killed_at("train", 6):
        tiny.command(["train", *tiny.arguments(tmp_path, "killed", flags)])
    code, _, err = tiny.command(["train", "--resume", tmp_path / "killed"])
    assert code == 0, err
    again = ["train", "--from", tmp_path / "straight", "--run-dir", tmp_path / "again"]
    code, _, err = tiny.command(again)
    assert code == 0, err
    assert "is not that of" not in err  # neither data nor code
    for other in ("killed", "again"):
        assert tiny.differences(tiny.outcome(tmp_path / "straight"), tiny.outcome(tmp_path / other)) == []
    code, out, err = tiny.command(["eval", tmp_path / "straight"])
    assert code == 0, err
    assert f"val_loss: {tiny.lines_of(tmp_path / 'straight', 'eval')[-1]['val_loss']:.6f}" in out
    assert "is not what it was" not in err
    # Samples continue the text that validates, and show where it ends.
    samples = tiny.lines_of(tmp_path / "straight", "sample")
    held_out = BOOK[int(len(BOOK) * 0.85) :]
    assert len(samples) == 2 * 3
    assert len({sample["prompt"] for sample in samples}) == 3
    assert all(sample["prompt"] in held_out and sample["text"].startswith(sample["prompt"]) for sample in samples)
    log = (tmp_path / "straight" / "log.txt").read_text(encoding="utf-8")
    assert f"sample at step 12 | prompt: {json.dumps(samples[-1]['prompt'], ensure_ascii=False)}\n" in log
    code, out, err = tiny.command(["sample", tmp_path / "straight", "--max-tokens", "2"])
    assert code == 0, err
    assert all(sample["prompt"] in out for sample in samples)


def test_quickstart_takes_a_character_tokenizer_on_any_text(tmp_path: Path) -> None:
    """Its prompts were Python, whose characters another text need not have."""
    book = tmp_path / "book.txt"
    book.write_text("日本の 文章\n" * 400, encoding="utf-8")
    flags = {"data.source": book, "tokenizer.kind": "char", "steps": 1, "sample.every_steps": 1}
    words = tiny.arguments(tmp_path, "run", flags)
    at = words.index("--sample.prompts")
    code, _, err = tiny.command(["train", *words[:at], *words[at + 3 :]])
    assert code == 0, err
    prompts = {str(sample["prompt"]) for sample in tiny.lines_of(tmp_path / "run", "sample")}
    assert prompts
    assert all(prompt in book.read_text(encoding="utf-8") for prompt in prompts)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"a.txt": b"one", "b.md": b"two", "latin1.txt": b"caf\xe9"},
         "2 documents from 3 files; skipped: latin1.txt (not UTF-8)"),
        ({"a.txt": b"one", "b.md": b"two"}, "2 documents from 2 files"),
        ({"a.jsonl": b'{"text": "one"}\n{"text": null}\n{"text": "two"}\n', "b.txt": b""},
         "2 documents from 2 files; skipped: b.txt (empty), 1 more null"),
        ({"a.jsonl": b'{"text": "one"}\n{"text": "two"}', **{f"{n}.txt": b"\0" for n in range(5)}},
         "2 documents from 6 files; skipped: 0.txt (not UTF-8), 1.txt (not UTF-8), 2.txt (not UTF-8), "
         "2 more not UTF-8 text"),
    ],
)  # fmt: skip
def test_what_was_read_is_said(tmp_path: Path, files: dict[str, bytes], says: str) -> None:
    (tmp_path / "notes").mkdir()
    for name, content in files.items():
        (tmp_path / "notes" / name).write_bytes(content)
    words = ["--data", tmp_path / "notes", "--tokenizer", "byte", "--cache-dir", tmp_path / "cache"]
    for _ in range(2):  # said of what is found prepared, too
        code, out, err = tiny.command(["data", "prepare", *words])
        assert code == 0, err
        assert out.startswith(f"read: {says}\n") or f"\nread: {says}\n" in out


def split_of(texts: list[str]) -> tuple[TokenSplit, CharTokenizer]:
    tokenizer = CharTokenizer(sorted({c for text in texts for c in text}), bos=True)
    tokens = [np.concatenate([[tokenizer.bos_id], tokenizer.encode(text)]) for text in texts]
    starts = np.cumsum([0, *map(len, tokens)]).astype(np.int64)
    hashes = np.arange(len(texts), dtype=np.uint64)[::-1].copy()
    return TokenSplit([np.concatenate(tokens).astype(np.uint32)], starts, hashes, 0), tokenizer


@given(
    texts=st.lists(st.text(st.sampled_from("aéß日 \n\t.")), min_size=1, max_size=6).filter(lambda t: any(t)),
    count=st.integers(1, 4),
)
def test_prompts_are_pieces_of_the_validation_text(texts: list[str], count: int) -> None:
    split, tokenizer = split_of(texts)
    prompts = validation_prompts(split, tokenizer, count)
    assert prompts == validation_prompts(split, tokenizer, count)
    assert 1 <= len(prompts) == len(set(prompts)) <= count
    assert all(len(prompt) <= PROMPT_CHARACTERS and prompt == prompt.rstrip() for prompt in prompts)
    assert all(any(prompt in text for text in texts) for prompt in prompts)


def test_of_one_long_text_there_are_as_many_as_are_asked_for() -> None:
    """Where some of its places give none, as between two lines far apart, or the same one as others."""
    text = ("the same line\n" * 3 + "".join(f"line {i} of many\n" for i in range(10))) * 9 + "x" * 900
    text += "".join(f"{i} is another\n" for i in range(60))
    assert len(validation_prompts(*split_of([text]), 30)) == 30


def test_prompts_end_with_a_line_or_else_with_a_word_or_else_with_a_character() -> None:
    lines, words, neither = "# Title\n\n" + "x" * 200, "of words " * 40, "日" * 200
    split, tokenizer = split_of([neither, words, "\n\n" + lines])  # in validation's order: the last one first
    assert validation_prompts(split, tokenizer, 3) == ("# Title", ("of words " * 7)[:-1], "日" * 64)
