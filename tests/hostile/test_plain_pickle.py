"""meta.pkl: nanoGPT's table is read; everything that runs code or eats memory is one line, at once."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pickletools
import struct
import time
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlab.config.errors import UserError
from gptlab.data.tokenizer.tokenizer import read_character_table
from gptlab.runtime.files import restricted_pickle
from gptlab.runtime.files.restricted_pickle import PLAIN_OPCODES, _PlainUnpickler, read_plain_pickle


def table_of(characters: str, **changes: Any) -> dict[str, Any]:
    """What nanoGPT's prepare.py pickles."""
    stoi = {character: index for index, character in enumerate(characters)}
    return {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": stoi} | changes


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_back(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "meta.pkl"
    more = [None, True, -1, 70_000, 2**40, 1.5, "x" * 300, [], {}] + ([b"bytes"] if protocol > 2 else [])
    values = table_of("\n !aé→😀") | {"more": more}
    path.write_bytes(pickle.dumps(values, protocol))
    assert read_plain_pickle(path) == values
    assert read_character_table(path) == "\n !aé→😀"


class Exploit:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_program_that_runs_a_command_is_refused_before_it_does(tmp_path: Path, protocol: int) -> None:
    path, marker = tmp_path / "meta.pkl", tmp_path / "ran"
    path.write_bytes(pickle.dumps(table_of("ab", more=Exploit(marker)), protocol))
    with pytest.raises(UserError, match="is not a plain table"):
        read_plain_pickle(path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())  # The file is what it claims to be.
    assert marker.exists()


def test_the_second_lock_holds_without_the_first() -> None:
    for value in (os.system, OrderedDict(a=1), {1}.__class__, complex(1, 2)):
        with pytest.raises(pickle.UnpicklingError, match="it names"):
            _PlainUnpickler(io.BytesIO(pickle.dumps(value))).load()
    with pytest.raises(pickle.UnpicklingError, match="outside"):
        _PlainUnpickler(io.BytesIO(b"\x80\x02X\x01\x00\x00\x00aQ.")).load()


def test_no_opcode_that_names_or_calls_is_let_through() -> None:
    assert {opcode.name for opcode in pickletools.opcodes} > PLAIN_OPCODES
    callers = "GLOBAL STACK_GLOBAL REDUCE BUILD INST OBJ NEWOBJ NEWOBJ_EX EXT1 EXT2 EXT4 PERSID BINPERSID NEXT_BUFFER"
    assert not PLAIN_OPCODES & set(callers.split())


P = b"\x80\x04"
HOSTILE = {
    "GLOBAL": b"cos\nsystem\n.",
    "STACK_GLOBAL": P + b"\x8c\x02os\x8c\x06system\x93.",
    "INST": b"(S'id'\nios\nsystem\n.",
    "EXT1": P + b"\x82\x01.",
    "PERSID": b"Pid\n.",
    "BINPERSID": P + b"NQ.",
    "NEXT_BUFFER": P + b"\x97.",
    "BUILD": P + b"}}b.",
    "bytes of 2^60": P + b"\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
    "bytes of 4 GB": P + b"B\xff\xff\xff\xffx.",
    "text of 2^40": P + b"\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
    "bytearray of 2^60": P + b"\x96" + struct.pack("<Q", 1 << 60) + b"x.",
    "frame of 2^60": P + b"\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "memo of 2^31": P + b"Nr\xff\xff\xff\x7f.",
    "memo that grows": P + b"".join(b"Nr" + struct.pack("<I", 1 << bits) + b"0" for bits in range(10, 31)) + b"N.",
    "integer of a megabit": P + b"\x8b" + struct.pack("<i", 1 << 17) + b"\x7f" * (1 << 17) + b".",
    "integer of 200 bytes": P + b"\x8a\xc8" + b"\x7f" * 200 + b".",
    "digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "tuple of itself doubled, as a key": P + b"}N" + b"2\x86" * 60 + b"Ns.",
    "a million opcodes": P + b"N0" * 500_000 + b"N.",
    "deep": P + b"]" * 240_000 + b"a" * 239_999 + b".",
    "a list as a key": P + b"}]Ns.",
    "a list in itself": P + b"]q\x00h\x00a.",
    "nothing on the stack": P + b"0000.",
    "append to a number": P + b"K\x01K\x02a.",
    "no such memo": P + b"h\x07.",
    "bad UTF-8": P + b"\x8c\x02\xff\xfe.",
    "protocol 9": b"\x80\x09N.",
    "no pickle": b"hello, this is text\n",
    "empty": b"",
    "cut short": pickle.dumps(table_of("abc"))[:-9],
    "zeros": bytes(4000),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_one_line_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "meta.pkl"
    path.write_bytes(HOSTILE[kind])
    began = time.process_time()
    with pytest.raises(UserError) as error:
        read_character_table(path)
    assert time.process_time() - began < 2  # 0.3 at most
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400 + len(str(path))
    if len(HOSTILE[kind]) > 10_000:  # Tracing takes ten times as long, and small files are those that ask for much.
        return
    tracemalloc.start()
    with pytest.raises(UserError):
        read_character_table(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_file_too_large_for_a_table_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "meta.pkl"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)  # a hole: a terabyte that takes no space
    with pytest.raises(UserError, match="1,099,512 MB are too many"):
        read_plain_pickle(path)
    with pytest.raises(UserError, match="cannot read"):
        read_plain_pickle(tmp_path)
    monkeypatch.setattr(restricted_pickle, "MAX_OPCODES", 20)
    path.write_bytes(pickle.dumps(table_of("abcdefgh")))
    with pytest.raises(UserError, match="more than 20 opcodes"):
        read_plain_pickle(path)


# Python's own parser warns of escapes in a text of protocol 0, with the bytes that it met.
@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
@settings(max_examples=300)
@given(st.data())
def test_whatever_the_bytes_are_the_answer_is_plain_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(pickle.dumps(table_of("\n abé"), data.draw(st.integers(0, 5))))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)))):
        content[place] = value
    path = tmp_path_factory.getbasetemp() / "mutant.pkl"
    path.write_bytes(content)
    with contextlib.suppress(UserError):
        assert type(read_plain_pickle(path)) in (dict, list, str, bytes, int, float, bool, type(None))


@pytest.mark.parametrize(
    "table",
    [
        [1, 2],
        {},
        table_of("ab", vocab_size=True),
        table_of("ab", vocab_size="2"),
        table_of("ab", stoi=None),
        table_of("ab", itos=["a", "b"]),
        table_of("ab", vocab_size=3),
        table_of("ab", vocab_size=2**62),
        table_of("", vocab_size=0),
        table_of("ab", vocab_size=-1),
        table_of("ab", itos={0: "a", 2: "b"}),
        table_of("ab", itos={0: "a", 1: "bc"}),
        table_of("ab", itos={0: "a", 1: 7}),
        table_of("ab", itos={0: "a", 1: "a"}),
        table_of("ab", itos={0: "a", 1: "b", 2: "c"}),
        table_of("ab", stoi={"a": 1, "b": 0}),
        table_of("ab", stoi={"a": 0, "b": 1, "c": 2}),
        table_of("a\ud800"),
    ],
    ids=repr,
)
def test_a_table_that_is_none_is_one_line(tmp_path: Path, table: Any) -> None:
    path = tmp_path / "meta.pkl"
    path.write_bytes(pickle.dumps(table))
    with pytest.raises(UserError, match="is not a table of characters") as error:
        read_character_table(path)
    assert "tokenizer.path" in str(error.value)
