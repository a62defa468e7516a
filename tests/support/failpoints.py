"""Every file operation that a process does below a folder, by name, and a SIGKILL at one of them. None is in gptlab.

Operations are found where Python hands them to the operating system, so that no list of gptlab's functions or files
has to be kept true. A failpoint is what is done to what, and how often that was done before: `write
checkpoints/.step-00000002.tmp/model.safetensors #3`. Such names do not depend on which thread is faster.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import io
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

_OS_CALLS = (
    "open", "close", "read", "write", "fsync", "fdatasync", "ftruncate", "truncate", "posix_fallocate", "rename",
    "replace", "link", "symlink", "mkdir", "rmdir", "unlink", "remove", "chmod", "utime", "listdir", "scandir", "stat",
    "lstat", "fstat", "statvfs",
)  # fmt: skip
_FILE_CALLS = ("write", "writelines", "flush", "truncate", "read", "readline", "readinto", "close")
_LOOKS = {
    "open", "close", "read", "readline", "readinto", "flush", "listdir", "scandir", "stat", "lstat", "fstat", "statvfs",
}  # fmt: skip
# Numbers of processes, in the names of what is not finished.
_PROCESS = re.compile(r"(\.(?:tmp|removed)-|\.)[0-9]+(?=$|/|\.tmp)")


def changes_files(point: str) -> bool:
    """Whether the operation leaves a trace. A kill before another leaves what a kill before the next of these does."""
    return point.partition(" ")[0] not in _LOOKS


def kind(point: str) -> str:
    """What points of several steps, layers and times have in common."""
    return re.sub(r" #.*", "", re.sub(r"\d+", "N", point))


def spread(points: Iterable[str]) -> list[str]:
    """One point of each kind: the middle one."""
    by_kind: dict[str, list[str]] = {}
    for point in points:
        by_kind.setdefault(kind(point), []).append(point)
    return [alike[len(alike) // 2] for alike in by_kind.values()]


@contextlib.contextmanager
def counting(*, folder: str, report: str, rank: int, of_rank: int = 0) -> Iterator[None]:
    """Within the context, operations below `folder` are counted; their names are the lines of `report` afterwards."""
    points = Failpoints(Path(folder))
    with points.installed() if rank == of_rank else contextlib.nullcontext():
        yield
    if rank == of_rank:
        Path(report).write_text("\n".join(points.reached))


@contextlib.contextmanager
def killing(*, folder: str, report: str, rank: int, point: str, of_rank: int = 0) -> Iterator[None]:
    """Within the context, this process is killed at `point`, which then stands in `report`."""
    with Failpoints(Path(folder), point, Path(report)).installed() if rank == of_rank else contextlib.nullcontext():
        yield


class Failpoints:
    """SIGKILL comes before the operation; in a write, after its first half. What was reached is written to `report`
    first, which proves that it was."""

    def __init__(self, folder: Path, kill_at: str | None = None, report: Path | None = None) -> None:
        self.reached: list[str] = []
        self._folder = os.path.abspath(folder)
        self._kill_at = kill_at
        self._report = report
        self._times: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._mine = threading.local()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in _OS_CALLS:
                if hasattr(os, name):
                    self._replace(stack, os, name, self._counted(name, getattr(os, name)))
            opening = self._opening(io.open)
            self._replace(stack, io, "open", opening)
            self._replace(stack, builtins, "open", opening)
            yield

    def _replace(self, stack: contextlib.ExitStack, place: Any, name: str, new: Any) -> None:
        stack.callback(setattr, place, name, getattr(place, name))
        setattr(place, name, new)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and not self._is_mine():
                writes = name == "open" and len(args) > 1 and args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                half = (lambda: function(args[0], args[1][: len(args[1]) // 2])) if name == "write" else None
                self._reach("create" if writes else name, self._place(args[0], kwargs), half)
            return function(*args, **kwargs)

        return call

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            place = None if self._is_mine() else self._place(file, kwargs)
            if place is None:
                return real(file, mode, *args, **kwargs)
            if not isinstance(file, int):
                self._reach("create" if set(mode) & set("wxa+") else "open", place)
            return _File(real(file, mode, *args, **kwargs), place, self._reach)

        return call

    def _is_mine(self) -> bool:
        return getattr(self._mine, "own", False)

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        """What is done in here is the test's."""
        self._mine.own = True
        try:
            yield
        finally:
            self._mine.own = False

    def _place(self, path: Any, kwargs: dict[str, Any]) -> str | None:
        """Where a path or descriptor lies below the folder; None for what lies elsewhere."""
        with self._own():
            try:
                if isinstance(path, int):
                    absolute = os.readlink(f"/proc/self/fd/{path}")
                elif (at := kwargs.get("dir_fd")) is not None:
                    absolute = os.path.join(os.readlink(f"/proc/self/fd/{at}"), os.fspath(path))
                else:
                    absolute = os.path.abspath(os.fspath(path))
            except OSError:
                return None
        if not isinstance(absolute, str) or not f"{absolute}/".startswith(f"{self._folder}/"):
            return None
        return _PROCESS.sub(r"\1", os.path.relpath(absolute, self._folder))

    def _reach(self, name: str, place: str | None, half: Callable[[], object] | None = None) -> None:
        """An operation that is about to happen; `half` does half of it."""
        if place is None or self._is_mine():
            return
        with self._lock:
            operation = f"{name} {place}"
            self._times[operation] += 1
            point = f"{operation} #{self._times[operation]}"
            self.reached.append(point)
        if point == self._kill_at:
            with self._own():
                if half is not None:
                    half()
                if self._report is not None:
                    self._report.write_text(point)
                os.kill(os.getpid(), signal.SIGKILL)


class _File:
    """A file whose operations are counted."""

    def __init__(self, file: Any, place: str, reach: Callable[..., None]) -> None:
        self._file = file
        self._place = place
        self._reach = reach

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._file, name)
        if name not in _FILE_CALLS:
            return value

        def call(*args: Any) -> Any:
            self._reach(name, self._place, (lambda: self._half(*args)) if name == "write" else None)
            return value(*args)

        return call

    def _half(self, data: Any) -> None:
        self._file.write(data[: len(data) // 2])
        self._file.flush()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(self._file)
