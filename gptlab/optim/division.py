"""Which rank updates what: whole matrices for Muon, runs of elements for AdamW. Plain data, the same on every rank.

Every matrix has one owner, which keeps its moments and orthogonalizes it, once in the world. Matrices of one shape are
dealt out in rounds of one a rank, so that all ranks have as much to multiply and as much to send; what is left over of
all shapes goes, the dearest first, to whoever has the least of it. What AdamW updates is cut by elements.

Gradients travel in the order in which a backward pass completes them, new weights by what is updated at once. Either
way a message has one chunk for each rank: the segments that this rank owns, behind one another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

# Small messages pay their latency often; large ones begin late, and the last one, which nothing hides, is long.
# torch's DistributedDataParallel takes 25 MiB too (Li et al., VLDB 2020, found 10 to 25 MB best on 16 and 32 GPUs).
MESSAGE_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive elements of a parameter, in row-major order."""

    name: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of a parameter that Muon orthogonalizes as one matrix."""

    name: str
    first_row: int
    rows: int
    cols: int

    @property
    def segment(self) -> Segment:
        return Segment(self.name, self.first_row * self.cols, self.rows * self.cols)

    @property
    def cost(self) -> int:
        """Multiplications of an orthogonalization, to a factor: the Gram matrix is that of the short side."""
        return self.rows * self.cols * min(self.rows, self.cols)

    @property
    def stack(self) -> str:
        """Of matrices that are orthogonalized together."""
        return f"{self.rows}x{self.cols}"


@dataclass(frozen=True, slots=True)
class Message:
    segments: tuple[tuple[Segment, ...], ...]
    """What each rank owns of it."""
    chunk: int
    """Elements for each rank; who owns fewer has zeros behind them."""
    names: frozenset[str]
    """Of the parameters that have a part in it."""


@dataclass(frozen=True, slots=True)
class Division:
    gradients: tuple[Message, ...]
    """In the order in which they are complete in a backward pass, which goes from the last parameter to the first."""
    stacks: Mapping[str, Message]
    """New weights of Muon's matrices, by `Matrix.stack`."""
    rest: tuple[Message, ...]
    """New weights of AdamW."""

    def share(self, rank: int) -> frozenset[Segment]:
        """What `rank` updates."""
        return frozenset(segment for message in self.gradients for segment in message.segments[rank])


def divide(
    sizes: Mapping[str, int],
    matrices: Sequence[Matrix],
    adamw_groups: Iterable[Sequence[str]],
    n_ranks: int,
    *,
    message_elements: int,
) -> Division:
    """Divide all parameters among `n_ranks`.

    Args:
        sizes: elements of every parameter, by name, in the model's order.
        matrices: all that Muon updates.
        adamw_groups: names of parameters with the same settings.
        message_elements: how long a message of gradients gets; one round of matrices may be longer.
    """
    place = {name: number for number, name in enumerate(sizes)}
    rounds = _deal(sorted(matrices, key=lambda m: (place[m.name], m.first_row), reverse=True), n_ranks)
    runs = [run for group in adamw_groups for run in _runs(group, sizes, place, n_ranks, message_elements)]
    stacks: dict[str, list[list[Segment]]] = {}
    for matrix in matrices:
        stacks.setdefault(matrix.stack, [[] for _ in range(n_ranks)])
    for owned in rounds:
        for rank, dealt in enumerate(owned):
            for matrix in dealt:
                stacks[matrix.stack][rank].append(matrix.segment)
    units = [_message([[m.segment for m in dealt] for dealt in owned]) for owned in rounds] + runs
    # A message is complete with the first of its parameters, the last to get its gradient.
    units.sort(key=lambda unit: min(place[name] for name in unit.names), reverse=True)
    return Division(
        tuple(_packed(units, n_ranks, message_elements)),
        {stack: _message(owned) for stack, owned in stacks.items()},
        tuple(runs),
    )


def even_share(sizes: Mapping[str, int], rank: int, n_ranks: int) -> list[Segment]:
    """The part of `rank` where parameters of so many elements, behind one another, are cut into parts of the same
    length, plus or minus one."""
    total = sum(sizes.values())
    first, end = total * rank // n_ranks, total * (rank + 1) // n_ranks
    before, segments = 0, []
    for name, size in sizes.items():
        start, stop = max(first - before, 0), min(end - before, size)
        if start < stop:
            segments.append(Segment(name, start, stop - start))
        before += size
    return segments


def _deal(matrices: Sequence[Matrix], n_ranks: int) -> list[list[list[Matrix]]]:
    """Rounds: for each rank the matrices that it gets."""
    alike: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        alike.setdefault(matrix.stack, []).append(matrix)
    rounds: list[list[list[Matrix]]] = []
    left: list[Matrix] = []
    for group in alike.values():
        full = len(group) - len(group) % n_ranks
        rounds += [[[matrix] for matrix in group[n : n + n_ranks]] for n in range(0, full, n_ranks)]
        left += group[full:]
    if left:
        busy = [0] * n_ranks
        last: list[list[Matrix]] = [[] for _ in busy]
        for matrix in sorted(left, key=lambda matrix: -matrix.cost):
            owner = busy.index(min(busy))
            last[owner].append(matrix)
            busy[owner] += matrix.cost
        rounds.append(last)
    return rounds


def _runs(
    group: Sequence[str], sizes: Mapping[str, int], place: Mapping[str, int], n_ranks: int, message_elements: int
) -> list[Message]:
    """Parameters of a group behind one another, up to the length of a message, cut into even parts."""
    gathered: list[list[str]] = []
    for name in sorted(group, key=lambda name: place[name], reverse=True):
        if not gathered or sum(sizes[known] for known in gathered[-1]) + sizes[name] > message_elements:
            gathered.append([])
        gathered[-1].append(name)
    runs = []
    for names in gathered:
        of_run = {name: sizes[name] for name in names}
        runs.append(_message([even_share(of_run, rank, n_ranks) for rank in range(n_ranks)]))
    return runs


def _packed(units: Sequence[Message], n_ranks: int, message_elements: int) -> list[Message]:
    packed: list[list[list[Segment]]] = []
    elements = 0
    for unit in units:
        if not packed or elements + unit.chunk * n_ranks > message_elements:
            packed.append([[] for _ in range(n_ranks)])
            elements = 0
        for rank, owned in enumerate(unit.segments):
            packed[-1][rank].extend(owned)
        elements += unit.chunk * n_ranks
    return [_message(owned) for owned in packed]


def _message(owned: Sequence[Sequence[Segment]]) -> Message:
    return Message(
        tuple(tuple(segments) for segments in owned),
        max(sum(segment.count for segment in segments) for segments in owned),
        frozenset(segment.name for segments in owned for segment in segments),
    )


@dataclass(frozen=True, slots=True)
class Leaf:
    """What this rank updates of a parameter: a parameter of its own, with its own gradient, on the same memory."""

    segment: Segment
    whole: torch.nn.Parameter
    own: torch.nn.Parameter

    @classmethod
    def of(cls, segment: Segment, whole: torch.nn.Parameter, shape: tuple[int, ...]) -> Leaf:
        elements = whole.detach().view(-1)[segment.start : segment.start + segment.count]
        return cls(segment, whole, torch.nn.Parameter(elements.view(shape)))

    def take_gradient(self) -> None:
        """Its part of the whole parameter's gradient, where it has been given none of its own."""
        if self.own.grad is None and self.whole.grad is not None:
            start = self.segment.start
            self.own.grad = self.whole.grad.reshape(-1)[start : start + self.segment.count].view_as(self.own)


@dataclass(frozen=True, slots=True)
class Moment:
    """Consecutive elements of the state of a parameter."""

    name: str
    """PARAMETER.MOMENT"""
    shape: tuple[int, ...]
    """Of the whole one."""
    start: int
    tensor: torch.Tensor
    saved_here: bool = True
    """Not where another rank has the same elements, and saves them."""

    @property
    def key(self) -> str:
        """The name, with the first element where this is not all of it."""
        return self.name if self.tensor.numel() == math.prod(self.shape) else f"{self.name}@{self.start}"
