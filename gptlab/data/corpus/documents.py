"""Where text comes from: documents one by one, in an order that only the corpus decides.

Sources: `stdlib`, a file, a folder, a glob, a downloaded corpus by name (`known_corpora.py`), or several of these one
after the other. A folder gives its text, JSONL
and Parquet files, recursively, sorted by relative path; hidden files, `__pycache__` and other formats are left out.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gptlab.config.errors import UserError, nearest_name
from gptlab.data.corpus.corpus_files import (
    COLUMN_SUFFIXES,
    KNOWN_SUFFIXES,
    MAX_DOCUMENT_BYTES,
    DocumentFile,
    format_suffix,
    probe,
    read_documents,
)
from gptlab.data.corpus.downloaded import local_files
from gptlab.data.corpus.known_corpora import CORE, CORPORA, NamedSource, named_source
from gptlab.runtime.files.cache import cache_root
from gptlab.runtime.files.compressed_files import is_packed
from gptlab.runtime.files.file_hashes import ChangedFileError, file_sha256

STDLIB = "stdlib"
FINGERPRINT_VERSION = "gptlab-corpus-1"
"""Raise it when the same files would be read into other documents."""
UNREADABLE = b"unreadable"
"""Instead of the hash of a file that is left out for that."""
LEFT_OUT_NAMED = 20
"""Files left out whose names are kept; of all others only the number."""


@dataclass(frozen=True, slots=True)
class PassOver:
    """What a full pass over a corpus found."""

    n_files: int = 0
    n_documents: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> how many: text files, JSONL records, Parquet rows."""
    left_out: tuple[tuple[str, str], ...] = ()
    """(name, reason) of the first text files among these."""

    def __add__(self, other: PassOver) -> PassOver:
        return PassOver(
            self.n_files + other.n_files,
            self.n_documents + other.n_documents,
            dict(Counter(self.skipped) + Counter(other.skipped)),
            (self.left_out + other.left_out)[:LEFT_OUT_NAMED],
        )


class Corpus(Protocol):
    name: str

    @property
    def last_pass(self) -> PassOver:
        """What the last full pass found."""
        ...

    def documents(self) -> Iterator[str]:
        """The documents, never empty, in the same order every time. UserError for what cannot be read, and for a file
        that is not what `fingerprint` saw."""
        ...

    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 that changes whenever the documents may have changed."""
        ...

    def require_unchanged(self) -> None:
        """UserError where the files are not what `fingerprint` saw: for whoever did not read all documents."""
        ...


class FileCorpus:
    """Documents of files, one file after the other."""

    def __init__(
        self, name: str, files: Sequence[DocumentFile], text_column: str, root: Path, *, salt: str = ""
    ) -> None:
        """`root`: the cache, which remembers hashes of large files."""
        self.name = name
        self.files = tuple(files)
        self.last_pass = PassOver()
        self._text_column = text_column
        self._root = root
        self._salt = salt
        self._digests: tuple[bytes, ...] | None = None
        """What `fingerprint` saw, of each file; None before it has looked."""

    def documents(self) -> Iterator[str]:
        skipped: Counter[str] = Counter()
        left_out: list[tuple[str, str]] = []
        n_documents = 0
        for number, file in enumerate(self.files):
            digest, before = hashlib.sha256(), skipped.copy()
            for text in read_documents(file, self._text_column, skipped, digest):
                if text:
                    n_documents += 1
                    yield text
                else:
                    skipped["empty"] += 1
            reasons = list(skipped - before)
            if reasons and file.suffix not in COLUMN_SUFFIXES:
                left_out.append((_printable(file.name), reasons[0]))
            if self._digests is not None:
                seen = UNREADABLE if "unreadable" in reasons else digest.digest()
                if seen != self._digests[number]:
                    raise ChangedFileError(file.path)
        self.last_pass = PassOver(len(self.files), n_documents, dict(skipped), tuple(left_out[:LEFT_OUT_NAMED]))
        if not n_documents:
            reasons = [f"{count} {reason}" for reason, count in skipped.items()]
            found = ", ".join(reasons) or "nothing in it"
            raise UserError(f"{self.name} holds no text ({found}); a corpus needs at least one document")

    def fingerprint(self) -> str:
        self._digests = tuple(_content_digest(file, self._root) for file in self.files)
        digest = hashlib.sha256()
        columns = self._text_column if any(file.suffix in COLUMN_SUFFIXES for file in self.files) else ""
        for part in (FINGERPRINT_VERSION, self._salt, columns):
            _add(digest, part.encode())
        for file, content in zip(self.files, self._digests, strict=True):
            _add(digest, file.name.encode("utf-8", "surrogateescape"))
            _add(digest, content)
        return digest.hexdigest()

    def require_unchanged(self) -> None:
        for file, content in zip(self.files, self._digests or (), strict=True):
            if _content_digest(file, self._root) != content:
                raise ChangedFileError(file.path)


class ChainedCorpus:
    """Several corpora, one after the other."""

    def __init__(self, parts: Sequence[Corpus]) -> None:
        self.name = " + ".join(part.name for part in parts)
        self.parts = tuple(parts)

    @property
    def last_pass(self) -> PassOver:
        return sum((part.last_pass for part in self.parts), PassOver())

    def documents(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.documents()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for part in self.parts:
            _add(digest, part.fingerprint().encode())
        return digest.hexdigest()

    def require_unchanged(self) -> None:
        for part in self.parts:
            part.require_unchanged()


def open_corpus(
    sources: Sequence[str], text_column: str = "text", *, hub_files: int | None = None, cache_dir: str | None = None
) -> Corpus:
    """The corpus of `sources`, in their order. `text_column`: the column (Parquet) or key (JSONL) with the text.

    `hub_files`, `cache_dir`: as in DataConfig, for corpora by name; nothing is downloaded here.
    UserError for a source that is missing, empty, binary, of unknown format, or without that column.
    """
    if not sources:
        raise UserError("no corpus: name at least one, such as stdlib, a file, a folder or a glob")
    parts = [_open_one(source, text_column, hub_files, cache_dir) for source in sources]
    return parts[0] if len(parts) == 1 else ChainedCorpus(parts)


def _open_one(source: str, text_column: str, hub_files: int | None, cache_dir: str | None) -> Corpus:
    root = cache_root(cache_dir)
    if source == STDLIB:
        return _stdlib(root)
    if (named := named_source(source)) is not None:
        return _named(source, named, text_column, hub_files, root)
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        files = _folder_files(path)
    elif os.path.exists(path):  # Unlike Path.exists, False for names that no file can have.
        files = [DocumentFile(path, path.name, lenient=False)]
    elif glob.has_magic(source):
        files = _glob_files(str(path))
    else:
        if source == CORE:
            raise UserError("core is what `gptlab eval RUN --core` asks, not text to train on")
        maybe_name = not path.suffix and path.name == source  # A path that is not there is no misspelt name.
        nearest = nearest_name(source, [STDLIB, *(known.name for known in CORPORA)]) if maybe_name else None
        hint = f" (did you mean {nearest}?)" if nearest else "; a corpus is stdlib, a file, a folder, a glob or a name"
        raise UserError(f"no corpus {source!r}: there is no such file or folder{hint}")
    if not files:
        raise UserError(
            f"{source!r} has no files to read: gptlab reads text (.txt .md .py ...), .jsonl and "
            ".parquet, the first two also packed (.gz .zst)"
        )
    for file in files:
        probe(file, text_column)
    return FileCorpus(source, files, text_column, root)


def _named(source: str, named: NamedSource, text_column: str, hub_files: int | None, root: Path) -> FileCorpus:
    """Its fingerprint is that of the same files in a folder: where they come from does not matter."""
    here = local_files(named, hub_files, root)
    files = [DocumentFile(file.path, file.name, lenient=False, sha256=file.sha256) for file in here]
    column = named.known.text_column if named.known else text_column
    for file in files:
        probe(file, column)
    return FileCorpus(source, files, column, root)


def _stdlib(root: Path) -> FileCorpus:
    """The running interpreter's library sources (31 MB in CPython 3.11), the embedded corpus.

    Ordered by the SHA-1 of the relative path: shuffled over the packages, and the same on every machine. Two versions
    of Python differ in content, so the version is part of the fingerprint.
    """
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages"}
    names = [name for name in _walk(library, left_out) if name.endswith(".py")]
    if not names:
        raise UserError(f"stdlib: this Python has no library sources under {library}; name a folder or file instead")
    names.sort(key=lambda name: hashlib.sha1(name.encode("utf-8", "surrogateescape"), usedforsecurity=False).digest())
    files = [DocumentFile(library / name, name, lenient=True) for name in names]
    return FileCorpus(STDLIB, files, "", root, salt=f"python {platform.python_version()}")


def _folder_files(root: Path) -> list[DocumentFile]:
    names = [name for name in sorted(_walk(root)) if format_suffix(Path(name)) in KNOWN_SUFFIXES]
    return [DocumentFile(root / name, name, lenient=True) for name in names]


def _glob_files(pattern: str) -> list[DocumentFile]:
    """Files of known formats that match; the names are relative to the folder before the first wildcard."""
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    paths = [Path(match) for match in glob.glob(pattern, recursive=True)]
    paths = [path for path in paths if path.is_file() and format_suffix(path) in KNOWN_SUFFIXES]
    names = sorted((path.relative_to(root).as_posix(), path) for path in paths)
    return [DocumentFile(path, name, lenient=True) for name, path in names]


def _walk(root: Path, left_out: set[str] | None = None) -> Iterator[str]:
    """Relative posix paths of the files below `root`; links to folders are not followed (they may lead in circles)."""
    left_out = {"__pycache__"} | (left_out or set())
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in left_out and not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _content_digest(file: DocumentFile, root: Path) -> bytes:
    if file.sha256 is not None:
        return bytes.fromhex(file.sha256)
    passed_by = file.lenient and file.suffix not in COLUMN_SUFFIXES  # what cannot be read is skipped when read, too
    try:
        if passed_by and not is_packed(file.path) and file.path.stat().st_size > MAX_DOCUMENT_BYTES:
            return UNREADABLE
        return file_sha256(file.path, root)
    except OSError as error:
        if passed_by:
            return UNREADABLE
        raise UserError(f"cannot read {file.path}: {error.strerror or error}") from error


def _printable(name: str) -> str:
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name)[-100:]


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """Length first, so that no two lists of parts look alike."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
