"""Documents packed into rows, best-fit: planned once for a whole split, from document lengths alone.

A row has `seq_len + 1` slots: `seq_len` inputs and, one later, `seq_len` targets. It is filled with *segments*, each a
BOS and then consecutive tokens of one document. A document longer than a row becomes several segments. Each has its own
BOS, from which its first token is predicted, so nothing overlaps and every token after a document's BOS is a target
exactly once.

    cut   full rows are cut off long documents; the rest is placed best-fit; a gap that nothing fits is filled by
          cutting the longest document at hand, whose rest goes back. No token is lost. Padding is only in gaps too
          small to be worth a cut (below 1/128 of a row) and at the end of the last row.
    pad   as cut, but a gap stays empty: no document is cut that need not be (validation).

nanochat's own rows, which drop what does not fit, are in `cropping.py`.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from gptlab.config.errors import UserError
from gptlab.data.tokens.shards import TokenSplit, load_array
from gptlab.runtime.files.cache import cached_folder

IGNORED = -1
"""A target that does not count."""
SMALLEST_CUT = 1 / 128
"""A smaller gap, as a share of a row, is padded: this bounds padding under 1% whatever the lengths, and avoids cuts
that would leave a few tokens without context."""
CUT_VERSION = 1
"""Raise it when `pack_documents` places differently, so that kept packings are made again."""


class Packing(NamedTuple):
    """Which segments each row holds."""

    row_segments: np.ndarray  # (n_rows + 1,) int64: the segments of row i are row_segments[i] to row_segments[i + 1]
    segment_starts: np.ndarray  # (n_segments,) int64: position in the split of the first token after the BOS
    segment_lengths: np.ndarray  # (n_segments,) int64: tokens after the BOS

    @property
    def n_rows(self) -> int:
        return len(self.row_segments) - 1

    def segments_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All segments of `rows` (n,), row after row: (position of its row in `rows`, index of the segment)."""
        first, end = self.row_segments[rows], self.row_segments[rows + 1]
        counts = end - first
        return np.repeat(np.arange(len(rows)), counts), np.repeat(first, counts) + _ranges(counts)

    def read(self, split: TokenSplit, rows: np.ndarray, slots: int, bos: int) -> np.ndarray:
        """Tokens of `rows` (n,), `bos` before each segment, IGNORED where nothing is: (n, slots) int32."""
        row_of, segments = self.segments_of(rows)
        starts, lengths = self.segment_starts[segments], self.segment_lengths[segments]
        # The slot of each segment's BOS: after the segments before it in the same row.
        ends = np.cumsum(lengths + 1)
        row_first = np.searchsorted(row_of, np.arange(len(rows)))
        before_row = np.concatenate([[0], ends])[row_first]
        bos_at = row_of * slots + ends - (lengths + 1) - before_row[row_of]
        within = _ranges(lengths)
        tokens = np.full(len(rows) * slots, IGNORED, dtype=np.int32)
        tokens[bos_at] = bos
        tokens[np.repeat(bos_at + 1, lengths) + within] = split.take(np.repeat(starts, lengths) + within)
        return tokens.reshape(len(rows), slots)


def document_contents(split: TokenSplit) -> tuple[np.ndarray, np.ndarray]:
    """Position and number of the tokens after each document's BOS: (n_documents,) int64 each."""
    return split.document_starts[:-1] + 1, np.diff(split.document_starts) - 1


def cut_packing(split: TokenSplit, seq_len: int, buffer_documents: int, cache_folder: Path | None) -> Packing:
    """The `cut` packing of all documents of `split`, kept in `cache_folder` (None: not kept)."""
    starts, lengths = document_contents(split)
    make = partial(pack_documents, starts, lengths, seq_len, overhang="cut", buffer_documents=buffer_documents)
    if cache_folder is None:
        return make()
    name = f"cut-{seq_len}-{buffer_documents}-v{CUT_VERSION}"
    return Packing(*kept_arrays(cache_folder, name, Packing._fields, make))


def pack_documents(
    content_starts: np.ndarray,  # (n_documents,) int64: position of the token after each document's BOS
    content_lengths: np.ndarray,  # (n_documents,) int64: tokens after it
    seq_len: int,
    *,
    overhang: Literal["cut", "pad"],
    buffer_documents: int,
) -> Packing:
    """Plan every row of an epoch. Documents are considered in the order given, `buffer_documents` at a time."""
    # Full rows need no search: seq_len tokens after a BOS fill one exactly.
    n_full = content_lengths // seq_len
    full_starts = np.repeat(content_starts, n_full) + seq_len * _ranges(n_full)
    has_rest = (content_lengths % seq_len > 0) | (content_lengths == 0)
    rest_starts = (content_starts + n_full * seq_len)[has_rest]
    rest_lengths = (content_lengths % seq_len)[has_rest]
    rows, items, offsets, lengths = _best_fit(rest_lengths, seq_len + 1, overhang == "cut", buffer_documents).T
    segment_rows = np.concatenate([np.arange(len(full_starts)), rows + len(full_starts)])
    n_rows = int(segment_rows[-1]) + 1 if len(segment_rows) else 0
    return Packing(
        row_segments=np.searchsorted(segment_rows, np.arange(n_rows + 1)).astype(np.int64),
        segment_starts=np.concatenate([full_starts, rest_starts[items] + offsets]),
        segment_lengths=np.concatenate([np.full(len(full_starts), seq_len, dtype=np.int64), lengths]),
    )


def _best_fit(
    item_lengths: np.ndarray,  # (n,) int64, below `slots`, without the BOS that each part of an item needs
    slots: int,
    cut: bool,
    buffer_size: int,
) -> np.ndarray:
    """Fill rows of `slots` one after the other, always with the longest item of the buffer that fits the gap; where
    none does, with the beginning of the longest (`cut`), else with nothing.

    Ties go to the item that came first. Returns, for each placed part, its row, its item, its offset in the item and
    its length: (n_parts, 4) int64. The buffer has a heap of items for each length, and a sorted list of the lengths
    that it has: 1 to 2 microseconds an item, however large it is.
    """
    lengths = item_lengths.tolist()
    offsets = [0] * len(lengths)
    waiting: list[list[int]] = [[] for _ in range(slots)]  # at each length, its items
    in_use: list[int] = []  # lengths that have items
    placed: list[tuple[int, int, int, int]] = []
    smallest_cut = max(2, int(slots * SMALLEST_CUT)) if cut else slots + 1
    row, gap, arrived, used_up = 0, slots, 0, 0

    def put(item: int) -> None:
        if not waiting[lengths[item]]:
            insort(in_use, lengths[item])
        heappush(waiting[lengths[item]], item)

    while in_use or arrived < len(lengths):
        while arrived < len(lengths) and arrived - used_up < buffer_size:
            put(arrived)
            arrived += 1
        position = bisect_right(in_use, gap - 1) - 1  # the last one that fits after its BOS; -1: the longest
        if position < 0 and gap < smallest_cut:
            row, gap = row + 1, slots
            continue
        whole = in_use[position]
        item = heappop(waiting[whole])
        if not waiting[whole]:
            del in_use[position]
        length = min(whole, gap - 1)
        placed.append((row, item, offsets[item], length))
        gap -= length + 1
        if length < whole:
            offsets[item] += length
            lengths[item] -= length
            put(item)
        else:
            used_up += 1
    return np.array(placed, dtype=np.int64).reshape(-1, 4)


def _ranges(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, and so on."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def kept_arrays(
    cache_folder: Path, name: str, arrays: Sequence[str], make: Callable[[], Sequence[np.ndarray]]
) -> Sequence[np.ndarray]:
    """What `make` returns, an int64 array for each name in `arrays`; read from `plans/NAME` in the cache if there."""

    def build(temporary: Path) -> dict[str, Any]:
        made = make()
        for array, values in zip(arrays, made, strict=True):
            np.save(temporary / f"{array}.npy", values)
        return {"rows": len(made[0]) - 1, "segments": len(made[1])}

    folder = cache_folder / "plans" / name
    try:
        cached_folder(folder, build, what="packing plan")
    except UserError:  # a cache that is shared read-only, or full: a packing takes seconds and can live in memory
        return make()
    return [load_array(folder / f"{array}.npy", np.dtype("<i8"), mapped=True) for array in arrays]
