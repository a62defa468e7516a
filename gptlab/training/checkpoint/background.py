"""Saving while training goes on: a copy of the step's tensors in host memory, and one thread that writes it.

Training waits for the copy alone. One thread, so one save at a time, and one set of copies, which are overwritten when
the next save begins; whoever takes a snapshot has waited until the save before it is at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from gptlab.runtime.hardware.device import synchronize
from gptlab.training.checkpoint.slices import TensorSlice

T = TypeVar("T")


class Snapshots:
    """Copies of tensors in host memory that is taken once and used for every copy."""

    def __init__(self, device: torch.device) -> None:
        """`device`: where most of the tensors are. From a CUDA device copies go to pinned memory, all of them at once
        and without a wait in between; its allocator rounds each tensor up to a power of two."""
        self._device = device
        self._copies: dict[str, Tensor] = {}

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the memory now, and touch it: the kernel finds a page at its first use, which costs as much as the copy.

        RuntimeError or MemoryError, with nothing kept, where there is not enough.
        """
        try:
            for name, tensor in tensors.items():
                _bytes(self._copy_of(name, tensor)).fill(0)
        except BaseException:
            self._copies.clear()
            raise

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of `tensors` as they are now, contiguous on the CPU, until the next `take`.

        A name means the same tensor every time; where its shape or type has changed (the states of random generators
        do), its memory is taken anew.
        """
        copies = {name: self._copy_of(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                # By one thread, which memory hardly lets several overtake. torch's copy waits for the slowest of all:
                # beside other work on the machine 0.8 s for 1.2 GB, and 0.1 to 0.2 s like this.
                np.copyto(_bytes(copies[name]), _bytes(tensor.detach()))
            else:
                copies[name].copy_(tensor.detach(), non_blocking=True)
        synchronize(self._device)
        return copies

    def _copy_of(self, name: str, tensor: Tensor) -> Tensor:
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            pinned = self._device.type == "cuda"
            copy = self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return copy


def _bytes(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor: uint8, one dimension."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _by_key(pieces: Sequence[TensorSlice]) -> dict[str, Tensor]:
    return {piece.key: piece.tensor for piece in pieces}


def _copied(pieces: Sequence[TensorSlice], snapshots: Snapshots) -> list[TensorSlice]:
    copies = snapshots.take(_by_key(pieces))
    return [piece.with_tensor(copies[piece.key]) for piece in pieces]


class BackgroundSaver:
    """Copies of the state, and the thread that writes them. Closing waits for the thread."""

    def __init__(self, device: torch.device) -> None:
        # The names of weights and of moments may be the same.
        self._device = device
        self._model = Snapshots(device)
        self._optimizer = Snapshots(device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gptlab-save")
        self.ready = False
        """Whether there is memory for copies; without it, training waits for every save."""

    def reserve(self, model: Sequence[TensorSlice], optimizer: Sequence[TensorSlice]) -> None:
        """Take the memory for copies of these. RuntimeError or MemoryError where there is not enough."""
        self._model.reserve(_by_key(model))
        self._optimizer.reserve(_by_key(optimizer))
        self.ready = True

    def give_up(self) -> None:
        """Give the memory back: training will wait for every save."""
        self._model, self._optimizer = Snapshots(self._device), Snapshots(self._device)
        self.ready = False

    def snapshot(
        self, model: Sequence[TensorSlice], optimizer: Sequence[TensorSlice]
    ) -> tuple[list[TensorSlice], list[TensorSlice]]:
        """Copies on the CPU. The former save must be at its end: its copies are overwritten."""
        return _copied(model, self._model), _copied(optimizer, self._optimizer)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` on the thread, behind what was submitted before."""
        return self._thread.submit(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
