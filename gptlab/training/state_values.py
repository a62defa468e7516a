"""The valid values of a checkpoint's state.json: checked before any is used, since the file is untrusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[object], bool]

_MAX_STEPS = 2**40
"""Far above any run, and far below where a row's number, a product with it, leaves 64 bits."""


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_STEPS


def _number(value: object) -> bool:
    """Also false for NaN; integers of JSON may be longer than a float can be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _record(**checks: Check) -> Check:
    """A JSON object with exactly these keys."""
    return lambda value: (
        isinstance(value, dict) and value.keys() == checks.keys() and all(checks[key](value[key]) for key in checks)
    )


def _mark(value: object) -> bool:
    return _record(step=_count)(value) or _record(step=_count, train_seconds=_number)(value)


def _marks(value: object) -> bool:
    return isinstance(value, dict) and all(map(_optional(_mark), value.values()))


_BEST = _optional(_record(step=_count, val_loss=_number))
_CHECKS: Mapping[str, Check] = {
    "step": _count,
    "train_seconds": _number,
    "loss_ema": _record(sum=_number, count=_count),
    "faults": _record(
        skipped=_count, skipped_in_a_row=_count, rewinds=_count, good_step=_optional(_count), losses=_numbers
    ),
    "loader": _record(next_step=_count),
    "marks": _marks,
    "val_loss": _optional(_number),
    "val_bpb": _optional(_number),
    "core_metric": _optional(_number),
    "best": _BEST,
    "best_saved": _BEST,
}


def require_values(saved: Mapping[str, Any]) -> None:
    """ValueError that names the first invalid value. A missing one raises KeyError where it is read."""
    for name, check in _CHECKS.items():
        if name in saved and not check(saved[name]):
            raise ValueError(f"{name} = {str(saved[name])[:100]}")
