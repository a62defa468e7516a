"""When evaluation, CORE, samples and checkpoints are due: a function of configuration and state."""

from __future__ import annotations

from dataclasses import dataclass

from gptlab.config.run import RunConfig
from gptlab.training.horizon import Finish
from gptlab.training.state import Mark, TrainState


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
