"""`gptlab tokenizer train | eval`, as typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptlab.cli import main as cli
from gptlab.data.tokenizer.tokenizer import load_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over 12345 lazy dogs\n" * 50, encoding="utf-8")
    return path


def run(*words: object) -> int:
    return cli.main(["tokenizer", *map(str, words)])


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("gptlab: error: ")
    assert error.count("\n") == 1
    return error


def test_train_and_eval(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run("train", "--data", text, "--vocab-size", 280, "--max-digits", 1, "--out", out) == 0
    assert "bpe tokenizer of 280 entries" in capsys.readouterr().out
    tokenizer = load_tokenizer(out)
    assert (tokenizer.kind, tokenizer.vocab_size) == ("bpe", 280)

    assert run("eval", out, "--data", text) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if not line.startswith("enc"))
    size = text.stat().st_size
    tokens = len(tokenizer.encode(text.read_text()))
    assert f"1 documents, {size:,} bytes, {size:,} characters" in shown["text"]
    assert shown["tokens"].startswith(f"{tokens:,}: {size / tokens:.3f} bytes")
    used = len(set(tokenizer.encode(text.read_text()).tolist()))
    assert shown["vocabulary"] == f"{used} of 279 entries used ({used / 279:.1%})"
    assert "every document comes back byte for byte" in capsys.readouterr().out + "\n".join(shown.values())


def test_char_with_and_without_bos(text: Path, tmp_path: Path) -> None:
    assert run("train", "--kind", "char", "--data", text, "--out", tmp_path / "a") == 0
    assert run("train", "--kind", "char", "--no-bos", "--data", text, "--out", tmp_path / "b") == 0
    sizes = [load_tokenizer(tmp_path / name).vocab_size for name in "ab"]
    assert sizes == [len(set(text.read_text())) + 1, len(set(text.read_text()))]


def test_eval_stops_at_max_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("x" * 1000)
    assert (
        run("train", "--kind", "byte", "--data", f"{tmp_path}/a.txt,{tmp_path}/b.txt", "--out", tmp_path / "out") == 0
    )
    assert run("eval", tmp_path / "out", "--data", tmp_path, "--max-bytes", 1500) == 0
    assert "2 documents, 2,000 bytes" in capsys.readouterr().out


def test_eval_reports_a_tokenizer_that_is_not_exact(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("train", "--kind", "byte", "--data", text, "--out", tmp_path / "out")
    monkeypatch.setattr("gptlab.data.tokenizer.base.Tokenizer.decode_bytes", lambda self, ids: b"something else")
    assert run("eval", tmp_path / "out", "--data", text) == 1
    assert "NOT EXACT in 1 of 1 documents" in capsys.readouterr().out


def test_a_tokenizer_is_not_overwritten_by_accident(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "--kind", "byte", "--data", text, "--out", tmp_path / "out")
    assert run(*words) == 0
    assert run(*words) == 2
    assert "--overwrite" in error_line(capsys)
    assert run(*words, "--overwrite") == 0


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptlab.cli.tokenizer.train_tokenizer", None)
    assert run("train", "--data", text, "--out", text / "below" / "a") == 2
    assert f"cannot write the tokenizer to {text / 'below' / 'a'}: " in error_line(capsys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "nearest: train"),
        (["train"], "needs --out"),
        (["train", "--out", "o", "--vocab-size", "99"], "tokenizer.vocab_size = 99"),
        (["train", "--out", "o", "--kind", "wordpiece"], "kind"),
        (["train", "--out", "o", "--data", "nowhere"], "no corpus 'nowhere'"),
        (["train", "--out", "TEXT", "--data", "TEXT"], "is a file"),
        (["train", "--out", "o", "--data", "TEXT"], "the text does not give that many entries (nearest valid: 291)"),
        (["eval", "nowhere"], "no tokenizer in nowhere"),
        (["eval"], "needs FOLDER"),
        (["eval", "nowhere", "--max-bytes", "-1"], "--max-bytes = -1"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    words: list[str],
    expected: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*[str(text) if word == "TEXT" else word for word in words]) == 2
    assert expected in error_line(capsys)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("words", [[], ["--help"], ["train", "--help"], ["eval", "--help"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 0
    assert "usage: gptlab tokenizer" in capsys.readouterr().out
