"""Which processes of a run still live: a thread in each sends heartbeats, and ends its process if another one is lost.

A process that died is detected by its pid on the same machine, and by its silence on another. One that is stopped, or
hangs, is detected by how long the others wait for it. Whoever detects it first records it, once, and all end by that.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gptlab.config.errors import EXIT_TRAINING_FAILED, UserError

BEAT_SECONDS = 0.5
SILENT_SECONDS = 3.0
"""Six beats: if something went wrong, a process that has missed them all is the one that is lost."""
GRACE_SECONDS = 1.5
"""For the main thread to end by itself after its collective failed; then this thread ends the process. With a beat to
detect a death and one to learn of it, every rank ends within 3 seconds."""
_STORE_TRIES = 6
# Beyond the timeout, for a result that no GPU has though all ranks joined; torch's own limit is 30 s later.
_UNFINISHED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the run cannot continue."""

    rank: int
    """The one that failed."""
    exit_code: int
    text: str
    said_by_itself: bool
    """It reported this itself: the others need not."""


class PeerFailed(Exception):  # noqa: N818 -- how this process ends, not a bug
    """Another process of the run failed, died or hangs, so that this one cannot continue."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        self.is_reported = failure.said_by_itself
        """Whether it was printed, by the process that failed or by this one."""
        super().__init__(failure.text)


class Liveness:
    """The main thread calls the methods; the rest runs in a thread of its own."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.timeout_seconds = float("inf")
        """A rank that keeps the others waiting for so long in a collective counts as lost."""
        self.step = 0
        """The current step, from 1; 0 while the run is prepared. All ranks are in the same one."""
        self.on_lost: Callable[[Failure], None] = lambda failure: None
        """Called by the thread before it ends the process."""
        self.failure: Failure | None = None
        self._rank, self._all = rank, range(size)
        self._store = store
        self._here: dict[int, tuple[int, psutil.Process | None]] = {}
        """Ranks on this machine: pid and process, None where it had ended before it was looked for."""
        self._collectives = 0
        self._waiting: _Waiting | None = None
        self._unfinished: deque[_Waiting] = deque()
        """Collectives whose results a GPU did not have yet, in its order."""
        self._alarmed = False
        self._leaving = False
        self._seen: dict[int, tuple[int, float]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gptlab-liveness", daemon=True)

    def who_am_i(self) -> dict[str, Any]:
        return {"host": pid_space(), "pid": os.getpid()}

    def start(self, everybody: Sequence[Mapping[str, Any]]) -> None:
        """`everybody`: `who_am_i` of each rank."""
        self._here = {
            rank: (who["pid"], _process(who["pid"]))
            for rank, who in enumerate(everybody)
            if who["host"] == pid_space() and rank != self._rank
        }
        with suppress(RuntimeError):  # the others miss only who was there; without a store, the thread says so
            self._beat(0)
        self._thread.start()

    def close(self) -> None:
        with suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "")
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def outlast(self) -> None:
        """Wait briefly for the other ranks to leave too: the store of the run ends with this process."""
        until = time.monotonic() + SILENT_SECONDS
        others = [f"left/{rank}" for rank in self._all if rank != self._rank]
        while time.monotonic() < until and not self._store.check(others):
            time.sleep(0.02)

    def waiting_for(
        self, keys: Mapping[str, int], timed_what: str, *, watched: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Within the context the main thread waits for `keys` in the store, each to be written by a rank: as long as
        those `watched` live, or, with a `timed_what` for messages, as long as in a collective."""
        return self._waits(_Waiting(timed_what, keys, watched))

    def joins_collective(self) -> int:
        """Count a collective that this rank joins; returns its number, the same on all ranks."""
        self._collectives += 1
        return self._collectives

    def in_collective(self, what: str, number: int | None = None) -> AbstractContextManager[None]:
        """Within the context the main thread waits for all ranks to join the same collective: that of `number`, or a
        new one."""
        return self._waits(_Waiting(what, None, self._all, number or self.joins_collective()))

    def until(self, is_done: Callable[[], bool], what: str, number: int) -> None:
        """A GPU has yet to finish a collective, and the main thread will wait for that wherever it reads what depends
        on it. `is_done` is called in the other thread."""
        self._unfinished.append(_Waiting(what, None, self._all, number, is_done))

    @contextmanager
    def _waits(self, waiting: _Waiting) -> Iterator[None]:
        outer, self._waiting = self._waiting, waiting
        try:
            yield
        finally:
            self._waiting = outer

    def raise_if_failed(self) -> None:
        """PeerFailed if a failure is recorded."""
        if self.failure is not None:
            raise PeerFailed(self.failure)

    def explained(self, error: RuntimeError) -> PeerFailed:
        """The cause of an error of torch.distributed: waits briefly until it is known who was lost."""
        self._alarmed = True
        until = time.monotonic() + SILENT_SECONDS + 2 * BEAT_SECONDS
        while self.failure is None and time.monotonic() < until:
            time.sleep(0.02)
        if self.failure is None:
            text = f"rank {self._rank} lost the others in step {self.step}: {' '.join(str(error).split())}"
            self._record(Failure(self._rank, EXIT_TRAINING_FAILED, text, False))
        assert self.failure is not None
        return PeerFailed(self.failure)

    def raise_if_lost_just_now(self, cause: BaseException) -> None:
        """PeerFailed if a process has reported that it ends, or turns out to have died, within two beats."""
        with suppress(RuntimeError):  # checked here too: on a busy machine the thread is late
            self._read_failure()
            if self.failure is None and (died := self._died()) is not None:
                self._record(died)
        until = time.monotonic() + 2 * BEAT_SECONDS
        while self.failure is None and time.monotonic() < until and self._thread.is_alive():
            time.sleep(0.02)
        if self.failure is not None:
            raise PeerFailed(self.failure) from cause

    def tell(self, error: BaseException, exit_code: int) -> None:
        """Tell the others that this process ends by an error of its own."""
        self._leaving = True
        if self.failure is None:
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            with suppress(RuntimeError):
                self._record(Failure(self._rank, exit_code, text, True))

    def _record(self, failure: Failure) -> None:
        """Record a failure; the first one counts. If the store is gone, this process's own."""
        try:
            standing = self._store.compare_set("failure", "", json.dumps(asdict(failure)))
            self.failure = Failure(**json.loads(standing))
        except RuntimeError:
            self.failure = self.failure or failure

    def _read_failure(self) -> None:
        if self.failure is None and self._store.check(["failure"]):
            self.failure = Failure(**json.loads(self._store.get("failure")))

    def _beat(self, number: int) -> None:
        self._store.set(f"beat/{self._rank}", json.dumps([number, self._collectives]))

    def _run(self) -> None:
        beats, tries = 0, 0
        failed_at: float | None = None
        while not self._over.wait(BEAT_SECONDS):
            try:
                beats += 1
                self._beat(beats)
                self._read_failure()
                if self.failure is None and (lost := self._lost()) is not None:
                    self._record(lost)
                tries = 0
            except RuntimeError:
                # The store is gone: torchrun was killed, or the machine that it ran on, or the rank that kept it.
                tries += 1
                dead = [rank for rank, (_, process) in self._here.items() if not _lives(process)]
                if dead and tries == 2 and self.failure is None:
                    self.failure = self._failure(dead[0], f"died (process {self._here[dead[0]][0]})")
                if tries == _STORE_TRIES and self.failure is None:
                    text = f"rank {self._rank} lost its launcher (the store of torchrun) in step {self.step}"
                    self.failure = Failure(self._rank, EXIT_TRAINING_FAILED, text, False)
            if self.failure is not None:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at >= GRACE_SECONDS and not self._leaving:
                    self._end(self.failure)

    def _died(self) -> Failure | None:
        """A process of this machine that ended without a report."""
        for rank, (pid, process) in self._here.items():
            if not _lives(process) and not self._store.check([f"left/{rank}"]):
                if self._store.check(["failure"]):  # reported before it ended
                    return None
                return self._failure(rank, f"died (process {pid})")
        return None

    def _lost(self) -> Failure | None:
        if (died := self._died()) is not None:
            return died
        now, waiting = time.monotonic(), self._longest_wait()
        seconds = 0.0 if waiting is None else now - waiting.since
        limit = self.timeout_seconds
        if not self._alarmed and (waiting is None or (waiting.keys is None and seconds < limit - 2 * SILENT_SECONDS)):
            self._seen.clear()
            return None  # a collective that lasts as usual costs the store nothing
        watched = waiting.watched if waiting is not None and not self._alarmed else self._all
        beats = self._beats(watched)
        for rank, beat in beats.items():
            if rank not in self._seen or self._seen[rank][0] != beat[0]:
                self._seen[rank] = (beat[0], now)
        silence = {rank: now - since for rank, (_, since) in self._seen.items()}
        if self._alarmed:
            silent = [rank for rank, seconds in silence.items() if seconds >= SILENT_SECONDS]
            return self._failure(silent[0], "died, or its machine is gone") if silent else None
        assert waiting is not None
        if seconds < limit:
            return None
        if waiting.keys is not None:
            missing = [rank for key, rank in waiting.keys.items() if not self._store.check([key])]
            if waiting.what and missing:
                return self._failure(missing[0], f"kept the others waiting for {seconds:.0f} s ({waiting.what})")
            silent = [rank for rank in waiting.watched if rank in missing and silence.get(rank, seconds) >= limit]
            return self._failure(silent[0], f"has been silent for {seconds:.0f} s") if silent else None
        behind = [rank for rank, beat in beats.items() if beat[1] < waiting.number]
        behind += [rank for rank in silence if silence[rank] >= SILENT_SECONDS and rank not in behind]
        if behind:
            return self._failure(behind[0], f"kept the others waiting for {seconds:.0f} s ({waiting.what})")
        if waiting.is_done is not None and seconds >= limit + _UNFINISHED_SECONDS:
            what = f"waited {seconds:.0f} s for a collective that all ranks joined and no GPU finished ({waiting.what})"
            return self._failure(self._rank, what)
        return None  # all have joined: torch's own limit decides

    def _longest_wait(self) -> _Waiting | None:
        while self._unfinished and self._unfinished[0].is_over():
            self._unfinished.popleft()
        waits = [*([] if self._waiting is None else [self._waiting]), *list(self._unfinished)[:1]]
        return min(waits, key=lambda waiting: waiting.since, default=None)

    def _failure(self, rank: int, what: str) -> Failure:
        where = f"in step {self.step}" if self.step else "before the first step"
        return Failure(rank, EXIT_TRAINING_FAILED, f"rank {rank} {what} {where}", False)

    def _beats(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        """[beats, collectives] of each of these that is another rank and has sent any."""
        keys = {f"beat/{rank}": rank for rank in ranks if rank != self._rank}
        there = [key for key in keys if self._store.check([key])]
        return {keys[key]: json.loads(value) for key, value in zip(there, self._store.multi_get(there), strict=True)}

    def _end(self, failure: Failure) -> None:
        with suppress(Exception):
            self.on_lost(failure)
        if not failure.said_by_itself:
            with suppress(OSError):
                os.write(2, f"gptlab: error: rank {self._rank}: {failure.text}\n".encode())
        os._exit(failure.exit_code)


@dataclass(frozen=True, slots=True)
class _Waiting:
    what: str
    keys: Mapping[str, int] | None
    """Key in the store -> the rank that must write it; None in a collective."""
    watched: Sequence[int]
    """Ranks that this one must see alive. The others are watched by rank 0, which waits for them."""
    number: int = 0
    """Of the collective."""
    is_done: Callable[[], bool] | None = None
    """Of a collective that a GPU has yet to finish."""
    since: float = field(default_factory=lambda: time.monotonic())

    def is_over(self) -> bool:
        try:
            return self.is_done is not None and self.is_done()
        except RuntimeError:  # the GPU is lost: the main thread meets that too
            return True


def _process(pid: int) -> psutil.Process | None:
    with suppress(psutil.Error):
        return psutil.Process(pid)
    return None


def _lives(process: psutil.Process | None) -> bool:
    """A stopped process lives; a zombie does not."""
    # psutil detects that another process has the pid by when it began since the machine did. `create_time` is no
    # identity: it changes whenever somebody sets the clock.
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False


def pid_space() -> str:
    """What two processes that see each other's pids have in common: a machine since it was started, and on it a
    container. It may be part of a file's name."""
    try:
        seen = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux
        seen = str(uuid.getnode())
    # Names alone are not unique: many machines are called localhost.
    return f"{platform.node()}-{hashlib.sha256(seen.encode()).hexdigest()[:12]}"
