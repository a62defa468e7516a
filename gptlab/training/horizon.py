"""How far a run is, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from gptlab.config.run import Horizon
from gptlab.training.state import TrainState

# autoresearch's five minutes on an H100 hold 953 steps (its program.md).
CLOCK_STEP_FRACTION = 1e-3


@dataclass(frozen=True, slots=True)
class Finish:
    """The horizon of a run with its unit resolved: a number of steps, or a number of seconds on the clock."""

    steps: int | None
    seconds: float | None
    until_val_loss: float | None = None

    @classmethod
    def of(cls, horizon: Horizon, *, tokens_per_step: int, flops_per_token: float, scaling_params: int) -> Finish:
        steps = horizon.total_steps(
            tokens_per_step=tokens_per_step, flops_per_token=flops_per_token, scaling_params=scaling_params
        )
        return cls(steps, horizon.amount if steps is None else None, horizon.until_val_loss)

    def progress(self, step: int, train_seconds: float) -> float:
        """The fraction of the run that is done, in [0, 1]."""
        if self.steps is not None:
            return min(step / self.steps, 1.0)
        assert self.seconds is not None
        return min(train_seconds / self.seconds, 1.0)

    @property
    def step_fraction(self) -> float:
        """The fraction of the run that one step takes, by which a warm-up is ahead (`lr_scale`).

        Under a clock it is constant: no step has been timed before the first one, and the mean of the steps so far
        falls after a slow one, which would let the warm-up fall too.
        """
        return CLOCK_STEP_FRACTION if self.steps is None else 1.0 / self.steps

    def reached(self, state: TrainState) -> bool:
        if self.progress(state.step, state.train_seconds) >= 1.0:
            return True
        # The last evaluation counts only while it is that of the current weights.
        fresh = state.evaluated is not None and state.evaluated.step == state.step
        return (
            self.until_val_loss is not None
            and fresh
            and state.val_loss is not None
            and state.val_loss <= self.until_val_loss
        )
