"""Steps whose update must not be made: what broke, what follows from it, and when the run fails.

Every decision is a function of the loss and gradient norm of the step, which are the same on all ranks, and of the
state in a checkpoint: all ranks decide alike, and so does a resumed run.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Literal

from gptlab.config.run import FaultsConfig, RunConfig


class TrainingFailed(Exception):  # noqa: N818 -- the name of a run's end (status "failed", exit code 3), not of a bug
    """Training cannot continue: one line says why. The last checkpoint is untouched."""

    def __init__(self, reason: str, *, step: int | None = None, loss: float | None = None) -> None:
        """`step`: None for the current step. `loss`: nats/token, where the loss is the reason."""
        super().__init__(reason)
        self.step = step
        self.loss = loss


def exploded(loss: float, max_loss: float) -> TrainingFailed:
    """The end of a run at a loss (nats/token) above `max_loss` (autoresearch: above 100)."""
    return TrainingFailed(
        f"the training loss exploded to {loss:.4g} nats/token, above runtime.max_loss = {max_loss:g}: "
        f"often a learning rate that is too high",
        loss=loss,
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a step's update is not made."""

    reason: Literal["loss", "gradient", "spike"]
    """A non-finite loss; a non-finite gradient of a finite loss; a loss far above the recent ones."""
    value: float
    """The loss in nats/token, or the norm of the gradient."""
    median: float | None = None
    """Of the recent losses; for a spike."""

    def __str__(self) -> str:
        if self.reason == "gradient":
            return f"the gradient norm is {self.value}, though the loss is finite"
        if self.median is not None:
            return f"the training loss {self.value:.4g} is a spike above the recent median {self.median:.4g}"
        return f"the training loss is {self.value}"


@dataclass(slots=True)
class FaultRecord:
    """The faults of a run so far, and the losses that a spike is measured against. Part of TrainState."""

    skipped: int = 0
    """Updates skipped in total."""
    skipped_in_a_row: int = 0
    """Updates skipped since the last one that was made."""
    rewinds: int = 0
    """Rewinds to a checkpoint."""
    good_step: int | None = None
    """The last scheduled checkpoint known to be good: a step without a fault began from its weights."""
    losses: list[float] = field(default_factory=list)
    """Of the last steps without a fault, oldest first, nats/token; kept only with faults.spike_factor."""

    def add_loss(self, loss: float, config: FaultsConfig) -> None:
        """Record the loss of a step without a fault."""
        self.skipped_in_a_row = 0
        if config.spike_factor is not None:
            self.losses = [*self.losses, loss][-config.spike_window :]

    def calls_for_rewind(self, fault: Fault, loss: float, config: FaultsConfig) -> bool:
        """Whether to rewind instead of skipping the update: for a spike, and where too many updates in a row would be
        skipped, since then the weights are the cause. TrainingFailed over faults.max_rewinds. `loss`: nats/token."""
        too_many = self.skipped_in_a_row >= config.max_skipped_in_a_row
        if config.spike_factor is None or self.good_step is None or not (fault.reason == "spike" or too_many):
            return False
        if self.rewinds >= config.max_rewinds:
            raise TrainingFailed(f"{fault}, after {self.rewinds} rewinds (faults.max_rewinds)", loss=loss)
        return True

    def skip(self, fault: Fault, loss: float, step: int, config: RunConfig) -> None:
        """Count a skipped update in step number `step`, of `loss` nats/token. TrainingFailed, with nothing counted,
        over the limits and for a loss above runtime.max_loss, where the weights are the cause and not the batch."""
        if fault.reason == "spike" and fault.value > config.runtime.max_loss:
            raise exploded(fault.value, config.runtime.max_loss)
        if too_many := self._too_many(config.faults):
            reason = f"{fault} in step {step}, {too_many}: often a learning rate that is too high"
            raise TrainingFailed(reason, step=step, loss=loss)
        self.skipped += 1
        self.skipped_in_a_row += 1

    def _too_many(self, config: FaultsConfig) -> str | None:
        """The limit that one more skipped update would break."""
        if self.skipped_in_a_row >= config.max_skipped_in_a_row:
            return f"after {self.skipped_in_a_row} consecutive skipped updates (faults.max_skipped_in_a_row)"
        if config.max_skipped is not None and self.skipped >= config.max_skipped:
            return f"after {self.skipped} skipped updates in all (faults.max_skipped)"
        return None


def loss_fault(loss: float, record: FaultRecord, config: RunConfig) -> Fault | None:
    """What is wrong with the mean loss of a step (nats/token) over all ranks, if anything.

    TrainingFailed for a loss above runtime.max_loss that is no spike to rewind from.
    """
    if not math.isfinite(loss):
        return Fault("loss", loss)
    factor, window = config.faults.spike_factor, config.faults.spike_window
    if factor is not None and (spike := _spike(loss, record.losses, factor, window)) is not None:
        return spike
    if loss > config.runtime.max_loss:
        raise exploded(loss, config.runtime.max_loss)
    return None


def _spike(loss: float, losses: list[float], factor: float, window: int) -> Fault | None:
    """The fault of a loss far above the median of the recent ones; None while these are too few."""
    median = statistics.median(losses) if len(losses) >= window else math.inf
    return Fault("spike", loss, median) if loss > factor * median else None
