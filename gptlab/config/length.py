"""The length of a run: `Horizon`, and the three ways to give one: a short form, its fields, nanochat's ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from gptlab.config.errors import ConfigError, UserError
from gptlab.config.fields import Positive, checked_dataclass, flag_of, require

HorizonUnit = Literal["steps", "tokens", "flops", "tokens_per_param", "seconds"]


@checked_dataclass("horizon.")
class Horizon:
    """The length of a run. Its progress is 0 at the start and 1 at the end."""

    amount: float = 180.0
    """How many of `unit` to train for."""
    unit: HorizonUnit = "seconds"
    """steps | tokens | flops | tokens_per_param (per matrix and head parameter) | seconds (on the training clock)."""
    until_val_loss: Positive[float] | None = None
    """Stop at the first evaluation whose validation loss (nats/token) is at or below this. `amount` stays the limit."""

    def __post_init__(self) -> None:
        possible = self.amount > 0 and math.isfinite(self.amount)
        require(possible, "horizon.amount", self.amount, f"a run trains for a positive number of {self.unit}")

    def total_steps(self, *, tokens_per_step: int, flops_per_token: float, scaling_params: int) -> int | None:
        """Optimizer steps in the whole run; None when only the clock knows.

        As in nanochat, tokens are rounded down (`target_tokens // total_batch_size`) and FLOPs to the nearest step.
        FLOPs per token are up to 0.02% above nanochat's (`FlopsPerToken`): steps may be fewer. Less than 1 is refused.
        """
        if self.unit == "seconds":
            return None
        steps = {
            "steps": int(self.amount),
            "tokens": int(self.amount) // tokens_per_step,
            "flops": round(self.amount / (flops_per_token * tokens_per_step)),
            "tokens_per_param": int(self.amount * scaling_params) // tokens_per_step,
        }[self.unit]
        if steps < 1:
            raise ConfigError(self.unit, self.amount, f"less than one step of {tokens_per_step:,} tokens")
        return steps

    def __str__(self) -> str:
        text = f"{self.amount:,.10g} {self.unit.replace('_', ' ')}"
        return text if self.until_val_loss is None else f"validation loss {self.until_val_loss:.10g}, at most {text}"


def steps(number: int) -> Horizon:
    return Horizon(amount=number, unit="steps")


def minutes(amount: float) -> Horizon:
    return Horizon(amount=60.0 * amount, unit="seconds")


def share_of_run(phase_steps: int, horizon: Horizon, of_steps: int) -> float:
    """The share of a run that a phase of `phase_steps` steps takes; its source counts it in a run of `of_steps` steps.

    With a horizon in steps the phase keeps its number of steps, as with the source's flags. With a horizon in another
    unit, or one shorter than the phase, it keeps its share of the run.
    """
    total = int(horizon.amount) if horizon.unit == "steps" else 0
    return phase_steps / (total if total >= phase_steps else of_steps)


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
        flags = " and ".join(map(flag_of, named[:2]))
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
