"""nanochat's base training (scripts/base_train.py, February 2026): one dial, the depth, sets everything else.

The horizon is the first of: steps, FLOPs, tokens per parameter. nanochat has a flag for each, with a default for the
last, and silently takes the first that is set; here a horizon that is asked for replaces the recipe's ratio, and two
flags at once are refused, since one of them would not mean what it says.

A field changes one thing: `--batch.total-tokens` leaves the rates alone. nanochat's own flags, from which several
fields follow, are arguments of the recipe: `--total-batch-size` scales the rates by the root of the batch, and
`--embedding-lr` is the rate before it is scaled by batch and width.
"""

from __future__ import annotations

from dataclasses import replace

from gptlab.config.data import DataConfig, TokenizerConfig
from gptlab.config.errors import require_positive
from gptlab.config.horizon import Horizon, chosen_horizon
from gptlab.config.model import ModelConfig
from gptlab.config.optim import AdamWConfig, MuonConfig, OptimConfig
from gptlab.config.recipes import tiny
from gptlab.config.recipes.own_arguments import keeps_own_arguments
from gptlab.config.run import BatchConfig, EvalConfig, RunConfig, RuntimeConfig, SampleConfig
from gptlab.config.scaling import (
    Machine,
    adamw_lr_scale_for_width,
    lr_scale_for_batch,
    shape_for_depth,
    weight_decay_for_depth,
)

VOCAB_SIZE = 2**15  # scripts/tok_train.py of that time, trained on 2e9 characters

# The rates at 2^19 tokens a step and, for AdamW, at width 768; the decay at depth 12.
EMBEDDING_LR = 0.3
UNEMBEDDING_LR = 0.004
MATRIX_LR = 0.02
SCALAR_LR = 0.5
WEIGHT_DECAY = 0.2
ALLOCATOR = "expandable_segments:True"  # PYTORCH_ALLOC_CONF at the top of scripts/base_train.py

PROMPTS = (
    "The capital of France is",
    "The chemical symbol of gold is",
    "If yesterday was Friday, then tomorrow will be",
    "The opposite of hot is",
    "The planets of the solar system are:",
    "My favorite color is",
    "If 5*x + 3 = 13, then x is",
)

# Of 13.8M tokens for nanochat's 10.5 a parameter, two cores see 4M in three minutes (docs/LOG.md, 2026-11-20).
TINY_TOKENS_PER_PARAM = 3.0


@keeps_own_arguments
def nanochat(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
    aspect_ratio: int = 64,
    head_dim: int = 128,
    total_batch_size: int = 2**19,
    target_param_data_ratio: float = 10.5,
    embedding_lr: float = EMBEDDING_LR,
    unembedding_lr: float = UNEMBEDDING_LR,
    matrix_lr: float = MATRIX_LR,
    scalar_lr: float = SCALAR_LR,
    adam_beta1: float = 0.8,
    adam_beta2: float = 0.95,
    weight_decay: float = WEIGHT_DECAY,
) -> RunConfig:
    """nanochat: --depth is the dial; 10.5 tokens a parameter.

    Rows cut long documents where nanochat crops them (`data.long_documents`): no token of the corpus is lost.

    Args:
        aspect_ratio: width over depth. The width is rounded up to a multiple of head_dim.
        head_dim: width of an attention head.
        total_batch_size: tokens in one optimizer step. All learning rates are scaled by the root of this over 2^19.
        target_param_data_ratio: tokens per matrix and head parameter. Counts where no other length is given.
        embedding_lr: AdamW's rate of the embeddings before scaling. Scaled by width and batch.
        unembedding_lr: AdamW's rate of the head before scaling. Scaled by width and batch.
        matrix_lr: Muon's rate before scaling. Scaled by the batch.
        scalar_lr: AdamW's rate of the x0 lambdas before scaling. Scaled by the batch; the residual lambdas' rate is a
            hundredth of it.
        adam_beta1: AdamW's decay of the first moment. That of the x0 lambdas stays 0.96.
        adam_beta2: AdamW's decay of the second moment. That of the x0 lambdas stays 0.95.
        weight_decay: Muon's decay at depth 12. Scaled by (12 / depth)^2.
    """
    depth = 20 if depth is None else depth
    model = model_for_depth(depth, aspect=aspect_ratio, head_dim=head_dim, vocab_size=VOCAB_SIZE, seq_len=2048)
    return RunConfig(
        recipe="nanochat",
        model=model,
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=VOCAB_SIZE, train_bytes=2_000_000_000),
        data=DataConfig(source=("fineweb-edu",), rows="packed"),
        batch=BatchConfig(total_tokens=total_batch_size, micro_sequences=32),
        horizon=_horizon(horizon, minutes, target_param_data_ratio),
        optim=_optimizer(
            model, total_batch_size, embedding_lr=embedding_lr, head_lr=unembedding_lr, matrix_lr=matrix_lr,
            scalar_lr=scalar_lr, beta1=adam_beta1, beta2=adam_beta2, weight_decay=weight_decay,
        ),
        runtime=RuntimeConfig(allocator=ALLOCATOR),
        eval=EvalConfig(every_steps=250, at_end=False, tokens=20 * 2**19, core_every_steps=2000, core_examples=500),
        sample=_sample(every_steps=2000),
    )  # fmt: skip


@keeps_own_arguments
def nanochat_tiny(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
    aspect_ratio: int = tiny.ASPECT,
    head_dim: int = tiny.HEAD_DIM,
    total_batch_size: int = tiny.BATCH.total_tokens,
    target_param_data_ratio: float = TINY_TOKENS_PER_PARAM,
    embedding_lr: float = EMBEDDING_LR,
    unembedding_lr: float = UNEMBEDDING_LR,
    matrix_lr: float = MATRIX_LR,
    scalar_lr: float = SCALAR_LR,
    adam_beta1: float = 0.8,
    adam_beta2: float = 0.95,
    weight_decay: float = WEIGHT_DECAY,
) -> RunConfig:
    """The same in minutes on two cores: depth 4, 3 tokens a parameter.

    Everything of `nanochat`, its arguments included, but CORE, whose tasks would have to be downloaded and are chance
    at this size.
    """
    model = tiny_model(depth, aspect=aspect_ratio, head_dim=head_dim)
    return RunConfig(
        recipe="nanochat-tiny",
        model=model,
        tokenizer=tiny.TOKENIZER,
        data=tiny.tiny_data("packed"),
        batch=BatchConfig(total_tokens=total_batch_size, micro_sequences=tiny.BATCH.micro_sequences),
        horizon=_horizon(horizon, minutes, target_param_data_ratio),
        optim=_optimizer(
            model, total_batch_size, embedding_lr=embedding_lr, head_lr=unembedding_lr, matrix_lr=matrix_lr,
            scalar_lr=scalar_lr, beta1=adam_beta1, beta2=adam_beta2, weight_decay=weight_decay,
        ),
        runtime=RuntimeConfig(allocator=ALLOCATOR),
        eval=EvalConfig(every_steps=100, at_end=False, tokens=tiny.EVAL_TOKENS),
        sample=_sample(every_steps=250),
    )  # fmt: skip


def muon_and_adamw(
    n_embd: int,
    *,
    matrix_lr: float = MATRIX_LR,
    embedding_lr: float = EMBEDDING_LR,
    head_lr: float = UNEMBEDDING_LR,
    scalar_lr: float = SCALAR_LR,
    beta1: float = 0.8,
    beta2: float = 0.95,
    weight_decay: float = WEIGHT_DECAY,
    adamw_scale: float = 1.0,
    scaled_decay: bool = True,
) -> OptimConfig:
    """Muon and AdamW as nanochat's and autoresearch's setup_optimizer set them up (defaults: nanochat's rates).

    AdamW's rates fall with the root of the width, those of the lambdas do not; `adamw_scale` multiplies all of
    AdamW's. Residual lambdas get a hundredth of the x0 lambdas' rate, which average longer (beta1 0.96).
    """
    scale = adamw_scale * adamw_lr_scale_for_width(n_embd)
    adamw = AdamWConfig(beta1=beta1, beta2=beta2)
    return OptimConfig(
        muon=MuonConfig(lr=matrix_lr, weight_decay=weight_decay, scaled_decay=scaled_decay),
        embedding=replace(adamw, lr=embedding_lr * scale),
        value_embedding=replace(adamw, lr=embedding_lr * scale),
        head=replace(adamw, lr=head_lr * scale),
        residual_lambda=replace(adamw, lr=0.01 * scalar_lr * adamw_scale),
        x0_lambda=AdamWConfig(lr=scalar_lr * adamw_scale, beta1=0.96),
        vector=replace(adamw, lr=head_lr * scale),  # neither has any: for ablations with LayerNorm or biases
    )


def model_for_depth(depth: int, *, aspect: int, head_dim: int, vocab_size: int, seq_len: int) -> ModelConfig:
    """The network of nanochat and autoresearch, whose parts are the defaults of ModelConfig."""
    require_positive("depth", depth)
    require_positive("aspect_ratio", aspect)
    require_positive("head_dim", head_dim)
    shape = shape_for_depth(depth, aspect=aspect, head_dim=head_dim, vocab_size=vocab_size, seq_len=seq_len)
    return ModelConfig(
        n_layer=shape.n_layer, n_embd=shape.n_embd, n_head=shape.n_head, seq_len=seq_len, window_pattern="SSSL"
    )


def tiny_model(depth: int | None, *, aspect: int = tiny.ASPECT, head_dim: int = tiny.HEAD_DIM) -> ModelConfig:
    """The same in the tiny forms' size."""
    return model_for_depth(
        tiny.DEPTH if depth is None else depth,
        aspect=aspect, head_dim=head_dim, vocab_size=tiny.VOCAB_SIZE, seq_len=tiny.SEQ_LEN,
    )  # fmt: skip


def _horizon(horizon: Horizon | None, minutes: float | None, tokens_per_param: float) -> Horizon:
    return chosen_horizon(horizon, minutes, Horizon(amount=tokens_per_param, unit="tokens_per_param"))


def _optimizer(
    model: ModelConfig,
    total_tokens: int,
    *,
    embedding_lr: float,
    head_lr: float,
    matrix_lr: float,
    scalar_lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> OptimConfig:
    """The rates and the decay scaled to batch, width and depth."""
    scale = lr_scale_for_batch(total_tokens)
    return muon_and_adamw(
        model.n_embd,
        matrix_lr=matrix_lr * scale,
        embedding_lr=embedding_lr,
        head_lr=head_lr,
        scalar_lr=scalar_lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay_for_depth(weight_decay, model.n_layer),
        adamw_scale=scale,
    )


def _sample(*, every_steps: int) -> SampleConfig:
    return SampleConfig(prompts=PROMPTS, every_steps=every_steps, max_tokens=16, temperature=0.0, top_k=None)
