"""A growing file of lines, read once: each call reads what was appended since the call before.

A file that was replaced or truncated is read again from its start: a resumed run removes the lines after its
checkpoint and writes others.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gptlab.config.errors import UserError, cannot

BLOCK_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 20
"""A run's longest lines are samples, of a few kB."""
ANCHOR_BYTES = 512
"""What is compared of the lines before the place that was reached. A line of metrics.jsonl has about 300 bytes, with
times that no other process would measure."""

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class Tail:
    """The lines of `path`, which another process may append to, truncate or replace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        """Bytes of lines read so far, in all: each byte counts once, unless the file was truncated or replaced."""
        self.restarts = 0
        """How often reading began again: whoever keeps what was read must drop it when this changes."""
        self._reached = 0
        self._seen: tuple[int, ...] = ()
        self._anchor = self._incomplete = b""

    def blocks(self) -> Iterator[bytes]:
        """What is new, as blocks of whole lines; an incomplete last line waits for its end. A file that does not exist
        has no lines. UserError for a link, a pipe or another thing that is no file, and for lines above
        `MAX_LINE_BYTES`."""
        with cannot(f"read {self.path}"):
            try:
                found = os.lstat(self.path)
            except FileNotFoundError:
                self._restart()
                return
        seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if seen == self._seen:
            return
        with cannot(f"read {self.path}"):
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{self.path} is not a regular file")
            descriptor = os.open(self.path, _FLAGS)
        with cannot(f"read {self.path}"), open(descriptor, "rb", buffering=0) as file:
            replaced = self._seen[:2] not in ((), seen[:2])
            file.seek(max(0, self._reached - len(self._anchor)))
            if replaced or found.st_size < self._reached or file.read(len(self._anchor)) != self._anchor:
                self._restart()
                file.seek(0)
            # Up to the size that was seen: what is appended meanwhile belongs to the next call, and a writer that is
            # faster than this reader must not keep it here.
            while block := file.read(min(BLOCK_BYTES, found.st_size - self._reached)):
                yield from self._lines(block)
        self._seen = seen

    def _lines(self, block: bytes) -> Iterator[bytes]:
        self.bytes_read += len(block)
        self._reached += len(block)
        self._anchor = (self._anchor + block[-ANCHOR_BYTES:])[-ANCHOR_BYTES:]
        complete = block.rfind(b"\n") + 1
        if complete == 0:
            self._incomplete += block
        else:
            lines, self._incomplete = self._incomplete + block[:complete], block[complete:]
            yield lines
        if len(self._incomplete) > MAX_LINE_BYTES:
            raise UserError(f"{self.path} is damaged: a line has more than {MAX_LINE_BYTES:,} bytes")

    def _restart(self) -> None:
        self.restarts += self._reached > 0
        self._reached, self._seen, self._anchor, self._incomplete = 0, (), b"", b""
