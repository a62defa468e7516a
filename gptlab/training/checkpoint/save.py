"""How a checkpoint is written, by one process or by many at once: whole and durable, or not there.

    temporary = begin_save(...)      one rank: a hidden folder beside the checkpoint's
    write_part(temporary, ...)       every rank: its pieces, in files of its own, flushed to disk
    complete_save(temporary, ...)    one rank, when all have written: state, manifest, then one rename

Between them the ranks must have agreed that the step before is done on all of them; nothing here speaks to anybody.
Each rank notes what it has written, and the hashes, in a hidden file, which the last step reads and removes. Until the
rename nothing counts: what a rank that died leaves of it, the next `begin_save` removes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.runtime.files.tensor_file import FileRecord, tensor_bytes, write_bytes, write_tensors
from gptlab.training.checkpoint.directory import (
    checkpoint_path,
    list_checkpoints,
    publish,
    remove_tree,
    settle,
    step_of_temporary,
    sweep,
    temporary_path,
)
from gptlab.training.checkpoint.manifest import (
    KINDS,
    MANIFEST,
    STATE,
    file_name,
    index_fields,
    manifest_text,
    merged_index,
    record_fields,
)
from gptlab.training.checkpoint.slices import TensorSlice, whole_slices


class CheckpointError(UserError):
    """A checkpoint cannot be saved, or the one that was asked for cannot be used."""


def save_checkpoint(
    checkpoints_dir: Path,
    step: int,
    *,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: dict[str, Any],
) -> Path:
    """Write the checkpoint of `step` by one process, and return its folder, durable when this returns.

    Tensors may live on any device, be views or share memory (see `write_tensors`). `state` is JSON data (dict, list,
    str, int, finite float, bool, None); floats read back bit for bit. A checkpoint that stands for the same step is
    replaced, without a moment in which neither is there.

    Raises CheckpointError where the file system refuses (disk full, read-only, ...): older checkpoints still stand
    then, and nothing is left of the new one. ValueError for what is no JSON data or no plain tensor.
    """
    require_json(state)
    pieces = {"model": whole_slices(model), "optimizer": whole_slices(optimizer)}
    temporary = begin_save(checkpoints_dir, step, needed_bytes=tensor_bytes(model) + tensor_bytes(optimizer))
    try:
        part = _write_files(temporary, pieces, 0, 1)
        return _complete(temporary, state, [part])
    except BaseException:
        remove_tree(temporary)
        raise


def begin_save(checkpoints_dir: Path, step: int, *, needed_bytes: int) -> Path:
    """Make the hidden folder for a checkpoint of `step`, which will take about `needed_bytes`; by one rank, when none
    writes to a former one. CheckpointError where the file system refuses."""
    temporary = temporary_path(checkpoint_path(checkpoints_dir, step))
    with _refusals(temporary, needed_bytes):
        checkpoints_dir.mkdir(parents=True, exist_ok=True)
        if checkpoints_dir.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, and may lead to another run's checkpoints")
        sweep(checkpoints_dir)
        # Asked first, so that a checkpoint that cannot fit does not fill the disk that the run's log is written to.
        if shutil.disk_usage(checkpoints_dir).free < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary.mkdir()
    return temporary


def write_part(
    temporary: Path, model: Sequence[TensorSlice], optimizer: Sequence[TensorSlice], *, rank: int = 0, size: int = 1
) -> None:
    """Write what this rank of `size` has to write, flushed to disk when this returns. The pieces of all ranks together
    tile every tensor. CheckpointError where the file system refuses; what was begun stays, for the rank that began."""
    part = _write_files(temporary, {"model": model, "optimizer": optimizer}, rank, size)
    with _refusals(temporary, 0):
        _part_path(temporary, rank).write_text(json.dumps(part))


def complete_save(temporary: Path, state: dict[str, Any], *, size: int = 1) -> Path:
    """Make a checkpoint of what all of `size` ranks have written, and return its folder, durable then.

    Raises as `save_checkpoint` does, and leaves nothing then; ValueError too where pieces do not tile their tensors.
    """
    try:
        require_json(state)
        with _refusals(temporary, 0):
            parts = [json.loads(_part_path(temporary, rank).read_bytes()) for rank in range(size)]
            for rank in range(size):
                _part_path(temporary, rank).unlink()
        return _complete(temporary, state, parts)
    except BaseException:
        remove_tree(temporary)
        raise


def _write_files(
    temporary: Path, pieces: Mapping[str, Sequence[TensorSlice]], rank: int, size: int
) -> dict[str, dict[str, Any]]:
    """What the manifest will say of this rank's files."""
    needed_bytes = sum(piece.tensor.nbytes for of_kind in pieces.values() for piece in of_kind)
    part: dict[str, dict[str, Any]] = {"files": {}}
    with _refusals(temporary, needed_bytes):
        for kind in KINDS:
            name = file_name(kind, rank, size)
            tensors = {p.key: p.tensor.reshape(p.shape if p.is_whole else (-1,)) for p in pieces[kind]}
            if len(tensors) != len(pieces[kind]):
                raise ValueError(f"two pieces of {kind} begin at the same element of the same tensor")
            part["files"][name] = record_fields(write_tensors(temporary / name, tensors))
            part[kind] = index_fields(pieces[kind], name)
    return part


def _complete(temporary: Path, state: dict[str, Any], parts: Sequence[Mapping[str, Any]]) -> Path:
    step = step_of_temporary(temporary)
    final = checkpoint_path(temporary.parent, step)
    files = {
        name: FileRecord(fields["bytes"], fields["sha256"]) for part in parts for name, fields in part["files"].items()
    }
    index = {kind: merged_index([part[kind] for part in parts]) for kind in KINDS}
    with _refusals(temporary, sum(record.size_bytes for record in files.values())):
        files[STATE] = write_bytes(temporary / STATE, _json_text(state))
        write_bytes(temporary / MANIFEST, manifest_text(step, files, index))
        publish(temporary, final)
    settle(temporary.parent)
    return final


def _part_path(temporary: Path, rank: int) -> Path:
    return temporary / f".part-{rank + 1:05d}.json"


def _json_text(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def require_json(value: object, where: str = "state") -> None:
    """ValueError that names the place where `value` would not read back as the same value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}: JSON keys are strings")
            require_json(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            require_json(inner, f"{where}[{index}]")
    elif type(value) is float and not math.isfinite(value):
        raise ValueError(f"{where} = {value}: JSON has no such number; use None where there is no value yet")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ValueError(f"{where} is a {type(value).__name__}, which would not read back from JSON as one")


@contextlib.contextmanager
def _refusals(temporary: Path, needed_bytes: int) -> Iterator[None]:
    """What the file system refuses within the context is a CheckpointError that says what would help."""
    try:
        yield
    except OSError as error:
        # An older one that stands is found without what this save has begun.
        raise CheckpointError(_why_not_saved(temporary, error, needed_bytes)) from error


def _why_not_saved(temporary: Path, error: OSError, needed_bytes: int) -> str:
    checkpoints_dir = temporary.parent
    free, older = "unknown", False
    with contextlib.suppress(OSError):
        free = f"{shutil.disk_usage(checkpoints_dir).free:,}"
        older = bool(list_checkpoints(checkpoints_dir))
    standing = "older checkpoints stand" if older else "none was saved before"
    return (
        f"cannot save the checkpoint of step {step_of_temporary(temporary)} in {checkpoints_dir}: "
        f"{error.strerror or error} ({needed_bytes:,} bytes needed, {free} free); {standing}: "
        f"{_remedy(error.errno)}, then go on with --resume"
    )


def _remedy(number: int | None) -> str:
    if number in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
        return "free some space"
    if number == errno.EFBIG:
        return "lift the limit on file sizes (ulimit -f)"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the folder writable"
    return "put that right"
