"""What of a folder that may be anybody's is read and shown: values of bounded size, and no links."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError, shortened
from gptlab.runtime.files.plain_file import read_json_object

MAX_CHARACTERS = 200

Signature = tuple[int, ...]


def signature(path: Path) -> Signature:
    """What changes when a file does, its modification time in nanoseconds last; empty where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return ()
    return found.st_mode, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def require_file(path: Path, max_bytes: int | None = None) -> None:
    """UserError unless `path` is a plain file, no link, of at most `max_bytes`."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is not a regular file")
    if max_bytes is not None and found.st_size > max_bytes:
        raise UserError(f"{path} has more than {max_bytes:,} bytes")


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a plain file. UserError for anything else."""
    require_file(path)
    return read_json_object(path)


def bounded(value: Any) -> Any:
    """A JSON value as itself where it is small, else as the beginning of its text."""
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 53):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return value if isinstance(value, list) and len(text) <= MAX_CHARACTERS else cut(text)


def cut(text: str, characters: int = MAX_CHARACTERS) -> str:
    """A text that UTF-8 can encode, of at most so many characters."""
    return shortened(text.encode("utf-8", "replace").decode(), characters)
