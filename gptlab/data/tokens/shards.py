"""Tokens on disk in llm.c's `.bin` layout, and a whole split of them as if it were one array.

A shard is 256 little-endian int32 (magic, version, number of tokens, zeros), then the tokens. As in llm.c
(dev/data/data_common.py) two kinds exist, told apart by the magic, so that a reader of the one refuses the other:

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
from dataclasses import dataclass
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from gptlab.config.errors import UserError
from gptlab.config.plain_file import open_plain, require_plain

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
# What numpy lets through of the parsers that it reads a header with.
_NO_ARRAY = (
    ValueError, EOFError, OverflowError, SyntaxError, RecursionError, MemoryError, TypeError, tokenize.TokenError,
)  # fmt: skip
PREAD_BYTES = 1 << 30  # Linux reads at most 2 GB at once
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
    """Whether the file begins with the magic number of either kind; not, where it cannot be read."""
    try:
        file, header = _opened(path)
    except UserError:
        return False
    file.close()
    return len(header) > 0 and int(header[0]) in (UINT16.magic, UINT32.magic)


class Shard:
    """The tokens of one file, read where they lie: `len(shard)`, and `shard[first:end]` as (n,) uint16 or uint32.

    Not memory-mapped: the kernel ends a process that looks at a page which is gone (SIGBUS) when somebody cuts the file
    short, or its disk fails. Reading gives an error instead, and costs 2 microseconds a piece. A file that is deleted
    or replaced is read on as it was; one that is written to is a UserError.
    """

    KEPT_OPEN = 256
    """Files kept open, of the 1,024 that a process may open on most systems; others are opened for every piece."""
    _n_open = 0

    def __init__(self, path: Path, dtype: np.dtype[Any], offset: int, file: BufferedReader) -> None:
        """`file` is open at `path` and belongs to the shard; tokens go from byte `offset` to the end of the file."""
        status = os.fstat(file.fileno())
        self.path = path
        self.dtype = dtype
        self._offset = offset
        self._n_tokens = (status.st_size - offset) // dtype.itemsize
        self._stamp = _stamp(status)
        self._lock = threading.Lock()
        self._file: BufferedReader | None = file
        if Shard._n_open >= Shard.KEPT_OPEN:
            file.close()
            self._file = None
        else:
            Shard._n_open += 1

    def __del__(self) -> None:
        if (file := getattr(self, "_file", None)) is not None:
            file.close()
            Shard._n_open -= 1

    def __len__(self) -> int:
        return self._n_tokens

    def __getitem__(self, part: slice) -> np.ndarray:
        first, end, _ = part.indices(self._n_tokens)
        try:
            if self._file is not None:
                return self._read(self._file, first, max(0, end - first))
            with open_plain(self.path) as file:
                return self._read(file, first, max(0, end - first))
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror or error}") from error

    def _read(self, file: BufferedReader, first: int, length: int) -> np.ndarray:
        n_bytes = length * self.dtype.itemsize
        content = self._at(file, self._offset + first * self.dtype.itemsize, n_bytes)
        if len(content) < n_bytes or _stamp(os.fstat(file.fileno())) != self._stamp:
            raise UserError(
                f"{self.path} changed while it was in use: bring it back as it was, or start again on what it is now"
            )
        return np.frombuffer(content, dtype=self.dtype)

    def _at(self, file: BufferedReader, offset: int, n_bytes: int) -> bytes:
        """The bytes from `offset` on, fewer where the file ends before. For several threads, and forked processes."""
        if n_bytes <= PREAD_BYTES and hasattr(os, "pread"):
            return os.pread(file.fileno(), n_bytes, offset)
        with self._lock:
            file.seek(offset)
            return file.read(n_bytes)


def open_shard(path: Path) -> Shard:
    """The tokens of one shard. UserError where the file is no shard."""
    file, header = _opened(path)
    try:
        kind = _kind(path, header, os.fstat(file.fileno()).st_size)
    except BaseException:
        file.close()
        raise
    return Shard(path, kind.dtype, HEADER_BYTES, file)


def _kind(path: Path, header: np.ndarray, size: int) -> ShardKind:
    kind = next((k for k in (UINT16, UINT32) if len(header) and header[0] == k.magic), None)
    if kind is None:
        raise UserError(
            f"{path} is not a token shard: it begins with neither of llm.c's magic numbers, {UINT16.magic} (uint16) "
            f"and {UINT32.magic} (uint32); nanoGPT's train.bin is named by its folder"
        )
    if len(header) < HEADER_INTS:
        raise UserError(f"{path} is not a token shard: it is shorter than a header of {HEADER_BYTES:,} bytes")
    if header[1] != kind.version:
        raise UserError(
            f"{path} is not a token shard that gptlab reads: version {header[1]} of llm.c's layout, not {kind.version}"
        )
    n_tokens = int(header[2])
    if size != HEADER_BYTES + n_tokens * kind.dtype.itemsize:
        raise UserError(
            f"{path} is damaged: its header says {n_tokens:,} tokens of {kind.dtype.itemsize} bytes, and behind it are "
            f"{size - HEADER_BYTES:,} bytes"
        )
    return kind


def open_raw_uint16(path: Path) -> Shard:
    """The tokens of nanoGPT's train.bin or val.bin, which has no header."""
    file, _ = _opened(path)
    size = os.fstat(file.fileno()).st_size
    if size % 2:
        file.close()
        raise UserError(f"{path} is no nanoGPT data: tokens are two bytes each (uint16), and {size:,} bytes are odd")
    return Shard(path, UINT16.dtype, 0, file)


def _opened(path: Path) -> tuple[BufferedReader, np.ndarray]:
    """The file, and as many of its first 256 int32 as it has. UserError for what cannot be read."""
    try:
        file = open_plain(path)
        try:
            header = file.read(HEADER_BYTES)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return file, np.frombuffer(header[: len(header) // 4 * 4], dtype="<i4")


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class SplitWriter:
    """Writes one split, document by document, into `folder`; complete after `close`."""

    def __init__(
        self, folder: Path, name: str, vocab_size: int, bos_id: int | None, *, tokens_per_shard: int = TOKENS_PER_SHARD
    ) -> None:
        self.n_tokens = 0
        self.n_bytes = 0
        self._folder = folder
        self._name = name
        self._kind = shard_kind(vocab_size)
        self._bos = np.empty(0, dtype=np.int32) if bos_id is None else np.array([bos_id], dtype=np.int32)
        self._tokens_per_shard = tokens_per_shard
        self._starts: list[int] = []
        self._hashes: list[int] = []
        self._shard: IO[bytes] | None = None
        self._shard_index = 0
        self._shard_tokens = 0

    @property
    def n_documents(self) -> int:
        return len(self._starts)

    def add(self, tokens: np.ndarray, *, n_bytes: int, content_hash: int) -> None:
        """One document: its tokens (n,) without BOS, its length in UTF-8, 64 bits of its content's hash."""
        self._starts.append(self.n_tokens)
        self._hashes.append(content_hash)
        self.n_bytes += n_bytes
        self._write(np.concatenate([self._bos, tokens]).astype(self._kind.dtype))

    def close(self) -> dict[str, int]:
        """Finish the files; tokens, documents, bytes of text and shards of the split."""
        if self._shard is None and self._shard_index == 0:
            self._open_shard()
        self._close_shard()
        np.save(self._folder / f"{self._name}_documents.npy", np.array([*self._starts, self.n_tokens], dtype=np.int64))
        np.save(self._folder / f"{self._name}_hashes.npy", np.array(self._hashes, dtype=np.uint64))
        return {
            "tokens": self.n_tokens,
            "documents": self.n_documents,
            "bytes": self.n_bytes,
            "shards": self._shard_index,
        }

    def _write(self, tokens: np.ndarray) -> None:
        while len(tokens):
            shard = self._shard or self._open_shard()
            part = tokens[: self._tokens_per_shard - self._shard_tokens]
            shard.write(part.tobytes())
            self._shard_tokens += len(part)
            self.n_tokens += len(part)
            tokens = tokens[len(part) :]
            if self._shard_tokens == self._tokens_per_shard:
                self._close_shard()

    def _open_shard(self) -> IO[bytes]:
        self._shard = (self._folder / shard_name(self._name, self._shard_index)).open("wb")
        self._shard.write(bytes(HEADER_BYTES))  # no magic yet: a shard that was never closed is none
        self._shard_tokens = 0
        return self._shard

    def _close_shard(self) -> None:
        if self._shard is None:
            return
        header = np.zeros(HEADER_INTS, dtype="<i4")
        header[:3] = self._kind.magic, self._kind.version, self._shard_tokens
        self._shard.seek(0)
        self._shard.write(header.tobytes())
        self._shard.close()
        self._shard = None
        self._shard_index += 1


def shard_name(split: str, index: int) -> str:
    return f"{split}_{index:06d}.bin"


def open_index(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the documents of a split begin (n_documents + 1,) int64, and their hashes (n_documents,) uint64."""
    starts = load_array(folder / f"{split}_documents.npy", np.dtype("<i8"))
    if not len(starts):
        raise UserError(f"{folder / f'{split}_documents.npy'} is damaged: it is empty")
    return starts, load_array(folder / f"{split}_hashes.npy", np.dtype("<u8"))


def load_array(path: Path, dtype: np.dtype[Any], *, n_dims: int = 1, mapped: bool = False) -> np.ndarray:
    """A .npy file of this type, in memory or `mapped`. UserError where it is none, whatever its header claims: it is
    mapped first, which takes no memory and fails for what is not in the file."""
    try:
        require_plain(path)
        array = np.lib.format.open_memmap(path, mode="r")  # np.load would also take archives and pickles for arrays
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except _NO_ARRAY as error:
        raise UserError(f"{path} is damaged: no array that numpy wrote ({type(error).__name__})") from None
    if array.dtype != dtype or array.ndim != n_dims:
        raise UserError(f"{path} is damaged: it holds no array of {dtype} with {n_dims} dimensions")
    return array.view(np.ndarray) if mapped else np.array(array)


class TokenSplit:
    """All tokens of one split, read where they lie, addressed by their position in it."""

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
        self.document_starts = document_starts
        self.content_hashes = content_hashes
        self.n_documents = len(document_starts) - 1
        self.n_tokens = int(document_starts[-1])
        self.n_bytes = n_bytes
        self.in_documents = in_documents
        self._shards = tuple(shards)
        self._shard_ends = np.cumsum([len(shard) for shard in shards]).tolist()
        fits = self._shard_ends[-1] == self.n_tokens and len(content_hashes) == self.n_documents
        if not fits or document_starts[0] < 0 or bool((np.diff(document_starts) < 0).any()):
            raise UserError("the document index and the shards of a token cache do not belong together")

    @classmethod
    def open(cls, folder: Path, name: str, *, n_shards: int, n_bytes: int) -> TokenSplit:
        if n_shards < 1:
            raise UserError(f"{folder} is damaged: {n_shards} shards are none")
        shards = [open_shard(folder / shard_name(name, index)) for index in range(n_shards)]
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

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Windows of `length` tokens from each of `starts` (n,): (n, length) int32."""
        return self.take(starts[:, None] + np.arange(length))
