"""Fully sharded training (torch FSDP2): weights, gradients, moments and update are cut by rows.

The optimizer sees this rank's rows as parameters of their own; only Muon communicates (fsdp_muon.py). A checkpoint gets
each rank's rows as slices and does not depend on the strategy.

With `parallel.shard_ranks`, so many consecutive ranks hold a copy of the weights (HSDP): gradients are summed over all
ranks, and every copy makes the whole update, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn import Parameter

from gptlab.config.run import RunConfig
from gptlab.model.counting import fused_rows, parameter_roles
from gptlab.model.gpt import GPT
from gptlab.model.init import initial_weights
from gptlab.model.kernels.ops import load_kernels
from gptlab.optim.adamw import AdamW
from gptlab.optim.combined import CombinedOptimizer, divide_by_optimizer
from gptlab.optim.gradient_norm import sum_of_squares
from gptlab.optim.muon import Compile
from gptlab.runtime.hardware.device import Platform
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.processes.torch_group import last_resort
from gptlab.training.checkpoint.format import TensorSlice
from gptlab.training.checkpoint.load import require_same_shapes
from gptlab.training.parallel.fsdp_copies import OneCopy
from gptlab.training.parallel.fsdp_model import (
    as_forward,
    make_mesh,
    reshard,
    shard_model,
    shards_of,
    synchronize_gradients,
    unshard,
)
from gptlab.training.parallel.fsdp_muon import ShardedMatrix, ShardedMuon
from gptlab.training.parallel.strategy import Strategy, compiled_pass, optimizer_layout

P = ParamSpec("P")
R = TypeVar("R")

# The moments that have a weight's shape, and so its rows; the others are whole where they are at all.
_LIKE_THE_WEIGHT = ("momentum", "exp_avg", "exp_avg_sq")


class Fsdp(Strategy):
    is_sharded = True

    def __init__(self, config: RunConfig, group: Group, *, device: torch.device, compute_dtype: torch.dtype) -> None:
        """Build a model that no rank ever holds whole: each draws every weight, one at a time in host memory, and keeps
        its rows. The collectives of `group` have started."""
        self._copy = OneCopy(group, config.parallel.ranks_per_copy(group.size))
        with group.in_passes():
            model = self._build(config, group.size, device, compute_dtype)
        roles, row_splits = parameter_roles(model), fused_rows(model)
        self._layout = optimizer_layout(model, config)
        self.shards = shards_of(model, self._copy.rank, self._copy.size)
        self._initialize(model, config)
        by_muon = {} if self._layout.muon is None else self._layout.muon.parameters
        parameters = [
            (name, shard.here, roles[name])
            for name, shard in self.shards.items()
            if shard.here.numel() or name in by_muon
        ]
        matrices, groups = divide_by_optimizer(parameters, config.optim)
        self._muon = None
        if matrices:
            sharded = [ShardedMatrix(name, here, self.shards[name].rows) for name, here in matrices.items()]
            self._muon = ShardedMuon(
                sharded, config.optim.muon, compute_dtype=compute_dtype, row_splits=row_splits, group=self._copy
            )
        super().__init__(model, CombinedOptimizer(self._muon, AdamW(groups) if groups else None), group)
        self._device = device
        self._reduces_each = config.parallel.reduce_each_micro_batch

    def _build(self, config: RunConfig, n_ranks: int, device: torch.device, compute_dtype: torch.dtype) -> GPT:
        """The model, cut, without values."""
        load_kernels(device, compute_dtype)
        with torch.device("meta"):
            model = GPT(config.model, compute_dtype, cast(Platform, device.type))
        if compute_dtype == torch.float64:
            model = model.double()
        mesh = make_mesh(device.type, n_ranks, self._copy.size)
        for group in mesh.get_all_groups():  # to which torch gives a limit of its own: 10 minutes with NCCL
            _set_pg_timeout(last_resort(config.runtime.process_timeout_seconds), group)
        shard_model(model, mesh)
        return model.to_empty(device=device)

    @torch.no_grad()
    def _initialize(self, model: GPT, config: RunConfig) -> None:
        for name, values in initial_weights(model, config.model, config.seed):
            self.shards[name].here.copy_(self.shards[name].slice.of(values))
        model.init_buffers()

    # --- gradients

    def before_backward(self, is_last: bool) -> None:
        synchronize_gradients(self.model, within_copies=is_last or self._reduces_each, over_copies=is_last)

    def finish_reduction(self, loss: Tensor) -> Tensor:
        """FSDP2 has summed the rows that each rank keeps in the backward pass of the last micro-batch. Vectors follow
        in one collective: the first of the model is the last to get its gradient, so none could leave much earlier."""
        for shard in self.shards.values():
            if shard.is_cut:
                gradient = shard.whole.grad
                shard.whole.grad = None
                shard.here.grad = None if gradient is None else gradient.to_local()  # type: ignore[attr-defined]
        vectors = self.replicated_weights()[::-1]
        if vectors:
            # A missing gradient is a mistake, which the optimizer reports.
            parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in vectors]
            flat = self.group.sum(torch.cat(parts), "gradients")
            for parameter, part in zip(vectors, flat.split([p.numel() for p in vectors]), strict=True):
                parameter.grad = None if parameter.grad is None else part.view_as(parameter)
        return self.group.sum(loss.clone(), "loss")

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        cut = sum(shard.is_cut for shard in self.shards.values())
        # Replicated gradients count once, and so does each copy's.
        counted = gradients if self.group.is_main else gradients[:cut] if self._copy.number == 0 else []
        return self.group.sum(sum_of_squares(counted, self._device), "gradient norm").sqrt()

    # --- the update

    def updated_weights(self) -> list[Parameter]:
        """Those that are cut come first."""
        return [self.shards[name].here for name in self.updated_names()]

    def updated_names(self) -> list[str]:
        return sorted(self.shards, key=lambda name: not self.shards[name].is_cut)

    def step(self, lr_scale: float, momentum: float, weight_decay_scale: float, made: Tensor | None = None) -> None:
        self.optimizer.require_gradients()
        finish = self._muon.begin_step(lr_scale, momentum, weight_decay_scale, made) if self._muon else lambda: None
        if self.optimizer.adamw is not None:
            self.optimizer.adamw.step(lr_scale, made)
        finish()

    # --- weights and moments

    def replicated_weights(self) -> list[Parameter]:
        return [shard.whole for shard in self.shards.values() if not shard.is_cut]

    def equal_weights(self) -> Iterator[tuple[int, Iterable[Tensor]]]:
        yield 1, self.replicated_weights()
        if self._copy.size < self.group.size:
            yield self._copy.size, [shard.here for shard in self.shards.values() if shard.is_cut]

    def weight_slices(self) -> list[TensorSlice]:
        return self._copy.share([
            shard.slice
            for shard in self.shards.values()
            if shard.here.numel() and (shard.is_cut or self._copy.is_main)
        ])  # fmt: skip

    def moment_slices(self) -> list[TensorSlice]:
        """Second moments are on their owner alone; what all ranks hold is saved by rank 0 of a copy."""
        held = self._held_moments()
        return self._copy.share([
            one for one in held if not one.is_whole or self._copy.is_main or one.name.endswith(".second_moment")
        ])  # fmt: skip

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        require_same_shapes(dict(self.model.named_parameters()), tensors)
        for name, shard in self.shards.items():
            shard.here.copy_(shard.slice.of(tensors[name]))

    @torch.no_grad()
    def load_moments(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        self._layout.require_state(tensors, json)
        for moment in self._held_moments():
            moment.tensor.copy_(moment.of(tensors[moment.name]))

    def moments_json(self) -> dict[str, Any]:
        return self._layout.state_json()

    def _held_moments(self) -> list[TensorSlice]:
        whole = self._layout.state_tensors()
        held = []
        for key, tensor in self.optimizer.state_tensors().items():
            name, _, moment = key.rpartition(".")
            start = self.shards[name].slice.start if moment in _LIKE_THE_WEIGHT else 0
            held.append(TensorSlice(key, tuple(whole[key].shape), start, tensor))
        return held

    # --- forward passes

    def in_passes(self) -> AbstractContextManager[None]:
        return self.group.in_passes()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        try:
            with self.group.in_passes():
                unshard(self.model)
            yield
        finally:
            reshard(self.model)

    def as_forward(self, function: Callable[P, R]) -> Callable[P, R]:
        return as_forward(self.model, function)

    def compiled_blocks(self, compiled: Compile) -> Sequence[Callable[..., Tensor]]:
        # FSDP2's hooks around a block stay as they are: what is between them is compiled.
        return [as_forward(block, compiled_pass(block.forward, compiled)) for block in self.model.blocks]
