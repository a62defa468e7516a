"""The loader: the same steps whatever the ranks, the prefetching and the interruptions."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlab.config.run import DataConfig
from gptlab.data.loader import Loader, StepBatch, steps_ahead
from gptlab.data.rows import Pair, RowSource, make_rows
from gptlab.data.tokens.shards import TokenSplit

SEQ_LEN = 6


def rows_of(kind: str, *, seed: int = 3) -> RowSource:
    lengths = [19, 3, 17, 40, 9, 30, 11, 2]
    contents = [[0, *range(100 * i + 1, 100 * i + n + 1)] for i, n in enumerate(lengths)]
    tokens = np.array([t for content in contents for t in content], dtype=np.uint16)
    starts = np.cumsum([0, *map(len, contents)]).astype(np.int64)
    split = TokenSplit([tokens], starts, np.arange(len(contents), dtype=np.uint64), len(tokens))
    return make_rows(split, DataConfig(rows=kind), SEQ_LEN, 0, seed, None)  # type: ignore[arg-type]


def steps(loader: Loader, count: int) -> list[StepBatch]:
    return [next(loader) for _ in range(count)]


def same(a: StepBatch, b: StepBatch) -> bool:
    return (
        (a.step, a.epoch, a.micro_indices, a.target_tokens) == (b.step, b.epoch, b.micro_indices, b.target_tokens)
        and torch.equal(a.inputs, b.inputs)
        and torch.equal(a.targets, b.targets)
    )


@settings(max_examples=25)
@given(
    micro_batches=st.integers(1, 5),
    micro_sequences=st.integers(1, 4),
    world=st.integers(1, 7),
    start=st.integers(0, 30),
)
@pytest.mark.parametrize("kind", ["packed", "sequential", "random"])
def test_any_world_size_gets_the_same_steps(
    kind: str, micro_batches: int, micro_sequences: int, world: int, start: int
) -> None:
    rows = rows_of(kind)
    shape = {"micro_batches": micro_batches, "micro_sequences": micro_sequences, "device": "cpu"}
    with Loader(rows, **shape) as alone:  # type: ignore[arg-type]
        expected = steps(alone, start + 2)[start:]
    parts = []
    for rank in range(world):
        with Loader(rows, **shape, rank=rank, world_size=world) as loader:  # type: ignore[arg-type]
            loader.load_state_dict({"next_step": start})
            parts.append(steps(loader, 2))
    for number, whole in enumerate(expected):
        assert whole.micro_indices == tuple(range(micro_batches))
        assert whole.target_tokens == int((whole.targets != -1).sum())
        seen = []
        for rank, part in enumerate(step[number] for step in parts):
            assert part.inputs.shape == part.targets.shape == (len(part.micro_indices), micro_sequences, SEQ_LEN)
            assert part.inputs.dtype == part.targets.dtype == torch.int64
            assert part.micro_indices == tuple(range(rank, micro_batches, world))
            assert (part.step, part.epoch, part.target_tokens) == (whole.step, whole.epoch, whole.target_tokens)
            for place, micro in enumerate(part.micro_indices):
                assert torch.equal(part.inputs[place], whole.inputs[micro])
                assert torch.equal(part.targets[place], whole.targets[micro])
            seen += part.micro_indices
        assert sorted(seen) == list(range(micro_batches))


@pytest.mark.parametrize(("micro_batches", "world"), [(1, 3), (5, 2), (4, 4), (7, 3)])
def test_filled_up_every_rank_has_as_many(micro_batches: int, world: int) -> None:
    """What fills has no target that counts, and changes nothing else."""
    rows = rows_of("packed")
    shape: dict[str, Any] = {"micro_sequences": 2, "micro_batches": micro_batches, "device": "cpu", "world_size": world}
    for rank in range(world):
        with Loader(rows, **shape, rank=rank) as short, Loader(rows, **shape, rank=rank, fill=True) as filled:
            for some, more in zip(steps(short, 2), steps(filled, 2), strict=True):
                n = len(some.micro_indices)
                assert len(more.micro_indices) == -(-micro_batches // world)
                assert (more.target_tokens, more.epoch) == (some.target_tokens, some.epoch)
                assert more.micro_indices[:n] == some.micro_indices
                assert torch.equal(more.inputs[:n], some.inputs)
                assert torch.equal(more.targets[:n], some.targets)
                assert (more.targets[n:] == -1).all()


@pytest.mark.parametrize("kind", ["packed", "sequential"])
def test_every_row_comes_once_an_epoch_also_in_steps_that_straddle_epochs(kind: str) -> None:
    rows = rows_of(kind)
    per_step = 4
    assert rows.rows_per_epoch % per_step  # or no step would straddle
    with Loader(rows, micro_sequences=2, micro_batches=2, device="cpu") as loader:
        batches = steps(loader, rows.rows_per_epoch)  # = per_step epochs
    stream = torch.cat([b.inputs.reshape(-1, SEQ_LEN) for b in batches]).numpy()
    for epoch in range(per_step):
        taken = stream[epoch * rows.rows_per_epoch : (epoch + 1) * rows.rows_per_epoch]
        expected, _ = rows.read(epoch, np.arange(rows.rows_per_epoch))
        assert np.array_equal(taken, expected)
        assert Counter(map(tuple, taken)) == Counter(map(tuple, stream[: rows.rows_per_epoch]))
    assert batches[-1].epoch == per_step
    assert batches[0].epoch == per_step / rows.rows_per_epoch


def test_a_step_may_hold_several_epochs() -> None:
    rows = rows_of("packed")
    many = 2 * rows.rows_per_epoch + 3
    with Loader(rows, micro_sequences=many, micro_batches=1, device="cpu") as loader:
        got = next(loader).inputs[0].numpy()
    everything = np.arange(rows.rows_per_epoch)
    parts = [rows.read(0, everything)[0], rows.read(1, everything)[0], rows.read(2, everything[:3])[0]]
    assert np.array_equal(got, np.concatenate(parts))


@pytest.mark.parametrize("stop_after", [0, 1, 5])
def test_the_state_is_that_of_the_last_step_consumed(stop_after: int) -> None:
    rows = rows_of("packed")

    def fresh() -> Loader:
        return Loader(rows, micro_sequences=3, micro_batches=2, device="cpu")

    with fresh() as loader:
        expected = steps(loader, 12)
    with fresh() as loader:
        steps(loader, stop_after)
        time.sleep(0.05)  # let the thread run ahead
        state = loader.state_dict()
    assert state == {"next_step": stop_after}
    with fresh() as resumed:
        steps(resumed, 3)  # what it did before does not matter
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        for batch, wanted in zip(steps(resumed, 12 - stop_after), expected[stop_after:], strict=True):
            assert same(batch, wanted)


class Watched:
    """Rows that note every read, and fail from a given call on."""

    seq_len = SEQ_LEN
    rows_per_epoch = 1000

    def __init__(self, fail_at: int | None = None) -> None:
        self.reads = 0
        self.threads: set[str] = set()
        self._fail_at = fail_at

    def read(self, epoch: int, indices: np.ndarray) -> Pair:
        if self.reads == self._fail_at:
            raise OSError("the disk is gone")
        self.reads += 1
        self.threads.add(threading.current_thread().name)
        rows = np.repeat(indices[:, None], SEQ_LEN, axis=1).astype(np.int32)
        return rows, rows

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return np.full(len(indices), SEQ_LEN, dtype=np.int64)


def loader_of(rows: Any, **more: Any) -> Loader:
    return Loader(rows, micro_sequences=1, micro_batches=1, device="cpu", **more)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_steps_are_made_ahead_by_a_thread_and_not_further_than_they_should() -> None:
    rows = Watched()
    with loader_of(rows) as loader:
        assert rows.reads == 0  # no work before the first step is asked for
        ahead = steps_ahead(next(loader))
        wait_until(lambda: rows.reads >= ahead)  # one more, if the first was gone before all were made
        time.sleep(0.05)
        assert rows.reads <= 1 + ahead
        assert rows.threads == {"gptlab-loader_0"}


def test_the_thread_sleeps_until_half_of_what_it_made_is_gone() -> None:
    rows = Watched()
    with loader_of(rows) as loader:
        ahead = steps_ahead(next(loader))
        wait_until(lambda: rows.reads == 1 + ahead)
        for _ in range(ahead // 2 - 1):
            next(loader)
        time.sleep(0.05)
        assert rows.reads == 1 + ahead
        next(loader)
        wait_until(lambda: rows.reads == 1 + ahead // 2 + ahead)


@pytest.mark.parametrize(("tokens", "ahead"), [(1, 16), (768, 16), (8192, 8), (2**15, 3), (2**25, 3)])
def test_how_many_steps_are_made_ahead(tokens: int, ahead: int) -> None:
    """16 bytes a token, up to 16 steps, 1 MiB, or 3 steps of any size."""
    tensor = torch.empty(1, 1, tokens, dtype=torch.int64, device="meta")
    assert steps_ahead(StepBatch(0, 0.0, tensor, tensor, (0,), tokens)) == ahead


def test_an_error_surfaces_in_its_own_step_and_ends_the_thread() -> None:
    with loader_of(Watched(fail_at=2)) as loader:
        assert [next(loader).step for _ in range(2)] == [0, 1]
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)
        assert loader.state_dict() == {"next_step": 2}
        assert not alive()


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gptlab-loader")]


@pytest.mark.parametrize("consumed", [0, 1, 3])
def test_close_ends_the_thread(consumed: int) -> None:
    loader = loader_of(Watched())
    steps(loader, consumed)
    loader.close()
    assert not alive()
    loader.close()
    assert next(loader).step == consumed  # and a closed loader goes on where it was
    loader.close()
    with loader_of(Watched()) as inner:
        next(inner)
        assert len(alive()) == 1
    assert not alive()


def test_ranks_without_a_micro_batch_get_empty_tensors() -> None:
    with loader_of(Watched(), rank=2, world_size=3) as loader:
        batch = next(loader)
    assert batch.inputs.shape == batch.targets.shape == (0, 1, SEQ_LEN)
    assert batch.micro_indices == ()
    assert batch.target_tokens == SEQ_LEN


def test_batches_for_a_gpu_are_pinned_and_copied_asynchronously(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: what is asked of torch. Only from pinned memory, on a stream of its own, does a copy overlap with
    the work of the GPU; its memory is not used again before training has read it."""
    pinned: list[int] = []
    copied: list[tuple[int, str, bool, str]] = []
    on, kept = ["training"], []
    streams = SimpleNamespace(wait_stream=lambda other: kept.append(f"training waits for {other}"))

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        on.append(name)
        yield
        on.pop()

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.data_ptr())
        return tensor

    def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        copied.append((tensor.data_ptr(), device.type, non_blocking, on[-1]))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, used_by: kept.append(used_by))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "copies")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams)
    with Loader(rows_of("packed"), micro_sequences=3, micro_batches=2, device="cuda") as loader:
        batch = next(loader)
    assert [place for place, *_ in copied] == [batch.inputs.data_ptr(), batch.targets.data_ptr()]
    assert {place for place, *_ in copied} <= set(pinned)
    assert [how for _, *how in copied] == [["cuda", True, "copies"]] * 2
    assert kept == ["training waits for copies", streams, streams]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_steps_are_those_of_the_cpu() -> None:
    rows = rows_of("packed")
    with (
        Loader(rows, micro_sequences=3, micro_batches=2, device="cpu") as here,
        Loader(rows, micro_sequences=3, micro_batches=2, device="cuda") as there,
    ):
        for mine, its in zip(steps(here, 20), steps(there, 20), strict=True):
            assert its.inputs.device.type == "cuda"
            assert torch.equal(mine.inputs, its.inputs.cpu())
            assert torch.equal(mine.targets, its.targets.cpu())
