"""What checkpoints are called, and which there are in a folder. Needs no torch.

A folder of checkpoints holds step-00000250 and its like, and may also hold these hidden entries:

    .step-00000250.replaced-0   the former checkpoint of a step that was saved again; counts until it is removed
    .step-00000250.tmp-1234     a save in progress, or what a killed process left of one; never counts
    .step-00000250.removed-99   a removal in progress, or what a killed process left of one; never counts
"""

from __future__ import annotations

import re
from pathlib import Path

STATE, MANIFEST = "state.json", "manifest.json"

# Eight digits, or more without a leading zero: one name for each step.
_STEP = r"step-([0-9]{8}|[1-9][0-9]{8,})"
CHECKPOINT_NAME = re.compile(_STEP)
REPLACED_NAME = re.compile(rf"\.{_STEP}\.replaced-[0-9]+")
LEFTOVER_NAME = re.compile(rf"\.{_STEP}\.(tmp|removed)-[0-9]+")


def checkpoint_path(checkpoints_dir: Path, step: int) -> Path:
    """`checkpoints_dir/step-00000250`."""
    if step < 0:
        raise ValueError(f"a step is not negative, this one is {step}")
    return checkpoints_dir / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for any other name."""
    match = CHECKPOINT_NAME.fullmatch(path.name) or REPLACED_NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def list_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """Every step's checkpoint, intact or not, oldest step first; empty if the folder does not exist.

    A replaced checkpoint counts for its step only while its successor is not there.
    """
    return list({step_of(path): path for path in candidates(checkpoints_dir)}.values())


def candidates(checkpoints_dir: Path) -> list[Path]:
    """All folders that may hold a checkpoint, by step; a replaced one comes before its successor."""
    found = [path for path in entries(checkpoints_dir) if step_of(path) is not None]
    return sorted(found, key=lambda path: (step_of(path), not path.name.startswith("."), path.name))


def entries(directory: Path) -> list[Path]:
    """Everything in a folder; nothing for a link, which may lead to somebody else's files."""
    return list(directory.iterdir()) if directory.is_dir() and not directory.is_symlink() else []
