"""Adds up the gradients of all ranks, in buckets that leave while the backward pass is still at work.

Only the backward pass of a rank's last micro-batch sends anything: as soon as every gradient of a bucket is complete,
its sum begins, and runs beside the rest of the pass. Buckets hold parameters from the last to the first, which is about
the order in which the pass completes them, and leave in that order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.optim.division import MESSAGE_BYTES
from gptlab.runtime.processes.distributed import Group, Pending


@dataclass(slots=True)
class _Bucket:
    parameters: list[Parameter]
    waiting: int = 0
    """Gradients that are not complete yet."""
    missing: tuple[int, ...] = ()
    """Places of parameters that this rank's micro-batches gave no gradient, and should have."""
    flat: Tensor | None = None
    pending: Pending | None = None


class GradientSum:
    """A parameter that stands twice in the model (a tied table) has one gradient and one place here. A rank without a
    micro-batch adds zeros."""

    def __init__(self, parameters: Iterable[Parameter], group: Group, *, bucket_bytes: int = MESSAGE_BYTES) -> None:
        self._group = group
        backwards = reversed([p for p in parameters if p.requires_grad])
        self._buckets = [_Bucket(bucket) for bucket in in_buckets(backwards, bucket_bytes)]
        self._place = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._next = 0
        """Buckets before this one have left."""
        self._armed = False
        # Registered once, before anything is compiled, so that the parameters look alike in every step.
        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(self._complete)

    def order(self, micro_indices: Sequence[int]) -> Sequence[int]:
        """Places of this rank's micro-batches in the order in which they are to be computed: as they come."""
        return range(len(micro_indices))

    def begin(self) -> None:
        """To be called before the backward pass of this rank's last micro-batch."""
        self._armed = True
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)

    def end(self, micro_index: int, loss: Tensor) -> Tensor:
        """To be called behind the backward pass of every micro-batch: it has been added to `.grad`, as its loss to the
        sum `loss` (0-d), which is returned as it is."""
        return loss

    def finish(self, loss: Tensor) -> Tensor:
        """Wait for all sums; afterwards every `.grad` is that of all ranks, with the same bits on each. `loss` (0-d) is
        added up beside them and returned."""
        computed, self._armed = self._armed, False
        while self._next < len(self._buckets):
            self._send(self._buckets[self._next], computed)
        total = loss.clone()
        last = self._group.sum_later(total, "loss")
        for bucket in self._buckets:
            assert bucket.pending is not None
            assert bucket.flat is not None
            bucket.pending.wait()
            places = bucket.flat.split([p.numel() for p in bucket.parameters])
            for number, (parameter, place) in enumerate(zip(bucket.parameters, places, strict=True)):
                parameter.grad = None if number in bucket.missing else place.view_as(parameter)
            bucket.flat = bucket.pending = None
        last.wait()
        self._next = 0
        return total

    def _complete(self, parameter: Parameter) -> None:
        if not self._armed:
            return
        self._place[parameter].waiting -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            self._send(self._buckets[self._next], True)

    @torch.no_grad()
    def _send(self, bucket: _Bucket, computed: bool) -> None:
        gradients = [p.grad for p in bucket.parameters]
        # Where this rank computed, a gradient that is not there is a mistake, which the optimizer names.
        bucket.missing = tuple(i for i, gradient in enumerate(gradients) if gradient is None and computed)
        pieces = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in bucket.parameters]
        bucket.flat = torch.cat(pieces)
        for parameter in bucket.parameters:
            parameter.grad = None  # its copy is on the way: kept no longer than needed
        bucket.pending = self._group.sum_later(bucket.flat, "gradients")
        self._next += 1


def in_buckets(parameters: Iterable[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """In their order, of one type and device each, at most `bucket_bytes` or one parameter."""
    buckets: list[list[Parameter]] = []
    size_bytes = 0
    for parameter in parameters:
        last = buckets[-1][-1] if buckets else None
        alike = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not alike or size_bytes + parameter.nbytes > bucket_bytes:
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(parameter)
        size_bytes += parameter.nbytes
    return buckets
