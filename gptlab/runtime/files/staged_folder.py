"""A folder that appears complete or not at all: filled under a hidden name next to its place, then renamed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from gptlab.config.errors import UserError, cannot
from gptlab.runtime.files.plain_file import sync_directory
from gptlab.runtime.processes.ending_signals import ended_by_signals


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
