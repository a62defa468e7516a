"""A folder that appears complete or not at all: filled under a hidden name next to its place, then renamed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from gptlab.config.errors import UserError, cannot
from gptlab.runtime.files.plain_file import sync_directory

ENDING_SIGNALS = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))  # not on Windows


def require_free(target: Path) -> None:
    """UserError unless `target` does not exist, or is an empty folder and not the current one."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise UserError(f"{target} is a file: name a folder that does not exist yet")
    if any(target.iterdir()):
        raise UserError(f"{target} is not empty (it holds {min(target.iterdir()).name}): name another folder")
    if target.samefile("."):
        raise UserError(f"{target} is the current folder, which would be replaced: name another folder")


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Within the context, an empty folder to fill, which becomes `target` if the context ends without an error.

    Otherwise it is removed, even if SIGTERM or SIGHUP ends the process. The next call for the same target removes
    what SIGKILL left. UserError if `target` is not free, or cannot be written.
    """
    require_free(target)
    staged = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    with ended_by_signals(), cannot(f"write {target}"):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(target)
            staged.mkdir()
            yield staged
            require_free(target)
            if target.is_dir():
                target.rmdir()
            staged.rename(target)
            sync_directory(target.parent)
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """What ended processes left, including one that had the pid of this one."""
    for path in target.parent.iterdir():
        match = re.fullmatch(re.escape(f".{target.name}.tmp-") + "([0-9]{1,10})", path.name)
        if match and (int(match[1]) == os.getpid() or not psutil.pid_exists(int(match[1]))):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within the context, SIGTERM and SIGHUP (the terminal is gone) raise SystemExit with the exit code that shells
    report for them, so that everything is cleaned up. One that is ignored, as under `nohup`, stays ignored. Outside of
    the main thread, where Python allows no signal handlers, nothing changes."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    caught = [number for number in ENDING_SIGNALS if in_main_thread and signal.getsignal(number) != signal.SIG_IGN]
    former = {number: signal.signal(number, end) for number in caught}
    try:
        yield
    finally:
        for number, handler in former.items():
            # None stands for a handler that was not installed from Python, which cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
