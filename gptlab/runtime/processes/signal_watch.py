"""Signals, noticed at once: Python's own handlers wait until the main thread returns from a library call."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable


class SignalWatch:
    """Calls `came(number)` in a thread of its own for each signal that has a handler in Python.

    Created and stopped by the main thread.
    """

    def __init__(self, came: Callable[[int], None]) -> None:
        self._came = came
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="gptlab-signals", daemon=True).start()

    def stop(self) -> None:
        signal.set_wakeup_fd(self._former_fd)
        self._write.close()  # which ends the thread's wait

    def _run(self) -> None:
        with self._read:
            while number := self._read.recv(1):
                self._came(number[0])
