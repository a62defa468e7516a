"""Collectives that a GPU never finishes, and what watching over the ranks costs the store of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from gptlab.runtime.processes.distributed import World
from gptlab.runtime.processes.liveness import Liveness
from gptlab.runtime.processes.torch_group import TorchGroup, _mark_queue


class QueuedWork:
    """A collective of NCCL: waiting for it returns as soon as the GPU's queue knows of it."""

    def wait(self) -> None: ...


class Watched:
    """Rank 0 of three, whose main thread reads the result of a collective, by a clock that its other thread's waits
    move. The other ranks are on another machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_done: Callable[[], bool]) -> None:
        self.now, self.beats = 0.0, 0
        self.ended: list[tuple[int, float]] = []
        self.store = dist.HashStore()
        self.liveness = Liveness(0, 3, self.store)
        self.liveness.timeout_seconds, self.liveness.step = 20.0, 7
        self.group = TorchGroup(World(0, 3), self.liveness, self.store)
        self.group._mark = lambda: is_done
        self.joined = {1: 1, 2: 1}
        self.silent: set[int] = set()
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, async_op: QueuedWork())
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(self.liveness._over, "wait", self._wait)
        monkeypatch.setattr(os, "_exit", lambda code: self.ended.append((code, self.now)))

    def _wait(self, seconds: float) -> bool:
        self.now += seconds
        self.beats += 1
        for rank, collectives in self.joined.items():
            if rank not in self.silent:
                self.store.set(f"beat/{rank}", json.dumps([self.beats, collectives]))
        return bool(self.ended) or self.now > 100.0


@pytest.mark.parametrize(
    ("joined", "silent", "seconds", "text"),
    [
        (0, False, 20.0, "rank 2 kept the others waiting for 20 s (gradients) in step 7"),
        (1, True, 20.0, "rank 2 kept the others waiting for 20 s (gradients) in step 7"),
        (1, False, 50.0, "rank 0 waited 50 s for a collective that all ranks joined and no GPU finished (gradients) "
                         "in step 7"),
    ],
    ids=["rank 2 never joined it", "rank 2's machine is gone", "all joined it"],
)  # fmt: skip
def test_a_collective_that_never_finishes_ends_the_run_by_name(
    monkeypatch: pytest.MonkeyPatch, joined: int, silent: bool, seconds: float, text: str
) -> None:
    """Its `wait` has returned: the main thread is in `.item()`, in `synchronize`, or wherever it needed the result."""
    watched = Watched(monkeypatch, is_done=lambda: False)
    watched.joined[2] = joined
    watched.group.sum(torch.zeros(1), "gradients")
    assert watched.liveness._waiting is None
    if silent:
        watched.store.set("beat/2", json.dumps([0, joined]))
        watched.silent.add(2)
    watched.liveness._run()
    ((code, at),) = watched.ended
    assert code == 3
    assert watched.liveness.failure is not None
    assert watched.liveness.failure.text == text
    assert seconds <= at <= seconds + 5.0


@pytest.mark.parametrize("how", ["in time", "after the timeout, which no rank exceeded", "its GPU is lost"])
def test_one_that_finishes_is_not_waited_for_any_longer(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def is_done() -> bool:
        if how == "its GPU is lost" and watched.now > 10.0:  # which the main thread meets too, and reports
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return watched.now > (10.0 if how == "in time" else 40.0)

    watched = Watched(monkeypatch, is_done)
    for _ in range(3):
        watched.group.sum(torch.zeros(1), "gradients")
    watched.joined = {1: 3, 2: 3}
    watched.liveness._run()
    assert watched.now > 100.0
    assert (watched.ended, watched.liveness.failure) == ([], None)
    assert not watched.liveness._unfinished


def test_a_rank_ahead_is_not_what_the_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has joined the first of three collectives that rank 0's main thread has queued already, rank 2 none."""
    watched = Watched(monkeypatch, is_done=lambda: False)
    for what in ("first", "second", "third"):
        watched.group.sum(torch.zeros(1), what)
    watched.joined = {1: 1, 2: 0}
    watched.liveness._run()
    assert watched.liveness.failure is not None
    assert watched.liveness.failure.text == "rank 2 kept the others waiting for 20 s (first) in step 7"


@pytest.mark.skipif(sys.platform != "linux", reason="only there psutil computes when a process began from the clock")
def test_who_sets_the_clock_kills_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        liveness = Liveness(0, 2, dist.HashStore())
        me = liveness.who_am_i()
        monkeypatch.setattr(liveness._thread, "start", lambda: None)
        liveness.start([me, me | {"pid": other.pid}])
        assert liveness._died() is None
        booted = psutil.boot_time()
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + 60)
        assert liveness._died() is None
    assert liveness._died() is not None


@pytest.mark.skipif(sys.platform != "linux", reason="only there a file says which machine it is")
def test_machines_of_one_name_do_not_look_for_each_others_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def host() -> str:
        return Liveness(0, 2, dist.HashStore()).who_am_i()["host"]

    here, read_text = host(), Path.read_text
    assert here == host()
    monkeypatch.setattr(
        Path, "read_text",
        lambda path, *args, **more: "another" if path.name == "boot_id" else read_text(path, *args, **more),
    )  # fmt: skip
    assert here != host()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_point_in_the_queue_is_reached_when_the_work_before_it_is_done() -> None:
    """What tells, on a GPU, whether a collective has finished; asked from another thread."""
    reached = []
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    is_done = _mark_queue()
    for _ in range(2):
        thread = threading.Thread(target=lambda: reached.append(is_done()))
        thread.start()
        thread.join()
        torch.cuda.synchronize()
    assert reached == [False, True]


class CountingStore:
    """A store that counts, by rank, the values that are written and read."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self.counts = store, counts

    def set(self, key: str, value: str) -> None:
        self.counts["written"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.counts["read"] += 1
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.counts["read"] += len(keys)
        return self._store.multi_get(keys) if keys else []

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_traffic_grows_with_the_ranks_and_not_with_their_square(size: int) -> None:
    """A value of each for all, one of rank 0, a barrier, and a step of which the threads see the beginning."""
    store, counts = dist.HashStore(), [Counter[str]() for _ in range(size)]
    said: dict[int, Any] = {}

    def run(rank: int) -> None:
        mine = CountingStore(store, counts[rank])
        liveness = Liveness(rank, size, mine)
        liveness.timeout_seconds = 600.0
        group = TorchGroup(World(rank, size), liveness, mine)
        said[rank] = [group.gather("a", [rank]), group.broadcast("b", (1, 2) if rank == 0 else None)]
        group.barrier("c")
        with liveness.in_collective("gradients"):
            liveness._beat(1)
            assert liveness._lost() is None

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    everything = [[[rank] for rank in range(size)], [1, 2]]
    assert [said[rank] for rank in range(size)] == [everything] * size
    # Rank 0 reads what each says, twice, and itself; the others what it says, and what it has collected, twice.
    assert [count["read"] for count in counts] == [2 * size + 1] + [2 * 2 + 1] * (size - 1)
    assert [count["written"] for count in counts] == [2 * 2 + 2] + [3] * (size - 1)
