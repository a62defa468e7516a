"""nanochat's base training (seed 4: scripts/base_train.py, February 2026): one dial, the depth, sets everything else.

The horizon is the first of: steps, FLOPs, tokens per parameter. The seed has a flag for each, with a default for the
last, and silently takes the first that is set; here a horizon that is asked for replaces the recipe's ratio, and two
flags at once are refused, since one of them would not mean what it says.

A flag changes one field and no other: `--batch.total-tokens` leaves the rates alone, where the seed scales them by
the root of the batch (`scaling.lr_scale_for_batch`). What one difference is worth is then one difference.
"""

from __future__ import annotations

from gptlab.config.data import DataConfig, TokenizerConfig
from gptlab.config.errors import require_positive
from gptlab.config.horizon import Horizon, chosen_horizon
from gptlab.config.model import ModelConfig
from gptlab.config.optim import AdamWConfig, MuonConfig, OptimConfig
from gptlab.config.recipes import tiny
from gptlab.config.run import BatchConfig, EvalConfig, RunConfig, SampleConfig
from gptlab.config.scaling import (
    Machine,
    adamw_lr_scale_for_width,
    lr_scale_for_batch,
    shape_for_depth,
    weight_decay_for_depth,
)

VOCAB_SIZE = 2**15  # scripts/tok_train.py of that time, trained on 2e9 characters
TOTAL_TOKENS = 2**19
TOKENS_PER_PARAM = 10.5
WEIGHT_DECAY = 0.2

PROMPTS = (
    "The capital of France is",
    "The chemical symbol of gold is",
    "If yesterday was Friday, then tomorrow will be",
    "The opposite of hot is",
    "The planets of the solar system are:",
    "My favorite color is",
    "If 5*x + 3 = 13, then x is",
)

# Of 13.8M tokens for the seed's 10.5 a parameter, two cores see 4M in three minutes (docs/LOG.md, 2026-11-20).
TINY_TOKENS_PER_PARAM = 3.0


def nanochat(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """nanochat: --depth is the dial; 10.5 tokens a parameter.

    Rows cut long documents where nanochat crops them (`data.long_documents`): no token of the corpus is lost.
    """
    depth = 20 if depth is None else depth
    model = model_for_depth(depth, aspect=64, head_dim=128, vocab_size=VOCAB_SIZE, seq_len=2048)
    return RunConfig(
        recipe="nanochat",
        model=model,
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=VOCAB_SIZE, train_bytes=2_000_000_000),
        data=DataConfig(source=("fineweb-edu",), rows="packed"),
        batch=BatchConfig(total_tokens=TOTAL_TOKENS, micro_sequences=32),
        horizon=chosen_horizon(horizon, minutes, Horizon(amount=TOKENS_PER_PARAM, unit="tokens_per_param")),
        optim=_optimizer(model, TOTAL_TOKENS),
        eval=EvalConfig(every_steps=250, tokens=20 * 2**19, core_every_steps=2000, core_examples=500),
        sample=_sample(every_steps=2000),
    )


def nanochat_tiny(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """The same in minutes on two cores: depth 4, 3 tokens a parameter.

    Everything of `nanochat` but CORE, whose tasks would have to be downloaded and are chance at this size.
    """
    model = tiny_model(depth)
    return RunConfig(
        recipe="nanochat-tiny",
        model=model,
        tokenizer=tiny.TOKENIZER,
        data=tiny.tiny_data("packed"),
        batch=tiny.BATCH,
        horizon=chosen_horizon(horizon, minutes, Horizon(amount=TINY_TOKENS_PER_PARAM, unit="tokens_per_param")),
        optim=_optimizer(model, tiny.BATCH.total_tokens),
        eval=EvalConfig(every_steps=100, tokens=tiny.EVAL_TOKENS),
        sample=_sample(every_steps=250),
    )


def muon_and_adamw(
    n_embd: int,
    *,
    matrix_lr: float = 0.02,
    embedding_lr: float = 0.3,
    head_lr: float = 0.004,
    scalar_lr: float = 0.5,
    weight_decay: float = 0.2,
    adamw_scale: float = 1.0,
    scaled_decay: bool = True,
) -> OptimConfig:
    """Muon and AdamW as nanochat's and autoresearch's setup_optimizer set them up (defaults: seed 4's rates).

    AdamW's rates fall with the root of the width, those of the lambdas do not; `adamw_scale` multiplies all of
    AdamW's. Residual lambdas get a hundredth of the x0 lambdas' rate, which average longer (beta1 0.96).
    """
    scale = adamw_scale * adamw_lr_scale_for_width(n_embd)
    return OptimConfig(
        muon=MuonConfig(lr=matrix_lr, weight_decay=weight_decay, scaled_decay=scaled_decay),
        embedding=AdamWConfig(lr=embedding_lr * scale),
        value_embedding=AdamWConfig(lr=embedding_lr * scale),
        head=AdamWConfig(lr=head_lr * scale),
        residual_lambda=AdamWConfig(lr=0.01 * scalar_lr * adamw_scale),
        x0_lambda=AdamWConfig(lr=scalar_lr * adamw_scale, beta1=0.96),
        vector=AdamWConfig(lr=head_lr * scale),  # neither has any: for ablations with LayerNorm or biases
    )


def model_for_depth(depth: int, *, aspect: int, head_dim: int, vocab_size: int, seq_len: int) -> ModelConfig:
    """The network of nanochat and autoresearch, whose parts are the defaults of ModelConfig."""
    require_positive("depth", depth)
    shape = shape_for_depth(depth, aspect=aspect, head_dim=head_dim, vocab_size=vocab_size, seq_len=seq_len)
    return ModelConfig(
        n_layer=shape.n_layer, n_embd=shape.n_embd, n_head=shape.n_head, seq_len=seq_len, window_pattern="SSSL"
    )


def tiny_model(depth: int | None) -> ModelConfig:
    """The same in the tiny forms' size."""
    return model_for_depth(
        tiny.DEPTH if depth is None else depth,
        aspect=tiny.ASPECT, head_dim=tiny.HEAD_DIM, vocab_size=tiny.VOCAB_SIZE, seq_len=tiny.SEQ_LEN,
    )  # fmt: skip


def _optimizer(model: ModelConfig, total_tokens: int) -> OptimConfig:
    scale = lr_scale_for_batch(total_tokens)
    weight_decay = weight_decay_for_depth(WEIGHT_DECAY, model.n_layer)
    return muon_and_adamw(model.n_embd, matrix_lr=0.02 * scale, weight_decay=weight_decay, adamw_scale=scale)


def _sample(*, every_steps: int) -> SampleConfig:
    return SampleConfig(prompts=PROMPTS, every_steps=every_steps, max_tokens=16, temperature=0.0, top_k=None)
