"""The CORE tasks on this machine: CACHE/core with core.yaml, eval_meta_data.csv and eval_data/."""

from __future__ import annotations

import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from gptlab.config.errors import UserError
from gptlab.data.corpus.known_corpora import CORE, CORE_BUNDLE, web_path
from gptlab.eval.core_tasks import DATA, TASKS, core_folder, read_settings
from gptlab.runtime.files.cache import MANIFEST, cached_folder, is_inside
from gptlab.runtime.records.console import Console

EXPECTED = (TASKS, "eval_meta_data.csv")
LARGEST_BYTES = 4 << 30
"""The bundle unpacks to under 1 GB."""
LARGEST_RATIO = 100
"""Questions as JSON pack to a tenth at best, zeros to a thousandth."""
MOST_FILES = 10_000


def prepare_core(root: Path, console: Console) -> Path:
    """Download and unpack the CORE tasks, unless they are there. UserError where that cannot be."""
    from gptlab.data.corpus.hub import download_web_file

    archive = web_path(CORE_BUNDLE, root)

    def build(folder: Path) -> dict[str, Any]:
        download_web_file(CORE, CORE_BUNDLE, archive, None, console)
        try:
            unpack(archive, folder)
        finally:
            archive.unlink()  # Unpacked it is not needed any more; damaged it must come again.
        return {"address": CORE_BUNDLE.address}

    folder = core_folder(root)
    if (folder / TASKS).is_file() and not (folder / MANIFEST).exists():
        return folder  # Put there by hand: not ours to replace.
    cached_folder(folder, build, what="CORE tasks", console=console)
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the bundle's files into `folder`, without the folder that contains them all.

    UserError for an archive that is damaged (each file has a CRC), whose core.yaml cannot be read, that lacks one of
    the tasks which this names, or holds what no bundle does: links, encrypted files, paths that lead elsewhere.
    """
    try:
        with zipfile.ZipFile(archive) as bundle:
            members = [member for member in bundle.infolist() if not member.is_dir() and not _ignored(member.filename)]
            n_bytes = sum(member.file_size for member in members)
            if len(members) > MOST_FILES or n_bytes > min(LARGEST_BYTES, LARGEST_RATIO * archive.stat().st_size):
                size = f"{len(members):,} files, {n_bytes:,} bytes"
                raise UserError(f"{archive.name} would unpack to more than it can hold ({size}): it is not CORE")
            paths = [_checked_path(member, archive.name) for member in members]
            tops = [path.parent for path in paths if path.name == TASKS]
            if len(tops) != 1:
                raise UserError(f"{archive.name} is not the CORE bundle: it has {len(tops)} files {TASKS}")
            for member, path in zip(members, paths, strict=True):
                if path.is_relative_to(tops[0]):
                    target = folder / path.relative_to(tops[0])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with bundle.open(member) as source, target.open("wb") as file:
                        shutil.copyfileobj(source, file)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise UserError(
            f"{archive.name} arrived damaged ({error}); `gptlab data prepare core` downloads it again"
        ) from None
    task_files = (f"{DATA}/{task.get('dataset_uri')}" for task in read_settings(folder / TASKS))
    absent = [name for name in (*EXPECTED, *task_files) if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{archive.name} is not the CORE bundle, or not all of it: it has no {', '.join(absent[:3])}")


def _ignored(name: str) -> bool:
    """What macOS adds."""
    return name.startswith("__MACOSX/") or name.rpartition("/")[2] == ".DS_Store"


def _checked_path(member: zipfile.ZipInfo, archive: str) -> PurePosixPath:
    name, kind = member.filename, stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG) or member.flag_bits & 1:
        raise UserError(f"{archive} holds {name}, a link or an encrypted file: it is not the CORE bundle")
    if not is_inside(name):
        raise UserError(f"{archive} holds {name!r}, a path that leads elsewhere: it is not the CORE bundle")
    return PurePosixPath(name)
