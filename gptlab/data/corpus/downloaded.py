"""Which files of named corpora are on this machine. Reads records and files, never the network.

    CACHE/hub/OWNER--NAME-HASH.json   one record for each repository, revision and glob: the commit, the files of it
                                      with their sizes and hashes, and which of them were downloaded and verified
    CACHE/downloads/FILE              single files from the web

The files of the hub are in the Hugging Face cache, which other programs share. A record pins the commit: files
downloaded later come from the same one, and what a run trains on does not depend on what the hub holds today. Deleting
the record asks the hub again.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError
from gptlab.data.corpus.known_corpora import HubFiles, KnownCorpus, NamedSource, WebFile
from gptlab.runtime.files.cache import is_inside
from gptlab.runtime.files.strict_json import read_json_object, write_json_atomic

RECORD_SCHEMA = 1
MISSING_SHOWN = 3


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What the hub says of a file."""

    n_bytes: int
    sha256: str | None
    """Of files in large file storage (LFS, Xet)."""
    blob_id: str
    """git's hash of the others: SHA-1 over a header and the contents."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A file whose hash was right when it had this time of change."""

    sha256: str
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: Path
    name: str
    """Its path in the repository."""
    sha256: str | None
    """Of its contents; None where the file was touched since it was verified."""


@dataclass(slots=True)
class HubRecord:
    repo: str
    revision: str | None
    commit: str
    folder: str
    """Where the Hugging Face cache has the files of this commit."""
    files: dict[str, RemoteFile]
    """All that the glob matches, by path."""
    verified: dict[str, Verified] = field(default_factory=dict)

    def local(self, name: str) -> LocalFile | None:
        """The downloaded file, or None where it is not there, cut short, or was never verified."""
        known = self.verified.get(name)
        path = Path(self.folder) / name
        try:
            status = path.stat()
        except OSError:
            return None
        if known is None or status.st_size != self.files[name].n_bytes:
            return None
        return LocalFile(path, name, known.sha256 if status.st_mtime_ns == known.mtime_ns else None)


def record_path(place: HubFiles, root: Path) -> Path:
    digest = hashlib.sha256(repr((place.repo, place.revision, place.files)).encode()).hexdigest()
    return root / "hub" / f"{place.repo.replace('/', '--')}-{digest[:12]}.json"


def web_path(place: WebFile, root: Path) -> Path:
    return root / "downloads" / place.file


def read_record(place: HubFiles, root: Path) -> HubRecord | None:
    """None where it is missing or damaged: then nothing counts as downloaded."""
    try:
        value: dict[str, Any] = read_json_object(record_path(place, root))
        if value.pop("schema") != RECORD_SCHEMA:
            return None
        files = {name: RemoteFile(**file) for name, file in value.pop("files").items()}
        verified = {name: Verified(**file) for name, file in value.pop("verified").items()}
        record = HubRecord(**value, files=files, verified=verified)
    except (UserError, KeyError, TypeError, AttributeError):
        return None
    sound = (
        isinstance(record.folder, str)
        and isinstance(record.commit, str)
        and all(is_inside(name) for name in (*files, *verified))
        and all(type(file.n_bytes) is int for file in files.values())
        and all(_is_sha256(file.sha256) for file in verified.values())
    )
    return record if sound else None


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def write_record(place: HubFiles, record: HubRecord, root: Path) -> None:
    path = record_path(place, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {"schema": RECORD_SCHEMA, **asdict(record)})


def local_files(source: NamedSource, hub_files: int | None, root: Path) -> list[LocalFile]:
    """The files that `source` stands for, in the order of their names. UserError where one is not on this machine."""
    if isinstance(source.place, WebFile):
        path = web_path(source.place, root)
        if not path.is_file():
            raise _not_here(source, hub_files, "it is not on this machine")
        return [LocalFile(path, source.place.file, None)]
    record = read_record(source.place, root)
    train, val = source.wanted(record.files, hub_files) if record else ([], [])
    found = {name: record.local(name) for name in (val if source.validation else train)} if record else {}
    missing = [name for name, file in found.items() if file is None]
    if missing or not found:
        shown = ", ".join(missing[:MISSING_SHOWN]) + (", ..." if len(missing) > MISSING_SHOWN else "")
        part = f"{len(missing)} of its {len(found)} files are" if 0 < len(missing) < len(found) else "it is"
        raise _not_here(source, hub_files, f"{part} not on this machine" + (f" ({shown})" if part != "it is" else ""))
    return [file for file in found.values() if file is not None]


def state(corpus: KnownCorpus, root: Path) -> str:
    """How much of a known corpus is on this machine, in a word or two."""
    if isinstance(corpus.place, WebFile):
        return "yes" if web_path(corpus.place, root).is_file() else "no"
    record = read_record(corpus.place, root)
    if record is None:
        return "no"
    train, val = NamedSource(name=corpus.name, place=corpus.place, known=corpus).wanted(record.files, len(record.files))
    here = [sum(record.local(name) is not None for name in names) for names in (train, val)]
    return f"{here[0]:,} files" + (f" + {here[1]} val" if val else "") if any(here) else "no"


def how_much(source: NamedSource, hub_files: int | None) -> str:
    """`8 files, about 0.8 GB`, where the table knows it."""
    if source.known is None:
        return "" if hub_files is None else f"{hub_files} files"
    n_files = min(hub_files or source.known.default_files, source.known.all_files)
    size = size_text(n_files * source.known.file_bytes)
    return f"{n_files} files, about {size}" if n_files > 1 else size


def size_text(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:,.1f} MB"


def _not_here(source: NamedSource, hub_files: int | None, what: str) -> UserError:
    quoted = f"'{source.name}'" if set(source.name) & set("*?[ ") else source.name
    limit = "" if hub_files is None else f" --hub-files {hub_files}"
    amount = how_much(source, hub_files)
    fewer = source.known is not None and source.known.default_files > 4
    return UserError(
        f"{source.name}: {what}; `gptlab data prepare {quoted}{limit}` downloads what is missing"
        + (f" of {amount}" if amount else "")
        + (" (with --data.hub-files N, training takes fewer files)" if fewer else "")
    )


def hashed(path: Path) -> tuple[str, str]:
    """(SHA-256, git's blob id) of a file, read once. OSError where it cannot be read."""
    sha256 = hashlib.sha256()
    blob = hashlib.sha1(f"blob {os.path.getsize(path)}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            sha256.update(block)
            blob.update(block)
    return sha256.hexdigest(), blob.hexdigest()
