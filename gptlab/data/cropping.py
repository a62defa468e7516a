"""nanochat's rows: an endless stream of documents, packed best-fit; what does not fit is dropped.

Source: nanochat/dataloader.py (February 2026); `make_dataloader` in autoresearch's prepare.py does the same.

    refill   while fewer than `buffer_documents` wait, the next `REFILL_DOCUMENTS` of the stream join them. A pass over
             the documents ends with what is left of it, and the next pass begins in the same buffer.
    place    the longest waiting document that fits into the gap; where none does, the beginning of the shortest one.
             Ties go to the one that came first.

Every row is full, and no row knows where an epoch ends. The stream depends on all documents before it, so it is
planned in parts, each from the buffer that the part before it left.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gptlab.data.packing import Packing, document_contents, kept_arrays
from gptlab.data.tokens.shards import TokenSplit

REFILL_DOCUMENTS = 128
"""tokenizer_batch_size of both programs."""
PART_DOCUMENTS = 1 << 16
"""Documents in a part, at least: an eighth of a second of planning, however large the corpus."""
CROP_VERSION = 2
"""Raise it when the rows change, so that cached packings are made again."""
_ARRIVALS = 1 << 40
"""More documents than any stream delivers."""


class Buffer(NamedTuple):
    """The documents that wait between two rows. Number i of the stream is document i % n_documents."""

    waiting: np.ndarray  # (n,) int64: numbers in the stream
    arrived: int
    """Documents that the stream has delivered so far."""


EMPTY = Buffer(np.empty(0, dtype=np.int64), 0)


class CroppedRows:
    """nanochat's rows in nanochat's order, the same for every seed. An epoch is a number of rows: those that first take
    as many documents as the split has. The stream itself continues across epochs.

    Rows of the first epoch are planned at once and kept in `cache_folder`. Later ones are planned when they are first
    read, with everything in between: a run that is resumed in its third epoch plans the second.
    """

    def __init__(
        self, split: TokenSplit, seq_len: int, bos_id: int, buffer_documents: int, cache_folder: Path | None
    ) -> None:
        self.seq_len = seq_len
        self.split = split
        self._bos_id = bos_id
        self._buffer_documents = buffer_documents
        self._starts, self._lengths = document_contents(split)
        name, arrays = f"crop-{seq_len}-{buffer_documents}-v{CROP_VERSION}", (*Packing._fields, "waiting", "arrived")
        make = self._plan_first_epoch
        *packing, waiting, arrived = kept_arrays(cache_folder, name, arrays, make) if cache_folder else make()
        self.first_epoch = Packing(*packing)
        self.rows_per_epoch = self.first_epoch.n_rows
        self._first_rows = [0, self.rows_per_epoch]  # of each part, and of the next one
        self._buffers = [EMPTY, Buffer(waiting, int(arrived[0]))]  # before each part, and before the next one
        # Two are kept: a step may need both sides of a border.
        self._plan = lru_cache(maxsize=2)(lambda part: self._plan_part(self._buffers[part], PART_DOCUMENTS))

    def read(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wanted = epoch * self.rows_per_epoch + indices
        while len(wanted) and wanted.max() >= self._first_rows[-1]:
            packing, after = self._plan(len(self._first_rows) - 1)
            self._first_rows.append(self._first_rows[-1] + packing.n_rows)
            self._buffers.append(after)
        rows = np.empty((len(wanted), self.seq_len + 1), dtype=np.int32)
        parts = np.searchsorted(self._first_rows, wanted, side="right") - 1
        for part in np.unique(parts).tolist():
            packing = self._plan(part)[0] if part else self.first_epoch
            here = parts == part
            within = wanted[here] - self._first_rows[part]
            rows[here] = packing.read(self.split, within, self.seq_len + 1, self._bos_id)
        return rows[:, :-1], rows[:, 1:]

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return np.full(len(indices), self.seq_len, dtype=np.int64)

    def _plan_first_epoch(self) -> Sequence[np.ndarray]:
        """The rows that take as many documents as there are, and the buffer after them. Of a small corpus some come
        twice and others not at all: the buffer holds several passes."""
        packing, after = self._plan_part(EMPTY, len(self._lengths))
        return (*packing, after.waiting, np.array([after.arrived]))

    def _plan_part(self, buffer: Buffer, take_documents: int) -> tuple[Packing, Buffer]:
        """The rows from `buffer` on, until `take_documents` are taken, and the buffer after them.

        The buffer is a sorted list of integers, each of which encodes the slots that a document needs and, among
        equals, how early it came: 1 to 2 microseconds a document.
        """
        lengths, n_documents = self._lengths, len(self._lengths)
        arrived = buffer.arrived
        needs = lengths[buffer.waiting % n_documents] + 1  # with its BOS
        keys = sorted(
            need * _ARRIVALS - number for need, number in zip(needs.tolist(), buffer.waiting.tolist(), strict=True)
        )
        taken, used, row_ends = array("q"), array("q"), array("q", [0])
        while len(taken) < take_documents:
            gap = self.seq_len + 1
            while gap:
                while len(keys) < self._buffer_documents:
                    first = arrived % n_documents
                    batch = lengths[first : first + REFILL_DOCUMENTS].tolist()
                    keys += [(length + 1) * _ARRIVALS - number for number, length in enumerate(batch, arrived)]
                    keys.sort()
                    arrived += len(batch)
                position = bisect_right(keys, gap * _ARRIVALS) - 1
                if position < 0:
                    shortest = -(-keys[0] // _ARRIVALS)
                    position = bisect_right(keys, shortest * _ARRIVALS) - 1
                key = keys.pop(position)
                taken.append(-key % _ARRIVALS)
                used.append(min(-(-key // _ARRIVALS), gap))
                gap -= used[-1]
            row_ends.append(len(taken))
        packing = Packing(
            row_segments=np.array(row_ends, dtype=np.int64),
            segment_starts=self._starts[np.array(taken, dtype=np.int64) % n_documents],
            segment_lengths=np.array(used, dtype=np.int64) - 1,
        )
        waiting = np.array(sorted(-key % _ARRIVALS for key in keys), dtype=np.int64)
        return packing, Buffer(waiting, arrived)
