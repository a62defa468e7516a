"""The closing block: the final numbers of a run, in autoresearch's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptlab.runtime.records.console import Console

# What is shown, in this order, and with how many decimals.
_CLOSING_DECIMALS = {
    "val_bpb": 6, "training_seconds": 1, "total_seconds": 1, "peak_vram_mb": 1, "mfu_percent": 2, "total_tokens_M": 1,
    "num_steps": 0, "num_params_M": 1, "depth": 0,
}  # fmt: skip
# Shown behind those by runs that measured it.
_OPTIONAL_DECIMALS = {"core_metric": 4}


def closing_numbers(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a summary.json that the closing block shows; empty unless they are all there, and are numbers or None
    (unknown)."""
    if not summary.keys() >= _CLOSING_DECIMALS.keys():
        return {}
    numbers = {key: summary[key] for key in (*_CLOSING_DECIMALS, *_OPTIONAL_DECIMALS) if key in summary}
    # Integers of JSON may be longer than a float can be.
    known = (value for value in numbers.values() if value is not None)
    return numbers if all(type(value) in (int, float) and abs(value) < 2**63 for value in known) else {}


def show_closing_block(numbers: Mapping[str, Any], console: Console) -> None:
    """Print and log the final numbers in autoresearch's form, so that `grep "^val_bpb:"` works."""
    console.result("---")
    decimals_of = _CLOSING_DECIMALS | _OPTIONAL_DECIMALS
    for key, value in numbers.items():
        decimals = decimals_of[key]
        console.result(f"{key + ':':<18}{'unknown' if value is None else f'{value:.{decimals}f}'}")
