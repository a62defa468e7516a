"""nanochat's rows: an endless stream of documents, packed best-fit, the overhang of what does not fit thrown away.

Source: nanochat/dataloader.py (February 2026); `make_dataloader` in autoresearch's prepare.py does the same.

    refill   while fewer than `buffer_documents` wait, the next `REFILL_DOCUMENTS` of the stream join them. A pass over
             the documents ends with what is left of it, and the next pass begins behind it in the same buffer.
    place    the longest waiting document that fits into the gap; where none does, the beginning of the shortest one.
             Of equals, the first that came.

Every row is full, and no row knows where an epoch ends. The stream depends on all documents in front of it, so it is
planned in parts, each from the buffer that the part before it left behind.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from gptlab.data.packing import Plan

REFILL_DOCUMENTS = 128
"""tokenizer_batch_size of both programs."""
PART_DOCUMENTS = 1 << 16
"""Documents that a part takes, at least: an eighth of a second of planning, however large the corpus."""
_ARRIVALS = 1 << 40
"""More documents than any stream delivers."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """The documents that wait between two rows. Number i of the stream is document i % n_documents."""

    waiting: np.ndarray  # (n,) int64: numbers in the stream
    arrived: int
    """Documents that the stream has delivered so far."""


EMPTY = Buffer(np.empty(0, dtype=np.int64), 0)


def plan_part(
    content_starts: np.ndarray,  # (n_documents,) int64: position of the token behind each document's BOS
    content_lengths: np.ndarray,  # (n_documents,) int64: tokens behind it
    slots: int,
    buffer: Buffer,
    *,
    buffer_documents: int,
    take_documents: int,
) -> tuple[Plan, Buffer]:
    """The rows of `slots` tokens from `buffer` on, until `take_documents` are taken, and the buffer behind them.

    The buffer is a sorted list of integers, each of which holds the slots that a document needs and, among equals, how
    early it came: 1 to 2 microseconds a document.
    """
    n_documents = len(content_lengths)
    arrived = buffer.arrived
    needs = content_lengths[buffer.waiting % n_documents] + 1  # with its BOS
    keys = sorted(
        need * _ARRIVALS - number for need, number in zip(needs.tolist(), buffer.waiting.tolist(), strict=True)
    )
    taken: list[int] = []
    used: list[int] = []
    row_ends = [0]
    while len(taken) < take_documents:
        gap = slots
        while gap:
            while len(keys) < buffer_documents:
                first = arrived % n_documents
                batch = content_lengths[first : first + REFILL_DOCUMENTS].tolist()
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
    plan = Plan(
        row_segments=np.array(row_ends, dtype=np.int64),
        segment_starts=content_starts[np.array(taken, dtype=np.int64) % n_documents],
        segment_lengths=np.array(used, dtype=np.int64) - 1,
    )
    waiting = np.array(sorted(-key % _ARRIVALS for key in keys), dtype=np.int64)
    return plan, Buffer(waiting, arrived)


def plan_first_epoch(
    content_starts: np.ndarray,  # (n_documents,) int64
    content_lengths: np.ndarray,  # (n_documents,) int64
    slots: int,
    *,
    buffer_documents: int,
) -> tuple[Plan, Buffer]:
    """The rows that take as many documents as there are. Of a small corpus some come twice and others not at all: the
    buffer holds several passes."""
    parts: list[Plan] = []
    buffer, left = EMPTY, len(content_lengths)
    while left > 0:
        part, buffer = plan_part(
            content_starts, content_lengths, slots, buffer,
            buffer_documents=buffer_documents, take_documents=min(left, PART_DOCUMENTS),
        )  # fmt: skip
        left -= len(part.segment_starts)
        parts.append(part)
    before = np.cumsum([0, *(len(part.segment_starts) for part in parts)])
    segments = [part.row_segments[1:] + first for part, first in zip(parts, before[:-1], strict=True)]
    plan = Plan(
        row_segments=np.concatenate([np.zeros(1, dtype=np.int64), *segments]),
        segment_starts=np.concatenate([part.segment_starts for part in parts]),
        segment_lengths=np.concatenate([part.segment_lengths for part in parts]),
    )
    return plan, buffer


class CroppedStream:
    """The plan of every row of the stream. Rows of the first epoch are there at once. Those behind it are planned when
    they are first asked for, with everything in between: a run that is resumed in its third epoch plans the second."""

    def __init__(
        self,
        content_starts: np.ndarray,  # (n_documents,) int64
        content_lengths: np.ndarray,  # (n_documents,) int64
        slots: int,
        buffer_documents: int,
        first_epoch: Plan,
        buffer: Buffer,
    ) -> None:
        """`first_epoch`, `buffer`: those of `plan_first_epoch`."""
        self.first_epoch = first_epoch
        self._documents = content_starts, content_lengths
        self._slots = slots
        self._buffer_documents = buffer_documents
        self._first_rows = [0, first_epoch.n_rows]  # of each part, and of the next one
        self._buffers = [EMPTY, buffer]  # in front of each part, and of the next one
        self._recent: dict[int, Plan] = {}

    def parts(self, rows: np.ndarray) -> np.ndarray:
        """The part in which each of `rows` (n,) of the stream lies: (n,) int64."""
        while len(rows) and rows.max() >= self._first_rows[-1]:
            part = len(self._first_rows) - 1
            self._first_rows.append(self._first_rows[-1] + self._make(part).n_rows)
        return np.searchsorted(self._first_rows, rows, side="right") - 1

    def part(self, number: int) -> tuple[int, Plan]:
        """The first row of part `number`, which `parts` has named, and the plan of its rows."""
        if number == 0:
            return 0, self.first_epoch
        return self._first_rows[number], self._recent.get(number) or self._make(number)

    def _make(self, number: int) -> Plan:
        """Plan a part from the buffer in front of it. Two are kept: a step may need both sides of a border."""
        plan, behind = plan_part(
            *self._documents, self._slots, self._buffers[number],
            buffer_documents=self._buffer_documents, take_documents=PART_DOCUMENTS,
        )  # fmt: skip
        if number + 1 == len(self._buffers):
            self._buffers.append(behind)
        while len(self._recent) > 1:
            del self._recent[next(iter(self._recent))]
        self._recent[number] = plan
        return plan
