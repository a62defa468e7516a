"""What ends a run early, and what must not disturb it: a broken loss, a signal, the garbage collector."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from gptlab.runtime.processes.signal_watch import SignalWatch

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A line on the console: if somebody has stopped the terminal (Ctrl-S), the run does not wait for longer.
_ANSWER_SECONDS = 1.0
# torchrun looks after its workers ten times a second; a busy machine is slower. A person reads the answer first.
_ECHO_SECONDS = 3.0

# Automatic collections take about 500 ms and find next to nothing (nanochat, which as autoresearch collects every 5000
# steps).
_COLLECT_EVERY_STEPS = 5000


class TrainingFailed(Exception):  # noqa: N818 -- the name of a run's end (status "failed", exit code 3), not of a bug
    """Training cannot go on: one line that says why. The last checkpoint is untouched."""

    def __init__(self, reason: str, *, step: int | None = None, loss: float | None = None) -> None:
        """`step`: None for the step in hand. `loss`: nats/token, where the loss is what broke."""
        super().__init__(reason)
        self.step = step
        self.loss = loss


def check_loss(loss: float, max_loss: float) -> None:
    """TrainingFailed for a loss (nats/token) that is not finite, or above `max_loss` (autoresearch: NaN, or above
    100)."""
    if not math.isfinite(loss):
        raise TrainingFailed(f"the training loss is {loss}: often a learning rate that is too high", loss=loss)
    if loss > max_loss:
        raise TrainingFailed(
            f"the training loss exploded to {loss:.4g} nats/token, above runtime.max_loss = {max_loss:g}: "
            f"often a learning rate that is too high",
            loss=loss,
        )


class Preemption:
    """Within the context, SIGTERM and SIGINT only ask: the loop finishes its step, saves, and ends the run.

    `answer(name)` is called at once, in another thread, when the first of them came. A later SIGINT, from somebody who
    will not wait for the step, calls `stop_now(name)` there, which is to end the process; where there is none, it
    raises KeyboardInterrupt. A later SIGTERM does no harm. Handlers that were there before are back afterwards. Outside
    of the main thread Python lets nobody handle signals; there nothing is installed, and nothing is ever requested.
    """

    def __init__(
        self, answer: Callable[[str], None] = lambda name: None, stop_now: Callable[[str], None] | None = None
    ) -> None:
        self._answer = answer
        self._stop_now = stop_now
        self._signal: signal.Signals | None = None
        self._came_at = 0.0
        self._heard: signal.Signals | None = None
        self._heard_at = 0.0
        self._answered = threading.Event()
        self._watch: SignalWatch | None = None
        self._former: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def signal_name(self) -> str | None:
        """The first signal's name, as "SIGTERM"; None before one came."""
        return None if self._signal is None else self._signal.name

    def wait_for_answer(self) -> None:
        """Until `answer` has returned, so that nothing overtakes its words; no wait where no signal came."""
        if self._watch is not None and self._signal is not None:
            self._answered.wait(_ANSWER_SECONDS)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._watch = SignalWatch(self._hear)
            for number in _SIGNALS:
                self._former[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._former:
            number, handler = self._former.popitem()
            # None stands for a handler that was not installed from Python, and that Python cannot give back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _request(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, once it is back in Python."""
        if self._signal is None:
            self._signal, self._came_at = signal.Signals(number), time.monotonic()
        elif self._stop_now is None and number == signal.SIGINT and not _is_echo(time.monotonic() - self._came_at):
            raise KeyboardInterrupt

    def _hear(self, number: int) -> None:
        """In the thread of the watch."""
        if number in _SIGNALS and self._heard is None:
            self._heard, self._heard_at = signal.Signals(number), time.monotonic()
            try:
                self._answer(self._heard.name)
            finally:
                self._answered.set()
        elif number == signal.SIGINT and self._stop_now is not None and not _is_echo(time.monotonic() - self._heard_at):
            self._stop_now(signal.Signals(number).name)


def _is_echo(seconds: float) -> bool:
    """Whether a SIGINT so long after the first signal is torchrun's: what the terminal sends to all of its processes
    it sends to its workers once more."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"
    return launched and seconds < _ECHO_SECONDS


class QuietGarbageCollector:
    """Within the context, garbage is collected between steps and rarely, never in the middle of one.

    What set-up left is collected at entry, and what is alive then is not looked at again (`gc.freeze`).
    """

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def step(self, step: int) -> None:
        """To be called after each step, with the number of steps done."""
        if step > 0 and step % _COLLECT_EVERY_STEPS == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
