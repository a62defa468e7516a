"""Which checkpoints stay: the last few, one every so many steps, the best and the last good one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from gptlab.training.checkpoint.format import DamagedCheckpointError
from gptlab.training.checkpoint.load import read_manifest, verify_checkpoint
from gptlab.training.checkpoint.names import candidates, list_checkpoints, step_of
from gptlab.training.checkpoint.write import discard

OnProblem = Callable[[str], None]
"""Receives one line for each folder that cannot be removed."""


def retain(
    checkpoints_dir: Path,
    *,
    keep_last: int,
    keep_every_steps: int | None,
    best_step: int | None,
    good_step: int | None = None,
    unscheduled_steps: Collection[int] = (),
    damaged_steps: Collection[int] = (),
    on_problem: OnProblem | None = None,
) -> list[Path]:
    """Remove the checkpoints that no rule keeps, oldest first, and return the removed folders.

    Kept are the `keep_last` newest, those whose step is a multiple of `keep_every_steps`, that of `best_step`, and that
    of `good_step`: newer ones may hold weights that the last update broke. Checkpoints of `unscheduled_steps` push out
    nothing that would stay without them. Damaged checkpoints, those of `damaged_steps` among them, neither count nor
    go: they take no intact one's place, and the user decides what to rescue from them. A folder that cannot be removed
    stays, and the next call tries again.

    Before anything goes, the newest that stays is verified in full, since manifest and sizes alone would miss files
    altered in place, and the last good checkpoint might go. Reading all that stay would cost several times as much for
    the same promise. The price is one read at about 1.6 GB/s, mostly from the page cache.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is at least 1, this is {keep_last}")
    found = [path for path in list_checkpoints(checkpoints_dir) if step_of(path) not in damaged_steps]
    intact = [path for path in found if _passes(read_manifest, path)]
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


def _passes(check: Callable[[Path], object], path: Path) -> bool:
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
