"""SIGTERM and SIGINT before the first step, when there is no step to finish and nothing to save: end within a moment.

From the first step on `Preemption` has the signals. Before it, a run imports, reads, tokenizes and compiles, most of it
inside libraries. The signal raises in the main thread, so that everything on the way out cleans up; where the main
thread is deep inside a library that lets no signal through (learning a tokenizer's merges takes minutes on a large
text), another thread ends the process after a grace.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from gptlab.config.errors import UserError
from gptlab.runtime.processes.liveness import PeerFailed
from gptlab.runtime.processes.signal_watch import SignalWatch

GRACE_SECONDS = 3.0
"""More than a batch in hand and the removal of half-made folders take; less than a person takes to press again."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StoppedEarly(KeyboardInterrupt):
    """A signal came before the first step. A KeyboardInterrupt, so that no library takes it for an error of its own."""


def behind_signal(error: BaseException) -> BaseException:
    """The error by which the run was already ending when a signal made it StoppedEarly; else `error` itself."""
    behind = error.__context__
    return behind if isinstance(error, StoppedEarly) and isinstance(behind, UserError | PeerFailed) else error


class EarlyStop:
    """Within the context, the first SIGTERM or SIGINT raises StoppedEarly; more of them change nothing.

    `end_now(signal_name)` is called in another thread when GRACE_SECONDS later the context has still not been left; it
    is to end the process. Outside of the main thread nothing is installed, as in `Preemption`.

    `exits`: the process exits soon after the context. Once `too_late` was called, signals then stay ignored until it
    has: torchrun sends SIGTERM to all ranks as soon as the first one has exited with another code than 0, and a rank
    that is still tearing down its interpreter would report -15 instead of its own exit code.
    """

    def __init__(self, end_now: Callable[[str], None] | None = None, *, exits: bool = False) -> None:
        self._end_now = end_now
        self._exits = exits
        self._signal: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}
        self._watch: _Watch | None = None
        self._settled = False

    @property
    def signal_name(self) -> str | None:
        """ "SIGTERM" or "SIGINT"; None before one came."""
        return None if self._signal is None else self._signal.name

    def preparation_is_over(self) -> None:
        """To be called right before the first step. Raises what a library may have swallowed; from here on no other
        thread ends the process, and until `Preemption` takes over, signals raise as before."""
        if self._signal is not None:
            raise StoppedEarly(self._signal.name)
        self._stop_watching()

    def too_late(self) -> None:
        """How the run ends is settled: from here on signals change nothing. torchrun sends one to every process of a
        run as soon as the first one has ended with another exit code than 0."""
        self._settled = True
        self._stop_watching()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            if self._end_now is not None and os.name == "posix":
                self._watch = _Watch(self._end_now)
            for number in _SIGNALS:
                self._former[number] = signal.signal(number, self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._former:
            number, handler = self._former.popitem()
            if self._exits and self._settled:
                # Not a handler in Python, which the interpreter replaces by the default one before it ends.
                signal.signal(number, signal.SIG_IGN)
                continue
            # None stands for a handler that was not installed from Python, and that Python cannot give back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._stop_watching()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None and not self._settled:
            self._signal = signal.Signals(number)
            raise StoppedEarly(self._signal.name)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


class _Watch(SignalWatch):
    """Ends the process a grace after a signal, unless it is stopped before."""

    def __init__(self, end_now: Callable[[str], None]) -> None:
        self._end_now = end_now
        self._over = threading.Event()
        super().__init__(self._wait)

    def stop(self) -> None:
        self._over.set()
        super().stop()

    def _wait(self, number: int) -> None:
        if number in _SIGNALS and not self._over.wait(GRACE_SECONDS):
            self._end_now(signal.Signals(number).name)
