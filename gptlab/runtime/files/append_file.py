"""A file that grows by whole lines and can be truncated to its length at a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from gptlab.config.errors import UserError

_BLOCK_BYTES = 65_536


class AppendFile:
    """Appends lines of UTF-8 text, each passed to the operating system at once, so that a SIGKILL loses none.

    Opening removes an incomplete last line, which a killed process left. While the disk refuses bytes (full, over
    quota), lines wait in memory and are written, in order, as soon as the disk accepts them again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = b""
        self._error: OSError | None = None
        try:
            self._file = os.fdopen(_open_own(path), "a+b", buffering=0)
            length = self._file.seek(0, os.SEEK_END)
            self._size = self._end_of_whole_lines(length)
            if self._size < length:
                self._file.truncate(self._size)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error

    def write(self, line: str) -> None:
        """Append `line` (without its newline)."""
        self._waiting += line.encode("utf-8", "replace") + b"\n"
        self._drain()

    def position(self) -> int:
        """Bytes passed to the operating system so far. UserError while lines wait for the disk.

        A checkpoint that refers to them may survive a power cut, so it is published after a `sync`.
        """
        self._drain()
        self._raise_if_waiting()
        return self._size

    def sync(self) -> None:
        """Make durable what was written before this call. UserError if the disk refuses. Another thread may do this
        while lines are written."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error}") from error

    def truncate(self, offset: int) -> bool:
        """Remove everything after the first `offset` bytes.

        False if the file is not the one that had this offset (shorter, or no line ends there); it is then truncated
        after the last line that ends before.
        """
        self._waiting = b""
        self._size = self._end_of_whole_lines(min(offset, self._size))
        self._file.truncate(self._size)
        os.fsync(self._file.fileno())
        return self._size == offset

    def close(self) -> None:
        """UserError if the last lines could not be written."""
        if self._file.closed:
            return
        self._drain()
        self._file.close()
        self._raise_if_waiting()

    def _drain(self) -> None:
        try:
            written = 0
            while written < len(self._waiting):
                written += self._file.write(self._waiting[written:])
        except OSError as error:
            self._error = error
            with contextlib.suppress(OSError):  # no line stays half-written
                self._file.truncate(self._size)
        else:
            self._size += len(self._waiting)
            self._waiting = b""

    def _raise_if_waiting(self) -> None:
        if self._waiting and self._error is not None:
            raise UserError(f"cannot write {self.path}: {self._error.strerror or self._error}") from self._error

    def _end_of_whole_lines(self, limit: int) -> int:
        """The position after the last newline among the first `limit` bytes; 0 if there is none."""
        while limit > 0:
            start = max(0, limit - _BLOCK_BYTES)
            self._file.seek(start)
            newline = self._file.read(limit - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            limit = start
        return 0


def _open_own(path: Path) -> int:
    """A descriptor to read and append. Links are refused: the file is truncated, and an untrusted run folder must not
    lead to a file of the user's. So are pipes, which may never be read."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a pipe", str(path))
    return descriptor
