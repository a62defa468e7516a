"""Training with weights that are shared among processes: what of a TrainState differs, and how gradients are added.

The optimizer sees this rank's rows as parameters of their own, and works on them as it does on whole ones; only Muon
needs the other ranks (optim/sharded_muon.py). A checkpoint gets each rank's rows as pieces, and is taken apart again
where it is loaded: it does not know of any of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.config.optim import MuonConfig
from gptlab.config.roles import Role
from gptlab.config.run import RunConfig
from gptlab.data.loader import Loader
from gptlab.data.rows import RowSource
from gptlab.model.gpt import GPT
from gptlab.model.init import initial_weights
from gptlab.model.kernels.ops import load_kernels
from gptlab.model.roles import fused_rows, parameter_roles
from gptlab.optim.clip import sum_of_squares
from gptlab.optim.combined import CombinedOptimizer
from gptlab.optim.groups import build_optimizer
from gptlab.optim.sharded_muon import ShardedMatrix, ShardedMuon
from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.slices import TensorSlice, whole_slices
from gptlab.training.parallel.fsdp_model import (
    Shard,
    as_forward,
    reshard,
    shard_model,
    shards_of,
    synchronize_gradients,
    unshard,
)
from gptlab.training.parallel.gradient_sum import GradientSum
from gptlab.training.state import Compile, TrainState, require_same_shapes

P = ParamSpec("P")
R = TypeVar("R")

# The moments that have a weight's shape, and so its rows; the others are whole where they are at all.
_LIKE_THE_WEIGHT = ("momentum", "exp_avg", "exp_avg_sq")


@dataclass(slots=True, kw_only=True)
class ShardedState(TrainState):
    shards: dict[str, Shard] = field(default_factory=dict)
    group: Group = field(default_factory=Group)
    whole_optimizer: CombinedOptimizer
    """The optimizer that one process would have, on the meta device: names, shapes and types of its whole state."""

    @property
    def is_sharded(self) -> bool:
        return True

    def weights_here(self) -> list[Parameter]:
        """Those that are cut come first."""
        return [s.here for s in sorted(self.shards.values(), key=lambda shard: not shard.is_cut)]

    def weights_alike(self) -> list[Parameter]:
        return [shard.whole for shard in self.shards.values() if not shard.is_cut]

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        cut = sum(shard.is_cut for shard in self.shards.values())
        counted = gradients if self.rank == 0 else gradients[:cut]  # what all ranks hold counts once
        return self.group.sum(sum_of_squares(counted, self.device), "gradient norm").sqrt()

    def first_broken_gradient(self) -> str | None:
        gradients = [shard.here.grad for shard in self.shards.values()]
        broken = [g is not None and not bool(g.isfinite().all()) for g in gradients]
        ranks = self.group.sum(torch.tensor(broken, dtype=torch.int64), "broken gradients").tolist()
        return next((name for name, number in zip(self.shards, ranks, strict=True) if number), None)

    def compiled_blocks(self, compiled: Compile) -> Sequence[Callable[..., Tensor]]:
        # What FSDP2 does around a block stays as it is: what is between is compiled.
        return [as_forward(block, compiled(block.forward)) for block in self.model.blocks]

    def as_forward(self, function: Callable[P, R]) -> Callable[P, R]:
        return as_forward(self.model, function)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        try:
            with self.group.in_passes():
                unshard(self.model)
            yield
        finally:
            reshard(self.model)

    def in_passes(self) -> AbstractContextManager[None]:
        return self.group.in_passes()

    def model_tensors(self) -> dict[str, Tensor]:
        """This rank's rows of every weight that it has some of."""
        return {name: shard.here.detach() for name, shard in self.shards.items() if shard.here.numel()}

    def model_pieces(self) -> list[TensorSlice]:
        tensors = self.model_tensors()
        return [
            TensorSlice(name, shard.shape, shard.start, tensors[name])
            for name, shard in self.shards.items()
            if name in tensors and (shard.is_cut or self.rank == 0)
        ]

    def moment_pieces(self) -> list[TensorSlice]:
        pieces = []
        for key, tensor in self.optimizer.state_tensors().items():
            name, _, moment = key.rpartition(".")
            shard = self.shards[name]
            if moment in _LIKE_THE_WEIGHT and shard.is_cut:
                pieces.append(TensorSlice(key, shard.shape, shard.start, tensor))
            elif moment == "second_moment" or self.rank == 0:  # there on its owner alone; the others on all
                pieces += whole_slices({key: tensor})
        return pieces

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        require_same_shapes(dict(self.model.named_parameters()), tensors)
        for name, shard in self.shards.items():
            shard.here.copy_(shard.part(tensors[name]))

    def load_moments(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        self.whole_optimizer.load_state(tensors, json)  # to have it checked: there is nothing behind its tensors
        here = {}
        for key in self.optimizer.state_tensors():
            name, _, moment = key.rpartition(".")
            here[key] = self.shards[name].part(tensors[key]) if moment in _LIKE_THE_WEIGHT else tensors[key]
        self.optimizer.load_state(here, self.optimizer.state_json())


def build_sharded_state(
    config: RunConfig, rows: RowSource, *, device: torch.device, compute_dtype: torch.dtype, group: Group
) -> ShardedState:
    """`build_state` with the weights shared among the ranks of `group`, whose collectives have started. No rank ever
    holds all of them: each draws every weight, one at a time in host memory, and keeps its rows."""
    with torch.device("meta"):
        model = GPT(config.model, compute_dtype)
    if compute_dtype == torch.float64:
        model = model.double()
    roles, row_splits = parameter_roles(model), fused_rows(model)
    make_optimizer = functools.partial(
        build_optimizer, config=config.optim, compute_dtype=compute_dtype, row_splits=row_splits
    )
    whole_optimizer = make_optimizer((name, parameter, roles[name]) for name, parameter in model.named_parameters())
    shard_model(model, device, group.size)
    model.to_empty(device=device)
    shards = shards_of(model, group.rank, group.size)
    with torch.no_grad():
        for name, values in initial_weights(model, config.model, config.seed):
            shards[name].here.copy_(shards[name].part(values))
        model.init_buffers()
    load_kernels(device, compute_dtype)

    def make_muon(
        matrices: Mapping[str, Parameter],
        muon: MuonConfig,
        *,
        compute_dtype: torch.dtype,
        row_splits: Mapping[str, tuple[int, ...]],
    ) -> ShardedMuon:
        parts = [ShardedMatrix(name, here, shards[name].rows) for name, here in matrices.items()]
        return ShardedMuon(parts, muon, compute_dtype=compute_dtype, row_splits=row_splits, exchange=group)

    by_muon = {name for name, role in roles.items() if role is Role.MATRIX and config.optim.matrix_optimizer == "muon"}
    optimizer = make_optimizer(
        ((s.name, s.here, roles[s.name]) for s in shards.values() if s.here.numel() or s.name in by_muon),
        make_muon=make_muon,
    )
    loader = Loader(
        rows, micro_sequences=config.batch.micro_sequences, micro_batches=config.micro_batches, device=device,
        rank=group.rank, world_size=group.size, fill=True,
    )  # fmt: skip
    return ShardedState(
        model, optimizer, loader, torch.amp.GradScaler(device.type, enabled=False), device, group.rank, group.size,
        shards=shards, group=group, whole_optimizer=whole_optimizer,
    )  # fmt: skip


class ShardedGradients:
    """`GradientSum` for shared weights: FSDP2 adds up the rows that each rank keeps, in the backward pass of the last
    micro-batch; vectors leave in buckets, as everywhere."""

    def __init__(self, state: ShardedState) -> None:
        self._model = state.model
        self._cut = [shard for shard in state.shards.values() if shard.is_cut]
        self._vectors = GradientSum(state.weights_alike(), state.group)

    def order(self, micro_indices: Sequence[int]) -> Sequence[int]:
        return range(len(micro_indices))

    def begin(self) -> None:
        synchronize_gradients(self._model, True)
        self._vectors.begin()

    def end(self, micro_index: int, loss: Tensor) -> Tensor:
        return loss

    def finish(self, loss: Tensor) -> Tensor:
        synchronize_gradients(self._model, False)
        for shard in self._cut:
            gradient = shard.whole.grad
            shard.whole.grad = None
            shard.here.grad = None if gradient is None else gradient.to_local()  # type: ignore[attr-defined]
        return self._vectors.finish(loss)
