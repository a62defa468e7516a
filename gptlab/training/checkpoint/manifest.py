"""What manifest.json says: the files of a checkpoint, and which elements of which tensor lie in which of them.

    {"format": "gptlab checkpoint", "format_version": 2, "step": 250,
     "files": {"model-00001-of-00002.safetensors": {"bytes": 4711, "sha256": "..."}, ..., "state.json": {...}},
     "model": {"head.weight": {"dtype": "F32", "shape": [7, 5], "pieces":
               [["model-00001-of-00002.safetensors", 0, 20], ["model-00002-of-00002.safetensors", 20, 15]]}, ...},
     "optimizer": {...}}

A piece is [file, first element, elements], counted in row-major order of the whole tensor. In its file it stands under
the tensor's name and shape where it is all of it, and else as NAME@START with one dimension. Each of W processes writes
one file of either kind; one process alone calls them model.safetensors and optimizer.safetensors. Version 1 knew no
other case, and had no index: there a file holds whole tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gptlab.runtime.files.tensor_file import DTYPE_NAMES, DTYPES, DamagedFileError, FileRecord, parse_json_object
from gptlab.training.checkpoint.slices import TensorSlice, slice_key

FORMAT = "gptlab checkpoint"
FORMAT_VERSION = 2
KINDS = ("model", "optimizer")
STATE, MANIFEST = "state.json", "manifest.json"


@dataclass(frozen=True, slots=True)
class Place:
    """Where some elements of a tensor lie."""

    file: str
    start: int
    """Elements of the whole tensor before the first one."""
    count: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor, whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    places: tuple[Place, ...]
    """In the order of their elements, which they tile."""


@dataclass(frozen=True, slots=True)
class Manifest:
    step: int
    files: dict[str, FileRecord]
    index: dict[str, dict[str, Entry]] | None
    """Kind -> tensor's name -> entry; None in version 1."""

    def files_of(self, kind: str) -> list[str]:
        return [name for name in self.files if name.startswith(kind)]

    def layout(self, file: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]] | None:
        """What must stand in a safetensors file, by its key there; None where nothing is known of it (version 1)."""
        if self.index is None:
            return None
        kind = next(kind for kind in KINDS if file.startswith(kind))
        return {
            slice_key(name, entry.shape, place.start, place.count): (entry.dtype, _stored_shape(entry, place))
            for name, entry in self.index[kind].items()
            for place in entry.places
            if place.file == file
        }


def max_manifest_bytes(n_files: int) -> int:
    """The longest manifest that is read in a folder of `n_files`: twice what a thousand tensors take that are in pieces
    on every rank, 40 bytes each. What is larger is none, and need not be read to know it: 8 MB take a second."""
    return 2**20 + n_files * 2**16


def file_name(kind: str, rank: int, size: int) -> str:
    """Of what `rank` writes: model.safetensors, or model-00002-of-00004.safetensors."""
    return f"{kind}.safetensors" if size == 1 else f"{kind}-{rank + 1:05d}-of-{size:05d}.safetensors"


def record_fields(record: FileRecord) -> dict[str, Any]:
    return {"bytes": record.size_bytes, "sha256": record.sha256}


def index_fields(pieces: Sequence[TensorSlice], file: str) -> dict[str, Any]:
    """The part of a kind's index that `pieces`, written into one file, make up."""
    fields: dict[str, Any] = {}
    for piece in pieces:
        of_tensor = fields.setdefault(
            piece.name, {"dtype": DTYPE_NAMES.get(piece.tensor.dtype), "shape": list(piece.shape), "pieces": []}
        )
        of_tensor["pieces"].append([file, piece.start, piece.tensor.numel()])
    return fields


def merged_index(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several `index_fields` say together. ValueError where two know the same tensor otherwise."""
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


def manifest_text(step: int, files: Mapping[str, FileRecord], index: Mapping[str, Mapping[str, Any]]) -> bytes:
    """One line a file and a tensor. ValueError where the pieces do not tile their tensors."""
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": step}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    tables = {"files": {name: record_fields(record) for name, record in files.items()}, **index}
    for title, table in tables.items():
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in table.items())
        lines.append(f"{json.dumps(title)}: {{{chr(10) * bool(rows)}{rows}}}")
    text = ("{\n " + ",\n ".join(lines) + "\n}\n").encode()
    try:
        parse_manifest(text)
    except DamagedFileError as error:
        raise ValueError(f"these pieces make no checkpoint: {error}") from None
    return text


def parse_manifest(text: bytes) -> Manifest:
    """DamagedFileError where it is none. What it names lies in its own folder, and every tensor is whole."""
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


def _parse_index(fields: object, kind: str, size: int) -> dict[str, Entry]:
    if not isinstance(fields, dict):
        raise DamagedFileError(f"has no index of {kind}")
    files = {file_name(kind, rank, size) for rank in range(size)}
    return {name: _parse_entry(name, entry, files) for name, entry in fields.items()}


def _parse_entry(name: str, fields: object, files: set[str]) -> Entry:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "pieces"}:
        raise DamagedFileError(f"the index of {name!r} is malformed")
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    shape, pieces = fields["shape"], fields["pieces"]
    if dtype is None or not _naturals(shape) or len(shape) > 64 or not isinstance(pieces, list):
        raise DamagedFileError(f"the index of {name!r} is malformed")
    # Python's integers are unbounded; zeros left out, so that no empty tensor hides an impossible size.
    if math.prod(max(length, 1) for length in shape) * dtype.itemsize >= 2**63:
        raise DamagedFileError(f"the shape of {name!r} cannot be")
    total = math.prod(shape)
    end, places = 0, []
    for piece in pieces:
        named = isinstance(piece, list) and len(piece) == 3 and isinstance(piece[0], str) and piece[0] in files
        if not named or not _naturals(piece[1:]):
            raise DamagedFileError(f"the index of {name!r} is malformed")
        place = Place(*piece)
        if place.start != end:
            what = "overlaps the one before it" if place.start < end else "leaves a gap"
            raise DamagedFileError(f"the piece of {name!r} in {place.file} {what}, at element {place.start:,}")
        if place.count == 0 and len(pieces) > 1:
            raise DamagedFileError(f"a piece of {name!r} in {place.file} is empty")
        end += place.count
        places.append(place)
    if end != total or not places:
        raise DamagedFileError(f"the pieces of {name!r} have {end:,} elements in all, its shape {total:,}")
    return Entry(dtype, tuple(shape), tuple(places))


def _require_room(index: Mapping[str, Mapping[str, Entry]], files: Mapping[str, FileRecord]) -> None:
    """No file is asked for more than it can hold: the sizes of files are checked before memory is taken for tensors."""
    needed = dict.fromkeys(files, 0)
    for entries in index.values():
        for entry in entries.values():
            for place in entry.places:
                needed[place.file] += place.count * entry.dtype.itemsize
    for name, size_bytes in needed.items():
        if size_bytes > files[name].size_bytes:
            raise DamagedFileError(f"the pieces in {name} take {size_bytes:,} bytes, it has {files[name].size_bytes:,}")


def _stored_shape(entry: Entry, place: Place) -> tuple[int, ...]:
    return entry.shape if place.count == math.prod(entry.shape) else (place.count,)


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
