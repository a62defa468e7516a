"""The scaling rules that a recipe applied to its learning rates and weight decay, for a person to read."""

from __future__ import annotations

from collections.abc import Iterator

from gptlab.config.recipes import configure, recorded_arguments
from gptlab.config.recipes.nanochat import FULL
from gptlab.config.recipes.quickstart import quickstart_adamw_scale
from gptlab.config.run import RunConfig
from gptlab.config.scaling import (
    REFERENCE_BATCH_TOKENS,
    REFERENCE_DEPTH,
    REFERENCE_WIDTH,
    Machine,
    adamw_lr_scale_for_width,
    lr_scale_for_batch,
)

_SCALED = ("quickstart", "shakespeare-char", "autoresearch", "autoresearch-tiny", "nanochat", "nanochat-tiny")
"""The recipes whose learning rates follow width or batch."""


def applied_scaling(config: RunConfig, machine: Machine | None) -> list[str]:
    """Each rule, its factor, and what it follows. Values that were set by hand instead are not listed."""
    if config.recipe not in _SCALED:
        return []
    given = recorded_arguments(config)
    own = configure(config.recipe, depth=config.model.n_layer, horizon=config.horizon, machine=machine, own=given)
    if own.model.n_embd != config.model.n_embd:
        return []
    return list(_rules(config, own, given.get("weight_decay", FULL.weight_decay)))


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
