"""autoresearch (train.py and prepare.py): whatever five minutes of the clock can teach.

The rates of AdamW fall with the root of the width, as in train.py's setup_optimizer; nothing depends on the batch.
"""

from __future__ import annotations

from gptlab.config.data import DataConfig, TokenizerConfig
from gptlab.config.horizon import Horizon, chosen_horizon
from gptlab.config.optim import OptimConfig
from gptlab.config.recipes import tiny
from gptlab.config.recipes.nanochat import model_for_depth, muon_and_adamw, tiny_model
from gptlab.config.run import BatchConfig, EvalConfig, RunConfig
from gptlab.config.scaling import Machine


def autoresearch(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """autoresearch: five minutes on the clock, depth 8.

    Rows cut long documents where autoresearch crops them (`data.long_documents`): no token of the corpus is lost. The
    clock leaves compilation out, instead of ten steps that train for nothing counted.
    """
    model = model_for_depth(8 if depth is None else depth, aspect=64, head_dim=128, vocab_size=8192, seq_len=2048)
    return RunConfig(
        recipe="autoresearch",
        model=model,
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=8192, train_bytes=1_000_000_000),
        data=DataConfig(source=("climbmix",), rows="packed"),
        batch=BatchConfig(total_tokens=2**19, micro_sequences=128),
        horizon=chosen_horizon(horizon, minutes, Horizon(amount=300.0, unit="seconds")),
        optim=_optimizer(model.n_embd),
        eval=EvalConfig(at_start=False, tokens=40 * 2**19),
    )


def autoresearch_tiny(
    *,
    depth: int | None = None,
    horizon: Horizon | None = None,
    minutes: float | None = None,
    machine: Machine | None = None,
) -> RunConfig:
    """The same in three minutes on two cores: depth 4, width 128."""
    model = tiny_model(depth)
    return RunConfig(
        recipe="autoresearch-tiny",
        model=model,
        tokenizer=tiny.TOKENIZER,
        data=tiny.tiny_data("packed"),
        batch=tiny.BATCH,
        horizon=chosen_horizon(horizon, minutes, tiny.THREE_MINUTES),
        optim=_optimizer(model.n_embd),
        eval=EvalConfig(at_start=False, tokens=tiny.EVAL_TOKENS),
    )


def _optimizer(n_embd: int) -> OptimConfig:
    return muon_and_adamw(n_embd, matrix_lr=0.04, embedding_lr=0.6, head_lr=0.004, scalar_lr=0.5, weight_decay=0.2)
