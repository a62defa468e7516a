"""Rows: every token's fate, order as a pure function of (seed, epoch, index), validation fixed by content."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_packing import BOS as ORACLE_BOS
from oracle_packing import cropped_stream, cut_rows

from gptlab.config.errors import ConfigError, UserError
from gptlab.config.run import DataConfig
from gptlab.data import cropping
from gptlab.data.packing import IGNORED, SMALLEST_CUT
from gptlab.data.rows import RowSource, make_rows, validation_rows
from gptlab.data.token_fate import token_fate
from gptlab.data.tokens.shards import TokenSplit

BOS = 0


def split_of(documents: list[list[int]], *, bos: bool = True, hashes: list[int] | None = None) -> TokenSplit:
    """A split in memory, in two shards so that their border is crossed."""
    contents = [[BOS, *document] if bos else document for document in documents]
    tokens = np.array([token for content in contents for token in content], dtype=np.uint16)
    starts = np.cumsum([0, *map(len, contents)]).astype(np.int64)
    numbers = np.array(range(len(documents)) if hashes is None else hashes, dtype=np.uint64)
    return TokenSplit([tokens[: len(tokens) // 3], tokens[len(tokens) // 3 :]], starts, numbers, len(tokens))


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens are 1, 2, 3, ...: each occurs once."""
    ends = np.cumsum(lengths)
    return [list(range(end - n + 1, end + 1)) for end, n in zip(ends.tolist(), lengths, strict=True)]


def epoch_of(rows: RowSource, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return rows.read(epoch, np.arange(rows.rows_per_epoch))


def whole_rows(rows: RowSource, epoch: int = 0) -> list[tuple[int, ...]]:
    """Each row as its tokens, padding left out."""
    return [
        (int(i[0]), *(int(t) for t in targets if t != IGNORED))
        for i, targets in zip(*epoch_of(rows, epoch), strict=True)
    ]


lengths_of_documents = st.lists(st.integers(0, 60), min_size=1, max_size=30).filter(lambda n: sum(n) + len(n) > 20)


@pytest.fixture(scope="module", autouse=True)
def short_parts() -> Iterator[None]:
    """Cropped rows are planned for a few epochs at a time, not for 65,536 documents."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cropping, "PART_DOCUMENTS", 50)
        yield


@given(
    lengths=lengths_of_documents, seq_len=st.integers(1, 20), buffer=st.integers(1, 10), seed=st.integers(0, 2**63 - 1)
)
@pytest.mark.parametrize("mode", ["cut", "crop"])
def test_packed_rows_hold_what_the_oracle_packs(
    mode: str, lengths: list[int], seq_len: int, buffer: int, seed: int
) -> None:
    documents = numbered(lengths)
    data = DataConfig(long_documents=mode, pack_buffer_documents=buffer)  # type: ignore[arg-type]
    rows = make_rows(split_of(documents), data, seq_len, BOS, seed, None)
    slots = seq_len + 1
    stream = cropped_stream(documents, slots, buffer)
    cut = cut_rows(documents, slots, buffer, max(2, int(slots * SMALLEST_CUT))) if mode == "cut" else []
    for epoch in range(3):
        expected = list(islice(stream, rows.rows_per_epoch)) if mode == "crop" else cut
        wanted = [tuple(BOS if t == ORACLE_BOS else t for t in row) for row in expected]
        if mode == "crop":
            assert whole_rows(rows, epoch) == wanted
        else:
            assert Counter(whole_rows(rows, epoch)) == Counter(wanted)
        inputs, targets = epoch_of(rows, epoch)
        assert (inputs[:, 0] == BOS).all()
        # Inputs and targets are one row, shifted by one; behind the padding's beginning there is only padding.
        padded = targets == IGNORED
        assert np.array_equal(inputs[:, 1:][~padded[:, :-1]], targets[:, :-1][~padded[:, :-1]])
        assert (inputs[:, 1:][padded[:, :-1]] == BOS).all()
        assert (np.diff(padded.astype(int), axis=1) >= 0).all()


@settings(max_examples=80)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 20), buffer=st.integers(1, 10))
@pytest.mark.parametrize("mode", ["cut", "crop"])
def test_the_fate_of_every_packed_token_adds_up(mode: str, lengths: list[int], seq_len: int, buffer: int) -> None:
    split = split_of(numbered(lengths))
    data = DataConfig(long_documents=mode, pack_buffer_documents=buffer)  # type: ignore[arg-type]
    rows = make_rows(split, data, seq_len, BOS, 1, None)
    fate = token_fate(rows)
    targets = epoch_of(rows)[1]
    counted = targets[targets != IGNORED]
    content = counted[counted != BOS]
    assert fate.trained + fate.context + fate.cropped == fate.total == split.n_tokens == sum(lengths) + len(lengths)
    assert fate.trained + fate.repeated + fate.added + fate.padded == rows.rows_per_epoch * seq_len
    assert fate.padded == (targets == IGNORED).sum()
    assert fate.trained + fate.repeated + fate.added == len(counted)
    if mode == "cut":
        assert fate.cropped == fate.repeated == 0
        # Every token behind a document's own BOS, exactly once.
        assert sorted(content.tolist()) == list(range(1, sum(lengths) + 1))
    else:
        # As many documents as the split has, whose beginnings stand in the rows.
        taken = np.concatenate([epoch_of(rows)[0][:, :1], targets], axis=1)
        assert (taken == BOS).sum() >= len(lengths)
        assert fate.added == fate.padded == 0
        assert isinstance(rows, cropping.CroppedRows)
        packing, in_rows, as_targets = rows.first_epoch, set[int](), set[int]()
        for segment, (start, length) in enumerate(zip(packing.segment_starts, packing.segment_lengths, strict=True)):
            in_rows |= {*range(start - 1, start + length)}
            as_targets |= {*range(start - (segment not in packing.row_segments), start + length)}
        assert (fate.trained, fate.context) == (len(as_targets), len(in_rows - as_targets))
        assert fate.trained >= len({*content.tolist()})


def test_what_is_cropped_is_all_that_no_row_has() -> None:
    """Of 22 tokens, each document's BOS among them. That of the third is a target in the middle of the first row, and
    its 19 is one twice; that of the first is never one."""
    data = DataConfig(long_documents="crop", pack_buffer_documents=4)
    rows = make_rows(split_of(numbered([9, 9, 1])), data, 3, BOS, 0, None)
    fate = token_fate(rows)
    assert whole_rows(rows) == [(BOS, 19, BOS, 19), (BOS, 1, 2, 3)]
    assert (fate.total, fate.trained, fate.context, fate.cropped, fate.repeated) == (22, 5, 1, 16, 1)


def test_a_packed_row_by_hand() -> None:
    """Contents of 3 and 1 in rows of 4 + 1 slots: BOS 1 2 3 and a gap of 1, then BOS 4 and three of padding."""
    rows = make_rows(split_of([[1, 2, 3], [4]]), DataConfig(), 4, BOS, 0, None)
    inputs, targets = epoch_of(rows)
    first = int(inputs[0, 1] != 1)  # which of the two rows the permutation put in front
    assert inputs[first].tolist() == [0, 1, 2, 3]
    assert targets[first].tolist() == [1, 2, 3, -1]
    assert inputs[1 - first].tolist() == [0, 4, 0, 0]
    assert targets[1 - first].tolist() == [4, -1, -1, -1]
    assert token_fate(rows).padded == 4


@pytest.mark.parametrize("kind", ["packed", "sequential", "random"])
def test_rows_are_a_pure_function_of_seed_epoch_and_index(kind: str) -> None:
    split = split_of(numbered([50, 3, 17, 80, 9, 30, 41, 2, 66, 12]))
    data = DataConfig(rows=kind)  # type: ignore[arg-type]
    rows = make_rows(split, data, 8, BOS, 5, None)
    inputs, targets = epoch_of(rows, 2)
    scattered = np.random.default_rng(0).permutation(rows.rows_per_epoch)[:7]
    for again in (rows, make_rows(split, data, 8, BOS, 5, None)):
        some = again.read(2, scattered)
        assert np.array_equal(some[0], inputs[scattered])
        assert np.array_equal(some[1], targets[scattered])
        counts = again.target_counts(2, scattered)
        assert np.array_equal(counts, (targets[scattered] != IGNORED).sum(axis=1))
        assert counts.dtype == np.int64
    other_epoch = epoch_of(rows, 3)[0]
    other_seed = epoch_of(make_rows(split, data, 8, BOS, 6, None), 2)[0]
    assert np.array_equal(inputs, other_epoch) == np.array_equal(inputs, other_seed) == (kind == "sequential")
    if kind == "packed":  # another order of the same rows
        assert sorted(inputs.tolist()) == sorted(other_epoch.tolist()) == sorted(other_seed.tolist())
    nothing = rows.read(0, np.empty(0, dtype=np.int64))
    assert nothing[0].shape == nothing[1].shape == (0, 8)


def test_sequential_rows_are_chunks_in_file_order() -> None:
    rows = make_rows(split_of([list(range(1, 12))], bos=False), DataConfig(rows="sequential"), 3, None, 0, None)
    inputs, targets = epoch_of(rows)
    assert inputs.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert targets.tolist() == [[2, 3, 4], [5, 6, 7], [8, 9, 10]]
    fate = token_fate(rows)
    assert (fate.total, fate.trained, fate.context, fate.cropped, fate.padded) == (11, 9, 1, 1, 0)


def test_random_rows_are_windows_that_reach_both_ends() -> None:
    tokens = list(range(1, 22))
    rows = make_rows(split_of([tokens], bos=False), DataConfig(rows="random"), 4, None, 9, None)
    inputs, targets = (np.concatenate(parts) for parts in zip(*(epoch_of(rows, e) for e in range(400)), strict=True))
    assert (np.diff(inputs, axis=1) == 1).all()
    assert np.array_equal(targets, inputs + 1)
    starts = Counter(inputs[:, 0].tolist())
    assert sorted(starts) == list(range(1, 18))  # the last window is 17..20 -> 21
    # 2000 draws over 17 starts: 118 each, standard deviation 10.5; five of them.
    assert max(abs(count - 2000 / 17) for count in starts.values()) < 53


def test_the_fate_of_tokens_in_random_rows_is_that_of_the_first_epoch() -> None:
    tokens = list(range(1, 202))
    rows = make_rows(split_of([tokens], bos=False), DataConfig(rows="random"), 10, None, 3, None)
    inputs, targets = (set(part.ravel().tolist()) for part in epoch_of(rows))
    fate = token_fate(rows)
    assert (fate.total, fate.trained, fate.repeated) == (201, len(targets), 200 - len(targets))
    assert (fate.context, fate.cropped) == (len(inputs - targets), len(set(tokens) - inputs - targets))
    assert 0 < fate.context < fate.cropped  # and 1/e of tokens are in no row, more or less


@pytest.mark.parametrize("kind", ["packed", "sequential", "random"])
def test_a_text_shorter_than_a_row_is_refused_with_the_nearest_length(kind: str) -> None:
    data = DataConfig(rows=kind)  # type: ignore[arg-type]
    split = split_of([[1, 2, 3], [4]])
    assert make_rows(split, data, 5, BOS, 0, None).rows_per_epoch >= 1
    with pytest.raises(ConfigError, match=r"model\.seq_len = 6: .* only 6 tokens.*nearest valid: 5\)"):
        make_rows(split, data, 6, BOS, 0, None)


def test_packed_rows_need_a_bos() -> None:
    with pytest.raises(ConfigError, match=r"data\.rows = 'packed'.*nearest valid: random"):
        make_rows(split_of([[1, 2, 3]], bos=False), DataConfig(), 2, None, 0, None)


def test_a_packing_is_kept_checked_and_made_again_when_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split, data = split_of(numbered([50, 3, 17, 80])), DataConfig()
    expected = epoch_of(make_rows(split, data, 8, BOS, 5, None))
    assert np.array_equal(epoch_of(make_rows(split, data, 8, BOS, 5, tmp_path)), expected)
    assert not list(tmp_path.iterdir())  # of few documents it is planned every time
    monkeypatch.setattr("gptlab.data.rows.KEPT_DOCUMENTS", 4)
    for _ in range(2):
        assert np.array_equal(epoch_of(make_rows(split, data, 8, BOS, 5, tmp_path)), expected)
    (plan,) = (p for p in (tmp_path / "plans").iterdir() if p.is_dir())
    kept = (plan / "segment_starts.npy").read_bytes()
    (plan / "segment_starts.npy").write_bytes(kept[:-1] + b"\1")
    assert np.array_equal(epoch_of(make_rows(split, data, 8, BOS, 5, tmp_path)), expected)
    assert (plan / "segment_starts.npy").read_bytes() == kept
    make_rows(split, data, 9, BOS, 5, tmp_path)
    make_rows(split, DataConfig(long_documents="crop"), 8, BOS, 5, tmp_path)
    make_rows(split, DataConfig(pack_buffer_documents=2), 8, BOS, 5, tmp_path)
    assert len([p for p in (tmp_path / "plans").iterdir() if p.is_dir()]) == 4
    with monkeypatch.context() as patched:  # a kept packing is read, not made
        patched.setattr("gptlab.data.packing._best_fit", None)
        make_rows(split, data, 8, BOS, 5, tmp_path)
    shutil.rmtree(tmp_path / "plans")
    (tmp_path / "plans").touch()  # a cache that cannot be written
    assert np.array_equal(epoch_of(make_rows(split, data, 8, BOS, 5, tmp_path)), expected)


def validation_targets(rows: RowSource) -> list[int]:
    return [int(t) for t in epoch_of(rows)[1].reshape(-1) if t != IGNORED]


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20), seq_len=st.integers(1, 20), data=st.data())
@pytest.mark.parametrize("bos_id", [BOS, None])
def test_validation_is_fixed_by_content_and_covers_every_token_once(
    bos_id: int | None, lengths: list[int], seq_len: int, data: st.DataObject
) -> None:
    documents = numbered(lengths)
    hashes = data.draw(st.permutations(range(len(documents))))
    n_content = sum(lengths)
    limit = data.draw(st.one_of(st.none(), st.integers(1, n_content + 5)))
    if n_content < 2:
        return
    rows = validation_rows(split_of(documents, bos=bos_id is not None, hashes=hashes), seq_len, bos_id, limit)
    # The same documents in another file order.
    order = data.draw(st.permutations(range(len(documents))))
    moved = split_of([documents[i] for i in order], bos=bos_id is not None, hashes=[hashes[i] for i in order])
    for mine, theirs in zip(epoch_of(rows), epoch_of(validation_rows(moved, seq_len, bos_id, limit), 7), strict=True):
        assert np.array_equal(mine, theirs)
    in_content_order = [t for _, document in sorted(zip(hashes, documents, strict=True)) for t in document]
    expected = in_content_order if bos_id is not None else in_content_order[1:]
    targets = validation_targets(rows)
    assert len(targets) == len(set(targets))
    assert set(targets) == set(expected[:limit])
    counts = rows.target_counts(0, np.arange(rows.rows_per_epoch))
    assert np.array_equal(counts, (epoch_of(rows)[1] != IGNORED).sum(axis=1))
    assert (counts > 0).all()
    fate = token_fate(rows)
    assert fate.trained == len(targets)
    assert fate.total == fate.trained + fate.context + fate.cropped
    assert rows.rows_per_epoch * seq_len == fate.trained + fate.padded
    if bos_id is not None:
        assert (epoch_of(rows)[0][:, 0] == BOS).all()
    else:
        assert targets == expected[:limit]  # consecutive chunks of one text


def test_validation_by_hand() -> None:
    """Hash order B A: B = 5 6 7 8 9 10 gives a full row and a rest of two, A = 1 2 3 fits no more behind that."""
    split = split_of([[1, 2, 3], [5, 6, 7, 8, 9, 10]], hashes=[9, 4])
    inputs, targets = epoch_of(validation_rows(split, 4, BOS))
    assert inputs.tolist() == [[0, 5, 6, 7], [0, 1, 2, 3], [0, 9, 10, 0]]
    assert targets.tolist() == [[5, 6, 7, 8], [1, 2, 3, -1], [9, 10, -1, -1]]
    inputs, targets = epoch_of(validation_rows(split, 7, BOS))
    assert inputs.tolist() == [[0, 5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 0, 0, 0]]
    inputs, targets = epoch_of(validation_rows(split, 9, BOS, 7))
    assert inputs.tolist() == [[0, 5, 6, 7, 8, 9, 10, 0, 1]]
    assert targets.tolist() == [[5, 6, 7, 8, 9, 10, -1, 1, -1]]  # the inner BOS is no target


def test_validation_without_anything_to_predict_is_refused() -> None:
    for split, bos_id in ((split_of([]), BOS), (split_of([[]]), BOS), (split_of([[1]], bos=False), None)):
        with pytest.raises(UserError, match="nothing to predict"):
            validation_rows(split, 4, bos_id)
