"""Several ranks that hold all weights and share the work of an update: each makes its part, once in the world.

    backward    of a rank's last micro-batch: gradients leave in messages as soon as they are complete, are added up on
                the way, and each rank gets those that it owns (reduce-scatter)
    norm, clip  of all gradients, from a sum of squares
    update      of what this rank owns, whose moments nobody else keeps
    weights     go to all ranks (all-gather), those of one stack of matrices while the next is orthogonalized

Who owns what: optim/division.py. A rank without a micro-batch adds zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.config.run import RunConfig
from gptlab.data.rows import RowSource
from gptlab.model.gpt import GPT
from gptlab.model.roles import fused_rows
from gptlab.optim.clip import sum_of_squares
from gptlab.optim.combined import CombinedOptimizer
from gptlab.optim.division import MESSAGE_BYTES, Division, Leaf, Message, Segment
from gptlab.optim.groups import build_optimizer, divide_work
from gptlab.runtime.processes.distributed import Group, Pending
from gptlab.training.checkpoint.slices import TensorSlice
from gptlab.training.state import TrainState, build_state, named_roles


@dataclass(slots=True)
class _Sent:
    message: Message
    waiting: int = 0
    """Gradients that are not complete yet."""
    flat: Tensor | None = None
    own: Tensor | None = None
    pending: Pending | None = None


class GradientShares:
    """The gradients of all ranks, of which each gets what it owns: `leaf.own.grad` of its leaves."""

    def __init__(
        self, parameters: Mapping[str, Parameter], leaves: Mapping[Segment, Leaf], division: Division, group: Group
    ) -> None:
        self._parameters = parameters
        self._leaves = leaves
        self._group = group
        self._messages = [_Sent(message) for message in division.gradients]
        self._of = {name: [sent for sent in self._messages if name in sent.message.names] for name in parameters}
        self._unsent: dict[str, int] = {}
        """Messages that still need a parameter's gradient."""
        self._next = 0
        """Messages before this one have left."""
        self._armed = False
        # Registered once, before anything is compiled, so that the parameters look alike in every step.
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._complete, name))

    def order(self, micro_indices: Sequence[int]) -> Sequence[int]:
        """Places of this rank's micro-batches in the order in which they are to be computed: as they come."""
        return range(len(micro_indices))

    def begin(self) -> None:
        """To be called before the backward pass of this rank's last micro-batch."""
        self._armed = True
        for sent in self._messages:
            sent.waiting = len(sent.message.names)

    def end(self, micro_index: int, loss: Tensor) -> Tensor:
        """To be called behind the backward pass of every micro-batch, with the sum `loss` (0-d) of their losses, which
        is returned as it is."""
        return loss

    def finish(self, loss: Tensor) -> Tensor:
        """Wait until this rank has the sums of what it owns. `loss` (0-d) is added up beside them and returned.

        RuntimeError where a parameter has no gradient though this rank computed."""
        computed, self._armed = self._armed, False
        while self._next < len(self._messages):
            self._send(self._messages[self._next], computed)
        total = loss.clone()
        last = self._group.sum_later(total, "loss")
        for sent in self._messages:
            assert sent.pending is not None
            assert sent.own is not None
            sent.pending.wait()
            owned = sent.message.segments[self._group.rank]
            start = 0
            for segment in owned:
                leaf = self._leaves[segment]
                leaf.own.grad = sent.own[start : start + segment.count].view_as(leaf.own)
                start += segment.count
            sent.flat = sent.own = sent.pending = None
        last.wait()
        self._next = 0
        self._unsent.clear()
        return total

    def _complete(self, name: str, _: Tensor) -> None:
        if not self._armed:
            return
        for sent in self._of[name]:
            sent.waiting -= 1
        while self._next < len(self._messages) and self._messages[self._next].waiting == 0:
            self._send(self._messages[self._next], True)

    @torch.no_grad()
    def _send(self, sent: _Sent, computed: bool) -> None:
        message = sent.message
        gradients: dict[str, Tensor] = {}
        for name in message.names:
            gradient = self._parameters[name].grad
            if gradient is not None:
                gradients[name] = gradient.reshape(-1)
            elif computed:
                raise RuntimeError(f"{name} has no gradient: every parameter takes part in every step")
        like = next(iter(self._parameters.values())).detach()
        sent.flat = _joined(message, gradients, like, message.segments)
        sent.own = like.new_empty(message.chunk)
        for name in message.names:
            self._unsent[name] = self._unsent.get(name, len(self._of[name])) - 1
            if self._unsent[name] == 0:
                self._parameters[name].grad = None  # its copy is on the way: kept no longer than needed
        sent.pending = self._group.reduce_scatter_later(sent.own, sent.flat, "gradients")
        self._next += 1


class WeightShares:
    """New weights of all ranks, on all of them."""

    def __init__(self, parameters: Mapping[str, Parameter], division: Division, group: Group) -> None:
        self._parameters = parameters
        self._division = division
        self._group = group
        self._under_way: list[tuple[Message, Tensor, Tensor, Pending]] = []

    @torch.no_grad()
    def send(self, what: str | None) -> None:
        """Begin to exchange what the optimizer has moved: that which AdamW updates (None), or a stack of matrices."""
        messages = self._division.rest if what is None else (self._division.stacks[what],)
        for message in messages:
            owned = message.segments[self._group.rank]
            weights = {segment.name: self._parameters[segment.name].detach().view(-1) for segment in owned}
            like = next(iter(self._parameters.values())).detach()
            own = _joined(message, weights, like, [owned])
            flat = own.new_empty(self._group.size * message.chunk)
            pending = self._group.all_gather_later(flat, own, "weights")
            self._under_way.append((message, own, flat, pending))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all of it."""
        for message, _, flat, pending in self._under_way:
            pending.wait()
            targets: list[Tensor] = []
            sources: list[Tensor] = []
            for rank, owned in enumerate(message.segments):
                if rank == self._group.rank:
                    continue
                start = rank * message.chunk
                for segment in owned:
                    weight = self._parameters[segment.name].detach().view(-1)
                    targets.append(weight[segment.start : segment.start + segment.count])
                    sources.append(flat[start : start + segment.count])
                    start += segment.count
            if targets:
                torch._foreach_copy_(targets, sources)
        self._under_way.clear()


@dataclass(slots=True, kw_only=True)
class DividedState(TrainState):
    """Every rank has all weights, and makes its part of every update: it has the moments of that part alone."""

    division: Division
    group: Group
    _weights: WeightShares = field(init=False)

    def __post_init__(self) -> None:
        self._weights = WeightShares(dict(self.model.named_parameters()), self.division, self.group)
        if self.scaler.is_enabled():
            self.optimizer.witness = Parameter(torch.zeros(1, device=self.device))

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        return self.group.sum(sum_of_squares(gradients, self.device), "gradient norm").sqrt()

    def agree_on_overflow(self) -> None:
        witness = self.optimizer.witness
        if witness is None:
            return
        broken = [~p.grad.isfinite().all() for p in self.weights_here() if p.grad is not None]
        count = torch.stack(broken).sum() if broken else torch.zeros((), device=self.device)
        seen = self.group.sum(count.to(torch.float32).reshape(1), "overflow")
        witness.grad = torch.where(seen > 0, torch.inf, 0.0)

    def first_broken_gradient(self) -> str | None:
        names = [name for name, _ in self.model.named_parameters()]
        place = {name: number for number, name in enumerate(names)}
        broken = [
            place[leaf.segment.name]
            for leaf in self.optimizer.leaves.values()
            if leaf.own.grad is not None and not bool(leaf.own.grad.isfinite().all())
        ]
        # One place for each rank, none of which is len(names): sums with zeros are exact.
        first = torch.zeros(self.world_size, dtype=torch.float64)
        first[self.rank] = min(broken, default=len(names))
        number = int(self.group.sum(first, "broken gradient").min())
        return names[number] if number < len(names) else None

    def moved(self, what: str | None) -> None:
        self._weights.send(what)

    def finish_move(self) -> None:
        self._weights.finish()

    def moment_pieces(self) -> list[TensorSlice]:
        return [
            TensorSlice(moment.name, moment.shape, moment.start, moment.tensor)
            for moment in self.optimizer.moments()
            if moment.saved_here
        ]


def build_divided_state(
    config: RunConfig,
    rows: RowSource,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    group: Group,
    message_bytes: int = MESSAGE_BYTES,
) -> tuple[DividedState, GradientShares]:
    """As `build_state`, for a group of several ranks, with what adds up their gradients."""
    division: list[Division] = []

    def make_optimizer(model: GPT, config: RunConfig) -> CombinedOptimizer:
        parameters, splits = named_roles(model), fused_rows(model)
        division.append(
            divide_work(parameters, config.optim, group.size, row_splits=splits, message_bytes=message_bytes)
        )
        return build_optimizer(
            parameters, config.optim, compute_dtype=compute_dtype, row_splits=splits,
            share=division[0].share(group.rank),
        )  # fmt: skip

    whole = build_state(
        config, rows, device=device, compute_dtype=compute_dtype, rank=group.rank, world_size=group.size,
        make_optimizer=make_optimizer,
    )  # fmt: skip
    state = DividedState(
        whole.model, whole.optimizer, whole.loader, whole.scaler, device, group.rank, group.size,
        division=division[0], group=group,
    )  # fmt: skip
    return state, GradientShares(dict(whole.model.named_parameters()), whole.optimizer.leaves, division[0], group)


def _joined(
    message: Message, tensors: Mapping[str, Tensor], like: Tensor, of_ranks: Sequence[Sequence[Segment]]
) -> Tensor:
    """The segments of each rank behind one another, in chunks as long as the message's; zeros where nothing is."""
    parts = []
    for owned in of_ranks:
        for segment in owned:
            tensor, end = tensors.get(segment.name), segment.start + segment.count
            parts.append(like.new_zeros(segment.count) if tensor is None else tensor[segment.start : end])
        if missing := message.chunk - sum(segment.count for segment in owned):
            parts.append(like.new_zeros(missing))
    return torch.cat(parts)
