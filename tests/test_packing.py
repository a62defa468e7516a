"""The packing plan and the order of rows."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_packing import BOS, crop_rows, cut_rows

from gptlab.data.order import hashed, mix, permuted
from gptlab.data.packing import SMALLEST_CUT, Plan, plan_rows

lengths_of_documents = st.lists(st.integers(0, 60), min_size=1, max_size=40)


def as_rows(plan: Plan, documents: list[list[int]]) -> list[list[int]]:
    """The plan's rows as tokens, where all contents stand one after the other."""
    text = [token for document in documents for token in document]
    rows = []
    for first, end in zip(plan.row_segments, plan.row_segments[1:], strict=False):
        row = []
        for segment in range(first, end):
            start, length = plan.segment_starts[segment], plan.segment_lengths[segment]
            row += [BOS, *text[start : start + length]]
        rows.append(row)
    return rows


def planned(lengths: list[int], seq_len: int, overhang: str, buffer: int) -> tuple[Plan, list[list[int]]]:
    counts = np.array(lengths, dtype=np.int64)
    starts = np.cumsum(counts) - counts
    plan = plan_rows(starts, counts, seq_len, overhang=overhang, buffer_documents=buffer)
    return plan, [list(range(s, s + n)) for s, n in zip(starts.tolist(), lengths, strict=True)]


@settings(max_examples=150)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 40), buffer=st.integers(1, 12))
def test_crop_places_what_nanochats_loader_places(lengths: list[int], seq_len: int, buffer: int) -> None:
    plan, documents = planned(lengths, seq_len, "crop", buffer)
    assert as_rows(plan, documents) == crop_rows(documents, seq_len + 1, buffer)


@settings(max_examples=150)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 40), buffer=st.integers(1, 12))
@pytest.mark.parametrize("overhang", ["cut", "pad"])
def test_cut_and_pad_place_what_the_oracle_places(overhang: str, lengths: list[int], seq_len: int, buffer: int) -> None:
    plan, documents = planned(lengths, seq_len, overhang, buffer)
    smallest_cut = max(2, int((seq_len + 1) * SMALLEST_CUT)) if overhang == "cut" else None
    assert as_rows(plan, documents) == cut_rows(documents, seq_len + 1, buffer, smallest_cut)


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=60), buffer=st.integers(1, 50))
@pytest.mark.parametrize("overhang", ["cut", "pad"])
def test_every_token_is_placed_once_and_rows_hold_what_they_may(overhang: str, lengths: list[int], buffer: int) -> None:
    seq_len = 255
    plan, documents = planned(lengths, seq_len, overhang, buffer)
    rows = as_rows(plan, documents)
    content = sorted(token for row in rows for token in row if token != BOS)
    assert content == list(range(sum(lengths)))
    assert all(row[0] == BOS and 1 <= len(row) <= seq_len + 1 for row in rows)
    if overhang == "cut":  # what makes padding less than 1% on any corpus: only the last row has a larger gap
        assert all(seq_len + 1 - len(row) < (seq_len + 1) * SMALLEST_CUT for row in rows[:-1])


def test_a_plan_by_hand() -> None:
    """Rows of 5 slots, contents of 6, 2, 1 and 3 tokens: 6 gives a full row (BOS and 4) and a rest of 2."""
    plan, documents = planned([6, 2, 1, 3], 4, "cut", 10)
    assert as_rows(plan, documents) == [
        [BOS, 0, 1, 2, 3],
        [BOS, 9, 10, 11],  # the longest rest; a gap of 1 holds nothing
        [BOS, 4, 5, BOS, 8],  # the first of the two rests of 2, then what fits: 1 token
        [BOS, 6, 7],
    ]
    crop, documents = planned([6, 2, 1, 3], 4, "crop", 10)
    assert as_rows(crop, documents) == [
        [BOS, 9, 10, 11, BOS],  # a gap of 1: the shortest (token 8) is cropped to nothing
        [BOS, 6, 7, BOS, 0],  # then document 0, whose overhang of 5 is gone
    ]


def test_lengths_that_never_fit_together_are_cut_instead_of_padded() -> None:
    """Documents of 0.6 rows waste 40% where nothing is cut."""
    seq_len = 511
    plan, _ = planned([300] * 1000, seq_len, "cut", 1000)
    used = plan.segment_lengths.sum() + len(plan.segment_lengths)
    assert used / (plan.n_rows * (seq_len + 1)) > 0.99
    padded, _ = planned([300] * 1000, seq_len, "pad", 1000)
    assert padded.n_rows == 1000


def test_planning_is_fast() -> None:
    """About 1.5 microseconds a document; a loop over the buffer of 1000 would take a minute for these."""
    lengths = np.random.default_rng(0).lognormal(7, 1.2, 200_000).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    for overhang in ("cut", "crop"):
        began = time.perf_counter()
        plan_rows(starts, lengths, 2048, overhang=overhang, buffer_documents=1000)
        assert time.perf_counter() - began < 5


@pytest.mark.parametrize("size", [1, 2, 3, 10, 16, 17, 1000, 65_537])
def test_an_epochs_order_is_a_permutation(size: int) -> None:
    everything = np.arange(size)
    for epoch in range(3):
        images = permuted(everything, size, seed=5, epoch=epoch)
        assert np.array_equal(np.sort(images), everything)
        some = everything[:: max(1, size // 7)]
        assert np.array_equal(permuted(some, size, seed=5, epoch=epoch), images[some])


def test_orders_differ_by_seed_and_epoch_and_leave_no_trace_of_the_index() -> None:
    everything = np.arange(1000)
    orders = [permuted(everything, 1000, seed=s, epoch=e) for s in range(3) for e in range(3)]
    correlations = np.corrcoef([everything, *orders])
    # Of independent permutations: standard deviation 1/sqrt(999) = 0.032; 0.15 is 4.7 of them, for 45 pairs.
    assert np.abs(correlations - np.eye(10)).max() < 0.15


@pytest.mark.parametrize("size", [3, 7, 13])
def test_small_permutations_are_uniform_in_first_two_places(size: int) -> None:
    """A Feistel network with halves of three bits: every ordered pair of images is about equally frequent."""
    trials = 2000
    pairs = np.zeros((size, size))
    for epoch in range(trials):
        first, second = permuted(np.arange(2), size, seed=11, epoch=epoch)
        pairs[first, second] += 1
    cells = size * (size - 1)
    seen = pairs[~np.eye(size, dtype=bool)]
    chi_square = ((seen - trials / cells) ** 2 / (trials / cells)).sum()
    # Mean cells - 1, standard deviation sqrt(2 (cells - 1)): five of them.
    assert chi_square < cells - 1 + 5 * math.sqrt(2 * (cells - 1))
    assert pairs.trace() == 0


def test_splitmix_by_its_published_values() -> None:
    """splitmix64 from state 0 begins with these numbers (Vigna's splitmix64.c, also Java's SplittableRandom(0))."""
    step = np.uint64(0x9E3779B97F4A7C15)
    states = np.arange(3, dtype=np.uint64) * step
    assert [f"{v:016x}" for v in mix(states)] == ["e220a8397b1dcdaf", "6e789e6aa1b965f4", "06c45d188009454f"]


def test_hashed_windows_are_uniform() -> None:
    values = hashed(np.arange(64_000), seed=3, epoch=1)
    counts = np.bincount((values % np.uint64(64)).astype(int), minlength=64)
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 63 + 5 * math.sqrt(2 * 63)
    assert not np.array_equal(values, hashed(np.arange(64_000), seed=3, epoch=2))
