"""How long a run trains: an amount with its unit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from gptlab.config.errors import ConfigError, require_choice

HorizonUnit = Literal["steps", "tokens", "flops", "tokens_per_param", "seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """The length of a run. Its progress is 0 at the start and 1 at the end."""

    amount: float = 180.0
    """How many of `unit` to train for."""
    unit: HorizonUnit = "seconds"
    """steps | tokens | flops | tokens_per_param (per matrix and head parameter) | seconds (on the training clock)."""
    until_val_loss: float | None = None
    """Stop at the first evaluation whose validation loss (nats/token) is at or below this. `amount` stays the limit."""

    def __post_init__(self) -> None:
        require_choice("horizon.unit", self.unit, get_args(HorizonUnit))
        if not (self.amount > 0 and math.isfinite(self.amount)):
            raise ConfigError("horizon.amount", self.amount, f"a run trains for a positive number of {self.unit}")
        if self.until_val_loss is not None and not self.until_val_loss > 0:
            raise ConfigError("horizon.until_val_loss", self.until_val_loss, "a loss target is positive")

    def total_steps(self, *, tokens_per_step: int, flops_per_token: float, scaling_params: int) -> int | None:
        """Optimizer steps in the whole run; None when only the clock knows.

        As in nanochat, tokens are rounded down (`target_tokens // total_batch_size`) and FLOPs to the nearest step. A
        horizon shorter than one step is refused.
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
