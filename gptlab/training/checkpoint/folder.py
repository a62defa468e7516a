"""How checkpoints come into a folder and leave it, in atomic steps, so that a kill at any point does no harm; and which
ones stay: the last few, one every so many steps, the best and the last good one.

One process writes at a time (the run directory's lock sees to that), so whatever is unfinished when a save begins was
left by a killed process. format.py lists the names of everything that a folder may hold.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path

from gptlab.runtime.files.strict_json import sync_directory
from gptlab.training.checkpoint.format import (
    LEFTOVER_NAME,
    REPLACED_NAME,
    DamagedCheckpointError,
    candidates,
    entries,
    list_checkpoints,
    step_of,
)
from gptlab.training.checkpoint.load import check_manifest, verify_checkpoint

OnProblem = Callable[[str], None]
"""Receives one line for each folder that cannot be removed."""


def temporary_path(final: Path) -> Path:
    """Where a checkpoint is written before `publish`."""
    return final.with_name(f".{final.name}.tmp-{os.getpid()}")


def step_of_temporary(path: Path) -> int:
    """The step of the checkpoint that is written at a `temporary_path`."""
    match = LEFTOVER_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def publish(temporary: Path, final: Path) -> None:
    """Make a complete and flushed `temporary` the checkpoint `final`, replacing an earlier one of the same step.

    A folder cannot be renamed onto a filled one, so the former checkpoint is first renamed to a `replaced` name, under
    which it still counts; `settle` removes it after its successor is durable.
    """
    sync_directory(temporary)
    replaced = None
    if os.path.lexists(final):
        names = (final.with_name(f".{final.name}.replaced-{number}") for number in count())
        replaced = next(path for path in names if not os.path.lexists(path))
        os.rename(final, replaced)
    try:
        os.rename(temporary, final)
    except OSError:
        if replaced is not None:
            os.rename(replaced, final)
        raise
    sync_directory(final.parent)


def settle(checkpoints_dir: Path) -> None:
    """After a `publish`: remove replaced checkpoints, or give back their name if no successor came."""
    for path in reversed(candidates(checkpoints_dir)):
        if match := REPLACED_NAME.fullmatch(path.name):
            final = checkpoints_dir / f"step-{match[1]}"
            # What cannot be renamed or removed now is found again by the next save.
            with contextlib.suppress(OSError):
                if os.path.lexists(final):
                    discard(path)
                else:
                    os.rename(path, final)


def sweep(checkpoints_dir: Path) -> None:
    """Remove what killed saves and removals left, as far as possible."""
    for path in entries(checkpoints_dir):
        if LEFTOVER_NAME.fullmatch(path.name):
            remove_tree(path)


def retain(
    checkpoints_dir: Path,
    *,
    keep_last: int,
    keep_every_steps: int | None,
    best_step: int | None,
    good_step: int | None = None,
    unscheduled_steps: Collection[int] = (),
    on_problem: OnProblem | None = None,
) -> list[Path]:
    """Remove the checkpoints that no rule keeps, oldest first, and return the removed folders.

    Kept are the `keep_last` newest, those whose step is a multiple of `keep_every_steps`, that of `best_step`, and that
    of `good_step`: newer ones may hold weights that the last update broke. Checkpoints of `unscheduled_steps` push out
    nothing that would stay without them. Damaged checkpoints neither count nor go: they take no intact one's place, and
    the user decides what to rescue from them. A folder that cannot be removed stays, and the next call tries again.

    Before anything goes, the newest that stays is verified in full, since manifest and sizes alone would miss files
    altered in place, and the last good checkpoint might go. Reading all that stay would cost several times as much for
    the same promise. The price is one read at about 1.6 GB/s, mostly from the page cache.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is at least 1, this is {keep_last}")
    intact = [path for path in list_checkpoints(checkpoints_dir) if _passes(check_manifest, path)]
    while intact:
        scheduled = [path for path in intact if step_of(path) not in unscheduled_steps]
        kept = {
            path
            for path in intact
            if path in (*intact[-keep_last:], *scheduled[-keep_last:])
            or step_of(path) in (best_step, good_step)
            or (keep_every_steps is not None and (step_of(path) or 0) % keep_every_steps == 0)
        }
        doomed = [path for path in intact if path not in kept]
        if not doomed or _passes(verify_checkpoint, intact[-1]):
            return [path for path in doomed if _discarded(path, on_problem)]
        intact.pop()
    return []


def discard_after(checkpoints_dir: Path, step: int, on_problem: OnProblem | None = None) -> None:
    """Remove all checkpoints of later steps, newest first, when a run rewinds to `step`: a resumed run would otherwise
    take the newest of them."""
    for path in reversed(candidates(checkpoints_dir)):
        if (step_of(path) or 0) > step:
            _discarded(path, on_problem)


def discard(path: Path) -> None:
    """Remove a checkpoint. One rename hides it from every reader, so that nobody sees half of one.

    OSError if it cannot be renamed; it is then still complete. Files that cannot be removed are left to `sweep`.
    """
    doomed = path.with_name(f".step-{step_of(path):08d}.removed-{os.getpid()}")
    remove_tree(doomed)
    os.rename(path, doomed)
    remove_tree(doomed)


def remove_tree(path: Path) -> None:
    """Remove a folder, link or file as far as possible; nothing there is no error."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _passes(check: Callable[[Path], None], path: Path) -> bool:
    try:
        check(path)
    except DamagedCheckpointError:
        return False
    return True


def _discarded(path: Path, on_problem: OnProblem | None) -> bool:
    try:
        discard(path)
    except OSError as error:
        if on_problem is not None:
            on_problem(f"cannot remove the old checkpoint {path}: {error.strerror or error}")
        return False
    return True
