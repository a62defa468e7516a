"""Reading checkpoints: the newest valid one is chosen, every file is hashed as it is read, whole tensors come back.

A checkpoint that differs from its manifest in anything is damaged, and the newest intact one is used instead. Any
number of processes reads what any other number wrote. Nothing here deletes a checkpoint; folder.py does.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.config.plain_file import read_plain
from gptlab.runtime.files.tensor_file import (
    DamagedFileError,
    FileRecord,
    parse_json_object,
    read_bytes,
    read_tensors,
    verify_tensors,
)
from gptlab.training.checkpoint.format import (
    KINDS,
    MANIFEST,
    STATE,
    DamagedCheckpointError,
    Manifest,
    candidates,
    list_checkpoints,
    max_manifest_bytes,
    parse_manifest,
    step_of,
)
from gptlab.training.checkpoint.slices import slice_key

OnDamage = Callable[[str], None]
"""Receives one line that names a damaged checkpoint and what is wrong with it."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint; its tensors are on the CPU and share no memory."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    path: Path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint. DamagedCheckpointError names the first thing that is wrong with it."""
    manifest = _read_manifest(path)
    return Checkpoint(
        step=manifest.step,
        model=_read_kind(path, manifest, "model"),
        optimizer=_read_kind(path, manifest, "optimizer"),
        state=_read_state(path, manifest),
        path=path,
    )


def verify_checkpoint(path: Path) -> None:
    """What `load_checkpoint` checks, without keeping anything. DamagedCheckpointError if it is not intact."""
    manifest = _read_manifest(path)
    for kind in KINDS:
        for name in manifest.files_of(kind):
            _checked(path, name, manifest, partial(verify_tensors, layout=manifest.layout(name)))
    _read_state(path, manifest)


def check_manifest(path: Path) -> None:
    """The part of `verify_checkpoint` that reads no tensor: manifest, names, sizes. It finds truncated files, but not
    files altered in place."""
    _read_manifest(path)


def newest_intact(checkpoints_dir: Path, on_damage: OnDamage) -> Path:
    """The folder of the newest intact checkpoint; newer damaged ones are reported to `on_damage`.

    UserError if there is none, with what is wrong with each.
    """

    def verified(path: Path) -> Path:
        verify_checkpoint(path)
        return path

    return _newest(checkpoints_dir, on_damage, verified)


def load_newest(checkpoints_dir: Path, on_damage: OnDamage) -> Checkpoint:
    """`load_checkpoint(newest_intact(...))`, with every file read once instead of twice."""
    return _newest(checkpoints_dir, on_damage, load_checkpoint)


def select_checkpoint(checkpoints_dir: Path, which: str, on_damage: OnDamage, *, best_step: int | None = None) -> Path:
    """The intact checkpoint that `which` names: latest, best (`best_step`, which the run's state knows) or a step.

    Only `latest` falls back from a damaged one to another. UserError otherwise.
    """
    if which == "latest":
        return newest_intact(checkpoints_dir, on_damage)
    if which == "best":
        if best_step is None:
            raise UserError(f"no checkpoint in {checkpoints_dir} is known as the best: no validation was recorded")
        step = best_step
    elif which.isascii() and which.isdigit() and len(which) < 20:  # int() refuses thousands of digits
        step = int(which)
    else:
        raise UserError(f"checkpoint {which!r}: must be latest, best or the number of a step")
    by_step = {step_of(path): path for path in list_checkpoints(checkpoints_dir)}
    if step not in by_step:
        steps = ", ".join(str(known) for known in by_step) or "none"
        raise UserError(f"no checkpoint of step {step} in {checkpoints_dir} (steps there: {steps})")
    verify_checkpoint(by_step[step])
    return by_step[step]


def _newest(checkpoints_dir: Path, on_damage: OnDamage, read: Callable[[Path], _T]) -> _T:
    wrong = []
    for path in reversed(candidates(checkpoints_dir)):
        try:
            return read(path)
        except DamagedCheckpointError as error:
            on_damage(str(error))
            wrong.append(f"{path.name}: {error.reason}")
    if not wrong:
        raise UserError(f"no checkpoint in {checkpoints_dir}: none has been saved there")
    raise UserError(f"no intact checkpoint in {checkpoints_dir}: {'; '.join(wrong)}")


def _read_kind(path: Path, manifest: Manifest, kind: str) -> dict[str, Tensor]:
    """The whole tensors of a kind; every file is read straight into them."""
    if manifest.index is None:
        (name,) = manifest.files_of(kind)
        return _checked(path, name, manifest, read_tensors)
    # Takes no more memory than the files have bytes, whose sizes have been checked.
    tensors = {name: torch.empty(stored.shape, dtype=stored.dtype) for name, stored in manifest.index[kind].items()}
    views: dict[str, dict[str, Tensor]] = {name: {} for name in manifest.files_of(kind)}
    for name, stored in manifest.index[kind].items():
        for file, start, count in stored.slices:
            whole, key = tensors[name], slice_key(name, stored.shape, start, count)
            views[file][key] = whole if count == whole.numel() else whole.view(-1)[start : start + count]
    for name, into in views.items():
        _checked(path, name, manifest, partial(read_tensors, into=into))
    return tensors


def _checked(path: Path, name: str, manifest: Manifest, read: Callable[[Path, FileRecord], _T]) -> _T:
    try:
        return read(path / name, manifest.files[name])
    except DamagedFileError as error:
        raise DamagedCheckpointError(path, f"{name}: {error}") from None
    except OSError as error:
        raise DamagedCheckpointError(path, f"{name} cannot be read ({error.strerror})") from error


def _read_state(path: Path, manifest: Manifest) -> dict[str, Any]:
    """state.json; that of a run must be of the manifest's step."""
    state = _checked(path, STATE, manifest, lambda file, expected: parse_json_object(read_bytes(file, expected)))
    if "step" in state and state["step"] != manifest.step:
        raise DamagedCheckpointError(path, f"{STATE} is of another step than {MANIFEST} ({manifest.step})")
    return state


def _read_manifest(path: Path) -> Manifest:
    """The manifest, after the check that the folder holds exactly what it names, as plain files of the right sizes."""
    try:
        if path.is_symlink() or not path.is_dir():
            raise DamagedCheckpointError(path, "is not a folder")
        # Hidden entries are what file browsers and NFS leave behind; they harm nothing, and nothing reads them.
        names = [name for name in os.listdir(path) if not name.startswith(".")]
        sizes = {name: _plain_file_bytes(path, name) for name in names}
        max_bytes = max_manifest_bytes(len(sizes))
        if sizes.get(MANIFEST, 0) > max_bytes:
            raise DamagedCheckpointError(path, f"{MANIFEST} has {sizes[MANIFEST]:,} bytes")
        if MANIFEST not in sizes:
            raise DamagedCheckpointError(path, f"has no {MANIFEST}")
        manifest = parse_manifest(read_plain(path / MANIFEST, max_bytes))
    except DamagedFileError as error:
        raise DamagedCheckpointError(path, f"{MANIFEST}: {error}") from None
    except OSError as error:
        raise DamagedCheckpointError(path, f"cannot be read ({error.strerror})") from error
    named_step = step_of(path)
    if named_step is not None and named_step != manifest.step:
        raise DamagedCheckpointError(path, f"{MANIFEST} is of step {manifest.step}")
    for name, record in manifest.files.items():
        if name not in sizes:
            raise DamagedCheckpointError(path, f"has no {name}")
        if sizes[name] != record.size_bytes:
            reason = f"{name} has {sizes[name]:,} bytes, its manifest says {record.size_bytes:,}"
            raise DamagedCheckpointError(path, reason)
    unknown = sorted(set(sizes) - {*manifest.files, MANIFEST})
    if unknown:
        raise DamagedCheckpointError(path, f"holds {unknown[0]!r}, which its manifest does not name")
    return manifest


def _plain_file_bytes(path: Path, name: str) -> int:
    """Size of a folder's entry, which must be a file itself, not a link to one elsewhere."""
    status = os.lstat(path / name)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpointError(path, f"{name} is no plain file")
    return status.st_size
