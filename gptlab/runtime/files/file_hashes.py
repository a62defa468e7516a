"""SHA-256 of whole files, cached for large ones until they change.

SHA-256 runs at 0.5 to 2 GB/s, so the start of a run would wait minutes for 100 GB. A hash is kept in CACHE/hashes/
under the file's path, and is valid while device, inode, size, modification and change time are the same.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from gptlab.config.errors import UserError
from gptlab.config.plain_file import open_plain
from gptlab.runtime.files.strict_json import read_json_object, write_json_atomic

REMEMBERED_BYTES = 64 << 20
"""Smaller files are hashed each time: a tenth of a second at most."""
SETTLED_NS = 2_000_000_000
"""A file written so shortly before it was hashed may be written again without a new time: clocks of file systems tick
in 4 ms (Linux) to 2 s (FAT)."""


class ChangedFileError(UserError):
    """A file is not what it was a moment ago."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} changed while it was read: start again once nothing writes to it")


def file_sha256(path: Path, root: Path) -> bytes:
    """SHA-256 of the bytes in the file; `root` is the cache. OSError for what cannot be read, and ChangedFileError."""
    with open_plain(path) as stream:
        before = _stamp(os.fstat(stream.fileno()))
        large = before["size"] > REMEMBERED_BYTES
        record = (
            root
            / "hashes"
            / f"{hashlib.sha256(os.path.abspath(path).encode('utf-8', 'surrogateescape')).hexdigest()}.json"
        )
        if large and (known := _remembered(record, before)) is not None:
            return known
        began = time.time_ns()
        digest = hashlib.file_digest(stream, "sha256").digest()
        if _stamp(os.fstat(stream.fileno())) != before:
            raise ChangedFileError(path)
    if large and began - max(before["mtime_ns"], before["ctime_ns"]) > SETTLED_NS:
        with suppress(OSError, UserError):  # a cache that is shared read-only, or full
            record.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(record, {**before, "sha256": digest.hex()})
    return digest


def _stamp(status: os.stat_result) -> dict[str, int]:
    return {
        "device": status.st_dev, "inode": status.st_ino, "size": status.st_size,
        "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns,
    }  # fmt: skip


def _remembered(record: Path, stamp: dict[str, int]) -> bytes | None:
    try:
        values = read_json_object(record)
        digest = bytes.fromhex(str(values.pop("sha256")))
    except (UserError, OSError, KeyError, ValueError):
        return None
    return digest if values == stamp and len(digest) == 32 else None
