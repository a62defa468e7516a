"""One type for a part of a tensor: what a process of several holds, sends and saves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlice:
    """Consecutive elements of a tensor, in row-major order."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Elements of the whole tensor before the first one here."""
    tensor: Tensor
    """The elements, in any shape."""

    @property
    def count(self) -> int:
        return self.tensor.numel()

    @property
    def is_whole(self) -> bool:
        return self.count == math.prod(self.shape)

    @property
    def key(self) -> str:
        """Its name in a file, which may hold several slices of one tensor."""
        return slice_key(self.name, self.shape, self.start, self.count)

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of another tensor of the whole shape, in the shape that they have here."""
        return whole.reshape(-1)[self.start : self.start + self.count].view(self.tensor.shape)

    def with_tensor(self, tensor: Tensor) -> TensorSlice:
        """The same elements, held elsewhere."""
        return replace(self, tensor=tensor)


def slice_key(name: str, shape: tuple[int, ...], start: int, count: int) -> str:
    """NAME for a whole tensor, NAME@START for a part of one."""
    return name if count == math.prod(shape) else f"{name}@{start}"


def whole_slices(tensors: Mapping[str, Tensor]) -> list[TensorSlice]:
    """Every tensor as one slice."""
    return [TensorSlice(name, tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()]


def even_slices(tensors: Mapping[str, Tensor], index: int, parts: int) -> list[TensorSlice]:
    """Part `index` of `parts` where `tensors`, end to end, are cut into parts of the same length, plus or minus one
    element. Views, where the tensors are contiguous."""
    if parts == 1:
        return whole_slices(tensors)
    total = sum(tensor.numel() for tensor in tensors.values())
    first, end = total * index // parts, total * (index + 1) // parts
    before, slices = 0, []
    for name, tensor in tensors.items():
        start, stop = max(first - before, 0), min(end - before, tensor.numel())
        # An empty tensor has no element that could say whose it is: it belongs to the first part.
        if start < stop or (index == 0 and tensor.numel() == 0):
            slices.append(TensorSlice(name, tuple(tensor.shape), start, tensor.detach().reshape(-1)[start:stop]))
        before += tensor.numel()
    return slices
