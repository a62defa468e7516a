"""Steps whose update must not be made: what broke, what it counts for, and when the run cannot go on.

Every decision here is a function of the loss and the gradient norm of the step, which all ranks share, and of what
a checkpoint holds: all ranks decide alike, and so does a resumed run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from torch import nn

from gptlab.config.run import FaultsConfig, RunConfig
from gptlab.training.watchdog import TrainingFailed, check_loss


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a step's update is not made."""

    reason: Literal["loss", "gradient", "spike"]
    """A loss that is not finite, a gradient that is not though the loss is, a loss far above the last ones."""
    value: float
    """The loss in nats/token, or the norm of the gradient."""
    median: float | None = None
    """Of the losses that a spike stands out from."""
    loss: float | None = None
    """Of the step, nats/token, once it is known what becomes of the fault."""

    def __str__(self) -> str:
        if self.reason == "gradient":
            return f"the gradient norm is {self.value}, though the loss is finite"
        if self.median is not None:
            return (
                f"the training loss {self.value:.4g} stands out from the last ones with their median {self.median:.4g}"
            )
        return f"the training loss is {self.value}"


@dataclass(slots=True)
class FaultRecord:
    """What a run remembers of its faults, and what it will know a spike by. Part of TrainState."""

    skipped: int = 0
    """Updates left out, in all."""
    skipped_in_a_row: int = 0
    """Updates left out since the last one that was made."""
    rewinds: int = 0
    """Times that the run went back to a checkpoint."""
    good_step: int | None = None
    """Of the last scheduled checkpoint from whose weights a step began that was no fault: one to go back to."""
    losses: list[float] = field(default_factory=list)
    """Of the last steps that were no fault, oldest first, nats/token; kept only where spikes are looked for."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        return cls(**{**saved, "losses": list(saved["losses"])})

    def passed(self, loss: float, config: FaultsConfig) -> None:
        """Take in the loss of a step that was no fault."""
        self.skipped_in_a_row = 0
        if config.spike_factor is not None:
            self.losses = [*self.losses, loss][-config.spike_window :]

    def calls_for_rewind(self, fault: Fault, config: FaultsConfig) -> bool:
        """Whether to go back rather than to leave an update out: for a spike, and where too many in a row would be left
        out, since then it is the weights. TrainingFailed where the run has gone back often enough."""
        too_many = self.skipped_in_a_row >= config.max_skipped_in_a_row
        if config.spike_factor is None or self.good_step is None or not (fault.reason == "spike" or too_many):
            return False
        if self.rewinds >= config.max_rewinds:
            raise TrainingFailed(f"{fault}, after {self.rewinds} rewinds (faults.max_rewinds)", loss=fault.loss)
        return True

    def skip(self, fault: Fault, step: int, config: RunConfig) -> None:
        """Count an update that is left out in step number `step`. TrainingFailed over the limits, with nothing counted,
        and for a loss above runtime.max_loss, which is a matter of the weights and not of the batch."""
        if fault.reason == "spike":
            check_loss(fault.value, config.runtime.max_loss)
        if too_many := self._too_many(config.faults):
            reason = f"{fault} in step {step}, {too_many}: often a learning rate that is too high"
            raise TrainingFailed(reason, step=step, loss=fault.loss)
        self.skipped += 1
        self.skipped_in_a_row += 1

    def _too_many(self, config: FaultsConfig) -> str | None:
        """The limit that one more update left out would break."""
        if self.skipped_in_a_row >= config.max_skipped_in_a_row:
            return f"with {self.skipped_in_a_row} updates left out before it (faults.max_skipped_in_a_row)"
        if config.max_skipped is not None and self.skipped >= config.max_skipped:
            return f"with {self.skipped} updates of the run left out before it (faults.max_skipped)"
        return None


def loss_fault(loss: float, record: FaultRecord, config: RunConfig) -> Fault | None:
    """What is wrong with the mean loss of a step (nats/token), over all ranks; None where nothing is.

    TrainingFailed for a loss above runtime.max_loss that the run is not to go back from.
    """
    if not math.isfinite(loss):
        return Fault("loss", loss)
    factor, window = config.faults.spike_factor, config.faults.spike_window
    if factor is not None and len(record.losses) >= window:
        median = statistics.median(record.losses)
        if loss > factor * median:
            return Fault("spike", loss, median)
    check_loss(loss, config.runtime.max_loss)
    return None


def first_broken_gradient(model: nn.Module) -> str | None:
    """The name of the first parameter, in the model's order, whose gradient is not finite; None where all are."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return None
