"""nanoGPT's runs (train.py and its config files): LayerNorm, learned positions, GELU, a tied head, AdamW.

Told otherwise than there: nanoGPT makes one update more than max_iters (here: as many as the horizon says), and
estimates both losses on random windows, anew each time (here: always on the same targets, so that two evaluations
differ by the weights and nothing else; the same number of them, where the text has that many).

A depth is the number of layers and nothing else. The warm-up is counted in steps, as nanoGPT's flags count it.
"""

from __future__ import annotations

from dataclasses import replace

from gptlab.config.data import DataConfig, TokenizerConfig
from gptlab.config.errors import ConfigError, require_positive
from gptlab.config.gpt2_sizes import GPT2_SIZES
from gptlab.config.horizon import Horizon, chosen_horizon, share_of_run
from gptlab.config.model import ModelConfig
from gptlab.config.optim import AdamWConfig, OptimConfig, ScheduleConfig
from gptlab.config.recipes import tiny
from gptlab.config.run import BatchConfig, CheckpointConfig, EvalConfig, RunConfig, RuntimeConfig
from gptlab.config.scaling import Machine

TINY_PRETRAINED = "runs/nanogpt-gpt2-124m-tiny"
"""Where `nanogpt/finetune-tiny` looks for weights unless told otherwise."""


def nanogpt_shakespeare_char(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """nanoGPT: characters of Shakespeare, 10.6M parameters, 5000 steps."""
    return _character_run(
        "nanogpt/shakespeare-char",
        source="tinyshakespeare",
        model=_model(6 if depth is None else depth, n_embd=384, n_head=6, seq_len=256, dropout=0.2),
        batch=BatchConfig(total_tokens=64 * 256, micro_sequences=64),
        horizon=chosen_horizon(horizon, minutes, Horizon(amount=5000, unit="steps")),
        of_steps=5000,
        evaluation=_both_losses(every_steps=250, tokens=200 * 64 * 256),
    )


def nanogpt_shakespeare_char_tiny(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """The same on two cores: 4 x 128, characters of Python's sources."""
    return _character_run(
        "nanogpt/shakespeare-char-tiny",
        source="stdlib",
        model=_tiny_model(tiny.DEPTH if depth is None else depth, n_head=4, dropout=0.2),
        batch=BatchConfig(total_tokens=2 * 8 * tiny.SEQ_LEN, micro_sequences=8),
        horizon=chosen_horizon(horizon, minutes, tiny.THREE_MINUTES),
        of_steps=5000,
        evaluation=_both_losses(every_steps=250, tokens=tiny.EVAL_TOKENS),
    )


def nanogpt_shakespeare_char_cpu(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """nanoGPT's CPU example: 4 x 128, context 64, 2000 steps, float32.

    Its README's flags leave 20 batches for each estimate of a loss. Here the validation loss is that of the whole text.
    """
    return _character_run(
        "nanogpt/shakespeare-char-cpu",
        source="tinyshakespeare",
        model=_model(4 if depth is None else depth, n_embd=128, n_head=4, seq_len=64),
        batch=BatchConfig(total_tokens=12 * 64, micro_sequences=12),
        horizon=chosen_horizon(horizon, minutes, Horizon(amount=2000, unit="steps")),
        of_steps=2000,
        evaluation=EvalConfig(every_steps=250, train_tokens=20 * 12 * 64),
        runtime=RuntimeConfig(device="cpu", dtype="float32"),
    )


def nanogpt_shakespeare_char_cpu_tiny(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """The same in one minute: 2 x 64, characters of Python's sources."""
    return _character_run(
        "nanogpt/shakespeare-char-cpu-tiny",
        source="stdlib",
        model=_model(2 if depth is None else depth, n_embd=64, n_head=4, seq_len=64),
        batch=BatchConfig(total_tokens=2 * 12 * 64, micro_sequences=12),
        horizon=chosen_horizon(horizon, minutes, Horizon(amount=60.0, unit="seconds")),
        of_steps=2000,
        evaluation=EvalConfig(every_steps=250, tokens=tiny.EVAL_TOKENS, train_tokens=20 * 12 * 64),
        runtime=RuntimeConfig(device="cpu", dtype="float32"),
    )


def nanogpt_gpt2_124m(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """nanoGPT: GPT-2 (124M) again, on OpenWebText, 600,000 steps."""
    horizon = chosen_horizon(horizon, minutes, Horizon(amount=600_000, unit="steps"))
    return RunConfig(
        recipe="nanogpt/gpt2-124m",
        model=_model(12 if depth is None else depth, n_embd=768, n_head=12, seq_len=1024),
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


def nanogpt_gpt2_124m_tiny(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """The same in three minutes on two cores: depth 4, width 128.

    Rate, beta2 and share of warm-up are those that nanoGPT itself gives its small networks (the CPU example): those of
    the 124M, for 600,000 steps, have not left the ground after 500.
    """
    horizon = chosen_horizon(horizon, minutes, tiny.THREE_MINUTES)
    return RunConfig(
        recipe="nanogpt/gpt2-124m-tiny",
        model=_tiny_model(tiny.DEPTH if depth is None else depth),
        tokenizer=tiny.TOKENIZER,
        data=tiny.tiny_data("random"),
        batch=tiny.BATCH,
        horizon=horizon,
        optim=_adamw(lr=1e-3, beta2=0.99),
        schedule=_cosine(100, horizon, of_steps=2000),
        eval=_both_losses(every_steps=100, tokens=tiny.EVAL_TOKENS),
        checkpoint=CheckpointConfig(save_best=True),
    )


def nanogpt_finetune(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """nanoGPT: 20 steps on Shakespeare from GPT-2's weights.

    nanoGPT's file names gpt2-xl, which needs 30 GB; `--init-from gpt2-xl` does the same here.
    """
    _refuse_depth(depth)
    return RunConfig(
        recipe="nanogpt/finetune",
        init_from="gpt2",
        model=GPT2_SIZES["gpt2"],
        tokenizer=TokenizerConfig(kind="gpt2"),
        data=DataConfig(source=("tinyshakespeare",), split="tail", val_fraction=0.1, rows="random"),
        batch=BatchConfig(total_tokens=32 * 1024, micro_sequences=1),
        horizon=chosen_horizon(horizon, minutes, Horizon(amount=20, unit="steps")),
        optim=_adamw(lr=3e-5, beta2=0.95),
        schedule=_CONSTANT,
        eval=_both_losses(every_steps=5, tokens=40 * 1024),
        checkpoint=CheckpointConfig(save_best=True),
    )


def nanogpt_finetune_tiny(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """The same from a run of nanogpt/gpt2-124m-tiny, in one minute.

    There is nothing to download, so there must be something to begin with: `TINY_PRETRAINED`, the folder that
    `gptlab train nanogpt/gpt2-124m-tiny --run-dir runs/nanogpt-gpt2-124m-tiny` leaves behind, or another run. `--data`
    names the text to tune on; without it, it is the one that the weights have seen.
    """
    _refuse_depth(depth)
    return RunConfig(
        recipe="nanogpt/finetune-tiny",
        init_from=TINY_PRETRAINED,
        model=_tiny_model(tiny.DEPTH),
        tokenizer=tiny.TOKENIZER,
        data=tiny.tiny_data("random"),
        batch=tiny.BATCH,
        horizon=chosen_horizon(horizon, minutes, Horizon(amount=60.0, unit="seconds")),
        optim=_adamw(lr=3e-5, beta2=0.95),
        schedule=_CONSTANT,
        eval=_both_losses(every_steps=25, tokens=tiny.EVAL_TOKENS),
        checkpoint=CheckpointConfig(save_best=True),
    )


# decay_lr = False; Muon's decay, should somebody put Muon in, stays constant as AdamW's does.
_CONSTANT = ScheduleConfig(warmdown_fraction=0.0, weight_decay_final=1.0)


def _cosine(warmup_iters: int, horizon: Horizon, *, of_steps: int) -> ScheduleConfig:
    """nanoGPT warms up by (it + 1) / (warmup_iters + 1), so that iteration warmup_iters has the full rate and begins
    the cosine. `optim.schedule` calls that a warm-up of warmup_iters + 1 steps: the same numbers, exactly."""
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
    """GPT-2's parts, but no biases, and GELU exact."""
    require_positive("depth", n_layer)
    return replace(
        GPT2_SIZES["gpt2"],
        n_layer=n_layer, n_embd=n_embd, n_head=n_head, seq_len=seq_len, dropout=dropout,
        vocab_size=None, activation="gelu", bias=False,
    )  # fmt: skip


def _tiny_model(n_layer: int, *, n_head: int = tiny.WIDTH // tiny.HEAD_DIM, dropout: float = 0.0) -> ModelConfig:
    return _model(n_layer, n_embd=tiny.WIDTH, n_head=n_head, seq_len=tiny.SEQ_LEN, dropout=dropout)


def _character_run(
    recipe: str,
    *,
    source: str,
    model: ModelConfig,
    batch: BatchConfig,
    horizon: Horizon,
    of_steps: int,
    evaluation: EvalConfig,
    runtime: RuntimeConfig | None = None,
) -> RunConfig:
    """config/train_shakespeare_char.py on data/shakespeare_char: the last tenth of the text validates."""
    return RunConfig(
        recipe=recipe,
        model=model,
        tokenizer=TokenizerConfig(kind="char"),
        data=DataConfig(source=(source,), split="tail", val_fraction=0.1, rows="random"),
        batch=batch,
        horizon=horizon,
        optim=_adamw(lr=1e-3, beta2=0.99),
        schedule=_cosine(100, horizon, of_steps=of_steps),
        eval=evaluation,
        checkpoint=CheckpointConfig(save_best=True),
        runtime=runtime or RuntimeConfig(),
    )


def _both_losses(*, every_steps: int, tokens: int) -> EvalConfig:
    """estimate_loss: of eval_iters batches of either text, which are `tokens` in all."""
    return EvalConfig(every_steps=every_steps, tokens=tokens, train_tokens=tokens)


def _refuse_depth(depth: int | None) -> None:
    if depth is not None:
        raise ConfigError("depth", depth, "the weights that a run begins with decide it: leave it out")
