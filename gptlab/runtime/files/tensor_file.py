"""One safetensors file, written or read in a single pass together with its SHA-256.

The format is safetensors' own (an 8-byte little-endian header length, a JSON header padded with spaces, then the raw
data), so every safetensors reader opens these files. The library is not used for two reasons. It cannot hash while it
writes; 200 MB to a warm page cache on two quiet cores, flushed: 806 MB/s with the library and a hash afterwards, 850
with the hash in between, 1600 with the hash on a second thread, 1690 without any hash (hashlib and file calls release
the GIL). And a damaged file must end in one clear reason, whatever its header claims.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from gptlab.runtime.files.plain_file import flush_to_disk, open_plain, parse_json
from gptlab.runtime.processes.one_thread import OneThread

# The names of the safetensors specification for the types that torch has.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "C64": torch.complex64, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Reading and hashing overlap chunk by chunk: large enough that a hand-over between threads costs nothing.
_CHUNK_BYTES = 16 * 2**20
# A real header has about 100 bytes a tensor: that of GPT-2 XL's moments has 0.1 MB. Entries are checked one by one, and
# 2 MB of them take half a second.
_MAX_HEADER_BYTES = 1 << 21
MAX_SMALL_FILE_BYTES = 1 << 24
"""Of `read_bytes`; what a run keeps as JSON has some kilobytes."""


class DamagedFileError(Exception):
    """A file is not what its manifest says or not what its format demands; the message is the reason alone."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest knows of a file."""

    size_bytes: int
    sha256: str
    """64 lower-case hexadecimal digits."""


TensorForm = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape."""
Layout = Mapping[str, TensorForm]
"""Name of a tensor in a file -> its form there."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a new safetensors file, with the format's free `metadata`, and flush it to disk.

    Tensors may live on any device, be views, be non-contiguous or share memory: each is written in full under its name,
    one CPU copy at a time (none for contiguous CPU tensors). ValueError for a type or layout that safetensors lacks,
    OSError as the file system gives it.
    """
    # Widest types first, so that every tensor lies at a multiple of its item size (the library's order).
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header = _header(ordered, metadata)
    digest = hashlib.sha256(header)
    with path.open("xb") as file, OneThread("gptlab-hash") as hasher:
        file.write(header)
        for _, tensor in ordered:
            data = _raw(tensor.detach().to("cpu").contiguous())
            hashed = hasher.submit(digest.update, data)
            file.write(data)
            hashed.result()  # before the next copy is made: never two tensors of a GPU in host memory
        flush_to_disk(file)
        return FileRecord(file.tell(), digest.hexdigest())


def _header(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in ordered:
        if name == "__metadata__" or tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"a safetensors file cannot hold tensor {name!r} ({tensor.dtype}, {tensor.layout})")
        end = start + tensor.numel() * tensor.element_size()
        dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_tensors(path: Path, expected: FileRecord, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The CPU tensors of a file that must match `expected`; read once, so what was verified is what is returned.

    With `into`, contiguous CPU tensors, the file must hold exactly these, by name, shape and dtype, and is read into
    them. DamagedFileError with the reason if the file does not match or is not well formed; what `into` holds is then
    of no use. No memory beyond the file's own size is ever allocated, whatever the header claims, and none for a file
    that memory cannot hold (a sparse file can claim a terabyte without using any disk).
    """
    tensors = {}
    with open_plain(path) as file, OneThread("gptlab-hash") as hasher:
        _require_size(file, expected)
        header, layout = _read_header(file, expected.size_bytes)
        if into is not None:
            _require_layout(layout, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in into.items()})
        digest = hashlib.sha256(header)
        for name, (dtype, shape) in layout.items():
            tensors[name] = torch.empty(shape, dtype=dtype) if into is None else into[name]
            data = _raw(tensors[name])
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk = data[start : start + _CHUNK_BYTES]
                _read_into(file, chunk)
                hasher.submit(digest.update, chunk)
    _require_digest(digest.hexdigest(), expected)
    return tensors


def verify_tensors(path: Path, expected: FileRecord, layout: Layout | None = None) -> None:
    """What `read_tensors` checks, without keeping the tensors. `layout`: what the file must hold, if that is known."""
    with open_plain(path) as file:
        _require_size(file, expected)
        _require_digest(hashlib.file_digest(file, "sha256").hexdigest(), expected)
        file.seek(0)
        _, found = _read_header(file, expected.size_bytes)
    if layout is not None:
        _require_layout(found, layout)


def data_positions(path: Path, expected: FileRecord, layout: Layout) -> dict[str, int]:
    """Where in a file the data of each tensor begins: name -> bytes before it. DamagedFileError if the file does not
    hold exactly the tensors of `layout`; their data is not verified."""
    with open_plain(path) as file:
        _require_size(file, expected)
        header, found = _read_header(file, expected.size_bytes)
    _require_layout(found, layout)
    sizes = (math.prod(shape) * dtype.itemsize for dtype, shape in found.values())
    return dict(zip(found, accumulate(sizes, initial=len(header)), strict=False))


def read_at(path: Path, expected: FileRecord, position: int, into: Tensor) -> None:
    """Fill a contiguous CPU tensor with the bytes from `position` on, of a file that was verified before."""
    with open_plain(path) as file:
        _require_size(file, expected)
        file.seek(position)
        _read_into(file, _raw(into))


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """Write a new small file and flush it to disk."""
    with path.open("xb") as file:
        file.write(content)
        flush_to_disk(file)
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def read_bytes(path: Path, expected: FileRecord) -> bytes:
    """The content of a file that must match `expected`, of at most `MAX_SMALL_FILE_BYTES`."""
    if expected.size_bytes > MAX_SMALL_FILE_BYTES:
        raise DamagedFileError(f"{expected.size_bytes:,} bytes are too many for it")
    with open_plain(path) as file:
        _require_size(file, expected)
        content = _read(file, expected.size_bytes)
    _require_digest(hashlib.sha256(content).hexdigest(), expected)
    return content


def parse_json_object(text: bytes) -> dict[str, Any]:
    """A JSON object as `parse_json` lets it through. DamagedFileError where it is none."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise DamagedFileError(f"no valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise DamagedFileError("not a JSON object")
    return value


def _read_header(file: BufferedReader, size_bytes: int) -> tuple[bytes, dict[str, TensorForm]]:
    """The header as it is, and the file's layout in the order of the data, which the tensors tile without gap or
    overlap to the end of the file."""
    length_field = _read(file, 8)
    header_bytes = int.from_bytes(length_field, "little")
    if header_bytes > min(size_bytes - 8, _MAX_HEADER_BYTES):
        raise DamagedFileError(f"a header of {header_bytes:,} bytes cannot be")
    text = _read(file, header_bytes)
    entries = parse_json_object(text)
    entries.pop("__metadata__", None)
    position, layout = 0, {}
    for start, end, name, form in sorted((_span(*item) for item in entries.items()), key=lambda span: span[:2]):
        if start != position:
            raise DamagedFileError(f"the data of {name!r} begins at byte {start}, not {position}")
        position, layout[name] = end, form
    if position != size_bytes - 8 - header_bytes:
        raise DamagedFileError(f"tensors cover {position:,} of {size_bytes - 8 - header_bytes:,} bytes of data")
    return length_field + text, layout


def _span(name: str, value: object) -> tuple[int, int, str, TensorForm]:
    """First byte, end, name and form of one tensor, from its JSON."""
    malformed = f"the header entry of {name!r} is malformed"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise DamagedFileError(malformed)
    dtype, shape = parse_dtype_and_shape(name, value, malformed)
    if not are_naturals(value["data_offsets"]) or len(value["data_offsets"]) != 2:
        raise DamagedFileError(malformed)
    start, end = value["data_offsets"]
    if end - start != math.prod(shape) * dtype.itemsize:
        raise DamagedFileError(f"{name!r} takes {end - start:,} bytes, which is not what its shape needs")
    return start, end, name, (dtype, shape)


def parse_dtype_and_shape(name: str, fields: dict[str, Any], malformed: str) -> TensorForm:
    """ "dtype" and "shape" of the JSON of a tensor. DamagedFileError if no tensor can have them."""
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    shape = fields["shape"]
    if dtype is None or not are_naturals(shape):
        raise DamagedFileError(malformed)
    # In Python's unbounded integers. Zeros do not count, so that no empty tensor hides an impossible size.
    if len(shape) > 64 or math.prod([length or 1 for length in shape]) * dtype.itemsize >= 2**63:
        raise DamagedFileError(f"the shape of {name!r} is impossible")
    return dtype, tuple(shape)


def are_naturals(values: object) -> bool:
    """A list of integers that are not negative. A loop: a header has 50,000 short lists, and a generator for each takes
    twice as long."""
    if not isinstance(values, list):
        return False
    for value in values:  # noqa: SIM110
        if type(value) is not int or value < 0:
            return False
    return True


def _require_layout(found: Layout, layout: Layout) -> None:
    if dict(found) != dict(layout):
        name = min(name for name in {*found, *layout} if found.get(name) != layout.get(name))
        raise DamagedFileError(f"{name!r} is not there as its manifest says")


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _read(file: BufferedReader, n_bytes: int) -> bytes:
    content = file.read(n_bytes)
    if len(content) < n_bytes:
        raise DamagedFileError("ends too early")
    return content


def _read_into(file: BufferedReader, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise DamagedFileError("ends too early")
        done += count


def _require_size(file: BufferedReader, expected: FileRecord) -> None:
    size_bytes = os.fstat(file.fileno()).st_size
    if size_bytes != expected.size_bytes:
        raise DamagedFileError(f"has {size_bytes:,} bytes, its manifest says {expected.size_bytes:,}")
    memory_bytes = psutil.virtual_memory().total
    if size_bytes > memory_bytes:
        raise DamagedFileError(f"has {size_bytes:,} bytes, and this machine {memory_bytes:,} bytes of memory")


def _require_digest(sha256: str, expected: FileRecord) -> None:
    if sha256 != expected.sha256:
        raise DamagedFileError(f"content has changed (SHA-256 {sha256[:12]}, its manifest says {expected.sha256[:12]})")
