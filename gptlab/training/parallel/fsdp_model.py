"""A GPT whose weights are shared among processes by rows: torch's FSDP2 (`torch.distributed.fsdp.fully_shard`).

Every matrix and table is cut by rows, one part a rank (torch.chunk's rule: the last ranks may have fewer, or none).
The blocks, the token table and each value table are gathered just before they are used, in the type that they are used
in, and let go behind it; what stands outside of them (the head, a tied table, learned positions) is there for the whole
of a forward pass. Vectors (norm weights, biases, residual lambdas), a thousandth of the weights, are whole on every
rank: in float32 they would need messages of their own, and a row of them is a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from gptlab.model.gpt import GPT

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of one weight."""

    name: str
    shape: tuple[int, ...]
    """Of the whole weight."""
    whole: Parameter
    """The model's: a DTensor where the weight is cut, else the weight itself."""
    here: Parameter
    """The rows of this rank, an ordinary tensor that shares their memory; the same as `whole` where nothing is cut."""
    rows: tuple[int, ...]
    """How many each rank has; all have all of them where nothing is cut."""
    first_row: int
    """Of this rank."""

    @property
    def is_cut(self) -> bool:
        return self.here is not self.whole

    @property
    def start(self) -> int:
        """Elements of the whole weight before this rank's."""
        return self.first_row * self.row_numel

    @property
    def row_numel(self) -> int:
        return self.here[:1].numel() if self.here.ndim < 2 else self.shape[1]

    def part(self, whole: Tensor) -> Tensor:
        """Of a tensor of the weight's shape what this rank has of it."""
        return whole[self.first_row : self.first_row + len(self.here)] if self.is_cut else whole


def shard_model(model: GPT, device: torch.device, world_size: int) -> None:
    """Cut the weights of a model, which may be on the meta device. All ranks call it, behind `start_collectives`."""
    mesh = init_device_mesh(device.type, (world_size,))
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
    blocks = [shard(block, narrow) for block in model.blocks]
    only_head = not model.config.tied_head and model.position_embedding is None
    root = shard(model, narrow if only_head else wide)
    for part in (*parts, root):
        # The gradient of a table does not depend on the table, and `HeadLoss` takes that of the head in the forward
        # pass. So nothing but a block's weights is gathered a second time.
        part.set_unshard_in_backward(False)
    # Told, not guessed from the order of forward passes: passes without a backward (validation) would mislead it.
    for before, block in zip([root, *blocks], blocks, strict=False):
        block.set_modules_to_backward_prefetch([before])
    for module in sharded_modules(model):
        # Sums over ranks, as everywhere in gptlab: micro-batches are divided by the step's token count.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    synchronize_gradients(model, False)


def shards_of(model: GPT, rank: int, world_size: int) -> dict[str, Shard]:
    """By name, of a model that `shard_model` has cut and that has its memory: these tensors stay the same."""
    shards = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if not isinstance(parameter, DTensor):
            shards[name] = Shard(name, shape, parameter, parameter, (shape[0],) * world_size, 0)
            continue
        most = -(-shape[0] // world_size)
        rows = tuple(max(0, min(most, shape[0] - most * r)) for r in range(world_size))
        here = parameter.to_local().detach()
        assert len(here) == rows[rank], f"{name}: {len(here)} rows here, of {rows}"
        shards[name] = Shard(name, shape, parameter, Parameter(here), rows, sum(rows[:rank]))
    return shards


def sharded_modules(model: GPT) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def synchronize_gradients(model: GPT, on: bool) -> None:
    """Whether the backward passes from here on add up their gradients, and those of the passes before, over ranks.
    Until then each rank keeps its own, whole and in float32."""
    cast(FSDPModule, model).set_requires_gradient_sync(on)


def as_forward(module: nn.Module, function: Callable[P, R]) -> Callable[P, R]:
    """`function` with all around it that is around `module.forward`: the weights that are gathered with this module are
    there while it runs."""
    name = "_as_forward"
    setattr(module, name, function)
    register_fsdp_forward_method(module, name)
    wrapped = getattr(module, name)
    delattr(module, name)
    return cast(Callable[P, R], wrapped)


def unshard(model: GPT) -> None:
    """Gather all weights on every rank, in the type that each is used in; until `reshard`, forward passes need no other
    rank. All ranks call it."""
    cast(FSDPModule, model).set_reshard_after_forward(False)
    for module in sharded_modules(model):
        module.unshard()


def reshard(model: GPT) -> None:
    """Let go of what `unshard` gathered; on any rank by itself."""
    for module in sharded_modules(model):
        module.reshard()
    cast(FSDPModule, model).set_reshard_after_forward(True)


def _policy(gathered: torch.dtype | None, compute: torch.dtype) -> MixedPrecisionPolicy:
    """Weights travel as `gathered` (None: as they are), gradients as float32, or as float64 where all is that."""
    reduced = None if compute == torch.float64 else torch.float32
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)
