"""How fast a run goes and how long it still takes, and the smoothed training loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# autoresearch and nanochat smooth the logged loss with 0.9, nanoGPT its MFU.
_BETA = 0.9
# The resolution of time.perf_counter; a coarse clock may return zero.
_SHORTEST_SECONDS = 1e-9


class LossEma:
    """Debiased exponential mean, as in autoresearch and nanochat: sum <- 0.9 sum + 0.1 x; mean = sum / (1 - 0.9^n).

    The division removes the pull of the initial zero: the first mean is the first value.
    """

    def __init__(self, beta: float = _BETA) -> None:
        self._beta = beta
        self._sum = 0.0
        self._count = 0

    @property
    def value(self) -> float | None:
        """The mean so far; None before the first value."""
        return None if self._count == 0 else self._mean()

    def update(self, value: float) -> float:
        """Add a value, and return the mean."""
        self._sum = self._beta * self._sum + (1 - self._beta) * value
        self._count += 1
        return self._mean()

    def state_dict(self) -> dict[str, float]:
        return {"sum": self._sum, "count": self._count}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._sum, self._count = float(state["sum"]), int(state["count"])

    def _mean(self) -> float:
        return self._sum / (1 - self._beta**self._count)


@dataclass(frozen=True, slots=True)
class ThroughputReading:
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs utilization, 1.0 at the peak; None where the peak is unknown."""


class Throughput:
    """Speed from tokens and seconds on the training clock.

    `flops_per_token` counts forward and backward; `peak_flops_per_second` is that of all devices together, or None. The
    step times that it smooths are no part of the run's state: a resumed run may have another speed.
    """

    def __init__(self, flops_per_token: float, peak_flops_per_second: float | None) -> None:
        self._flops_per_token = flops_per_token
        self._peak_flops_per_second = peak_flops_per_second
        self._step_seconds = LossEma()

    def flops(self, tokens: int) -> float:
        """Of `tokens`, forward and backward."""
        return self._flops_per_token * tokens

    def reading(self, tokens: int, seconds: float) -> ThroughputReading:
        """The speed of `tokens` in `seconds`."""
        tokens_per_second = tokens / max(seconds, _SHORTEST_SECONDS)
        peak = self._peak_flops_per_second
        mfu = None if peak is None else self._flops_per_token * tokens_per_second / peak
        return ThroughputReading(tokens_per_second, mfu)

    def step(self, tokens: int, seconds: float) -> ThroughputReading:
        """The speed of one optimizer step, which also enters the estimate of the time left."""
        self._step_seconds.update(seconds)
        return self.reading(tokens, seconds)

    def remaining_seconds(self, *, steps: int | None = None, seconds: float | None = None) -> float | None:
        """Training seconds left, given the `steps` or `seconds` that are left of the horizon (the sooner of both).

        A step is estimated at the smoothed duration of the last ones (a beta of 0.9 forgets nine tenths in 22 steps,
        and so follows a machine with other users). None where only steps are known and none has been timed.
        """
        mean = self._step_seconds.value
        estimates = [] if seconds is None else [seconds]
        if steps is not None and mean is not None:
            estimates.append(steps * mean)
        return max(0.0, min(estimates)) if estimates else None
