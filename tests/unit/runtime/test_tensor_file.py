from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
import torch
from oracle_checkpoint import raw_bytes, same_bits
from safetensors.torch import load_file, save_file

from gptlab.runtime.files.tensor_file import (
    DamagedFileError,
    FileRecord,
    read_bytes,
    read_tensors,
    verify_tensors,
    write_bytes,
    write_tensors,
)

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64, torch.bool, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
]  # fmt: skip


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Every pattern of bits may occur: NaNs with payloads, infinities, subnormals."""
    count = torch.empty(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def record_of(content: bytes) -> FileRecord:
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def file_with(path: Path, header: object, data: bytes = b"") -> FileRecord:
    """A file whose digest is right, whatever its header says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + data
    path.write_bytes(content)
    return record_of(content)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_file_by_hand(tmp_path: Path) -> None:
    """One int16 tensor [1, -2]: length of the header, header padded to a multiple of 8, little-endian data."""
    text = b'{"x":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'
    assert len(text) == 54
    expected = b"\x38" + b"\x00" * 7 + text + b"  " + b"\x01\x00\xfe\xff"
    record = write_tensors(tmp_path / "x", {"x": torch.tensor([1, -2], dtype=torch.int16)})
    assert (tmp_path / "x").read_bytes() == expected
    assert record == record_of(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_and_shape_reads_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {str(shape): random_bits(dtype, shape) for shape in [(), (1,), (3, 5), (0, 4), (2, 0), (2, 3, 4)]}
    record = write_tensors(tmp_path / "x", tensors)
    verify_tensors(tmp_path / "x", record)
    assert same_bits(read_tensors(tmp_path / "x", record), tensors)


def test_the_library_reads_our_files_and_we_read_its_files(tmp_path: Path) -> None:
    tensors = {str(dtype): random_bits(dtype, (3, 2)) for dtype in DTYPES} | {"ü \n": torch.ones(2), "": torch.ones(())}
    record = write_tensors(tmp_path / "ours", tensors)
    assert same_bits(load_file(tmp_path / "ours"), tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert same_bits(read_tensors(tmp_path / "theirs", record_of((tmp_path / "theirs").read_bytes())), tensors)
    assert record == record_of((tmp_path / "ours").read_bytes())


def test_views_shared_memory_and_layouts_are_written_in_full(tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    parameter = torch.nn.Parameter(whole.clone())
    tensors = {
        "whole": whole, "tied": whole, "transposed": whole.T, "column": whole[:, 1], "strided": whole[::2, ::3],
        "expanded": whole[:1].expand(5, 4), "row": whole[1], "parameter": parameter,
    }  # fmt: skip
    record = write_tensors(tmp_path / "x", tensors)
    read = read_tensors(tmp_path / "x", record)
    assert same_bits(read, tensors)
    read["whole"].zero_()
    assert read["tied"].sum() == 66, "what was read shares no memory"
    assert all(not tensor.requires_grad for tensor in read.values())


def test_tensors_longer_than_a_piece(tmp_path: Path) -> None:
    """Reading goes in pieces of 16 MiB; 40 MB needs three, the last one short."""
    tensors = {"long": torch.arange(5_000_001, dtype=torch.int64), "short": torch.ones(3)}
    record = write_tensors(tmp_path / "x", tensors)
    read = read_tensors(tmp_path / "x", record)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert record.sha256 == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse(), torch.zeros(2, device="meta")],
    ids=["complex128", "sparse", "meta"],
)
def test_what_the_format_lacks_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises((ValueError, NotImplementedError)):
        write_tensors(tmp_path / "x", {"x": tensor})


def test_the_name_of_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="__metadata__"):
        write_tensors(tmp_path / "x", {"__metadata__": torch.ones(1)})


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", {"x": torch.ones(1)})
    assert (tmp_path / "x").read_bytes() == b"mine"


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    record = write_tensors(path, {"a": torch.randn(3), "b": torch.arange(5, dtype=torch.uint8)})
    content = path.read_bytes()
    wrong = [content[:i] + bytes([content[i] ^ (1 << i % 8)]) + content[i + 1 :] for i in range(len(content))]
    wrong += [content[:i] for i in range(len(content))] + [content + b"\0"]
    for damaged in wrong:
        path.write_bytes(damaged)
        for check in (read_tensors, verify_tensors):
            with pytest.raises(DamagedFileError):
                check(path, record)


@pytest.mark.parametrize(
    ("header", "data_bytes", "reason"),
    [
        (b"\xff\xfe", 0, "JSON"),
        (b"[" * 100_000, 0, "JSON"),
        (b"[]", 0, "not a JSON object"),
        (b'{"x":1,"x":2}', 0, "twice"),
        (b'{"x":NaN}', 0, "NaN"),
        ({"x": 1}, 0, "malformed"),
        ({"x": entry() | {"more": 1}}, 8, "malformed"),
        ({"x": entry("F33")}, 8, "malformed"),
        ({"x": entry(["F32"])}, 8, "malformed"),
        ({"x": entry(shape=[-2])}, 8, "malformed"),
        ({"x": entry(shape=[2.0])}, 8, "malformed"),
        ({"x": entry(shape=[True, 2])}, 8, "malformed"),
        ({"x": entry(shape="2")}, 8, "malformed"),
        ({"x": entry(offsets=[0, 8, 9])}, 8, "malformed"),
        ({"x": entry(offsets=[-8, 0])}, 8, "malformed"),
        ({"x": entry(offsets=[0, 4])}, 8, "not what its shape needs"),
        ({"x": entry(offsets=[8, 0])}, 8, "not what its shape needs"),
        ({"x": entry(shape=[2**40, 2**40], offsets=[0, 8])}, 8, "shape"),
        ({"x": entry(shape=[0, 2**70], offsets=[0, 0])}, 0, "shape"),
        ({"x": entry(shape=[1] * 65, offsets=[0, 4])}, 4, "shape"),
        ({"x": entry(shape=[10**12], offsets=[0, 4 * 10**12])}, 8, "cover"),
        ({"x": entry()}, 9, "cover"),
        ({"x": entry()}, 7, "cover"),
        ({"x": entry(), "y": entry()}, 8, "begins at byte 0"),
        ({"x": entry(), "y": entry(offsets=[4, 12])}, 12, "begins at byte 4"),
        ({"x": entry(), "y": entry(offsets=[12, 20])}, 20, "begins at byte 12"),
    ],
)
def test_headers_that_cannot_be(tmp_path: Path, header: object, data_bytes: int, reason: str) -> None:
    record = file_with(tmp_path / "x", header, bytes(data_bytes))
    for check in (read_tensors, verify_tensors):
        with pytest.raises(DamagedFileError, match=reason):
            check(tmp_path / "x", record)


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 8, b"\x01" + b"\0" * 7, (2**62).to_bytes(8, "little") * 2])
def test_files_too_short_for_their_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    for check in (read_tensors, verify_tensors):
        with pytest.raises(DamagedFileError):
            check(tmp_path / "x", record_of(content))


def test_altered_headers_with_a_right_digest_never_end_in_another_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_tensors(path, {"a": torch.randn(3), "b": torch.arange(5, dtype=torch.uint8)})
    content = path.read_bytes()
    source = random.Random(1)
    refused = 0
    for _ in range(500):
        altered = bytearray(content)
        for _ in range(source.randint(1, 3)):
            altered[source.randrange(len(content) - 17)] = source.choice(b'0123456789[]{}",:-FIU\x00\xff ')
        path.write_bytes(altered)
        try:
            read = read_tensors(path, record_of(bytes(altered)))
            assert sum(len(raw_bytes(tensor)) for tensor in read.values()) <= len(content)
        except DamagedFileError:
            refused += 1
    assert refused > 400, "most alterations break the header"


def test_small_files(tmp_path: Path) -> None:
    record = write_bytes(tmp_path / "x", b"hello")
    assert record == record_of(b"hello")
    assert read_bytes(tmp_path / "x", record) == b"hello"
    for damaged in (b"hellO", b"hell", b"hello "):
        (tmp_path / "x").write_bytes(damaged)
        with pytest.raises(DamagedFileError):
            read_bytes(tmp_path / "x", record)
