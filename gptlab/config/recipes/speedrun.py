"""The Muon record of the NanoGPT speedrun, October 2024 (modded-nanogpt).

A depth is the number of layers, and with it the scale of the attention branch. The warm-down is counted in steps, as in
modded-nanogpt.
"""

from __future__ import annotations

import math

from gptlab.config.fields import require_positive
from gptlab.config.length import Horizon, minutes, share_of_run, steps
from gptlab.config.model import ModelConfig
from gptlab.config.optim import AdamWConfig, MuonConfig, OptimConfig, ScheduleConfig
from gptlab.config.recipes import tiny
from gptlab.config.recipes.tiny import tiny_form
from gptlab.config.run import BatchConfig, DataConfig, EvalConfig, RunConfig, RuntimeConfig, TokenizerConfig

STEPS = 6200
WARMDOWN_STEPS = 1800
LR = 0.0036


def speedrun_muon_2024_10(*, depth: int = 12, horizon: Horizon = steps(STEPS)) -> RunConfig:
    """Muon's speedrun of October 2024: 124M, FineWeb, 6200 steps.

    Its published log ends in a validation loss of 3.2785 nats.

    The shards come by name (`gptlab data prepare fineweb10b-gpt2`), validation and all. Where modded-nanogpt's own
    data/cached_fineweb10B.py has put them already: `--data 'fineweb10B/fineweb_train_*.bin' --data.val-source
    'fineweb10B/fineweb_val_*.bin'`.
    """
    return RunConfig(
        recipe="speedrun/muon-2024-10",
        model=_model(depth, n_embd=768, n_head=12, seq_len=1024),
        tokenizer=TokenizerConfig(kind="gpt2"),
        data=DataConfig(source=("fineweb10b-gpt2",), rows="sequential"),
        batch=BatchConfig(total_tokens=512 * 1024, micro_sequences=64),
        horizon=horizon,
        optim=_OPTIMIZER,
        schedule=ScheduleConfig(warmdown_fraction=share_of_run(WARMDOWN_STEPS, horizon, STEPS), weight_decay_final=1.0),
        eval=EvalConfig(every_steps=125, tokens=10_485_760),
        runtime=RuntimeConfig(coordinate_descent_tuning=True),
    )


def speedrun_muon_2024_10_tiny(*, depth: int = tiny.DEPTH, horizon: Horizon = minutes(3)) -> RunConfig:
    """The same in three minutes on two cores: depth 4, width 128."""
    model = _model(depth, n_embd=tiny.WIDTH, n_head=tiny.WIDTH // tiny.HEAD_DIM, seq_len=tiny.SEQ_LEN)
    evaluation = EvalConfig(every_steps=100, tokens=tiny.EVAL_TOKENS)
    return tiny_form(speedrun_muon_2024_10(horizon=horizon), model, eval=evaluation)


def _model(n_layer: int, *, n_embd: int, n_head: int, seq_len: int) -> ModelConfig:
    require_positive("depth", n_layer)
    return ModelConfig(
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        seq_len=seq_len,
        norm="rmsnorm",
        rmsnorm_eps=1e-6,
        position="rope",
        activation="gelu",
        tied_head=True,
        qk_norm=False,
        value_embeddings=False,
        residual_lambdas=False,
        embedding_norm=False,
        logit_softcap=None,
        attention_residual_scale=1 / math.sqrt(2 * n_layer),
        init="torch",
    )


# AdamW updates the one table that is embedding and head, Muon everything else; nothing decays or is clipped.
_ADAMW = AdamWConfig(lr=LR, beta1=0.9, beta2=0.95, eps=1e-8)
_OPTIMIZER = OptimConfig(
    muon=MuonConfig(
        lr=0.1 * LR,
        momentum=0.95,
        momentum_start=0.95,
        momentum_ramp_steps=0,
        nesterov=True,
        orthogonalizer="newton_schulz",
        iterations=5,
        update_scale="max_side",
        normuon_beta2=None,
        weight_decay=0.0,
        cautious_decay=False,
        split_qkv=True,
    ),
    embedding=_ADAMW,
    # Nothing of these has AdamW there: for ablations.
    matrix=_ADAMW,
    value_embedding=_ADAMW,
    head=_ADAMW,
    residual_lambda=_ADAMW,
    x0_lambda=_ADAMW,
    vector=_ADAMW,
)
