"""`gptlab lab new`: what a request for a run makes of a lab, before anything is trained."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from tiny_runs import arguments, write_corpus

import gptlab
from gptlab.app.new_lab import new_lab
from gptlab.cli.arguments.parser import read_request
from gptlab.cli.lab import NewArguments
from gptlab.config.errors import UserError
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.proposal import changed_files
from gptlab.runtime.records.console import Console

TOKENS_A_STEP = 2 * 4 * 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labs")
    write_corpus(folder / "corpus", documents=60)
    return folder


def make(folder: Path, name: str, *length: object) -> Lab:
    words = arguments(folder, "never")
    at = words.index("--run-dir")
    del words[at : at + 2]
    words[words.index("--steps") : words.index("--steps") + 2] = map(str, length)
    request = read_request(words, NewArguments, prog="gptlab lab new", description="")
    return new_lab(folder / name, request, words, Console(stream=io.StringIO()))


@pytest.mark.parametrize(
    ("length", "seconds", "steps"),
    [
        (("--minutes", 2), 120.0, None),
        (("--steps", 7), None, 7),
        (("--tokens", 10 * TOKENS_A_STEP + 5), None, 10),  # rounded down, as in a run
    ],
)
def test_length(folder: Path, length: tuple[object, ...], seconds: float | None, steps: int | None) -> None:
    lab = make(folder, "-".join(map(str, length)), *length)
    assert (lab.settings.seconds, lab.settings.steps) == (seconds, steps)
    assert changed_files(Path(gptlab.__file__).parents[1], lab.path / "code") == ()
    stored = lab.baseline_config()
    assert (stored["horizon.unit"], stored["horizon.amount"]) == (
        ("seconds", seconds) if steps is None else ("steps", steps)
    )


def test_no_lab_for_less_than_a_step(folder: Path) -> None:
    with pytest.raises(UserError, match="less than one step of 256 tokens"):
        make(folder, "short", "--tokens", 10)


def test_no_lab_for_a_length_in_flops(folder: Path) -> None:
    with pytest.raises(UserError, match="--minutes, --steps or --tokens"):
        make(folder, "flops", "--flops", 1e9)
    assert not (folder / "flops").exists()


def test_the_same_words_again_are_the_same_lab(folder: Path) -> None:
    one = make(folder, "lab", "--steps", 5)
    assert make(folder, "lab", "--steps", 5) == one
    with pytest.raises(UserError, match="is a lab already"):
        make(folder, "lab", "--steps", 6)


def test_no_lab_whose_runs_the_judge_would_refuse(folder: Path) -> None:
    with pytest.raises(UserError, match=r"has \d rows of 512 tokens, and the judge needs 16: hold out .*val-fraction"):
        make(folder, "few", "--steps", 5, "--model.seq-len", 512, "--batch.total-tokens", 2048)
    assert not (folder / "few").exists()
