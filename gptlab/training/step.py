"""One optimizer step: gradients of the mean loss over all tokens of the step, then the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from gptlab.config.run import RunConfig
from gptlab.data.loader import StepBatch
from gptlab.optim.clip import clip_gradients
from gptlab.optim.schedule import lr_scale, muon_momentum, weight_decay_scale
from gptlab.runtime.hardware.rng import fold_seed
from gptlab.training.faults import Fault
from gptlab.training.state import TrainState

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(tokens (B, T), targets (B, T)) -> summed loss; `model.loss`, or what torch.compile made of it."""


class GradientSums(Protocol):
    """Adds up the gradients of all ranks: `GradientShares`, `GradientSum`, `ExactSum`, `ShardedGradients`."""

    def order(self, micro_indices: Sequence[int]) -> Sequence[int]:
        """The places of this rank's micro-batches in the order in which they are to be taken."""
        ...

    def begin(self) -> None:
        """To be called before the backward pass of this rank's last micro-batch."""

    def end(self, micro_index: int, loss: Tensor) -> Tensor:
        """To be called behind each backward pass with the loss so far; returns the one to go on with."""
        ...

    def finish(self, loss: Tensor) -> Tensor:
        """Wait for the sums, and that of the ranks' `loss` (0-d), which is returned."""
        ...


@dataclass(frozen=True, slots=True)
class Update:
    """What the update of a step was."""

    lr_scale: float
    grad_norm: float
    """Before clipping. Not finite where float16 overflowed and the update was left out."""


def gradients(
    state: TrainState, batch: StepBatch, loss_sum: LossFunction, config: RunConfig, sums: GradientSums | None = None
) -> Tensor:
    """Add up the gradients of all micro-batches, with `sums` those of all ranks; returns the mean loss over every
    counted target of the step.

    Sums divided by the global count, so the loss and its gradient do not depend on how the step is cut. The mean over
    no target is NaN, as in PyTorch, and so a fault.
    """
    if not state.model.training:  # the walk through its modules takes 0.2 ms
        state.model.train()
    # Apple's GPUs have no float64.
    total = torch.zeros((), dtype=torch.float32 if state.device.type == "mps" else torch.float64)
    share: Tensor | None = None
    places = range(len(batch.micro_indices)) if sums is None else sums.order(batch.micro_indices)
    with state.in_passes():
        for place in places:
            index = batch.micro_indices[place]
            if config.model.dropout > 0:
                torch.manual_seed(fold_seed(config.seed, batch.step, index))
            loss = loss_sum(batch.inputs[place], batch.targets[place])
            if sums is not None and place == places[-1]:
                sums.begin()
            if share is None:
                # The mean's gradient for each sum, given to autograd instead of a division to follow.
                share = state.scaler.scale(loss.detach().new_full((), 1 / max(batch.target_tokens, 1)))
            loss.backward(share)
            total = total.to(loss.device) + loss.detach()
            if sums is not None:
                total = sums.end(index, total)
    if sums is not None:
        total = sums.finish(total.to(state.device))
    if config.model.dropout > 0:
        # Behind the step the generator is where it would be with any number of ranks, and so is its saved state.
        torch.manual_seed(fold_seed(config.seed, batch.step, config.micro_batches))
    return total / batch.target_tokens


def update(state: TrainState, config: RunConfig, progress: float, step_fraction: float) -> Update | Fault:
    """Move the weights by the gradients and free these. `progress` is the share of the run done before this step.

    A Fault, with weights, moments and gradients as they were, where a gradient is not finite. float16 takes that for an
    overflow as long as its loss scale is above 1: the update is left out and the scale halved, which is no fault.
    """
    # GradScaler looks at param_groups and calls step: all that it needs of an optimizer.
    optimizer = cast(torch.optim.Optimizer, state.optimizer)
    state.agree_on_overflow()
    state.scaler.unscale_(optimizer)
    norm = clip_gradients(state.weights_here(), config.optim.grad_clip, state.total_norm)
    if not math.isfinite(norm) and state.scaler.get_scale() <= 1.0:
        state.scaler.update()
        return Fault("gradient", norm)
    scale = lr_scale(config.schedule, progress, step_fraction)
    momentum = muon_momentum(config.optim.muon, state.step)
    state.scaler.step(optimizer, scale, momentum, weight_decay_scale(config.schedule, progress), state.moved)
    state.scaler.update()
    state.finish_move()
    state.optimizer.zero_grad()
    return Update(scale, norm)
