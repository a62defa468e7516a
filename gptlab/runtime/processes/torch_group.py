"""Several processes of one run: how they communicate, begin and end together, and are restarted by torchrun.

Tensors go through torch.distributed (gloo on CPUs, NCCL on GPUs). Rare messages (a folder's name, "the data is
prepared") go as JSON through torchrun's TCPStore: that needs no time limit, since `liveness` knows who still lives, and
a process that waits there still receives signals. Nothing is ever pickled.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from gptlab.config.errors import UserError
from gptlab.runtime.processes.distributed import Ended, Group, Job, World
from gptlab.runtime.processes.liveness import Liveness

if TYPE_CHECKING:
    from torch import Tensor

    from gptlab.runtime.processes.liveness import Failure

_LAST_RESORT_SECONDS = 60.0
# For all ranks to start: before, nobody knows whom to watch. torch's TCPStore waits as long for its host; under
# torchrun, a rank that dies while it starts ends the others sooner.
_START_SECONDS = 300.0
# How often a waiting process looks into the store: often at first, since most waits are short.
_FIRST_LOOK_SECONDS, _LATER_LOOK_SECONDS = 0.005, 0.1
_JOB = "gptlab job"
# A Python program may train several runs in sequence: the n-th after a restart is the n-th before it.
_RUNS = itertools.count(1)


class TorchGroup(Group):
    was_left: ClassVar[bool] = False
    """Whether an error ended the last group of this process, whose collectives the next one then has."""

    def __init__(self, world: World, liveness: Liveness, store: Any) -> None:
        super().__init__(world)
        self._liveness = liveness
        self._store = store
        self._messages = 0
        """Sent through the store so far: the key of the next one."""
        self._admit: Callable[[], None] = lambda: None
        """Called between looks into the store."""
        self._mark: Callable[[], Callable[[], bool]] | None = None
        """Where waiting for a collective does not wait for its result (NCCL): marks the point in the GPU's queue, and
        returns whether the GPU has come there."""

    def start(self, admit: Callable[[], None]) -> None:
        """Wait for all ranks and watch them from then on. `admit` is called again and again until all are there."""
        self._admit = admit
        self._liveness.start(self.gather("start", self._liveness.who_am_i(), within_seconds=_START_SECONDS))
        self._admit = lambda: None

    def start_collectives(self, device: torch.device, *, timeout_seconds: float) -> None:
        if dist.is_initialized():
            return
        self._liveness.timeout_seconds = timeout_seconds
        on_cuda = device.type == "cuda"
        with self._liveness.in_collective("start"), self._explained():
            # With a `device_id`, NCCL connects here and not in the first collective, which all ranks would have to join
            # (documentation of batch_isend_irecv).
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_cuda else "gloo", device_id=device if on_cuda else None,
                store=dist.PrefixStore("collectives", self._store),
                rank=self.rank, world_size=self.size, timeout=last_resort(timeout_seconds),
            )  # fmt: skip
        self._mark = _mark_queue if on_cuda else None

    def sum_later(self, tensor: Tensor, what: str) -> Callable[[], None]:
        return self._begun(partial(dist.all_reduce, tensor, async_op=True), what)

    def reduce_scatter_later(self, own: Tensor, flat: Tensor, what: str) -> Callable[[], None]:
        # Renamed in torch 2.13.
        call = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
        return self._begun(partial(call, own, flat, async_op=True), what)

    def all_gather_later(self, flat: Tensor, own: Tensor, what: str) -> Callable[[], None]:
        # Renamed in torch 2.13.
        call = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
        return self._begun(partial(call, flat, own, async_op=True), what)

    def all_to_all_later(self, flat: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        received = flat.new_empty(sum(receive))
        begin = partial(dist.all_to_all_single, received, flat, list(receive), list(send), async_op=True)
        pending = self._begun(begin, "updates")

        def wait() -> Tensor:
            pending()
            return received

        return wait

    def exchange(self, partner: int, *, give: Tensor | None, take: Tensor | None) -> None:
        messages = [] if give is None else [dist.P2POp(dist.isend, give, partner)]
        messages += [] if take is None else [dist.P2POp(dist.irecv, take, partner)]
        with self._explained():
            for work in dist.batch_isend_irecv(messages) if messages else ():
                work.wait()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        number = self._liveness.joins_collective()
        with self._liveness.in_collective(what, number):
            yield
        self._watch_queue(what, number)

    @contextmanager
    def in_passes(self) -> Iterator[None]:
        with self.together("weights and gradients"):
            try:
                yield
            except RuntimeError as error:
                # gloo's messages begin with its source file; NCCL's errors have a type of their own.
                if "gloo" in str(error) or type(error).__name__.startswith("Dist"):
                    raise self._liveness.explained(error) from error
                raise

    def all_agree(self, number: int, what: str, *, every: int = 1) -> list[int]:
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.rank] = number
        self.sum(numbers, what)
        return [rank for rank, other in enumerate(numbers.tolist()) if other != numbers[rank % every]]

    def broadcast(self, name: str, value: Any = None) -> Any:
        place = self._next_place(name, value, says=self.is_main)
        return self._said(place, name, [0], math.inf, "")[0]

    def gather(self, name: str, value: Any, *, within_seconds: float = math.inf, timed: bool = False) -> list[Any]:
        # Through rank 0: if each rank read the values of all, the store would be asked for the square of their number.
        place = self._next_place(name, value, says=True)
        collected = f"all/{place}"
        until, timed_what = time.monotonic() + within_seconds, name if timed else ""
        # Where rank 0 is somewhere else, it collects nothing.
        values = self._said(place, name, range(self.size) if self.is_main else [0], until, timed_what)
        writers = {f"said/{place}/{rank}": rank for rank in range(self.size)} | {collected: 0}
        with self._explained():
            if self.is_main:
                self._store.set(collected, json.dumps(values))
                return values
            self._wait_for([collected], writers, until, timed_what)
            return list(json.loads(self._store.get(collected)))

    def when_lost(self, action: Callable[[Failure], None]) -> None:
        self._liveness.on_lost = action

    def leave(self, error: BaseException, exit_code: int) -> None:
        self._liveness.tell(error, exit_code)

    def at_step(self, step: int) -> None:
        self._liveness.step = step

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns torch's errors within the context into PeerFailed, with the rank or the launcher that was lost."""
        try:
            yield
        except RuntimeError as error:
            raise self._liveness.explained(error) from error

    def _begun(self, begin: Callable[[], Any], what: str) -> Callable[[], None]:
        number = self._liveness.joins_collective()
        with self._explained():
            return partial(self._wait, begin(), what, number)

    def _wait(self, work: Any, what: str, number: int) -> None:
        with self._liveness.in_collective(what, number), self._explained():
            work.wait()
        self._watch_queue(what, number)

    def _watch_queue(self, what: str, number: int) -> None:
        """Have the result of a collective waited for in the other thread, wherever this one will read it."""
        if self._mark is not None:
            self._liveness.until(self._mark(), what, number)

    def _next_place(self, name: str, value: Any, *, says: bool) -> int:
        """In the order of messages, the same on all ranks; this one `says` its value there."""
        place, self._messages = self._messages, self._messages + 1
        if says:
            with self._explained():
                self._store.set(f"said/{place}/{self.rank}", json.dumps({"at": name, "value": value}))
        return place

    def _said(self, place: int, name: str, senders: Sequence[int], until: float, timed_what: str) -> list[Any]:
        """The values of `senders`, once all are there. UserError where one of them is somewhere else."""
        keys = {f"said/{place}/{rank}": rank for rank in senders}
        with self._explained():
            self._wait_for(list(keys), keys, until, timed_what)
            messages = [json.loads(text) for text in self._store.multi_get(list(keys))]
        for rank, message in zip(senders, messages, strict=True):
            if message["at"] != name:
                raise UserError(
                    f"rank {rank} is at {message['at']!r} where rank {self.rank} is at {name!r}: all processes of a "
                    "run must be started by the same command"
                )
        return [message["value"] for message in messages]

    def _wait_for(self, keys: list[str], writers: Mapping[str, int], until: float, timed_what: str) -> None:
        """Until `keys` are in the store. `writers`: these, and others without which they will not come; by rank."""
        watched = range(self.size) if self.is_main else [0]
        with self._liveness.waiting_for(writers, timed_what, watched=watched):
            _look_for(self._store, keys, writers, until, self._between_looks)

    def _between_looks(self) -> None:
        self._liveness.raise_if_failed()
        self._admit()


def last_resort(timeout_seconds: float) -> timedelta:
    """A collective that `liveness` has not ended by then is ended by torch, which does not say who is missing."""
    return timedelta(seconds=timeout_seconds + _LAST_RESORT_SECONDS)


def _look_for(
    store: Any, keys: list[str], writers: Mapping[str, int], until: float, between_looks: Callable[[], None]
) -> None:
    """Return when `keys` are in the store; UserError after `until`."""
    pause, since = _FIRST_LOOK_SECONDS, time.monotonic()
    while not store.check(keys):
        between_looks()
        if time.monotonic() > until:
            silent = [str(rank) for key, rank in writers.items() if not store.check([key])]
            raise UserError(
                f"rank {', '.join(dict.fromkeys(silent))} is not there after {time.monotonic() - since:.0f} s: "
                "it died as it started, or nobody started it"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LATER_LOOK_SECONDS)


def _mark_queue() -> Callable[[], bool]:
    """A point in the current GPU's queue; whether the GPU has come there."""
    event = torch.cuda.Event()
    event.record()
    query: Callable[[], bool] = event.query
    return query


@contextmanager
def join_others(world: World, exit_code: Callable[[BaseException], int]) -> Iterator[Group]:
    """The group of this process, one of several; the context ends when all have come to its end. An error inside is
    reported to the others, which end by PeerFailed with its `exit_code`. UserError in a process group of somebody
    else's, or in that of a run which has not ended."""
    if dist.is_initialized() and not TorchGroup.was_left:
        raise UserError(
            "this process is in a process group already: of several processes, no run trains another from on_step or "
            "on_eval, and a group of your own has to end before (torch.distributed.destroy_process_group())"
        )
    hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True) and world.is_main
    store, watched, admit = _stores(world, hosts)
    liveness = Liveness(world.rank, world.size, watched)
    group = TorchGroup(world, liveness, store)
    try:
        group.start(admit)
        yield group
        with suppress(RuntimeError):  # the store is gone, and torchrun with it: there is nobody to wait with
            group.barrier("end")
    except KeyboardInterrupt as error:
        # torchrun signals the others when one has died: then that is what happened here.
        liveness.raise_if_lost_just_now(error)
        liveness.tell(error, exit_code(error))
        raise
    except BaseException as error:
        liveness.tell(error, exit_code(error))
        raise
    else:
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        TorchGroup.was_left = dist.is_initialized()
        liveness.close()
        if hosts:
            liveness.outlast()


def _stores(world: World, hosts: bool) -> tuple[Any, Any, Callable[[], None]]:
    """Two connections to the store: one that waits must not hold up the other, which reports that this process lives.
    Under torchrun it is torchrun's; otherwise rank 0 `hosts` it. And what rank 0 calls until all ranks are there."""
    host, given = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    port = int(given) if given.isdecimal() else 0
    if not host or not 0 < port < 2**16:
        raise UserError(
            f"the environment says MASTER_ADDR={host or '(not set)'}, MASTER_PORT={given or '(not set)'}: start "
            "several processes with torchrun, or set rank 0's machine and a port that is free there (1 to 65535)"
        )
    try:
        first = dist.TCPStore(host, port, world.size, hosts, wait_for_workers=False, multi_tenant=True)
        second = dist.TCPStore(host, port, world.size, False, wait_for_workers=False)
        name, admit = _attempt(world, first)
    except RuntimeError as error:
        raise UserError(f"rank {world.rank} cannot reach the store of the run at {host}:{port} ({error})") from error
    # Messages from before a restart, or of an earlier run of the same processes, must not be read again.
    return dist.PrefixStore(name, first), dist.PrefixStore(name, second), admit


def _attempt(world: World, store: Any) -> tuple[str, Callable[[], None]]:
    """The name of this attempt, which no other has, and what rank 0 calls to give it to the other ranks.

    Nothing in the environment names it: the torchrun of each machine has its own restart count. So rank 0 chooses a
    name, and answers every process that asks for it. A request left by a dead process is answered too, and nobody reads
    that; the process that replaces it asks by another word.
    """
    own = f"gptlab/{uuid.uuid4().hex}"
    if not world.is_main:
        answer = f"{own}/attempt"
        store.set(f"gptlab/asks/{world.rank}", own)
        _look_for(store, [answer], {answer: 0}, time.monotonic() + _START_SECONDS, lambda: None)
        return store.get(answer).decode(), lambda: None
    asking = [f"gptlab/asks/{rank}" for rank in range(1, world.size)]
    for key in asking:
        store.compare_set(key, "", "gptlab/nobody")  # since `multi_get` waits for a key that is not there
    answered: set[bytes] = set()

    def admit() -> None:
        for other in set(store.multi_get(asking)) - answered:
            store.set(f"{other.decode()}/attempt", own)
            answered.add(other)

    return own, admit


class TorchrunJob(Job):
    """With --max-restarts torchrun starts the same command again after a process was lost. Nothing is left of the
    processes then but the store in torchrun's own process, which no other job ever had. So whatever it holds, this very
    job has written, and the folder that it names may be resumed.

    A store that does not answer is not an error: torchrun is gone, and will not restart anything.
    """

    def __init__(self, store: Any, *, run: str = "", node: str = "0", attempt: int = 0) -> None:
        """`store`: torchrun's. `run`: which of the runs that this program makes in sequence. `node`: whose torchrun
        started this process. `attempt`: how many failures that torchrun has counted; each counts for itself."""
        self._store = store
        self._run = run
        self._ended = f"ended/{node}"
        self._attempt = attempt
        self.id = store.compare_set(_JOB, "", uuid.uuid4().hex).decode()

    def folder(self) -> Path | None:
        said = self._get("folder")
        return None if said is None else Path(said)

    def will_begin(self, folder: Path) -> None:
        self._set("folder", str(folder.absolute()))

    def ended(self) -> Ended | None:
        said = self._get(self._ended)
        if said is not None and said["attempt"] < self._attempt:
            return Ended(said["exit_code"], said["text"])
        # Restarts for machines that join are not counted: torchrun's SIGTERM did not mean to end the run.
        self._set(self._ended, None)
        return None

    def ends(self, exit_code: int, text: str) -> None:
        said = json.dumps({"attempt": self._attempt, "exit_code": exit_code, "text": text})
        with suppress(RuntimeError):
            for nothing in ("", json.dumps(None)):
                self._store.compare_set(self._key(self._ended), nothing, said)

    def _get(self, name: str) -> Any:
        with suppress(RuntimeError):
            if self._store.check([self._key(name)]):
                return json.loads(self._store.get(self._key(name)))
        return None

    def _set(self, name: str, value: object) -> None:
        with suppress(RuntimeError):
            self._store.set(self._key(name), json.dumps(value))

    def _key(self, name: str) -> str:
        return f"{_JOB}/{self._run}/{name}"


def torchrun_job(environment: Mapping[str, str] = os.environ) -> Job:
    """The memory of the torchrun job that this process belongs to."""
    # Where torchrun does not lend its store, rank 0 has one, which ends with it.
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return Job()
    try:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = dist.TCPStore(host, port, None, False, wait_for_workers=False)
        run = next(_RUNS)
        node, count = environment.get("GROUP_RANK", "0"), environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return TorchrunJob(store, run=str(run), node=node, attempt=int(count))
    except (RuntimeError, KeyError, ValueError):
        return Job()
