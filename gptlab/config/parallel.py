"""How several processes share the work of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gptlab.config.errors import require, require_choice

ParallelMode = Literal["data", "sharded"]

EXACT_WORLD_SIZES = (1, 2, 4, 8)
"""Numbers of processes that `exact_any_world_size` is there for: those that halve down to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    mode: ParallelMode = "data"
    """data: every process holds all weights | sharded: each holds its share of them, and gathers the rest layer by
    layer. One process holds everything either way."""
    exact_any_world_size: bool = False
    """Add gradients in one order that does not depend on the number of processes (1, 2, 4 or 8), so that weights and
    losses are the same bits whatever it is, also where it changes in mid-run. Costs time and memory."""

    def __post_init__(self) -> None:
        require_choice("parallel.mode", self.mode, get_args(ParallelMode))
        require(
            not (self.exact_any_world_size and self.mode == "sharded"),
            "parallel.exact_any_world_size",
            self.exact_any_world_size,
            'parallel.mode = "sharded" adds gradients in an order that depends on the number of processes: take "data"',
            False,
        )
