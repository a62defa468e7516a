"""The quickstart, which sizes itself to the machine, and how it does: `shakespeare.py` does the same."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from gptlab.config.length import Horizon, minutes
from gptlab.config.model import ModelConfig
from gptlab.config.recipes import quickstart_on_gpu
from gptlab.config.run import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    RunConfig,
    SampleConfig,
    TokenizerConfig,
)
from gptlab.config.scaling import (
    REFERENCE_BATCH_TOKENS,
    Machine,
    Shape,
    muon_and_adamw,
    shape_for_compute,
    shape_for_depth,
)

# Training steps of quickstart's default size reach 230e9 to 300e9 FLOP/s on two cores with AVX512-BF16 or AMX
# (docs/LOG.md, 2026-11-20 and 2026-11-22). It gives the size where nothing is known of the machine.
ASSUMED_FLOPS_PER_SECOND = 235e9

# All layers but the last see only the nearest WINDOW tokens. So a run learns sooner to copy from its context. On two
# Zen 5 cores, three layers end at 0.983 bits per byte after 60 s with a context of 512 and no windows, at 0.947 to
# 0.953 with 1,024 and windows of 64 to 256, and at 0.967 with 2,048; four layers after 180 s at 0.865, at 0.815 to
# 0.819, and at 0.812 (docs/LOG.md, 2026-11-25).
CONTEXT, WINDOW = 1024, 128
# After 60 s (three layers) a base of 1,000 ends 4.5% higher in bits per byte than 10,000, and this one 1.5% lower
# (docs/LOG.md, 2026-11-25).
ROPE_BASE = 100_000.0
# Of the standard library's 30 MB; with all of them, training the tokenizer takes 7.6 s of two cores instead of 3.1, and
# makes 0.15% fewer tokens of the validation text (docs/LOG.md, 2026-11-28).
TOKENIZER_BYTES = 10_000_000
# Steps of 8,192 tokens take 1.08 times as long in two micro-batches as in one, and with micro-batches twice as large
# those of 16,384 are 0.97 times as long (AMX; docs/LOG.md, 2026-11-28).
LEAST_STEP_TOKENS, CPU_MICRO_TOKENS = 2**12, 2**13

# Measured on the standard library with the steps that fit into 60 and 180 s of several CPUs (docs/LOG.md, 2026-11-25).
# Three layers, which are three times as large as two, are worse by 5% where they see 1.7 tokens a parameter, better by
# 5% with 3.1. Four are worse than three by 0.5% with 2.2 and as good with 6.7; five, 2.3 times as large as four, are
# worse by 5% with 1.5. It is far below nanochat's 10.5: such runs end long before a small model stops learning. On GPUs
# nothing was measured.
QUICKSTART_ASPECT = 32
QUICKSTART_TOKENS_PER_PARAM = 2.5
# The more tokens a run sees, the more of them a step may have: their square root. In the same time 8,192 tokens a step
# are as good as 4,096 for 3.3 million tokens of two layers, better by 1 to 3% for 5 million of two, 3 million of three
# and 4 million of four layers; 16,384 are worse than 8,192 by 0.4% for 12.5 million of four layers (AMX; docs/LOG.md,
# 2026-11-29).
QUICKSTART_STEP_TOKENS_PER_ROOT = 4.6
# Three times nanochat's, before the factor below. After 60 s (three layers, two seeds) twice and four times its rate
# end 1.4 and 1.7% lower in bits per byte, half of it 7% higher; after 180 s (four layers) 1.0 and 0.8% lower. Rates of
# Muon and embeddings, weight decay and the length of the warmdown make less difference (docs/LOG.md, 2026-11-25).
HEAD_LR = 0.012


def quickstart(
    *, depth: int | None = None, horizon: Horizon | None = None, machine: Machine | None = None
) -> RunConfig:
    """A small modern GPT on Python's sources, sized to this machine.

    `horizon`: three minutes by default, or on a GPU the few epochs that it reads in less.
    """
    seq_len, vocab_size, flops_per_second = CONTEXT, 4096, flops_per_second_of(machine)
    gpu = machine if machine is not None and machine.device.startswith(("cuda", "mps")) else None
    by_default, horizon = horizon is None, horizon or minutes(3)
    size = {"aspect": QUICKSTART_ASPECT, "head_dim": 64, "vocab_size": vocab_size, "seq_len": seq_len, "window": WINDOW}
    shape = (
        shape_for_depth(depth, **size)
        if depth is not None
        else shape_for_horizon(horizon, flops_per_second, QUICKSTART_TOKENS_PER_PARAM, size)
    )
    if gpu is not None and by_default:
        shape, horizon = quickstart_on_gpu.within_the_text(
            gpu, shape, horizon, flops_per_second, QUICKSTART_TOKENS_PER_PARAM, size, least_depth=depth or 1
        )
    total_tokens = 2**13
    tokens = horizon.amount * total_tokens
    if horizon.unit != "steps":
        tokens = tokens_within(horizon, shape, flops_per_second)
        total_tokens = step_tokens(tokens, QUICKSTART_STEP_TOKENS_PER_ROOT, LEAST_STEP_TOKENS)
    by_steps = horizon.unit == "tokens" or validates_by_steps(horizon)
    quarters: dict[str, Any] = {
        "every_seconds": horizon.amount / 4 if horizon.unit == "seconds" else None,
        "every_steps": math.ceil(tokens / total_tokens / 4) if by_steps else None,
    }
    rows = min(total_tokens, CPU_MICRO_TOKENS) // seq_len
    if machine is not None and (gpu is not None or machine.processes > 1):
        rows = quickstart_on_gpu.micro_rows(machine, total_tokens, seq_len, cpu_tokens=CPU_MICRO_TOKENS)
    return RunConfig(
        recipe="quickstart",
        model=ModelConfig(
            n_layer=shape.n_layer, n_embd=shape.n_embd, n_head=shape.n_head, seq_len=seq_len, key_offset=True,
            window_pattern="S", window_tokens=WINDOW, rope_base=ROPE_BASE,
        ),
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=vocab_size, train_bytes=TOKENIZER_BYTES),
        data=DataConfig(source=("stdlib",), rows="packed"),
        batch=BatchConfig(total_tokens=total_tokens, micro_sequences=rows),
        horizon=horizon,
        optim=muon_and_adamw(
            shape.n_embd, head_lr=HEAD_LR, adamw_scale=quickstart_adamw_scale(total_tokens), scaled_decay=False
        ),
        eval=EvalConfig(**quarters, tokens=131_072),
        sample=SampleConfig(**quarters, from_validation=2, max_tokens=96, temperature=0.7, top_k=40),
        checkpoint=CheckpointConfig(every_seconds=60.0),
    )  # fmt: skip


def quickstart_adamw_scale(total_tokens: int) -> float:
    """The factor on nanochat's AdamW rates: 1 at its 2^19 tokens a step, a half at 2^13.

    The sixth root between them was not swept. nanochat's own square root would leave an eighth at 2^13, too little to
    move embeddings in a few hundred steps.
    """
    return (total_tokens / REFERENCE_BATCH_TOKENS) ** (1 / 6)


def shape_for_horizon(
    horizon: Horizon, flops_per_second: float, tokens_per_param: float, size: dict[str, int]
) -> Shape:
    """Depth and width for the compute of the horizon, or of three minutes where it implies none (steps, tokens)."""
    amount, assumed = horizon.amount, 180.0 * ASSUMED_FLOPS_PER_SECOND
    total_flops = {"flops": amount, "seconds": amount * flops_per_second}.get(horizon.unit, assumed)
    return shape_for_compute(total_flops, tokens_per_param=tokens_per_param, **size)


def tokens_within(horizon: Horizon, shape: Shape, flops_per_second: float) -> float:
    """Tokens that a horizon other than steps has, about."""
    return {
        "tokens": horizon.amount,
        "flops": horizon.amount / shape.flops_per_token,
        "tokens_per_param": horizon.amount * shape.scaling_params,
        "seconds": horizon.amount * flops_per_second / shape.flops_per_token,
    }[horizon.unit]


def validates_by_steps(horizon: Horizon) -> bool:
    """Whether a run without a clock validates on the way: one that is to stop at a loss does."""
    return horizon.until_val_loss is not None and horizon.unit != "seconds"


def step_tokens(tokens: float, per_root: float, least: int) -> int:
    """Tokens a step: at most `per_root` times the root of all `tokens`; a power of two between `least` and 2^19."""
    return 2 ** math.floor(math.log2(min(max(per_root * math.sqrt(tokens), least), 2**19)))


def why_quickstart_size(config: RunConfig, machine: Machine) -> str | None:
    """How the size was chosen, in one line; None where another recipe, --depth or a field decided it."""
    if config.recipe == "quickstart" and config.horizon.amount == quickstart_on_gpu.most_tokens(machine):
        return quickstart_on_gpu.why_so_short(machine)
    if config.recipe != "quickstart" or config.horizon.unit not in ("seconds", "flops"):
        return None
    model, own = config.model, quickstart(horizon=config.horizon, machine=machine).model
    if (model.n_layer, model.n_embd, model.seq_len) != (own.n_layer, own.n_embd, own.seq_len):
        return None
    if config.horizon.unit == "flops":
        compute = f"{config.horizon.amount:.2g} FLOP"
    else:
        rate = flops_per_second_of(machine)
        how = "assumed" if machine.flops_per_second is None else "timed"
        compute = (
            f"{config.horizon.amount:g} s x {rate / 1e9:,.0f} GFLOP/s ({how}) = {config.horizon.amount * rate:.2g} FLOP"
        )
    ratio = f"{QUICKSTART_TOKENS_PER_PARAM:g} tokens per parameter"
    return f"{compute}: at least {ratio}, at most {QUICKSTART_STEP_TOKENS_PER_ROOT:g} sqrt(tokens) a step"


def text_ends_first(machine: Machine, config: RunConfig) -> bool:
    """Whether a GPU would read the epochs of `config`, the default run, in its three minutes at a tenth of the assumed
    rate too. Its size then follows from the text, and no step is timed, which takes a GPU minutes of compiling."""
    most = machine.most_flops_per_second
    if most is None or config.horizon.amount != quickstart_on_gpu.most_tokens(machine):
        return False
    slow = replace(machine, most_flops_per_second=most / 10)
    return quickstart(depth=config.model.n_layer, machine=slow).horizon == config.horizon


def flops_per_second_of(machine: Machine | None) -> float:
    """FLOP/s of timed training steps on `machine`, or the assumed rate."""
    if machine is None:
        return ASSUMED_FLOPS_PER_SECOND
    return machine.flops_per_second or _assumed_flops_per_second(machine)


def _assumed_flops_per_second(machine: Machine) -> float:
    """Of a machine on which no step was timed yet: what its steps can reach at most, where that is known."""
    if machine.device.startswith(("cuda", "mps")):
        return quickstart_on_gpu.assumed_flops_per_second(machine) or ASSUMED_FLOPS_PER_SECOND
    return machine.most_flops_per_second or ASSUMED_FLOPS_PER_SECOND
