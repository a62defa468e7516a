"""Work in a process of its own that is forked from the test's, where torch is imported already: a tenth of a second
instead of four."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping

import psutil

Work = Callable[[], int | None]
"""What the process does; it ends with this exit code (None: 0)."""


def run_forked(work: Work, *, timeout: float = 120.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Do the work to its end, with these environment variables. A process that takes longer than `timeout` seconds is
    killed."""
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = Forked(work, out=out.fileno(), err=err.fileno(), **variables)
        until = time.monotonic() + timeout
        while process.poll() is None:
            if time.monotonic() > until:
                process.kill()
            time.sleep(0.002)
        process.stdout.close()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess((), process.wait(), out.read(), err.read())


class Forked:
    """A process with as much of subprocess.Popen's interface as the tests need. Signals meet Python's own handlers."""

    def __init__(self, work: Work, *, out: int | None = None, err: int | None = None, **variables: str) -> None:
        """`out`, `err`: descriptors for what it prints; without them, both are read from `stdout`."""
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _do(work, write if out is None else out, write if err is None else err, variables)
        os.close(write)
        self.stdout = os.fdopen(read, encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Its output that nobody has read yet, once it has ended; after `timeout` seconds, it and its children are
        killed."""
        timer = threading.Timer(timeout or 300.0, self._kill_all)
        timer.start()
        try:
            output = self.stdout.read()
            self.wait()
        finally:
            timer.cancel()
        self.stdout.close()
        return output, None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _kill_all(self) -> None:
        children = psutil.Process(self.pid).children(recursive=True)
        self.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _do(work: Work, out: int, err: int, variables: Mapping[str, str]) -> None:
    """Does not come back."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ |= {"OMP_NUM_THREADS": "1", **variables}
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = (os.fdopen(standard, "w", buffering=1, closefd=False) for standard in (1, 2))
        code = work() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
