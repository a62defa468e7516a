"""metrics.jsonl: one JSON object a line, exact floats, nothing half-written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal

from gptlab.config.errors import UserError
from gptlab.config.plain_file import open_plain
from gptlab.runtime.files.append_file import AppendFile
from gptlab.runtime.files.strict_json import to_json

Kind = Literal["train", "eval", "sample", "core", "checkpoint", "event"]


class MetricsLog:
    """The metrics of a run, in the order in which they were measured."""

    def __init__(self, path: Path, on_line: Callable[[Kind, dict[str, object]], None] | None = None) -> None:
        """`on_line`: called with kind and fields of each line when it is written."""
        self._file = AppendFile(path)
        self._held: list[str] | None = None
        self._on_line = on_line

    def write(self, kind: Kind, /, **fields: object) -> None:
        """Append one line. Values are Python numbers, strings, lists and dicts; units are in the names."""
        line = to_json({"kind": kind, **fields})
        if self._held is None:
            self._file.write(line)
        else:
            self._held.append(line)
        if self._on_line is not None:
            self._on_line(kind, fields)

    def hold(self) -> None:
        """Keep lines in memory from here on, until `release` writes the one that belongs here."""
        self._held = []

    def release(self, first: Callable[[], None] = lambda: None) -> None:
        """End `hold`: what `first` writes, then the lines that waited."""
        held, self._held = self._held or [], None
        try:
            first()
        finally:
            for line in held:
                self._file.write(line)

    def position(self) -> int:
        """Bytes so far, without held lines: what a checkpoint stores, for `truncate` at resume. They are durable after
        `sync`. UserError while the disk refuses lines."""
        return self._file.position()

    def sync(self) -> None:
        """Make the lines up to here durable, from any thread. UserError if the disk refuses."""
        self._file.sync()

    def truncate(self, offset: int) -> bool:
        """Cut off what was written after a checkpoint took `offset`; False if this is not the file it saw."""
        return self._file.truncate(offset)

    def close(self) -> None:
        self.release()
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NoMetricsLog(MetricsLog):
    """For all processes of a run but rank 0, which writes."""

    def __init__(self) -> None:
        pass

    def write(self, kind: Kind, /, **fields: object) -> None:
        pass

    def close(self) -> None:
        pass


def read_metrics(path: Path) -> list[dict[str, object]]:
    """Every line of a metrics file, without an incomplete last line, as a killed run leaves it.

    Non-finite floats are the strings "nan", "inf", "-inf": `float(value)` reads both spellings. UserError if the file
    is missing or a line before the last is not JSON.
    """
    try:
        with open_plain(path) as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    records: list[dict[str, object]] = []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                records.append(_record(line))
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise UserError(f"{path}, line {number} is damaged: it is no JSON object") from error
    return records


def _record(line: bytes) -> dict[str, object]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError
    return value
