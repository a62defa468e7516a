"""The process behind the prompt box, with a small program in the place of a model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gptlab.config.errors import UserError
from gptlab.report.dashboard import model_process
from gptlab.report.dashboard.model_process import ModelProcess, checked_settings

PROGRAM = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if "run" in asked:
        words, asked_for = iter(asked["prompt"].split()), asked
        answer = {"error": "no such run"} if asked["run"] == "missing" else {"step": os.getpid()}
    else:
        word = next(words, None)
        if word == "die":
            sys.exit("it died of this")
        if word == "hang":
            time.sleep(60)
        answer = {"end": True} if word is None else {"text": word}
    print(json.dumps(answer), flush=True)
"""
SETTINGS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 9, "seed": 1}


@pytest.fixture
def started() -> Iterator[Callable[..., ModelProcess]]:
    made = []

    def start(**words: Any) -> ModelProcess:
        made.append(ModelProcess((sys.executable, "-S", "-c", PROGRAM), **words))
        return made[-1]

    yield start
    for process in made:
        process.close()


def ask(process: ModelProcess, prompt: str, run: str = "run") -> tuple[int, list[str]]:
    """The number of the process that answered, and the text."""
    first, *tokens = process.answer(Path(run), {"prompt": prompt, **SETTINGS})
    return first["step"], [token["text"] for token in tokens]


def test_one_process_answers_all_prompts(started: Callable[..., ModelProcess]) -> None:
    process = started()
    assert not process.is_running
    number, text = ask(process, "a b c")
    assert text == ["a", "b", "c"]
    assert ask(process, "d") == (number, ["d"])
    assert process.is_running


def test_an_answer_that_nobody_reads_ends(started: Callable[..., ModelProcess]) -> None:
    process = started()
    with closing(process.answer(Path("run"), {"prompt": "a b c", **SETTINGS})) as answer:
        number = next(answer)["step"]
        assert next(answer) == {"text": "a"}
    assert ask(process, "x y") == (number, ["x", "y"])


def test_one_prompt_at_a_time(started: Callable[..., ModelProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_process, "BUSY_SECONDS", 0.01)
    process = started()
    with closing(process.answer(Path("run"), {"prompt": "a", **SETTINGS})) as answer:
        next(answer)
        with pytest.raises(UserError, match="another prompt"):
            ask(process, "b")
    assert ask(process, "b")[1] == ["b"]


def test_a_refused_run_is_an_error_and_the_process_stays(started: Callable[..., ModelProcess]) -> None:
    process = started()
    number, _ = ask(process, "a")
    with pytest.raises(UserError, match="no such run"):
        ask(process, "a", run="missing")
    assert ask(process, "a")[0] == number


def test_a_process_that_dies_says_why_and_another_one_answers(started: Callable[..., ModelProcess]) -> None:
    process = started()
    number, _ = ask(process, "a")
    with pytest.raises(UserError, match="exit code 1: it died of this"):
        ask(process, "a die b")
    assert not process.is_running
    again, text = ask(process, "b")
    assert (again != number, text) == (True, ["b"])


def test_files_of_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command, with a torch that prints and then fails: nothing of it is taken for an answer."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "json.py").write_text("raise SystemExit('json.py was run')")
    (tmp_path / "torch.py").write_text("print('noise', flush=True)\nraise ImportError('no torch today')")
    monkeypatch.chdir(tmp_path / "runs")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with closing(ModelProcess()) as process, pytest.raises(UserError, match="exit code 1: ImportError: no torch today"):
        ask(process, "a")


def test_a_process_that_hangs_is_killed(started: Callable[..., ModelProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_process, "TOKEN_SECONDS", 0.2)
    process = started()
    with pytest.raises(UserError, match=r"no answer within 0\.2 seconds"):
        ask(process, "a hang")
    assert not process.is_running


def test_an_idle_process_is_ended(started: Callable[..., ModelProcess]) -> None:
    process = started(idle_seconds=0.05)
    ask(process, "a")
    until = time.monotonic() + 10
    while process.is_running and time.monotonic() < until:
        time.sleep(0.01)
    assert not process.is_running


def test_a_process_ends_with_the_server(started: Callable[..., ModelProcess]) -> None:
    process = started()
    answer = process.answer(Path("run"), {"prompt": "a b", **SETTINGS})
    next(answer)
    process.close()
    assert not process.is_running
    with pytest.raises(UserError, match="is ending"):
        next(answer)


GOOD = {"prompt": "a", "temperature": 0.5, "top_k": 0, "top_p": 0.9, "min_p": 0.1, "max_tokens": 10, "seed": 3}


def test_settings_are_those_that_were_asked_for() -> None:
    assert checked_settings({**GOOD, "temperature": 1, "other": "x"}) == {**GOOD, "temperature": 1.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", None), ("prompt", 3), ("temperature", -1), ("temperature", "1"), ("temperature", True),
        ("temperature", float("nan")), ("top_k", 1.5), ("top_k", -1), ("max_tokens", 0), ("max_tokens", 10**9),
        ("top_p", 0), ("top_p", 1.5), ("min_p", 1), ("seed", -1), ("seed", None), ("seed", 2**60),
        ("seed", 10**400), ("temperature", 10**400),
    ],
)  # fmt: skip
def test_other_settings_are_refused(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^{name} must be"):
        checked_settings({**GOOD, name: value})
    with pytest.raises(UserError, match=f"^{name} must be"):
        checked_settings({key: GOOD[key] for key in GOOD if key != name})
