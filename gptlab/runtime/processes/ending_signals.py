"""Signals that end a process which has something to clean up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING_SIGNALS = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))  # not on Windows


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within the context, SIGTERM and SIGHUP (the terminal is gone) raise SystemExit with the exit code that shells
    report for them, so that everything is cleaned up. One that is ignored, as under `nohup`, stays ignored. Outside of
    the main thread, where Python allows no signal handlers, nothing changes."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    caught = [number for number in ENDING_SIGNALS if in_main_thread and signal.getsignal(number) != signal.SIG_IGN]
    former = {number: signal.signal(number, end) for number in caught}
    try:
        yield
    finally:
        for number, handler in former.items():
            # None stands for a handler that was not installed from Python, which cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
