"""metrics.jsonl: one JSON object a line, exact floats, nothing half-written; and the files that grow by whole lines."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Literal

from gptlab.config.errors import UserError, cannot
from gptlab.runtime.files.plain_file import MAX_JSON_BYTES, open_plain, to_json

_OWN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

_BLOCK_BYTES = 1 << 20

Kind = Literal["train", "eval", "sample", "core", "checkpoint", "event"]


class AppendFile:
    """Appends lines of UTF-8 text, each passed to the operating system at once, so that a SIGKILL loses none.

    Opening removes an incomplete last line, which a killed process left. While the disk refuses bytes (full, over
    quota), lines wait in memory and are written, in order, as soon as the disk accepts them again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = b""
        with cannot(f"write {path}"):
            # Links are refused: the file is truncated, and an untrusted run folder must not lead to a file of the
            # user's. So are pipes, which have no end to seek.
            self._file = open(path, "a+b", buffering=0, opener=lambda name, flags: os.open(name, flags | _OWN, 0o666))  # noqa: SIM115
            self._size = self._file.seek(0, os.SEEK_END)
            if self._size:
                self._cut(self._size)

    def append(self, line: str) -> None:
        """Append `line` (without its newline)."""
        self._waiting += line.encode("utf-8", "replace") + b"\n"
        with suppress(OSError):
            self._drain()

    def position(self) -> int:
        """Bytes passed to the operating system so far, for `truncate`. UserError while lines wait for the disk.

        A checkpoint that refers to them may survive a power cut, so it is published after a `sync`.
        """
        with cannot(f"write {self.path}"):
            self._drain()
        return self._size

    def sync(self) -> None:
        """Make durable what was written before this call. UserError if the disk refuses. Another thread may do this
        while lines are written."""
        with cannot(f"write {self.path}"):
            os.fsync(self._file.fileno())

    def truncate(self, offset: int) -> bool:
        """Remove everything after the first `offset` bytes.

        False if the file is not the one that had this offset (shorter, or no line ends there); it is then truncated
        after the last line that ends before.
        """
        self._waiting = b""
        self._cut(min(offset, self._size))
        os.fsync(self._file.fileno())
        return self._size == offset

    def close(self) -> None:
        """UserError if the last lines could not be written."""
        if not self._file.closed:
            try:
                self.position()
            finally:
                self._file.close()

    def _drain(self) -> None:
        """Write what waits. OSError while the disk refuses it; no line stays half-written."""
        written = 0
        try:
            while written < len(self._waiting):
                written += self._file.write(self._waiting[written:])
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._size)
            raise
        self._size, self._waiting = self._size + written, b""

    def _cut(self, limit: int) -> None:
        """Remove what comes after the last newline among the first `limit` bytes."""
        self._size = 0
        if limit > 0:
            with mmap.mmap(self._file.fileno(), limit, access=mmap.ACCESS_READ) as content:
                self._size = content.rfind(b"\n") + 1
        self._file.truncate(self._size)


class MetricsLog(AppendFile, AbstractContextManager["MetricsLog"]):
    """The metrics of a run, in the order in which they were measured."""

    def __init__(self, path: Path, on_line: Callable[[Kind, dict[str, object]], None] | None = None) -> None:
        """`on_line`: called with kind and fields of each line when it is written."""
        super().__init__(path)
        self._held: list[str] | None = None
        self._on_line = on_line

    def write(self, kind: Kind, /, **fields: object) -> None:
        """Append one line. Values are Python numbers, strings, lists and dicts; units are in the names."""
        line = to_json({"kind": kind, **fields})
        (self.append if self._held is None else self._held.append)(line)
        if self._on_line is not None:
            self._on_line(kind, fields)

    def hold(self) -> None:
        """Keep lines in memory from here on, and out of `position`, until `release` writes the one that belongs
        here."""
        self._held = []

    def release(self, first: Callable[[], None] = lambda: None) -> None:
        """End `hold`: what `first` writes, then the lines that waited."""
        held, self._held = self._held or [], None
        try:
            first()
        finally:
            for line in held:
                self.append(line)

    def close(self) -> None:
        if self._held is not None:
            self.release()
        super().close()

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, object]]:
    """Every line of a metrics file, without an incomplete last line, as a killed run leaves it.

    Non-finite floats are the strings "nan", "inf", "-inf": `float(value)` reads both spellings. UserError if the file
    is missing or a line before the last is not JSON.
    """
    with cannot(f"read {path}"), open_plain(path) as file:
        lines = file.read().split(b"\n")
    records: list[dict[str, object]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line or b"{}")
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records += [record] if line else []
        elif number < len(lines):
            raise UserError(f"{path}, line {number} is damaged: it is not a JSON object")
    return records


def blocks_of_lines(path: Path) -> Iterator[bytes]:
    """The complete lines of a metrics file, about a megabyte at a time. ValueError for a line that no run writes.

    Not from a memory map: a run that is resumed meanwhile truncates the file, which would end a process that reads on
    in the map.
    """
    rest = b""
    with cannot(f"read {path}"), open_plain(path) as file:
        while block := file.read(_BLOCK_BYTES):
            end = block.rfind(b"\n") + 1
            if end:
                yield rest + block[:end]
                rest = block[end:]
            else:
                rest += block
            if len(rest) > MAX_JSON_BYTES:
                raise ValueError(f"a line has more than {MAX_JSON_BYTES:,} bytes")


def lines_of_kind(text: bytes, kind: Kind) -> Iterator[bytes]:
    """The complete lines of one kind, each with its newline. The others, a hundred times as many as validations, are
    neither parsed nor split."""
    # `jq -c` leaves out the space, and `jq -S` sorts keys. Quotes within a text are escaped: what is found is a key.
    found = re.finditer(rb'"kind": ?"%s"[^\n]*\n' % kind.encode(), text)
    return (text[_line_start(text, one.start()) : one.end()] for one in found)


def last_line_of_kind(text: bytes, kind: Kind) -> bytes:
    """The last such line; empty where there is none."""
    marks = (b'"kind":%s"%s"' % (space, kind.encode()) for space in (b" ", b""))
    at = max(text.rfind(mark, 0, text.rfind(b"\n") + 1) for mark in marks)
    return text[_line_start(text, at) : text.find(b"\n", at) + 1] if at >= 0 else b""


def _line_start(text: bytes, place: int) -> int:
    return text.rfind(b"\n", 0, place) + 1
