"""Pickle files that hold a plain table (nanoGPT's meta.pkl), read so that no file can run code or eat memory.

A pickle is a program for a stack machine. Before anything of it runs, every opcode is checked: those that make plain
values are allowed, a few hundred thousand of them at most, and all that name or call Python objects are refused. Then
`pickle.Unpickler` runs the program, and finds no class. Tuples are refused: nested in themselves and used as a key, a
few hundred bytes of them take hours to hash.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any, NoReturn

from gptlab.config.errors import UserError, cannot
from gptlab.runtime.files.plain_file import read_plain

MAX_BYTES = 4 << 20
"""A table of 65,536 characters, all that uint16 tokens can have, takes 1.3 MB."""
MAX_OPCODES = 500_000
"""The same table takes 330,000; checking half a million takes 0.4 s."""
_PLAIN_OPCODES = (
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_DICT SETITEM SETITEMS "
    "EMPTY_LIST APPEND APPENDS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET"
)
PLAIN_OPCODES = frozenset(_PLAIN_OPCODES.split())
MAX_LONG_BITS = 64


class _PlainUnpickler(pickle.Unpickler):
    """Finds no class and no outside object: the second barrier, should a program ever pass the first."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def read_plain_pickle(path: Path) -> Any:
    """Dicts, lists, text, bytes, numbers, booleans and None from a pickle file of protocol 2 or newer.

    UserError for anything else: objects of Python, damage, a file too large for a table.
    """
    with cannot(f"read {path}"):
        if path.stat().st_size > MAX_BYTES:
            _refuse(path, f"{path.stat().st_size / 1e6:,.0f} MB are too many for one")
        content = read_plain(path, MAX_BYTES)
    try:
        _check_opcodes(path, content)
        return _PlainUnpickler(io.BytesIO(content)).load()
    except UserError:
        raise
    except Exception as error:  # What a wrong program raises is anything: stack underflow, unhashable keys, bad UTF-8.
        reason = (str(error).splitlines() or [""])[0][:100]
        raise UserError(f"{path} is not a plain table: it is damaged ({type(error).__name__}: {reason})") from None


def _check_opcodes(path: Path, content: bytes) -> None:
    for count, (opcode, found, _) in enumerate(pickletools.genops(content)):
        argument: Any = found
        if opcode.name not in PLAIN_OPCODES:
            _refuse(path, f"its opcode {opcode.name} makes no text, number, list or dict of protocol 2 or newer")
        if count == MAX_OPCODES:
            _refuse(path, f"more than {MAX_OPCODES:,} opcodes are too many for one")
        # The memo is an array as long as the largest index: one opcode could ask for 32 GB.
        if opcode.name == "LONG_BINPUT" and argument > count:
            _refuse(path, f"it keeps a value under number {argument:,}, and has made {count:,} so far")
        # Integers hash by their remainder: long ones could all be made to collide in a dict.
        if opcode.name == "LONG1" and argument.bit_length() > MAX_LONG_BITS:
            _refuse(path, f"it has an integer of {argument.bit_length():,} bits")


def _refuse(path: Path, reason: str) -> NoReturn:
    raise UserError(f"{path} is not a plain table: {reason}")
