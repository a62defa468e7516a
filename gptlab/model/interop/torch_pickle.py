"""The pickle inside a file of torch.save, followed opcode by opcode before torch runs any of it.

torch's restricted unpickler (weights_only) calls no function of an untrusted file. But it lets a file request storages
of any size, and for tuples nested in themselves: `t = (t, t)` sixty times is 200 bytes, and takes 2^60 steps to hash as
a key of a dict. So the program is first run here on descriptions of its values: what may be named or called is what the
state of a model needs, no storage is larger than the file, and no tuple has more parts than such a state's.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import IO, Any, NoReturn

MAX_OPCODES = 400_000
"""GPT-2 XL with two moments for each weight takes 150,000; following this many takes half a second."""
MAX_PARTS = 10_000
"""Of a tuple, those of the tuples within it counted each time; so it cannot be nested deeper than that either."""
MAX_INTEGER_BITS = 64
"""Integers hash by their remainder: long ones could all be made to collide in a dict."""

_OPCODES = (
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_SET GLOBAL "
    "REDUCE BUILD BINPERSID BINGET LONG_BINGET BINPUT LONG_BINPUT"
)
OPCODES = frozenset(_OPCODES.split())
"""Those of torch's restricted unpickler, but for NEWOBJ, which no state of a model needs."""
_CALLED = frozenset({
    "collections.OrderedDict", "torch.Size", "torch.device", "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter",
})  # fmt: skip
_KINDS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
STORAGES = frozenset({"torch.storage.UntypedStorage", *(f"torch.{kind}Storage" for kind in _KINDS)})
_DTYPE_NAMES = ("bfloat16", "bool", "float16", "float32", "float64", "int16", "int32", "int64", "int8", "uint8")
_DTYPES = frozenset(f"torch.{name}" for name in _DTYPE_NAMES)
_MADE_OF = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_TAKEN = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}


class UnsafePickleError(Exception):
    """A program that is not let through; the message is the reason alone."""


@dataclass(frozen=True, slots=True)
class _Named:
    name: str


@dataclass(frozen=True, slots=True)
class _Tuple:
    items: tuple[Any, ...]
    parts: int


_MARK = _Named("(")


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
        stack.append(_global(argument))
    elif name in ("BININT", "BININT1", "BININT2", "LONG1"):
        if argument.bit_length() > MAX_INTEGER_BITS:
            raise UnsafePickleError(f"it has an integer of {argument.bit_length()} bits")
        stack.append(argument)
    elif name == "TUPLE":
        stack.append(_tuple(_to_mark(stack)))
    elif name in _MADE_OF:
        stack.append(_tuple([stack.pop() for _ in range(_MADE_OF[name])][::-1]))
    elif name in ("APPENDS", "SETITEMS"):
        _to_mark(stack)
    elif name in _TAKEN:
        for _ in range(_TAKEN[name]):
            stack.pop()
    elif name == "REDUCE":
        stack.pop()
        called = stack.pop()
        if not isinstance(called, _Named) or called.name not in _CALLED:
            _refuse_call(called)
        stack.append(None)
    elif name == "BINPERSID":
        _check_storage(stack.pop(), file_bytes)
        stack.append(None)
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name == "EMPTY_TUPLE":
        stack.append(_Tuple((), 1))
    elif name not in ("PROTO", "STOP"):
        stack.append(None)


def _global(argument: str) -> _Named:
    name = argument.replace(" ", ".")
    if name not in _CALLED | STORAGES | _DTYPES:
        _refuse_call(_Named(name))
    return _Named(name)


def _refuse_call(called: object) -> NoReturn:
    name = called.name if isinstance(called, _Named) else "a call of a value"
    raise UnsafePickleError(f"it asks for {name[:100]}, which is neither a tensor nor a plain value")


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
