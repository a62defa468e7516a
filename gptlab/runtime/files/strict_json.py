"""JSON that any parser reads back bit for bit, and files of it that are complete or absent."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
from itertools import chain
from pathlib import Path
from typing import IO, Any

from gptlab.config.errors import UserError, cannot
from gptlab.config.plain_file import read_plain

MAX_JSON_BYTES = 1 << 24
"""The longest legitimate file, the record of a data set of 6,500 files, has 2 MB."""
MAX_JSON_DEPTH = 100
"""No legitimate file is nested deeper than ten. Code that walks the values may then recurse."""

_TEMPORARY = re.compile(r"\..+\.[0-9]+\.tmp")


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

    UserError if the disk is full or the folder cannot be written; the old file is then untouched.
    """
    text = to_json(value, indent=2) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with cannot(f"write {path}"):
            # Whatever has this name, such as a link to a file of the user's, is not written through.
            temporary.unlink(missing_ok=True)
            with temporary.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
                flush_to_disk(file)
            temporary.replace(path)
            sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sweep_temporaries(folder: Path) -> None:
    """Remove, as far as possible, what killed processes left of `write_json_atomic` in `folder`, to which nobody else
    may be writing now."""
    with contextlib.suppress(OSError):
        for path in [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]:
            path.unlink()


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in `path`; UserError if it is missing, damaged, not an object, or refused by `parse_json`."""
    try:
        with cannot(f"read {path}"):
            value = parse_json(read_plain(path, MAX_JSON_BYTES))
    except ValueError as error:
        raise UserError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it should hold one JSON object")
    return value


def parse_json(text: bytes) -> Any:
    """The value of strict UTF-8 JSON: no NaN or Infinity, no duplicate key, at most `MAX_JSON_DEPTH` deep. ValueError
    otherwise, as for integers of thousands of digits."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        nested = (item.values() if type(item) is dict else item for item in level if type(item) in (dict, list))
        level = list(chain.from_iterable(nested))
        if not level:
            return value
    raise ValueError("nested too deep")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key occurs twice")
    return unique


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def flush_to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make renames and new names in `path` survive a power cut, where the file system can."""
    if os.name == "nt":  # which cannot open a folder, and journals names
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders, and report EINVAL.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
