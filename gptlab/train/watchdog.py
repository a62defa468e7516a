"""What ends a run early, and what must not disturb it: a broken loss, a signal, the garbage collector."""

from __future__ import annotations

import gc
import math
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

# Seed 4: automatic collections take about 500 ms, and find next to nothing; seeds 3 and 4 collect every 5000 steps.
_COLLECT_EVERY_STEPS = 5000


class TrainingFailed(Exception):  # noqa: N818 -- the name of a run's end (status "failed", exit code 3), not of a bug
    """Training cannot go on: one line that says why. The last checkpoint still stands."""


def check_loss(loss: float, max_loss: float) -> None:
    """TrainingFailed for a loss (nats/token) that is not finite, or above `max_loss` (seed 3: NaN, or above 100)."""
    if not math.isfinite(loss):
        raise TrainingFailed(f"the training loss is {loss}: often a learning rate that is too high")
    if loss > max_loss:
        raise TrainingFailed(
            f"the training loss exploded to {loss:.4g} nats/token, above runtime.max_loss = {max_loss:g}: "
            f"often a learning rate that is too high"
        )


class Preemption:
    """Within the context, SIGTERM and SIGINT only ask: the loop finishes its step, saves, and ends the run.

    More signals do no harm. Handlers that were there before are back afterwards. Outside of the main thread Python lets
    nobody handle signals; there nothing is installed, and nothing is ever requested.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def signal_name(self) -> str | None:
        """The first signal's name, as "SIGTERM"; None before one came."""
        return None if self._signal is None else self._signal.name

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._former[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._former:
            number, handler = self._former.popitem()
            # None stands for a handler that was not installed from Python, and that Python cannot give back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal = signal.Signals(number)


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
