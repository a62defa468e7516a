"""How far a run is and when it ends; when evaluation, CORE, samples and checkpoints are due.

All of it is a function of configuration and state.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptlab.config.run import RunConfig
from gptlab.training.state import Mark, TrainState

# autoresearch's five minutes on an H100 hold 953 steps (its program.md).
CLOCK_STEP_FRACTION = 1e-3


@dataclass(frozen=True, slots=True)
class Finish:
    """The horizon of a run with its unit resolved: a number of steps, or a number of seconds on the clock."""

    steps: int | None
    seconds: float | None
    until_val_loss: float | None = None

    @classmethod
    def of(cls, config: RunConfig, *, flops_per_token: float, scaling_params: int) -> Finish:
        horizon, tokens = config.horizon, config.batch.total_tokens
        steps = horizon.total_steps(
            tokens_per_step=tokens, flops_per_token=flops_per_token, scaling_params=scaling_params
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
        return (
            self.until_val_loss is not None
            and state.is_evaluated()  # the last evaluation counts only while it is that of the current weights
            and state.val_loss is not None
            and state.val_loss <= self.until_val_loss
        )


@dataclass(frozen=True, slots=True)
class Agenda:
    """Everything is due at most once per step, and at the end of the run."""

    config: RunConfig
    finish: Finish

    def evaluate(self, state: TrainState) -> bool:
        wanted = self.config.eval
        return wanted.validates and (
            (wanted.at_start and state.step == 0 and state.evaluated is None)
            or self._due(state, state.evaluated, wanted.every_steps, wanted.every_seconds)
        )

    def measure_core(self, state: TrainState) -> bool:
        return self._due(state, state.core_measured, self.config.eval.core_every_steps)

    def sample(self, state: TrainState) -> bool:
        return self._due(state, state.sampled, self.config.sample.every_steps)

    def save(self, state: TrainState) -> bool:
        wanted = self.config.checkpoint
        best = wanted.save_best and state.is_best() and state.step > 0 and state.saved != state.mark()
        return best or self._due(state, state.saved, wanted.every_steps, wanted.every_seconds)

    def _due(
        self, state: TrainState, last: Mark | None, every_steps: int | None, every_seconds: float | None = None
    ) -> bool:
        """At each multiple of `every_steps`, at the first step boundary after each multiple of `every_seconds` on the
        clock, and at the end."""
        if last is not None and last.step == state.step:
            return False
        if self.finish.reached(state):
            return True
        if state.step == 0:
            return False
        if every_steps is not None and state.step % every_steps == 0:
            return True
        before = 0.0 if last is None else last.train_seconds
        return every_seconds is not None and state.train_seconds // every_seconds > before // every_seconds
