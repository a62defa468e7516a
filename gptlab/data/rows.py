"""Rows: what one sequence of a batch holds, as a pure function of (seed, epoch, index).

A row is `seq_len` inputs and `seq_len` targets, the targets one token ahead; a target of -1 does not count. Three ways
to make them stand behind one interface:

    packed      segments of documents by the plan of `packing.py`; each epoch permutes the rows. With
                `data.long_documents = "crop"`, nanochat's endless stream of rows (`cropping.py`), for every seed
    sequential  chunk i is tokens [i * seq_len, (i + 1) * seq_len], in file order, every epoch the same (speedrun)
    random      window starts drawn uniformly, with replacement, over the whole split (nanoGPT)

Validation rows know neither seed nor file order: documents are ordered by the hash of their content. Tokens that came
without documents are one text, validated from its first token on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gptlab.config.data import DataConfig
from gptlab.config.errors import ConfigError, UserError
from gptlab.data.cropping import Buffer, CroppedStream, plan_first_epoch
from gptlab.data.order import hashed, permuted
from gptlab.data.packing import Plan, plan_rows, ranges
from gptlab.data.tokens.shards import TokenSplit, load_array
from gptlab.runtime.files.cache import cached_folder

IGNORED = -1
# Raise one when its planner places differently, so that kept plans are made again.
CUT_PLAN_VERSION = 1
CROP_PLAN_VERSION = 2

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class TokenFate:
    """What becomes of every token in one epoch: total = trained + context + cropped, and
    rows_per_epoch * seq_len = trained + added + padded."""

    total: int
    """Tokens of the split, each document's BOS included; of cropped rows, those of the documents that the epoch takes,
    which are as many as the split has."""
    trained: int
    """Tokens that are a target once (random rows: drawn with replacement, so as many draws)."""
    context: int
    """Tokens that are only ever an input: nothing stands in front of the first token of a row."""
    cropped: int
    """Tokens in no row."""
    added: int
    """Targets that are a BOS put in front of the continuation of a document."""
    padded: int
    """Target positions with nothing in them."""


class RowSource(Protocol):
    seq_len: int
    rows_per_epoch: int

    @property
    def fate(self) -> TokenFate: ...

    def read(self, epoch: int, indices: np.ndarray) -> Pair:
        """Inputs and targets of rows `indices` (n,) of an epoch: (n, seq_len) int32 each, targets with -1."""
        ...

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        """Targets other than -1 in rows `indices` (n,): (n,) int64. Reads no tokens."""
        ...


def make_rows(
    split: TokenSplit, data: DataConfig, seq_len: int, bos_id: int | None, seed: int, cache_folder: Path | None
) -> RowSource:
    """Training rows as `data.rows` says; a packing plan is kept in `cache_folder` (None: not kept).

    Raises ConfigError where the split is shorter than one row or packed rows have no BOS to begin with.
    """
    if split.n_tokens < seq_len + 1:
        raise ConfigError(
            "model.seq_len", seq_len,
            f"the training text has only {split.n_tokens:,} tokens, and a row needs seq_len + 1 = {seq_len + 1:,}",
            split.n_tokens - 1 if split.n_tokens > 1 else None,
        )  # fmt: skip
    if data.rows == "sequential":
        return SequentialRows(split, seq_len)
    if data.rows == "random":
        return RandomRows(split, seq_len, seed)
    if bos_id is None:
        raise ConfigError("data.rows", "packed", "packed rows begin with BOS, and this tokenizer has none", "random")
    if data.long_documents == "crop":
        return CroppedRows(split, _cropped_stream(split, data, seq_len, cache_folder), seq_len, bos_id)
    return PackedRows(split, _kept_plan(split, data, seq_len, cache_folder), seq_len, bos_id, seed)


def validation_rows(
    split: TokenSplit, seq_len: int, bos_id: int | None, max_target_tokens: int | None = None
) -> RowSource:
    """The same validation targets for every seed, batch shape, file order and world size, each exactly once.

    With a BOS: documents in the order of their content hashes, cut into pieces that begin with BOS, packed without
    further cuts; BOS itself is no target. Without: the documents, in that order, form one text, whose consecutive
    chunks are the rows (only its first token is no target); so too for a split that is no documents but one text, which
    gives the speedrun's validation: targets 1, 2, ..., BOS among them. `max_target_tokens` keeps the front of that
    order, to the token. Raises UserError where there is nothing to predict.
    """
    order = np.argsort(split.content_hashes, kind="stable")
    starts, lengths = split.document_starts[:-1][order], np.diff(split.document_starts)[order]
    limit = split.n_tokens if max_target_tokens is None else max_target_tokens
    if bos_id is None or not split.in_documents:
        rows: RowSource = ChunkRows(split, starts, lengths, seq_len, limit)
    else:
        content = lengths - 1
        kept = np.clip(limit - (np.cumsum(content) - content), 0, content)
        some = kept > 0
        plan = plan_rows(
            starts[some] + 1, kept[some], seq_len, overhang="pad", buffer_documents=max(1, int(some.sum()))
        )
        rows = PackedRows(split, plan, seq_len, bos_id, seed=None)
    if rows.rows_per_epoch == 0:
        raise UserError("the validation text has nothing to predict: it needs at least two tokens; hold out more of it")
    return rows


class PackedRows:
    """Rows of BOS-led segments. Without a seed, rows keep the plan's order and a BOS is never a target."""

    def __init__(self, split: TokenSplit, plan: Plan, seq_len: int, bos_id: int, seed: int | None) -> None:
        self.seq_len = seq_len
        self.rows_per_epoch = plan.n_rows
        self._split = split
        self._plan = plan
        self._bos_id = bos_id
        self._seed = seed

    def read(self, epoch: int, indices: np.ndarray) -> Pair:
        bos = self._bos_id if self._seed is not None else IGNORED
        rows = planned_tokens(self._split, self._plan, self._plan_rows(epoch, indices), self.seq_len + 1, bos)
        inputs = np.where(rows[:, :-1] == IGNORED, np.int32(self._bos_id), rows[:, :-1])
        return inputs, rows[:, 1:]

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        row_of, segments = segments_of(self._plan, self._plan_rows(epoch, indices))
        bos_targets = 0 if self._seed is None else 1
        counts = np.bincount(row_of, self._plan.segment_lengths[segments] + bos_targets, minlength=len(indices))
        return counts.astype(np.int64) - bos_targets  # the BOS that a row begins with is no target

    @property
    def fate(self) -> TokenFate:
        plan, split = self._plan, self._split
        content = int(plan.segment_lengths.sum())
        n_segments = len(plan.segment_lengths)
        is_continuation = ~np.isin(plan.segment_starts, split.document_starts[:-1] + 1)
        n_continuations = int(is_continuation.sum())
        continued_rows = int(is_continuation[plan.row_segments[:-1]].sum())
        is_target = self._seed is not None
        placed_bos = n_segments - n_continuations
        bos_targets = placed_bos - (self.rows_per_epoch - continued_rows) if is_target else 0
        added = n_continuations - continued_rows if is_target else 0
        trained = content + bos_targets
        return TokenFate(
            total=split.n_tokens,
            trained=trained,
            context=placed_bos - bos_targets,
            cropped=split.n_tokens - content - placed_bos,
            added=added,
            padded=self.rows_per_epoch * self.seq_len - trained - added,
        )

    def _plan_rows(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        if self._seed is None:
            return indices
        return permuted(indices, self.rows_per_epoch, seed=self._seed, epoch=epoch)


def planned_tokens(split: TokenSplit, plan: Plan, rows: np.ndarray, slots: int, bos: int) -> np.ndarray:
    """The plan's `rows` (n,) as tokens, `bos` in front of each segment, IGNORED where nothing is: (n, slots) int32."""
    row_of, segments = segments_of(plan, rows)
    starts, lengths = plan.segment_starts[segments], plan.segment_lengths[segments]
    # Where each segment's BOS stands: behind the segments in front of it in the same row.
    ends = np.cumsum(lengths + 1)
    row_first = np.searchsorted(row_of, np.arange(len(rows)))
    before_row = np.concatenate([[0], ends])[row_first]
    bos_at = row_of * slots + ends - (lengths + 1) - before_row[row_of]
    within = ranges(lengths)
    tokens = np.full(len(rows) * slots, IGNORED, dtype=np.int32)
    tokens[bos_at] = bos
    tokens[np.repeat(bos_at + 1, lengths) + within] = split.take(np.repeat(starts, lengths) + within)
    return tokens.reshape(len(rows), slots)


def segments_of(plan: Plan, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All segments of the plan's `rows` (n,), row after row: (position of its row in `rows`, index in the plan)."""
    first, end = plan.row_segments[rows], plan.row_segments[rows + 1]
    counts = end - first
    return np.repeat(np.arange(len(rows)), counts), np.repeat(first, counts) + ranges(counts)


class CroppedRows:
    """nanochat's rows in nanochat's order, the same for every seed. An epoch is a number of rows: those that first take
    as many documents as the split has. The stream itself goes on across epochs."""

    def __init__(self, split: TokenSplit, stream: CroppedStream, seq_len: int, bos_id: int) -> None:
        self.seq_len = seq_len
        self.rows_per_epoch = stream.first_epoch.n_rows
        self._split = split
        self._stream = stream
        self._bos_id = bos_id

    def read(self, epoch: int, indices: np.ndarray) -> Pair:
        wanted = epoch * self.rows_per_epoch + indices
        rows = np.empty((len(wanted), self.seq_len + 1), dtype=np.int32)
        parts = self._stream.parts(wanted)
        for number in np.unique(parts).tolist():
            first_row, plan = self._stream.part(number)
            here = parts == number
            rows[here] = planned_tokens(self._split, plan, wanted[here] - first_row, self.seq_len + 1, self._bos_id)
        return rows[:, :-1], rows[:, 1:]

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return np.full(len(indices), self.seq_len, dtype=np.int64)

    @property
    def fate(self) -> TokenFate:
        plan, starts = self._stream.first_epoch, self._split.document_starts
        documents = np.searchsorted(starts, plan.segment_starts - 1)
        total = int((starts[documents + 1] - starts[documents]).sum())
        trained = self.rows_per_epoch * self.seq_len
        context = self.rows_per_epoch
        cropped = total - trained - context
        return TokenFate(total=total, trained=trained, context=context, cropped=cropped, added=0, padded=0)


class SequentialRows:
    def __init__(self, split: TokenSplit, seq_len: int) -> None:
        self.seq_len = seq_len
        self.rows_per_epoch = (split.n_tokens - 1) // seq_len
        self._split = split

    @property
    def fate(self) -> TokenFate:
        trained = self.rows_per_epoch * self.seq_len
        total = self._split.n_tokens
        return TokenFate(total=total, trained=trained, context=1, cropped=total - 1 - trained, added=0, padded=0)

    def read(self, epoch: int, indices: np.ndarray) -> Pair:
        rows = self._split.gather(self._starts(epoch, indices), self.seq_len + 1)
        return rows[:, :-1], rows[:, 1:]

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return np.full(len(indices), self.seq_len, dtype=np.int64)

    def _starts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        """First token of each row, (n,) int64."""
        return indices * self.seq_len


class RandomRows(SequentialRows):
    """As many rows an epoch as there are chunks, so that an epoch is the same amount of training either way."""

    def __init__(self, split: TokenSplit, seq_len: int, seed: int) -> None:
        super().__init__(split, seq_len)
        self._seed = seed

    def _starts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        n_starts = self._split.n_tokens - self.seq_len
        # The remainder favours small starts by n_starts / 2^64: nothing.
        return (hashed(indices, seed=self._seed, epoch=epoch) % np.uint64(n_starts)).astype(np.int64)


class ChunkRows:
    """Consecutive chunks of the documents given, read as one text in the order given; every epoch the same."""

    def __init__(
        self,
        split: TokenSplit,
        starts: np.ndarray,  # (n_documents,) int64
        lengths: np.ndarray,  # (n_documents,) int64
        seq_len: int,
        max_target_tokens: int,
    ) -> None:
        self.seq_len = seq_len
        self._split = split
        self._ends = np.cumsum(lengths)
        self._shifts = starts - (self._ends - lengths)  # place in the split minus place in the text
        self._n_targets = min(max(0, split.n_tokens - 1), max_target_tokens)
        self.rows_per_epoch = -(-self._n_targets // seq_len)

    @property
    def fate(self) -> TokenFate:
        total, trained = self._split.n_tokens, self._n_targets
        padded = self.rows_per_epoch * self.seq_len - trained
        return TokenFate(total=total, trained=trained, context=1, cropped=total - 1 - trained, added=0, padded=padded)

    def read(self, epoch: int, indices: np.ndarray) -> Pair:
        places = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        inside = np.minimum(places, self._n_targets)
        rows = self._split.take(inside + self._shifts[np.searchsorted(self._ends, inside, side="right")])
        return rows[:, :-1], np.where(places[:, 1:] <= self._n_targets, rows[:, 1:], IGNORED).astype(np.int32)

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return np.clip(self._n_targets - indices * self.seq_len, 0, self.seq_len).astype(np.int64)


_PLAN_ARRAYS = ("row_segments", "segment_starts", "segment_lengths")


def _kept_plan(split: TokenSplit, data: DataConfig, seq_len: int, cache_folder: Path | None) -> Plan:
    starts, lengths = _contents(split)
    buffer_documents = data.pack_buffer_documents

    def make() -> tuple[np.ndarray, ...]:
        return _arrays(plan_rows(starts, lengths, seq_len, overhang="cut", buffer_documents=buffer_documents))

    name = f"cut-{seq_len}-{buffer_documents}-v{CUT_PLAN_VERSION}"
    return Plan(*_kept_arrays(cache_folder, name, _PLAN_ARRAYS, make))


def _cropped_stream(split: TokenSplit, data: DataConfig, seq_len: int, cache_folder: Path | None) -> CroppedStream:
    starts, lengths = _contents(split)
    buffer_documents, slots = data.pack_buffer_documents, seq_len + 1

    def make() -> tuple[np.ndarray, ...]:
        plan, buffer = plan_first_epoch(starts, lengths, slots, buffer_documents=buffer_documents)
        return (*_arrays(plan), buffer.waiting, np.array([buffer.arrived]))

    name = f"crop-{seq_len}-{buffer_documents}-v{CROP_PLAN_VERSION}"
    *plan, waiting, arrived = _kept_arrays(cache_folder, name, (*_PLAN_ARRAYS, "waiting", "arrived"), make)
    return CroppedStream(starts, lengths, slots, buffer_documents, Plan(*plan), Buffer(waiting, int(arrived[0])))


def _contents(split: TokenSplit) -> tuple[np.ndarray, np.ndarray]:
    """Where the token behind each document's BOS is, and how many there are: (n_documents,) int64 each."""
    return split.document_starts[:-1] + 1, np.diff(split.document_starts) - 1


def _arrays(plan: Plan) -> tuple[np.ndarray, ...]:
    return tuple(getattr(plan, name) for name in _PLAN_ARRAYS)


def _kept_arrays(
    cache_folder: Path | None, name: str, arrays: Sequence[str], make: Callable[[], Sequence[np.ndarray]]
) -> Sequence[np.ndarray]:
    """What `make` gives, an int64 array for each name in `arrays`; from `plans/NAME` in the cache where it is kept."""
    if cache_folder is None:
        return make()

    def build(temporary: Path) -> dict[str, Any]:
        made = make()
        for array, values in zip(arrays, made, strict=True):
            np.save(temporary / f"{array}.npy", values)
        return {"rows": len(made[0]) - 1, "segments": len(made[1])}

    folder = cache_folder / "plans" / name
    try:
        cached_folder(folder, build, what="packing plan")
    except UserError:  # a cache that is shared read-only, or full: the plan takes seconds and can live in memory
        return make()
    return [load_array(folder / f"{array}.npy", np.dtype("<i8"), mapped=True) for array in arrays]
