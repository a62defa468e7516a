"""The final numbers of a run: the closing block in autoresearch's form, and where the seconds off the clock went."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gptlab.runtime.records.console import Console

# What is shown, in this order, and with how many decimals.
_CLOSING_DECIMALS = {
    "val_bpb": 6, "training_seconds": 1, "total_seconds": 1, "peak_vram_mb": 1, "mfu_percent": 2, "total_tokens_M": 1,
    "num_steps": 0, "num_params_M": 1, "depth": 0,
}  # fmt: skip
# Shown after those by runs that measured it.
_OPTIONAL_DECIMALS = {"core_metric": 4}


def closing_numbers(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a summary.json that the closing block shows; empty unless all are there, as numbers or None
    (unknown)."""
    if not summary.keys() >= _CLOSING_DECIMALS.keys():
        return {}
    numbers = {key: summary[key] for key in (*_CLOSING_DECIMALS, *_OPTIONAL_DECIMALS) if key in summary}
    # Integers of JSON may be longer than a float can be.
    known = (value for value in numbers.values() if value is not None)
    return numbers if all(type(value) in (int, float) and abs(value) < 2**63 for value in known) else {}


def show_closing_block(numbers: Mapping[str, Any], console: Console) -> None:
    """Print and log the final numbers, so that `grep "^val_bpb:"` works."""
    console.result("---")
    decimals_of = _CLOSING_DECIMALS | _OPTIONAL_DECIMALS
    for key, value in numbers.items():
        decimals = decimals_of[key]
        console.result(f"{key + ':':<18}{'unknown' if value is None else f'{value:.{decimals}f}'}")


@dataclass(slots=True)
class OffClock:
    """Seconds that were not training, over all processes of a run; logged, and part of no budget."""

    started: float = field(default_factory=time.perf_counter)
    """time.perf_counter() when this process began."""
    earlier_seconds: float = 0.0
    """All seconds of earlier processes, up to the checkpoint that this one resumed from."""
    startup_seconds: float = 0.0
    """From the start of a process to its first step, without compilation."""
    compile_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    """While training waited for checkpoints. What a save takes in the background is not in it."""

    @property
    def total_seconds(self) -> float:
        """Including training."""
        return self.earlier_seconds + time.perf_counter() - self.started

    def so_far(self) -> dict[str, float]:
        """For summary.json, and for a resumed run to add to."""
        parts = ("startup_seconds", "compile_seconds", "evaluation_seconds", "checkpoint_seconds")
        return {"total_seconds": self.total_seconds} | {name: getattr(self, name) for name in parts}

    def add_earlier(self, saved: Mapping[str, float]) -> None:
        """Add what an earlier process counted with `so_far`."""
        for name, seconds in saved.items():
            own = "earlier_seconds" if name == "total_seconds" else name
            setattr(self, own, getattr(self, own) + seconds)
