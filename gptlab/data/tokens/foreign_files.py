"""Text that others have tokenized already, read where it lies: nanoGPT's folders and llm.c's shards.

    nanoGPT folder   train.bin, val.bin: raw uint16; meta.pkl: which characters they are, where they are characters
    shards           .bin files in llm.c's layout (`shards.py`), by file, folder, glob or name: modded-nanogpt's FineWeb

Which files validate: a nanoGPT folder's val.bin; else `data.val_source`; else the shards with the word `val` in their
name, which never train. The files of a side are one sequence in the order of their names: rows and documents go on
across the border of two shards, where the speedrun's loader leaves the rest of a shard out.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlab.config.data import TokenizerConfig
from gptlab.config.errors import ConfigError, UserError
from gptlab.data.corpus.documents import STDLIB
from gptlab.data.corpus.downloaded import local_files
from gptlab.data.corpus.known_corpora import named_source
from gptlab.data.tokenizer.character_table import read_character_table
from gptlab.data.tokenizer.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, gpt2_tokenizer, load_tokenizer
from gptlab.data.tokens.shards import UINT16, Shard, is_shard, open_raw_uint16, open_shard
from gptlab.runtime.files.cache import read_info
from gptlab.runtime.files.file_hashes import ChangedFileError, file_sha256

SUFFIX = ".bin"
HASHED_TOGETHER = 4
"""Files hashed at the same time: what a disk and four cores give, and no more of a shared machine."""
_VALIDATES = re.compile(r"(?<![a-z])(val|valid|validation)(?![a-z])")


@dataclass(frozen=True, slots=True)
class TokenFile:
    path: Path
    raw: bool
    """nanoGPT's: uint16 without a header."""

    def open(self) -> Shard:
        """Its tokens, never none. UserError for a file that is not what it should be."""
        tokens = open_raw_uint16(self.path) if self.raw else open_shard(self.path)
        if not len(tokens):
            raise UserError(f"{self.path} is empty: it has no token")
        return tokens

    def digest(self, root: Path) -> bytes:
        """SHA-256 of the file; `root`: the cache, which remembers that of a large one."""
        try:
            return file_sha256(self.path, root)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """A corpus of tokens."""

    name: str
    train: tuple[TokenFile, ...]
    val: tuple[TokenFile, ...]
    tables: tuple[Path | None, ...]
    """For each source of files its meta.pkl, or None where it has none."""

    def fingerprint(self, root: Path) -> str:
        """Hexadecimal SHA-256 of the tokens; names and places of the files are not part of it. `root`: the cache."""
        digest = hashlib.sha256(f"gptlab-tokens-1 {len(self.train)} ".encode())
        with ThreadPoolExecutor(HASHED_TOGETHER) as pool:
            for one in pool.map(lambda file: file.digest(root), (*self.train, *self.val)):
                digest.update(one)
        return digest.hexdigest()

    def stamps(self) -> list[list[int]]:
        """Inode, size and time of every file: while these stand, what was checked once need not be checked again."""
        try:
            statuses = [file.path.stat() for file in (*self.train, *self.val)]
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror or error}") from error
        return [[status.st_ino, status.st_size, status.st_mtime_ns] for status in statuses]

    def require_unchanged(self, stamps: list[list[int]]) -> None:
        """UserError where these are no longer the files' stamps."""
        for file, before, now in zip((*self.train, *self.val), stamps, self.stamps(), strict=True):
            if before != now:
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
        characters = {None if table is None else read_character_table(table) for table in self.tables}
        if len(characters) > 1:
            raise UserError(f"{self.name}: these tokens differ in vocabulary, by their meta.pkl; take those of one")
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
        large = next((file for file in self.train + self.val if file.open().dtype != UINT16.dtype), None)
        if large is not None and config.kind != "gpt2":
            raise UserError(f"{large.path}: uint32 tokens are not GPT-2's; name their tokenizer with tokenizer.path")
        return gpt2_tokenizer()


def _own_tokenizer(folder: Path) -> dict[str, Any] | None:
    """Kind, vocab_size and fingerprint, where the shards in `folder` are gptlab's own."""
    try:
        tokenizer = read_info(folder)["tokenizer"]
        return {key: tokenizer[key] for key in ("kind", "vocab_size", "fingerprint")}
    except (UserError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class _Found:
    """What one source is: files that train, files that validate."""

    train: tuple[TokenFile, ...]
    val: tuple[TokenFile, ...]
    table: Path | None = None


def find_token_files(
    sources: Sequence[str], val_sources: Sequence[str], hub_files: int | None, root: Path
) -> TokenFiles | None:
    """The token files that `sources` are, or None where they are text. `hub_files`, `root`: as in `local_files`.

    UserError for a mixture of both, for tokens without any that validate or any that train.
    """
    found, validation = (
        {source: part for source in group if (part := _find(source, hub_files, root)) is not None}
        for group in (sources, val_sources)
    )
    if not found and not validation:
        return None
    texts = [source for source in (*sources, *val_sources) if source not in found and source not in validation]
    if texts:
        tokens = next(iter([*found, *validation]))
        raise ConfigError(
            "data.source" if texts[0] in sources else "data.val_source", texts[0],
            f"this is text, and {tokens} is tokens; a corpus is one or the other",
        )  # fmt: skip
    name = " + ".join(sources)
    val = _unique(file for part in validation.values() for file in (part.val or part.train))
    if not validation:
        val = _unique(file for part in found.values() for file in part.val)
    held_out = {file.path.resolve() for file in val}
    train = _unique(file for part in found.values() for file in part.train if file.path.resolve() not in held_out)
    if not val:
        for file in train:
            file.open()  # Of a file that is no shard that is the first thing to say.
        raise UserError(
            f"{name}: no file validates: a nanoGPT folder has val.bin, shards have `val` in a name, such as "
            "fineweb_val_000000.bin; name others with data.val_source"
        )
    if not train:
        raise UserError(f"{name}: no file is left to train on, all of them validate; name others with data.source")
    return TokenFiles(name, train, val, tuple(part.table for part in (*found.values(), *validation.values())))


def _find(source: str, hub_files: int | None, root: Path) -> _Found | None:
    if source == STDLIB:
        return None
    if (named := named_source(source)) is not None:
        files = [file.path for file in local_files(named, hub_files, root)]
        return _shards(files) if all(file.suffix == SUFFIX for file in files) else None
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        files = sorted(file for file in path.glob(f"*{SUFFIX}") if file.is_file() and not file.name.startswith("."))
        if path / "train.bin" in files and not is_shard(path / "train.bin"):
            return _nanogpt(path)
        # Any .bin may lie in a folder of texts: only one with the header makes it a folder of tokens.
        only_these = all(entry.suffix == SUFFIX for entry in path.iterdir() if not entry.name.startswith("."))
        return _shards(files) if files and (only_these or any(map(is_shard, files))) else None
    if os.path.exists(path):
        return _shards([path]) if path.suffix == SUFFIX else None
    if not glob.has_magic(source):
        if source.endswith(SUFFIX):
            raise UserError(f"{source!r}: there is no such file")
        return None
    files = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match))
    if source.endswith(SUFFIX) and not files:
        raise UserError(f"{source!r}: no file matches it")
    return _shards(files) if files and all(file.suffix == SUFFIX for file in files) else None


def _nanogpt(folder: Path) -> _Found:
    train, val, table = (folder / name for name in ("train.bin", "val.bin", "meta.pkl"))
    return _Found(
        (TokenFile(train, raw=True),),
        (TokenFile(val, raw=True),) if val.is_file() else (),
        table if table.is_file() else None,
    )


def _shards(files: Sequence[Path]) -> _Found:
    sides: tuple[list[TokenFile], list[TokenFile]] = [], []
    for file in files:
        sides[_VALIDATES.search(file.stem.lower()) is not None].append(TokenFile(file, raw=False))
    return _Found(tuple(sides[0]), tuple(sides[1]))


def _unique(files: Iterable[TokenFile]) -> tuple[TokenFile, ...]:
    return tuple(dict.fromkeys(files))
