"""Where the seconds of a run went that were no training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class OffClock:
    """Seconds that training did not take, over all processes of a run; logged, and part of no budget."""

    started: float = field(default_factory=time.perf_counter)
    """time.perf_counter() when this process began."""
    earlier_seconds: float = 0.0
    """What the processes before this one took in all, up to the checkpoint from which this one went on."""
    startup_seconds: float = 0.0
    """From the start of a process to its first step, without compilation."""
    compile_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    """That training stood still for checkpoints. What a save takes in the background is not in it."""

    @property
    def total_seconds(self) -> float:
        """Training included."""
        return self.earlier_seconds + time.perf_counter() - self.started

    def so_far(self) -> dict[str, float]:
        """What summary.json says, and what a resumed run adds to."""
        parts = ("startup_seconds", "compile_seconds", "evaluation_seconds", "checkpoint_seconds")
        return {"total_seconds": self.total_seconds} | {name: getattr(self, name) for name in parts}

    def add_earlier(self, saved: Mapping[str, float]) -> None:
        """Take over what an earlier process counted with `so_far`."""
        for name, seconds in saved.items():
            own = "earlier_seconds" if name == "total_seconds" else name
            setattr(self, own, getattr(self, own) + seconds)
