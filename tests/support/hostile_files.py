"""What the tests of hostile files share: how a refusal is measured, and the files that every reader may meet."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cpu_limit import cpu_limit

from gptlab.config.errors import UserError, one_line

posix_only = pytest.mark.skipif(os.name != "posix", reason="needs pipes and files with holes")

MAX_CPU_SECONDS = cpu_limit(1.0)
"""Of the process, all threads: the promise itself. The slowest case takes 0.4 s on a quiet machine."""
MAX_TRACED_BYTES = 100 << 20
"""The worst is tokenizer.json of the largest size that is read. What a file asks for is a thousand times that."""


def refuse(call: Callable[[], Any], says: str = "", *, trace: bool = True, max_bytes: int = MAX_TRACED_BYTES) -> str:
    """The one line with which `call` ends, which names what it must, at once and without spending memory.

    Traced the second time, since that takes ten times as long.
    """
    line, seconds = _line_and_cpu_seconds(call)
    if seconds >= MAX_CPU_SECONDS:  # other processes evict the caches: once more before it counts
        line, seconds = _line_and_cpu_seconds(call)
    assert seconds < MAX_CPU_SECONDS
    assert says in line, line
    if trace:
        tracemalloc.start()
        try:
            _line(call)
            assert tracemalloc.get_traced_memory()[1] < max_bytes
        finally:
            tracemalloc.stop()
    return line


def _line_and_cpu_seconds(call: Callable[[], Any]) -> tuple[str, float]:
    began = time.process_time()
    line = _line(call)
    return line, time.process_time() - began


def _line(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    line = one_line(caught.value)
    assert "\n" not in line
    assert line.isprintable()
    assert len(line) <= 2000
    return line


def pipe(path: Path) -> None:
    """Whoever opens it waits for a writer."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    """A link to a device that never ends."""
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def hole(path: Path, size: int = 1 << 40) -> None:
    """A terabyte that takes no room on the disk."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def deep(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}")


def less_deep(path: Path) -> None:
    """Not too deep to be parsed, but for whatever walks it recursively."""
    path.unlink(missing_ok=True)
    path.write_bytes(b'{"x": ' * 400 + b"1" + b"}" * 400)


def twice(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(b'{"a": 1, "a": 2}')


def not_a_number(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(b'{"a": NaN}')


def many_digits(path: Path) -> None:
    """Whose conversion takes the square of their number."""
    path.unlink(missing_ok=True)
    path.write_bytes(b'{"a": ' + b"9" * 100_000 + b"}")


ANY_FILE = [pipe, endless, hole]
ANY_JSON = [*ANY_FILE, deep, less_deep, twice, not_a_number, many_digits]
