"""Which of its rules a recipe's learning rates and decay have been through, for a person to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from gptlab.config.recipes.autoresearch import autoresearch, autoresearch_tiny
from gptlab.config.recipes.nanochat import WEIGHT_DECAY, nanochat, nanochat_tiny
from gptlab.config.recipes.own_arguments import recorded_arguments
from gptlab.config.recipes.quickstart import quickstart, quickstart_adamw_scale, shakespeare_char
from gptlab.config.run import RunConfig
from gptlab.config.scaling import (
    REFERENCE_BATCH_TOKENS,
    REFERENCE_DEPTH,
    REFERENCE_WIDTH,
    Machine,
    adamw_lr_scale_for_width,
    lr_scale_for_batch,
)

_SCALED: Mapping[str, Callable[..., RunConfig]] = {
    recipe.__name__.replace("_", "-"): recipe
    for recipe in (quickstart, shakespeare_char, autoresearch, autoresearch_tiny, nanochat, nanochat_tiny)
}
"""The recipes whose rates follow width or batch, by name."""


def applied_scaling(config: RunConfig, machine: Machine | None) -> list[str]:
    """Each rule, its factor, and what it follows. What was set by hand instead has been through none."""
    recipe = _SCALED.get(config.recipe)
    if recipe is None:
        return []
    arguments = recorded_arguments(config, recipe)
    own = recipe(depth=config.model.n_layer, horizon=config.horizon, machine=machine, **arguments)
    if own.model.n_embd != config.model.n_embd:
        return []
    return list(_rules(config, own, arguments.get("weight_decay", WEIGHT_DECAY)))


def _rules(config: RunConfig, own: RunConfig, weight_decay: float) -> Iterator[str]:
    width, tokens = own.model.n_embd, own.batch.total_tokens
    of_batch = f"(batch of {tokens:,} tokens, tuned at {REFERENCE_BATCH_TOKENS:,})"
    if config.optim.embedding == own.optim.embedding:
        yield f"AdamW rates x {adamw_lr_scale_for_width(width):.3g} (width {width}, tuned at {REFERENCE_WIDTH})"
        if own.recipe == "quickstart":
            yield f"AdamW rates x {quickstart_adamw_scale(tokens):.3g} {of_batch}"
    if own.recipe.startswith("nanochat"):
        if config.optim == own.optim and tokens != REFERENCE_BATCH_TOKENS:
            yield f"all rates x {lr_scale_for_batch(tokens):.3g} {of_batch}"
        if config.optim.muon.weight_decay == own.optim.muon.weight_decay:
            yield (
                f"weight decay {weight_decay:g} -> {own.optim.muon.weight_decay:.3g} "
                f"(depth {own.model.n_layer}, tuned at {REFERENCE_DEPTH})"
            )
