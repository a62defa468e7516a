"""Where text comes from: documents one by one, in an order that only the corpus decides, each with the side that it is
on: training or validation.

A source is `stdlib`, a file, a folder, a downloaded corpus by name (`known_corpora.py`) or a glob. A folder gives its
text, JSONL and Parquet files, recursively, sorted by relative path; hidden files, `__pycache__`, other formats, and
the runs and labs in it are ignored.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from gptlab.config.errors import UserError, cannot, nearest_name, printable
from gptlab.config.run import DataConfig, Split
from gptlab.data.corpus.corpus_files import (
    COLUMN_SUFFIXES,
    MAX_DOCUMENT_BYTES,
    DocumentFile,
    folder_files,
    glob_files,
    is_packed,
    probe,
    read_documents,
    stdlib_files,
)
from gptlab.data.corpus.known_corpora import CORE, CORPORA, local_files, named_source
from gptlab.runtime.files.cache import ChangedFileError, cache_root, file_sha256

Side = Literal["train", "val"]
STDLIB = "stdlib"
FINGERPRINT_VERSION = "gptlab-corpus-1"
"""Raise it when the same files would be read into other documents."""
UNREADABLE = b"unreadable"
"""Instead of the hash of a file that is skipped because it cannot be read."""
NAMED_FILES = 3
"""Skipped files that are named; the others are counted."""
TOKEN_SUFFIX = ".bin"
"""Files of tokens that others made."""
HASH_RANGE = 1 << 64
IN_BOTH = "also in validation"


@dataclass(slots=True)
class CorpusSummary:
    """What a full pass over a corpus found. As text: `27 documents from 28 files; skipped: latin1.txt (not UTF-8)`."""

    n_files: int = 0
    n_documents: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> how many: text files, JSONL records, Parquet rows."""
    skipped_files: list[tuple[str, str]] = field(default_factory=list)
    """(name, reason) of the first text files among these."""

    def __str__(self) -> str:
        counts = ((self.n_documents, "document"), (self.n_files, "file"))
        documents, files = (f"{count:,} {noun}{'s' * (count != 1)}" for count, noun in counts)
        skipped = [f"{name} ({reason.removesuffix(' text')})" for name, reason in self.skipped_files]
        unnamed = self.skipped - Counter(reason for _, reason in self.skipped_files)
        skipped += [f"{count:,} {'more ' if skipped else ''}{reason}" for reason, count in unnamed.items()]
        return f"{documents} from {files}" + (f"; skipped: {', '.join(skipped)}" if skipped else "")


class NoCorpusError(UserError):
    """A source that is missing, or without files."""


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one source, in their order."""

    name: str
    files: Sequence[DocumentFile]
    text_column: str
    salt: str = ""
    """What the documents depend on besides the files."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Folders that are not read: what -> how many."""


class Corpus:
    """The documents of all sources, in the same order every time, each for training or validation: held out by
    `split_documents`, or of sources that validate."""

    def __init__(
        self, sources: Sequence[Source], val_sources: Sequence[Source], split: Split, val_fraction: float, root: Path
    ) -> None:
        """`root`: the cache, which remembers hashes of large files."""
        self.name = " + ".join(source.name for source in sources)
        self.last_pass = CorpusSummary()
        self._sources, self._val_sources, self._root = sources, val_sources, root
        self._digests: dict[DocumentFile, bytes] = {}
        """What `fingerprint` saw of each file; empty before it has looked."""
        one_document = not val_sources and split == "hash" and len(list(islice(self.texts(), 2))) == 1
        self.split: Split = "tail" if one_document else split
        """How documents are held out; tail where hash would leave the only document whole on one side."""
        self._val_fraction = val_fraction

    @property
    def how(self) -> str:
        """How it is divided, in words."""
        names = " + ".join(source.name for source in self._val_sources)
        return f"validated on {names}" if names else f"{self.split} {self._val_fraction:g}"

    @property
    def left_out(self) -> str:
        """Which folders are not read: "; not read: 2 linked folders", empty for none."""
        return _left_out(*self._sources, *self._val_sources)

    def probe(self) -> None:
        """UserError for what the beginnings of the files show: at once, not an hour into a run."""
        for source in (*self._sources, *self._val_sources):
            for file in source.files:
                probe(file, source.text_column)

    def documents(self) -> Iterator[tuple[Side, str]]:
        """(side, document). UserError as `texts` raises it, and where a side gets nothing."""
        return self._validated() if self._val_sources else split_documents(self, self.split, self._val_fraction)

    def _validated(self) -> Iterator[tuple[Side, str]]:
        """The validation text first, whole. A training document that it has too is skipped."""
        found, seen, kept = CorpusSummary(), set(), False
        for text in self._read(self._val_sources, found):
            seen.add(content_hash(text))
            yield "val", text
        for text in self._read(self._sources, found):
            if content_hash(text) in seen:
                found.skipped[IN_BOTH] += 1
            else:
                kept = True
                yield "train", text
        if not kept:
            raise UserError(f"{self.name}: nothing is left to train on, all of it is in data.val_source too")
        self.last_pass = found

    def texts(self) -> Iterator[str]:
        """The documents of the sources, never none. UserError for what cannot be read, and for a file that is not what
        `fingerprint` saw."""
        found = CorpusSummary()
        yield from self._read(self._sources, found)
        self.last_pass = found

    def _read(self, sources: Sequence[Source], found: CorpusSummary) -> Iterator[str]:
        for source in sources:
            n_before, skipped_before = found.n_documents, found.skipped.copy()
            for file in source.files:
                yield from self._documents_of(file, source, found)
            if found.n_documents == n_before:
                skipped = (found.skipped - skipped_before).items()
                reasons = ", ".join(f"{count} {reason}" for reason, count in skipped) or "it is empty"
                raise UserError(f"{source.name} holds no text ({reasons}); a corpus needs at least one document")

    def _documents_of(self, file: DocumentFile, source: Source, found: CorpusSummary) -> Iterator[str]:
        digest, skipped_before = hashlib.sha256(), found.skipped.copy()
        for text in read_documents(file, source.text_column, found.skipped, digest):
            if text:
                found.n_documents += 1
                yield text
            else:
                found.skipped["empty"] += 1
        found.n_files += 1
        reasons = list(found.skipped - skipped_before)
        if reasons and file.suffix not in COLUMN_SUFFIXES and len(found.skipped_files) < NAMED_FILES:
            found.skipped_files.append((printable(file.name, keep="")[-100:], reasons[0]))
        seen = UNREADABLE if "unreadable" in reasons else digest.digest()
        if self._digests and seen != self._digests[file]:
            if file.sha256 is None:
                raise ChangedFileError(file.path)
            again = f"delete it, and run `gptlab data prepare {shlex.quote(source.name)}`"
            raise UserError(f"{file.path} is not what was downloaded any more: {again}")

    def most_bytes(self) -> int | None:
        """The size of the files that train, some of which may be no text, or validate too. None where one holds columns
        or is packed: its text may be more."""
        files = [file for source in self._sources for file in source.files]
        if any(file.suffix in COLUMN_SUFFIXES or is_packed(file.path) for file in files):
            return None
        total = 0
        for file in files:
            with suppress(OSError):  # its documents are skipped, or refused
                total += file.path.stat().st_size
        return total

    def fingerprint(self) -> dict[str, object]:
        """All that the documents and their sides depend on."""
        if self._val_sources:
            return {"corpus": self._hash_of(self._sources), "val_corpus": self._hash_of(self._val_sources)}
        return {"corpus": self._hash_of(self._sources), "split": self.split, "val_fraction": self._val_fraction}

    def _hash_of(self, sources: Sequence[Source]) -> str:
        """Hexadecimal; changes whenever the documents may have changed."""
        of_sources = []
        for source in sources:
            self._digests |= {file: self._digest(file) for file in source.files}
            column = source.text_column if any(file.suffix in COLUMN_SUFFIXES for file in source.files) else ""
            parts = [FINGERPRINT_VERSION.encode(), source.salt.encode(), column.encode()]
            for file in source.files:
                # Names give the order of several files; that of a single one, only how it is read.
                name = file.name if len(source.files) > 1 else f"{file.suffix} {is_packed(file.path)}"
                parts += [name.encode("utf-8", "surrogateescape"), self._digests[file]]
            of_sources.append(_sha256(parts))
        return of_sources[0] if len(of_sources) == 1 else _sha256(part.encode() for part in of_sources)

    def require_unchanged(self) -> None:
        """UserError where the files are not what `fingerprint` saw: for whoever did not read all documents."""
        for file, digest in self._digests.items():
            if self._digest(file) != digest:
                raise ChangedFileError(file.path)

    def _digest(self, file: DocumentFile) -> bytes:
        if file.sha256 is not None:
            return bytes.fromhex(file.sha256)
        if file.lenient and file.suffix not in COLUMN_SUFFIXES:
            return self._digest_if_readable(file.path)
        with cannot(f"read {file.path}"):
            return file_sha256(file.path, self._root)

    def _digest_if_readable(self, path: Path) -> bytes:
        """`UNREADABLE` for what `documents` skips for that reason."""
        with suppress(OSError):
            if is_packed(path) or path.stat().st_size <= MAX_DOCUMENT_BYTES:
                return file_sha256(path, self._root)
        return UNREADABLE


def open_corpus(data: DataConfig) -> Corpus:
    """The corpus of `data.source` and `data.val_source`, in their order. Nothing is downloaded here. UserError for a
    source that is missing; for one that cannot be read when its documents are."""
    root = cache_root(data.cache_dir)
    train, val = ([_open(name, data, root) for name in names] for names in (data.source, data.val_source))
    return Corpus(train, val, data.split, data.val_fraction, root)


def require_known(source: str) -> None:
    """UserError where `source`, which is no path, is no name and no glob either."""
    may_be = source == STDLIB or source.endswith(TOKEN_SUFFIX) or glob.has_magic(source)
    if not may_be and named_source(source) is None:
        raise _no_corpus(source)


def _no_corpus(source: str) -> UserError:
    if source == CORE:
        return UserError("core is what `gptlab eval RUN --core` asks, not text to train on")
    path = Path(source)
    maybe_name = not path.suffix and path.name == source  # A path that is missing is not a misspelt name.
    nearest = nearest_name(source, [STDLIB, *(known.name for known in CORPORA)]) if maybe_name else None
    hint = f" (did you mean {nearest}?)" if nearest else "; a corpus is stdlib, a file, a folder, a glob or a name"
    return NoCorpusError(f"no corpus {source!r}: there is no such file or folder{hint}")


def from_anywhere(source: str) -> str:
    """`source` as it may be given in any folder: a path or a glob is absolute."""
    is_name = source == STDLIB or named_source(source) is not None
    return source if is_name else os.path.abspath(os.path.expanduser(source))


def is_text_file(source: str) -> bool:
    """Whether `source` can only be text on this machine: no named corpus, and no tokens (`tokens/foreign_files.py`)."""
    return source == STDLIB or (os.path.isfile(os.path.expanduser(source)) and not source.endswith(TOKEN_SUFFIX))


def _open(source: str, data: DataConfig, root: Path) -> Source:
    if source == STDLIB:  # Two versions of Python differ in content.
        return Source(STDLIB, stdlib_files(), "", salt=f"python {platform.python_version()}")
    path, text_column = Path(os.path.expanduser(source)), data.text_column
    if os.path.exists(path) and not os.path.isdir(path):  # Unlike Path.exists, False for names that no file can have.
        return Source(source, [DocumentFile(path, path.name, lenient=False)], text_column)
    return _several_files(source, path, text_column, data.hub_files, root)


def _several_files(source: str, path: Path, text_column: str, hub_files: int | None, root: Path) -> Source:
    """A folder, a corpus by name or a glob."""
    left_out = Counter[str]()
    if os.path.isdir(path):
        files, left_out = folder_files(path)
    elif (named := named_source(source)) is not None:
        # The fingerprint is that of the same files in a folder: where they come from does not matter.
        files = local_files(named, hub_files, root)
        text_column = named.known.text_column if named.known else text_column
    elif glob.has_magic(source):
        files, left_out = glob_files(str(path))
    else:
        raise _no_corpus(source)
    found = Source(source, files, text_column, left_out=left_out)
    if not files:
        raise NoCorpusError(
            f"{source!r} has no files to read: gptlab reads text (.txt .md .py ...), .jsonl and "
            ".parquet, the first two also packed (.gz .zst)" + _left_out(found)
        )
    return found


def _left_out(*sources: Source) -> str:
    counts = sum((source.left_out for source in sources), Counter[str]())
    names = ", ".join(f"{count:,} {what}{'s' * (count != 1)}" for what, count in counts.items())
    return f"; not read: {names}" if names else ""


def split_documents(corpus: Corpus, split: Split, val_fraction: float) -> Iterator[tuple[Side, str]]:
    """(side, document) in the corpus's order; both sides get at least one. UserError where that cannot be.

    hash: a document validates when the hash of its content falls into the first `val_fraction` of the hash's range, so
        neither order nor sharding moves it, and identical documents are on one side.
    tail: the last `val_fraction` of the corpus's characters validate, cut where nanoGPT cuts
        (`n = int(len(text) * 0.9)`); the document across the cut goes to both sides in part.
    """
    return _split_hash(corpus, val_fraction) if split == "hash" else _split_tail(corpus, val_fraction)


def content_hash(text: str) -> int:
    """64 bits of BLAKE2b of the UTF-8 bytes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _split_hash(corpus: Corpus, val_fraction: float) -> Iterator[tuple[Side, str]]:
    """Streams once both sides have a document; until then (about 1 / val_fraction documents) it holds them back."""
    limit = int(val_fraction * HASH_RANGE)
    waiting: list[tuple[int, str]] = []
    streaming = False
    for text in corpus.texts():
        key = content_hash(text)
        waiting.append((key, text))
        streaming = streaming or (key < limit) != (waiting[0][0] < limit)
        if streaming:
            yield from (("val" if key < limit else "train", text) for key, text in waiting)
            waiting.clear()
    if not streaming:
        yield from _split_small(waiting, limit, corpus.name)


def _split_small(documents: list[tuple[int, str]], limit: int, name: str) -> Iterator[tuple[Side, str]]:
    """A small corpus whose documents all fell to one side: the smallest hash validates, or the largest trains."""
    keys = {key for key, _ in documents}
    if len(keys) < 2:
        raise UserError(
            f"{name}: split=hash needs two different documents, and all {len(documents)} are the same; --data.split "
            "tail (gptlab data: --split tail) validates on text that trains too"
        )
    none_validate = min(keys) >= limit
    chosen = min(keys) if none_validate else max(keys)
    for key, text in documents:
        yield ("val" if (key == chosen) == none_validate else "train"), text


def _split_tail(corpus: Corpus, val_fraction: float) -> Iterator[tuple[Side, str]]:
    total = sum(len(text) for text in corpus.texts())
    # 1 - 0.1 is 0.9 to the last bit, so this is nanoGPT's number.
    left = int(total * (1 - val_fraction))
    if not 0 < left < total:
        raise UserError(
            f"{corpus.name}: {total} characters cannot be cut at data.val_fraction = {val_fraction}: one side is empty"
        )
    for text in corpus.texts():
        if left > 0:
            yield "train", text[:left]
        if left < len(text):
            yield "val", text[max(left, 0) :]
        left -= len(text)


def _sha256(parts: Iterable[bytes]) -> str:
    """Hexadecimal. Each part comes after its length, so that no two lists of parts look alike."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
