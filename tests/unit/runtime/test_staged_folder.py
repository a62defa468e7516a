"""Folders of imports and exports: whole or not there, whatever ends the process that fills them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gptlab.config.errors import UserError
from gptlab.runtime.files.staged_folder import staged_folder

posix_only = pytest.mark.skipif(os.name != "posix", reason="Windows sends no signals between processes")

FILL_AND_WAIT = """
import signal, sys, time
from pathlib import Path
from gptlab.runtime.files.staged_folder import staged_folder
with staged_folder(Path(sys.argv[1])) as staged:
    (staged / "half").write_text("half")
    print("HERE", flush=True)
    time.sleep(600)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "target"
    with staged_folder(target) as staged:
        (staged / "file").write_text("whole")
        assert not target.exists()
    assert (target / "file").read_text() == "whole"
    assert names(tmp_path / "new") == ["target"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with staged_folder(tmp_path / "target") as staged:
            (staged / "file").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"cannot write .*target: No space left on device"):
        fail()
    assert names(tmp_path) == []


@pytest.mark.parametrize("in_full", [False, True])
def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_full: bool) -> None:
    """A shell that is in it would stay in a folder that is gone."""
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    target = Path.cwd() if in_full else Path()
    with pytest.raises(UserError, match="is the current folder"), staged_folder(target):
        pass
    assert names(tmp_path) == ["own"]


@posix_only
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_leaves_no_copy_behind_the_next_one(tmp_path: Path, number: signal.Signals) -> None:
    """After SIGTERM at once; after SIGKILL as soon as the command is repeated, which then succeeds."""
    target = tmp_path / "target"
    process = subprocess.Popen([sys.executable, "-c", FILL_AND_WAIT, target], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "HERE\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert names(tmp_path) == ([] if number == signal.SIGTERM else [f".target.tmp-{process.pid}"])
    with staged_folder(target) as staged:
        (staged / "file").write_text("whole")
    assert names(tmp_path) == ["target"]
    assert names(target) == ["file"]


def test_what_a_living_process_fills_stays(tmp_path: Path) -> None:
    theirs = tmp_path / f".target.tmp-{os.getppid()}"
    similar = tmp_path / ".target.tmp-9999999.txt"
    for folder in (theirs, similar):
        folder.mkdir()
    with staged_folder(tmp_path / "target"):
        pass
    assert names(tmp_path) == sorted([theirs.name, similar.name, "target"])


def test_the_handler_of_before_is_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with staged_folder(tmp_path / "target"):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
