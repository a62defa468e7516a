"""A tensor as several processes hold it: each has some runs of its elements, which together tile it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from gptlab.optim.division import even_share


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a tensor, in row-major order, that this process holds and is to write."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Elements of the whole tensor before the first one here."""
    tensor: Tensor
    """The elements, in any shape."""

    @property
    def is_whole(self) -> bool:
        return self.tensor.numel() == math.prod(self.shape)

    @property
    def key(self) -> str:
        """What it is called in a file, where a tensor may stand in several pieces."""
        return piece_key(self.name, self.shape, self.start, self.tensor.numel())

    def with_tensor(self, tensor: Tensor) -> Piece:
        """The same elements, held elsewhere."""
        return replace(self, tensor=tensor)


def piece_key(name: str, shape: tuple[int, ...], start: int, count: int) -> str:
    """NAME for a whole tensor, NAME@START for a part of one."""
    return name if count == math.prod(shape) else f"{name}@{start}"


def whole_pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Every tensor as one piece."""
    return [Piece(name, tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()]


def share_of(tensors: Mapping[str, Tensor], rank: int, size: int) -> list[Piece]:
    """Of tensors that all of `size` ranks hold, what `rank` is to write: the same number of elements on each, plus or
    minus one, in the order of `tensors`. Views, where the tensors are contiguous."""
    if size == 1:
        return whole_pieces(tensors)
    # An empty tensor has no element that could tell whose it is: the first rank's.
    empty = {name: tensor for name, tensor in tensors.items() if tensor.numel() == 0 and rank == 0}
    segments = even_share({name: tensor.numel() for name, tensor in tensors.items()}, rank, size)
    return whole_pieces(empty) + [
        Piece(
            segment.name, tuple(tensors[segment.name].shape), segment.start,
            tensors[segment.name].detach().reshape(-1)[segment.start : segment.start + segment.count],
        )
        for segment in segments
    ]  # fmt: skip
