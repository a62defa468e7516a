"""Characters of tiny Shakespeare, by the quickstart's parts, sized to the machine as it is."""

from __future__ import annotations

from gptlab.config.model import ModelConfig
from gptlab.config.recipes.quickstart import flops_per_second_of, shape_for_horizon, step_tokens, tokens_within
from gptlab.config.run import (
    BatchConfig,
    DataConfig,
    EvalConfig,
    Horizon,
    RunConfig,
    SampleConfig,
    TokenizerConfig,
    minutes,
)
from gptlab.config.scaling import Machine, muon_and_adamw, shape_for_depth

# With the steps that fit into 10, 60 and 180 s of two Zen 4 cores, 2 layers of width 64, 3 of 128 and 4 of 128 are the
# best or nearly so, with 1,024, 1,024 and 2,048 tokens a step (docs/LOG.md, 2026-11-25). The ratio gives them with the
# FLOPs of the longer context.
TOKENS_PER_PARAM = 2.3
# In 60 s of two Zen 5 cores, four layers see 3.6 tokens a parameter and end at 1.474 and 1.496 nats, three at 1.464 and
# 1.475; in 180 s four see 11 and end at 1.416, three at 1.440 (docs/LOG.md, 2026-11-25).
TOKENS_PER_PARAM_OF_MOST_LAYERS = 4.5
STEP_TOKENS_PER_ROOT = 1.25
# A faster machine would learn the text by heart: in 180 s, four layers read it five to ten times.
MOST_LAYERS = 4
# Contexts of 256, 512 and 1,024 end at 1.462, 1.439 and 1.431 nats after 180 s of two Zen 5 cores (4 x 128), and at
# 1.478, 1.464 and 1.486 after 60 s (3 x 128); the first two at 1.658 and 1.662 after 10 s (2 x 64). Mostly one seed
# each, and seeds differ by 0.02 (docs/LOG.md, 2026-11-25).
CONTEXT, CONTEXT_OF_MOST_LAYERS = 512, 1024
# Many epochs overfit: the training loss ends at 1.09. With a weight decay of 0.2 and 0.6, four layers end at 1.435 and
# 1.444 nats after four epochs, at 1.431 and 1.416 after nine; of three seeds, 0.6 has the mean 1.420, 1.0 1.424.
WEIGHT_DECAY, WEIGHT_DECAY_OF_MANY_EPOCHS = 0.2, 0.6
MANY_EPOCHS, TEXT_TOKENS = 6, 1_003_854


def shakespeare_char(
    *, depth: int | None = None, horizon: Horizon = minutes(3), machine: Machine | None = None
) -> RunConfig:
    """The same on characters of tiny Shakespeare (--data FILE).

    The last tenth of the text is held out, as nanoGPT does.
    """
    size = {"aspect": 32, "head_dim": 64, "vocab_size": 128, "seq_len": CONTEXT_OF_MOST_LAYERS}
    flops_per_second = flops_per_second_of(machine)
    if depth is None:
        depth, deepest = (
            shape_for_horizon(horizon, flops_per_second, ratio, size).n_layer
            for ratio in (TOKENS_PER_PARAM, TOKENS_PER_PARAM_OF_MOST_LAYERS)
        )
        depth = min(depth, MOST_LAYERS if deepest >= MOST_LAYERS else MOST_LAYERS - 1)
    seq_len = CONTEXT_OF_MOST_LAYERS if depth >= MOST_LAYERS else CONTEXT
    shape, total_tokens = shape_for_depth(depth, **(size | {"seq_len": seq_len})), 2**11
    tokens = horizon.amount * total_tokens
    if horizon.unit != "steps":
        tokens = tokens_within(horizon, shape, flops_per_second)
        total_tokens = min(step_tokens(tokens, STEP_TOKENS_PER_ROOT, 2**10), 2**12)
    epochs = tokens / ((machine and machine.training_tokens) or TEXT_TOKENS)
    weight_decay = WEIGHT_DECAY if epochs < MANY_EPOCHS else WEIGHT_DECAY_OF_MANY_EPOCHS
    return RunConfig(
        recipe="shakespeare-char",
        model=ModelConfig(n_layer=shape.n_layer, n_embd=shape.n_embd, n_head=shape.n_head, seq_len=seq_len),
        tokenizer=TokenizerConfig(kind="char"),
        data=DataConfig(source=("tinyshakespeare.txt",), split="tail", val_fraction=0.1, rows="random"),
        batch=BatchConfig(total_tokens=total_tokens, micro_sequences=total_tokens // seq_len),
        horizon=horizon,
        optim=muon_and_adamw(shape.n_embd, weight_decay=weight_decay, adamw_scale=0.5, scaled_decay=False),
        eval=EvalConfig(every_seconds=horizon.amount / 6 if horizon.unit == "seconds" else None),
        sample=SampleConfig(prompts=("\n",), max_tokens=300),
    )
