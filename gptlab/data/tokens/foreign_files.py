"""Tokens that other programs made, read in place: nanoGPT's folders and llm.c's shards.

    nanoGPT folder   train.bin, val.bin: raw uint16; meta.pkl: which characters they are, where they are characters
    shards           .bin files in llm.c's layout (`shards.py`), by file, folder, glob or name: modded-nanogpt's FineWeb

Which files validate: a nanoGPT folder's val.bin; else `data.val_source`; else the shards with the word `val` in their
name, which never train. The files of a side are one sequence in the order of their names: rows and documents continue
across shards, where the speedrun's loader drops the rest of a shard.

Before training, one pass finds what must be known of them: that every id is in the vocabulary, how many bytes of text
the tokens stand for, and, for packed rows, where documents begin.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gptlab.config.errors import ConfigError, UserError, cannot
from gptlab.config.run import TokenizerConfig
from gptlab.data.corpus.documents import STDLIB, TOKEN_SUFFIX, NoCorpusError
from gptlab.data.corpus.known_corpora import local_files, named_source
from gptlab.data.tokenizer.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    gpt2_tokenizer,
    load_tokenizer,
    read_character_table,
)
from gptlab.data.tokens.shards import COUNTS, UINT16, Shard, TokenSplit, file_stamp, is_shard, open_index, save_index
from gptlab.runtime.files.cache import ChangedFileError, file_sha256, read_info

if TYPE_CHECKING:
    from gptlab.runtime.records.console import Progress

HASHED_TOGETHER = 4
"""Files hashed at the same time: what a disk and four cores give, and no more of a shared machine."""
BLOCK_TOKENS = 1 << 22
"""Tokens scanned together: 34 MB as the int64 that numpy counts in, however long the file."""
_VALIDATES = re.compile(r"(?<![a-z])(val|valid|validation)(?![a-z])")


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """A corpus of tokens."""

    name: str
    train: tuple[Shard, ...]
    val: tuple[Shard, ...]

    def fingerprint(self, root: Path) -> str:
        """Hexadecimal SHA-256 of the tokens; names and places of the files are not part of it. `root`: the cache, which
        remembers the hash of a large file."""

        def sha256(file: Shard) -> bytes:
            with cannot(f"read {file.path}"):
                return file_sha256(file.path, root)

        digest = hashlib.sha256(f"gptlab-tokens-1 {len(self.train)} ".encode())
        with ThreadPoolExecutor(HASHED_TOGETHER) as pool:
            for one in pool.map(sha256, (*self.train, *self.val)):
                digest.update(one)
        return digest.hexdigest()

    def stamps(self) -> list[tuple[int, ...]]:
        """Inode, size and time of every file: while these are the same, what was checked need not be checked again."""
        return [file.stamp[1:] for file in (*self.train, *self.val)]

    def require_unchanged(self) -> None:
        """UserError where a path leads to another file than the open one: what was hashed is what was checked."""
        for file in (*self.train, *self.val):
            with cannot(f"read {file.path}"):
                if file_stamp(file.path.stat()) != file.stamp:
                    raise ChangedFileError(file.path)

    def tokenizer(self, config: TokenizerConfig) -> Tokenizer:
        """The tokenizer that the tokens are of: `config.path`, else meta.pkl's characters, else GPT-2's vocabulary
        (`config.kind` byte: bytes). UserError where it cannot be known, or gptlab made them with another one."""
        tokenizer = self._chosen(config)
        for folder in dict.fromkeys(file.path.parent for file in (*self.train, *self.val)):
            made_with = _own_tokenizer(folder)
            if made_with is not None and made_with["fingerprint"] != tokenizer.fingerprint:
                raise UserError(
                    f"{folder}: gptlab made these tokens with a {made_with['kind']} tokenizer of "
                    f"{made_with['vocab_size']} entries, and this is another one ({tokenizer.kind}, "
                    f"{tokenizer.vocab_size} entries): name theirs with tokenizer.path"
                )
        return tokenizer

    def _chosen(self, config: TokenizerConfig) -> Tokenizer:
        if config.path is not None:
            return load_tokenizer(Path(config.path))
        tables = {_table(file) for file in (*self.train, *self.val)}
        characters = {None if table is None else read_character_table(table) for table in tables}
        if len(characters) > 1:
            raise UserError(f"{self.name}: the meta.pkl of these tokens differ: use tokens of one vocabulary")
        table = characters.pop()
        if table is not None:
            if config.kind in ("gpt2", "byte"):
                raise ConfigError(
                    "tokenizer.kind", config.kind, f"{self.name} has a meta.pkl: its tokens are characters", "char"
                )
            return CharTokenizer(table, bos=False, in_order=True)
        if config.kind == "char":
            raise ConfigError(
                "tokenizer.kind", "char",
                f"{self.name} has no meta.pkl to say which characters its tokens are; name their tokenizer.path",
            )  # fmt: skip
        if config.kind == "byte":
            return ByteTokenizer()
        large = next((file for file in self.train + self.val if file.dtype != UINT16.dtype), None)
        if large is not None and config.kind != "gpt2":
            raise UserError(f"{large.path}: uint32 tokens are not GPT-2's; name their tokenizer with tokenizer.path")
        return gpt2_tokenizer()


def _open(path: Path, *, raw: bool = False) -> Shard:
    """Its tokens, never none. UserError for a file that is not what it should be."""
    tokens = Shard(path, raw=raw)
    if not len(tokens):
        raise UserError(f"{path} is empty: it has no token")
    return tokens


def _validates(file: Shard) -> bool:
    return _VALIDATES.search(file.path.stem.lower()) is not None


def _table(file: Shard) -> Path | None:
    """nanoGPT's meta.pkl beside the file, which says which characters the tokens are."""
    table = file.path.parent / "meta.pkl"
    return table if file.raw and table.is_file() else None


def _own_tokenizer(folder: Path) -> dict[str, Any] | None:
    """Kind, vocab_size and fingerprint, where the shards in `folder` are gptlab's own."""
    try:
        tokenizer = read_info(folder)["tokenizer"]
        return {key: tokenizer[key] for key in ("kind", "vocab_size", "fingerprint")}
    except (UserError, KeyError, TypeError):
        return None


def find_token_files(
    sources: Sequence[str], val_sources: Sequence[str], hub_files: int | None, root: Path
) -> TokenFiles | None:
    """The token files that `sources` are, or None where they are text. `hub_files`, `root`: as in `local_files`.

    UserError for a mixture of both, for tokens without any that validate or any that train.
    """
    all_sources = (*sources, *val_sources)
    found = {source: files for source in all_sources if (files := _find(source, hub_files, root)) is not None}
    if not found:
        return None
    if texts := [source for source in all_sources if source not in found]:
        raise ConfigError(
            "data.source" if texts[0] in sources else "data.val_source", texts[0],
            f"this is text, and {next(iter(found))} is tokens; a corpus is one or the other",
        )  # fmt: skip
    name = " + ".join(sources)
    if val_sources:
        chosen = [list(filter(_validates, found[source])) or found[source] for source in val_sources]
    else:
        chosen = [list(filter(_validates, files)) for files in found.values()]
    val = tuple({file.path: file for file in chain(*chosen)}.values())
    held_out = {file.path.resolve() for file in val}
    of_sources = {file.path: file for source in sources for file in found[source]}.values()
    train = tuple(file for file in of_sources if not _validates(file) and file.path.resolve() not in held_out)
    if not val:
        raise UserError(
            f"{name}: no file validates: a nanoGPT folder has val.bin, shards have `val` in a name, such as "
            "fineweb_val_000000.bin; name others with data.val_source"
        )
    if not train:
        raise UserError(f"{name}: no file is left to train on, all of them validate; name others with data.source")
    return TokenFiles(name, train, val)


def _find(source: str, hub_files: int | None, root: Path) -> list[Shard] | None:
    """The files of one source, in the order of their names; None for text."""
    if source == STDLIB:
        return None
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        return _find_in_folder(path)
    if (named := named_source(source)) is not None:
        files = [file.path for file in local_files(named, hub_files, root)]
    elif os.path.exists(path):
        files = [path]
    else:
        files = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match))
        if source.endswith(TOKEN_SUFFIX) and not files:
            problem = "no file matches it" if glob.has_magic(source) else "there is no such file"
            raise NoCorpusError(f"{source!r}: {problem}")
    if not files or any(file.suffix != TOKEN_SUFFIX for file in files):
        return None
    return [_open(file) for file in files]


def _find_in_folder(folder: Path) -> list[Shard] | None:
    entries = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
    files = [entry for entry in entries if entry.suffix == TOKEN_SUFFIX and entry.is_file()]
    if folder / "train.bin" in files and not is_shard(folder / "train.bin"):
        return [_open(file, raw=True) for file in files if file.name in ("train.bin", "val.bin")]
    # A folder of texts may hold any .bin: only one with the header makes it a folder of tokens.
    only_these = all(entry.suffix == TOKEN_SUFFIX for entry in entries)
    if not files or not (only_these or any(map(is_shard, files))):
        return None
    return [_open(file) for file in files]


def scan(
    files: Sequence[Shard], tokenizer: Tokenizer, bos_id: int | None, side: str, folder: Path, progress: Progress
) -> dict[str, int]:
    """Counts of one side: tokens, documents, bytes of text, shards. With a `bos_id` the side is cut into documents
    that begin with it, whose index (`SplitWriter`'s two files) goes to `folder`; tokens before the first are in none.

    UserError for an id that is not in the vocabulary, and for no document at all.
    """
    n_tokens, n_bytes, starts = 0, 0, []
    for file in files:
        for first in range(0, len(file), BLOCK_TOKENS):
            block = file[first : first + BLOCK_TOKENS]
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
            progress.advance(block.nbytes)
    n_documents = 1
    if bos_id is not None:
        n_documents = _write_index(folder, side, files, np.concatenate([*starts, [n_tokens]]))
    return dict(zip(COUNTS, (n_tokens, n_documents, n_bytes, len(files)), strict=True))


def open_split(files: Sequence[Shard], side: str, folder: Path, totals: dict[str, int]) -> TokenSplit:
    """The side that `scan` looked at, straight over its files."""
    if (folder / f"{side}_documents.npy").exists():
        return TokenSplit(files, *open_index(folder, side), totals["bytes"])
    starts = np.array([0, totals["tokens"]], dtype=np.int64)
    return TokenSplit(files, starts, np.zeros(1, dtype=np.uint64), totals["bytes"], in_documents=False)


def _write_index(folder: Path, side: str, files: Sequence[Shard], starts: np.ndarray) -> int:
    """`starts` (n_documents + 1,) int64, the last one the end; the number of documents."""
    if len(starts) == 1:
        raise UserError(
            f"{files[0].path}: no BOS begins a document in these tokens, and packed rows are made of documents: use "
            "--data.rows random or sequential (gptlab data: --rows)"
        )
    split = TokenSplit(files, starts, np.zeros(len(starts) - 1, dtype=np.uint64), 0)
    hashes = [
        hashlib.blake2b(split.read(start, end - start).tobytes(), digest_size=8).digest()
        for start, end in pairwise(starts.tolist())
    ]
    save_index(folder, side, starts, np.frombuffer(b"".join(hashes), dtype="<u8"))
    return len(hashes)
