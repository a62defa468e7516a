"""Named runs. A recipe is a function of a depth, a horizon and the machine that returns a whole RunConfig.

Depth and horizon are arguments, not fields, because other fields follow from them; every field of the result can
still be overridden by its dotted name. How a depth is read is the recipe's: width, heads and rates follow it
(quickstart, shakespeare-char, autoresearch, nanochat), or it is the number of layers and nothing else (nanogpt,
speedrun, whose sources have no such dial).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gptlab.config.recipes.autoresearch import autoresearch, autoresearch_tiny
from gptlab.config.recipes.nanochat import nanochat, nanochat_tiny
from gptlab.config.recipes.nanogpt import (
    nanogpt_finetune,
    nanogpt_finetune_tiny,
    nanogpt_gpt2_124m,
    nanogpt_gpt2_124m_tiny,
    nanogpt_shakespeare_char,
    nanogpt_shakespeare_char_cpu,
    nanogpt_shakespeare_char_cpu_tiny,
    nanogpt_shakespeare_char_tiny,
)
from gptlab.config.recipes.quickstart import quickstart, shakespeare_char, why_quickstart_size
from gptlab.config.recipes.speedrun import speedrun_muon_2024_10, speedrun_muon_2024_10_tiny
from gptlab.config.run import RunConfig

Recipe = Callable[..., RunConfig]

RECIPES: Mapping[str, Recipe] = {
    "quickstart": quickstart,
    "shakespeare-char": shakespeare_char,
    "nanogpt/shakespeare-char": nanogpt_shakespeare_char,
    "nanogpt/shakespeare-char-tiny": nanogpt_shakespeare_char_tiny,
    "nanogpt/shakespeare-char-cpu": nanogpt_shakespeare_char_cpu,
    "nanogpt/shakespeare-char-cpu-tiny": nanogpt_shakespeare_char_cpu_tiny,
    "nanogpt/gpt2-124m": nanogpt_gpt2_124m,
    "nanogpt/gpt2-124m-tiny": nanogpt_gpt2_124m_tiny,
    "nanogpt/finetune": nanogpt_finetune,
    "nanogpt/finetune-tiny": nanogpt_finetune_tiny,
    "speedrun/muon-2024-10": speedrun_muon_2024_10,
    "speedrun/muon-2024-10-tiny": speedrun_muon_2024_10_tiny,
    "autoresearch": autoresearch,
    "autoresearch-tiny": autoresearch_tiny,
    "nanochat": nanochat,
    "nanochat-tiny": nanochat_tiny,
}

__all__ = [
    "RECIPES",
    "Recipe",
    "autoresearch",
    "autoresearch_tiny",
    "nanochat",
    "nanochat_tiny",
    "nanogpt_finetune",
    "nanogpt_finetune_tiny",
    "nanogpt_gpt2_124m",
    "nanogpt_gpt2_124m_tiny",
    "nanogpt_shakespeare_char",
    "nanogpt_shakespeare_char_cpu",
    "nanogpt_shakespeare_char_cpu_tiny",
    "nanogpt_shakespeare_char_tiny",
    "quickstart",
    "shakespeare_char",
    "speedrun_muon_2024_10",
    "speedrun_muon_2024_10_tiny",
    "why_quickstart_size",
]
