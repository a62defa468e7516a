"""Named runs. A recipe is a function of a depth and a horizon that returns a whole RunConfig.

Depth and horizon are arguments, not fields, because other fields follow from them; every field of the result can still
be overridden by its dotted name. What a depth means is the recipe's: width, heads and learning rates follow it
(quickstart, shakespeare-char, autoresearch, nanochat), or it is the number of layers and nothing else (nanogpt,
speedrun, whose sources have no such dial). quickstart also takes the machine that it sizes itself to, and nanochat
takes arguments of its own.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, get_type_hints

from gptlab.config.errors import ConfigError, UserError
from gptlab.config.fields import each_field_alone
from gptlab.config.length import Horizon
from gptlab.config.load import apply_overrides, checked_value
from gptlab.config.recipes.autoresearch import autoresearch, autoresearch_tiny
from gptlab.config.recipes.nanochat import FULL, NanochatArguments, nanochat, nanochat_tiny
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
from gptlab.config.recipes.quickstart import quickstart, quickstart_adamw_scale
from gptlab.config.recipes.shakespeare import shakespeare_char
from gptlab.config.recipes.speedrun import speedrun_muon_2024_10, speedrun_muon_2024_10_tiny
from gptlab.config.run import RunConfig
from gptlab.config.scaling import (
    REFERENCE_BATCH_TOKENS,
    REFERENCE_DEPTH,
    REFERENCE_WIDTH,
    Machine,
    adamw_lr_scale_for_width,
    lr_scale_for_batch,
)

RECIPES: Mapping[str, Callable[..., RunConfig]] = {
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


def configure(
    recipe: str, *, depth: int | None = None, horizon: Horizon | None = None, machine: Machine | None = None,
    own: Mapping[str, Any] | None = None,
) -> RunConfig:  # fmt: skip
    """The configuration that the recipe of this name makes; it is passed what its signature asks for.

    None leaves the recipe's default. `own` has arguments of its own that were given. A depth is refused where trained
    weights decide it. Each field is checked alone, since others of the request may replace what it does not fit;
    `load.apply_overrides` checks the whole.
    """
    call = RECIPES[recipe]
    takes = inspect.signature(call).parameters
    if depth is not None and "depth" not in takes:
        raise ConfigError("depth", depth, "the weights that a run begins with decide it: leave it out")
    given = {"depth": depth, "horizon": horizon, "machine": machine}
    if own:
        given["own"] = replace(takes["own"].default, **own)
    with each_field_alone():
        return call(**{name: value for name, value in given.items() if value is not None and name in takes})


def own_arguments(recipe: str) -> Mapping[str, Any]:
    """{name: default} of the arguments that only this recipe takes."""
    own = inspect.signature(RECIPES[recipe]).parameters.get("own") if recipe in RECIPES else None
    return {} if own is None else asdict(own.default)


def recorded_arguments(config: RunConfig) -> dict[str, Any]:
    """The arguments of its recipe's own that `config` notes, checked. UserError where they are none of the recipe's."""
    types = {name: OWN_TYPES[name] for name in own_arguments(config.recipe)}
    found = {}
    for text in config.recipe_arguments:
        name, _, value = text.partition("=")
        try:
            found[name] = checked_value(types[name], json.loads(value), name)
        except (KeyError, ValueError):
            raise UserError(f"recipe_arguments: {text!r} is not an argument of {config.recipe}") from None
    return found


def with_changes(config: RunConfig, asked: Mapping[str, Any]) -> RunConfig:
    """`config` with other values, {dotted field: value}. With another length, what it has of its recipe's schedule
    becomes what the recipe has for that length: some count a phase in steps."""
    found = apply_overrides(config, asked)
    if found.horizon == config.horizon or config.recipe not in RECIPES:
        return found
    lengths = (replace(run.horizon, until_val_loss=None) for run in (config, found))
    before, after = (asdict(configure(config.recipe, horizon=length).schedule) for length in lengths)
    own = asdict(config.schedule)
    follow = {n: after[n] for n, value in before.items() if own[n] == value and f"schedule.{n}" not in asked}
    return replace(found, schedule=replace(found.schedule, **follow))


OWN_TYPES: dict[str, Any] = get_type_hints(NanochatArguments)
"""{name: type} of the arguments that any recipe has of its own."""

_SCALED = ("quickstart", "shakespeare-char", "autoresearch", "autoresearch-tiny", "nanochat", "nanochat-tiny")
"""The recipes whose learning rates follow width or batch."""


def applied_scaling(config: RunConfig, machine: Machine | None) -> list[str]:
    """Each rule, its factor, and what it follows. Values that were set by hand instead are not listed."""
    if config.recipe not in _SCALED:
        return []
    given = recorded_arguments(config) if config.recipe_arguments else {}
    own = configure(config.recipe, depth=config.model.n_layer, horizon=config.horizon, machine=machine, own=given)
    if own.model.n_embd != config.model.n_embd:
        return []
    rules, width, tokens = list[str](), own.model.n_embd, own.batch.total_tokens
    if config.optim.embedding == own.optim.embedding:
        rules.append(f"AdamW rates x {adamw_lr_scale_for_width(width):.3g} (width {width}, tuned at {REFERENCE_WIDTH})")
        if own.recipe == "quickstart":
            rules.append(f"AdamW rates x {quickstart_adamw_scale(tokens):.3g} {_of_batch(tokens)}")
    return rules + (_scaling_of_nanochat(config, own, given) if own.recipe.startswith("nanochat") else [])


def _scaling_of_nanochat(config: RunConfig, own: RunConfig, given: Mapping[str, Any]) -> list[str]:
    rules, tokens = list[str](), own.batch.total_tokens
    if config.optim == own.optim and tokens != REFERENCE_BATCH_TOKENS:
        rules.append(f"all rates x {lr_scale_for_batch(tokens):.3g} {_of_batch(tokens)}")
    if (decay := config.optim.muon.weight_decay) == own.optim.muon.weight_decay:
        unscaled = given.get("weight_decay", FULL.weight_decay)
        depth = f"(depth {own.model.n_layer}, tuned at {REFERENCE_DEPTH})"
        rules.append(f"weight decay {unscaled:g} -> {decay:.3g} {depth}")
    return rules


def _of_batch(tokens: int) -> str:
    return f"(the recipe's batch of {tokens:,} tokens, tuned at {REFERENCE_BATCH_TOKENS:,})"
