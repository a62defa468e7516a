"""How checkpoints come to stand in a directory and leave it: in single steps, so that a kill at any point does no harm.

What a process may find there:

    step-00000250              a checkpoint: came by one rename, whole and durable
    .step-00000250.replaced-0  the former checkpoint of a step that was saved again; counts until the sweep
    .step-00000250.tmp-1234    a save in progress, or what a killed process left of one; never counts
    .step-00000250.removed-99  a removal in progress, or what a killed process left of one; never counts

One process writes at a time (the run directory's lock sees to that), so whatever is unfinished when a save begins is a
leftover.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from itertools import count
from pathlib import Path

from gptlab.runtime.files.strict_json import sync_directory

# Eight digits, or more without a leading zero: one name for each step.
_STEP = r"step-([0-9]{8}|[1-9][0-9]{8,})"
_CHECKPOINT = re.compile(_STEP)
_REPLACED = re.compile(rf"\.{_STEP}\.replaced-[0-9]+")
_LEFTOVER = re.compile(rf"\.{_STEP}\.(tmp|removed)-[0-9]+")


def checkpoint_path(checkpoints_dir: Path, step: int) -> Path:
    """`checkpoints_dir/step-00000250`."""
    if step < 0:
        raise ValueError(f"a step is not negative, this one is {step}")
    return checkpoints_dir / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's folder name tells; None for any other name."""
    match = _CHECKPOINT.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    return None if match is None else int(match[1])


def list_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """Every step's checkpoint, intact or not, oldest step first; empty where the directory does not exist.

    A checkpoint that was moved aside stands for its step only while no other does.
    """
    by_step = {step_of(path): path for path in candidates(checkpoints_dir)}
    return list(by_step.values())


def candidates(checkpoints_dir: Path) -> list[Path]:
    """All folders that may hold a checkpoint, by step; one that was moved aside comes before its successor."""
    found = [path for path in _entries(checkpoints_dir) if step_of(path) is not None]
    return sorted(found, key=lambda path: (step_of(path), _CHECKPOINT.fullmatch(path.name) is not None, path.name))


def temporary_path(final: Path) -> Path:
    """Where a checkpoint is written before `publish`."""
    return final.with_name(f".{final.name}.tmp-{os.getpid()}")


def step_of_temporary(path: Path) -> int:
    """The step whose checkpoint is written at a `temporary_path`."""
    match = _LEFTOVER.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def publish(temporary: Path, final: Path) -> None:
    """Make a complete and flushed `temporary` the checkpoint `final`, replacing one that stands there.

    A directory cannot be renamed onto a filled one, so the former checkpoint is first renamed aside, where it still
    counts; it goes only after its successor is durable. Also when an aside of an earlier crash is there, nothing is
    removed before.
    """
    sync_directory(temporary)
    aside = None
    if os.path.lexists(final):
        aside = next(path for n in count() if not os.path.lexists(path := _aside_path(final, n)))
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except OSError:
        if aside is not None:
            os.rename(aside, final)
        raise
    sync_directory(final.parent)


def settle(checkpoints_dir: Path) -> None:
    """After a `publish`: drop checkpoints that were moved aside, or give back their name where no successor came."""
    for path in reversed(candidates(checkpoints_dir)):
        if match := _REPLACED.fullmatch(path.name):
            final = checkpoints_dir / f"step-{match[1]}"
            # What cannot be renamed or removed now is found again by the next save.
            with contextlib.suppress(OSError):
                if os.path.lexists(final):
                    discard(path)
                else:
                    os.rename(path, final)


def discard(path: Path) -> None:
    """Remove a checkpoint: gone for every reader by one rename, so that no half-removed one is ever seen.

    OSError where it cannot be renamed, and then it still stands; files that cannot be removed are left to `sweep`.
    """
    doomed = path.with_name(f".step-{step_of(path):08d}.removed-{os.getpid()}")
    remove_tree(doomed)
    os.rename(path, doomed)
    remove_tree(doomed)


def sweep(checkpoints_dir: Path) -> None:
    """Remove what killed saves and removals left behind, as far as that is possible."""
    for path in _entries(checkpoints_dir):
        if _LEFTOVER.fullmatch(path.name):
            remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a folder as far as possible, or a link or file of that name; nothing there is no error."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _aside_path(final: Path, number: int) -> Path:
    return final.with_name(f".{final.name}.replaced-{number}")


def _entries(directory: Path) -> list[Path]:
    """Empty for a link: what it leads to belongs to somebody else."""
    return list(directory.iterdir()) if directory.is_dir() and not directory.is_symlink() else []
