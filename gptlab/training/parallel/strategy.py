"""How the processes of a run share its weights, gradients, moments and updates: one interface, a few strategies.

    Strategy       one process; what the others override
    Zero           replicated weights, sharded gradients, moments and update
    Fsdp           everything sharded (torch FSDP2)
    Deterministic  everything replicated; gradients summed in an order that does not depend on the number of processes

The model, the optimizer, the step, the loop and the checkpoint format read as if there were one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.config.optim import Role
from gptlab.config.run import RunConfig
from gptlab.model.counting import fused_rows, parameter_roles
from gptlab.model.gpt import GPT
from gptlab.model.hooks import has_hooks
from gptlab.optim.combined import CombinedOptimizer, build_optimizer
from gptlab.optim.gradient_norm import joint_norm
from gptlab.optim.muon import Compile
from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.format import TensorSlice, whole_slices
from gptlab.training.checkpoint.load import load_weights

P = ParamSpec("P")
R = TypeVar("R")

COMPILES_CHECKPOINTS = torch.__version__ >= "2.13"
"""Whether a graph computes again what autograd functions make, such as squared ReLU: 2.11 keeps it. By 2.13 less is
computed again than by a checkpoint around the graph, and in fewer kernels."""


class Strategy:
    """One process, which holds all weights and moments and makes the whole update. Of several, every method is called
    by all ranks at the same place."""

    is_sharded = False
    """Whether a process holds only a part of the weights, and needs the others for every forward pass."""

    def __init__(self, model: GPT, optimizer: CombinedOptimizer, group: Group) -> None:
        self.model = model
        self.optimizer = optimizer
        """This rank's share: it updates `updated_weights`."""
        self.group = group

    # --- gradients

    def after_warm_up(self) -> dict[str, str]:
        """Of several ranks, called after a warm-up, in which each computed gradients of its own. Returns what it found
        there that may show in the bits of a run, for the implementations in run.json."""
        return {}

    def order(self, micro_indices: Sequence[int]) -> Sequence[int]:
        """The positions of this rank's micro-batches in the order in which they are computed."""
        return range(len(micro_indices))

    def before_backward(self, is_last: bool) -> None:
        """Called before the backward pass of each of this rank's micro-batches."""

    def after_micro_batch(self, micro_index: int, loss: Tensor) -> Tensor:
        """Called after each backward pass with the sum of the losses so far (0-d); returns the sum to continue with."""
        return loss

    def finish_reduction(self, loss: Tensor) -> Tensor:
        """Wait until the gradients of `updated_weights` are the sums over all ranks; returns the sum of `loss` (0-d).
        A rank without a micro-batch adds zeros."""
        return loss

    def use_local_gradients(self) -> None:
        """For a warm-up: give `updated_weights` the gradients of this process alone, without the other ranks."""

    def updated_names(self) -> list[str]:
        """The weight of the model that each of `updated_weights` is, or is a part of."""
        return list(self.optimizer.parameters)

    def first_broken_gradient(self, finite: Iterable[bool] | None = None) -> str | None:
        """The first weight, in the model's order, whose gradient is not finite on some rank. `finite`: whether that of
        each of `updated_weights` was, where they are freed."""
        if finite is None:
            finite = (p.grad is None or bool(p.grad.isfinite().all()) for p in self.updated_weights())
        broken = {name: 0 for name, _ in self.model.named_parameters()}
        for name, one_is_finite in zip(self.updated_names(), finite, strict=True):
            broken[name] += not one_is_finite
        counts = self.group.sum(torch.tensor(list(broken.values()), dtype=torch.int64), "broken gradients").tolist()
        return next((name for name, count in zip(broken, counts, strict=True) if count), None)

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """The joint L2 norm over all ranks of the gradients of `updated_weights`; 0-d float64. Not finite, on all
        ranks, if a gradient of any rank is not."""
        return joint_norm(gradients)

    # --- the update

    def updated_weights(self) -> list[Parameter]:
        """What this rank updates: parameters, or parts of them."""
        return list(self.optimizer.parameters.values())

    def step(self, lr_scale: float, momentum: float, weight_decay_scale: float, made: Tensor | None = None) -> None:
        """Update the weights; afterwards every rank has all the new weights that it holds. Arguments as for
        `CombinedOptimizer.step`."""
        self.optimizer.step(lr_scale, momentum, weight_decay_scale, made)

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.optimizer.zero_grad()

    # --- weights and moments

    def replicated_weights(self) -> Iterable[Tensor]:
        """The weights that all ranks hold, with the same bits on each."""
        return list(self.model.parameters())

    def equal_weights(self) -> Iterable[tuple[int, Iterable[Tensor]]]:
        """(n, weights): those of rank r have the bits of those of rank r % n."""
        return [(1, self.replicated_weights())]

    def weight_slices(self) -> list[TensorSlice]:
        """What this rank saves of `GPT.saved_tensors`: live views. The slices of all ranks tile every tensor."""
        return whole_slices(self.model.saved_tensors())

    def moment_slices(self) -> list[TensorSlice]:
        """The same of the optimizer's state."""
        return whole_slices(self.optimizer.state_tensors())

    def moments_json(self) -> dict[str, Any]:
        """What a checkpoint says of the optimizer's state beside its tensors; the same on every rank."""
        return self.optimizer.state_json()

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over whole weights by name, of which this rank keeps what it holds. UserError, with nothing changed,
        unless they are exactly the model's."""
        load_weights(self.model, tensors)

    def load_moments(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """The same of the optimizer's state. Errors as `CombinedOptimizer.load_state`."""
        self.optimizer.load_state(tensors, json)

    # --- forward passes

    def in_passes(self) -> AbstractContextManager[None]:
        """Around forward and backward passes: where they communicate, a lost rank ends them by name."""
        return nullcontext()

    def whole_weights(self) -> AbstractContextManager[None]:
        """Within the context this rank can run the model without the others."""
        return nullcontext()

    def as_forward(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, which uses parts of the model, as a replacement for the model's own forward pass."""
        return function

    def compiled_blocks(self, compiled: Compile) -> Sequence[Callable[..., Tensor]]:
        """The model's blocks, compiled one by one."""
        # Called as a module, a block whose `forward` is torch's `checkpoint` is not compiled: Dynamo skips it. Only so
        # are hooks of a caller's called.
        return [
            compiled_pass(block.forward if "forward" in vars(block) and not has_hooks(block) else block, compiled)
            for block in self.model.blocks
        ]


def compiled_pass(forward: Callable[..., Tensor], compiled: Compile) -> Callable[..., Tensor]:
    """A block, or torch's `checkpoint` of its forward pass."""
    if COMPILES_CHECKPOINTS or not isinstance(forward, partial):
        return compiled(forward)
    return partial(forward.func, compiled(*forward.args), **forward.keywords)


def named_roles(model: GPT) -> list[tuple[str, Parameter, Role]]:
    """(name, parameter, role) of each weight: what optimizers are built from."""
    roles = parameter_roles(model)
    return [(name, parameter, roles[name]) for name, parameter in model.named_parameters()]


def whole_optimizer(model: GPT, config: RunConfig) -> CombinedOptimizer:
    """The optimizer of one process, which updates every weight of the model."""
    return build_optimizer(
        named_roles(model), config.optim, compute_dtype=model.compute_dtype, row_splits=fused_rows(model)
    )


def optimizer_layout(model: GPT, config: RunConfig) -> CombinedOptimizer:
    """`whole_optimizer` on the meta device: names, shapes and types of the whole state, without its memory."""
    parameters = [
        (name, Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")), role)
        for name, parameter, role in named_roles(model)
    ]
    return build_optimizer(parameters, config.optim, compute_dtype=model.compute_dtype, row_splits=fused_rows(model))
