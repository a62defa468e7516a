"""Buffers of a caller's parts (`change_model`): a step that is skipped leaves no trace in them, and neither does a
warm-up."""

from __future__ import annotations

import torch
from torch import Tensor

from gptlab.config.run import RunConfig
from gptlab.model.changed import require_saved_shapes
from gptlab.model.gpt import GPT
from gptlab.training.faults import Fault
from gptlab.training.state import Finish, TrainState
from gptlab.training.step import LossFunction, TrainStep, train_step


class KeptBuffers:
    """The buffers of a caller's parts, and what they hold now."""

    def __init__(self, model: GPT) -> None:
        self._model = model
        self._kept = [(name, buffer, buffer.detach().clone()) for name, buffer in own_buffers(model).items()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give them the values of then, and the parts the tensors of then: a part may have put others in their place
        (`self.mean = 0.9 * self.mean + ...`)."""
        for name, buffer, values in self._kept:
            part, _, own_name = name.rpartition(".")
            setattr(self._model.get_submodule(part), own_name, buffer)
            buffer.copy_(values)


def own_buffers(model: GPT) -> dict[str, Tensor]:
    """The buffers that a caller's parts have, by name."""
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name not in ("cos", "sin")}


def step_with_buffers(state: TrainState, loss_sum: LossFunction, config: RunConfig, finish: Finish) -> TrainStep:
    """`train_step`. A Fault leaves the buffers unchanged, too. UserError for buffers that cannot be saved."""
    buffers = KeptBuffers(state.model)
    step = train_step(state, loss_sum, config, finish)
    if isinstance(step.result, Fault):
        buffers.put_back()
    require_saved_shapes(state.model)  # what cannot be saved ends the first step, and not the first load
    return step
