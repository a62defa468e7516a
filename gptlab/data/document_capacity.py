"""How many documents the micro-batches of a run may hold, for `data.mask_documents`."""

from __future__ import annotations

import numpy as np

from gptlab.data.rows import Pair, RowSource

TYPICAL_TOKENS = 256
"""The first guess is one document for so many tokens, a quarter of the mean in FineWeb-Edu, and two a row."""


class DocumentCapacity:
    """The number of documents that a micro-batch may hold. It is the same for all batches, since a compiled model would
    be compiled again for another, and is doubled when rows that were read hold more."""

    def __init__(self, bos_id: int, micro_sequences: int, seq_len: int) -> None:
        self.bos_id, self.micro_sequences = bos_id, micro_sequences
        self.documents = micro_sequences * max(2, seq_len // TYPICAL_TOKENS)

    def counted(self, rows: RowSource) -> RowSource:
        """The same rows, counted when they are read: on the host, before the device has them."""
        return _CountedRows(rows, self)

    def add(self, inputs: np.ndarray) -> None:
        """Count the documents of rows (n, seq_len). A micro-batch may hold any of these rows, and others that are read
        for another epoch."""
        is_bos = inputs == self.bos_id
        counts = 1 + (is_bos[:, 1:] & ~is_bos[:, :-1]).sum(1)
        most = self.micro_sequences * int(counts.max())
        while self.documents < most:
            self.documents *= 2


class _CountedRows:
    def __init__(self, rows: RowSource, capacity: DocumentCapacity) -> None:
        self._rows, self._capacity = rows, capacity
        self.seq_len, self.rows_per_epoch = rows.seq_len, rows.rows_per_epoch

    def read(self, epoch: int, indices: np.ndarray) -> Pair:
        pair = self._rows.read(epoch, indices)
        self._capacity.add(pair[0])
        return pair

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return self._rows.target_counts(epoch, indices)
