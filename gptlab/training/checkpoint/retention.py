"""Which checkpoints stay: the last few, one every so many steps, the best and the last good one.

Never fewer than one that is intact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from gptlab.training.checkpoint.directory import candidates, discard, step_of
from gptlab.training.checkpoint.load import DamagedCheckpointError, check_manifest, list_checkpoints, verify_checkpoint


def retain(
    checkpoints_dir: Path,
    *,
    keep_last: int,
    keep_every_steps: int | None,
    best_step: int | None,
    good_step: int | None = None,
    unscheduled_steps: Collection[int] = (),
    on_problem: Callable[[str], None] | None = None,
) -> list[Path]:
    """Remove the checkpoints that no rule keeps, oldest first, and return the folders that are gone.

    Kept are the `keep_last` newest, those whose step is a multiple of `keep_every_steps`, that of `best_step`, and that
    of `good_step`: newer ones may be of weights that the last update broke. What is saved at `unscheduled_steps` pushes
    nothing out that would be there without it.
    Damaged checkpoints neither count nor go: they hold no place that an intact one could have, and what may be rescued
    from them is for the user to decide. `on_problem` gets a line for each folder that cannot be removed; it stays, and
    the next call tries again.

    Before anything goes, the newest that stays is verified in full. Manifests and sizes alone would miss what was
    altered in place, and then the last good one might go; reading all that stay would cost several times as much for
    the same promise. The price is one reading at about 1.6 GB/s, mostly from the page cache, as it was just written.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is at least 1, this is {keep_last}")
    sound = [path for path in list_checkpoints(checkpoints_dir) if _passes(check_manifest, path)]
    while sound:
        scheduled = [path for path in sound if step_of(path) not in unscheduled_steps]
        kept = {
            path
            for path in sound
            if path in (*sound[-keep_last:], *scheduled[-keep_last:])
            or step_of(path) in (best_step, good_step)
            or (keep_every_steps is not None and (step_of(path) or 0) % keep_every_steps == 0)
        }
        doomed = [path for path in sound if path not in kept]
        if not doomed or _passes(verify_checkpoint, sound[-1]):
            return [path for path in doomed if _discarded(path, on_problem)]
        sound.pop()
    return []


def discard_after(checkpoints_dir: Path, step: int, on_problem: Callable[[str], None] | None = None) -> None:
    """Remove all checkpoints of later steps, the newest first: a run that goes back to `step` never had them, and would
    take the newest of them when it is resumed."""
    for path in reversed(candidates(checkpoints_dir)):
        if (step_of(path) or 0) > step:
            _discarded(path, on_problem)


def _passes(check: Callable[[Path], None], path: Path) -> bool:
    try:
        check(path)
    except DamagedCheckpointError:
        return False
    return True


def _discarded(path: Path, on_problem: Callable[[str], None] | None) -> bool:
    try:
        discard(path)
    except OSError as error:
        if on_problem is not None:
            on_problem(f"cannot remove the old checkpoint {path}: {error.strerror or error}")
        return False
    return True
