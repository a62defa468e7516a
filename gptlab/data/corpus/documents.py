"""Where text comes from: documents one by one, in an order that only the corpus decides.

A source is `stdlib`, a file, a folder, a downloaded corpus by name (`known_corpora.py`) or a glob. A folder gives its
text, JSONL and Parquet files, recursively, sorted by relative path; hidden files, `__pycache__` and other formats are
ignored.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from gptlab.data.corpus.known_corpora import CORE, CORPORA, named_source
from gptlab.runtime.files.cache import ChangedFileError, cache_root, file_sha256
from gptlab.runtime.files.compressed_files import is_packed

STDLIB = "stdlib"
FINGERPRINT_VERSION = "gptlab-corpus-1"
"""Raise it when the same files would be read into other documents."""
UNREADABLE = b"unreadable"
"""Instead of the hash of a file that is skipped because it cannot be read."""
NAMED_FILES = 3
"""Skipped files that are named; the others are counted."""
TOKEN_SUFFIX = ".bin"
"""Files of tokens that others made."""


@dataclass(frozen=True, slots=True)
class CorpusSummary:
    """What a full pass over a corpus found. As text: `27 documents from 28 files; skipped: latin1.txt (not UTF-8)`."""

    n_files: int = 0
    n_documents: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> how many: text files, JSONL records, Parquet rows."""
    skipped_files: tuple[tuple[str, str], ...] = ()
    """(name, reason) of the first text files among these."""

    def __add__(self, other: CorpusSummary) -> CorpusSummary:
        return CorpusSummary(
            self.n_files + other.n_files,
            self.n_documents + other.n_documents,
            dict(Counter(self.skipped) + Counter(other.skipped)),
            (self.skipped_files + other.skipped_files)[:NAMED_FILES],
        )

    def __str__(self) -> str:
        documents, files = (
            f"{count:,} {noun}{'s' * (count != 1)}"
            for count, noun in ((self.n_documents, "document"), (self.n_files, "file"))
        )
        skipped = [f"{name} ({reason.removesuffix(' text')})" for name, reason in self.skipped_files]
        unnamed = Counter(self.skipped) - Counter(reason for _, reason in self.skipped_files)
        skipped += [f"{count:,} {'more ' if skipped else ''}{reason}" for reason, count in unnamed.items()]
        return f"{documents} from {files}" + (f"; skipped: {', '.join(skipped)}" if skipped else "")


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one source, in their order."""

    name: str
    files: Sequence[DocumentFile]
    text_column: str
    salt: str = ""
    """What the documents depend on besides the files."""


class Corpus:
    """The documents of all sources, never empty, in the same order every time."""

    def __init__(self, sources: Sequence[Source], root: Path) -> None:
        """`root`: the cache, which remembers hashes of large files."""
        self.name = " + ".join(source.name for source in sources)
        self.last_pass = CorpusSummary()
        self._sources = sources
        self._root = root
        self._digests: dict[DocumentFile, bytes] = {}
        """What `fingerprint` saw of each file; empty before it has looked."""

    def documents(self) -> Iterator[str]:
        """UserError for what cannot be read, and for a file that is not what `fingerprint` saw."""
        found = CorpusSummary()
        for source in self._sources:
            found += yield from self._documents_of(source)
        self.last_pass = found

    def _documents_of(self, source: Source) -> Generator[str, None, CorpusSummary]:
        skipped: Counter[str] = Counter()
        skipped_files: list[tuple[str, str]] = []
        n_documents = 0
        for file in source.files:
            digest, before = hashlib.sha256(), skipped.copy()
            for text in read_documents(file, source.text_column, skipped, digest):
                if text:
                    n_documents += 1
                    yield text
                else:
                    skipped["empty"] += 1
            reasons = list(skipped - before)
            if reasons and file.suffix not in COLUMN_SUFFIXES and len(skipped_files) < NAMED_FILES:
                skipped_files.append((_printable(file.name), reasons[0]))
            seen = UNREADABLE if "unreadable" in reasons else digest.digest()
            if self._digests and seen != self._digests[file]:
                raise ChangedFileError(file.path)
        if not n_documents:
            found = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "nothing in it"
            raise UserError(f"{source.name} holds no text ({found}); a corpus needs at least one document")
        return CorpusSummary(len(source.files), n_documents, dict(skipped), tuple(skipped_files))

    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 that changes whenever the documents may have changed."""
        self._digests = {file: self._digest(file) for source in self._sources for file in source.files}
        of_sources = [self._fingerprint_of(source) for source in self._sources]
        return of_sources[0] if len(of_sources) == 1 else _sha256(part.encode() for part in of_sources)

    def _fingerprint_of(self, source: Source) -> str:
        columns = source.text_column if any(file.suffix in COLUMN_SUFFIXES for file in source.files) else ""
        parts = [FINGERPRINT_VERSION.encode(), source.salt.encode(), columns.encode()]
        for file in source.files:
            parts += [file.name.encode("utf-8", "surrogateescape"), self._digests[file]]
        return _sha256(parts)

    def require_unchanged(self) -> None:
        """UserError where the files are not what `fingerprint` saw: for whoever did not read all documents."""
        for file, digest in self._digests.items():
            if self._digest(file) != digest:
                raise ChangedFileError(file.path)

    def _digest(self, file: DocumentFile) -> bytes:
        if file.sha256 is not None:
            return bytes.fromhex(file.sha256)
        skippable = file.lenient and file.suffix not in COLUMN_SUFFIXES  # what cannot be read is skipped when read, too
        try:
            if skippable and not is_packed(file.path) and file.path.stat().st_size > MAX_DOCUMENT_BYTES:
                return UNREADABLE
            return file_sha256(file.path, self._root)
        except OSError as error:
            if skippable:
                return UNREADABLE
            raise UserError(f"cannot read {file.path}: {error.strerror or error}") from error


def open_corpus(
    sources: Sequence[str], text_column: str = "text", *, hub_files: int | None = None, cache_dir: str | None = None
) -> Corpus:
    """The corpus of `sources`, in their order. `text_column`: the column (Parquet) or key (JSONL) with the text.

    `hub_files`, `cache_dir`: as in DataConfig, for named corpora; nothing is downloaded here.
    UserError for a source that is missing, empty, binary, of unknown format, or without that column.
    """
    if not sources:
        raise UserError("no corpus: name at least one, such as stdlib, a file, a folder or a glob")
    root = cache_root(cache_dir)
    return Corpus([_open(source, text_column, hub_files, root) for source in sources], root)


def is_text_file(source: str) -> bool:
    """Whether `source` can only be text on this machine: no named corpus, and no tokens (`tokens/foreign_files.py`)."""
    return source == STDLIB or (os.path.isfile(os.path.expanduser(source)) and not source.endswith(TOKEN_SUFFIX))


def _open(source: str, text_column: str, hub_files: int | None, root: Path) -> Source:
    if source == STDLIB:
        return _stdlib()
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        files = _folder_files(path)
    elif os.path.exists(path):  # Unlike Path.exists, False for names that no file can have.
        files = [DocumentFile(path, path.name, lenient=False)]
    elif (named := named_source(source)) is not None:
        # The fingerprint is that of the same files in a folder: where they come from does not matter.
        found = local_files(named, hub_files, root)
        files = [DocumentFile(file.path, file.name, lenient=False, sha256=file.sha256) for file in found]
        text_column = named.known.text_column if named.known else text_column
    elif glob.has_magic(source):
        files = _glob_files(str(path))
    elif source == CORE:
        raise UserError("core is what `gptlab eval RUN --core` asks, not text to train on")
    else:
        maybe_name = not path.suffix and path.name == source  # A path that is missing is not a misspelt name.
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
    return Source(source, files, text_column)


def _stdlib() -> Source:
    """The running interpreter's library sources (31 MB in CPython 3.11), the embedded corpus.

    Ordered by the SHA-1 of the relative path: shuffled over the packages, and the same on every machine. Two versions
    of Python differ in content, so the version is part of the fingerprint.
    """
    library = Path(sysconfig.get_path("stdlib"))
    names = [name for name in _walk(library, ["site-packages", "dist-packages"]) if name.endswith(".py")]
    if not names:
        raise UserError(f"stdlib: this Python has no library sources under {library}; name a folder or file instead")
    names.sort(key=lambda name: hashlib.sha1(name.encode("utf-8", "surrogateescape"), usedforsecurity=False).digest())
    files = [DocumentFile(library / name, name, lenient=True) for name in names]
    return Source(STDLIB, files, "", salt=f"python {platform.python_version()}")


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


def _walk(root: Path, ignored: Iterable[str] = ()) -> Iterator[str]:
    """Relative posix paths of the files below `root`; links to folders are not followed (they may lead in circles)."""
    ignored = {"__pycache__", *ignored}
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in ignored and not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _printable(name: str) -> str:
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name)[-100:]


def _sha256(parts: Iterable[bytes]) -> str:
    """Hexadecimal. Each part comes after its length, so that no two lists of parts look alike."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
