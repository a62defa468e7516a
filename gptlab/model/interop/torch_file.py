"""Files of `torch.save`, which are pickle: read through torch's restricted unpickler, which runs no code of the file.

That unpickler (weights_only) builds tensors, numbers, texts, dicts and lists, and stops at anything else. But it lets a
file ask for storages of any size, and for tuples nested in themselves: `t = (t, t)` sixty times is 200 bytes, and takes
2^60 steps to hash as a key of a dict. So the program is first run here on descriptions of its values. It may name and
call only what the state of a model needs, no storage may be larger than the file, and no tuple may have more parts than
such a state's.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.runtime.files.plain_file import open_plain

MAX_PICKLE_BYTES = 1 << 24
"""Of data.pkl, everything but the tensors: GPT-2 XL with its moments has 1 MB."""
MAX_ENTRIES = 100_000
"""Of the zip archive: one for each tensor, and a few."""
# The first bytes of every file of torch.save before it became a zip archive (torch 1.6): its magic number, pickled.
_OLD_BEGINNING = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_OLD_PICKLES = 4
"""After it, before the data: version, system, values, names of the storages."""

MAX_OPCODES = 400_000
"""GPT-2 XL with two moments for each weight has 150,000. Following this many takes half a second."""
MAX_PARTS = 10_000
"""Of a tuple, including the parts of nested tuples each time they occur. So it bounds the depth too."""
MAX_INTEGER_BITS = 64
"""Integers hash by their remainder: long ones could be made to collide in a dict."""

_OPCODES = (
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_SET GLOBAL "
    "REDUCE BUILD BINPERSID BINGET LONG_BINGET BINPUT LONG_BINPUT"
)
OPCODES = frozenset(_OPCODES.split())
"""Those of torch's restricted unpickler, except NEWOBJ, which no state of a model needs."""
_CALLED = frozenset({
    "collections.OrderedDict", "torch.Size", "torch.device", "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter",
})  # fmt: skip
_KINDS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
STORAGES = frozenset({"torch.storage.UntypedStorage", *(f"torch.{kind}Storage" for kind in _KINDS)})
_DTYPE_NAMES = ("bfloat16", "bool", "float16", "float32", "float64", "int16", "int32", "int64", "int8", "uint8")
_DTYPES = frozenset(f"torch.{name}" for name in _DTYPE_NAMES)
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_TAKEN = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}


class UnsafePickleError(Exception):
    """A refused program. The message is the reason alone."""


@dataclass(frozen=True, slots=True)
class _Named:
    name: str


@dataclass(frozen=True, slots=True)
class _Tuple:
    items: tuple[Any, ...]
    parts: int


_MARK = _Named("(")


def read_torch_file(path: Path) -> dict[str, object]:
    """The dict in a file of `torch.save`, its tensors memory-mapped on the CPU. UserError for anything else."""
    try:
        with open_plain(path) as file:
            is_archive = zipfile.is_zipfile(file)
            _check(file, path.stat().st_size, is_archive)
        # Files from before torch 1.6 are no zip archives, and cannot be mapped.
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except UnsafePickleError as error:
        raise UserError(f"cannot read {path}: {error}; nothing in it was run") from None
    # A damaged file makes the unpickler raise any exception.
    except Exception as error:
        reason = str(error).partition("\n")[0][:120] or type(error).__name__
        raise UserError(f"cannot read {path}: it is damaged, or not a file of torch.save ({reason})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a checkpoint: it holds a {type(value).__name__}, not a dict")
    return {str(name): item for name, item in value.items()}


def only_tensors(values: object, path: Path) -> dict[str, Tensor]:
    """`values` as {name: tensor}, without the prefix that torch.compile gives. UserError if it is something else, or if
    a tensor is larger than its data (one number can be made to look like a table of 2^60)."""
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise UserError(f"{path} holds no table of tensors by name")
    for name, value in values.items():
        stored_bytes = value.untyped_storage().nbytes() if value.layout is torch.strided else -1
        if value.numel() * value.element_size() > stored_bytes or value.device.type != "cpu":
            shape = tuple(value.shape)
            raise UserError(f"{path}: {name!r} has the shape {shape}, and {max(0, stored_bytes):,} bytes of data")
    return {str(name).removeprefix("_orig_mod."): value for name, value in values.items()}


def _check(file: BufferedReader, file_bytes: int, is_archive: bool) -> None:
    """Raise UnsafePickleError, or what zipfile raises for a damaged archive, unless torch may read the file."""
    if is_archive:
        check_pickle(io.BytesIO(_pickle_of(file, file_bytes)), file_bytes)
        return
    file.seek(0)
    if file.read(len(_OLD_BEGINNING)) != _OLD_BEGINNING:
        raise UnsafePickleError("it is damaged, or not a file of torch.save")
    programs = io.BytesIO(file.read(min(file_bytes, MAX_PICKLE_BYTES)))
    for _ in range(_OLD_PICKLES):
        check_pickle(programs, file_bytes)


def _pickle_of(file: BufferedReader, file_bytes: int) -> bytes:
    """data.pkl of an archive whose entries are all uncompressed and do not overlap.

    torch.save compresses nothing, so anything that would unpack to more than it is shows here.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = {entry.filename for entry in entries}
        packed = any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries)
        total_bytes = sum(entry.file_size for entry in entries)
        if packed or total_bytes > file_bytes or len(names) < len(entries) or len(entries) > MAX_ENTRIES:
            raise UnsafePickleError("its archive is compressed, or its parts overlap, which torch.save never does")
        programs = [
            entry for entry in entries if entry.filename.count("/") == 1 and entry.filename.endswith("/data.pkl")
        ]
        if len(programs) != 1:
            raise UnsafePickleError("it is not a file of torch.save: it has no data.pkl")
        if programs[0].file_size > MAX_PICKLE_BYTES:
            raise UnsafePickleError(f"{programs[0].file_size:,} bytes are too many for its data.pkl")
        return archive.read(programs[0])


def check_pickle(stream: IO[bytes], file_bytes: int) -> None:
    """Read one program to its end. UnsafePickleError unless it only makes plain values and tensors over storages of at
    most `file_bytes` elements."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if opcode.name not in OPCODES:
                raise UnsafePickleError(f"its opcode {opcode.name} makes neither a tensor nor a plain value")
            if count == MAX_OPCODES:
                raise UnsafePickleError(f"it has more than {MAX_OPCODES:,} opcodes, which no state of a model needs")
            _follow(opcode.name, argument, stack, memo, file_bytes)
    except (ValueError, IndexError, KeyError, UnicodeError) as error:
        reason = (str(error).splitlines() or [""])[0][:100]
        raise UnsafePickleError(f"it is damaged ({type(error).__name__}: {reason})") from None


def _follow(name: str, argument: Any, stack: list[Any], memo: dict[int, Any], file_bytes: int) -> None:
    if name == "MARK":
        stack.append(_MARK)
    elif name == "GLOBAL":
        stack.append(_Named(_require_known(argument.replace(" ", "."), _CALLED | STORAGES | _DTYPES)))
    elif name in ("BININT", "BININT1", "BININT2", "LONG1"):
        if argument.bit_length() > MAX_INTEGER_BITS:
            raise UnsafePickleError(f"it has an integer of {argument.bit_length()} bits")
        stack.append(argument)
    elif name == "TUPLE":
        stack.append(_tuple(_to_mark(stack)))
    elif name in _TUPLES:
        stack.append(_tuple([stack.pop() for _ in range(_TUPLES[name])][::-1]))
    elif name in ("APPENDS", "SETITEMS"):
        _to_mark(stack)
    elif name in _TAKEN:
        for _ in range(_TAKEN[name]):
            stack.pop()
    elif name == "REDUCE":
        stack.pop()
        called = stack.pop()
        _require_known(called.name if isinstance(called, _Named) else "a call of a value", _CALLED)
        stack.append(None)
    elif name == "BINPERSID":
        _check_storage(stack.pop(), file_bytes)
        stack.append(None)
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name not in ("PROTO", "STOP"):
        stack.append(None)


def _require_known(name: str, known: frozenset[str]) -> str:
    if name not in known:
        raise UnsafePickleError(f"it asks for {name[:100]}, which is neither a tensor nor a plain value")
    return name


def _tuple(items: list[Any]) -> _Tuple:
    parts = 1 + sum(item.parts if isinstance(item, _Tuple) else 1 for item in items)
    if parts > MAX_PARTS:
        raise UnsafePickleError(f"it has a tuple of more than {MAX_PARTS:,} parts")
    return _Tuple(tuple(items), parts)


def _to_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _check_storage(found: object, file_bytes: int) -> None:
    """`found`: ("storage", type, key, device, elements), and in old files what of it is looked at."""
    if not isinstance(found, _Tuple) or len(found.items) < 5 or not isinstance(found.items[1], _Named):
        raise UnsafePickleError("it refers to something that is no storage")
    elements = found.items[4]
    if found.items[1].name not in STORAGES or type(elements) is not int or not 0 <= elements <= file_bytes:
        raise UnsafePickleError(f"it asks for a storage of {elements} elements, and the file has {file_bytes:,} bytes")
