"""Runs as processes. What the process does is a small program here, but for one test that trains."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Forked
from tiny_runs import arguments, lines_of, write_corpus
from written_runs import write_run

import gptlab
from gptlab.lab import launch as launching
from gptlab.lab.launch import Stop, launch
from gptlab.runtime.hardware.cpu import usable_cores
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.names import list_checkpoints, step_of


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces what runs in place of gptlab in the process; the watch over the launcher stays."""

    watch = launching._CHILD.partition("runpy.run_module")[0]

    def replace(program: str) -> None:
        monkeypatch.setattr(launching, "_CHILD", f"import sys, time\n{watch}{program}\n")

    return replace


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_exit_codes_come_back_as_they_are(child: Callable[[str], None], tmp_path: Path) -> None:
    child("sys.exit(int(sys.argv[2]))")
    run, log = tmp_path / "run", tmp_path / "log"
    assert [launch(run, [code], log=log, stop=Stop()) for code in ("0", "2", "75")] == [0, 2, 75]
    child("os.kill(os.getpid(), signal.SIGKILL)")
    assert launch(run, [], log=log, stop=Stop()) == 128 + signal.SIGKILL


def test_words_and_output_of_a_new_and_of_a_stopped_run(child: Callable[[str], None], tmp_path: Path) -> None:
    child("print(sys.argv[1:], flush=True); print('and this', file=sys.stderr)")
    run, log = tmp_path / "run", tmp_path / "logs" / "run.log"
    launch(run, ["quickstart", "--seed=3"], log=log, stop=Stop())
    launch(write_run(run, [4.0], status="preempted"), ["quickstart", "--seed=3"], log=log, stop=Stop())
    assert log.read_text() == (
        f"['train', 'quickstart', '--seed=3', '--run-dir', '{run}']\nand this\n"
        f"['train', '--resume', '{run}']\nand this\n"
    )
    RunDirectory(run).set_status("finished")
    assert launch(run, ["quickstart"], log=log, stop=Stop()) == 0
    assert log.read_text().count("and this") == 2


def test_the_package_is_this_one(child: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gptlab.py").touch()  # in the current folder
    monkeypatch.chdir(tmp_path)
    child("import gptlab; print(gptlab.__file__)")
    launch(tmp_path / "a", [], log=tmp_path / "log", stop=Stop())
    assert (tmp_path / "log").read_text().splitlines() == [gptlab.__file__]


def test_runs_that_are_compared_have_the_same_threads_whatever_else_computes(
    child: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child("print(os.environ.get('OMP_NUM_THREADS'))")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    launch(tmp_path / "a", [], log=tmp_path / "log", stop=Stop())
    monkeypatch.delenv("OMP_NUM_THREADS")
    launch(tmp_path / "b", [], log=tmp_path / "log", stop=Stop())
    chosen = "None" if sys.platform == "darwin" else str(usable_cores())
    assert (tmp_path / "log").read_text().splitlines() == ["3", chosen]


_ANSWERS = """
def answer(number, frame):
    print(number, flush=True)
    sys.exit(75)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, answer)
open(sys.argv[-1] + ".up", "w").close()
for _ in range(6000):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_forwarded_and_the_end_is_awaited(
    number: signal.Signals, child: Callable[[str], None], tmp_path: Path
) -> None:
    child(_ANSWERS)

    def interrupt() -> None:
        wait_for((tmp_path / "run.up").exists)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    former = signal.getsignal(number)
    with Stop() as stop:
        assert launch(tmp_path / "run", [], log=tmp_path / "log", stop=stop) == 75
        assert stop.requested
    thread.join()
    assert (tmp_path / "log").read_text() == f"{number.value}\n"
    assert signal.getsignal(number) is former


@pytest.mark.parametrize("system", ["posix", "nt"])
def test_a_run_does_not_outlive_a_launcher_that_was_killed(
    system: str, child: Callable[[str], None], tmp_path: Path
) -> None:
    as_there = "os.name, os.kill = 'nt', lambda *given: print('ended unsaved', flush=True)\n"
    child((as_there if system == "nt" else "") + _ANSWERS)
    parent = Forked(lambda: launch(tmp_path / "run", [], log=tmp_path / "log", stop=Stop()))
    wait_for((tmp_path / "run.up").exists)
    parent.kill()
    wait_for(lambda: (tmp_path / "log").read_text() != "")
    parent.communicate()
    assert (tmp_path / "log").read_text() == f"{signal.SIGTERM.value}\n"


def test_a_run_is_saved_where_its_launcher_ends_by_an_error(
    child: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stop: Stop, process: object) -> int:
        wait_for((tmp_path / "run.up").exists)
        raise RuntimeError

    monkeypatch.setattr(Stop, "wait", fail)
    child(_ANSWERS)
    with pytest.raises(RuntimeError):
        launch(tmp_path / "run", [], log=tmp_path / "log", stop=Stop())
    assert (tmp_path / "log").read_text() == f"{signal.SIGTERM.value}\n"


def test_a_killed_launcher_s_run_is_saved_and_resumed(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    words = arguments(tmp_path, "run", {"steps": 1_000_000, "eval.every_steps": 100_000, "sample.prompts": []})
    del words[words.index("--run-dir") : words.index("--run-dir") + 2]
    run, log = tmp_path / "run", tmp_path / "run.log"
    parent = Forked(lambda: launch(run, words, log=log, stop=Stop()))
    wait_for(lambda: (run / "metrics.jsonl").is_file() and len(lines_of(run, "train")) > 3)
    parent.kill()
    parent.communicate()
    assert launching.resumed_arguments(run) == ["--resume", str(run)]  # once it has been saved
    assert RunDirectory(run).recorded()["status"] == "preempted"
    assert step_of(list_checkpoints(run / "checkpoints")[-1]) == lines_of(run, "train")[-1]["step"]


def test_who_uses_a_run(tmp_path: Path) -> None:
    run = RunDirectory(write_run(tmp_path / "run", [4.0], status="running"))
    assert not run.in_use()
    with run.lock():
        assert run.in_use()
    assert not run.in_use()
    (run.path / ".lock.json").write_text('{"pid": 1, "host": "elsewhere"}')
    assert run.in_use()
