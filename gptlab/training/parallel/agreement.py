"""What all ranks agree on, since they decide by it: the time of a step, a signal to stop, equal weights.

Every rank then evaluates, saves, stops and lowers its learning rate at the same step, without a coordinator.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.format import DamagedCheckpointError, candidates, step_of
from gptlab.training.checkpoint.load import Checkpoint, OnDamage, load_checkpoint
from gptlab.training.checkpoint.saver import CheckpointSaver
from gptlab.training.faults import TrainingFailed
from gptlab.training.signals import Preemption

# The odd constant of MurmurHash2 (Austin Appleby, public domain): what is multiplied by it keeps its place.
_MIX = 0x5BD1E995
_MASK = 2**62 - 1
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class Agreement:
    """One small all-reduce per step. One process alone needs none, and a signal counts at once."""

    def __init__(self, group: Group, preemption: Preemption, step: int, saves: CheckpointSaver) -> None:
        """`step`: the number of steps done."""
        group.at_step(step + 1)
        self._group = group
        self._preemption = preemption
        self._saves = saves
        self._agreed: str | None = None
        self.listen()

    @property
    def stop(self) -> bool:
        """Whether any rank received a signal to stop."""
        return self.signal_name is not None

    @property
    def signal_name(self) -> str | None:
        """As "SIGTERM", with the rank that received it where there are several; None before one came."""
        return self._preemption.signal_name if self._group.size == 1 else self._agreed

    def listen(self) -> None:
        """Exchange signals and the progress of saves, at a place that all ranks reach."""
        self._exchange(0.0)

    def step(self, step_seconds: float, step: int) -> float:
        """The seconds that the step took by rank 0's clock; listens too. `step` is the number of steps done."""
        seconds = self._exchange(step_seconds)
        self._group.at_step(step + 1)
        return seconds

    def _exchange(self, step_seconds: float) -> float:
        if self._group.size == 1:
            return step_seconds
        # The seconds of rank 0, the signal and the save of each rank: sums with zeros are exact.
        size = self._group.size
        message = torch.zeros(1 + 2 * size, dtype=torch.float64)
        if self._group.is_main:
            message[0] = step_seconds
        if self._preemption.signal_name is not None:
            message[1 + self._group.rank] = signal.Signals[self._preemption.signal_name].value
        message[1 + size + self._group.rank] = self._saves.status()
        seconds, *told = self._group.sum(message, "end of step").tolist()
        signals, saves = told[:size], told[size:]
        self._saves.receive([int(status) for status in saves])
        if self._agreed is None:
            came = ((rank, int(number)) for rank, number in enumerate(signals) if number)
            self._agreed = next((f"{signal.Signals(number).name} (rank {rank})" for rank, number in came), None)
        return float(seconds)


def require_equal_weights(tensors: Iterable[Tensor], group: Group, step: int) -> None:
    """TrainingFailed where a rank's bits differ from rank 0's: a machine that computes differently, or a bug. One pass
    over the weights."""
    if group.size == 1:
        return
    different = group.all_agree(checksum(tensors), "checksum")
    if different:
        raise TrainingFailed(f"after step {step}, rank {different[0]}'s weights differ from rank 0's", step=step)


def same_checkpoint(folder: Path, group: Group, warn: OnDamage, *, up_to: int | None = None) -> Checkpoint:
    """The newest checkpoint in `folder`, up to step `up_to`, that every rank reads whole and with rank 0's weights. All
    ranks fall back together from one that is damaged or unreadable for any of them.

    `warn` is called for each that is passed over. UserError, on all ranks alike, where none is left.
    """
    present = [path.name for path in reversed(candidates(folder)) if up_to is None or (step_of(path) or 0) <= up_to]
    wrong = []
    for name in group.broadcast("checkpoints", present):
        checkpoint = None
        said = {"weights": 0, "error": "", "reason": ""}
        try:
            checkpoint = load_checkpoint(folder / name)
            said["weights"] = checksum(checkpoint.model.values()) if group.size > 1 else 0
        except DamagedCheckpointError as error:
            said |= {"error": str(error), "reason": error.reason}
        read = group.gather("checkpoint", said)
        for one in read:
            if not one["error"] and not read[0]["error"] and one["weights"] != read[0]["weights"]:
                one["reason"] = "holds other weights than for rank 0"
                one["error"] = f"checkpoint {folder / name} {one['reason']}"
        if checkpoint is not None and not any(one["error"] for one in read):
            return checkpoint
        errors = {rank: one["error"] for rank, one in enumerate(read) if one["error"]}
        if len(errors) == group.size and len(set(errors.values())) == 1:
            warn(errors[0])
        else:
            for rank, text in errors.items():
                warn(f"rank {rank}: {text}")
        wrong.append(f"{name}: {next(one['reason'] for one in read if one['error'])}")
    if not wrong:
        raise UserError(f"no checkpoint in {folder}: none has been saved there")
    raise UserError(f"no intact checkpoint in {folder}: {'; '.join(wrong)}")


def checksum(tensors: Iterable[Tensor]) -> int:
    """0 <= checksum < 2^62 over the bits of tensors, in their order. Each contributes the sum of its words, which
    detects different rounding, the purpose here, but not moved elements."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        words = flat.view(_WORDS.get(flat.element_size(), torch.uint8))
        total = (total * _MIX + int(words.sum(dtype=torch.int64))) & _MASK
    return total
