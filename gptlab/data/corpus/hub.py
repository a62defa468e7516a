"""Downloads named corpora: the only place that touches the network, and only `gptlab data prepare` calls it.

huggingface_hub does the work: its cache (shared with other programs), its token, its mirrors (HF_ENDPOINT), Xet where
the hub offers it, and broken connections resumed within a file. gptlab adds: one commit for all files, files in
parallel, the hash of every file compared with what the hub announced, progress on the console, and one line for each
failure. What a stopped download finished is kept, file by file.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gptlab.config.errors import UserError
from gptlab.data.corpus.known_corpora import (
    HubFiles,
    HubRecord,
    NamedSource,
    RemoteFile,
    Verified,
    WebFile,
    file_digests,
    named_source,
    read_record,
    record_path,
    training_files,
    web_path,
    write_record,
)
from gptlab.runtime.files.cache import is_inside, locked
from gptlab.runtime.records.console import Console

T = TypeVar("T")

PARALLEL_FILES = 8  # autoresearch's number
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Waits between the attempts at a request that may succeed the next time; huggingface_hub has its own within each."""
LISTING_TIMEOUT_SECONDS = 20.0
SHOW_SECONDS = 0.1


def download_sources(sources: Sequence[str], hub_files: int | None, root: Path, console: Console) -> None:
    """Download what of `sources` has a name and is not on this machine yet. UserError, one line, for any failure."""
    for source in sources:
        named = named_source(source)
        if named is None:
            continue
        if isinstance(named.place, WebFile):
            n_bytes = named.known.file_bytes if named.known else None
            download_web_file(named.name, named.place, web_path(named.place, root), n_bytes, console)
        else:
            _download_hub_files(named, named.place, hub_files, root, console)


def download_web_file(name: str, place: WebFile, path: Path, n_bytes: int | None, console: Console) -> None:
    """Fetch one file to `path`, unless it is there. `n_bytes`: its size, where it is known. UserError."""
    part = path.with_name(f"{path.name}.part")
    with _quiet_hub() as hub, _explained(name, place.address, "such file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path, name, console):
            if path.is_file():
                return

            def fetch(meter: _Meter) -> None:
                with part.open("wb") as stream:
                    # The length of a compressed answer would not be the file's.
                    headers = {"Accept-Encoding": "identity"}
                    hub.file_download.http_get(place.address, stream, headers=headers, tqdm_class=meter.bar(name))
                if place.sha256 is not None and (found := file_digests(part)[0]) != place.sha256:
                    raise _WrongContentsError(path.name, found, place.sha256)

            try:
                _in_parallel({name: fetch}, f"downloading {name}", n_bytes, console, lambda _name, _result: None)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)


def _download_hub_files(
    source: NamedSource, place: HubFiles, hub_files: int | None, root: Path, console: Console
) -> None:
    record = read_record(place, root)
    if record is not None and not _missing(source, record, hub_files, root):
        return
    with _quiet_hub() as hub, _explained(source.name, hub.constants.ENDPOINT, f"data set {place.repo}"):
        path = record_path(place, root)
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path, source.name, console):
            # Also where all is known: one quick request shows whether the hub can be reached.
            record = _listed(hub, place, read_record(place, root), path)
            if missing := _missing(source, record, hub_files, root):
                try:
                    _download_missing(hub, source, record, missing, console)
                finally:
                    write_record(place, record, root)


def _download_missing(
    hub: Any, source: NamedSource, record: HubRecord, missing: Sequence[str], console: Console
) -> None:
    """Download the files named in `missing` and enter them in the record, one by one."""
    total = sum(record.files[name].n_bytes for name in missing)
    _require_space(total, len(missing), Path(hub.constants.HF_HUB_CACHE), source.name)

    def fetch(name: str, meter: _Meter) -> tuple[Path, str]:
        path = hub.hf_hub_download(
            record.repo, name, repo_type="dataset", revision=record.commit, library_name="gptlab",
            endpoint=hub.constants.ENDPOINT, tqdm_class=meter.bar(name),
        )  # fmt: skip
        sha256 = _require_contents(Path(path), name, record.files[name])
        meter.n_bytes[name] = record.files[name].n_bytes  # Also where another program had downloaded it.
        return Path(path), sha256

    def enter(name: str, result: tuple[Path, str]) -> None:
        path, sha256 = result
        record.folder = os.fspath(path.parents[name.count("/")])
        record.verified[name] = Verified(sha256, path.stat().st_mtime_ns)

    what = f"downloading {source.name} ({len(missing)} file{'s' if len(missing) > 1 else ''})"
    _in_parallel({name: partial(fetch, name) for name in missing}, what, total, console, enter)


def _missing(source: NamedSource, record: HubRecord, hub_files: int | None, root: Path) -> list[str]:
    train, val = source.wanted(record.files, hub_files)
    names = val if source.validation else [*val, *train]
    if not names:
        raise UserError(
            f"{source.name}: none of its files match; gptlab reads .parquet, .jsonl, .txt and .bin, and a glob picks "
            "others: hub:OWNER/NAME/GLOB"
        )
    return [name for name in names if record.local(name, root) is None]


def _listed(hub: Any, place: HubFiles, known: HubRecord | None, path: Path) -> HubRecord:
    """What the hub has at the record's commit, or, without a record, at the revision requested."""
    api = hub.HfApi(endpoint=hub.constants.ENDPOINT, library_name="gptlab")
    revision = known.commit if known else place.revision or "main"
    ask = partial(api.repo_info, place.repo, repo_type="dataset", revision=revision, timeout=LISTING_TIMEOUT_SECONDS)
    try:
        commit = str(_patiently(ask).sha)
    except hub.errors.RevisionNotFoundError:
        if known is None:
            raise
        raise UserError(
            f"hub:{place.repo}: commit {revision[:12]} of the files on this machine is gone; "
            f"delete {path} to begin with today's"
        ) from None
    if known is not None:
        return known
    tree = partial(api.list_repo_tree, place.repo, recursive=True, revision=commit, repo_type="dataset")
    files = {
        entry.path: RemoteFile(entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)
        for entry in _patiently(lambda: list(tree()))
        if isinstance(entry, hub.hf_api.RepoFile)
    }
    if outside := next((name for name in files if not is_inside(name)), None):
        raise UserError(
            f"hub:{place.repo} lists {outside!r}, a path that leads out of its folder: nothing of it is taken"
        )
    train, val = training_files(files, place)
    chosen = {path: files[path] for path in sorted([*train, *val])}
    return HubRecord(place.repo, place.revision, commit, folder="", files=chosen)


def _require_space(needed: int, n_files: int, cache: Path, name: str) -> None:
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())).free
    if needed > free:
        raise UserError(
            f"{name}: the {n_files} files to download take {needed / 1e9:,.1f} GB, and {cache} has {free / 1e9:,.1f} "
            "GB free; --hub-files N takes fewer of them, HF_HOME names another place"
        )


def _require_contents(path: Path, name: str, announced: RemoteFile) -> str:
    """The file's SHA-256. Other contents than announced are removed, and _WrongContentsError is raised."""
    sha256, blob_id = file_digests(path)
    found, wanted = (sha256, announced.sha256) if announced.sha256 else (blob_id, announced.blob_id)
    if found != wanted:
        contents = path.resolve()
        path.unlink()
        contents.unlink(missing_ok=True)
        raise _WrongContentsError(name, found, wanted)
    return sha256


class _WrongContentsError(Exception):
    def __init__(self, name: str, found: str, wanted: str) -> None:
        super().__init__(f"{name} arrived with other contents than announced (hash {found[:12]}, not {wanted[:12]})")


class _StoppedError(Exception):
    """Raised within a worker when another has failed or the user has pressed Ctrl-C."""


class _Meter:
    """Bytes that have arrived, by file; workers count, the console's thread reads."""

    def __init__(self) -> None:
        self.n_bytes: dict[str, int] = {}
        self.stopped = False

    def bar(self, name: str) -> type:
        """What huggingface_hub takes for a tqdm class. Its `update` is also where a download can be stopped."""
        meter = self

        class Bar:
            def __init__(self, *args: object, total: int | None = None, initial: int = 0, **rest: object) -> None:
                self.total, self.n = total, initial
                meter.n_bytes[name] = initial

            def update(self, n: int = 1) -> None:
                if meter.stopped:
                    raise _StoppedError
                self.n += n
                meter.n_bytes[name] = self.n

            def ignore(self, *args: object, **rest: object) -> None:
                """Xet's bytes on the wire, rates, redrawing."""

            update_transfer = set_postfix_str = set_transfer_postfix_str = refresh = close = __exit__ = ignore

            def __enter__(self) -> Bar:
                return self

        return Bar


def _in_parallel(
    jobs: dict[str, Callable[[_Meter], T]],
    description: str,
    total: float | None,
    console: Console,
    done: Callable[[str, T], None],
) -> None:
    """Run the jobs on threads, several times each where it may help; `done(name, result)` in this thread."""
    meter = _Meter()
    with ThreadPoolExecutor(PARALLEL_FILES) as pool, console.progress(description, total, "bytes") as progress:
        running: dict[Future[T], str] = {
            pool.submit(_patiently, lambda job=job: job(meter)): name for name, job in jobs.items()
        }
        try:
            while running:
                finished, _ = wait(running, timeout=SHOW_SECONDS, return_when=FIRST_COMPLETED)
                for future in finished:
                    done(running.pop(future), future.result())
                progress.advance(sum(meter.n_bytes.values()) - progress.done)
        except BaseException:
            meter.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _patiently(call: Callable[[], T]) -> T:
    """`call()`, again after a pause where a server was overloaded, an answer stayed away or contents were wrong."""
    pauses, wrong = list(RETRY_SECONDS), 0
    while True:
        try:
            return call()
        except Exception as error:
            wrong += isinstance(error, _WrongContentsError)
            if not pauses or wrong > 1 or not _may_pass(error):
                raise
            time.sleep(pauses.pop(0))


def _may_pass(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return status >= 500 or status in (408, 429)
    # The HTTP library's errors go by name: it was requests, then httpx, then httpx2. An OSError of huggingface_hub's
    # own, without a number, says that a file came too short.
    short = type(error) is OSError and error.errno is None
    by_name = any(word in type(error).__name__ for word in ("Timeout", "Protocol", "ReadError"))
    return short or by_name or isinstance(error, _WrongContentsError)


def _status(error: BaseException) -> int | None:
    """The HTTP status of the response that an error carries."""
    return getattr(getattr(error, "response", None), "status_code", None)


@contextmanager
def _quiet_hub() -> Iterator[Any]:
    """The module huggingface_hub, imported here, for a while without bars, warnings or telemetry."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # Read at its import; else it asks the hub who calls.
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.file_download
    import huggingface_hub.hf_api
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield huggingface_hub
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _explained(name: str, address: str, what: str) -> Iterator[None]:
    """What goes wrong within, as one line that says what would work."""
    try:
        yield
    except UserError:
        raise
    except _WrongContentsError as error:
        raise UserError(f"{name}: {error}, twice; nothing of it was kept. Try again later, or from elsewhere") from None
    except Exception as error:
        raise UserError(f"{name}: {_reason(error, address, what)}") from error


def _reason(error: Exception, address: str, what: str) -> str:
    from huggingface_hub import errors

    # huggingface_hub wraps what happened on the way in "not found locally".
    cause = error.__cause__ or error if isinstance(error, errors.LocalEntryNotFoundError) else error
    first, status = next(iter(str(cause).splitlines()), type(cause).__name__), _status(cause)
    gated = isinstance(cause, errors.GatedRepoError)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so nothing is downloaded; unset it, or train on what is on this machine"
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{address} has no such revision of {what}"
    if status == 404 or (isinstance(cause, errors.RepositoryNotFoundError) and not gated):
        return f"{address} has no {what} (status {status}), or keeps it private; if so, log in with `hf auth login`"
    if status in (401, 403):
        return f"{address} refuses {what} (status {status}): accept its terms on its page, and log in: `hf auth login`"
    if status is not None:
        return f"{address} answers with status {status}; try later, the files that have arrived are kept"
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; --hub-files N takes fewer files, HF_HOME names another place"
    if isinstance(cause, errors.HTTPError):
        return f"cannot reach {address} ({first}); only downloading needs the network, training does not"
    if isinstance(cause, errors.HFValidationError):
        return first
    if isinstance(cause, OSError):
        return f"cannot download from {address}: {cause.strerror or first}"
    raise error
