"""The packing plan and the order of rows."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from itertools import islice, pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_packing import BOS, cropped_stream, cut_rows

from gptlab.config.run import DataConfig, LongDocuments
from gptlab.data import cropping
from gptlab.data import rows as rows_module
from gptlab.data.cropping import CroppedRows
from gptlab.data.packing import SMALLEST_CUT, Packing, pack_documents
from gptlab.data.rows import _feistel, hashed, make_rows, mix, permuted
from gptlab.data.tokens.shards import TokenSplit

lengths_of_documents = st.lists(st.integers(0, 60), min_size=1, max_size=40)


def as_rows(plan: Packing, documents: list[list[int]]) -> list[list[int]]:
    """The packing's rows as tokens, where all contents stand one after the other."""
    text = [token for document in documents for token in document]
    rows = []
    for first, end in zip(plan.row_segments, plan.row_segments[1:], strict=False):
        row = []
        for segment in range(first, end):
            start, length = plan.segment_starts[segment], plan.segment_lengths[segment]
            row += [BOS, *text[start : start + length]]
        rows.append(row)
    return rows


def planned(lengths: list[int], seq_len: int, overhang: str, buffer: int) -> tuple[Packing, list[list[int]]]:
    counts = np.array(lengths, dtype=np.int64)
    starts = np.cumsum(counts) - counts
    plan = pack_documents(starts, counts, seq_len, overhang=overhang, buffer_documents=buffer)
    return plan, [list(range(s, s + n)) for s, n in zip(starts.tolist(), lengths, strict=True)]


def cropped(lengths: list[int], seq_len: int, buffer: int, rows: int) -> tuple[list[list[int]], list[list[int]], int]:
    """The first `rows` rows as tokens, the documents, and how many rows an epoch has."""
    ends = np.cumsum([0, *lengths]).tolist()
    documents = [list(range(start, end)) for start, end in pairwise(ends)]
    tokens = np.array([token for document in documents for token in (BOS, *document)], dtype=np.int32)
    starts = np.cumsum([0, *(length + 1 for length in lengths)])
    split = TokenSplit([tokens], starts, np.zeros(len(lengths), dtype=np.uint64), 0)
    source = CroppedRows(split, seq_len, BOS, buffer, None)
    inputs, targets = source.read(0, np.arange(rows))
    return np.concatenate([inputs[:, :1], targets], axis=1).tolist(), documents, source.rows_per_epoch


@given(
    lengths=lengths_of_documents | st.lists(st.integers(0, 30), min_size=120, max_size=200),
    seq_len=st.integers(1, 40),
    buffer=st.integers(1, 12) | st.integers(100, 300),
    part=st.integers(1, 50),
)
def test_crop_places_what_nanochats_loader_places(lengths: list[int], seq_len: int, buffer: int, part: int) -> None:
    """Row for row, across epochs and across the parts that the stream is planned in."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cropping, "PART_DOCUMENTS", part)
        rows, documents, an_epoch = cropped(lengths, seq_len, buffer, 200)
    expected = list(islice(cropped_stream(documents, seq_len + 1, buffer), max(200, an_epoch)))
    assert rows == expected[:200]
    # An epoch takes as many documents as there are, and ends with a row.
    taken = [row.count(BOS) for row in expected[:an_epoch]]
    assert sum(taken[:-1]) < len(lengths) <= sum(taken)


@pytest.mark.parametrize(
    ("name", "documents", "seq_len", "buffer", "rows", "sha256"),
    [
        ("long", 5000, 256, 1000, 9000, "53e628fdcfa2e12c"),  # more than two epochs
        ("few", 300, 32, 1000, 2000, "ee24a5e6560e4990"),  # the buffer holds four passes
        ("odd", 1337, 64, 50, 6000, "5d0554cf81b78b38"),  # fewer wait than a batch brings
    ],
)
def test_crop_gives_the_rows_that_nanochats_own_program_gave(
    name: str, documents: int, seq_len: int, buffer: int, rows: int, sha256: str
) -> None:
    """SHA-256 of what nanochat's and autoresearch's loaders yielded for the same documents, batch for batch: the int32
    tokens of nanochat's tokenizing_distributed_data_loader_with_state_bos_bestfit (dataloader.py at e8fec97) and
    autoresearch's make_dataloader (prepare.py at 228791f), one process, row groups of 1,024 documents as in their
    corpora. Document i has the tokens 1 + (7 i + k) % 997, behind BOS 0."""
    scale = {"long": 600, "few": 40, "odd": 90}[name]
    lengths = []
    for i in range(documents):
        draw = hashlib.sha256(f"{name}/{i}".encode()).digest()
        short, long = (int.from_bytes(draw[at : at + 4], "little") for at in (0, 4))
        lengths.append(short % scale + (long % (8 * scale) if draw[8] < 40 else 0))
    starts = np.cumsum([0, *(1 + length for length in lengths)])
    tokens = np.zeros(starts[-1], dtype=np.uint16)
    for i, length in enumerate(lengths):
        tokens[starts[i] + 1 : starts[i + 1]] = 1 + (7 * i + np.arange(length)) % 997
    split = TokenSplit([tokens], starts, np.zeros(documents, dtype=np.uint64), 0)
    data = DataConfig(long_documents="crop", pack_buffer_documents=buffer)
    source = make_rows(split, data, seq_len, 0, 5, None)
    epochs, indices = np.divmod(np.arange(rows), source.rows_per_epoch)
    digest = hashlib.sha256()
    for epoch in range(int(epochs[-1]) + 1):
        inputs, targets = source.read(epoch, indices[epochs == epoch])
        digest.update(np.concatenate([inputs, targets[:, -1:]], axis=1).astype("<i4").tobytes())
    assert epochs[-1] >= 2
    assert digest.hexdigest()[:16] == sha256


def test_rows_of_a_late_epoch_are_found_without_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a resumed run asks for first, and what one that goes back to a checkpoint asks for last."""
    monkeypatch.setattr(cropping, "PART_DOCUMENTS", 16)
    split = TokenSplit([np.arange(600, dtype=np.uint16)], np.arange(0, 601, 12), np.zeros(50, dtype=np.uint64), 0)
    data = DataConfig(long_documents="crop", pack_buffer_documents=8)
    straight, resumed = (make_rows(split, data, 20, 0, 5, None) for _ in range(2))
    everything = np.arange(straight.rows_per_epoch)
    stream = [straight.read(epoch, everything)[0] for epoch in range(6)]
    for epoch in (5, 2, 4, 0, 5):
        backwards = everything[::-1]
        assert np.array_equal(resumed.read(epoch, backwards)[0], stream[epoch][::-1])


@settings(max_examples=80)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 40), buffer=st.integers(1, 12) | st.just(100))
@pytest.mark.parametrize("overhang", ["cut", "pad"])
def test_cut_and_pad_place_what_the_oracle_places(overhang: str, lengths: list[int], seq_len: int, buffer: int) -> None:
    plan, documents = planned(lengths, seq_len, overhang, buffer)
    smallest_cut = max(2, int((seq_len + 1) * SMALLEST_CUT)) if overhang == "cut" else None
    assert as_rows(plan, documents) == cut_rows(documents, seq_len + 1, buffer, smallest_cut)


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
    rows, _, an_epoch = cropped([6, 2, 1, 3], 4, 5, 4)
    # A pass is one batch of four, so that two are there at first.
    assert rows == [
        [BOS, 9, 10, 11, BOS],  # a gap of 1: the shortest (the first token 8) is cropped to nothing
        [BOS, 9, 10, 11, BOS],  # the same of the second pass, and 6, 2, 6, 2 wait
        [BOS, 9, 10, 11, BOS],  # four are too few: the third pass has come
        [BOS, 6, 7, BOS, 6],  # of 6, 2, 6, 2, 6, 2 the first 2; then the second, cropped
    ]
    assert an_epoch == 2


def test_lengths_that_never_fit_together_are_cut_instead_of_padded() -> None:
    """Documents of 0.6 rows waste 40% where nothing is cut."""
    seq_len = 511
    plan, _ = planned([300] * 1000, seq_len, "cut", 1000)
    used = plan.segment_lengths.sum() + len(plan.segment_lengths)
    assert used / (plan.n_rows * (seq_len + 1)) > 0.99
    padded, _ = planned([300] * 1000, seq_len, "pad", 1000)
    assert padded.n_rows == 1000


def test_planning_is_fast() -> None:
    """About 1.5 microseconds a document; a loop over the buffer of 1000 would take half a minute for these."""
    lengths = np.random.default_rng(0).lognormal(7, 1.2, 100_000).astype(np.int64)
    starts = np.cumsum([0, *lengths])
    tokens = np.broadcast_to(np.uint16(0), int(starts[-1]))
    split = TokenSplit([tokens], starts, np.zeros(len(lengths), dtype=np.uint64), 0)
    for long_documents in get_args(LongDocuments):
        began = time.process_time()
        make_rows(split, DataConfig(long_documents=long_documents), 2047, 0, 1, None)
        assert time.process_time() - began < 5


def test_a_buffer_of_all_documents_takes_about_as_long_as_a_small_one() -> None:
    """Validation plans with one, at every start: as a sorted list of documents it took five times as long here, and
    ten seconds for 300,000 documents."""
    lengths = np.random.default_rng(0).integers(0, 1023, 100_000)
    seconds = []
    for buffer in (1000, len(lengths)):
        began = time.process_time()
        pack_documents(np.cumsum(lengths) - lengths, lengths, 1024, overhang="pad", buffer_documents=buffer)
        seconds.append(time.process_time() - began)
    assert seconds[1] < 3 * seconds[0]


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
def test_small_permutations_are_uniform_in_first_two_places(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Feistel network with halves of three bits: every ordered pair of images is about equally frequent.

    Its 64 images are computed at once and then looked up: a call takes as long for one value, and most are sent on."""
    images = functools.cache(lambda bits, keys: _feistel(np.arange(1 << bits, dtype=np.uint64), bits, list(keys)))
    monkeypatch.setattr(rows_module, "_feistel", lambda values, bits, keys: images(bits, tuple(keys))[values])
    trials = 300
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


def plain_permutation(size: int, seed: int, epoch: int) -> list[int]:
    """Six rounds of a Feistel network in plain integers, the halves 3 bits or more; images outside are sent on."""

    def round_function(half: int, number: int) -> int:
        words = b"".join(part.to_bytes(8, "little") for part in (seed, epoch, number))
        z = half ^ int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
        z = (z + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    bits = max(6, (size - 1).bit_length())
    low, high = bits // 2, bits - bits // 2

    def image(value: int) -> int:
        left, right = divmod(value, 1 << low)
        for number in (0, 2, 4):
            left ^= round_function(right, number) % (1 << high)
            right ^= round_function(left, number + 1) % (1 << low)
        value = left << low | right
        return value if value < size else image(value)

    return [image(index) for index in range(size)]


@pytest.mark.parametrize(("size", "seed", "epoch"), [(1, 0, 0), (10, 1, 0), (70, 1337, 3), (1000, 2**63 - 1, 2)])
def test_the_order_is_six_rounds_of_a_feistel_network(size: int, seed: int, epoch: int) -> None:
    assert permuted(np.arange(size), size, seed=seed, epoch=epoch).tolist() == plain_permutation(size, seed, epoch)


def test_the_order_is_that_of_runs_begun_before() -> None:
    """Known answers: with another number of rounds, a run that is resumed would go on in another order of its data, and
    no statistic would tell it from this one (six, eight and ten rounds are all uniform)."""
    assert permuted(np.arange(10), 10, seed=1, epoch=0).tolist() == [0, 9, 6, 1, 4, 5, 3, 7, 8, 2]
    assert permuted(np.arange(5), 1_000_000, seed=1337, epoch=2).tolist() == [216013, 790282, 846620, 505789, 545866]


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
