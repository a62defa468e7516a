"""Recipes of gptlab's own: the quickstart that sizes itself to the machine, and characters of tiny Shakespeare."""

from __future__ import annotations

import math

from gptlab.config.data import DataConfig, TokenizerConfig
from gptlab.config.errors import require_positive
from gptlab.config.horizon import Horizon, chosen_horizon
from gptlab.config.model import ModelConfig
from gptlab.config.recipes.nanochat import muon_and_adamw
from gptlab.config.run import BatchConfig, CheckpointConfig, EvalConfig, RunConfig, SampleConfig
from gptlab.config.scaling import EXPECTED_MFU, Machine, Shape, shape_for_compute, shape_for_depth

# What two quiet cores with AVX512-BF16 measure; assumed only where the caller measured nothing.
ASSUMED_FLOPS_PER_SECOND = 425e9

# Both measured on the standard library in 180 s of two Zen 4 cores (docs/LOG.md, 2026-11-20). At width 128, 2, 4 and 6
# layers reach 1.29, 1.14 and 1.31 bits per byte; width 192 with 3 and 6 layers 1.45 and 1.59. Far below the 10.5 tokens
# a parameter of nanochat: three minutes end long before a small model stops learning, and depth pays more than width.
QUICKSTART_ASPECT = 32
QUICKSTART_TOKENS_PER_PARAM = 2.5
QUICKSTART_STEPS = 500


def quickstart(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """A small modern GPT on Python's sources, sized to this machine."""
    horizon = chosen_horizon(horizon, minutes, Horizon(amount=180.0, unit="seconds"))
    seq_len, vocab_size = 512, 4096
    shape = _quickstart_shape(depth, horizon, machine, vocab_size=vocab_size, seq_len=seq_len)
    total_tokens = _quickstart_batch(shape, horizon, machine)
    return RunConfig(
        recipe="quickstart",
        model=ModelConfig(n_layer=shape.n_layer, n_embd=shape.n_embd, n_head=shape.n_head, seq_len=seq_len),
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=vocab_size),
        data=DataConfig(source=("stdlib",), rows="packed"),
        batch=BatchConfig(total_tokens=total_tokens, micro_sequences=16),
        horizon=horizon,
        # nanochat's AdamW rates at its 2^19 tokens a step, half of them at 2^13; the sixth root between is not swept.
        # Its own square root would leave an eighth, too little to move embeddings in a few hundred steps.
        optim=muon_and_adamw(shape.n_embd, adamw_scale=(total_tokens / 2**19) ** (1 / 6), scaled_decay=False),
        eval=EvalConfig(every_seconds=horizon.amount / 4 if horizon.unit == "seconds" else None, tokens=131_072),
        sample=SampleConfig(
            prompts=("def ", "class ", "import os\n", "    def __init__(self"), max_tokens=96, temperature=0.7, top_k=40
        ),
        checkpoint=CheckpointConfig(every_seconds=60.0),
    )


def shakespeare_char(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """The same parts on characters of tiny Shakespeare (--data FILE).

    The last tenth of the text is held out, as nanoGPT does.
    """
    horizon = chosen_horizon(horizon, minutes, Horizon(amount=180.0, unit="seconds"))
    depth = depth or 4
    # Width 192 at four layers: 1.578 nats after 60 s on two Zen 4 cores, width 256 1.664, width 128 at six 1.576.
    shape = shape_for_depth(depth, aspect=48, head_dim=64, vocab_size=128, seq_len=256)
    return RunConfig(
        recipe="shakespeare-char",
        model=ModelConfig(n_layer=shape.n_layer, n_embd=shape.n_embd, n_head=shape.n_head, seq_len=256),
        tokenizer=TokenizerConfig(kind="char"),
        data=DataConfig(source=("tinyshakespeare.txt",), split="tail", val_fraction=0.1, rows="random"),
        batch=BatchConfig(total_tokens=16 * 256, micro_sequences=16),
        horizon=horizon,
        optim=muon_and_adamw(shape.n_embd, adamw_scale=0.5, scaled_decay=False),
        eval=EvalConfig(every_seconds=horizon.amount / 6 if horizon.unit == "seconds" else None),
        sample=SampleConfig(prompts=("\n",), max_tokens=300),
    )


def _quickstart_shape(
    depth: int | None, horizon: Horizon, machine: Machine | None, *, vocab_size: int, seq_len: int
) -> Shape:
    size = {"aspect": QUICKSTART_ASPECT, "head_dim": 64, "vocab_size": vocab_size, "seq_len": seq_len}
    if depth is not None:
        require_positive("depth", depth)
        return shape_for_depth(depth, **size)
    if horizon.unit == "flops":
        total_flops = horizon.amount
    else:  # a length in steps or tokens says nothing of compute: then the shape for three minutes
        total_flops = _flops_in(horizon.amount if horizon.unit == "seconds" else 180.0, machine)
    return shape_for_compute(total_flops, tokens_per_param=QUICKSTART_TOKENS_PER_PARAM, **size)


def why_quickstart_size(config: RunConfig, machine: Machine) -> str | None:
    """How the size came about, in a line; None where the recipe did not choose it (another recipe, --depth, fields)."""
    if config.recipe != "quickstart" or config.horizon.unit not in ("seconds", "flops"):
        return None
    model, own = config.model, quickstart(horizon=config.horizon, machine=machine).model
    if (model.n_layer, model.n_embd, model.seq_len) != (own.n_layer, own.n_embd, own.seq_len):
        return None
    if config.horizon.unit == "flops":
        compute = f"{config.horizon.amount:.2g} FLOP"
    else:
        peak = machine.matmul_flops_per_second
        rate = f"{(peak or ASSUMED_FLOPS_PER_SECOND) / 1e9:,.0f} GFLOP/s {'measured' if peak else 'assumed'}"
        total = _flops_in(config.horizon.amount, machine)
        compute = f"{config.horizon.amount:g} s x {rate} x {EXPECTED_MFU} = {total:.2g} FLOP"
    ratio = f"{QUICKSTART_TOKENS_PER_PARAM:g} tokens a parameter"
    return f"{compute}: the deepest model that this trains on {ratio}, about {QUICKSTART_STEPS} steps"


def _quickstart_batch(shape: Shape, horizon: Horizon, machine: Machine | None) -> int:
    """Tokens a step: the power of two that makes about QUICKSTART_STEPS steps, from 2^13 to nanochat's 2^19."""
    tokens = {
        "steps": 0.0,
        "tokens": horizon.amount,
        "flops": horizon.amount / shape.flops_per_token,
        "tokens_per_param": horizon.amount * shape.scaling_params,
        "seconds": _flops_in(horizon.amount, machine) / shape.flops_per_token,
    }[horizon.unit]
    exponent = round(math.log2(max(tokens / QUICKSTART_STEPS, 1.0)))
    return 2 ** min(max(exponent, 13), 19)


def _flops_in(seconds: float, machine: Machine | None) -> float:
    measured = machine.matmul_flops_per_second if machine is not None else None
    return EXPECTED_MFU * seconds * (measured or ASSUMED_FLOPS_PER_SECOND)
