"""Data parallelism by a fixed reduction tree: the same bits with 1, 2, 4 and 8 ranks.

Every rank holds everything and makes the whole update. Micro-batch i belongs to virtual shard i % 8. A shard adds up
its micro-batches in their order; shards combine by a fixed tree:

    shards     0   4   2   6   1   5   3   7
                \\ /     \\ /     \\ /     \\ /
    v, v + 4     0       2       1       3
                  \\     /         \\     /
    u, u + 2         0               1
                      \\             /
    0, 1                    sum

Rank r of W has micro-batches r, r + W, ...: whole shards, and the lower levels of the tree. It takes them in the order
of the first line, so that at most one sum of a level waits for its partner. On the upper levels ranks exchange their
sums in pairs and add them (recursive doubling; Thakur et al., IJHPCA 2005). One adds a + b where the other adds b + a,
which gives the same bits.

Where a step has fewer than 8 micro-batches, shards without any are missing, and a sum without a partner goes up as it
is: adding zeros instead would turn -0 into 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.config.run import EXACT_WORLD_SIZES
from gptlab.model.gpt import GPT
from gptlab.optim.combined import CombinedOptimizer
from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.format import TensorSlice, even_slices
from gptlab.training.parallel.division import BUCKET_BYTES, consecutive
from gptlab.training.parallel.strategy import Strategy

SHARDS = max(EXACT_WORLD_SIZES)


@dataclass(frozen=True, slots=True)
class _Sum:
    """Of the micro-batches of some shards."""

    gradients: list[Tensor]
    """In the order of the parameters."""
    loss: Tensor
    """0-d"""


class Deterministic(Strategy):
    def __init__(self, model: GPT, optimizer: CombinedOptimizer, group: Group, *, micro_batches: int) -> None:
        super().__init__(model, optimizer, group)
        self._tree = ReductionTree(model.parameters(), group, micro_batches=micro_batches)

    def order(self, micro_indices: Sequence[int]) -> Sequence[int]:
        return self._tree.order(micro_indices)

    def after_micro_batch(self, micro_index: int, loss: Tensor) -> Tensor:
        return self._tree.after_micro_batch(micro_index, loss)

    def finish_reduction(self, loss: Tensor) -> Tensor:
        return self._tree.finish(loss)

    def weight_slices(self) -> list[TensorSlice]:
        return even_slices(self.model.saved_tensors(), self.group.rank, self.group.size)

    def moment_slices(self) -> list[TensorSlice]:
        return even_slices(self.optimizer.state_tensors(), self.group.rank, self.group.size)


class ReductionTree:
    """`micro_batches`: of a step, over all ranks. A tied table has one gradient."""

    def __init__(
        self, parameters: Iterable[Parameter], group: Group, *, micro_batches: int, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        assert group.size in EXACT_WORLD_SIZES
        self._parameters = [p for p in parameters if p.requires_grad]
        self._group = group
        self._micro_batches = micro_batches
        self._buckets = in_buckets(self._parameters, bucket_bytes)
        self._waiting: list[_Sum] = []
        """For the other half of their level; the last one is the first to get it."""
        self._missing: set[Parameter] = set()
        """Those that a micro-batch gave no gradient, and should have."""

    def order(self, micro_indices: Sequence[int]) -> list[int]:
        """Places of this rank's micro-batches in the order in which the tree takes them."""
        return sorted(range(len(micro_indices)), key=lambda place: (_turn(micro_indices[place]), micro_indices[place]))

    @torch.no_grad()
    def after_micro_batch(self, micro_index: int, loss: Tensor) -> Tensor:
        """`loss` is the sum over the micro-batches whose gradients are in `.grad`. Returns the sum to continue with:
        zero, and no `.grad`, where a shard is complete."""
        if micro_index + SHARDS < self._micro_batches:
            return loss
        gradients = []
        for parameter in self._parameters:
            if parameter.grad is None:  # a mistake, which the optimizer names
                self._missing.add(parameter)
            gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        self._put_aside(micro_index % SHARDS, _Sum(gradients, loss))
        return torch.zeros_like(loss)

    @torch.no_grad()
    def finish(self, loss: Tensor) -> Tensor:
        """Combine the sums of the ranks. Afterwards every `.grad` is that of the whole step, with the same bits on each
        rank and for every number of ranks. Returns the loss (0-d) of the whole step, on the device of `loss`."""
        # A rank without a micro-batch needs tensors of the right shapes; nobody reads their values.
        own = self._waiting.pop() if self._waiting else _Sum([p.detach() for p in self._parameters], loss)
        assert not self._waiting
        with self._group.together("gradients"):
            for bucket in self._buckets:
                gradients = own.gradients[: len(bucket)]
                del own.gradients[: len(bucket)]  # kept no longer than needed
                if self._group.size > 1:
                    flat = self._combined(torch.cat([gradient.reshape(-1) for gradient in gradients]))
                    gradients = [
                        piece.view_as(p)
                        for piece, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True)
                    ]
                for parameter, gradient in zip(bucket, gradients, strict=True):
                    # A tensor of its own, at every number of ranks: where a kernel adds up a tensor by parts (the norm
                    # of the gradients), the parts may depend on where it begins in memory.
                    parameter.grad = gradient.clone()
            total = self._combined(own.loss.reshape(1))
        for parameter in self._missing:
            parameter.grad = None
        self._missing.clear()
        return total.reshape(())

    def _put_aside(self, shard: int, complete: _Sum) -> None:
        """Add the complete sum to those that wait for it, as far up as this rank's part of the tree goes."""
        first, stride = shard, SHARDS  # of the shards first, first + stride, ...
        while stride > self._group.size:
            stride //= 2
            if first >= stride:
                first -= stride
                earlier = self._waiting.pop()
                torch._foreach_add_(earlier.gradients, complete.gradients)
                complete = _Sum(earlier.gradients, earlier.loss + complete.loss)
            elif first + stride < self._micro_batches:
                break  # the other half is still to come
        self._waiting.append(complete)

    def _combined(self, flat: Tensor) -> Tensor:
        """The upper levels of the tree, for 1-D sums of which this rank has one where it has any micro-batch."""
        rank, stride = self._group.rank, self._group.size
        while stride > 1:
            partner = rank ^ (stride // 2)
            # The shards of this level that begin at a number have micro-batches where that number is one.
            mine, theirs = (number % stride < self._micro_batches for number in (rank, partner))
            received = torch.empty_like(flat) if theirs else None
            self._group.exchange(partner, give=flat if mine else None, take=received)
            if received is not None:
                flat = flat.add_(received) if mine else received
            stride //= 2
        return flat


def in_buckets(parameters: Iterable[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """In their order, each of one type and device, and of at most `bucket_bytes` or one parameter."""
    alike = groupby(parameters, key=lambda parameter: (parameter.dtype, parameter.device))
    return [bucket for _, group in alike for bucket in consecutive(group, lambda p: p.nbytes, bucket_bytes)]


def held_sums(micro_batches: int) -> int:
    """The most sums of gradients that one process holds at a time, the current one included; each of W processes holds
    log2(W) fewer."""
    return min(micro_batches, SHARDS).bit_length()


def _turn(micro_index: int) -> int:
    """The position of a micro-batch's shard in the first line of the tree: the bits of its number reversed."""
    turn, shard, width = 0, micro_index % SHARDS, SHARDS
    while width > 1:
        turn, shard, width = 2 * turn + shard % 2, shard // 2, width // 2
    return turn
