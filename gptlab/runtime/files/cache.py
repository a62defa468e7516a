"""Folders that are built once, appear in one piece, and are trusted only while they match their manifest.

    look      manifest.json there, itself intact, every file of the right size and hash?   -> use it
    lock      one builder at a time; whoever waited looks again
    build     into a temporary sibling; files synced; manifest written last
    publish   one rename

A file up to `FULL_HASH_BYTES` is hashed whole at every look. A larger one is hashed whole once, when it is written,
and later by `SAMPLED_BLOCKS` blocks spread over it, including the first and the last: reading hundreds of gigabytes at
every start would cost minutes, and what happens to large files in practice (truncated, never flushed, overwritten)
shows in the size or in the blocks. `damage(folder, whole=True)` reads everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from gptlab.config.errors import UserError
from gptlab.config.plain_file import open_plain
from gptlab.runtime.files.strict_json import read_json_object, sync_directory

if TYPE_CHECKING:
    from gptlab.runtime.records.console import Console

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1
FULL_HASH_BYTES = 256 * 2**20  # SHA-256 runs at 0.5 to 2 GB/s: at most half a second a file
SAMPLED_BLOCKS = 64
BLOCK_BYTES = 2**20


def cache_root(cache_dir: str | None) -> Path:
    """`cache_dir`, else $GPTLAB_CACHE, else `gptlab` in this platform's folder for caches. UserError if that is needed
    and this user has no home folder."""
    try:
        return _cache_root(cache_dir or os.environ.get("GPTLAB_CACHE"))
    except RuntimeError:  # of pathlib: no HOME, and no entry in the password database
        raise UserError(
            "this user has no home folder to keep prepared tokens and compiled kernels in: set GPTLAB_CACHE to a folder"
        ) from None


def _cache_root(chosen: str | None) -> Path:
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gptlab"


def cached_folder(
    folder: Path, build: Callable[[Path], dict[str, Any]], *, what: str, console: Console | None = None
) -> dict[str, Any]:
    """The `info` of an intact `folder`, which `build(temporary)` first fills and describes if there is none.

    `what` names the contents in messages. UserError if the folder cannot be written (full disk, no permission).
    """
    if not folder.exists() or damage(folder) is not None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder, what, console):
                _build_if_needed(folder, build, what, console)
        except OSError as error:
            raise UserError(f"cannot keep the {what} in {folder.parent}: {error.strerror or error}") from error
    return read_info(folder)


def damage(folder: Path, *, whole: bool = False) -> str | None:
    """Why `folder` is not what its manifest says, or None. `whole` hashes large files completely too."""
    try:
        if not os.path.lexists(folder / MANIFEST):
            return f"{MANIFEST} is missing"
        manifest = read_json_object(folder / MANIFEST)
        seal = manifest.pop("sha256")
        if manifest["schema"] != MANIFEST_SCHEMA or seal != _seal(manifest):
            return f"{MANIFEST} does not match its own hash"
        files: Any = manifest["files"]
        for name, recorded in files.items():
            path = folder / name
            if not is_inside(name) or not stat.S_ISREG(path.lstat().st_mode):
                return f"{name!r} is no file of its own"
            if path.stat().st_size != recorded["bytes"]:
                return f"{name} has {path.stat().st_size:,} bytes instead of {recorded['bytes']:,}"
            key = "sha256" if whole or "sampled_sha256" not in recorded else "sampled_sha256"
            if _digest(path, sampled=key == "sampled_sha256") != recorded[key]:
                return f"{name} has other contents"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


def is_inside(name: str) -> bool:
    """Whether a name of a manifest or a repository leads to a place below its folder, on every platform."""
    return bool(name) and not set(name) & set("\\:\0") and not {"", ".", ".."} & set(name.split("/"))


def read_info(folder: Path) -> dict[str, Any]:
    """What `build` said about the folder."""
    info = read_json_object(folder / MANIFEST).get("info")
    if not isinstance(info, dict):
        raise UserError(f"{folder / MANIFEST} is damaged: it says nothing of what is in the folder")
    return info


def _build_if_needed(folder: Path, build: Callable[[Path], dict[str, Any]], what: str, console: Console | None) -> None:
    if folder.exists():
        reason = damage(folder)
        if reason is None:
            return  # another process built it while this one waited for the lock
        if console is not None:
            console.warn(f"damaged {what} in {folder} ({reason}): made again")
        shutil.rmtree(folder)
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
        size = path.stat().st_size
        recorded = {"bytes": size, "sha256": _digest(path, sampled=False)}
        if size > FULL_HASH_BYTES:
            recorded["sampled_sha256"] = _digest(path, sampled=True)
        files[path.relative_to(folder).as_posix()] = recorded
    manifest = {"schema": MANIFEST_SCHEMA, "info": info, "files": files}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest | {"sha256": _seal(manifest)}, indent=1) + "\n", encoding="utf-8")
    _sync_file(path)


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(path: Path, *, sampled: bool) -> str:
    with open_plain(path) as file:
        if not sampled:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        last_start = path.stat().st_size - BLOCK_BYTES
        for block in range(SAMPLED_BLOCKS):
            file.seek(last_start * block // (SAMPLED_BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
        return digest.hexdigest()


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
