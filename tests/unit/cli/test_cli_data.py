"""`gptlab data`: what it prints, and the one line it says when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptlab.cli.data import main
from gptlab.cli.main import main as gptlab
from gptlab.data.tokenizer.tokenizer import CharTokenizer


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(50):
        (folder / f"{number}.txt").write_text(f"Note {number}.\n" + "All work and no play. " * (number + 1))
    (folder / "empty.txt").touch()
    return folder


def test_list_names_corpora_formats_and_what_is_prepared(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    before = capsys.readouterr().out
    for word in ("stdlib", ".jsonl", ".parquet", "nothing yet", str(corpus.parent / "cache")):
        assert word in before
    main(["prepare", "--data", str(corpus), "--tokenizer", "byte"])
    capsys.readouterr()
    main(["list"])
    after = capsys.readouterr().out
    (entry,) = [line for line in after.splitlines() if str(corpus) in line]
    assert "byte 257" in entry
    assert "hash 0.05" in entry
    (shard,) = (corpus.parent / "cache" / "tokens").glob("*/train_000000.bin")
    shard.write_bytes(shard.read_bytes()[:-1])
    main(["list"])
    assert "damaged (train_000000.bin has" in capsys.readouterr().out


def test_prepare_says_what_was_made_and_where(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["prepare", "--data", str(corpus), "--tokenizer", "bpe", "--vocab-size", "270", "--val-fraction", "0.2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    (folder,) = [p for p in (corpus.parent / "cache" / "tokens").iterdir() if p.is_dir()]
    assert str(folder) in out
    assert "train: " in out
    assert "validation: " in out
    assert "encoding" in out
    main(arguments)
    assert "encoding" not in capsys.readouterr().out  # found, not made


@pytest.mark.parametrize("name", [".", "tokenizer.json"])
def test_a_tokenizer_is_named_by_its_folder_or_file(
    corpus: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = corpus.parent / "tokenizer"
    CharTokenizer(map(chr, range(128)), bos=True).save(folder)
    assert main(["inspect", "--data", str(corpus), "--tokenizer", str(folder / name), "--seq-len", "64"]) == 0
    assert "char, 129 entries" in capsys.readouterr().out


def test_prepare_takes_corpora_with_commas_as_train_does(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus / "7,8.txt").write_text("a name with a comma")
    for words in ([f"{corpus}/1.txt", f"{corpus}/7,8.txt"], [f"{corpus}/1.txt,{corpus}/2.txt"]):
        assert main(["prepare", "--data", *words, "--tokenizer", "byte"]) == 0
        assert "read: 2 documents from 2 files" in capsys.readouterr().out
        assert main(["prepare", f"{corpus}/3.txt", "--val-source", *words, "--tokenizer", "byte"]) == 0
        assert "validation: 2 documents" in capsys.readouterr().out


def test_inspect_shows_counts_fates_and_a_row(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--data", str(corpus), "--tokenizer", "byte", "--seq-len", "64", "--row", "3"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    texts = [path.read_text() for path in corpus.glob("[0-9]*.txt")]
    documents = next(line for line in lines if line.startswith("documents "))
    assert sum(map(int, documents.split()[1:])) == 50
    n_bytes = next(line for line in lines if line.startswith("bytes ") and "per" not in line).replace(",", "")
    assert sum(map(int, n_bytes.split()[1:])) == sum(len(text) for text in texts)
    assert any(line.startswith("read ") and line.endswith("(empty)") for line in lines)
    assert "tokenizer byte, 257 entries" in lines
    assert "cropped 0 0.00% of tokens" in lines
    assert any(line.startswith("rows of 64 tokens (packed, long documents cut): ") for line in lines)
    assert "row 3 of the first epoch, 65 tokens:" in lines
    assert any(line.startswith("| <BOS>") for line in lines)


def test_inspect_counts_random_rows_as_drawn(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(corpus), "--tokenizer", "byte", "--rows", "random", "--seq-len", "64"]) == 0
    out = capsys.readouterr().out
    assert "(random, drawn with replacement)" in out
    assert "trained on again" in out
    assert "in no row" in out
    assert "cropped" not in out


def test_no_control_characters_of_data_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "\x1b[2Jred.txt"
    path.write_text("all \x1b]0;work\x07 and\x9b no play\n" * 100)
    assert main(["inspect", str(path), "--tokenizer", "byte", "--seq-len", "64"]) == 0
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "[2Jred.txt" in out
    assert "all ]0;work and no play\n" in out
    assert not set(out) & {"\x1b", "\x07", "\x9b"}


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert gptlab(["data", "--help"]) == 0
    assert "inspect" in capsys.readouterr().out
    for command, flag in (("list", "--cache-dir"), ("prepare", "--val-fraction"), ("inspect", "--seq-len")):
        assert gptlab(["data", command, "--help"]) == 0
        assert flag in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "prepair"], "no such command, there are list, prepare, inspect (nearest: prepare)"),
        (["data", "prepare", "--data", "nowhere"], "nowhere"),
        (["data", "prepare", "--tokenizer", "bite"], "--tokenizer bite: neither bpe, gpt2, char, byte nor a folder"),
        (["data", "prepare", "--split", "head"], "split"),
        (["data", "prepare", "--val-fraction", "1.5"], "data.val_fraction = 1.5: must be between 0 and 1"),
        (["data", "prepare", "--data", "{corpus}", "--vocab-size", "5000"], "tokenizer.vocab_size = 5000"),
        (["data", "inspect", "--data", "{corpus}", "--tokenizer", "byte", "--seq-len", "999999"], "model.seq_len"),
        (["data", "inspect", "--data", "{corpus}", "--tokenizer", "byte", "--row", "99999"], "there are rows 0 to"),
        (["data", "inspect", "--row", "-1"], "--row = -1: must not be negative"),
        (["data", "inspect", "--seed", "-1"], "--seed = -1: must be between 0 and"),
        (["data", "inspect", "--rows", "random", "--seq-len", "0"], "--seq-len = 0: must be greater than zero"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    corpus: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gptlab([argument.replace("{corpus}", str(corpus)) for argument in arguments]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
