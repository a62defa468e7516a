"""Trained runs answer prompts line by line, as the dashboard asks them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import train

from gptlab.app.prompt_answers import ALTERNATIVES, Answers
from gptlab.app.run.loaded_run import load_run
from gptlab.config.errors import UserError
from gptlab.eval.continuation import Drawing, continue_text, text_of
from gptlab.runtime.records.console import Console

ASKED = {
    "prompt": "the quick", "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 12, "seed": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return train(folder, "answering", sample__prompts=())


def tokens(answers: Answers) -> list[dict[str, Any]]:
    found = []
    while "end" not in (token := answers.answer({"next": True})):
        found.append(token)
    return found


def test_the_text_is_that_of_continue_text(run: Path) -> None:
    answers = Answers()
    assert answers.answer({"run": str(run), **ASKED}) == {"step": 12}
    drawn = tokens(answers)
    loaded = load_run(str(run), console=Console())
    (expected,) = continue_text(loaded.model, loaded.tokenizer, "the quick", Drawing(max_tokens=12), seed=5)
    with pytest.raises(UserError, match="samples = 0: must be greater than zero"):
        continue_text(loaded.model, loaded.tokenizer, "the quick", Drawing(max_tokens=12), samples=0)
    assert load_run(str(run), checkpoint=loaded.step).step == loaded.step
    assert "".join(token["text"] for token in drawn) == "".join(text_of(expected))
    assert answers.answer({"next": True}) == {"end": True}
    for token in drawn:
        shares = [share for _, share in token["alternatives"]]
        assert len(shares) == ALTERNATIVES
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1 + 1e-6  # rounding of float32
        own = dict(token["alternatives"]).get(token["name"], token["probability"])
        assert own == token["probability"] <= shares[0]


def test_top_p_and_min_p_are_those_of_the_question(run: Path) -> None:
    """They change the text, to that of the same drawing."""
    answers, loaded = Answers(), load_run(str(run))
    answers.answer({"run": str(run), **ASKED})
    without = "".join(token["text"] for token in tokens(answers))
    for setting in ({"top_p": 0.02}, {"min_p": 0.9}):
        answers.answer({"run": str(run), **ASKED, **setting})
        drawing = Drawing(max_tokens=12, **setting)  # type: ignore[arg-type]
        (expected,) = continue_text(loaded.model, loaded.tokenizer, "the quick", drawing, seed=5)
        drawn = "".join(token["text"] for token in tokens(answers))
        assert drawn == "".join(text_of(expected)) != without


def test_a_question_ends_the_text_before_it(run: Path) -> None:
    answers, other = Answers(), Answers()
    answers.answer({"run": str(run), **ASKED})
    answers.answer({"next": True})
    for one in (answers, other):
        one.answer({"run": str(run), **ASKED, "temperature": 0, "prompt": "fox"})
    assert tokens(answers) == tokens(other)


def test_half_a_character_has_a_name_and_waits_for_its_other_half(run: Path) -> None:
    """Of a byte tokenizer: é is two tokens."""
    answers = Answers()
    answers.answer({"run": str(run), **ASKED})
    answers._tokens = iter([type("Token", (), {"piece": piece, "probability": 0.5, "alternatives": ()})()
                            for piece in (b"\xc3", b"\xa9", b"\xff")])  # fmt: skip
    assert [(token["text"], token["name"]) for token in tokens(answers)] == [
        ("", "\\xc3"), ("é", "\\xa9"), ("\N{REPLACEMENT CHARACTER}", "\\xff"),
    ]  # fmt: skip


def test_the_newest_checkpoint_answers(run: Path, tmp_path: Path) -> None:
    """A run that trains has another one between two prompts."""
    training = shutil.copytree(run, tmp_path / "training")
    newest = training / "checkpoints/step-00000012"
    newest.rename(tmp_path / "later")
    answers = Answers()
    assert answers.answer({"run": str(training), **ASKED}) == {"step": 8}
    (tmp_path / "later").rename(newest)
    assert answers.answer({"run": str(training), **ASKED}) == {"step": 12}


def test_a_run_that_was_trained_anew_in_its_folder_answers(run: Path, tmp_path: Path) -> None:
    """Its newest checkpoint has the name of the one before."""
    again = shutil.copytree(run, tmp_path / "again")
    answers, fresh = Answers(), Answers()
    answers.answer({"run": str(again), **ASKED})
    before = tokens(answers)
    shutil.rmtree(again)
    shutil.copytree(train(run.parent, "other", sample__prompts=(), seed=99), again)
    for one in (answers, fresh):
        assert one.answer({"run": str(again), **ASKED}) == {"step": 12}
    assert before != (now := tokens(answers))
    assert now == tokens(fresh)


def test_what_cannot_be_loaded_is_one_line(run: Path, tmp_path: Path) -> None:
    answers = Answers()
    with pytest.raises(UserError, match="there is no run folder"):
        answers.answer({"run": str(tmp_path / "none"), **ASKED})
    assert answers.answer({"run": str(run), **ASKED}) == {"step": 12}
