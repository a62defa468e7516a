"""SIGTERM and SIGINT: before the first step they end the run at once, afterwards it finishes its step and saves.

Before the first step a run imports, reads, tokenizes and compiles, mostly inside libraries. The signal raises in the
main thread, so that everything cleans up on the way out. Where the main thread is inside a library that lets no signal
through (training a tokenizer takes minutes on a large text), another thread ends the process after a grace period.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from gptlab.config.errors import UserError
from gptlab.runtime.processes.liveness import PeerFailed

GRACE_SECONDS = 3.0
"""More than a batch and the removal of unfinished folders take, and less than a person takes to press again."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Time for one line on the console: if the terminal is stopped (Ctrl-S), the run waits no longer.
_ANSWER_SECONDS = 1.0
# torchrun polls its workers ten times a second; a busy machine is slower. A person reads the answer first.
_ECHO_SECONDS = 3.0


class SignalWatch:
    """Calls `came(number)` in a thread of its own for each signal that has a handler in Python, at once: the handlers
    wait until the main thread returns from a library. Created and stopped by the main thread."""

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


class _Handled:
    """Within the context, SIGTERM and SIGINT call `_on_signal`. Former handlers are restored afterwards. Python handles
    signals in the main thread only: in another one nothing is installed."""

    def __init__(self, *, watch: bool) -> None:
        """`watch`: another thread calls `_hear` at once, also while the main thread is deep in a library."""
        self._signal: signal.Signals | None = None
        self._watches = watch
        self._watch: SignalWatch | None = None
        self._former: dict[signal.Signals, Any] = {}

    @property
    def signal_name(self) -> str | None:
        """The first signal's name, as "SIGTERM"; None before one came."""
        return None if self._signal is None else self._signal.name

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._watch = SignalWatch(self._hear) if self._watches else None
            for number in _SIGNALS:
                self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._former:
            number, handler = self._former.popitem()
            # None: the handler was not installed from Python, and Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._stop_watching()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, once it is back in Python."""
        raise NotImplementedError

    def _hear(self, number: int) -> None:
        """Runs in the watch's thread."""
        raise NotImplementedError

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


class Preemption(_Handled):
    """Within the context, SIGTERM and SIGINT are requests: the loop finishes its step, saves, and ends the run.

    The first one calls `answer(name)` at once, in another thread. A later SIGINT, from a user who will not wait for the
    step, calls `stop_now(name)` there, which ends the process; without `stop_now` it raises KeyboardInterrupt. A later
    SIGTERM has no effect.
    """

    def __init__(
        self, answer: Callable[[str], None] = lambda name: None, stop_now: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(watch=True)
        self._answer = answer
        self._stop_now = stop_now
        self._came_at = 0.0
        self._heard: signal.Signals | None = None
        self._heard_at = 0.0
        self._answered = threading.Event()

    @property
    def requested(self) -> bool:
        return self._signal is not None

    def listen(self) -> None:
        """Called where the loop decides whether to go on; several processes learn there of one another's signals."""

    def step(self, step_seconds: float, step: int) -> float:
        """Called after a step with its seconds and the number of steps done; listens too. Returns the seconds that
        count: of several processes, rank 0's."""
        return step_seconds

    def wait_for_answer(self) -> None:
        """Wait until `answer` has returned, so that its line comes first. Returns at once where no signal came."""
        if self._watch is not None and self._signal is not None:
            self._answered.wait(_ANSWER_SECONDS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._came_at = signal.Signals(number), time.monotonic()
        elif self._stop_now is None and number == signal.SIGINT and not _is_echo(time.monotonic() - self._came_at):
            raise KeyboardInterrupt

    def _hear(self, number: int) -> None:
        if number in _SIGNALS and self._heard is None:
            self._heard, self._heard_at = signal.Signals(number), time.monotonic()
            try:
                self._answer(self._heard.name)
            finally:
                self._answered.set()
        elif number == signal.SIGINT and self._stop_now is not None and not _is_echo(time.monotonic() - self._heard_at):
            self._stop_now(signal.Signals(number).name)


def _is_echo(seconds: float) -> bool:
    """Whether a SIGINT this long after the first signal comes from torchrun, which forwards to its workers what the
    terminal has already sent to all processes."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"
    return launched and seconds < _ECHO_SECONDS


class StoppedEarly(KeyboardInterrupt):
    """A signal came before the first step. A KeyboardInterrupt, so that no library handles it as its own error."""


def behind_signal(error: BaseException) -> BaseException:
    """The error that was already ending the run when a signal raised StoppedEarly; else `error` itself."""
    behind = error.__context__
    return behind if isinstance(error, StoppedEarly) and isinstance(behind, UserError | PeerFailed) else error


class EarlyStop(_Handled):
    """Within the context, the first SIGTERM or SIGINT raises StoppedEarly; later ones have no effect.

    If the context has not been left GRACE_SECONDS later, `end_now(signal_name)` is called in another thread to end the
    process.

    `exits`: the process exits soon after the context. Once `too_late` was called, signals stay ignored until it has:
    torchrun sends SIGTERM to all ranks as soon as the first one exits with a code other than 0, and a rank that is
    still shutting down its interpreter would report -15 instead of its own exit code.
    """

    def __init__(self, end_now: Callable[[str], None] | None = None, *, exits: bool = False) -> None:
        super().__init__(watch=end_now is not None and os.name == "posix")
        self._end_now = end_now
        self._exits = exits
        self._over = threading.Event()
        self._settled = False

    def preparation_is_over(self) -> None:
        """Called right before the first step. Raises a StoppedEarly that a library has swallowed. From here on no other
        thread ends the process; until `Preemption` takes over, signals raise as before."""
        if self._signal is not None:
            raise StoppedEarly(self._signal.name)
        self._stop_watching()

    def too_late(self) -> None:
        """The end of the run is decided: from here on signals have no effect."""
        self._settled = True
        self._stop_watching()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._exits and self._settled:
            # A handler in Python would not do: the interpreter restores the default one before it ends.
            self._former = dict.fromkeys(self._former, signal.SIG_IGN)
        super().__exit__(kind, error, trace)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None and not self._settled:
            self._signal = signal.Signals(number)
            raise StoppedEarly(self._signal.name)

    def _hear(self, number: int) -> None:
        if self._end_now is not None and number in _SIGNALS and not self._over.wait(GRACE_SECONDS):
            self._end_now(signal.Signals(number).name)

    def _stop_watching(self) -> None:
        self._over.set()
        super()._stop_watching()
