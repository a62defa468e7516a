"""Writing a checkpoint, by one process or by several at the same time: complete and durable, or not there. A kill at
any point does no harm.

    temporary = begin_save(...)      rank 0: a hidden folder next to the checkpoint's place
    write_part(temporary, ...)       every rank: its slices into files of its own, flushed to disk
    complete_save(temporary, ...)    rank 0, after all have written: state.json, manifest.json, then one rename

`save_checkpoint` does all of it in one process. Nothing here communicates: the caller makes sure that each stage is
done on all ranks before the next begins. Each rank notes its files and their hashes in a hidden file, which the last
stage reads and removes. Nothing counts before the rename. One save is written at a time (the run directory's lock sees
to that), so whatever is unfinished when one begins was left by a killed process, and is removed then.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from gptlab.runtime.files.plain_file import sync_directory
from gptlab.runtime.files.tensor_file import DamagedFileError, write_bytes, write_tensors
from gptlab.training.checkpoint.format import (
    KINDS,
    CheckpointError,
    TensorSlice,
    file_name,
    index_fields,
    manifest_text,
    merged_index,
    parse_manifest,
    record_fields,
    whole_slices,
)
from gptlab.training.checkpoint.names import (
    LEFTOVER_NAME,
    MANIFEST,
    REPLACED_NAME,
    STATE,
    candidates,
    checkpoint_path,
    entries,
    list_checkpoints,
    step_of,
)


def save_checkpoint(
    checkpoints_dir: Path, step: int, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor],
    state: dict[str, Any],
) -> Path:  # fmt: skip
    """Write the checkpoint of `step` from one process. Its folder, which is returned, is then durable. An earlier one
    of the same step is replaced, with no moment in which neither exists.

    `state` is JSON data; floats read back bit for bit. CheckpointError if the file system refuses (disk full,
    read-only, ...): older checkpoints are then untouched, and nothing of the new one is left. ValueError for what is
    not JSON data or not a plain tensor.
    """
    text = _state_text(state)
    needed_bytes = sum(tensor.nbytes for tensor in (*model.values(), *optimizer.values()))
    temporary = begin_save(checkpoints_dir, step, needed_bytes=needed_bytes)
    try:
        with _refusals(temporary, needed_bytes):
            whole = _write_slices(temporary, whole_slices(model), whole_slices(optimizer), 0, 1)
        return _complete(temporary, step, text, whole)
    except BaseException:
        remove_tree(temporary)
        raise


def begin_save(checkpoints_dir: Path, step: int, *, needed_bytes: int) -> Path:
    """Make the hidden folder for a checkpoint of `step`, which will take about `needed_bytes`. For one rank, when no
    earlier save is still being written. CheckpointError if the file system refuses."""
    temporary = checkpoints_dir / f".{checkpoint_path(checkpoints_dir, step).name}.tmp-{os.getpid()}"
    with _refusals(temporary, needed_bytes):
        checkpoints_dir.mkdir(exist_ok=True)  # not the run folder, which may have been moved
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
    """Write this rank's slices, flushed to disk when this returns. The slices of all ranks must tile every tensor.
    CheckpointError if the file system refuses; what was written stays, for the rank that began to remove."""
    with _refusals(temporary, sum(one.tensor.nbytes for one in (*model, *optimizer))):
        part = _write_slices(temporary, model, optimizer, rank, size)
    with _refusals(temporary, 0):
        _part_path(temporary, rank).write_text(json.dumps(part))


def _write_slices(
    temporary: Path, model: Sequence[TensorSlice], optimizer: Sequence[TensorSlice], rank: int, size: int
) -> dict[str, dict[str, Any]]:
    """What the manifest says of the files that this rank writes: "files", and for each kind the `index_fields`."""
    part: dict[str, dict[str, Any]] = {"files": {}}
    for kind, slices in (("model", model), ("optimizer", optimizer)):
        name = file_name(kind, rank, size)
        tensors = {one.key: one.tensor.reshape(one.shape if one.is_whole else (-1,)) for one in slices}
        if len(tensors) != len(slices):
            raise ValueError(f"two slices of {kind} begin at the same element of the same tensor")
        part["files"][name] = record_fields(write_tensors(temporary / name, tensors))
        part[kind] = index_fields(slices, name)
    return part


def complete_save(temporary: Path, state: dict[str, Any], *, size: int = 1) -> Path:
    """Make a checkpoint of what all of `size` ranks have written. Its folder, which is returned, is then durable.

    Raises what `save_checkpoint` raises, and then leaves nothing; also ValueError if the slices do not tile every
    tensor.
    """
    try:
        text = _state_text(state)
        with _refusals(temporary, 0):
            parts = [json.loads(_part_path(temporary, rank).read_bytes()) for rank in range(size)]
            for rank in range(size):
                _part_path(temporary, rank).unlink()
        whole = {kind: merged_index([part[kind] for part in parts]) for kind in KINDS}
        whole["files"] = {name: record for part in parts for name, record in part["files"].items()}
        return _complete(temporary, step_of_temporary(temporary), text, whole, check=True)
    except BaseException:
        remove_tree(temporary)
        raise


def _complete(temporary: Path, step: int, state: bytes, whole: dict[str, Any], *, check: bool = False) -> Path:
    """`state`: the content of state.json. `whole`: what the manifest says of all files. `check`: ValueError if the
    slices do not tile their tensors."""
    final = checkpoint_path(temporary.parent, step)
    with _refusals(temporary, sum(record["bytes"] for record in whole["files"].values())):
        whole["files"][STATE] = record_fields(write_bytes(temporary / STATE, state))
        manifest = manifest_text(step, whole)
        if check:
            _require_valid(manifest)
        write_bytes(temporary / MANIFEST, manifest)
        publish(temporary, final)
    settle(temporary.parent)
    return final


def _require_valid(manifest: bytes) -> None:
    try:
        parse_manifest(manifest)
    except DamagedFileError as error:
        raise ValueError(f"these slices make no checkpoint: {error}") from None


def _part_path(temporary: Path, rank: int) -> Path:
    return temporary / f".part-{rank + 1:05d}.json"


def _state_text(state: dict[str, Any]) -> bytes:
    """state.json. ValueError for what would not read back as the same value."""
    try:
        text = json.dumps(state, indent=1, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"the state is not JSON data: {error}") from None
    if json.loads(text) != state:
        raise ValueError("the state is not JSON data: it would read back as another value, such as a list for a tuple")
    return f"{text}\n".encode()


# --- how a folder appears and goes, in atomic steps; names.py lists the names


def step_of_temporary(path: Path) -> int:
    """The step of the checkpoint that is written in this folder, which `begin_save` made."""
    match = LEFTOVER_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def publish(temporary: Path, final: Path) -> None:
    """Make a complete and flushed `temporary` the checkpoint `final`, replacing an earlier one of the same step."""
    sync_directory(temporary)
    rename = _replace if os.path.lexists(final) else os.rename
    rename(temporary, final)
    sync_directory(final.parent)


def _replace(temporary: Path, final: Path) -> None:
    """A folder cannot be renamed onto a filled one, so the former checkpoint is first renamed to a `replaced` name,
    under which it still counts; `settle` removes it after its successor is durable."""
    names = (final.with_name(f".{final.name}.replaced-{number}") for number in count())
    replaced = next(path for path in names if not os.path.lexists(path))
    os.rename(final, replaced)
    try:
        os.rename(temporary, final)
    except OSError:
        os.rename(replaced, final)
        raise


def settle(checkpoints_dir: Path) -> None:
    """After a `publish`: remove replaced checkpoints, or give back their name if no successor came."""
    for path in reversed(candidates(checkpoints_dir)):
        if match := REPLACED_NAME.fullmatch(path.name):
            _settle(path, checkpoints_dir / f"step-{match[1]}")


def _settle(replaced: Path, final: Path) -> None:
    # What cannot be renamed or removed now is found again by the next save.
    with contextlib.suppress(OSError):
        if os.path.lexists(final):
            discard(replaced)
        else:
            os.rename(replaced, final)


def sweep(checkpoints_dir: Path) -> None:
    """Remove what killed saves and removals left, as far as possible."""
    for path in entries(checkpoints_dir):
        if LEFTOVER_NAME.fullmatch(path.name):
            remove_tree(path)


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


@contextlib.contextmanager
def _refusals(temporary: Path, needed_bytes: int) -> Iterator[None]:
    """Turns what the file system refuses within the context into a CheckpointError that says what would help."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(_why_not_saved(temporary, error, needed_bytes)) from error


def _why_not_saved(temporary: Path, error: OSError, needed_bytes: int) -> str:
    checkpoints_dir = temporary.parent
    free, older = "unknown", False
    with contextlib.suppress(OSError):
        free = f"{shutil.disk_usage(checkpoints_dir).free:,}"
        older = bool(list_checkpoints(checkpoints_dir))
    remedy = {
        errno.ENOSPC: "free some space",
        getattr(errno, "EDQUOT", errno.ENOSPC): "free some space",
        errno.EFBIG: "lift the limit on file sizes (ulimit -f)",
        **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make the folder writable"),
    }.get(error.errno or 0, "fix the cause")
    return (
        f"cannot save the checkpoint of step {step_of_temporary(temporary)} in {checkpoints_dir}: "
        f"{error.strerror or error} ({needed_bytes:,} bytes needed, {free} free); "
        f"{'older checkpoints are untouched' if older else 'none was saved before'}: {remedy}"
    )
