"""The length of a run as it is asked for: by a short form, by the fields of its horizon, or by nanochat's ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptlab.config.errors import ConfigError, UserError
from gptlab.config.run import HorizonUnit

HORIZONS: Mapping[str, tuple[HorizonUnit, float]] = {
    "minutes": ("seconds", 60.0),
    "steps": ("steps", 1.0),
    "tokens": ("tokens", 1.0),
    "flops": ("flops", 1.0),
    "tokens_per_param": ("tokens_per_param", 1.0),
}
"""Short form -> (unit of the horizon, that unit's amount in one)."""

RATIO = "target_param_data_ratio"
LENGTH_FIELDS = frozenset(("horizon.amount", "horizon.unit"))


def with_length_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values with a length's fields in place of its short form; None leaves one out. UserError for two lengths."""
    named = lengths_of(given)
    if len(named) > 1 and not LENGTH_FIELDS.issuperset(named):
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in named[:2])
        raise UserError(f"{flags} both say how long to train: give one of them")
    values = {name: value for name, value in given.items() if name not in HORIZONS}
    if named and named[0] in HORIZONS:
        amount, (unit, factor) = given[named[0]], HORIZONS[named[0]]
        if amount <= 0:
            raise ConfigError(named[0], amount, f"a run trains for a positive number of {named[0].replace('_', ' ')}")
        values |= {"horizon.amount": amount * factor, "horizon.unit": unit}
    return values


def replaced_lengths(given: Mapping[str, Any]) -> set[str]:
    """What of a file's length (`with_length_fields`) one that is given beside it replaces. An amount keeps the file's
    unit, and a unit its amount."""
    named = lengths_of(given)
    by_field = {RATIO} if named else set()
    return by_field if LENGTH_FIELDS.issuperset(named) else by_field | LENGTH_FIELDS


def lengths_of(given: Mapping[str, Any]) -> list[str]:
    """The arguments among `given` that say how long to train."""
    return [name for name in (RATIO, *HORIZONS, *sorted(LENGTH_FIELDS)) if given.get(name) is not None]
