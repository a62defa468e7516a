"""JSON that any parser reads back bit for bit, and files of it that are whole or absent."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path

from gptlab.config.errors import UserError


def to_json(value: object, *, indent: int | None = None) -> str:
    """Strict JSON (RFC 8259), floats by Python's shortest repr, so that they read back bit for bit.

    The standard has no NaN or infinity: they become the strings "nan", "inf" and "-inf", which `float()` reads.
    """
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_spell_non_finite(value), allow_nan=False, indent=indent)


def _spell_non_finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {key: _spell_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_non_finite(item) for item in value]
    return value


def write_json_atomic(path: Path, value: object) -> None:
    """Replace `path` by `value` as indented JSON; after a crash at any moment it holds the old text or the new.

    UserError where the disk is full or the folder cannot be written; the old file then stands.
    """
    text = to_json(value, indent=2) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in `path`; UserError where it is missing, damaged, or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it should hold one JSON object")
    return value


def sync_directory(path: Path) -> None:
    """Make renames and new names in `path` survive a power cut. Windows cannot open a folder, and journals names."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
