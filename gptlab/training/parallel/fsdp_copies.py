"""Several copies of fully sharded weights (HSDP): what the ranks of one do together, and what they save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from gptlab.runtime.processes.distributed import Group, World
from gptlab.training.checkpoint.format import TensorSlice, even_slices


class OneCopy(Group):
    """The consecutive ranks, of all, that hold the same copy of the weights as this one."""

    def __init__(self, everybody: Group, size: int) -> None:
        super().__init__(World(everybody.rank % size, size))
        self.number = everybody.rank // size
        """Of the copy, from 0."""
        self.n_copies = everybody.size // size
        self._everybody = everybody

    def all_to_all_later(self, flat: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        return self._everybody.all_to_all_later(flat, self._placed(send), self._placed(receive))

    def _placed(self, counts: Sequence[int]) -> list[int]:
        """By rank of all: nothing for those of other copies."""
        placed = [0] * self._everybody.size
        placed[self.number * self.size : (self.number + 1) * self.size] = counts
        return placed

    def share(self, held: Sequence[TensorSlice]) -> list[TensorSlice]:
        """What this copy saves of slices that every copy holds: an even part."""
        whole = {one.name: one for one in held}
        parts = even_slices({one.name: one.tensor for one in held}, self.number, self.n_copies)
        return [
            replace(part, shape=whole[part.name].shape, start=whole[part.name].start + part.start) for part in parts
        ]
