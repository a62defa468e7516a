"""Checkpoints: safetensors and JSON, never pickle; whole and durable or not there; verified byte for byte on load.

    checkpoints/step-00000250/
      model.safetensors  optimizer.safetensors  state.json
      manifest.json      format, version, step, and bytes and SHA-256 of the other three

A save writes all of it into a hidden sibling folder, flushes every file, writes the manifest last, and publishes the
folder with one rename (checkpoint_directory.py). A load reads every file once and hashes what it reads; a checkpoint
that differs from its manifest in anything is damaged, and the newest intact one is used instead. Nothing here deletes
a checkpoint; retention.py does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.train.checkpoint_directory import (
    candidates,
    checkpoint_path,
    list_checkpoints,
    publish,
    remove_tree,
    settle,
    step_of,
    sweep,
    temporary_path,
)
from gptlab.train.tensor_file import (
    DamagedFileError,
    FileRecord,
    parse_json_object,
    read_bytes,
    read_tensors,
    tensor_bytes,
    verify_tensors,
    write_bytes,
    write_tensors,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DamagedCheckpointError",
    "check_manifest",
    "checkpoint_path",
    "list_checkpoints",
    "load_checkpoint",
    "load_newest",
    "newest_intact",
    "save_checkpoint",
    "select_checkpoint",
    "verify_checkpoint",
]

FORMAT = "gptlab checkpoint"
FORMAT_VERSION = 1
_MODEL, _OPTIMIZER, _STATE, _MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_FILES = (_MODEL, _OPTIMIZER, _STATE)
# A real manifest has 500 bytes; what is far larger is none, and need not be read into memory to know it.
_MAX_MANIFEST_BYTES = 100_000

OnDamage = Callable[[str], None]
"""Receives one line that names a damaged checkpoint and what is wrong with it."""
_T = TypeVar("_T")


class CheckpointError(UserError):
    """A checkpoint cannot be saved, or the one that was asked for cannot be used."""


class DamagedCheckpointError(CheckpointError):
    """A folder that is no intact checkpoint."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"checkpoint {path} is damaged: {reason}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint; its tensors are on the CPU and share no memory."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    path: Path


@dataclass(frozen=True, slots=True)
class _Manifest:
    step: int
    files: dict[str, FileRecord]


def save_checkpoint(
    checkpoints_dir: Path,
    step: int,
    *,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: dict[str, Any],
) -> Path:
    """Write the checkpoint of `step` and return its folder, durable when this returns.

    Tensors may live on any device, be views or share memory (see `write_tensors`). `state` is JSON data (dict, list,
    str, int, finite float, bool, None); floats read back bit for bit. A checkpoint that stands for the same step is
    replaced, without a moment in which neither is there.

    Raises CheckpointError where the file system refuses (disk full, read-only, ...): older checkpoints still stand
    then, and nothing is left of the new one. ValueError for what is no JSON data or no plain tensor.
    """
    _require_json(state, "state")
    content = _json_text(state)
    needed_bytes = tensor_bytes(model) + tensor_bytes(optimizer) + len(content)
    final = checkpoint_path(checkpoints_dir, step)
    temporary = temporary_path(final)
    try:
        checkpoints_dir.mkdir(parents=True, exist_ok=True)
        sweep(checkpoints_dir)
        # Asked first, so that a checkpoint that cannot fit does not fill the disk that the run's log is written to.
        if shutil.disk_usage(checkpoints_dir).free < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary.mkdir()
        records = {
            _MODEL: write_tensors(temporary / _MODEL, model),
            _OPTIMIZER: write_tensors(temporary / _OPTIMIZER, optimizer),
            _STATE: write_bytes(temporary / _STATE, content),
        }
        write_bytes(temporary / _MANIFEST, _manifest_text(step, records))
        publish(temporary, final)
    except OSError as error:
        remove_tree(temporary)
        raise CheckpointError(_why_not_saved(checkpoints_dir, step, error, needed_bytes)) from error
    except BaseException:
        remove_tree(temporary)
        raise
    settle(checkpoints_dir)
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint. DamagedCheckpointError names the first thing that is wrong with it."""
    manifest = _read_manifest(path)
    return Checkpoint(
        step=manifest.step,
        model=_checked(path, _MODEL, manifest, read_tensors),
        optimizer=_checked(path, _OPTIMIZER, manifest, read_tensors),
        state=_checked(path, _STATE, manifest, _read_state),
        path=path,
    )


def verify_checkpoint(path: Path) -> None:
    """What `load_checkpoint` checks, without keeping anything. DamagedCheckpointError where it is not intact."""
    manifest = _read_manifest(path)
    _checked(path, _MODEL, manifest, verify_tensors)
    _checked(path, _OPTIMIZER, manifest, verify_tensors)
    _checked(path, _STATE, manifest, _read_state)


def check_manifest(path: Path) -> None:
    """The part of `verify_checkpoint` that reads no tensor: manifest, names, sizes. Finds what was cut short, not what
    was altered in place."""
    _read_manifest(path)


def newest_intact(checkpoints_dir: Path, on_damage: OnDamage) -> Path:
    """The folder of the newest intact checkpoint; newer damaged ones are told to `on_damage`.

    UserError where there is none, with what is wrong with each.
    """

    def verified(path: Path) -> Path:
        verify_checkpoint(path)
        return path

    return _newest(checkpoints_dir, on_damage, verified)


def load_newest(checkpoints_dir: Path, on_damage: OnDamage, *, up_to: int | None = None) -> Checkpoint:
    """`load_checkpoint(newest_intact(...))`, with every file read once instead of twice; of steps `up_to` this one."""
    return _newest(checkpoints_dir, on_damage, load_checkpoint, up_to)


def select_checkpoint(checkpoints_dir: Path, which: str, on_damage: OnDamage, *, best_step: int | None = None) -> Path:
    """The intact checkpoint that `which` names: latest | best (`best_step`, which the run's state knows) | a step.

    Only `latest` falls back from a damaged one to another: who names a step means that one. UserError otherwise.
    """
    if which == "latest":
        return newest_intact(checkpoints_dir, on_damage)
    if which == "best":
        if best_step is None:
            raise UserError(f"no checkpoint in {checkpoints_dir} is known as the best: no validation was recorded")
        step = best_step
    elif which.isascii() and which.isdigit():
        step = int(which)
    else:
        raise UserError(f"checkpoint {which!r}: must be latest, best or the number of a step")
    by_step = {step_of(path): path for path in list_checkpoints(checkpoints_dir)}
    if step not in by_step:
        steps = ", ".join(str(known) for known in by_step) or "none"
        raise UserError(f"no checkpoint of step {step} in {checkpoints_dir} (steps there: {steps})")
    verify_checkpoint(by_step[step])
    return by_step[step]


def _newest(checkpoints_dir: Path, on_damage: OnDamage, read: Callable[[Path], _T], up_to: int | None = None) -> _T:
    wrong = []
    for path in reversed(candidates(checkpoints_dir)):
        if up_to is not None and (step_of(path) or 0) > up_to:
            continue
        try:
            return read(path)
        except DamagedCheckpointError as error:
            on_damage(str(error))
            wrong.append(f"{path.name}: {error.reason}")
    if not wrong:
        raise UserError(f"no checkpoint in {checkpoints_dir}: none has been saved there")
    raise UserError(f"no intact checkpoint in {checkpoints_dir}: {'; '.join(wrong)}")


def _checked(path: Path, name: str, manifest: _Manifest, read: Callable[[Path, FileRecord], _T]) -> _T:
    try:
        return read(path / name, manifest.files[name])
    except DamagedFileError as error:
        raise DamagedCheckpointError(path, f"{name}: {error}") from None
    except OSError as error:
        raise DamagedCheckpointError(path, f"{name} cannot be read ({error.strerror})") from error


def _read_state(path: Path, expected: FileRecord) -> dict[str, Any]:
    return parse_json_object(read_bytes(path, expected))


def _read_manifest(path: Path) -> _Manifest:
    """The manifest, once the folder holds exactly what it names, as plain files of the right sizes."""
    try:
        if path.is_symlink() or not path.is_dir():
            raise DamagedCheckpointError(path, "is no folder of its own")
        # Hidden entries are what file browsers and NFS leave behind; they harm nothing, and nothing reads them.
        names = [name for name in os.listdir(path) if not name.startswith(".")]
        sizes = {name: _plain_file_bytes(path, name) for name in names}
        if sizes.get(_MANIFEST, 0) > _MAX_MANIFEST_BYTES:
            raise DamagedCheckpointError(path, f"{_MANIFEST} has {sizes[_MANIFEST]:,} bytes")
        if _MANIFEST not in sizes:
            raise DamagedCheckpointError(path, f"has no {_MANIFEST}")
        manifest = _parse_manifest((path / _MANIFEST).read_bytes())
    except DamagedFileError as error:
        raise DamagedCheckpointError(path, f"{_MANIFEST}: {error}") from None
    except OSError as error:
        raise DamagedCheckpointError(path, f"cannot be read ({error.strerror})") from error
    named_step = step_of(path)
    if named_step is not None and named_step != manifest.step:
        raise DamagedCheckpointError(path, f"{_MANIFEST} is of step {manifest.step}")
    for name, record in manifest.files.items():
        if name not in sizes:
            raise DamagedCheckpointError(path, f"has no {name}")
        if sizes[name] != record.size_bytes:
            reason = f"{name} has {sizes[name]:,} bytes, its manifest says {record.size_bytes:,}"
            raise DamagedCheckpointError(path, reason)
    strangers = sorted(set(sizes) - {*_FILES, _MANIFEST})
    if strangers:
        raise DamagedCheckpointError(path, f"holds {strangers[0]!r}, which its manifest does not name")
    return manifest


def _plain_file_bytes(path: Path, name: str) -> int:
    """Size of a directory's entry, which must be a file itself, not a link to one elsewhere."""
    status = os.lstat(path / name)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpointError(path, f"{name} is no plain file")
    return status.st_size


def _parse_manifest(text: bytes) -> _Manifest:
    fields = parse_json_object(text)
    if fields.get("format") != FORMAT:
        raise DamagedFileError(f"format is not {FORMAT!r}")
    if fields.get("format_version") != FORMAT_VERSION:
        raise DamagedFileError(f"format version {fields.get('format_version')!r}, this gptlab reads {FORMAT_VERSION}")
    step, files = fields.get("step"), fields.get("files")
    if type(step) is not int or step < 0:
        raise DamagedFileError(f"step is {step!r}")
    # Exactly the three names, so that no path that leads out of the folder can be one of them.
    if not isinstance(files, dict) or set(files) != set(_FILES):
        raise DamagedFileError(f"does not name exactly {', '.join(_FILES)}")
    return _Manifest(step, {name: _parse_record(name, files[name]) for name in _FILES})


def _parse_record(name: str, fields: object) -> FileRecord:
    if isinstance(fields, dict) and set(fields) == {"bytes", "sha256"}:
        size_bytes, sha256 = fields["bytes"], fields["sha256"]
        if type(size_bytes) is int and size_bytes >= 0 and isinstance(sha256, str):
            return FileRecord(size_bytes, sha256)
    raise DamagedFileError(f"the record of {name} is malformed")


def _manifest_text(step: int, records: Mapping[str, FileRecord]) -> bytes:
    files = {name: {"bytes": record.size_bytes, "sha256": record.sha256} for name, record in records.items()}
    return _json_text({"format": FORMAT, "format_version": FORMAT_VERSION, "step": step, "files": files})


def _json_text(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _require_json(value: object, where: str) -> None:
    """ValueError that names the place where `value` would not read back as the same value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}: JSON keys are strings")
            _require_json(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _require_json(inner, f"{where}[{index}]")
    elif type(value) is float and not math.isfinite(value):
        raise ValueError(f"{where} = {value}: JSON has no such number; use None where there is no value yet")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ValueError(f"{where} is a {type(value).__name__}, which would not read back from JSON as one")


def _why_not_saved(checkpoints_dir: Path, step: int, error: OSError, needed_bytes: int) -> str:
    free, older = "unknown", False
    with contextlib.suppress(OSError):
        free = f"{shutil.disk_usage(checkpoints_dir).free:,}"
        older = bool(list_checkpoints(checkpoints_dir))
    standing = "older checkpoints stand" if older else "none was saved before"
    return (
        f"cannot save the checkpoint of step {step} in {checkpoints_dir}: {error.strerror or error} "
        f"({needed_bytes:,} bytes needed, {free} free); {standing}: {_remedy(error.errno)}, then go on with --resume"
    )


def _remedy(number: int | None) -> str:
    if number in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
        return "free some space"
    if number == errno.EFBIG:
        return "lift the limit on file sizes (ulimit -f)"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the folder writable"
    return "put that right"
