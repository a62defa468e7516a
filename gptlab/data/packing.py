"""Which piece of which document stands in which row: planned once for a whole split, from document lengths alone.

A row has `seq_len + 1` slots: `seq_len` inputs and, one later, `seq_len` targets. It is filled with *segments*, each a
BOS and then consecutive tokens of one document. A document longer than a row becomes several segments; since each
has its own BOS, the first token of a continuation is predicted from that BOS, nothing overlaps, and every token behind
a document's BOS is a target exactly once.

    cut   full rows are cut off long documents; what remains is placed best-fit; a gap that nothing fits is filled by
          cutting the longest document at hand, whose rest goes back. Nothing is lost, only gaps too small to be worth
          a cut are padded (below 1/128 of a row), and the end of the last row.
    pad   as cut, but a gap stays empty: no document is cut that need not be (validation).

nanochat's own rows, which throw the overhang away, are in `cropping.py`.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import Literal

import numpy as np

Overhang = Literal["cut", "pad"]

# A gap below this share of a row is padded: bounds padding under 1% whatever the lengths, and spares cuts that would
# leave a few tokens without context.
SMALLEST_CUT = 1 / 128


@dataclass(frozen=True, slots=True)
class Plan:
    """Segments, row after row."""

    row_segments: np.ndarray  # (n_rows + 1,) int64: the segments of row i are row_segments[i] to row_segments[i + 1]
    segment_starts: np.ndarray  # (n_segments,) int64: position in the split of the first token behind the BOS
    segment_lengths: np.ndarray  # (n_segments,) int64: tokens behind the BOS

    @property
    def n_rows(self) -> int:
        return len(self.row_segments) - 1


def plan_rows(
    content_starts: np.ndarray,  # (n_documents,) int64: position of the token behind each document's BOS
    content_lengths: np.ndarray,  # (n_documents,) int64: tokens behind it
    seq_len: int,
    *,
    overhang: Overhang,
    buffer_documents: int,
) -> Plan:
    """Plan every row of an epoch. Documents are looked at in the order given, `buffer_documents` at a time."""
    # Full rows need no search: seq_len tokens behind a BOS fill one exactly.
    n_full = content_lengths // seq_len
    full_starts = np.repeat(content_starts, n_full) + seq_len * ranges(n_full)
    has_rest = (content_lengths % seq_len > 0) | (content_lengths == 0)
    rest_starts = (content_starts + n_full * seq_len)[has_rest]
    rest_lengths = (content_lengths % seq_len)[has_rest]
    rows, items, offsets, lengths = best_fit(rest_lengths, seq_len + 1, overhang=overhang, buffer_size=buffer_documents)
    segment_rows = np.concatenate([np.arange(len(full_starts)), rows + len(full_starts)])
    n_rows = int(segment_rows[-1]) + 1 if len(segment_rows) else 0
    return Plan(
        row_segments=np.searchsorted(segment_rows, np.arange(n_rows + 1)).astype(np.int64),
        segment_starts=np.concatenate([full_starts, rest_starts[items] + offsets]),
        segment_lengths=np.concatenate([np.full(len(full_starts), seq_len, dtype=np.int64), lengths]),
    )


def best_fit(
    item_lengths: np.ndarray,  # (n,) int64, without the BOS that each part of an item needs
    slots: int,
    *,
    overhang: Overhang,
    buffer_size: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Fill rows of `slots` one after the other, always with the longest item of the buffer that fits the gap.

    Ties go to the item that came first. Returns, for each placed part: its row, its item, its offset in the item and
    its length. The buffer is a sorted list of integers that hold (length, earliness), so that an item is found, taken
    and put back in O(log n) comparisons and one move of memory: 1 to 2 microseconds an item for a buffer of 1000.
    """
    lengths = item_lengths.tolist()
    offsets = [0] * len(lengths)
    earliest = len(lengths)  # the earliness of item i is earliest - i: of equal lengths, the first item sorts last
    base = earliest + 1
    keys: list[int] = []
    placed: list[tuple[int, int, int, int]] = []
    smallest_cut = max(2, int(slots * SMALLEST_CUT))
    row, gap, arrived = 0, slots, 0
    while True:
        while arrived < len(lengths) and len(keys) < buffer_size:
            insort(keys, lengths[arrived] * base + earliest - arrived)
            arrived += 1
        if not keys:
            break
        position = bisect_right(keys, gap * base - 1) - 1  # the last key with length + 1 (its BOS) <= gap
        fits = position >= 0
        if not fits:
            if overhang == "cut" and gap >= smallest_cut:
                position = bisect_right(keys, keys[-1] // base * base + earliest) - 1  # the first of the longest
            else:
                row, gap = row + 1, slots
                continue
        item = earliest - keys.pop(position) % base
        length = min(lengths[item], gap - 1)
        placed.append((row, item, offsets[item], length))
        gap -= length + 1
        if not fits:
            offsets[item] += length
            lengths[item] -= length
            insort(keys, lengths[item] * base + earliest - item)
        if gap == 0:
            row, gap = row + 1, slots
    table = np.array(placed, dtype=np.int64).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def ranges(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, and so on."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
