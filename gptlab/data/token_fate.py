"""What becomes of every token in the first epoch, for `gptlab data inspect` and reports. Training does not need it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gptlab.data.cropping import CroppedRows
from gptlab.data.rows import PackedRows, TextRows, WindowRows


@dataclass(frozen=True, slots=True)
class TokenFate:
    """What becomes of every token of a split in the first epoch, as `gptlab data inspect` counts it:
    total = trained + context + cropped, and rows_per_epoch * seq_len = trained + repeated + added + padded."""

    total: int
    """Tokens of the split, each document's BOS included."""
    trained: int
    """Tokens that are a target, once or more often."""
    context: int
    """Tokens that are only ever an input: nothing comes before the first token of a row."""
    added: int
    """Targets that are a BOS put before the continuation of a document."""
    padded: int
    """Target positions with nothing in them."""
    repeated: int = 0
    """Targets that are one elsewhere already: of random rows, which are drawn with replacement, and of cropped rows,
    which take documents of a later pass while others of the first still wait."""

    @property
    def cropped(self) -> int:
        """Tokens in no row."""
        return self.total - self.trained - self.context


def token_fate(rows: object) -> TokenFate:
    """What becomes of every token in the first epoch. TypeError for rows that are not gptlab's."""
    match rows:
        case WindowRows():
            steps = np.diff(np.sort(rows.starts(0, np.arange(rows.rows_per_epoch))))
            # A row adds to the rows before it no more than its step from the one before.
            trained, in_rows = (
                int(np.minimum(steps, width).sum()) + width for width in (rows.seq_len, rows.seq_len + 1)
            )
            repeated = rows.rows_per_epoch * rows.seq_len - trained
            return TokenFate(rows.split.n_tokens, trained, in_rows - trained, added=0, padded=0, repeated=repeated)
        case TextRows():
            padded = rows.rows_per_epoch * rows.seq_len - rows.n_targets
            return TokenFate(rows.split.n_tokens, rows.n_targets, context=1, added=0, padded=padded)
        case CroppedRows():
            packing, longest = rows.first_epoch, np.zeros(rows.split.n_documents, dtype=np.int64)
            # Each segment begins with its document's BOS: a shorter one has nothing that a longer one has not.
            documents = np.searchsorted(rows.split.document_starts, packing.segment_starts - 1)
            np.maximum.at(longest, documents, packing.segment_lengths)
            # Nothing comes before the BOS that a row begins with.
            n_bos_targets = len(np.unique(np.delete(documents, packing.row_segments[:-1])))
            trained, context = int(longest.sum()) + n_bos_targets, len(np.unique(documents)) - n_bos_targets
            repeated = rows.rows_per_epoch * rows.seq_len - trained
            return TokenFate(rows.split.n_tokens, trained, context, added=0, padded=0, repeated=repeated)
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
