"""Characters of tiny Shakespeare, by the quickstart's parts, sized to the machine as it is."""

from __future__ import annotations

import math
from typing import Any

from gptlab.config.length import Horizon, minutes
from gptlab.config.model import ModelConfig
from gptlab.config.recipes.quickstart import (
    flops_per_second_of,
    shape_for_horizon,
    step_tokens,
    tokens_within,
    validates_by_steps,
)
from gptlab.config.run import BatchConfig, DataConfig, EvalConfig, RunConfig, SampleConfig, TokenizerConfig
from gptlab.config.scaling import Machine, muon_and_adamw, shape_for_depth

# In 10 s of two cores it gives two layers of width 64, in 60 and 180 s four of 128, in 60 s of float32 three. Where
# these see 1.7 to 1.9 tokens a parameter they end at 1.42 and 1.53 nats, the two layers at 1.61 and 1.64 (Zen 4;
# docs/LOG.md, 2026-11-28).
TOKENS_PER_PARAM = 1.5
STEP_TOKENS_PER_ROOT = 1.25
# Where there is time for so many steps of whole rows, layers of width 128 take them: after 748 steps four end at 1.42
# and 1.44 nats, after 1,200 to 1,300 steps of rows half as long at 1.56 and 1.51. Two layers of width 64 end at 1.80
# after 504 steps, at 1.73 after 1,009 half as long (the same entry).
STEPS_OF_WHOLE_ROWS, WIDE = 450, 128
# A faster machine would learn the text by heart: in 180 s, four layers read it five to ten times.
MOST_LAYERS = 4
# Four in ten speeches of the held-out text are by speakers who are not in the training text. A long context has their
# names. With one of 1,024 and no windows, four layers end at 1.416 and 1.435 nats after 180 s of two Zen 5 cores; with
# 2,048, offset keys, and windows of 256 in all layers but the last, at 1.300 and 1.322. After 60 s they end at 1.367
# and 1.466, with windows of 64 at 1.347 and 1.357 (two seeds; docs/LOG.md, 2026-11-25).
CONTEXT, WINDOW = 2048, 64
# Many epochs overfit. With a context of 1,024 and a weight decay of 0.2 and 0.6, four layers end at 1.435 and 1.444
# nats after four epochs, at 1.431 and 1.416 after nine; of three seeds, 0.6 has the mean 1.420, 1.0 1.424.
WEIGHT_DECAY, WEIGHT_DECAY_OF_MANY_EPOCHS = 0.2, 0.6
MANY_EPOCHS, TEXT_TOKENS = 6, 1_003_854


def shakespeare_char(
    *, depth: int | None = None, horizon: Horizon = minutes(3), machine: Machine | None = None
) -> RunConfig:
    """The same on characters of tiny Shakespeare (--data FILE).

    The last tenth of the text is held out, as nanoGPT does.
    """
    size = {"aspect": 32, "head_dim": 64, "vocab_size": 128, "seq_len": CONTEXT, "window": WINDOW}
    flops_per_second = flops_per_second_of(machine)
    if depth is None:
        depth = min(shape_for_horizon(horizon, flops_per_second, TOKENS_PER_PARAM, size).n_layer, MOST_LAYERS)
    shape, total_tokens = shape_for_depth(depth, **size), 2**11
    tokens = horizon.amount * total_tokens
    if horizon.unit != "steps":
        tokens = tokens_within(horizon, shape, flops_per_second)
        takes_whole_rows = shape.n_embd >= WIDE and tokens >= STEPS_OF_WHOLE_ROWS * CONTEXT
        total_tokens = min(step_tokens(tokens, STEP_TOKENS_PER_ROOT, CONTEXT if takes_whole_rows else 2**10), 2**12)
    seq_len = min(CONTEXT, total_tokens)
    epochs = tokens / ((machine and machine.training_tokens) or TEXT_TOKENS)
    weight_decay = WEIGHT_DECAY if epochs < MANY_EPOCHS else WEIGHT_DECAY_OF_MANY_EPOCHS
    sixths: dict[str, Any] = {
        "every_seconds": horizon.amount / 6 if horizon.unit == "seconds" else None,
        "every_steps": math.ceil(tokens / total_tokens / 6) if validates_by_steps(horizon) else None,
    }
    return RunConfig(
        recipe="shakespeare-char",
        model=ModelConfig(
            n_layer=shape.n_layer, n_embd=shape.n_embd, n_head=shape.n_head, seq_len=seq_len, key_offset=True,
            window_pattern="S", window_tokens=WINDOW,
        ),
        tokenizer=TokenizerConfig(kind="char"),
        data=DataConfig(source=("tinyshakespeare.txt",), split="tail", val_fraction=0.1, rows="random"),
        batch=BatchConfig(total_tokens=total_tokens, micro_sequences=total_tokens // seq_len),
        horizon=horizon,
        optim=muon_and_adamw(shape.n_embd, weight_decay=weight_decay, adamw_scale=0.5, scaled_decay=False),
        eval=EvalConfig(**sixths),
        sample=SampleConfig(**sixths, prompts=("\n",), max_tokens=300),
    )  # fmt: skip
