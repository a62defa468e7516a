"""nanoGPT's runs (train.py and its config files): LayerNorm, learned positions, GELU, a tied head, AdamW.

Some things differ (docs/lineages.md). nanoGPT makes one update more than max_iters; here the horizon is exact. nanoGPT
estimates both losses on new random windows each time; here both are always measured on the same targets (as many, where
the text has that many), so that two evaluations differ only by the weights. nanoGPT also trains the 47 logits that pad
GPT-2's vocabulary.

A depth is the number of layers and nothing else. The warm-up is counted in steps, as by nanoGPT's flags.
"""

from __future__ import annotations

from dataclasses import replace

from gptlab.config.length import Horizon, minutes, share_of_run, steps
from gptlab.config.model import GPT2_SIZES, ModelConfig
from gptlab.config.optim import AdamWConfig, OptimConfig, ScheduleConfig
from gptlab.config.recipes import tiny
from gptlab.config.recipes.tiny import tiny_form
from gptlab.config.run import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    RunConfig,
    RuntimeConfig,
    TokenizerConfig,
)

TINY_PRETRAINED = "runs/nanogpt-gpt2-124m-tiny"
"""The folder in which `nanogpt/finetune-tiny` looks for weights by default."""


def nanogpt_shakespeare_char(*, depth: int = 6, horizon: Horizon = steps(5000)) -> RunConfig:
    """nanoGPT: characters of Shakespeare, 10.6M parameters, 5000 steps."""
    return RunConfig(
        recipe="nanogpt/shakespeare-char",
        model=_model(depth, n_embd=384, n_head=6, seq_len=256, dropout=0.2),
        tokenizer=TokenizerConfig(kind="char"),
        data=_last_tenth("tinyshakespeare"),
        batch=BatchConfig(total_tokens=64 * 256, micro_sequences=64),
        horizon=horizon,
        optim=_adamw(lr=1e-3, beta2=0.99),
        schedule=_cosine(100, horizon, of_steps=5000),
        eval=_both_losses(every_steps=250, tokens=200 * 64 * 256),
        checkpoint=CheckpointConfig(save_best=True),
    )


def nanogpt_shakespeare_char_tiny(*, depth: int = tiny.DEPTH, horizon: Horizon = minutes(3)) -> RunConfig:
    """The same on two cores: 4 x 128, characters of Python's sources."""
    return replace(
        nanogpt_shakespeare_char(horizon=horizon),
        recipe="nanogpt/shakespeare-char-tiny",
        model=_tiny_model(depth, n_head=4, dropout=0.2),
        data=_last_tenth("stdlib"),
        batch=BatchConfig(total_tokens=2 * 8 * tiny.SEQ_LEN, micro_sequences=8),
        eval=_both_losses(every_steps=250, tokens=tiny.EVAL_TOKENS),
    )


def nanogpt_shakespeare_char_cpu(*, depth: int = 4, horizon: Horizon = steps(2000)) -> RunConfig:
    """nanoGPT's CPU example: 4 x 128, context 64, 2000 steps, float32."""
    return replace(
        nanogpt_shakespeare_char(horizon=horizon),
        recipe="nanogpt/shakespeare-char-cpu",
        model=_model(depth, n_embd=128, n_head=4, seq_len=64),
        batch=BatchConfig(total_tokens=12 * 64, micro_sequences=12),
        schedule=_cosine(100, horizon, of_steps=2000),
        eval=_both_losses(every_steps=250, tokens=20 * 12 * 64),
        runtime=RuntimeConfig(device="cpu", dtype="float32"),
    )


def nanogpt_shakespeare_char_cpu_tiny(*, depth: int = 2, horizon: Horizon = minutes(1)) -> RunConfig:
    """The same in one minute: 2 x 64, characters of Python's sources."""
    return replace(
        nanogpt_shakespeare_char_cpu(horizon=horizon),
        recipe="nanogpt/shakespeare-char-cpu-tiny",
        model=_model(depth, n_embd=64, n_head=4, seq_len=64),
        data=_last_tenth("stdlib"),
        batch=BatchConfig(total_tokens=2 * 12 * 64, micro_sequences=12),
        eval=EvalConfig(every_steps=250, tokens=tiny.EVAL_TOKENS, train_tokens=20 * 12 * 64),
    )


def nanogpt_gpt2_124m(*, depth: int = 12, horizon: Horizon = steps(600_000)) -> RunConfig:
    """nanoGPT: GPT-2 (124M) again, on OpenWebText, 600,000 steps."""
    return RunConfig(
        recipe="nanogpt/gpt2-124m",
        model=_model(depth, n_embd=768, n_head=12, seq_len=1024),
        tokenizer=TokenizerConfig(kind="gpt2"),
        # data/openwebtext/prepare.py holds out one document of 2000.
        data=DataConfig(source=("openwebtext",), split="hash", val_fraction=0.0005, rows="random"),
        batch=BatchConfig(total_tokens=40 * 12 * 1024, micro_sequences=12),
        horizon=horizon,
        optim=_adamw(lr=6e-4, beta2=0.95),
        schedule=_cosine(2000, horizon, of_steps=600_000),
        eval=_both_losses(every_steps=1000, tokens=200 * 12 * 1024),
        # train.py's always_save_checkpoint, which this config file leaves on.
        checkpoint=CheckpointConfig(every_steps=1000, save_best=True),
    )


def nanogpt_gpt2_124m_tiny(*, depth: int = tiny.DEPTH, horizon: Horizon = minutes(3)) -> RunConfig:
    """The same in three minutes on two cores: depth 4, width 128.

    Learning rate, beta2 and share of warm-up are those that nanoGPT itself gives its small networks (the CPU example):
    with those of the 124M, made for 600,000 steps, the loss has hardly moved after 500.
    """
    return tiny_form(
        nanogpt_gpt2_124m(horizon=horizon),
        _tiny_model(depth),
        optim=_adamw(lr=1e-3, beta2=0.99),
        schedule=_cosine(100, horizon, of_steps=2000),
        eval=_both_losses(every_steps=100, tokens=tiny.EVAL_TOKENS),
        checkpoint=CheckpointConfig(save_best=True),
    )


def nanogpt_finetune(*, horizon: Horizon = steps(20)) -> RunConfig:
    """nanoGPT: 20 steps on Shakespeare from GPT-2's weights.

    nanoGPT's file names gpt2-xl, which needs 30 GB; `--init-from gpt2-xl` does the same here. The GELU is by tanh, with
    which OpenAI trained these weights; nanoGPT's is by erf.
    """
    return RunConfig(
        recipe="nanogpt/finetune",
        init_from="gpt2",
        model=GPT2_SIZES["gpt2"],
        tokenizer=TokenizerConfig(kind="gpt2"),
        data=_last_tenth("tinyshakespeare"),
        batch=BatchConfig(total_tokens=32 * 1024, micro_sequences=1),
        horizon=horizon,
        optim=_adamw(lr=3e-5, beta2=0.95),
        schedule=_CONSTANT,
        eval=_both_losses(every_steps=5, tokens=40 * 1024),
        checkpoint=CheckpointConfig(save_best=True),
    )


def nanogpt_finetune_tiny(*, horizon: Horizon = minutes(1)) -> RunConfig:
    """The same from a run of nanogpt/gpt2-124m-tiny, in one minute.

    Nothing is downloaded. The weights are those of `TINY_PRETRAINED`, the folder that `gptlab train
    nanogpt/gpt2-124m-tiny --run-dir runs/nanogpt-gpt2-124m-tiny` writes, or of another run (`--init-from`). `--data`
    names the text to tune on; the default is the text that the weights were trained on.
    """
    return tiny_form(
        nanogpt_finetune(horizon=horizon),
        _tiny_model(tiny.DEPTH),
        init_from=TINY_PRETRAINED,
        eval=_both_losses(every_steps=25, tokens=tiny.EVAL_TOKENS),
    )


# decay_lr = False. Muon's decay, in an ablation with Muon, stays constant as AdamW's does.
_CONSTANT = ScheduleConfig(warmdown_fraction=0.0, weight_decay_final=1.0)


def _cosine(warmup_iters: int, horizon: Horizon, *, of_steps: int) -> ScheduleConfig:
    """nanoGPT warms up by (it + 1) / (warmup_iters + 1), so that iteration warmup_iters has the full rate and starts
    the cosine. `optim.schedule` calls that a warm-up of warmup_iters + 1 steps: exactly the same numbers."""
    return ScheduleConfig(
        kind="cosine",
        warmup_fraction=share_of_run(warmup_iters + 1, horizon, of_steps),
        final_lr_scale=0.1,  # min_lr is a tenth of the rate everywhere
        weight_decay_final=1.0,
    )


def _adamw(*, lr: float, beta2: float) -> OptimConfig:
    """Decay 0.1 on every tensor of two or more dimensions, tables included; none on norms and biases."""
    matrix = AdamWConfig(lr=lr, beta1=0.9, beta2=beta2, eps=1e-8, weight_decay=0.1)
    vector = replace(matrix, weight_decay=0.0)
    return OptimConfig(
        matrix_optimizer="adamw",
        matrix=matrix,
        embedding=matrix,
        value_embedding=matrix,
        head=matrix,
        residual_lambda=vector,
        x0_lambda=vector,
        vector=vector,
        grad_clip=1.0,
    )


def _model(n_layer: int, *, n_embd: int, n_head: int, seq_len: int, dropout: float = 0.0) -> ModelConfig:
    """GPT-2's parts, but no biases and the exact GELU."""
    return replace(
        GPT2_SIZES["gpt2"],
        n_layer=n_layer, n_embd=n_embd, n_head=n_head, seq_len=seq_len, dropout=dropout,
        vocab_size=None, activation="gelu", bias=False,
    )  # fmt: skip


def _tiny_model(n_layer: int, *, n_head: int = tiny.WIDTH // tiny.HEAD_DIM, dropout: float = 0.0) -> ModelConfig:
    return _model(n_layer, n_embd=tiny.WIDTH, n_head=n_head, seq_len=tiny.SEQ_LEN, dropout=dropout)


def _last_tenth(source: str) -> DataConfig:
    """data/shakespeare_char/prepare.py: the last tenth of the text validates."""
    return DataConfig(source=(source,), split="tail", val_fraction=0.1, rows="random")


def _both_losses(*, every_steps: int, tokens: int) -> EvalConfig:
    """estimate_loss, whose eval_iters batches of either text hold `tokens` tokens."""
    return EvalConfig(every_steps=every_steps, tokens=tokens, train_tokens=tokens)
