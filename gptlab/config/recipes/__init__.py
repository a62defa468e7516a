"""Named runs. A recipe is a function of a depth, a horizon and the machine that returns a whole RunConfig.

Depth and horizon are arguments, not fields, because other fields follow from them; every field of the result can
still be overridden by its dotted name. How a depth is read is the recipe's: width, heads and rates follow it
(quickstart, shakespeare-char, autoresearch, nanochat), or it is the number of layers and nothing else (nanogpt,
speedrun, whose sources have no such dial).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gptlab.config.recipes.nanochat import nanochat, nanochat_tiny
from gptlab.config.recipes.quickstart import quickstart, shakespeare_char, why_quickstart_size
from gptlab.config.run import RunConfig

Recipe = Callable[..., RunConfig]

RECIPES: Mapping[str, Recipe] = {
    "quickstart": quickstart,
    "shakespeare-char": shakespeare_char,
    "nanochat": nanochat,
    "nanochat-tiny": nanochat_tiny,
}

__all__ = ["RECIPES", "Recipe", "nanochat", "nanochat_tiny", "quickstart", "shakespeare_char", "why_quickstart_size"]
