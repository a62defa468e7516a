"""ZeRO-style data parallelism: replicated weights; sharded gradients, optimizer state and update.

    backward    of a rank's last micro-batch: gradients leave in buckets as soon as they are complete, are summed on the
                way, and each rank gets those that it owns (reduce-scatter)
    norm, clip  of all gradients, from a sum of squares
    update      of what this rank owns; no other rank keeps its moments
    weights     go to all ranks (all-gather), those of one stack of matrices while the next is orthogonalized

division.py says who owns what.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.config.optim import Role
from gptlab.config.run import RunConfig
from gptlab.model.gpt import GPT
from gptlab.optim.combined import build_optimizer, divide_by_optimizer, without_gradient
from gptlab.optim.gradient_norm import sum_of_squares
from gptlab.optim.muon import Muon, second_moment_sizes
from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.format import TensorSlice, even_slices
from gptlab.training.parallel.division import BUCKET_BYTES, WIRES, Bucket, Division, Wire, divide
from gptlab.training.parallel.strategy import Strategy, named_roles, optimizer_layout


@dataclass(slots=True)
class _Gradients:
    """A bucket of gradients on its way."""

    bucket: Bucket
    waiting: int = 0
    """Gradients that are not complete yet."""
    flat: Tensor | None = None
    own: Tensor | None = None
    pending: Callable[[], None] | None = None


class Zero(Strategy):
    def __init__(self, model: GPT, config: RunConfig, group: Group, *, wire: Wire | None = None) -> None:
        """`wire`: None for that of the platform that the model is planned for."""
        self._parameters = dict(model.named_parameters())
        self._layout = optimizer_layout(model, config)
        wire = WIRES.get(model.platform, Wire()) if wire is None else wire
        self._divide = partial(divide_model, model, config, group.size, bucket_bytes=wire.bucket_bytes)
        self.division = self._divide()
        position = {name: number for number, name in enumerate(self._parameters)}
        mine = sorted(self.division.share(group.rank), key=lambda one: (position[one.name], one.start))
        roles = {name: role for name, _, role in named_roles(model)}
        # A parameter of its own on the memory of each slice: the optimizer sees matrices and vectors like any others.
        self.owned = {one.key: one for one in mine}
        leaves = {one.key: Parameter(one.tensor) for one in mine}
        parameters = [(key, leaf, roles[self.owned[key].name]) for key, leaf in leaves.items()]
        super().__init__(model, build_optimizer(parameters, config.optim, compute_dtype=model.compute_dtype), group)
        self._device = next(model.parameters()).device
        rounded = rounded_tables(model) if wire.bfloat16_tables else set()
        self._narrow = {name for bucket in self.division.rest if bucket.names <= rounded for name in bucket.names}
        """Weights that travel in bfloat16: only their owners have them in float32."""
        self._arrived: dict[str, None] | None = {} if wire.measured_order else None
        """Parameters in the order in which the warm-up completes their gradients, until that is used."""
        self._make_buckets()
        self._unsent: dict[str, int] = {}
        """Buckets that still need a parameter's gradient."""
        self._next = 0
        """Buckets before this one have left."""
        self._armed = False
        """Whether gradients leave as soon as they are complete."""
        self._reduces_each = config.parallel.reduce_each_micro_batch
        # Registered once, before anything is compiled, so that the parameters look alike in every step.
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._complete, name))

    def _make_buckets(self) -> None:
        self._buckets = [_Gradients(bucket) for bucket in self.division.gradients]
        self._buckets_of = {name: [b for b in self._buckets if name in b.bucket.names] for name in self._parameters}

    # --- gradients

    def after_warm_up(self) -> dict[str, str]:
        """From here on buckets leave in the order that rank 0 measured, if that is wanted."""
        if self._arrived is None:
            return {}
        measured, self._arrived = self.group.broadcast("order of gradients", list(self._arrived)), None
        order = [*measured, *(name for name in reversed(self._parameters) if name not in set(measured))]
        self.division = self._divide(order=order)
        self._make_buckets()
        return {"gradients": hashlib.sha256("\n".join(order).encode()).hexdigest()[:32]}

    def before_backward(self, is_last: bool) -> None:
        if self._armed:  # the gradients of the micro-batch before have been on their way during this forward pass
            self._send_rest(True)
            self._finish_buckets()
        self._armed = is_last or self._reduces_each
        for sent in self._buckets:
            sent.waiting = len(sent.bucket.names)

    def finish_reduction(self, loss: Tensor) -> Tensor:
        """UserError where a parameter has no gradient though this rank computed."""
        computed, self._armed = self._armed, False
        self._send_rest(computed)
        total = loss.clone()
        last = self.group.sum_later(total, "loss")
        self._finish_buckets()
        last()
        return total

    def _send_rest(self, computed: bool) -> None:
        while self._next < len(self._buckets):
            self._send_gradients(self._buckets[self._next], computed)

    def _finish_buckets(self) -> None:
        for sent in self._buckets:
            if sent.pending is not None:
                self._add_arrived(sent)
        self._next = 0
        self._unsent.clear()

    @torch.no_grad()
    def _add_arrived(self, sent: _Gradients) -> None:
        """Wait for a bucket, and add this rank's part of it to the gradients of `updated_weights`."""
        assert sent.pending is not None
        assert sent.own is not None
        sent.pending()
        start = 0
        for one in sent.bucket.slices[self.group.rank]:
            leaf, gradient = self.optimizer.parameters[one.key], sent.own[start : start + one.count].view_as(one.tensor)
            leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)
            start += one.count
        sent.flat = sent.own = sent.pending = None

    def use_local_gradients(self) -> None:
        for one in self.owned.values():
            gradient = self._parameters[one.name].grad
            self.optimizer.parameters[one.key].grad = None if gradient is None else one.of(gradient)

    def updated_names(self) -> list[str]:
        return [self.owned[key].name for key in self.optimizer.parameters]

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        return self.group.sum(sum_of_squares(gradients, self._device), "gradient norm").sqrt()

    def _complete(self, name: str, _: Tensor) -> None:
        if not self._armed:
            if self._arrived is not None:
                self._arrived.pop(name, None)  # an earlier pass, whose compilation may have failed
                self._arrived[name] = None
            return
        for sent in self._buckets_of[name]:
            sent.waiting -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            self._send_gradients(self._buckets[self._next], True)

    @torch.no_grad()
    def _send_gradients(self, sent: _Gradients, computed: bool) -> None:
        bucket = sent.bucket
        for name in bucket.names:
            if computed and self._parameters[name].grad is None:
                raise without_gradient(name)
        gradients = {name: self._parameters[name].grad for name in bucket.names}
        parts: list[Tensor] = []
        for owned in bucket.slices:
            for one in owned:
                gradient = gradients[one.name]
                parts.append(one.tensor.new_zeros(one.count) if gradient is None else one.of(gradient).reshape(-1))
            parts += self._padding(bucket, owned)
        sent.flat = torch.cat(parts)
        sent.own = sent.flat.new_empty(bucket.chunk)
        for name in bucket.names:
            self._unsent[name] = self._unsent.get(name, len(self._buckets_of[name])) - 1
            if self._unsent[name] == 0:
                self._parameters[name].grad = None  # its copy is on the way: kept no longer than needed
        sent.pending = self.group.reduce_scatter_later(sent.own, sent.flat, "gradients")
        self._next += 1
        if self._reduces_each and self._next > 1:  # one is on its way while the next one fills: memory counts here
            self._add_arrived(self._buckets[self._next - 2])

    def _padding(self, bucket: Bucket, owned: Sequence[TensorSlice]) -> list[Tensor]:
        missing = bucket.chunk - sum(one.count for one in owned)
        return [next(iter(self._parameters.values())).detach().new_zeros(missing)] if missing else []

    # --- the update

    def step(self, lr_scale: float, momentum: float, weight_decay_scale: float, made: Tensor | None = None) -> None:
        self.optimizer.require_gradients()
        if self.optimizer.adamw is not None:
            self.optimizer.adamw.step(lr_scale, made)
        sent = [self._send_weights(bucket) for bucket in self.division.rest]
        for shape, bucket in self.division.stacks.items():
            if isinstance(self.optimizer.muon, Muon):
                self.optimizer.muon.step_stack(shape, lr_scale, momentum, weight_decay_scale, made)
            sent.append(self._send_weights(bucket))
        for one in sent:
            self._receive_weights(*one)

    def zero_grad(self) -> None:
        super().zero_grad()
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def _send_weights(self, bucket: Bucket) -> tuple[Bucket, Tensor, Tensor, Callable[[], None]]:
        owned = bucket.slices[self.group.rank]
        own = torch.cat([*(one.tensor.reshape(-1) for one in owned), *self._padding(bucket, owned)])
        if bucket.names <= self._narrow:
            own = own.bfloat16()
        flat = own.new_empty(self.group.size * bucket.chunk)
        return bucket, own, flat, self.group.all_gather_later(flat, own, "weights")

    @torch.no_grad()
    def _receive_weights(self, bucket: Bucket, own: Tensor, flat: Tensor, pending: Callable[[], None]) -> None:
        pending()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for rank, slices in enumerate(bucket.slices):
            start = rank * bucket.chunk
            for one in slices if rank != self.group.rank else ():
                targets.append(one.tensor)
                sources.append(flat[start : start + one.count].view_as(one.tensor))
                start += one.count
        if targets:
            torch._foreach_copy_(targets, sources)

    # --- weights and moments

    def replicated_weights(self) -> Iterator[Tensor]:
        for name, parameter in self._parameters.items():
            yield parameter.detach().bfloat16() if name in self._narrow else parameter

    def weight_slices(self) -> list[TensorSlice]:
        weights = {name: p.detach() for name, p in self._parameters.items() if name not in self._narrow}
        owned = [one for one in self.owned.values() if one.name in self._narrow]
        return even_slices(weights, self.group.rank, self.group.size) + owned

    def moment_slices(self) -> list[TensorSlice]:
        """The count of steps of a parameter is saved by the rank that owns its first element."""
        return [
            moment
            for one, moment in self._held_moments()
            if not moment.name.endswith(".step") or one.start == 0
        ]  # fmt: skip

    @torch.no_grad()
    def load_moments(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        self._layout.require_state(tensors, json)
        for _, moment in self._held_moments():
            moment.tensor.copy_(moment.of(tensors[moment.name]))

    def moments_json(self) -> dict[str, Any]:
        return self._layout.state_json()

    def _held_moments(self) -> Iterator[tuple[TensorSlice, TensorSlice]]:
        """Each slice of a weight that this rank owns, with a slice of its state."""
        whole = self._layout.state_tensors()
        for key, tensor in self.optimizer.state_tensors().items():
            slice_key, _, moment = key.rpartition(".")
            one = self.owned[slice_key]
            name, start = f"{one.name}.{moment}", one.start
            if moment == "step":
                start = 0
            elif moment == "second_moment":
                start = self._second_moment_start(one)
            yield one, TensorSlice(name, tuple(whole[name].shape), start, tensor)

    def _second_moment_start(self, matrix: TensorSlice) -> int:
        """Elements of NorMuon's second moment before those of this matrix."""
        assert self._layout.muon is not None
        split, cols = self._layout.muon.row_splits[matrix.name], matrix.shape[1]
        sizes = zip(accumulate(split, initial=0), second_moment_sizes(split, cols), strict=False)
        return sum(size for first_row, size in sizes if first_row * cols < matrix.start)


def rounded_tables(model: GPT) -> set[str]:
    """Tables of which a model in bfloat16 reads nothing but the bfloat16 rounding of rows. Not one to whose rows
    positions are added in float32, nor one that is the head too."""
    if model.compute_dtype != torch.bfloat16:
        return set()
    is_alone = model.position_embedding is None and not model.config.tied_head
    roles = {Role.VALUE_EMBEDDING, Role.EMBEDDING} if is_alone else {Role.VALUE_EMBEDDING}
    return {name for name, _, role in named_roles(model) if role in roles}


def divide_model(
    model: GPT, config: RunConfig, n_ranks: int, *, bucket_bytes: int = BUCKET_BYTES, order: Sequence[str] | None = None
) -> Division:
    """What each of `n_ranks` updates. `order`: see `divide`."""
    roles = named_roles(model)
    _, groups = divide_by_optimizer(roles, config.optim)
    layout = optimizer_layout(model, config)
    matrices: list[TensorSlice] = []
    for name, rows in (layout.muon.row_splits if layout.muon else {}).items():
        weight, first_row = dict(model.named_parameters())[name].detach(), 0
        for part in weight.split(rows):
            matrices.append(TensorSlice(name, tuple(weight.shape), first_row * weight.size(1), part))
            first_row += len(part)
    return divide(
        {name: parameter.detach() for name, parameter, _ in roles},
        matrices,
        [list(group.parameters) for group in groups],
        n_ranks,
        bucket_bytes=bucket_bytes,
        order=order,
    )
