"""Files of `torch.save`, which are pickle: read through torch's restricted unpickler, which runs no code of the file.

It builds tensors, numbers, texts, dicts and lists, and stops at the first thing that is none of them. What it would do
is followed beforehand (`torch_pickle.py`), so that no file runs anything or takes more memory than it is long.
"""

from __future__ import annotations

import io
import zipfile
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.config.plain_file import open_plain
from gptlab.model.interop.torch_pickle import UnsafePickleError, check_pickle

MAX_PICKLE_BYTES = 1 << 24
"""Of the part that is no tensors: GPT-2 XL with its moments has 1 MB."""
MAX_ENTRIES = 100_000
"""Of the zip archive: one for each tensor, and a few."""
# What every file of torch.save began with before it became a zip archive (torch 1.6): its magic number, pickled.
_OLD_BEGINNING = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_OLD_PICKLES = 4
"""Behind it, before the data: version, system, values, names of the storages."""


def read_torch_file(path: Path) -> dict[str, object]:
    """The dict in a file of `torch.save`, its tensors mapped from the disk (CPU). UserError for anything else."""
    try:
        with open_plain(path) as file:
            is_archive = zipfile.is_zipfile(file)
            _check(file, path.stat().st_size, is_archive)
        # Files from before torch 1.6 are no zip archives, and cannot be mapped.
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except UnsafePickleError as error:
        raise UserError(f"cannot read {path}: {error}; nothing of it was run") from None
    # A file that is no checkpoint, or a damaged one, makes the unpickler raise whatever its bytes lead to.
    except Exception as error:
        reason = str(error).partition("\n")[0][:120] or type(error).__name__
        raise UserError(f"cannot read {path}: it is damaged, or no file of torch.save ({reason})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no dict, but a {type(value).__name__}: it is no checkpoint")
    return {str(name): item for name, item in value.items()}


def only_tensors(values: object, path: Path) -> dict[str, Tensor]:
    """`values` as {name: tensor}, without the prefix that torch.compile gives. UserError where it is not that, or a
    tensor is larger than its data (one number can be made to look like a table of 2^60)."""
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise UserError(f"{path} holds no table of tensors by name")
    for name, value in values.items():
        stored_bytes = value.untyped_storage().nbytes() if value.layout is torch.strided else -1
        if value.numel() * value.element_size() > stored_bytes or value.device.type != "cpu":
            shape = tuple(value.shape)
            raise UserError(f"{path}: {name!r} has the shape {shape}, and {max(0, stored_bytes):,} bytes of data")
    return {str(name).removeprefix("_orig_mod."): value for name, value in values.items()}


def _check(file: BufferedReader, file_bytes: int, is_archive: bool) -> None:
    """UnsafePickleError, or what a damaged archive makes zipfile raise, unless torch may read the file."""
    if is_archive:
        check_pickle(io.BytesIO(_pickle_of(file, file_bytes)), file_bytes)
        return
    file.seek(0)
    if file.read(len(_OLD_BEGINNING)) != _OLD_BEGINNING:
        raise UnsafePickleError("it is damaged, or no file of torch.save")
    programs = io.BytesIO(file.read(min(file_bytes, MAX_PICKLE_BYTES)))
    for _ in range(_OLD_PICKLES):
        check_pickle(programs, file_bytes)


def _pickle_of(file: BufferedReader, file_bytes: int) -> bytes:
    """data.pkl of an archive whose entries all lie in it as they are, each in a place of its own.

    torch.save never packs anything, so whatever would unpack to more than it is shows here.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = {entry.filename for entry in entries}
        packed = any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries)
        total_bytes = sum(entry.file_size for entry in entries)
        if packed or total_bytes > file_bytes or len(names) < len(entries) or len(entries) > MAX_ENTRIES:
            raise UnsafePickleError("its archive is packed, or its parts overlap, as torch.save leaves none")
        programs = [
            entry for entry in entries if entry.filename.count("/") == 1 and entry.filename.endswith("/data.pkl")
        ]
        if len(programs) != 1:
            raise UnsafePickleError("it is no file of torch.save: it has no data.pkl")
        if programs[0].file_size > MAX_PICKLE_BYTES:
            raise UnsafePickleError(f"{programs[0].file_size:,} bytes are too many for its data.pkl")
        return archive.read(programs[0])
