"""The cache: folders that are built once, appear in one piece, and are trusted only while they match their manifest;
and the hashes of large files, trusted until these change.

    look      manifest.json there, itself intact, every file of the right size and hash?   -> use it
    lock      one builder at a time; whoever waited looks again
    build     into a temporary sibling; files synced; manifest written last
    publish   one rename

A file up to `FULL_HASH_BYTES` is hashed whole, a larger one by `SAMPLED_BLOCKS` blocks spread over it, including the
first and the last: reading hundreds of gigabytes at every start would cost minutes, and what happens to large files in
practice (truncated, never flushed, overwritten) shows in the size or in the blocks.

The SHA-256 of a file above `REMEMBERED_BYTES` is kept in CACHE/hashes/ under the file's path, and is valid while
device, inode, size, modification and change time are the same: the start of a run would wait minutes for 100 GB.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from gptlab.config.errors import UserError, cannot
from gptlab.runtime.files.plain_file import (
    flush_to_disk,
    json_sha256,
    open_plain,
    read_json_object,
    sync_directory,
    write_json_atomic,
)

if TYPE_CHECKING:
    from gptlab.runtime.records.console import Console

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1
FULL_HASH_BYTES = 256 * 2**20  # SHA-256 runs at 0.5 to 2 GB/s: at most half a second a file
SAMPLED_BLOCKS = 64
BLOCK_BYTES = 2**20
REMEMBERED_BYTES = 64 << 20
"""Smaller files are hashed each time: a tenth of a second at most."""
SETTLED_NS = 2_000_000_000
"""A file written so shortly before it was hashed may be written again without a new time: clocks of file systems tick
in 4 ms (Linux) to 2 s (FAT)."""

_USER_CACHES = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches")}
"""{platform: (variable that names the user's folder for caches, its usual place below the home folder)}."""


def cache_root(cache_dir: str | None) -> Path:
    """`cache_dir`, else $GPTLAB_CACHE, else `gptlab` in this platform's folder for caches. UserError if that is in a
    home folder that does not exist."""
    chosen = cache_dir or os.environ.get("GPTLAB_CACHE")
    try:
        if chosen:
            return Path(chosen).expanduser()
        variable, usual = _USER_CACHES.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
        return Path(os.environ.get(variable) or Path.home() / usual, "gptlab")
    except RuntimeError:  # of pathlib: no HOME, and no entry in the password database
        raise _no_home(chosen) from None


def _no_home(chosen: str | None) -> UserError:
    if chosen:
        return UserError(f"the cache cannot be in {chosen!r}: there is no such home folder; name a folder without ~")
    return UserError(
        "this user has no home folder to keep prepared tokens and compiled kernels in: set GPTLAB_CACHE to a folder"
    )


def keep_compiled() -> Path:
    """Have torch.compile keep what it builds in the user's cache, unless the environment names another folder. To be
    called before torch's compiler is imported, which names one. Returns the folder. UserError as `cache_root`.

    Never in `data.cache_dir`: torch runs what it finds there, and a run's configuration may be an untrusted file.
    """
    return Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root(None) / "compile")))


def cached_folder(
    folder: Path, build: Callable[[Path], dict[str, Any]], *, what: str, console: Console | None = None
) -> dict[str, Any]:
    """The `info` of an intact `folder`, which `build(temporary)` first fills and describes if there is none.

    `what` names the contents in messages. UserError if the folder cannot be written (full disk, no permission).
    """
    with suppress(DamagedFolderError):
        return _intact_manifest(folder)["info"]
    return _built(folder, build, what, console)


def _built(folder: Path, build: Callable[[Path], dict[str, Any]], what: str, console: Console | None) -> dict[str, Any]:
    with cannot(f"keep the {what} in {folder.parent} (set GPTLAB_CACHE to another folder)"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, what, console):  # while this process waited, another one may have built it
            if os.path.lexists(folder) and (reason := damage(folder)) is not None:
                if console is not None:
                    console.warn(f"damaged {what} in {folder} ({reason}): made again")
                if folder.is_dir() and not folder.is_symlink():
                    shutil.rmtree(folder)
                else:
                    folder.unlink()  # a link's target stays
            if not folder.exists():
                _build(folder, build)
    return read_info(folder)


class DamagedFolderError(Exception):
    """Why a folder is not what its manifest says."""


def damage(folder: Path) -> str | None:
    """Why `folder` is not what its manifest says, or None."""
    try:
        _intact_manifest(folder)
    except DamagedFolderError as error:
        return str(error)
    return None


def _intact_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that matches it. DamagedFolderError otherwise."""
    try:
        manifest: Any = read_json_object(folder / MANIFEST)
        seal, info = manifest.pop("sha256"), manifest["info"]
        if manifest["schema"] != MANIFEST_SCHEMA or seal != json_sha256(manifest) or not isinstance(info, dict):
            raise DamagedFolderError(f"{MANIFEST} does not match its own hash")
        for name, recorded in manifest["files"].items():
            path = folder / name
            if not is_inside(name) or not stat.S_ISREG(path.lstat().st_mode):
                raise DamagedFolderError(f"{name!r} is not a file of its own")
            if path.stat().st_size != recorded["bytes"]:
                raise DamagedFolderError(f"{name} has {path.stat().st_size:,} bytes instead of {recorded['bytes']:,}")
            kind = "sampled_sha256" if "sampled_sha256" in recorded else "sha256"
            if _HASHES[kind](path) != recorded[kind]:
                raise DamagedFolderError(f"{name} has other contents")
    except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFolderError(_why_damaged(folder, error)) from None
    return manifest


def _why_damaged(folder: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    if not os.path.lexists(folder / MANIFEST):
        return f"{MANIFEST} is missing"
    return f"{MANIFEST} cannot be read ({type(error).__name__})"


def is_inside(name: str) -> bool:
    """Whether a name of a manifest or a repository leads to a place below its folder, on every platform."""
    return bool(name) and not set(name) & set("\\:\0") and not {"", ".", ".."} & set(name.split("/"))


def read_info(folder: Path) -> dict[str, Any]:
    """What `build` said about the folder."""
    info = read_json_object(folder / MANIFEST).get("info")
    if not isinstance(info, dict):
        raise UserError(f"{folder / MANIFEST} is damaged: it says nothing of what is in the folder")
    return info


def _build(folder: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    temporary = folder.parent / f".{folder.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process: the lock says that it is nobody's
    try:
        temporary.mkdir()
        _write_manifest(temporary, build(temporary))
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(folder.parent)


@contextmanager
def locked(folder: Path, what: str, console: Console | None) -> Iterator[None]:
    """Only one process at a time builds `folder` (or file), whose parent must exist; the others wait and say so."""
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if console is not None:
            console.line(f"another process is making the {what}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write_manifest(folder: Path, info: dict[str, Any]) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _sync_file(path)
        n_bytes = path.stat().st_size
        kind = "sampled_sha256" if n_bytes > FULL_HASH_BYTES else "sha256"
        files[path.relative_to(folder).as_posix()] = {"bytes": n_bytes, kind: _HASHES[kind](path)}
    manifest = {"schema": MANIFEST_SCHEMA, "info": info, "files": files}
    text = json.dumps(manifest | {"sha256": json_sha256(manifest)}, indent=1) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    _sync_file(folder / MANIFEST)


def _sha256(path: Path) -> str:
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_plain(path) as file:
        last_start = path.stat().st_size - BLOCK_BYTES
        for block in range(SAMPLED_BLOCKS):
            file.seek(last_start * block // (SAMPLED_BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


_HASHES = {"sha256": _sha256, "sampled_sha256": _sampled_sha256}


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        flush_to_disk(file)


class ChangedFileError(UserError):
    """A file is not what it was a moment ago."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} changed while it was read: start again once nothing writes to it")


def file_sha256(path: Path, root: Path) -> bytes:
    """SHA-256 of the bytes in the file; `root` is the cache. OSError for what cannot be read, and ChangedFileError."""
    with open_plain(path) as file:
        large = os.fstat(file.fileno()).st_size > REMEMBERED_BYTES
        return _remembered_sha256(file, path, root) if large else _hashed(file, path)


def _hashed(file: BufferedReader, path: Path) -> bytes:
    stamp = _stamp(file)
    digest = hashlib.file_digest(file, "sha256").digest()
    if _stamp(file) != stamp:
        raise ChangedFileError(path)
    return digest


def _remembered_sha256(file: BufferedReader, path: Path, root: Path) -> bytes:
    stamp, record, began_ns = _stamp(file), _record_of(path, root), time.time_ns()
    if (known := _remembered(record, stamp)) is not None:
        return known
    digest = _hashed(file, path)
    if began_ns - max(stamp["mtime_ns"], stamp["ctime_ns"]) > SETTLED_NS:
        keep_json(record, {**stamp, "sha256": digest.hex()})
    return digest


def _stamp(file: BufferedReader) -> dict[str, int]:
    status = os.fstat(file.fileno())
    return {
        "device": status.st_dev, "inode": status.st_ino, "size": status.st_size,
        "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns,
    }  # fmt: skip


def _record_of(path: Path, root: Path) -> Path:
    name = os.path.abspath(path).encode("utf-8", "surrogateescape")
    return root / "hashes" / f"{hashlib.sha256(name).hexdigest()}.json"


def keep_json(path: Path, value: object) -> None:
    """Write what can be found out again. Nothing is kept in a cache that is shared read-only, or full."""
    with suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, value)


def _remembered(record: Path, stamp: dict[str, int]) -> bytes | None:
    try:
        values = read_json_object(record)
        digest = bytes.fromhex(str(values.pop("sha256")))
    except (UserError, OSError, KeyError, ValueError):
        return None
    return digest if values == stamp and len(digest) == 32 else None
