"""What several ranks agree on, since they decide by it: the time of a step, a signal to stop, equal weights.

Every rank then evaluates, saves, stops and lowers its learning rate at the same step, without a coordinator.
"""

from __future__ import annotations

import signal

import torch

from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.background import ConcurrentSaver
from gptlab.training.checkpoint.load import checksum
from gptlab.training.checkpoint.saver import CheckpointSaver
from gptlab.training.faults import TrainingFailed
from gptlab.training.parallel.strategy import Strategy
from gptlab.training.signals import Signals


class Agreement:
    """What the loop asks of `Signals`, for several processes: one small all-reduce per step, after which all know of a
    signal to any."""

    def __init__(self, signals: Signals, group: Group, saves: CheckpointSaver) -> None:
        assert isinstance(saves, ConcurrentSaver)
        self._signals = signals
        self._group = group
        self._saves = saves
        self.signal_name: str | None = None
        """As "SIGTERM (rank 1)": with the rank that received it."""

    @property
    def requested(self) -> bool:
        """Whether any rank received a signal to stop."""
        return self.signal_name is not None

    def listen(self) -> None:
        """Exchange signals and the progress of saves, at a place that all ranks reach."""
        self._exchange(0.0)

    def step(self, step_seconds: float, step: int) -> float:
        """As `Signals.step`: the seconds of rank 0."""
        seconds = self._exchange(self._signals.step(step_seconds, step))
        self._group.at_step(step + 1)
        return seconds

    def _exchange(self, step_seconds: float) -> float:
        """The seconds of rank 0, the signal and the save of each rank: sums with zeros are exact."""
        rank, size = self._group.rank, self._group.size
        message = torch.zeros(1 + 2 * size, dtype=torch.float64)
        if self._group.is_main:
            message[0] = step_seconds
        if self._signals.signal_name is not None:
            message[1 + rank] = signal.Signals[self._signals.signal_name].value
        message[1 + size + rank] = self._saves.status()
        seconds, *reported = self._group.sum(message, "end of step").tolist()
        signals, saves = reported[:size], reported[size:]
        self._saves.receive([int(status) for status in saves])
        if self.signal_name is None:
            came = ((of, int(number)) for of, number in enumerate(signals) if number)
            self.signal_name = next((f"{signal.Signals(number).name} (rank {of})" for of, number in came), None)
        return float(seconds)


def require_equal_weights(strategy: Strategy, step: int) -> None:
    """TrainingFailed where a rank's bits differ from those of another rank that should have them: a machine that
    computes differently, or a bug. One pass over the weights."""
    for every, tensors in strategy.equal_weights():
        different = strategy.group.all_agree(checksum(tensors), "checksum", every=every)
        if different:
            rank = different[0]
            what = f"rank {rank}'s weights differ from rank {rank % every}'s"
            raise TrainingFailed(f"after step {step}, {what}", step=step)
