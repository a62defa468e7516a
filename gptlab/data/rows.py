"""Rows: what one sequence of a batch holds, and which row comes when, as pure functions of (seed, epoch, index).

Nothing is shuffled in memory, so row N of any epoch is found at once, on any rank. A row is `seq_len` inputs and
`seq_len` targets, the targets one token ahead; a target of -1 does not count.

    packed      segments of documents (`packing.py`); each epoch permutes the rows. With `data.long_documents = "crop"`,
                nanochat's endless stream of rows (`cropping.py`), the same for every seed
    sequential  row i is tokens [i * seq_len, (i + 1) * seq_len], in file order, every epoch the same (speedrun)
    random      windows at starts drawn uniformly, with replacement, over the whole split (nanoGPT)

Validation rows are the same for every seed, batch shape, file order and world size, each target exactly once. With a
BOS they hold documents in the order of their content hashes, cut into pieces that begin with BOS, packed without
further cuts; BOS itself is no target. Without one, the documents, in that order, form one text, whose consecutive
chunks are the rows (only its first token is no target). The same holds for tokens that came without documents, which
gives the speedrun's validation: targets 1, 2, ..., BOS among them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from gptlab.config.errors import ConfigError, UserError
from gptlab.config.run import DataConfig
from gptlab.data.cropping import CroppedRows
from gptlab.data.packing import IGNORED, Packing, cut_packing, document_contents, pack_documents
from gptlab.data.tokens.shards import TokenSplit

Pair = tuple[np.ndarray, np.ndarray]

# Luby and Rackoff (1988): four rounds of a Feistel network over random functions cannot be told from a random
# permutation, where the halves are wide. Narrow ones can: over 40,000 keys, the images of two indices of permutations
# of 3 to 100 were off a uniform distribution by up to 537 standard deviations of chi-square with 4 rounds over 4 bits,
# 38 with 6 over 4, 27 with 4 over 6, and 2 with 6 over 6.
FEISTEL_ROUNDS = 6
LEAST_BITS = 6
KEPT_DOCUMENTS = 1 << 15
"""The packing of fewer documents is planned at every start, in 0.1 to 0.2 s."""


class RowSource(Protocol):
    """What the loader reads. A Python caller may bring one of its own."""

    seq_len: int
    rows_per_epoch: int

    def read(self, epoch: int, indices: np.ndarray) -> Pair:
        """Inputs and targets of rows `indices` (n,) of an epoch: (n, seq_len) int32 each, targets with -1."""
        ...

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        """Targets other than -1 in rows `indices` (n,): (n,) int64. Reads no tokens."""
        ...


def make_rows(
    split: TokenSplit, data: DataConfig, seq_len: int, bos_id: int | None, seed: int, cache_folder: Path | None
) -> RowSource:
    """Training rows as `data.rows` says; a packing of many documents is kept in `cache_folder` (None: not kept).

    Raises ConfigError where the split is shorter than one row or packed rows have no BOS to begin with.
    """
    if split.n_tokens < seq_len + 1:
        raise _too_short(split.n_tokens, seq_len)
    if data.rows != "packed":
        return WindowRows(split, seq_len, seed if data.rows == "random" else None)
    if bos_id is None:
        raise ConfigError("data.rows", "packed", "packed rows begin with BOS, and this tokenizer has none", "random")
    if split.n_documents < KEPT_DOCUMENTS:
        cache_folder = None
    if data.long_documents == "crop":
        return CroppedRows(split, seq_len, bos_id, data.pack_buffer_documents, cache_folder)
    packing = cut_packing(split, seq_len, data.pack_buffer_documents, cache_folder)
    return PackedRows(split, packing, seq_len, bos_id, seed)


def _too_short(n_tokens: int, seq_len: int) -> ConfigError:
    reason = f"the training text has only {n_tokens:,} tokens, and a row needs seq_len + 1 = {seq_len + 1:,}"
    return ConfigError("model.seq_len", seq_len, reason, n_tokens - 1 if n_tokens > 1 else None)


def validation_rows(
    split: TokenSplit, seq_len: int, bos_id: int | None, max_target_tokens: int | None = None
) -> RowSource:
    """The rows that validate; `max_target_tokens` keeps the front of their order, to the token. UserError where there
    is nothing to predict."""
    order = np.argsort(split.content_hashes, kind="stable")
    limit = split.n_tokens if max_target_tokens is None else max_target_tokens
    if bos_id is None or not split.in_documents:
        starts, lengths = split.document_starts[:-1][order], np.diff(split.document_starts)[order]
        rows: RowSource = TextRows(split, starts, lengths, seq_len, limit)
    else:
        starts, lengths = (array[order] for array in document_contents(split))
        kept = np.clip(limit - (np.cumsum(lengths) - lengths), 0, lengths)
        some = kept > 0
        packing = pack_documents(starts[some], kept[some], seq_len, overhang="pad", buffer_documents=split.n_documents)
        rows = PackedRows(split, packing, seq_len, bos_id, seed=None)
    if rows.rows_per_epoch == 0:
        raise UserError("the validation text has nothing to predict: it needs at least two tokens; hold out more of it")
    return rows


class PackedRows:
    """Rows of segments that begin with BOS. Without a seed, rows keep the packing's order and a BOS is never a
    target."""

    def __init__(self, split: TokenSplit, packing: Packing, seq_len: int, bos_id: int, seed: int | None) -> None:
        self.split, self.packing, self.seq_len, self.seed = split, packing, seq_len, seed
        self.rows_per_epoch = packing.n_rows
        self._bos_id = bos_id

    def read(self, epoch: int, indices: np.ndarray) -> Pair:
        bos = self._bos_id if self.seed is not None else IGNORED
        rows = self.packing.read(self.split, self._packed_at(epoch, indices), self.seq_len + 1, bos)
        inputs = np.where(rows[:, :-1] == IGNORED, np.int32(self._bos_id), rows[:, :-1])
        return inputs, rows[:, 1:]

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        row_of, segments = self.packing.segments_of(self._packed_at(epoch, indices))
        bos_targets = 0 if self.seed is None else 1
        counts = np.bincount(row_of, self.packing.segment_lengths[segments] + bos_targets, minlength=len(indices))
        return counts.astype(np.int64) - bos_targets  # the BOS that a row begins with is no target

    def _packed_at(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        if self.seed is None:
            return indices
        return permuted(indices, self.rows_per_epoch, seed=self.seed, epoch=epoch)


class WindowRows:
    """Windows of consecutive tokens: side by side in file order, or, with a seed, at random starts. As many random
    windows an epoch as there are side by side, so that an epoch is the same amount of training either way."""

    def __init__(self, split: TokenSplit, seq_len: int, seed: int | None) -> None:
        self.split, self.seq_len, self._seed = split, seq_len, seed
        self.rows_per_epoch = (split.n_tokens - 1) // seq_len

    def read(self, epoch: int, indices: np.ndarray) -> Pair:
        rows = self.split.take(self.starts(epoch, indices)[:, None] + np.arange(self.seq_len + 1))
        return rows[:, :-1], rows[:, 1:]

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return np.full(len(indices), self.seq_len, dtype=np.int64)

    def starts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        """First token of each row, (n,) int64."""
        if self._seed is None:
            return indices * self.seq_len
        n_starts = self.split.n_tokens - self.seq_len
        # The remainder favours small starts by n_starts / 2^64: nothing.
        return (hashed(indices, seed=self._seed, epoch=epoch) % np.uint64(n_starts)).astype(np.int64)


class TextRows:
    """Consecutive chunks of the documents given, read as one text in the order given; every epoch the same."""

    def __init__(
        self,
        split: TokenSplit,
        starts: np.ndarray,  # (n_documents,) int64
        lengths: np.ndarray,  # (n_documents,) int64
        seq_len: int,
        max_target_tokens: int,
    ) -> None:
        self.split, self.seq_len = split, seq_len
        self.n_targets = min(max(0, split.n_tokens - 1), max_target_tokens)
        self.rows_per_epoch = -(-self.n_targets // seq_len)
        self._ends = np.cumsum(lengths)
        self._shifts = starts - (self._ends - lengths)  # position in the split minus position in the text

    def read(self, epoch: int, indices: np.ndarray) -> Pair:
        places = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        inside = np.minimum(places, self.n_targets)
        rows = self.split.take(inside + self._shifts[np.searchsorted(self._ends, inside, side="right")])
        return rows[:, :-1], np.where(places[:, 1:] <= self.n_targets, rows[:, 1:], IGNORED).astype(np.int32)

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return np.clip(self.n_targets - indices * self.seq_len, 0, self.seq_len).astype(np.int64)


def permuted(indices: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Where a permutation of range(size), chosen by (seed, epoch), sends each of `indices` (n,): (n,) int64.

    A Feistel network permutes the smallest power of two that holds `size`; an image outside is sent on until it falls
    inside ("cycle walking", Black and Rogaway 2002): at most twice on average for sizes above 32.
    """
    bits = max(LEAST_BITS, (size - 1).bit_length())
    round_keys = [key(seed, epoch, number) for number in range(FEISTEL_ROUNDS)]
    images = _feistel(indices.astype(np.uint64), bits, round_keys)
    while (outside := np.flatnonzero(images >= size)).size:
        images[outside] = _feistel(images[outside], bits, round_keys)
    return images.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, round_keys: list[np.uint64]) -> np.ndarray:
    right_bits = np.uint64(bits // 2)
    right_mask = np.uint64((1 << bits // 2) - 1)
    left_mask = np.uint64((1 << bits - bits // 2) - 1)
    left, right = values >> right_bits, values & right_mask
    for left_key, right_key in zip(round_keys[::2], round_keys[1::2], strict=True):
        left = left ^ (mix(right ^ left_key) & left_mask)
        right = right ^ (mix(left ^ right_key) & right_mask)
    return (left << right_bits) | right


def hashed(indices: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """64 hashed bits for each of `indices` (n,), chosen by (seed, epoch): (n,) uint64."""
    return mix(mix(indices.astype(np.uint64)) ^ key(seed, epoch))


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea and Flood 2014; constants of Vigna's splitmix64.c): uint64 -> uint64, one to one."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def key(*parts: int) -> np.uint64:
    """64 bits that stand for a tuple of integers below 2^64 (blake2b of their bytes)."""
    content = b"".join(part.to_bytes(8, "little") for part in parts)
    return np.uint64(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))
