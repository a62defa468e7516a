"""Files that grow are read once; truncated and replaced ones again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gptlab.config.errors import UserError
from gptlab.report.dashboard.tail import ANCHOR_BYTES, BLOCK_BYTES, MAX_LINE_BYTES, Tail

LINE = b'{"step": %06d, "step_seconds": 0.1234}\n'


def lines(first: int, last: int) -> bytes:
    return b"".join(LINE % number for number in range(first, last))


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def tail(path: Path) -> Tail:
    return Tail(path)


def read(tail: Tail) -> bytes:
    return b"".join(tail.blocks())


def test_each_byte_is_read_once(path: Path, tail: Tail) -> None:
    path.write_bytes(lines(0, 1000))
    assert read(tail) == lines(0, 1000)
    for start in range(1000, 1100, 10):
        append(path, lines(start, start + 10))
        assert read(tail) == lines(start, start + 10)
        assert read(tail) == b""
    assert tail.bytes_read == path.stat().st_size
    assert tail.restarts == 0


def test_a_file_larger_than_a_block_comes_in_whole_lines(
    path: Path, tail: Tail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptlab.report.dashboard.tail.BLOCK_BYTES", 1000)
    count = 2 * 1000 // len(LINE % 0) + 10
    path.write_bytes(lines(0, count))
    blocks = list(tail.blocks())
    assert len(blocks) == 3
    assert all(block.endswith(b"\n") for block in blocks)
    assert b"".join(blocks) == lines(0, count)


def test_an_incomplete_line_waits_for_its_end(path: Path, tail: Tail) -> None:
    text = lines(0, 2)
    for end in range(len(text)):
        path.write_bytes(text[: end + 1])  # replaces the content, not the file
        assert read(tail) == (
            lines(0, 1) if end + 1 == len(text) // 2 else lines(1, 2) if end + 1 == len(text) else b""
        )
    assert (tail.bytes_read, tail.restarts) == (len(text), 0)


def test_a_file_may_come_later_and_go(path: Path, tail: Tail) -> None:
    assert read(tail) == b""
    path.write_bytes(lines(0, 3))
    assert read(tail) == lines(0, 3)
    path.unlink()
    assert read(tail) == b""
    assert tail.restarts == 1
    path.write_bytes(lines(5, 6))
    assert read(tail) == lines(5, 6)


def test_a_truncated_file_is_read_again(path: Path, tail: Tail) -> None:
    path.write_bytes(lines(0, 100))
    read(tail)
    path.write_bytes(lines(0, 60))
    assert read(tail) == lines(0, 60)
    assert tail.restarts == 1


@pytest.mark.parametrize("added", [40, 41, 500])
def test_a_file_that_grew_past_its_old_size_after_it_was_truncated_is_read_again(
    path: Path, tail: Tail, added: int
) -> None:
    """A resumed run removes lines and writes as many others before anybody looks."""
    path.write_bytes(lines(0, 100))
    read(tail)
    resumed = lines(0, 60) + lines(900, 900 + added)
    path.write_bytes(resumed)
    os.utime(path, ns=(1, 1))
    assert read(tail) == resumed
    assert tail.restarts == 1


def test_a_replaced_file_is_read_again(path: Path, tail: Tail) -> None:
    path.write_bytes(lines(0, 100))
    read(tail)
    other = path.with_name("other")
    other.write_bytes(lines(0, 101))
    other.replace(path)
    assert read(tail) == lines(0, 101)
    assert tail.restarts == 1


def test_what_came_before_the_anchor_is_not_compared(path: Path, tail: Tail) -> None:
    """The bound of what is noticed: the same size, and the same last bytes."""
    path.write_bytes(lines(0, 100))
    read(tail)
    kept = lines(0, 100)[-ANCHOR_BYTES:]
    path.write_bytes(b"x" * (len(lines(0, 100)) - len(kept)) + kept + lines(100, 101))
    assert read(tail) == lines(100, 101)


def test_a_line_without_end_is_refused_within_its_first_blocks(path: Path, tail: Tail) -> None:
    with path.open("wb") as file:
        file.write(lines(0, 1))
        file.truncate(1 << 33)  # 8 GB of zeros that take no disk
    with pytest.raises(UserError, match="a line has more than"):
        read(tail)
    assert tail.bytes_read <= BLOCK_BYTES + MAX_LINE_BYTES


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_plain_file_is_refused(path: Path, tail: Tail, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.with_name("other").write_bytes(lines(0, 1))
        path.symlink_to("other")
    with pytest.raises(UserError, match="not a regular file"):
        read(tail)
