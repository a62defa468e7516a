"""The processes that train together: who this one is among them, and how they speak.

torchrun starts one process a device and tells each its rank through the environment. Without it there is one process,
and nothing here opens a socket.

Two ways to speak. Tensors are summed by torch.distributed (gloo on CPUs, NCCL on GPUs). What is said rarely (a folder's
name, "the data is prepared") goes as JSON through torchrun's TCPStore: that needs no time limit, since `liveness` knows
who still lives, and a process that waits there still hears signals. Nothing is ever pickled.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gptlab.config.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gptlab.runtime.processes.liveness import Failure, Liveness

# A torch collective that the watch over the ranks has not ended by then, ends by itself: that watch names who is
# missing, torch does not.
_LAST_RESORT_SECONDS = 60.0
# For all ranks to be there: before, nobody knows whom to watch, and one that died then cannot be missed in another way.
# What torch's TCPStore waits for its host; under torchrun, that ends the others sooner.
_START_SECONDS = 300.0
# How often a waiting process looks into the store: often at first, since most waits are short.
_FIRST_LOOK_SECONDS, _LATER_LOOK_SECONDS = 0.005, 0.1


@dataclass(frozen=True, slots=True)
class World:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Its number on its machine, which is that of its GPU."""
    local_size: int = 1
    """Processes on its machine."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> World:
        """RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them; alone where they are not set. UserError for values
        that make no sense together."""
        given = os.environ if environment is None else environment
        if "WORLD_SIZE" not in given:
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        try:
            rank, size, local_rank = (int(given.get(name, "0")) for name in names[:3])
            local_size = int(given.get(names[3], "1"))
        except ValueError:
            rank, size, local_rank, local_size = -1, 0, 0, 1
        if not 0 <= rank < size or local_rank < 0 or local_size < 1:
            text = ", ".join(f"{name}={given.get(name, '(not set)')}" for name in names)
            raise UserError(f"the environment says {text}: start several processes with torchrun, one without these")
        return cls(rank, size, local_rank, local_size)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder and speaks to the console."""
        return self.rank == 0


class Group:
    """The processes of one run. `Group()` is one process alone: every call is then free and changes nothing."""

    def __init__(self, world: World | None = None, liveness: Liveness | None = None, store: Any = None) -> None:
        self.world = world or World()
        self._liveness = liveness
        self._store = store
        self._said = 0
        """How often something was said through the store: the name of the next place to look."""

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def is_main(self) -> bool:
        return self.world.is_main

    def start_collectives(self, device: torch.device, *, timeout_seconds: float) -> None:
        """Create torch's process group, which can sum tensors of `device` and of the CPU.

        From here on a rank that keeps the others waiting for `timeout_seconds` ends the run. A second call does
        nothing.
        """
        if self._liveness is None:
            return
        import torch.distributed as dist

        if dist.is_initialized():
            return

        if device.type == "cuda":
            import torch

            torch.cuda.set_device(device)
        self._liveness.timeout_seconds = timeout_seconds
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("collectives", self._store),
            rank=self.rank, world_size=self.size, timeout=timedelta(seconds=timeout_seconds + _LAST_RESORT_SECONDS),
        )  # fmt: skip
        if device.type == "cuda":
            # NCCL connects in its first collective, to which all ranks must come (documentation of batch_isend_irecv).
            self.sum(torch.zeros(1, device=device), "start")

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Add up the tensors of all ranks in place, and return the sum: the same bits on every rank."""
        self.sum_later(tensor, what).wait()
        return tensor

    def sum_later(self, tensor: Tensor, what: str) -> Pending:
        """The same without waiting: the sum is in `tensor` after `wait()`. All ranks call it in the same order."""
        if self._liveness is None:
            return Pending(None, what, None)
        import torch.distributed as dist

        try:
            return Pending(dist.all_reduce(tensor, async_op=True), what, self._liveness)
        except RuntimeError as error:
            raise self._liveness.explained(error) from error

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Within the context, any number of `exchange` count as one collective, which all ranks enter. So a rank that
        hangs can be distinguished from those that wait for it."""
        if self._liveness is None:
            yield
            return
        with self._liveness.in_collective(what):
            yield

    def exchange(self, partner: int, *, give: Tensor | None, take: Tensor | None) -> None:
        """Send `give` to the rank `partner` and fill `take` with what it sends, both at once; None: nothing goes that
        way. The partner calls it with the same shapes, the other way round. PeerFailed where a rank is lost."""
        if self._liveness is None or (give is None and take is None):
            return
        import torch.distributed as dist

        messages = [] if give is None else [dist.P2POp(dist.isend, give, partner)]
        messages += [] if take is None else [dist.P2POp(dist.irecv, take, partner)]
        try:
            for work in dist.batch_isend_irecv(messages):
                work.wait()
        except RuntimeError as error:
            raise self._liveness.explained(error) from error

    def all_to_all_later(self, flat: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to send the first `send[0]` numbers of `flat` to rank 0, the next `send[1]` to rank 1, and so on. The
        function that comes back waits, and returns `receive[0]` numbers from rank 0, then those from rank 1, ... All
        ranks call it in the same order."""
        if self._liveness is None:
            return lambda: flat
        import torch.distributed as dist

        received = flat.new_empty(sum(receive))
        try:
            work = dist.all_to_all_single(received, flat, list(receive), list(send), async_op=True)
        except RuntimeError as error:
            raise self._liveness.explained(error) from error
        pending = Pending(work, "updates", self._liveness)

        def wait() -> Tensor:
            pending.wait()
            return received

        return wait

    @contextmanager
    def in_passes(self) -> Iterator[None]:
        """Around what speaks with the other ranks by itself (FSDP2 in forward and backward passes), so that a rank that
        is lost meanwhile ends it by name."""
        if self._liveness is None:
            yield
            return
        with self._liveness.in_collective("weights and gradients"):
            try:
                yield
            except RuntimeError as error:
                # Of gloo the text begins with its source file, NCCL's errors have a type of their own.
                if "gloo" in str(error) or type(error).__name__.startswith("Dist"):
                    raise self._liveness.explained(error) from error
                raise

    def reduce_scatter_later(self, own: Tensor, flat: Tensor, what: str) -> Pending:
        """Begin to add up the `flat` of all ranks, `size` chunks as long as `own`, of which this rank gets the one with
        its number: in `own` after `wait()`. All ranks call it in the same order."""
        if self._liveness is None:
            own.copy_(flat)
            return Pending(None, what, None)
        import torch.distributed as dist

        # Renamed in torch 2.13.
        call = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
        try:
            return Pending(call(own, flat, async_op=True), what, self._liveness)
        except RuntimeError as error:
            raise self._liveness.explained(error) from error

    def all_gather_later(self, flat: Tensor, own: Tensor, what: str) -> Pending:
        """Begin to concatenate the `own` of all ranks, of one length, into `flat`: complete after `wait()`. All
        ranks call it in the same order."""
        if self._liveness is None:
            flat.copy_(own)
            return Pending(None, what, None)
        import torch.distributed as dist

        # Renamed in torch 2.13.
        call = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
        try:
            return Pending(call(flat, own, async_op=True), what, self._liveness)
        except RuntimeError as error:
            raise self._liveness.explained(error) from error

    def all_agree(self, number: int, what: str) -> list[int]:
        """Ranks whose `number` (0 <= number < 2^62) is not that of rank 0: none where all have the same."""
        if self._liveness is None:
            return []
        import torch

        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.rank] = number
        self.sum(numbers, what)
        return [rank for rank, other in enumerate(numbers.tolist()) if other != numbers[0]]

    def broadcast(self, name: str, value: Any = None) -> Any:
        """Rank 0's `value`, JSON data, on every rank. Waits as long as rank 0 lives."""
        if self._liveness is None:
            return value
        return self._say(name, value, [0])[0]

    def gather(self, name: str, value: Any, *, within_seconds: float = math.inf, timed: bool = False) -> list[Any]:
        """Every rank's `value`, JSON data, in order of the ranks, on every rank. Waits as long as all live; UserError
        where that takes more than `within_seconds`. `timed`: a rank that keeps the others waiting for it as long as
        for a collective ends the run."""
        if self._liveness is None:
            return [value]
        return self._say(name, value, list(range(self.size)), within_seconds, timed=timed)

    def barrier(self, name: str) -> None:
        """Come back when all ranks have come here."""
        self.gather(name, None)

    def when_lost(self, action: Callable[[Failure], None]) -> None:
        """`action` runs in another thread before that ends the process, its main thread being deep inside a library."""
        if self._liveness is not None:
            self._liveness.on_lost = action

    def leave(self, error: BaseException, exit_code: int) -> None:
        """Let the other processes know that this one ends by `error`, from any thread: they end alike."""
        if self._liveness is not None:
            self._liveness.tell(error, exit_code)

    def at_step(self, step: int) -> None:
        """Note the step in hand, 1 the first, for messages about a rank that is lost in it."""
        if self._liveness is not None:
            self._liveness.step = step

    def _say(
        self, name: str, value: Any, speakers: list[int], within_seconds: float = math.inf, *, timed: bool = False
    ) -> list[Any]:
        """PeerFailed where the store is gone, with the rank or the launcher that kept it."""
        assert self._liveness is not None
        try:
            return self._say_to(self._liveness, name, value, speakers, within_seconds, timed=timed)
        except RuntimeError as error:
            raise self._liveness.explained(error) from error

    def _say_to(
        self, liveness: Liveness, name: str, value: Any, speakers: list[int], within_seconds: float, *, timed: bool
    ) -> list[Any]:
        place, self._said = self._said, self._said + 1
        if self.rank in speakers:
            self._store.set(f"said/{place}/{self.rank}", json.dumps({"at": name, "value": value}))
        pause, until = _FIRST_LOOK_SECONDS, time.monotonic() + within_seconds
        with liveness.waiting_for(speakers, place, name if timed else ""):
            while not self._store.check([f"said/{place}/{rank}" for rank in speakers]):
                liveness.raise_if_failed()
                if time.monotonic() > until:
                    silent = [rank for rank in speakers if not self._store.check([f"said/{place}/{rank}"])]
                    raise UserError(
                        f"rank {', '.join(map(str, silent))} is not there after {within_seconds:.0f} s: it died as it "
                        "started, or nobody started it"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LATER_LOOK_SECONDS)
        heard = [json.loads(self._store.get(f"said/{place}/{rank}")) for rank in speakers]
        for rank, said in zip(speakers, heard, strict=True):
            if said["at"] != name:
                raise UserError(
                    f"rank {rank} is at {said['at']!r} where rank {self.rank} is at {name!r}: all processes of a run "
                    "must be started by the same command"
                )
        return [said["value"] for said in heard]


class Pending:
    """A sum that is under way."""

    def __init__(self, work: Any, what: str, liveness: Liveness | None) -> None:
        self._work = work
        self._what = what
        self._liveness = liveness

    def wait(self) -> None:
        """Return when the sum is complete (on a GPU: when all work queued from now on runs after it). PeerFailed if a
        rank is lost."""
        if self._liveness is None:
            return
        with self._liveness.in_collective(self._what):
            try:
                self._work.wait()
            except RuntimeError as error:
                raise self._liveness.explained(error) from error


@contextmanager
def join(world: World, exit_code: Callable[[BaseException], int]) -> Iterator[Group]:
    """The group of this process, which ends when all of it have come to the end.

    An error inside is reported to the others, which also end, by PeerFailed, with its `exit_code`.
    """
    if world.size == 1:
        yield Group(world)
        return
    from gptlab.runtime.processes.liveness import Liveness

    hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True) and world.is_main
    store, watched = _stores(world, hosts)
    liveness = Liveness(world.rank, world.size, watched)
    group = Group(world, liveness, store)
    try:
        liveness.start(group.gather("start", liveness.who_am_i(), within_seconds=_START_SECONDS))
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
        _end_collectives()
    finally:
        liveness.close()
        if hosts:
            liveness.outlast()


def _stores(world: World, hosts: bool) -> tuple[Any, Any]:
    """Two connections to the store: one that waits must not hold up the other, which tells that this process lives.
    Under torchrun it is torchrun's; else rank 0 `hosts` it."""
    import torch.distributed as dist

    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise UserError("MASTER_ADDR and MASTER_PORT are not set: start several processes with torchrun") from None
    try:
        first = dist.TCPStore(host, port, world.size, hosts, wait_for_workers=False, multi_tenant=True)
        second = dist.TCPStore(host, port, world.size, False, wait_for_workers=False)
    except RuntimeError as error:
        raise UserError(f"rank {world.rank} cannot reach the store of the run at {host}:{port} ({error})") from error
    # What an attempt before a restart said, or an earlier run of the same processes, must not be heard again.
    attempt = f"gptlab/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{world.size}"
    attempt += f"/{first.add(f'{attempt}/joined/{world.rank}', 1)}"
    return dist.PrefixStore(attempt, first), dist.PrefixStore(attempt, second)


def _end_collectives() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
