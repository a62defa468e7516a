"""What has to be known of somebody's tokens before they are trained on, found in one pass and kept in the cache.

Every id is in the vocabulary, how many bytes of text the tokens stand for, and, for packed rows, where documents begin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gptlab.config.errors import UserError
from gptlab.data.tokenizer.tokenizer import Tokenizer
from gptlab.data.tokens.foreign_files import TokenFile
from gptlab.data.tokens.shards import Shard, TokenSplit, open_index

if TYPE_CHECKING:
    from gptlab.runtime.records.console import Progress

BLOCK_TOKENS = 1 << 22
"""Tokens looked at together: 34 MB as the int64 that numpy counts in, however long the file."""


def scan(
    files: Sequence[TokenFile], tokenizer: Tokenizer, bos_id: int | None, side: str, folder: Path,
    progress: Progress | None,
) -> dict[str, int]:  # fmt: skip
    """Counts of one side: tokens, documents, bytes of text, shards. With a `bos_id` the side is cut into documents
    that begin with it, whose index (`SplitWriter`'s two files) goes to `folder`; tokens before the first are in none.

    UserError for an id that is not in the vocabulary, and for no document at all.
    """
    arrays = [file.open() for file in files]
    n_tokens, n_bytes, starts = 0, 0, []
    for file, tokens in zip(files, arrays, strict=True):
        for first in range(0, len(tokens), BLOCK_TOKENS):
            block = tokens[first : first + BLOCK_TOKENS]
            if int(block.max()) >= tokenizer.vocab_size:
                place = int(np.argmax(block >= tokenizer.vocab_size))
                raise UserError(
                    f"{file.path}: token {first + place} is id {block[place]}, and the vocabulary has "
                    f"{tokenizer.vocab_size} entries ({tokenizer.kind}): name the tokenizer of these tokens with "
                    "tokenizer.path"
                )
            n_bytes += int(np.bincount(block, minlength=tokenizer.vocab_size) @ tokenizer.token_bytes)
            if bos_id is not None:
                starts.append(n_tokens + np.flatnonzero(block == bos_id))
            n_tokens += len(block)
            if progress is not None:
                progress.advance(block.nbytes)
    n_documents = 1
    if bos_id is not None:
        n_documents = _write_index(folder, side, arrays, np.concatenate([*starts, [n_tokens]]), files[0].path)
    return {"tokens": n_tokens, "documents": n_documents, "bytes": n_bytes, "shards": len(files)}


def open_split(files: Sequence[TokenFile], side: str, folder: Path, totals: dict[str, int]) -> TokenSplit:
    """The side that `scan` looked at, straight over its files."""
    arrays = [file.open() for file in files]
    if (folder / f"{side}_documents.npy").exists():
        return TokenSplit(arrays, *open_index(folder, side), totals["bytes"])
    starts = np.array([0, totals["tokens"]], dtype=np.int64)
    return TokenSplit(arrays, starts, np.zeros(1, dtype=np.uint64), totals["bytes"], in_documents=False)


def _write_index(folder: Path, side: str, arrays: list[Shard], starts: np.ndarray, path: Path) -> int:
    """`starts` (n_documents + 1,) int64, the last one the end; the number of documents."""
    if len(starts) == 1:
        raise UserError(
            f"{path}: no BOS begins a document in these tokens, and packed rows are made of documents: use data.rows "
            "random or sequential"
        )
    split = TokenSplit(arrays, starts, np.zeros(len(starts) - 1, dtype=np.uint64), 0)
    hashes = [
        hashlib.blake2b(split.read(start, end - start).tobytes(), digest_size=8).digest()
        for start, end in pairwise(starts.tolist())
    ]
    np.save(folder / f"{side}_documents.npy", starts)
    np.save(folder / f"{side}_hashes.npy", np.frombuffer(b"".join(hashes), dtype="<u8"))
    return len(hashes)
