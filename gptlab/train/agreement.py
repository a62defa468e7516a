"""What all ranks must know alike, since they decide by it: how long a step took, whether to stop, what the weights are.

Every rank then evaluates, saves, stops and slows down its learning rate at the same step, without being told to.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from gptlab.runtime.distributed import Group
from gptlab.train.checkpoint import Checkpoint, load_checkpoint
from gptlab.train.watchdog import Preemption, TrainingFailed

# The odd constant of MurmurHash2 (Austin Appleby, public domain): what is multiplied by it keeps its place.
_MIX = 0x5BD1E995
_MASK = 2**62 - 1


class Agreement:
    """One small message a step. With one process there is none, and a signal counts at once."""

    def __init__(self, group: Group, preemption: Preemption, step: int) -> None:
        """`step`: of the steps done."""
        group.at_step(step + 1)
        self._group = group
        self._preemption = preemption
        self._agreed: str | None = None
        self.listen()

    @property
    def stop(self) -> bool:
        """Whether a signal asked any rank to stop."""
        return self.signal_name is not None

    @property
    def signal_name(self) -> str | None:
        """As "SIGTERM", with the rank that got it where there are several; None before one came."""
        return self._preemption.signal_name if self._group.size == 1 else self._agreed

    def listen(self) -> None:
        """Hear of signals to any rank, at a place that all ranks come to."""
        self._exchange(0.0)

    def step(self, step_seconds: float, step: int) -> float:
        """What rank 0's clock says this step took; hears of signals too. `step` is the number of steps done."""
        seconds = self._exchange(step_seconds)
        self._group.at_step(step + 1)
        return seconds

    def _exchange(self, step_seconds: float) -> float:
        if self._group.size == 1:
            return step_seconds
        # The seconds of rank 0 and the signal of each rank: sums with zeros are exact.
        message = torch.zeros(1 + self._group.size, dtype=torch.float64)
        if self._group.is_main:
            message[0] = step_seconds
        if self._preemption.signal_name is not None:
            message[1 + self._group.rank] = signal.Signals[self._preemption.signal_name].value
        seconds, *signals = self._group.sum(message, "end of step").tolist()
        if self._agreed is None:
            came = ((rank, int(number)) for rank, number in enumerate(signals) if number)
            self._agreed = next((f"{signal.Signals(number).name} (rank {rank})" for rank, number in came), None)
        return float(seconds)


def require_equal_weights(tensors: Iterable[Tensor], group: Group, step: int) -> None:
    """TrainingFailed where a rank does not hold the bits that rank 0 holds: a machine that computes otherwise, or a
    mistake. One pass over the weights."""
    if group.size == 1:
        return
    different = group.all_agree(checksum(tensors), "checksum")
    if different:
        raise TrainingFailed(f"behind step {step}, rank {different[0]} holds other weights than rank 0")


def same_checkpoint(choose: Callable[[], Checkpoint | None], folder: Path, group: Group) -> Checkpoint | None:
    """What rank 0 chooses among the checkpoints in `folder`, read and verified by every rank; None where it finds none.
    DamagedCheckpointError on a rank that reads it otherwise."""
    if not group.is_main:
        name = group.broadcast("checkpoint")
        return None if name is None else load_checkpoint(folder / name)
    checkpoint = choose()
    group.broadcast("checkpoint", None if checkpoint is None else checkpoint.path.name)
    return checkpoint


def checksum(tensors: Iterable[Tensor]) -> int:
    """0 <= checksum < 2^62 over the bits of float32 or float64 tensors, in their order. Of one tensor the sum of its
    words: that differs for what rounds otherwise, which is what is looked for, though not for what is only moved."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        words = flat.view(torch.int64 if flat.dtype == torch.float64 else torch.int32)
        total = (total * _MIX + int(words.sum(dtype=torch.int64))) & _MASK
    return total
