"""The memory of kernels is kept from one call to the next, in one block of large pages."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from gptlab.model.kernels import library
from gptlab.runtime.hardware.installed import cxx_compiler

ROOT = Path(__file__).parents[3]
LEAST_KEPT = 2 << 20  # bytes, as in scratch.h

pytestmark = pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler here")


class Piece(NamedTuple):
    address: int
    size: int
    byte_before: int


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    program = tmp_path_factory.mktemp("arena") / "driver"
    source = ROOT / "tests/support/arena_driver.cpp"
    compiler = cxx_compiler()
    assert compiler is not None
    command = [compiler, *library._FLAGS, "-DREAL=float", f"-I{ROOT / 'gptlab/model/kernels'}", str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    return subprocess.run([str(program)], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


@pytest.fixture(scope="module")
def rounds(printed: list[str]) -> list[list[Piece]]:
    found: list[list[Piece]] = [[] for _ in range(5)]
    for line in printed:
        if not line.startswith("VmFlags"):
            number, *piece = map(int, line.split())
            found[number].append(Piece(*piece))
    return found


def kept(pieces: list[Piece]) -> list[Piece]:
    return [piece for piece in pieces if piece.size >= LEAST_KEPT]


def test_pieces_begin_with_a_line_of_the_cache_and_do_not_overlap(rounds: list[list[Piece]]) -> None:
    for pieces in rounds:
        assert all(piece.address % 64 == 0 for piece in pieces)
        for first, second in pairwise(sorted(pieces)):
            assert first.address + first.size <= second.address


def test_the_same_memory_is_used_again(rounds: list[list[Piece]]) -> None:
    """Not memory that happens to have the same address: the system clears that."""
    assert [piece.byte_before for piece in kept(rounds[2])] == [2, 2, 2]
    assert [piece.address for piece in kept(rounds[1])] == [piece.address for piece in kept(rounds[2])]


def test_what_a_round_needs_is_in_one_block_the_next_time(rounds: list[list[Piece]]) -> None:
    for number in (1, 2, 4):
        pieces = kept(rounds[number])
        assert pieces[0].address % (2 << 20) == 0  # where a large page begins
        for first, second in pairwise(pieces):
            assert second.address == first.address + -(-first.size // 64) * 64


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_pages_are_large_where_there_are_large_ones(printed: list[str]) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    assert "hg" in printed[-1].split()
