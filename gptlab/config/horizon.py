"""How long a run trains: an amount with its unit, never a -1 that means "some other flag decides"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from gptlab.config.errors import ConfigError, require_choice, require_positive

HorizonUnit = Literal["steps", "tokens", "flops", "tokens_per_param", "seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """The end of a run, and the denominator of its progress (0 at the start, 1 at the end)."""

    amount: float = 180.0
    """How much of `unit` to train for."""
    unit: HorizonUnit = "seconds"
    """steps | tokens | flops | tokens_per_param (per matrix and head parameter) | seconds (on the training clock)."""
    until_val_loss: float | None = None
    """Stop at the first evaluation with a validation loss (nats/token) at or below this; `amount` stays the cap."""

    def __post_init__(self) -> None:
        require_choice("horizon.unit", self.unit, get_args(HorizonUnit))
        if not (self.amount > 0 and math.isfinite(self.amount)):
            raise ConfigError("horizon.amount", self.amount, f"a run trains for a positive number of {self.unit}")
        if self.until_val_loss is not None and not self.until_val_loss > 0:
            raise ConfigError("horizon.until_val_loss", self.until_val_loss, "a loss target is positive")

    def total_steps(self, *, tokens_per_step: int, flops_per_token: float, scaling_params: int) -> int | None:
        """Optimizer steps in the whole run; None when only the clock knows.

        As in nanochat, token-like units round down (`target_tokens // total_batch_size`) and FLOPs round to nearest; a
        horizon shorter than one step is refused rather than rounded to nothing.
        """
        if self.unit == "seconds":
            return None
        if self.unit == "steps":
            steps = int(self.amount)
        elif self.unit == "tokens":
            steps = int(self.amount) // tokens_per_step
        elif self.unit == "flops":
            steps = round(self.amount / (flops_per_token * tokens_per_step))
        else:
            steps = int(self.amount * scaling_params) // tokens_per_step
        if steps < 1:
            raise ConfigError(
                "horizon.amount",
                self.amount,
                f"this many {self.unit} are less than one step of {tokens_per_step:,} tokens",
            )
        return steps

    def __str__(self) -> str:
        text = f"{self.amount:g} {self.unit.replace('_', ' ')}"
        return text if self.until_val_loss is None else f"validation loss {self.until_val_loss:g}, at most {text}"


def chosen_horizon(horizon: Horizon | None, minutes: float | None, default: Horizon) -> Horizon:
    """What a recipe's caller asks for: minutes of the training clock before a horizon, and that before the recipe's."""
    if minutes is not None:
        require_positive("minutes", minutes)
        return Horizon(amount=60.0 * minutes, unit="seconds")
    return horizon or default


def share_of_run(steps: int, horizon: Horizon, of_steps: int) -> float:
    """The share of a run that `steps` steps are, where the source counts a phase in steps of a run of `of_steps`.

    Another number of steps leaves the phase as many steps long, as the source's flags do. A horizon in another unit, or
    too short for the phase, leaves it the same share of the run.
    """
    total = int(horizon.amount) if horizon.unit == "steps" else 0
    return steps / (total if total >= steps else of_steps)
