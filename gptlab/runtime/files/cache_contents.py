"""What the cache holds, and what of it can be deleted: all that gptlab makes again by itself and no process uses.

    in use    its lock is held; a process of this machine has a file of it open or mapped, or names it in its command
              line (Linux only: other systems do not say); a run that trains has its tokens; it was changed within the
              last hour, so that a process that is still making it, or on another machine, is not disturbed

Links are never followed, and what does not look as gptlab writes it is kept.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from gptlab.config.errors import UserError, cannot
from gptlab.runtime.files.cache import MANIFEST

SETTLED_SECONDS = 3600.0
"""What was changed more recently is kept: making tokens or compiling takes minutes."""

_FOLDERS = {"tokens": "prepared tokens", "tokenizers": "tokenizers"}
"""Each entry of these folders is made by itself."""
_TOGETHER = {
    "compile": ("compiled code", r"fxgraph|aotautograd|gptlab"),
    "training-rates": ("measured rates", r"[0-9a-f]{16}\.json"),
    "products": ("measured products", r"[0-9a-f]{16}\.json"),
    "hashes": ("hashes of large files", r"[0-9a-f]{64}\.json"),
}
"""Each of these folders is one entry: (what it holds, names of which it must have one)."""
_DOWNLOADS, _CORE = "downloads", "core"
_KEY = re.compile(r"[0-9a-f]{24}")
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something that could be deleted."""

    kind: str
    path: Path
    bytes: int
    kept: str | None
    """Why it stays; None: it can go."""


def cache_items(
    root: Path, *, downloads: bool = False, unused_seconds: float = 0.0, fingerprints: Collection[str] = ()
) -> list[Item]:
    """Everything in the cache `root`; none where it does not exist.

    `downloads`: what the network is needed for can go too. `unused_seconds`: only what nothing has read or changed for
    so long can go. `fingerprints`: of the tokens with which runs train, on whatever machine.
    """
    used = paths_in_use()
    return [
        Item(kind=kind, path=path, bytes=found, kept=(
            reason
            or ("a run trains on it" if path.name in fingerprints else None)
            or _in_use(path, changed, used)
            or _held(path)
            or _used_lately(accessed, unused_seconds)
        ))
        for kind, path, reason in _entries(root, downloads)
        for found, changed, accessed in [_measured(path)]
    ]  # fmt: skip


def temporary_item(kind: str, path: Path, used: Collection[str]) -> Item:
    """What a killed process left in a temporary folder."""
    found, changed, _ = _measured(path)
    return Item(kind=kind, path=path, bytes=found, kept=_in_use(path, changed, used))


def delete_item(item: Item, used: Collection[str]) -> None:
    """Delete it at once: it is renamed before it is removed. UserError where a process began to use it. `used`: see
    `paths_in_use`."""
    path = item.path
    gone = path if _UNFINISHED.fullmatch(path.name) else path.with_name(f".{path.name}.tmp")
    with cannot(f"delete {path}"), _locked(path):
        if reason := _in_use(path, _measured(path)[1], used):
            raise UserError(f"{path} was kept: {reason}")
        if gone != path:
            if gone.is_dir():
                shutil.rmtree(gone)
            path.rename(gone)
        shutil.rmtree(gone) if stat.S_ISDIR(gone.lstat().st_mode) else gone.unlink()


def paths_in_use() -> set[str]:
    """Files that processes have open or mapped, and the command lines of all, as far as this user may see them. Empty
    where the system has no /proc."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            found.add((process / "cmdline").read_bytes().decode(errors="replace"))
            found.update(os.readlink(file) for file in (process / "fd").iterdir())
            maps = (process / "maps").read_text(errors="replace").splitlines()
            found.update(line[line.index("/") :] for line in maps if "/" in line)
    return {text for text in found if "/" in text}


def is_used(path: Path, used: Collection[str]) -> bool:
    """Whether one of `used` is the path or in it, or a command line names it."""
    name = re.compile(re.escape(os.path.realpath(path)) + r"(?![^/\0\s\"',:])")
    return any(map(name.search, used))


def _entries(root: Path, downloads: bool) -> Iterator[tuple[str, Path, str | None]]:
    """(kind, path, why it is kept in any case)."""
    for path in _inside(root):
        found = _inside(path)
        if path.is_symlink():
            yield "other files", path, "a link, which is not followed"
        elif path.name in _FOLDERS:
            for entry in found:
                ours = _KEY.fullmatch(entry.name) and (entry / MANIFEST).is_file() and not entry.is_symlink()
                if ours or _UNFINISHED.fullmatch(entry.name):
                    yield _FOLDERS[path.name], entry, None
                elif not entry.name.endswith(".lock"):
                    yield "other files", entry, "not made by gptlab"
        elif path.name in _TOGETHER:
            kind, names = _TOGETHER[path.name]
            ours = any(re.fullmatch(names, entry.name) for entry in found)
            yield kind, path, None if ours else "not made by gptlab"
        elif path.name == _DOWNLOADS:
            yield from (("downloads", entry, _needs_network(downloads)) for entry in found if entry.suffix != ".lock")
        elif path.name == _CORE:
            by_hand = None if (path / MANIFEST).is_file() else "put there by hand"
            yield "downloads", path, by_hand or _needs_network(downloads)
        elif unfinished := _UNFINISHED.fullmatch(path.name):
            ours = unfinished["name"] in (*_TOGETHER, _CORE)
            yield "other files", path, None if ours else "not made by gptlab"
        elif not path.name.endswith(".lock"):
            yield "other files", path, "not made again by itself"


def _needs_network(downloads: bool) -> str | None:
    return None if downloads else "needs the network (--downloads)"


def _in_use(path: Path, changed: float, used: Collection[str]) -> str | None:
    if is_used(path, used):
        return "in use"
    return "changed within the last hour" if time.time() - changed < SETTLED_SECONDS else None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock under which `cache.cached_folder` makes it, where there is one. UserError where a process holds it."""
    unfinished = _UNFINISHED.fullmatch(path.name)
    file = path.with_name(f".{unfinished['name'] if unfinished else path.name}.lock")
    lock = FileLock(file)
    if file.is_file():
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"{path} is being made") from None
    try:
        yield
    finally:
        lock.release()


def _held(path: Path) -> str | None:
    try:
        with _locked(path):
            return None
    except (UserError, OSError):
        return "being made"


def _used_lately(accessed: float, unused_seconds: float) -> str | None:
    lately = time.time() - accessed < unused_seconds
    return f"used within {unused_seconds / 86400:g} days" if lately else None


def _inside(folder: Path) -> Sequence[Path]:
    """Empty for a link, a file, and what cannot be read."""
    with suppress(OSError):
        return [] if folder.is_symlink() else sorted(folder.iterdir())
    return []


def _measured(path: Path) -> tuple[int, float, float]:
    """Bytes of all files, when the last one was changed, and when it was last read or changed (seconds since 1970).
    What vanishes meanwhile counts nothing."""
    size, changed, accessed = 0, 0.0, 0.0
    folders = [path]
    while folders:
        one = folders.pop()
        with suppress(OSError):
            found = one.lstat()
            changed = max(changed, found.st_mtime)
            if stat.S_ISDIR(found.st_mode):
                folders += one.iterdir()
            else:  # the access of a folder is this one
                size, accessed = size + found.st_size, max(accessed, found.st_atime)
    return size, changed, max(accessed, changed)
