"""nanochat's base training (scripts/base_train.py, February 2026): one dial, the depth, sets everything else.

nanochat takes the first of three lengths that is set (steps, FLOPs, tokens per parameter). Here a length that is given
replaces the recipe's ratio, and two at once are refused.

A field changes one thing: `--batch.total-tokens` leaves the learning rates alone. nanochat's own flags, from which
several fields follow, are `NanochatArguments`: `--total-batch-size` also scales the learning rates, and
`--embedding-lr` is the rate before it is scaled by batch and width.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace

from gptlab.config.fields import BelowOne, Positive, checked_dataclass
from gptlab.config.length import Horizon
from gptlab.config.model import ModelConfig
from gptlab.config.optim import OptimConfig, Rate
from gptlab.config.recipes import tiny
from gptlab.config.recipes.tiny import tiny_form
from gptlab.config.run import (
    BatchConfig,
    DataConfig,
    EvalConfig,
    RunConfig,
    RuntimeConfig,
    SampleConfig,
    TokenizerConfig,
)
from gptlab.config.scaling import lr_scale_for_batch, muon_and_adamw, shape_for_depth, weight_decay_for_depth

VOCAB_SIZE = 2**15  # scripts/tok_train.py of that time, trained on 2e9 characters

PROMPTS = (
    "The capital of France is",
    "The chemical symbol of gold is",
    "If yesterday was Friday, then tomorrow will be",
    "The opposite of hot is",
    "The planets of the solar system are:",
    "My favorite color is",
    "If 5*x + 3 = 13, then x is",
)


@checked_dataclass("")
class NanochatArguments:
    """Flags of base_train.py from which several fields follow.

    They are flags of `gptlab train nanochat`, keys of a TOML file and keywords of `gptlab.train`. Those that were given
    are kept in `RunConfig.recipe_arguments`, so that `--from RUN --depth N` calls the recipe as the run did.
    """

    aspect_ratio: Positive[int] = 64
    """Width over depth. The width is rounded up to a multiple of head_dim."""
    head_dim: Positive[int] = 128
    """Width of an attention head."""
    total_batch_size: Positive[int] = 2**19
    """Tokens in one optimizer step. All learning rates are scaled by the square root of this over 2^19."""
    target_param_data_ratio: Positive[float] = 10.5
    """Tokens per matrix and head parameter. Used where no other length is given."""
    embedding_lr: Rate = 0.3
    """AdamW's learning rate for the embeddings before scaling. Scaled by width and batch."""
    unembedding_lr: Rate = 0.004
    """AdamW's learning rate for the head before scaling. Scaled by width and batch."""
    matrix_lr: Rate = 0.02
    """Muon's learning rate before scaling. Scaled by the batch."""
    scalar_lr: Rate = 0.5
    """AdamW's learning rate for the x0 lambdas before scaling. Scaled by the batch; the residual lambdas' rate is a
    hundredth of it."""
    adam_beta1: BelowOne = 0.8
    """AdamW's decay of the first moment. The x0 lambdas keep 0.96."""
    adam_beta2: BelowOne = 0.95
    """AdamW's decay of the second moment. The x0 lambdas keep 0.95."""
    weight_decay: Rate = 0.2
    """Muon's weight decay at depth 12. Scaled by (12 / depth)^2."""


FULL = NanochatArguments()
TINY = NanochatArguments(
    aspect_ratio=tiny.ASPECT,
    head_dim=tiny.HEAD_DIM,
    total_batch_size=tiny.BATCH.total_tokens,
    # Of 13.8M tokens for nanochat's 10.5 a parameter, two cores see 4M in three minutes (docs/LOG.md, 2026-11-20).
    target_param_data_ratio=3.0,
)


def nanochat(*, depth: int = 20, horizon: Horizon | None = None, own: NanochatArguments = FULL) -> RunConfig:
    """nanochat: --depth is the dial; 10.5 tokens a parameter.

    Long documents are cut where nanochat crops them (`data.long_documents`), so that no token is lost.
    """
    shape = {"aspect": own.aspect_ratio, "head_dim": own.head_dim}
    model = model_for_depth(depth, **shape, vocab_size=VOCAB_SIZE, seq_len=2048)
    return RunConfig(
        recipe="nanochat",
        recipe_arguments=_given(own, FULL),
        model=model,
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=VOCAB_SIZE, train_bytes=2_000_000_000),
        data=DataConfig(source=("fineweb-edu",), rows="packed"),
        batch=BatchConfig(total_tokens=own.total_batch_size, micro_sequences=32),
        horizon=horizon or _ratio(own),
        optim=_optimizer(model, own),
        runtime=_RUNTIME,
        eval=EvalConfig(every_steps=250, at_end=False, tokens=20 * 2**19, core_every_steps=2000, core_examples=500),
        sample=replace(_SAMPLE, every_steps=2000),
    )


def nanochat_tiny(
    *, depth: int = tiny.DEPTH, horizon: Horizon | None = None, own: NanochatArguments = TINY
) -> RunConfig:
    """The same in minutes on two cores: depth 4, 3 tokens a parameter.

    It has everything of `nanochat` but CORE, whose tasks would have to be downloaded and are chance at this size.
    """
    model = tiny_model(depth, aspect=own.aspect_ratio, head_dim=own.head_dim)
    return tiny_form(
        nanochat(horizon=horizon or _ratio(own)),
        model,
        recipe_arguments=_given(own, TINY),
        batch=replace(tiny.BATCH, total_tokens=own.total_batch_size),
        optim=_optimizer(model, own),
        eval=EvalConfig(every_steps=100, at_end=False, tokens=tiny.EVAL_TOKENS),
        sample=replace(_SAMPLE, every_steps=250),
    )


def model_for_depth(depth: int, *, aspect: int, head_dim: int, vocab_size: int, seq_len: int) -> ModelConfig:
    """The network of nanochat and autoresearch, whose parts are the defaults of ModelConfig."""
    shape = shape_for_depth(depth, aspect=aspect, head_dim=head_dim, vocab_size=vocab_size, seq_len=seq_len)
    return ModelConfig(
        n_layer=shape.n_layer, n_embd=shape.n_embd, n_head=shape.n_head, seq_len=seq_len, window_pattern="SSSL"
    )


def tiny_model(depth: int, *, aspect: int = tiny.ASPECT, head_dim: int = tiny.HEAD_DIM) -> ModelConfig:
    """The same network in the tiny forms' size."""
    size = {"vocab_size": tiny.VOCAB_SIZE, "seq_len": tiny.SEQ_LEN}
    return model_for_depth(depth, aspect=aspect, head_dim=head_dim, **size)


_RUNTIME = RuntimeConfig(allocator="expandable_segments:True")  # PYTORCH_ALLOC_CONF at the top of base_train.py
_SAMPLE = SampleConfig(prompts=PROMPTS, max_tokens=16, temperature=0.0, top_k=None)


def _ratio(own: NanochatArguments) -> Horizon:
    return Horizon(amount=own.target_param_data_ratio, unit="tokens_per_param")


def _optimizer(model: ModelConfig, own: NanochatArguments) -> OptimConfig:
    """The learning rates scaled to batch and width, the weight decay to depth."""
    scale = lr_scale_for_batch(own.total_batch_size)
    return muon_and_adamw(
        model.n_embd,
        matrix_lr=own.matrix_lr * scale,
        embedding_lr=own.embedding_lr,
        head_lr=own.unembedding_lr,
        scalar_lr=own.scalar_lr,
        beta1=own.adam_beta1,
        beta2=own.adam_beta2,
        weight_decay=weight_decay_for_depth(own.weight_decay, model.n_layer),
        adamw_scale=scale,
    )


def _given(own: NanochatArguments, default: NanochatArguments) -> tuple[str, ...]:
    """NAME=VALUE (JSON) of every argument that is not at its default."""
    values = {field.name: getattr(own, field.name) for field in fields(own)}
    return tuple(f"{name}={json.dumps(value)}" for name, value in values.items() if value != getattr(default, name))
