"""The files of a corpus: where they are found, which formats there are, and how each is read into documents.

A text file is one document; JSONL holds one a line, Parquet one a row. Text and JSONL may be packed (.gz, .zst): the
suffix before that one tells the format. Text is UTF-8 (a byte-order mark is dropped, line ends stay as they are). A
file that the user named must be readable, or a UserError says why not; of the files that were only found in a folder
(`lenient`), those that are not text are counted and skipped.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import io
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.config.errors import UserError, cannot, nearest_name
from gptlab.runtime.files.plain_file import open_plain, require_plain
from gptlab.runtime.records.run_directory import is_run

if TYPE_CHECKING:
    import pyarrow.parquet
    from _typeshed import WriteableBuffer

_TEXT_SUFFIXES = (
    ".txt .text .md .markdown .rst .tex .log .py .pyi .pyx .c .h .cc .cpp .cxx .hpp .cu .cuh .m .mm .rs .go .java .kt "
    ".scala .swift .js .mjs .jsx .ts .tsx .rb .pl .pm .php .lua .r .jl .hs .ml .ex .exs .erl .clj .lisp .el .scm .sql "
    ".sh .bash .zsh .ps1 .bat .html .htm .css .xml .yaml .yml .toml .ini .cfg .cmake .f90 .zig .nim .vim"
)
TEXT_SUFFIXES = frozenset(_TEXT_SUFFIXES.split())
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIXES = frozenset({".parquet", ".pq"})
COLUMN_SUFFIXES = JSONL_SUFFIXES | PARQUET_SUFFIXES
KNOWN_SUFFIXES = TEXT_SUFFIXES | COLUMN_SUFFIXES
_ARCHIVES = frozenset([".bz2", ".xz", ".lzma", ".lz4", ".zip", ".7z", ".tar", ".tgz", ".tbz", ".txz"])
CODECS = {".gz": "gzip", ".zst": "zstd"}
"""Suffix of a packed file -> pyarrow's name. pyarrow unpacks: it is installed for Parquet, continues after the end of a
member or frame (gzip and zstd files may be concatenated), and refuses a truncated file, which Python's zlib objects
leave to the caller. On 99 MB of JSONL, two cores: zstd 590 MB/s, gzip 230; Python's gzip module 160."""
BUFFER_BYTES = 1 << 20
"""Unpacked at a time: 64 kB make zstd a third slower."""

MAX_DOCUMENT_BYTES = 1 << 31
"""No document of a corpus is 2 GB long; a line of JSONL without an end, or a packed text that grows without one, would
otherwise take all memory."""
BOMB_BYTES = 1 << 26
BOMB_RATIO = 200
"""Text packs to a tenth, logs to a fiftieth, zeros to a thousandth: one document over `BOMB_BYTES` that takes so many
times the whole packed file is refused before it fills the memory."""
PARQUET_BATCH_ROWS = 256
"""Rows decoded at a time: web documents of 5 kB make 1 MB, and a row group (often 1 GB) is never in memory whole."""

LINKED, WRITTEN = "linked folder", "run or lab folder"
"""Folders that are left out of a folder; of those that match a glob, the second."""

JSON = json.JSONDecoder(parse_int=lambda digits: 0)
"""Only texts are read. Python refuses to convert an integer of more than 4300 digits, which is JSON all the same."""


@dataclass(frozen=True, slots=True)
class DocumentFile:
    path: Path
    name: str
    """Posix path relative to the corpus: order and fingerprint of several files depend on it, not on where the corpus
    is."""
    lenient: bool
    """Found in a folder rather than named by the user: count and skip it if it is not text."""
    sha256: str | None = None
    """Of its contents, where that is known already."""

    @property
    def suffix(self) -> str:
        """The format: that of the name, without the .gz or .zst after a format that may be packed."""
        return format_suffix(self.path)


class NotTextError(UserError):
    """A file that is not UTF-8 text."""


class UnpackError(UserError):
    """A packed file that cannot be unpacked to its end."""


def is_packed(path: Path) -> bool:
    return path.suffix.lower() in CODECS


def format_suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    if not is_packed(path):
        return suffix
    return inner if inner in TEXT_SUFFIXES | JSONL_SUFFIXES else inner + suffix


def stdlib_files() -> list[DocumentFile]:
    """The running interpreter's library sources (31 MB in CPython 3.11), the embedded corpus.

    Ordered by the SHA-1 of the relative path: shuffled over the packages, and the same on every machine.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths, _ = _walk(library, ["site-packages", "dist-packages"])
    names = [name for name in paths if name.endswith(".py")]
    if not names:
        raise UserError(f"stdlib: this Python has no library sources under {library}; name a folder or file instead")
    names.sort(key=lambda name: hashlib.sha1(name.encode("utf-8", "surrogateescape"), usedforsecurity=False).digest())
    return [DocumentFile(library / name, name, lenient=True) for name in names]


def folder_files(root: Path) -> tuple[list[DocumentFile], Counter[str]]:
    """The files below a folder, and which folders there are left out (what -> count)."""
    paths, left_out = _walk(root)
    names = [name for name in sorted(paths) if format_suffix(Path(name)) in KNOWN_SUFFIXES]
    return [DocumentFile(root / name, name, lenient=True) for name in names], left_out


def glob_files(pattern: str) -> tuple[list[DocumentFile], Counter[str]]:
    """Files of known formats that match, each once, however many links lead to it, and which folders of theirs are left
    out (what -> count). The names are relative to the folder before the first wildcard. UserError for a folder that
    cannot be listed."""
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    searched = {Path(*parts[: i + (part == "**")]) for i, part in enumerate(parts) if glob.has_magic(part)}
    for folder in (found for path in searched for found in glob.glob(os.path.join(path, ""), recursive=True)):
        try:
            os.scandir(Path(folder)).close()
        except OSError as error:
            _cannot_list(error)  # glob passes over it
    paths = [Path(match) for match in glob.glob(pattern, recursive=True)]
    paths = [path for path in paths if path.is_file() and format_suffix(path) in KNOWN_SUFFIXES]
    folders = {folder for path in paths for folder in path.parents if folder.is_relative_to(root)} - {root}
    with cannot(f"list the folders of {pattern}"):
        written = {folder for folder in folders if _is_written(os.listdir(folder))}
    found: dict[str, DocumentFile] = {}
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        if written.isdisjoint(path.parents):
            found.setdefault(os.path.realpath(path), DocumentFile(path, name, lenient=True))
    return list(found.values()), Counter({WRITTEN: sum(written.isdisjoint(folder.parents) for folder in written)})


def _walk(root: Path, ignored: Iterable[str] = ()) -> tuple[list[str], Counter[str]]:
    """Relative posix paths of the files below `root`, and which folders are left out: links to folders (they may lead
    in circles), and runs and labs. UserError for a folder that cannot be listed."""
    ignored, paths, left_out = {"__pycache__", *ignored}, list[str](), Counter[str]()
    for folder, subfolders, files in os.walk(root, onerror=_cannot_list):
        if Path(folder) != root and _is_written([*subfolders, *files]):
            left_out[WRITTEN] += 1
            subfolders.clear()
            continue
        subfolders[:] = [name for name in subfolders if name not in ignored and not name.startswith(".")]
        left_out[LINKED] += sum(os.path.islink(os.path.join(folder, name)) for name in subfolders)
        paths += [(Path(folder) / name).relative_to(root).as_posix() for name in files if not name.startswith(".")]
    return paths, left_out


def _is_written(names: Sequence[str]) -> bool:
    """Whether a folder with these entries is a run or a lab: training that writes into its own corpus would change what
    the next run reads."""
    return is_run(names) or {"lab.json", "program.md"} <= {*names}


def _cannot_list(error: OSError) -> None:
    raise UserError(f"cannot list the folder {error.filename}: {error.strerror or error}") from error


def probe(file: DocumentFile, text_column: str) -> None:
    """UserError for what a file's first document shows, or its columns."""
    if file.suffix in PARQUET_SUFFIXES:
        _open_parquet(file.path, text_column).close()
    elif not file.lenient:
        if file.path.stat().st_size == 0:
            raise UserError(f"{file.path} is empty: a corpus needs text")
        next(read_documents(file, text_column, Counter(), hashlib.sha256()), None)


def read_documents(file: DocumentFile, text_column: str, skipped: Counter[str], digest: hashlib._Hash) -> Iterator[str]:
    """The documents of one file, in its order; adds to `skipped` (reason -> count). Raises UserError.

    Once all are read, `digest` has taken in the bytes of the file; for a file that was not opened, none.
    """
    if file.suffix in PARQUET_SUFFIXES:
        return _read_parquet(file.path, text_column, skipped, digest)
    if file.suffix in JSONL_SUFFIXES:
        return _read_jsonl(file, text_column, skipped, digest)
    if file.suffix in TEXT_SUFFIXES or not file.suffix:
        return _read_text(file, skipped, digest)
    name, packing = (file.path.stem, file.path.suffix) if is_packed(file.path) else (file.path.name, "")
    advice = f"if it is text, rename it to {name}.txt{packing}"
    kind = file.suffix.removesuffix(packing.lower())
    if kind == ".json":
        advice = "make it JSONL, one JSON object a line"
    elif kind in _ARCHIVES | PARQUET_SUFFIXES:
        advice = "unpack it"
    elif file.suffix in (".npy", ".npz"):
        advice = "of tokens, make a .bin: a folder of nanoGPT, or shards of llm.c"
    raise UserError(
        f"{file.path}: {file.suffix} is not a format gptlab reads; it reads text (.txt .md .py and the like), "
        f".jsonl and .parquet, the first two also packed (.gz .zst) ({advice})"
    )


def _read_text(file: DocumentFile, skipped: Counter[str], digest: hashlib._Hash) -> Iterator[str]:
    try:
        text = _decode(_read_bytes(file.path, digest), file.path)
    except UserError as error:
        if not file.lenient or isinstance(error, UnpackError):  # somebody packed it, so it was text
            raise
        skipped["not UTF-8 text" if isinstance(error, NotTextError) else "unreadable"] += 1
        return
    yield text


def _read_bytes(path: Path, digest: hashlib._Hash) -> bytearray:
    """The content of a file that is one document."""
    most_bytes, data = _most_bytes(path), bytearray()
    too_many = f"more than {most_bytes:,} bytes, and a text file is one document"
    with _unpacked(path, digest) as stream:
        if not is_packed(path) and path.stat().st_size > most_bytes:
            raise UserError(f"{path} has {too_many}: make it JSONL")
        while chunk := stream.read1():
            data += chunk
            if len(data) > most_bytes:
                raise UnpackError(f"{path} unpacks to {too_many}")
    return data


def _most_bytes(path: Path) -> int:
    """Of a document in this file."""
    if not is_packed(path):
        return MAX_DOCUMENT_BYTES
    return min(MAX_DOCUMENT_BYTES, max(BOMB_BYTES, BOMB_RATIO * path.stat().st_size))


def _decode(data: bytearray, path: Path) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise NotTextError(f"{path} is UTF-16 text, as its first two bytes say; convert it to UTF-8")
    if b"\0" in data:
        raise NotTextError(f"{path} is a binary file (a NUL byte at offset {data.index(0)}); gptlab reads UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotTextError(
            f"{path} is not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}); convert it to UTF-8"
        ) from error


def _read_jsonl(file: DocumentFile, key: str, skipped: Counter[str], digest: hashlib._Hash) -> Iterator[str]:
    with _unpacked(file.path, digest) as stream:
        most_bytes = _most_bytes(file.path)
        for number, line in enumerate(iter(lambda: stream.readline(most_bytes + 1), b""), start=1):
            if len(line) > most_bytes:
                raise UserError(
                    f"{file.path}:{number}: more than {most_bytes:,} bytes without a line end; JSONL holds one "
                    "JSON object a line"
                )
            if not line.strip():
                continue
            text = _text_of(line, key, f"{file.path}:{number}")
            if text is None:
                skipped["null"] += 1
            elif not _is_unicode(text):
                skipped["lone surrogate"] += 1  # "\ud800" is legal JSON, but no text: UTF-8 cannot hold it.
            else:
                yield text


def _text_of(line: bytes, key: str, place: str) -> str | None:
    try:
        record = JSON.decode(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 text; JSONL holds one JSON object a line") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error}); JSONL holds one JSON object a line") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: a JSON {type(record).__name__}, not an object; JSONL holds one JSON object a line")
    if key not in record:
        raise UserError(f"{place}: no key {key!r}; {_named('key', list(record), key)} (data.text_column picks it)")
    text = record[key]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{place}: {key!r} holds a {type(text).__name__}, not a string")
    return text


def _read_parquet(path: Path, column: str, skipped: Counter[str], digest: hashlib._Hash) -> Iterator[str]:
    import pyarrow

    with _open_parquet(path, column) as parquet:
        try:
            for batch in parquet.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[column]):
                for text in batch.column(column).to_pylist():
                    if text is None:
                        skipped["null"] += 1
                    else:
                        yield text
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is damaged Parquet: {_first_line(error)}") from error
    # The footer is read first and columns in pieces: there is no order to hash in.
    with cannot(f"read {path}"), open_plain(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)


def _open_parquet(path: Path, column: str) -> pyarrow.parquet.ParquetFile:
    import pyarrow  # Takes 0.2 s to import, and most corpora have no Parquet.
    import pyarrow.parquet

    try:
        require_plain(path)
        parquet = pyarrow.parquet.ParquetFile(path)
        schema = parquet.schema_arrow
        names = schema.names
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path} as Parquet: a column's name is not UTF-8 ({error})") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"cannot read {path} as Parquet: {_first_line(error)}") from error
    if column not in names:
        parquet.close()
        raise UserError(f"{path}: no column {column!r}; {_named('column', names, column)} (data.text_column)")
    if (n_columns := names.count(column)) > 1:
        parquet.close()
        reason = f"{n_columns} columns are named {column!r}; rename them, or choose another one (data.text_column)"
        raise UserError(f"{path}: {reason}")
    kind = schema.field(column).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        parquet.close()
        raise UserError(f"{path}: column {column!r} holds {kind}, not strings")
    return parquet


def _named(what: str, names: list[str], wanted: str) -> str:
    """What there is instead, the nearest first where one comes close."""
    nearest = nearest_name(wanted, names)
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"{what}s there: {shown or 'none'}" + (f"; nearest: {nearest}" if nearest else "")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def _unpacked(path: Path, digest: hashlib._Hash) -> Iterator[BufferedReader[Any]]:
    """The content of a file, unpacked if its name says that it is packed. UserError for what the system refuses to
    open or read, UnpackError for what cannot be unpacked.

    `digest` takes in the bytes of the file as they are read: all of them once the end has been read.
    """
    with cannot(f"read {path}"), BufferedReader(_Hashed(open_plain(path), digest), BUFFER_BYTES) as file:
        if not is_packed(path):
            yield file
            return
        import pyarrow  # Takes 0.2 s to import, and most corpora are not packed.

        try:
            with pyarrow.CompressedInputStream(file, CODECS[path.suffix.lower()]) as stream:
                yield BufferedReader(stream, BUFFER_BYTES)
                while file.read(BUFFER_BYTES):  # whatever follows the packed data
                    pass
        except (OSError, pyarrow.ArrowException) as error:
            reason = _first_line(error)
            raise UnpackError(f"{path} is damaged or no {path.suffix} file: {reason}") from error


class _Hashed(io.RawIOBase):
    """A file whose bytes are hashed while they are read."""

    def __init__(self, file: BufferedReader, digest: hashlib._Hash) -> None:
        self._file, self._digest = file, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = self._file.readinto(buffer)
        self._digest.update(memoryview(buffer)[:count])
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
