"""The checkpoint format: parts of tensors, what files are called, and what manifest.json says.

    checkpoints/step-00000250/
      model.safetensors  optimizer.safetensors     written by one process
      model-00001-of-00004.safetensors  ...        written by four, each its slices into files of its own
      state.json                                   everything that is not a tensor
      manifest.json                                size and SHA-256 of every file, and where each tensor is stored

    {"format": "gptlab checkpoint", "format_version": 2, "step": 250,
     "files": {"model-00001-of-00002.safetensors": {"bytes": 4711, "sha256": "..."}, ..., "state.json": {...}},
     "model": {"head.weight": {"dtype": "F32", "shape": [7, 5], "pieces":
               [["model-00001-of-00002.safetensors", 0, 20], ["model-00002-of-00002.safetensors", 20, 15]]}, ...},
     "optimizer": {...}}

A piece is [file, first element, elements], counted in row-major order of the whole tensor. Its file stores it under the
tensor's name and shape if it is the whole tensor, and otherwise as NAME@START with one dimension. Version 1 had no
index: its two files hold whole tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.runtime.files.tensor_file import (
    DTYPE_NAMES,
    DamagedFileError,
    FileRecord,
    are_naturals,
    parse_dtype_and_shape,
    parse_json_object,
)
from gptlab.training.checkpoint.names import STATE

FORMAT = "gptlab checkpoint"
FORMAT_VERSION = 2
KINDS = ("model", "optimizer")


class CheckpointError(UserError):
    """A checkpoint cannot be saved, or the requested one cannot be used."""


class DamagedCheckpointError(CheckpointError):
    """A folder that is not an intact checkpoint."""

    def __init__(self, path: Path, reason: str, lines: Sequence[str] = ()) -> None:
        """`lines`: what several ranks find, where that is not the same."""
        self.path = path
        self.reason = reason
        super().__init__(f"checkpoint {path} is damaged: {reason}")
        self.lines = lines or [str(self)]


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlice:
    """Consecutive elements of a tensor, in row-major order."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Elements of the whole tensor before the first one here."""
    tensor: Tensor
    """The elements, in any shape."""

    @property
    def count(self) -> int:
        return self.tensor.numel()

    @property
    def is_whole(self) -> bool:
        return self.count == math.prod(self.shape)

    @property
    def key(self) -> str:
        """Its name in a file, which may hold several slices of one tensor."""
        return slice_key(self.name, self.shape, self.start, self.count)

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of another tensor of the whole shape, in the shape that they have here."""
        return whole.reshape(-1)[self.start : self.start + self.count].view(self.tensor.shape)


def slice_key(name: str, shape: tuple[int, ...], start: int, count: int) -> str:
    """NAME for a whole tensor, NAME@START for a part of one."""
    return name if count == math.prod(shape) else f"{name}@{start}"


def whole_slices(tensors: Mapping[str, Tensor]) -> list[TensorSlice]:
    """Every tensor as one slice."""
    return [TensorSlice(name, tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()]


def even_slices(tensors: Mapping[str, Tensor], index: int, parts: int) -> list[TensorSlice]:
    """Part `index` of `parts` where `tensors`, end to end, are cut into parts of the same length, plus or minus one
    element. Views, where the tensors are contiguous."""
    if parts == 1:
        return whole_slices(tensors)
    total = sum(tensor.numel() for tensor in tensors.values())
    first, end = total * index // parts, total * (index + 1) // parts
    before, slices = 0, []
    for name, tensor in tensors.items():
        start, stop = max(first - before, 0), min(end - before, tensor.numel())
        # An empty tensor has no element that could say whose it is: it belongs to the first part.
        if start < stop or (index == 0 and tensor.numel() == 0):
            slices.append(TensorSlice(name, tuple(tensor.shape), start, tensor.detach().reshape(-1)[start:stop]))
        before += tensor.numel()
    return slices


def file_name(kind: str, rank: int, size: int) -> str:
    """The file that `rank` writes: model.safetensors, or model-00002-of-00004.safetensors."""
    return f"{kind}.safetensors" if size == 1 else f"{kind}-{rank + 1:05d}-of-{size:05d}.safetensors"


class StoredSlice(NamedTuple):
    """Where some elements of a tensor are stored."""

    file: str
    start: int
    """Elements of the whole tensor before the first one."""
    elements: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]
    """In the order of their elements; they tile the tensor."""


@dataclass(frozen=True, slots=True)
class Manifest:
    step: int
    files: dict[str, FileRecord]
    index: dict[str, dict[str, StoredTensor]] | None
    """Kind -> tensor's name -> where it is stored; None in version 1."""

    def files_of(self, kind: str) -> list[str]:
        return [name for name in self.files if name.startswith(kind)]

    def layout(self, file: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]] | None:
        """What a safetensors file must hold, by the key in the file; None if nothing is known of it (version 1)."""
        if self.index is None:
            return None
        kind = next(kind for kind in KINDS if file.startswith(kind))
        return {
            slice_key(name, stored.shape, start, count): (
                stored.dtype, stored.shape if count == math.prod(stored.shape) else (count,)
            )
            for name, stored in self.index[kind].items()
            for slice_file, start, count in stored.slices
            if slice_file == file
        }  # fmt: skip


def max_manifest_bytes(n_files: int) -> int:
    """The longest manifest that is read in a folder of `n_files`: twice what a thousand tensors need that every rank
    has a slice of, at 40 bytes a slice. A longer one is refused unread: parsing 8 MB takes a second."""
    return 2**20 + n_files * 2**16


def record_fields(record: FileRecord) -> dict[str, Any]:
    return {"bytes": record.size_bytes, "sha256": record.sha256}


def index_fields(slices: Sequence[TensorSlice], file: str) -> dict[str, Any]:
    """The part of a kind's index that describes `slices`, all written into `file`."""
    fields: dict[str, Any] = {}
    for part in slices:
        tensor = {"dtype": DTYPE_NAMES.get(part.tensor.dtype), "shape": list(part.shape), "pieces": []}
        fields.setdefault(part.name, tensor)["pieces"].append([file, part.start, part.count])
    return fields


def merged_index(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several `index_fields` as one. ValueError if two disagree about a tensor."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, fields in part.items():
            known = merged.setdefault(name, {**fields, "pieces": []})
            if (known["dtype"], known["shape"]) != (fields["dtype"], fields["shape"]):
                raise ValueError(f"tensor {name!r} is not the same on all ranks: {known} and {fields}")
            known["pieces"].extend(fields["pieces"])
    for fields in merged.values():
        fields["pieces"].sort(key=lambda piece: piece[1])
    return merged


def manifest_text(step: int, tables: Mapping[str, Mapping[str, Any]]) -> bytes:
    """manifest.json, with one line for each file and tensor. `tables`: "files", with the `record_fields` of each by
    name, and for each kind its index (`merged_index`)."""
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": step}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for title in ("files", *KINDS):
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in tables[title].items())
        lines.append(f"{json.dumps(title)}: {{{chr(10) * bool(rows)}{rows}}}")
    return ("{\n " + ",\n ".join(lines) + "\n}\n").encode()


def parse_manifest(text: bytes) -> Manifest:
    """DamagedFileError if it is not valid. A valid one names files of its own folder only, and whole tensors."""
    fields = parse_json_object(text)
    if fields.get("format") != FORMAT:
        raise DamagedFileError(f"format is not {FORMAT!r}")
    version = fields.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise DamagedFileError(f"format version {version!r}, this gptlab reads up to {FORMAT_VERSION}")
    step, files = fields.get("step"), fields.get("files")
    if type(step) is not int or step < 0:
        raise DamagedFileError(f"step is {step!r}")
    # Names are made here and compared, so that no path that leads out of the folder can be one of them.
    size = max((len(files) - 1) // len(KINDS), 1) if isinstance(files, dict) and version > 1 else 1
    expected = [*(file_name(kind, rank, size) for kind in KINDS for rank in range(size)), STATE]
    if not isinstance(files, dict) or set(files) != set(expected):
        raise DamagedFileError(f"does not name exactly {', '.join(expected[:4])}{' ...' * (len(expected) > 4)}")
    records = {name: _parse_record(name, files[name]) for name in expected}
    if version == 1:
        return Manifest(step, records, None)
    index = {kind: _parse_index(fields.get(kind), kind, size) for kind in KINDS}
    _require_room(index, records)
    return Manifest(step, records, index)


def _parse_record(name: str, fields: object) -> FileRecord:
    if isinstance(fields, dict) and set(fields) == {"bytes", "sha256"}:
        size_bytes, sha256 = fields["bytes"], fields["sha256"]
        if type(size_bytes) is int and size_bytes >= 0 and isinstance(sha256, str):
            return FileRecord(size_bytes, sha256)
    raise DamagedFileError(f"the record of {name} is malformed")


def _parse_index(fields: object, kind: str, size: int) -> dict[str, StoredTensor]:
    if not isinstance(fields, dict):
        raise DamagedFileError(f"has no index of {kind}")
    files = {file_name(kind, rank, size) for rank in range(size)}
    return {name: _parse_tensor(name, entry, files) for name, entry in fields.items()}


def _parse_tensor(name: str, fields: object, files: set[str]) -> StoredTensor:
    malformed = f"the index of {name!r} is malformed"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "pieces"}:
        raise DamagedFileError(malformed)
    dtype, shape = parse_dtype_and_shape(name, fields, malformed)
    pieces: Any = fields["pieces"] if isinstance(fields["pieces"], list) else [None]
    end, slices = 0, []
    for piece in pieces:
        named = isinstance(piece, list) and len(piece) == 3 and isinstance(piece[0], str) and piece[0] in files
        if not named or not are_naturals(piece[1:]):
            raise DamagedFileError(malformed)
        part = StoredSlice(*piece)
        if part.start != end:
            what = "overlaps the one before it" if part.start < end else "leaves a gap"
            raise DamagedFileError(f"the piece of {name!r} in {part.file} {what}, at element {part.start:,}")
        if part.elements == 0 and len(pieces) > 1:
            raise DamagedFileError(f"a piece of {name!r} in {part.file} is empty")
        end += part.elements
        slices.append(part)
    total = math.prod(shape)
    if end != total or not slices:
        raise DamagedFileError(f"the pieces of {name!r} have {end:,} elements in all, its shape {total:,}")
    return StoredTensor(dtype, shape, tuple(slices))


def _require_room(index: Mapping[str, Mapping[str, StoredTensor]], files: Mapping[str, FileRecord]) -> None:
    """No file is asked for more than it can hold: the sizes of files are checked before memory is taken for tensors."""
    needed = dict.fromkeys(files, 0)
    for tensors in index.values():
        for stored in tensors.values():
            for file, _, count in stored.slices:
                needed[file] += count * stored.dtype.itemsize
    for name, size_bytes in needed.items():
        if size_bytes > files[name].size_bytes:
            raise DamagedFileError(f"the pieces in {name} take {size_bytes:,} bytes, it has {files[name].size_bytes:,}")
