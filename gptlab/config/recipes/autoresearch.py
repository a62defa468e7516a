"""autoresearch (train.py and prepare.py): the best model after five minutes of the training clock.

AdamW's learning rates fall with the square root of the width, as in train.py's setup_optimizer; none depends on the
batch size.
"""

from __future__ import annotations

from gptlab.config.length import Horizon, minutes
from gptlab.config.optim import OptimConfig
from gptlab.config.recipes import tiny
from gptlab.config.recipes.nanochat import model_for_depth, tiny_model
from gptlab.config.recipes.tiny import tiny_form
from gptlab.config.run import BatchConfig, DataConfig, EvalConfig, RunConfig, TokenizerConfig
from gptlab.config.scaling import muon_and_adamw

VOCAB_SIZE = 8192


def autoresearch(*, depth: int = 8, horizon: Horizon = minutes(5)) -> RunConfig:
    """autoresearch: five minutes on the clock, depth 8.

    Long documents are cut where autoresearch crops them (`data.long_documents`), so that no token is lost. The clock
    excludes compilation; autoresearch instead excludes the first eleven steps.
    """
    model = model_for_depth(depth, aspect=64, head_dim=128, vocab_size=VOCAB_SIZE, seq_len=2048)
    return RunConfig(
        recipe="autoresearch",
        model=model,
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=VOCAB_SIZE, train_bytes=1_000_000_000),
        data=DataConfig(source=("climbmix",), rows="packed"),
        batch=BatchConfig(total_tokens=2**19, micro_sequences=128),
        horizon=horizon,
        optim=_optimizer(model.n_embd),
        eval=EvalConfig(at_start=False, tokens=40 * 2**19),
    )


def autoresearch_tiny(*, depth: int = tiny.DEPTH, horizon: Horizon = minutes(3)) -> RunConfig:
    """The same in three minutes on two cores: depth 4, width 128."""
    model = tiny_model(depth)
    return tiny_form(autoresearch(horizon=horizon), model, optim=_optimizer(model.n_embd))


def _optimizer(n_embd: int) -> OptimConfig:
    return muon_and_adamw(n_embd, matrix_lr=0.04, embedding_lr=0.6, head_lr=0.004, scalar_lr=0.5, weight_decay=0.2)
