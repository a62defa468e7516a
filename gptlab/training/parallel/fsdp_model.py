"""A fully sharded GPT: torch's FSDP2 (`torch.distributed.fsdp.fully_shard`).

Every matrix and table is cut by rows, one part per rank (torch.chunk's rule: the last ranks may have fewer, or none).
The blocks, the token table and each value table are gathered just before use, in the type that they are used in, and
freed after it. What is outside of them (the head, a tied table, learned positions) is gathered for the whole forward
pass. Vectors (norm weights, biases, residual lambdas), a thousandth of the weights, are replicated: in float32 they
would need collectives of their own, and a row of them is one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from gptlab.model.gpt import GPT
from gptlab.training.checkpoint.format import TensorSlice

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of one weight."""

    whole: Parameter
    """The model's: a DTensor where the weight is cut, else the weight itself."""
    here: Parameter
    """The rows of this rank, an ordinary tensor on the same memory; the same as `whole` where nothing is cut."""
    rows: tuple[int, ...]
    """How many each rank has; where nothing is cut, all have all."""
    slice: TensorSlice
    """`here`, and where it lies in the weight."""

    @property
    def is_cut(self) -> bool:
        return self.here is not self.whole


def make_mesh(device_type: str, n_ranks: int, ranks_per_copy: int) -> DeviceMesh:
    """Consecutive ranks hold one copy of the weights together. FSDP2 gathers weights and scatters gradients within a
    copy, and then sums the gradients over copies. All ranks call it, after `start_collectives`."""
    if ranks_per_copy == n_ranks:
        return init_device_mesh(device_type, (n_ranks,))
    return init_device_mesh(device_type, (n_ranks // ranks_per_copy, ranks_per_copy), mesh_dim_names=("copy", "shard"))


def shard_model(model: GPT, mesh: DeviceMesh) -> None:
    """Cut the weights of a model, which may be on the meta device."""
    vectors = {parameter for parameter in model.parameters() if parameter.ndim < 2}
    # Tables are read in float32, which is also what their gradients are added up in; matrices are used in the compute
    # type, and so travel in it: the same numbers as if each rank cast its own copy.
    wide = _policy(None, model.compute_dtype)
    narrow = _policy(model.compute_dtype, model.compute_dtype)

    def shard(module: nn.Module, policy: MixedPrecisionPolicy) -> FSDPModule:
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=vectors, reshard_after_forward=True)
        return cast(FSDPModule, module)

    tables = [*model.value_embeddings.values()]
    if not model.config.tied_head:
        tables.append(model.token_embedding)
    parts = [shard(table, wide) for table in tables]
    for table in model.value_embeddings.values():
        _reduce_at_once(table)
    blocks = [shard(block, narrow) for block in model.blocks]
    only_head = not model.config.tied_head and model.position_embedding is None
    root = shard(model, narrow if only_head else wide)
    for part in (*parts, root):
        # The gradient of a table does not depend on the table, and `HeadLoss` takes that of the head in the forward
        # pass. So nothing but a block's weights is gathered a second time.
        part.set_unshard_in_backward(False)
    # Given, not recorded from the order of forward passes: passes without a backward (validation) would mislead FSDP2.
    for before, block in zip([root, *blocks], blocks, strict=False):
        block.set_modules_to_backward_prefetch([before])
    for module in sharded_modules(model):
        # Sums over ranks, as everywhere in gptlab: micro-batches are divided by the step's token count.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def shards_of(model: GPT, rank: int, n_ranks: int) -> dict[str, Shard]:
    """By name, of a model that `shard_model` has cut and that has its memory: these tensors stay the same. `rank`: of
    the `n_ranks` that hold one copy."""
    shards = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if not isinstance(parameter, DTensor):
            whole = TensorSlice(name, shape, 0, parameter.detach())
            shards[name] = Shard(parameter, parameter, (shape[0],) * n_ranks, whole)
            continue
        most = -(-shape[0] // n_ranks)
        rows = tuple(max(0, min(most, shape[0] - most * r)) for r in range(n_ranks))
        here = parameter.to_local().detach()
        assert len(here) == rows[rank], f"{name}: {len(here)} rows here, of {rows}"
        start = sum(rows[:rank]) * math.prod(shape[1:])
        shards[name] = Shard(parameter, Parameter(here), rows, TensorSlice(name, shape, start, here))
    return shards


def sharded_modules(model: GPT) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def synchronize_gradients(model: GPT, *, within_copies: bool, over_copies: bool) -> None:
    """Whether backward passes from here on sum their gradients, and those of earlier passes, over the ranks of a copy,
    and these sums over the copies. Until then each rank keeps its own: whole and in float32, or the sums of its rows.
    """
    cast(FSDPModule, model).set_requires_gradient_sync(within_copies)
    cast(FSDPModule, model).set_requires_all_reduce(over_copies)


def as_forward(module: nn.Module, function: Callable[P, R]) -> Callable[P, R]:
    """`function` with the hooks of `module.forward`: the weights that are gathered with this module are there while it
    runs."""
    name = "_as_forward"
    setattr(module, name, function)
    register_fsdp_forward_method(module, name)
    wrapped = getattr(module, name)
    delattr(module, name)
    return cast(Callable[P, R], wrapped)


def unshard(model: GPT) -> None:
    """Gather all weights on every rank, each in the type that it is used in. Until `reshard`, forward passes do not
    communicate. All ranks call it."""
    cast(FSDPModule, model).set_reshard_after_forward(False)
    for module in sharded_modules(model):
        module.unshard()


def reshard(model: GPT) -> None:
    """Free what `unshard` gathered. Does not communicate."""
    for module in sharded_modules(model):
        module.reshard()
    cast(FSDPModule, model).set_reshard_after_forward(True)


class _WithLast(torch.autograd.Function):
    """`rows` as they are. `last` gets a gradient of zero when they get theirs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, last: Tensor) -> Tensor:
        ctx.mark_dirty(rows)  # no copy, and no view, which FSDP2 warns about
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_zeros(())


def _reduce_at_once(table: nn.Module) -> None:
    """Reduce the gradient of a table as soon as it is complete. FSDP2 waits for the gradients of a module's inputs, and
    those that have none, as tokens have, wait until the backward pass is over: all tables of a model, whole. So the
    table gets a second input. Of two gradients that are ready, autograd computes that of the later operation first: the
    rows', and then the one that FSDP2 waits for."""
    rows = table.forward
    table.forward = lambda tokens, last: _WithLast.apply(rows(tokens), last)

    def with_last(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return *inputs, torch.zeros((), device=inputs[0].device, requires_grad=True)

    table.register_forward_pre_hook(with_last, prepend=True)  # before FSDP2 sees the inputs


def _policy(gathered: torch.dtype | None, compute: torch.dtype) -> MixedPrecisionPolicy:
    """Weights travel as `gathered` (None: as they are), gradients as float32, or as float64 where all is that."""
    reduced = None if compute == torch.float64 else torch.float32
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)
