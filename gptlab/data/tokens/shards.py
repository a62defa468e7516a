"""Tokens on disk in llm.c's `.bin` layout, and a whole split of them as if it were one array.

A shard is 256 little-endian int32 (magic, version, number of tokens, zeros), then the tokens. As in llm.c
(dev/data/data_common.py) two kinds exist; the magic tells which, so that a reader of the one refuses the other:

    magic 20240520, version 1: uint16 tokens (vocabularies up to 2^16)
    magic 20240801, version 7: uint32 tokens (llm.c's layout for Llama 3)

A split is its shards in order, plus where its documents start (`NAME_documents.npy`, int64, one more than there are
documents) and a 64-bit hash of each document's content (`NAME_hashes.npy`, uint64), by which validation is ordered.
"""

from __future__ import annotations

import os
import threading
import tokenize
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from gptlab.config.errors import UserError, cannot
from gptlab.runtime.files.plain_file import open_plain, require_plain

HEADER_BYTES = 1024
# What numpy does not catch of the parsers that it reads a header with.
_NO_ARRAY = (
    ValueError, EOFError, OverflowError, SyntaxError, RecursionError, MemoryError, TypeError, tokenize.TokenError,
)  # fmt: skip
PREAD_BYTES = 1 << 30  # Linux reads at most 2 GB at once
COUNTS = ("tokens", "documents", "bytes", "shards")
"""What is counted of a split; bytes are those of its text."""
TOKENS_PER_SHARD = 100_000_000  # llm.c's shards of FineWeb: 200 MB each as uint16


@dataclass(frozen=True, slots=True)
class ShardKind:
    magic: int
    version: int
    dtype: np.dtype[Any]


UINT16 = ShardKind(20240520, 1, np.dtype("<u2"))
UINT32 = ShardKind(20240801, 7, np.dtype("<u4"))


def shard_kind(vocab_size: int) -> ShardKind:
    """The smaller kind that holds every token of the vocabulary."""
    return UINT16 if vocab_size <= 2**16 else UINT32


def is_shard(path: Path) -> bool:
    """Whether the file begins with the magic number of either kind; False where it cannot be read."""
    try:
        with open_plain(path) as file:
            return int.from_bytes(file.read(4), "little") in (UINT16.magic, UINT32.magic)
    except OSError:
        return False


class Shard:
    """The tokens of one file, read in place: `len(shard)`, and `shard[first:end]` as (n,) uint16 or uint32.

    Not memory-mapped: the kernel ends a process that touches a page which is gone (SIGBUS) when somebody cuts the file
    short, or its disk fails. Reading gives an error instead, and costs 2 microseconds a piece. A file that is deleted
    or replaced is still read as it was; one that is written to is a UserError.
    """

    KEPT_OPEN = 256
    """Files kept open, of the 1,024 that a process may open on most systems; others are opened for every piece."""
    _n_open = 0
    _file: BufferedReader | None = None

    def __init__(self, path: Path, *, raw: bool = False) -> None:
        """`raw`: nanoGPT's uint16 without a header. UserError for a file that is not what it should be."""
        self.path, self.raw = path, raw
        self._lock = threading.Lock()
        with cannot(f"read {path}"):
            with open_plain(path) as file:
                header, status = file.read(HEADER_BYTES), os.fstat(file.fileno())
            self._offset = 0 if raw else HEADER_BYTES
            self.dtype = _raw_dtype(path, status.st_size) if raw else _dtype(path, header, status.st_size)
            self._n_tokens = (status.st_size - self._offset) // self.dtype.itemsize
            self.stamp = file_stamp(status)
            if Shard._n_open < Shard.KEPT_OPEN:
                self._file = open_plain(path)
                Shard._n_open += 1

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()
            Shard._n_open -= 1

    def __len__(self) -> int:
        return self._n_tokens

    def __getitem__(self, part: slice) -> np.ndarray:
        first, end, _ = part.indices(self._n_tokens)
        at, n_bytes = self._offset + first * self.dtype.itemsize, max(0, end - first) * self.dtype.itemsize
        in_one_call = n_bytes <= PREAD_BYTES and hasattr(os, "pread")  # safe for threads and forked processes
        try:
            with nullcontext(self._file) if self._file else open_plain(self.path) as file:
                content = os.pread(file.fileno(), n_bytes, at) if in_one_call else self._read_at(file, at, n_bytes)
                changed = len(content) < n_bytes or file_stamp(os.fstat(file.fileno())) != self.stamp
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror or error}") from error
        if changed:
            raise UserError(f"{self.path} changed while it was in use: restore it, or start again with what it is now")
        return np.frombuffer(content, dtype=self.dtype)

    def _read_at(self, file: BufferedReader, offset: int, n_bytes: int) -> bytes:
        """The same without `pread`, or in several calls; threads wait for one another."""
        with self._lock:
            file.seek(offset)
            return file.read(n_bytes)


def _dtype(path: Path, header: bytes, n_bytes: int) -> np.dtype[Any]:
    """Of the tokens of a shard. UserError where header and size are not those of one."""
    magic, version, n_tokens = np.frombuffer(header[:12].ljust(12, b"\0"), dtype="<i4").tolist()
    kind = next((kind for kind in (UINT16, UINT32) if (kind.magic, kind.version) == (magic, version)), None)
    if kind is None:
        raise UserError(_no_shard(path, magic, version))
    if n_bytes != HEADER_BYTES + n_tokens * kind.dtype.itemsize:
        raise UserError(_wrong_size(path, kind, n_tokens, n_bytes))
    return kind.dtype


def _no_shard(path: Path, magic: int, version: int) -> str:
    return (
        f"{path} is not a token shard: it begins with {magic}, version {version}, and llm.c's shards with "
        f"{UINT16.magic}, version {UINT16.version} (uint16) or {UINT32.magic}, version {UINT32.version} (uint32); "
        "name nanoGPT's train.bin by its folder"
    )


def _wrong_size(path: Path, kind: ShardKind, n_tokens: int, n_bytes: int) -> str:
    return (
        f"{path} is damaged: its header says {n_tokens:,} tokens of {kind.dtype.itemsize} bytes, and after it are "
        f"{max(0, n_bytes - HEADER_BYTES):,} bytes"
    )


def _raw_dtype(path: Path, n_bytes: int) -> np.dtype[Any]:
    """Of nanoGPT's tokens, which have no header. UserError for an odd number of bytes."""
    if n_bytes % UINT16.dtype.itemsize:
        size = f"tokens are two bytes each (uint16), and {n_bytes:,} bytes are odd"
        raise UserError(f"{path} is not nanoGPT data: {size}")
    return UINT16.dtype


def file_stamp(status: os.stat_result) -> tuple[int, ...]:
    """Device, inode, size and time: while these are the same, so is the file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class SplitWriter:
    """Writes one split, document by document, into `folder`; complete after `close`."""

    def __init__(self, folder: Path, name: str, vocab_size: int, bos_id: int | None) -> None:
        self._folder, self._name = folder, name
        self._kind = shard_kind(vocab_size)
        self._bos = np.array([] if bos_id is None else [bos_id], dtype=np.int32)
        self._n_tokens = self._n_bytes = self._n_shards = 0
        self._starts: list[int] = []
        self._hashes: list[int] = []
        self._file: IO[bytes] | None = None

    def add(self, tokens: np.ndarray, *, n_bytes: int, content_hash: int) -> None:
        """One document: its tokens (n,) without BOS, its length in UTF-8, 64 bits of its content's hash."""
        self._starts.append(self._n_tokens)
        self._hashes.append(content_hash)
        self._n_bytes += n_bytes
        tokens = np.concatenate([self._bos, tokens]).astype(self._kind.dtype)
        while len(tokens):
            in_shard = self._n_tokens % TOKENS_PER_SHARD
            file = self._file if in_shard and self._file else self._next_shard()
            part = tokens[: TOKENS_PER_SHARD - in_shard]
            file.write(part.tobytes())
            self._n_tokens += len(part)
            tokens = tokens[len(part) :]

    def close(self) -> dict[str, int]:
        """Finish the files; the split's `COUNTS`."""
        if self._file is None:
            self._next_shard()
        self._finish_shard()
        starts = np.array([*self._starts, self._n_tokens], dtype=np.int64)
        save_index(self._folder, self._name, starts, np.array(self._hashes, dtype=np.uint64))
        return dict(zip(COUNTS, (self._n_tokens, len(self._starts), self._n_bytes, self._n_shards), strict=True))

    def _next_shard(self) -> IO[bytes]:
        self._finish_shard()
        self._file = (self._folder / shard_name(self._name, self._n_shards)).open("wb")
        self._file.write(bytes(HEADER_BYTES))  # no magic yet: a shard that was never finished is not valid
        self._n_shards += 1
        return self._file

    def _finish_shard(self) -> None:
        if self._file is not None:
            n_tokens = (self._file.tell() - HEADER_BYTES) // self._kind.dtype.itemsize
            self._file.seek(0)
            self._file.write(np.array([self._kind.magic, self._kind.version, n_tokens], dtype="<i4").tobytes())
            self._file.close()


def shard_name(split: str, index: int) -> str:
    return f"{split}_{index:06d}.bin"


def save_index(folder: Path, split: str, starts: np.ndarray, hashes: np.ndarray) -> None:
    """What `open_index` reads."""
    np.save(folder / f"{split}_documents.npy", starts)
    np.save(folder / f"{split}_hashes.npy", hashes)


def open_index(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the documents of a split begin (n_documents + 1,) int64, and their hashes (n_documents,) uint64."""
    starts = load_array(folder / f"{split}_documents.npy", np.dtype("<i8"))
    if not len(starts):
        raise UserError(f"{folder / f'{split}_documents.npy'} is damaged: it is empty")
    return starts, load_array(folder / f"{split}_hashes.npy", np.dtype("<u8"))


def load_array(path: Path, dtype: np.dtype[Any], *, mapped: bool = False) -> np.ndarray:
    """A .npy file of this type, in memory or `mapped`. UserError where it is not one, whatever its header claims: it
    is mapped first, which takes no memory and fails for what is not in the file."""
    try:
        with cannot(f"read {path}"):
            require_plain(path)
            array = np.lib.format.open_memmap(path, mode="r")  # np.load would also take archives and pickles for arrays
    except _NO_ARRAY as error:
        raise UserError(f"{path} is damaged: not an array that numpy wrote ({type(error).__name__})") from None
    if array.dtype != dtype or array.ndim != 1:
        raise UserError(f"{path} is damaged: it does not hold an array of {dtype} with one dimension")
    return array.view(np.ndarray) if mapped else np.array(array)


class TokenSplit:
    """All tokens of one split, read in place, addressed by their position in it."""

    def __init__(
        self,
        shards: Sequence[Shard | np.ndarray],  # each (n,) uint16 or uint32
        document_starts: np.ndarray,  # (n_documents + 1,) int64
        content_hashes: np.ndarray,  # (n_documents,) uint64
        n_bytes: int,
        *,
        in_documents: bool = True,
    ) -> None:
        """`in_documents`: a BOS leads every document, where the tokenizer has one. Otherwise the split is one text in
        file order, in which BOS is a token like any other. Tokens before the first document are in none."""
        self.document_starts, self.content_hashes = document_starts, content_hashes
        self.n_documents, self.n_tokens, self.n_bytes = len(document_starts) - 1, int(document_starts[-1]), n_bytes
        self.in_documents = in_documents
        self._shards = tuple(shards)
        self._shard_ends = np.cumsum([len(shard) for shard in shards]).tolist()
        fits = self._shard_ends[-1] == self.n_tokens and len(content_hashes) == self.n_documents
        if not fits or document_starts[0] < 0 or bool((np.diff(document_starts) < 0).any()):
            raise UserError("the document index and the shards of a token cache do not belong together")

    @classmethod
    def open(cls, folder: Path, name: str, *, n_shards: int, n_bytes: int) -> TokenSplit:
        if n_shards < 1:
            raise UserError(f"{folder} is damaged: it counts {n_shards} shards")
        shards = [Shard(folder / shard_name(name, index)) for index in range(n_shards)]
        return cls(shards, *open_index(folder, name), n_bytes)

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as (length,) int32, across shard borders. IndexError outside the split."""
        if start < 0 or length < 0 or start + length > self.n_tokens:
            raise IndexError(f"tokens {start} to {start + length} of {self.n_tokens}")
        tokens = np.empty(length, dtype=np.int32)
        self._read_into(start, tokens)
        return tokens

    def take(self, positions: np.ndarray) -> np.ndarray:
        """The tokens at `positions` (any shape, int64), as int32 of the same shape; consecutive ones in one piece."""
        wanted = positions.reshape(-1)
        tokens = np.empty(len(wanted), dtype=np.int32)
        borders = [0, *(np.flatnonzero(np.diff(wanted) != 1) + 1).tolist(), len(wanted)]
        for first, end in pairwise(borders):
            if end > first:
                self._read_into(int(wanted[first]), tokens[first:end])
        return tokens.reshape(positions.shape)

    def _read_into(self, start: int, tokens: np.ndarray) -> None:
        """Fill `tokens` (n,) with those from `start` on, across shard borders."""
        done = 0
        shard = bisect_right(self._shard_ends, start)
        while done < len(tokens):
            offset = start + done - (self._shard_ends[shard] - len(self._shards[shard]))
            part = self._shards[shard][offset : offset + len(tokens) - done]
            tokens[done : done + len(part)] = part
            done += len(part)
            shard += 1
