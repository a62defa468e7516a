"""Untrusted files: only regular files are opened, and only up to a maximum size.

A path may be a pipe that nobody writes to, or a device that never ends; opening the one or reading the other would take
forever. So a file is opened without blocking, and its type is checked before it is read. Symbolic links are followed,
since the Hugging Face cache consists of them. Everything here raises OSError, whose `strerror` gives the reason.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_plain(path: Path) -> BufferedReader:
    """`path.open("rb")` for regular files; OSError for folders, pipes, sockets and devices, without blocking."""
    descriptor = os.open(path, _FLAGS)
    try:
        _require_file(os.fstat(descriptor), path)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def require_plain(path: Path) -> None:
    """OSError unless the path is a regular file. For libraries that open it themselves."""
    _require_file(os.stat(path), path)


def read_plain(path: Path, max_bytes: int) -> bytes:
    """The content of a file of at most `max_bytes`; OSError for a larger one, which is not read."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"{size:,} bytes are more than the {max_bytes:,} that it can have", str(path))
        content = file.read(size + 1)
        if len(content) > size:
            raise OSError(errno.EBUSY, "it grows while it is read", str(path))
        return content


def _require_file(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
