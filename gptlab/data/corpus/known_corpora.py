"""Named corpora, the grammar of `hub:OWNER/NAME[@REVISION][/GLOB]`, and which files of both are on this machine.

A source is looked up in this order: `stdlib`, an existing file or folder, `hub:...`, a name of the table below, a
glob. So a folder `tinystories` in the current directory goes before the corpus of that name. `NAME:val` is the part of
a named corpus that its lineage validates on.

    CACHE/hub/OWNER--NAME-HASH.json   one record for each repository, revision and glob: the commit, the files of it
                                      with their sizes and hashes, and which of them were downloaded and verified
    CACHE/downloads/FILE              single files from the web

The files of the hub are in the Hugging Face cache, which other programs share. A record pins the commit: files
downloaded later come from the same one, and what a run trains on does not depend on what the hub holds today. Deleting
the record asks the hub again. Nothing here uses the network.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError
from gptlab.data.corpus.corpus_files import DocumentFile
from gptlab.runtime.files.cache import file_sha256, is_inside
from gptlab.runtime.files.plain_file import read_json_object, write_json_atomic

RECORD_SCHEMA = 1
MISSING_SHOWN = 3
HUB_PREFIX = "hub:"
VALIDATION_SUFFIX = ":val"
CORE = "core"
"""The name under which `gptlab data prepare` fetches the CORE tasks; text for evaluation, never for training."""

_HUB_SOURCE = re.compile(r"hub:(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^/]+))?(?:/(?P<files>.+))?")
_FORMATS = (
    (".parquet", ".pq"),
    (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst"),
    (".txt", ".txt.gz", ".txt.zst"),
    (".bin",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFiles:
    """Files of a data set on the Hugging Face hub."""

    repo: str
    revision: str | None = None
    """A branch, tag or commit; None: main, at the commit of the first download."""
    files: str | None = None
    """A glob over paths, in which * crosses slashes. None: those of one format, see `training_files`."""
    validation: str | None = None
    """A glob: which of them validate, never trained on."""

    @property
    def address(self) -> str:
        return f"https://huggingface.co/datasets/{self.repo}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebFile:
    """One file at a fixed address."""

    address: str
    file: str
    """Its name here."""
    sha256: str | None
    """None: not published; the contents must then be checked in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCorpus:
    name: str
    what: str
    lineage: str
    place: HubFiles | WebFile
    license: str
    default_files: int
    """Training files that are taken where `data.hub_files` does not say."""
    all_files: int
    text_column: str = "text"
    file_bytes: int
    """Of a training file, about; what is asked of the hub is exact."""


CORPORA: tuple[KnownCorpus, ...] = (
    KnownCorpus(
        name="fineweb-edu", what="educational web pages, 100 billion tokens, shuffled",
        lineage="nanochat: begins with 8 files, its depth-24 run takes 370; shard_01822 validates here",
        place=HubFiles(
            repo="karpathy/fineweb-edu-100b-shuffle", files="shard_*.parquet", validation="shard_01822.parquet"
        ),
        license="ODC-By 1.0", default_files=8, all_files=1822, file_bytes=100_000_000,
    ),
    KnownCorpus(
        name="climbmix", what="NVIDIA's mixture of web pages, 400 billion tokens, shuffled",
        lineage="autoresearch: 10 files; nanochat since March 2026; validates on the last",
        place=HubFiles(
            repo="karpathy/climbmix-400b-shuffle", files="shard_*.parquet", validation="shard_06542.parquet"
        ),
        license="CC BY-NC 4.0", default_files=10, all_files=6542, file_bytes=100_000_000,
    ),
    KnownCorpus(
        name="tinystories", what="2 million short stories in the words of small children",
        lineage="for small models; validates on the file that its authors hold out",
        place=HubFiles(repo="roneneldan/TinyStories", files="data/*.parquet", validation="data/validation-*.parquet"),
        license="CDLA-Sharing 1.0", default_files=4, all_files=4, file_bytes=248_000_000,
    ),
    KnownCorpus(
        name="tinyshakespeare", what="1.1 MB of Shakespeare's plays",
        lineage="nanoGPT (shakespeare-char): the last tenth validates, data.split=tail",
        # The hub's karpathy/tiny_shakespeare holds only a script, and cuts the text in three.
        place=WebFile(
            address="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            file="tinyshakespeare.txt",
            sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
        license="public domain", default_files=1, all_files=1, file_bytes=1_115_394,
    ),
    KnownCorpus(
        name="openwebtext", what="pages that Reddit linked to, 9 billion tokens: what GPT-2 read, collected again",
        lineage="nanoGPT (gpt2-124m): data.val_fraction=0.0005",
        place=HubFiles(repo="Skylion007/openwebtext", files="*/train-*.parquet"),
        license="CC0 1.0", default_files=80, all_files=80, file_bytes=305_000_000,
    ),
    KnownCorpus(
        name="fineweb10b-gpt2",
        what="10 billion tokens of web pages, in GPT-2's vocabulary, as llm.c's shards",
        lineage="modded-nanogpt: 103 files; validates on fineweb_val_000000.bin",
        place=HubFiles(repo="kjj0/fineweb10B-gpt2", files="fineweb_*.bin", validation="fineweb_val_*.bin"),
        license="MIT; the text ODC-By 1.0", default_files=103, all_files=103, file_bytes=200_000_000,
    ),
)  # fmt: skip

CORE_BUNDLE = WebFile(
    address="https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip", file="eval_bundle.zip", sha256=None
)
"""The CORE tasks (DCLM, arXiv 2406.11794) as nanochat packs them, 160 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSource:
    """A source that must be downloaded once before it can be read."""

    name: str
    """As it was given, without VALIDATION_SUFFIX."""
    place: HubFiles | WebFile
    known: KnownCorpus | None = None
    validation: bool = False
    """The files that validate, not those that train."""

    def wanted(self, paths: Iterable[str], hub_files: int | None) -> tuple[list[str], list[str]]:
        """(training, validation) among the paths of the repository, each in the order of their names.

        `hub_files` limits those that train; None: the table's number, or all.
        """
        assert isinstance(self.place, HubFiles)
        train, val = training_files(paths, self.place)
        limit = hub_files or (self.known.default_files if self.known else None)
        return train[:limit], val


def named_source(source: str) -> NamedSource | None:
    """What `source` names; None for a path, a glob or `stdlib`. UserError for a malformed hub address."""
    if os.path.exists(os.path.expanduser(source)):
        return None
    if source.startswith(HUB_PREFIX):
        match = _HUB_SOURCE.fullmatch(source)
        if match is None:
            raise UserError(
                f"{source!r} is not an address on the hub: it is hub:OWNER/NAME[@REVISION][/GLOB], such as "
                "'hub:roneneldan/TinyStories/data/train-*.parquet' (a slash in a revision is written %2F)"
            )
        revision = match["revision"]
        revision = revision.replace("%2F", "/").replace("%2f", "/") if revision else None
        return NamedSource(name=source, place=HubFiles(repo=match["repo"], revision=revision, files=match["files"]))
    name = source.removesuffix(VALIDATION_SUFFIX)
    validation = name != source
    known = next((corpus for corpus in CORPORA if corpus.name == name), None)
    if known is None:
        return None
    if validation and not _validates(known.place):
        raise UserError(f"{source}: {name} has no files that validate; `data.split` holds out a part of it")
    return NamedSource(name=name, place=known.place, known=known, validation=validation)


def fixed_validation(sources: Sequence[str]) -> tuple[str, ...]:
    """The `NAME:val` of those sources whose lineage fixes what validates."""
    entries = [entry for source in sources if (entry := named_source(source)) and not entry.validation]
    return tuple(f"{entry.name}{VALIDATION_SUFFIX}" for entry in entries if _validates(entry.place))


def training_files(paths: Iterable[str], place: HubFiles) -> tuple[list[str], list[str]]:
    """(training, validation) among `paths`, sorted by name.

    Without a glob: the Parquet files, else JSONL, else text, else .bin; and of these, where some have `train` in
    their path, only those: the others are the test sets of data sets that are split.
    """
    paths = sorted(paths)
    if place.files is not None:
        chosen = [path for path in paths if fnmatchcase(path, place.files)]
    else:
        of_format = ([path for path in paths if path.lower().endswith(suffixes)] for suffixes in _FORMATS)
        chosen = next((group for group in of_format if group), [])
        chosen = [path for path in chosen if "train" in path.lower()] or chosen
    val = [path for path in chosen if place.validation is not None and fnmatchcase(path, place.validation)]
    return [path for path in chosen if path not in set(val)], val


def _validates(place: HubFiles | WebFile) -> bool:
    return isinstance(place, HubFiles) and place.validation is not None


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

    def local(self, name: str, root: Path) -> DocumentFile | None:
        """The downloaded file, or None where it is not there, was never verified, or is not what was verified.

        One that was touched since is hashed again; `root`, the cache, remembers the hashes of large files.
        """
        known, path = self.verified.get(name), Path(self.folder) / name
        try:
            status = path.stat()
            if known is None or status.st_size != self.files[name].n_bytes:
                return None
            if status.st_mtime_ns != known.mtime_ns and file_sha256(path, root).hex() != known.sha256:
                return None
        except OSError:
            return None
        return DocumentFile(path, name, False, known.sha256)


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
        and all(re.fullmatch("[0-9a-f]{64}", str(file.sha256)) for file in verified.values())
    )
    return record if sound else None


def write_record(place: HubFiles, record: HubRecord, root: Path) -> None:
    path = record_path(place, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {"schema": RECORD_SCHEMA, **asdict(record)})


def local_files(source: NamedSource, hub_files: int | None, root: Path) -> list[DocumentFile]:
    """The files that `source` stands for, in the order of their names. UserError where one is not on this machine."""
    found: dict[str, DocumentFile | None] = {}
    if isinstance(source.place, WebFile):
        path = web_path(source.place, root)
        found[source.place.file] = DocumentFile(path, source.place.file, lenient=False) if path.is_file() else None
    elif (record := read_record(source.place, root)) is not None:
        train, val = source.wanted(record.files, hub_files)
        found = {name: record.local(name, root) for name in (val if source.validation else train)}
    files = [file for file in found.values() if file is not None]
    if files and len(files) == len(found):
        return files
    what = "it is not on this machine"
    if files:
        missing = [name for name, file in found.items() if file is None]
        shown = ", ".join(missing[:MISSING_SHOWN]) + (", ..." if len(missing) > MISSING_SHOWN else "")
        what = f"{len(missing)} of its {len(found)} files are not on this machine ({shown})"
    raise _not_here(source, hub_files, what)


def state(corpus: KnownCorpus, root: Path) -> str:
    """How much of a known corpus is on this machine, in a word or two."""
    if isinstance(corpus.place, WebFile):
        return "yes" if web_path(corpus.place, root).is_file() else "no"
    record = read_record(corpus.place, root)
    if record is None:
        return "no"
    train, val = NamedSource(name=corpus.name, place=corpus.place, known=corpus).wanted(record.files, len(record.files))
    here = [sum(record.local(name, root) is not None for name in names) for names in (train, val)]
    return f"{here[0]:,} files" + (f" + {here[1]} val" if val else "") if any(here) else "no"


def size_text(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:,.1f} MB"


def _not_here(source: NamedSource, hub_files: int | None, what: str) -> UserError:
    quoted = f"'{source.name}'" if set(source.name) & set("*?[ ") else source.name
    limit = "" if hub_files is None else f" --hub-files {hub_files}"
    amount = "" if hub_files is None else f" of {hub_files} files"
    fewer = ""
    if (known := source.known) is not None:
        n_files = min(hub_files or known.default_files, known.all_files)
        amount = f" of {n_files} files, about " if n_files > 1 else " of "
        amount += size_text(n_files * known.file_bytes)
        fewer = " (with --data.hub-files N, training takes fewer files)" if known.default_files > 4 else ""
    return UserError(
        f"{source.name}: {what}; `gptlab data prepare {quoted}{limit}` downloads what is missing{amount}{fewer}"
    )


def file_digests(path: Path) -> tuple[str, str]:
    """(SHA-256, git's blob id) of a file, read once. OSError where it cannot be read."""
    sha256 = hashlib.sha256()
    blob = hashlib.sha1(f"blob {os.path.getsize(path)}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            sha256.update(block)
            blob.update(block)
    return sha256.hexdigest(), blob.hexdigest()
