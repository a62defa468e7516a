"""Buffers of a caller's parts (`change_model`): a step that is skipped leaves no trace in them, and neither does a
warm-up."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from gptlab.config.run import RunConfig
from gptlab.model.changed import require_saved_shapes
from gptlab.model.gpt import GPT
from gptlab.training.faults import Fault
from gptlab.training.state import Finish, TrainState
from gptlab.training.step import LossFunction, TrainStep, train_step


class KeptBuffers:
    """The buffers of a caller's parts, and what they hold now."""

    def __init__(self, model: GPT) -> None:
        self._kept = [(part, dict(part._buffers), _copies(part)) for part in model.modules()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the parts the buffers of then, and these their values: a part may have made some, or put others in their
        place (`self.mean = 0.9 * self.mean + ...`)."""
        for part, buffers, copies in self._kept:
            part._buffers.clear()
            part._buffers.update(buffers)
            for name, copy in copies.items():
                cast(Tensor, buffers[name]).copy_(copy)


def _copies(part: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in part._buffers.items() if buffer is not None}


def has_own_buffers(model: GPT) -> bool:
    """Whether a caller's parts have buffers, or names for some."""
    of_model = set(model._buffers) - {"cos", "sin"}
    return bool(of_model) or any(part._buffers for part in model.modules() if part is not model)


def step_of_own_parts(state: TrainState, loss_sum: LossFunction, config: RunConfig, finish: Finish) -> TrainStep:
    """`train_step`. A Fault leaves the buffers unchanged, too. UserError for buffers that cannot be saved."""
    buffers = KeptBuffers(state.model)
    step = train_step(state, loss_sum, config, finish)
    if isinstance(step.result, Fault):
        buffers.put_back()
    require_saved_shapes(state.model)  # what cannot be saved ends the first step, and not the first load
    return step
