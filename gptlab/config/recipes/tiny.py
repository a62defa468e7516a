"""What the tiny forms of the four lineages share, so that their bits per byte can be compared: text, split, vocabulary,
validation set, context, batch, and about the same network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gptlab.config.model import ModelConfig
from gptlab.config.run import BatchConfig, DataConfig, Rows, RunConfig, TokenizerConfig

DEPTH = 4
HEAD_DIM = 64
ASPECT = 32  # width 128: the best of the shapes tried in three minutes of two cores (docs/LOG.md, 2026-11-20)
WIDTH = DEPTH * ASPECT
SEQ_LEN = 256
VOCAB_SIZE = 4096
EVAL_TOKENS = 131_072

TOKENIZER = TokenizerConfig(kind="bpe", vocab_size=VOCAB_SIZE)
BATCH = BatchConfig(total_tokens=2 * 16 * SEQ_LEN, micro_sequences=16)
"""Two micro-batches: gradients are accumulated, as in all four."""


def tiny_form(of: RunConfig, model: ModelConfig, **changes: Any) -> RunConfig:
    """A recipe with a tiny `model`, and what all tiny forms share. `changes`: fields of RunConfig."""
    evaluation = replace(of.eval, tokens=EVAL_TOKENS)
    shared: dict[str, Any] = {
        "tokenizer": TOKENIZER,
        "data": tiny_data(of.data.rows),
        "batch": BATCH,
        "eval": evaluation,
    }
    return replace(of, recipe=f"{of.recipe}-tiny", model=model, **(shared | changes))


def tiny_data(rows: Rows) -> DataConfig:
    """The standard library's sources, with one document in twenty held out: no download."""
    return DataConfig(source=("stdlib",), split="hash", val_fraction=0.05, rows=rows)
