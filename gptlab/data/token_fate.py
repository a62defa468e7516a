"""What becomes of every token of a split in one epoch: what `gptlab data inspect` counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gptlab.data.cropping import CroppedRows
from gptlab.data.rows import PackedRows, TextRows, WindowRows


@dataclass(frozen=True, slots=True)
class TokenFate:
    """total = trained + context + cropped, and rows_per_epoch * seq_len = trained + added + padded."""

    total: int
    """Tokens of the split, each document's BOS included; of cropped rows, those of the documents that the epoch takes,
    which are as many as the split has."""
    trained: int
    """Tokens that are a target once (random rows: drawn with replacement, so as many draws)."""
    context: int
    """Tokens that are only ever an input: nothing comes before the first token of a row."""
    added: int
    """Targets that are a BOS put before the continuation of a document."""
    padded: int
    """Target positions with nothing in them."""

    @property
    def cropped(self) -> int:
        """Tokens in no row."""
        return self.total - self.trained - self.context


def token_fate(rows: object) -> TokenFate:
    """TypeError for rows that are not gptlab's."""
    match rows:
        case WindowRows():
            return TokenFate(rows.split.n_tokens, rows.rows_per_epoch * rows.seq_len, context=1, added=0, padded=0)
        case TextRows():
            padded = rows.rows_per_epoch * rows.seq_len - rows.n_targets
            return TokenFate(rows.split.n_tokens, rows.n_targets, context=1, added=0, padded=padded)
        case CroppedRows():
            starts = rows.split.document_starts
            documents = np.searchsorted(starts, rows.first_epoch.segment_starts - 1)
            total = int((starts[documents + 1] - starts[documents]).sum())
            return TokenFate(total, rows.rows_per_epoch * rows.seq_len, rows.rows_per_epoch, added=0, padded=0)
        case PackedRows():
            packing, n_targets = rows.packing, rows.rows_per_epoch * rows.seq_len
            continues = ~np.isin(packing.segment_starts, rows.split.document_starts[:-1] + 1)
            bos_is_target = np.full(len(continues), rows.seed is not None)
            bos_is_target[packing.row_segments[:-1]] = False  # nothing comes before it
            added = int((continues & bos_is_target).sum())
            trained = int(packing.segment_lengths.sum() + (~continues & bos_is_target).sum())
            context = int((~continues & ~bos_is_target).sum())
            return TokenFate(rows.split.n_tokens, trained, context, added, padded=n_targets - trained - added)
    raise TypeError(f"cannot tell the fate of tokens in {type(rows).__name__}")
