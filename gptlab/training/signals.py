"""SIGTERM, SIGINT, SIGHUP (the terminal is gone) and SIGUSR1 (which schedulers are told to send before the time is
over): before the first step they end the run at once, afterwards it finishes its step and saves.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

from gptlab.config.errors import UserError
from gptlab.runtime.processes.liveness import PeerFailed

GRACE_SECONDS = 3.0
"""More than a batch and the removal of unfinished folders take, and less than a person takes to press again."""

_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
_SIGNALS = tuple(signal.Signals[name] for name in _NAMES if hasattr(signal, name))  # the last two: not on Windows
# Time for one line on the console: if the terminal is stopped (Ctrl-S), the run waits no longer.
_ANSWER_SECONDS = 1.0
# torchrun polls its workers ten times a second; a busy machine is slower. A person reads the answer first.
_ECHO_SECONDS = 3.0
# A step that takes so much longer than the one before, and within which SIGCONT came, was paused.
_PAUSE_SECONDS = 1.0


class StoppedEarly(KeyboardInterrupt):
    """A signal came before the first step. A KeyboardInterrupt, so that no library handles it as its own error."""


def behind_signal(error: BaseException) -> BaseException:
    """The error that was already ending the run when a signal raised StoppedEarly; else `error` itself."""
    behind = error.__context__
    return behind if isinstance(error, StoppedEarly) and isinstance(behind, UserError | PeerFailed) else error


@dataclass(slots=True)
class Signals:
    """Handles SIGTERM, SIGINT, SIGHUP and SIGUSR1 within the context, in the main thread: in another one Python can
    install nothing. A SIGHUP that is ignored (nohup) stays ignored.

    The first signal raises StoppedEarly; later ones have no effect. Within `training`, the first signal is a request to
    stop, and a later SIGINT comes from a user who will not wait for the end of the step; any other later one has no
    effect.
    """

    end_now: Callable[[str], None] | None = None
    """Called in another thread with the signal's name, to end the process, where the context has not been left
    GRACE_SECONDS after the first signal. None: the process belongs to a caller. Otherwise it exits soon after the
    context, and once `too_late` was called, signals stay ignored until it has: a second Ctrl-C, or the SIGTERM that
    torchrun sends to all ranks as soon as one exits with a code other than 0, would give an exit code of -2 or -15 to a
    process that is shutting down its interpreter, a quarter of a second with torch."""
    stop_now: Callable[[str], None] | None = None
    """The same at a later SIGINT within `training`. None: it raises KeyboardInterrupt."""
    stopped_early: str | None = None
    """The name of the signal that raised StoppedEarly."""
    signal_name: str | None = None
    """The name of the first signal that came within `training`."""
    _answer: Callable[[str], None] | None = None
    _answered: threading.Event = field(default_factory=threading.Event)
    _prepared: threading.Event = field(default_factory=threading.Event)
    _settled: bool = False
    _requested_at: float = 0.0
    """When the main thread handled the first signal within `training` ..."""
    _heard_at: float = 0.0
    """... and when the other thread did."""
    _continued_at: float = float("-inf")
    """When the process, which something had stopped, was continued (Ctrl-Z and fg)."""
    _step_seconds: float | None = None
    """Of the last step, as they count."""
    _former: dict[signal.Signals, Any] = field(default_factory=dict)
    """Handlers outside of the context; empty where none could be installed."""
    _wakeup: socket.socket | None = None
    _former_wakeup: int = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            if self.end_now is not None and os.name == "posix":
                self._watch()
            heard = [number for number in _SIGNALS if self._hears(number)]
            self._former = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            # A handler in Python would not do to ignore signals: the interpreter restores the default one before it
            # ends. None: the former handler was not installed from Python, and Python cannot restore it.
            former = signal.SIG_DFL if handler is None else handler
            signal.signal(number, signal.SIG_IGN if self.end_now and self._settled else former)
        self._prepared.set()
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._former_wakeup)
            self._wakeup.close()  # which ends the thread's wait

    @contextmanager
    def training(self, answer: Callable[[str], None] = lambda name: None) -> Iterator[None]:
        """Entered right before the first step. The first signal calls `answer` with its name at once, in another
        thread. Raises a StoppedEarly that a library has swallowed."""
        if self.stopped_early is not None:
            raise StoppedEarly(self.stopped_early)
        self._prepared.set()
        if self._former and self._wakeup is None:
            self._watch()
        self._answer = answer
        hears_pauses = bool(self._former) and os.name == "posix" and signal.getsignal(signal.SIGCONT) == signal.SIG_DFL
        if hears_pauses:
            signal.signal(signal.SIGCONT, self._on_continued)
        try:
            yield
        finally:
            self._answer = None
            if hears_pauses:
                signal.signal(signal.SIGCONT, signal.SIG_DFL)

    def too_late(self) -> None:
        """The end of the run is decided: from here on signals have no effect."""
        self._settled = True
        self._prepared.set()

    # --- what the loop asks

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def listen(self) -> None:
        """Called where the loop decides whether to continue; several processes learn there of one another's signals."""

    def step(self, step_seconds: float, step: int) -> float:
        """Called after a step with its seconds and the number of steps done; listens too. Returns the seconds that
        count: of several processes, rank 0's; of a step within which the process was stopped and continued, those of
        the step before."""
        was_continued = time.perf_counter() - self._continued_at < step_seconds
        # Slurm also sends SIGCONT to processes that it has not stopped.
        if was_continued and self._step_seconds is not None and step_seconds > self._step_seconds + _PAUSE_SECONDS:
            return self._step_seconds
        self._step_seconds = step_seconds
        return step_seconds

    def wait_for_answer(self) -> None:
        """Wait until `answer` has returned, so that its line comes first. Returns at once where no signal came."""
        if self.requested:
            self._answered.wait(_ANSWER_SECONDS)

    # --- what a signal does

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, once it is back in Python."""
        name = signal.Signals(number).name
        if self._answer is not None:
            if self.signal_name is None:
                self.signal_name, self._requested_at = name, time.monotonic()
            elif self.stop_now is None and number == signal.SIGINT and not _is_echo(self._requested_at):
                raise KeyboardInterrupt
        elif self.stopped_early is None and not self._settled:
            self.stopped_early = name
            raise StoppedEarly(name)

    def _on_continued(self, number: int, frame: FrameType | None) -> None:
        self._continued_at = time.perf_counter()

    def _hear(self, number: int) -> None:
        """In another thread, at once, also while the main thread is deep in a library."""
        name, answer = signal.Signals(number).name, self._answer
        if answer is None:
            if self.end_now is not None and not self._prepared.wait(GRACE_SECONDS):
                self.end_now(name)
        elif not self._heard_at:
            self._heard_at = time.monotonic()
            try:
                answer(name)
            finally:
                self._answered.set()
        elif number == signal.SIGINT and self.stop_now is not None and not _is_echo(self._heard_at):
            self.stop_now(name)

    def _hears(self, number: signal.Signals) -> bool:
        """nohup ignores SIGHUP. SIGUSR1 is left to a program that calls gptlab (submitit requeues its job by it)."""
        if number.name == "SIGHUP":
            return signal.getsignal(number) is not signal.SIG_IGN
        return number.name != "SIGUSR1" or self.end_now is not None

    def _watch(self) -> None:
        """Start the thread that hears signals. Python writes the number of each that has a handler in Python to the
        socket at once; the handler itself waits until the main thread returns from a library."""
        read, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._former_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

        def run() -> None:
            with read:
                while number := read.recv(1):
                    if number[0] in _SIGNALS and self._hears(signal.Signals(number[0])):
                        self._hear(number[0])

        threading.Thread(target=run, name="gptlab-signals", daemon=True).start()


def _is_echo(first_at: float) -> bool:
    """Whether a SIGINT now, after a first signal at `first_at`, comes from torchrun, which forwards to its workers what
    the terminal has already sent to all processes."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    return launched and time.monotonic() - first_at < _ECHO_SECONDS
