"""Muon for matrices whose rows are shared among ranks: each is put together on one of them, its owner.

A rank keeps its rows of every weight and of every momentum. In each step

    direction   of this rank's rows, entry by entry
    gather      the rows of a matrix go to its owner
    update      orthogonalized there, once; NorMuon's second moment is the owner's too
    scatter     the rows go back
    decay, move of this rank's rows, entry by entry

Matrices of one shape make a round. While the owners work on one, the rows of the next are under way, and so are the
updates of the one before; the last ones arrive behind whatever the caller does meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from gptlab.config.optim import MuonConfig
from gptlab.optim.division import Leaf, Moment
from gptlab.optim.muon import add_decay, directions, neuron_dim, orthogonal_update, row_split, second_moment_sizes


class Exchange(Protocol):
    """What ranks send each other; every one of them begins the same exchanges in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_to_all_later(self, flat: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to send the first `send[0]` numbers of `flat` to rank 0, the next `send[1]` to rank 1, and so on. The
        function that comes back waits, and returns `receive[0]` numbers from rank 0, then those from rank 1, ..."""
        ...


@dataclass(frozen=True, slots=True)
class ShardedMatrix:
    name: str
    parameter: torch.nn.Parameter
    """(rows here, cols), also where this rank has none."""
    rows: tuple[int, ...]
    """On each rank, in their order."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole matrix."""
        return sum(self.rows), self.parameter.size(1)


@dataclass(slots=True)
class _Round:
    """Matrices of one shape, cut alike."""

    matrices: list[ShardedMatrix]
    """In order of their owners."""
    counts: list[int]
    """How many of them each rank owns."""
    row_split: tuple[int, ...]
    second_moments: list[list[Tensor]] = field(default_factory=list)
    """Of each part, those of the matrices that this rank owns, shaped for `neuron_scale`; empty without NorMuon."""

    @property
    def rows(self) -> tuple[int, ...]:
        return self.matrices[0].rows

    @property
    def cols(self) -> int:
        return self.matrices[0].parameter.size(1)


class ShardedMuon:
    """`Muon` by many ranks. Of its state, NAME.momentum has this rank's rows, and NAME.second_moment is there on the
    owner alone, whole."""

    def __init__(
        self,
        matrices: Sequence[ShardedMatrix],
        config: MuonConfig,
        *,
        compute_dtype: torch.dtype,
        row_splits: Mapping[str, tuple[int, ...]],
        exchange: Exchange,
    ) -> None:
        """`row_splits` as for `build_optimizer`. Every rank gives the same matrices in the same order."""
        self.parameters = {matrix.name: matrix.parameter for matrix in matrices}
        self.leaves: list[Leaf] = []
        """None: it moves the parameters that it was given."""
        self.row_splits = {m.name: row_split(m.name, m.shape, config, row_splits) for m in matrices}
        self._config = config
        self._compute_dtype = compute_dtype
        self._exchange = exchange
        self._momentum = {name: torch.zeros_like(p.detach()) for name, p in self.parameters.items()}
        self._second_moment: dict[str, Tensor] = {}
        self._rounds = self._make_rounds(matrices)

    def step(self, lr_scale: float, momentum: float, weight_decay_scale: float) -> None:
        self.begin_step(lr_scale, momentum, weight_decay_scale)()

    @torch.no_grad()
    def begin_step(self, lr_scale: float, momentum: float, weight_decay_scale: float) -> Callable[[], None]:
        """Do all but wait for the last updates; the function that comes back does that, and moves the weights."""
        updates = []
        gathered = [self._gather(one, momentum) for one in self._rounds[:1]]
        for number, one in enumerate(self._rounds):
            gathered += [self._gather(following, momentum) for following in self._rounds[number + 1 : number + 2]]
            updates.append(self._scatter(one, self._updates(one, gathered[number]())))

        def finish() -> None:
            lr = self._config.lr * lr_scale
            weight_decay = self._config.weight_decay * weight_decay_scale
            for one, update in zip(self._rounds, updates, strict=True):
                self._move(one, update(), lr, weight_decay)

        return finish

    def moments(self) -> list[Moment]:
        """What is here, as if it were all of it: who knows the rows of the ranks knows better."""
        return [Moment(name, tuple(tensor.shape), 0, tensor) for name, tensor in self.state_tensors().items()]

    def state_kinds(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of what is here, by PARAMETER.MOMENT."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.state_tensors().items()}

    def state_tensors(self) -> dict[str, Tensor]:
        """The live tensors of this rank, by PARAMETER.MOMENT."""
        momentum = {f"{name}.momentum": tensor for name, tensor in self._momentum.items() if tensor.numel()}
        return momentum | {f"{name}.second_moment": tensor for name, tensor in self._second_moment.items()}

    def _gather(self, one: _Round, momentum: float) -> Callable[[], Tensor]:
        """Rows of the directions on their way to the owners."""
        flat = one.matrices[0].parameter.new_zeros(0, requires_grad=False)
        if one.rows[self._exchange.rank] > 0:
            means = [self._momentum[m.name] for m in one.matrices]
            gradients = [_gradient(m) for m in one.matrices]
            ours = directions(means, gradients, momentum, self._config.nesterov)
            flat = torch.stack(ours).view(-1)
        rank = self._exchange.rank
        send = [count * one.rows[rank] * one.cols for count in one.counts]
        receive = [one.counts[rank] * rows * one.cols for rows in one.rows]
        return self._exchange.all_to_all_later(flat, send, receive)

    def _updates(self, one: _Round, received: Tensor) -> Tensor:
        """Of this rank's own matrices the updates (n, rows, cols), from the rows that all ranks sent."""
        own = one.counts[self._exchange.rank]
        if own == 0:
            return received
        places = received.split([own * rows * one.cols for rows in one.rows])
        stack = torch.cat([p.view(own, rows, one.cols) for p, rows in zip(places, one.rows, strict=True)], dim=1)
        moments = one.second_moments or [[] for _ in one.row_split]
        parts = [
            orthogonal_update(part.contiguous(), moment, self._config, self._compute_dtype)
            for part, moment in zip(stack.split(one.row_split, dim=1), moments, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _scatter(self, one: _Round, update: Tensor) -> Callable[[], Tensor]:
        """Rows of the updates on their way back."""
        rank = self._exchange.rank
        own = one.counts[rank]
        flat = torch.cat([rows.reshape(-1) for rows in update.split(one.rows, dim=1)]) if own else update
        send = [own * rows * one.cols for rows in one.rows]
        receive = [count * one.rows[rank] * one.cols for count in one.counts]
        return self._exchange.all_to_all_later(flat, send, receive)

    def _move(self, one: _Round, updates: Tensor, lr: float, weight_decay: float) -> None:
        rank = self._exchange.rank
        if one.rows[rank] == 0:
            return
        first = sum(one.rows[:rank])
        update = updates.view(len(one.matrices), one.rows[rank], one.cols)
        weights = [m.parameter.detach() for m in one.matrices]
        if weight_decay > 0.0:
            stacked = torch.stack(weights)
            for start, stop in pairwise(accumulate(one.row_split, initial=0)):
                here = slice(max(start - first, 0), max(stop - first, 0))  # this part's rows among those of this rank
                add_decay(update[:, here], stacked[:, here], weight_decay, self._config, stop - start, one.cols)
        torch._foreach_add_(weights, update.unbind(0), alpha=-lr)

    def _make_rounds(self, matrices: Sequence[ShardedMatrix]) -> list[_Round]:
        """Every rank comes to the same rounds and owners. The dearest matrices are given away first, each to the rank
        that has the least to do."""
        alike: dict[tuple[object, ...], list[ShardedMatrix]] = {}
        for m in matrices:
            alike.setdefault((m.shape, m.rows, self.row_splits[m.name], m.parameter.dtype), []).append(m)
        rounds = sorted(alike.values(), key=lambda group: _cost(self.row_splits[group[0].name], group[0]), reverse=True)
        busy = [0] * self._exchange.size
        return [self._make_round(group, busy) for group in rounds]

    def _make_round(self, matrices: Sequence[ShardedMatrix], busy: list[int]) -> _Round:
        split = self.row_splits[matrices[0].name]
        owned: list[list[ShardedMatrix]] = [[] for _ in busy]
        for matrix in matrices:
            owner = busy.index(min(busy))
            owned[owner].append(matrix)
            busy[owner] += _cost(split, matrix)
        one = _Round([m for group in owned for m in group], [len(group) for group in owned], split)
        if self._config.normuon_beta2 is not None:
            sizes = second_moment_sizes(split, one.cols)
            flat = [m.parameter.new_zeros(sum(sizes), requires_grad=False) for m in owned[self._exchange.rank]]
            self._second_moment |= {m.name: f for m, f in zip(owned[self._exchange.rank], flat, strict=True)}
            by_part = zip(*(f.split(sizes) for f in flat), strict=True) if flat else ()
            one.second_moments = [
                [moment.unsqueeze(neuron_dim(rows, one.cols)) for moment in moments]
                for rows, moments in zip(split, by_part, strict=False)
            ]
        return one


def _cost(split: Sequence[int], matrix: ShardedMatrix) -> int:
    """Multiplications of an orthogonalization, to a factor: the Gram matrix is that of the short side."""
    cols = matrix.parameter.size(1)
    return sum(rows * cols * min(rows, cols) for rows in split)


def _gradient(matrix: ShardedMatrix) -> Tensor:
    if matrix.parameter.grad is None:
        raise RuntimeError(f"{matrix.name} has no gradient")
    return matrix.parameter.grad
