"""Muon for fully sharded matrices: each is assembled on one rank, its owner.

A rank keeps its rows of every weight and of every momentum. In each step

    direction       of this rank's rows, elementwise
    gather          the rows of a matrix go to its owner
    update          the owner orthogonalizes it and keeps NorMuon's second moment
    scatter         the rows go back
    decay, update   of this rank's rows, elementwise

Matrices of one shape make a round. While the owners work on one round, the rows of the next are on their way, and so
are the updates of the one before; the caller can do other work while the last ones arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from gptlab.config.optim import MuonConfig
from gptlab.optim.muon import (
    Compile,
    make_updates,
    move_means,
    neuron_dim,
    orthogonal_update,
    second_moment_sizes,
    step_weights,
)
from gptlab.training.parallel.division import multiplications
from gptlab.training.parallel.fsdp_copies import OneCopy


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
    """State of one parameter: NAME.momentum has this rank's rows; NAME.second_moment is whole, on the owner alone."""

    def __init__(
        self,
        matrices: Sequence[ShardedMatrix],
        config: MuonConfig,
        *,
        compute_dtype: torch.dtype,
        row_splits: Mapping[str, tuple[int, ...]],
        group: OneCopy,
    ) -> None:
        """`row_splits` as for `build_optimizer`. Every rank passes the same matrices in the same order."""
        self.parameters = {matrix.name: matrix.parameter for matrix in matrices}
        given = row_splits if config.split_qkv else {}
        self.row_splits = {m.name: given.get(m.name, (m.shape[0],)) for m in matrices}
        self._config = config
        self._compute_dtype = compute_dtype
        self._group = group
        self._orthogonal_update: Callable[..., Tensor] = orthogonal_update
        self._momentum = {name: torch.zeros_like(p.detach()) for name, p in self.parameters.items()}
        self._second_moment: dict[str, Tensor] = {}
        self._rounds = self._make_rounds(matrices)

    def step(self, lr_scale: float, momentum: float, weight_decay_scale: float, made: Tensor | None = None) -> None:
        self.begin_step(lr_scale, momentum, weight_decay_scale, made)()

    @torch.no_grad()
    def begin_step(
        self, lr_scale: float, momentum: float, weight_decay_scale: float, made: Tensor | None = None
    ) -> Callable[[], None]:
        """Do everything except wait for the last updates. The returned function waits and updates the weights.
        Arguments as for `CombinedOptimizer.step`."""
        updates = []
        gathered = [self._gather(one, momentum, made) for one in self._rounds[:1]]
        for number, one in enumerate(self._rounds):
            gathered += [self._gather(following, momentum, made) for following in self._rounds[number + 1 : number + 2]]
            updates.append(self._scatter(one, self._updates(one, gathered[number](), made)))

        def finish() -> None:
            lr = self._config.lr * lr_scale
            weight_decay = self._config.weight_decay * weight_decay_scale
            for one, update in zip(self._rounds, updates, strict=True):
                self._apply(one, update(), lr, weight_decay, made)

        return finish

    def compile(self, compiled: Compile | None) -> None:
        """Fuse what a matrix's owner computes, into which no rate enters; None: no longer. Several copies of the
        weights need the same bits, and Inductor may choose the order of a sum by timing: they stay uncompiled."""
        self._orthogonal_update = orthogonal_update
        if compiled is not None and self._group.n_copies == 1:
            self._orthogonal_update = compiled(orthogonal_update)

    def state_tensors(self) -> dict[str, Tensor]:
        """The live tensors of this rank, by PARAMETER.MOMENT."""
        momentum = {f"{name}.momentum": tensor for name, tensor in self._momentum.items() if tensor.numel()}
        return momentum | {f"{name}.second_moment": tensor for name, tensor in self._second_moment.items()}

    def _gather(self, one: _Round, momentum: float, made: Tensor | None) -> Callable[[], Tensor]:
        """Begin to send rows of the directions to the owners."""
        flat = one.matrices[0].parameter.new_zeros(0, requires_grad=False)
        if one.rows[self._group.rank] > 0:
            means = [self._momentum[m.name] for m in one.matrices]
            gradients = [cast(Tensor, m.parameter.grad) for m in one.matrices]
            flat = move_means(means, gradients, momentum, self._config.nesterov, made).view(-1)
        rank = self._group.rank
        send = [count * one.rows[rank] * one.cols for count in one.counts]
        receive = [one.counts[rank] * rows * one.cols for rows in one.rows]
        return self._group.all_to_all_later(flat, send, receive)

    def _updates(self, one: _Round, received: Tensor, made: Tensor | None) -> Tensor:
        """The updates (n, rows, cols) of this rank's own matrices, from the rows that all ranks sent."""
        own = one.counts[self._group.rank]
        if own == 0:
            return received
        places = received.split([own * rows * one.cols for rows in one.rows])
        stack = torch.cat([p.view(own, rows, one.cols) for p, rows in zip(places, one.rows, strict=True)], dim=1)
        moments = one.second_moments or [[] for _ in one.row_split]
        parts = []
        given = self._config, self._compute_dtype, made, self._orthogonal_update
        for part, moment in zip(stack.split(one.row_split, dim=1), moments, strict=True):
            parts.append(make_updates(part.contiguous(), moment, *given))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _scatter(self, one: _Round, update: Tensor) -> Callable[[], Tensor]:
        """Begin to send rows of the updates back."""
        rank = self._group.rank
        own = one.counts[rank]
        flat = torch.cat([rows.reshape(-1) for rows in update.split(one.rows, dim=1)]) if own else update
        send = [own * rows * one.cols for rows in one.rows]
        receive = [count * one.rows[rank] * one.cols for count in one.counts]
        return self._group.all_to_all_later(flat, send, receive)

    def _apply(self, one: _Round, updates: Tensor, lr: float, weight_decay: float, made: Tensor | None) -> None:
        rank = self._group.rank
        if one.rows[rank] == 0:
            return
        first = sum(one.rows[:rank])
        update = updates.view(len(one.matrices), one.rows[rank], one.cols)
        for start, stop in pairwise(accumulate(one.row_split, initial=0)):
            here = slice(max(start - first, 0), max(stop - first, 0))  # this part's rows among those of this rank
            weights = [m.parameter.detach()[here] for m in one.matrices]
            step_weights(weights, update[:, here], lr, weight_decay, self._config, (stop - start, one.cols), made)

    def _make_rounds(self, matrices: Sequence[ShardedMatrix]) -> list[_Round]:
        """The same rounds and owners on every rank. The most expensive matrices are dealt out first, each to the rank
        with the least work."""
        alike: dict[tuple[object, ...], list[ShardedMatrix]] = {}
        for m in matrices:
            alike.setdefault((m.shape, m.rows, self.row_splits[m.name], m.parameter.dtype), []).append(m)
        rounds = sorted(alike.values(), key=lambda group: _cost(self.row_splits[group[0].name], group[0]), reverse=True)
        busy = [0] * self._group.size
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
            flat = [m.parameter.new_zeros(sum(sizes), requires_grad=False) for m in owned[self._group.rank]]
            self._second_moment |= {m.name: f for m, f in zip(owned[self._group.rank], flat, strict=True)}
            by_part = zip(*(f.split(sizes) for f in flat), strict=True) if flat else ()
            one.second_moments = [
                [moment.unsqueeze(neuron_dim(rows, one.cols)) for moment in moments]
                for rows, moments in zip(split, by_part, strict=False)
            ]
        return one


def _cost(split: Sequence[int], matrix: ShardedMatrix) -> int:
    return sum(multiplications(rows, matrix.parameter.size(1)) for rows in split)
