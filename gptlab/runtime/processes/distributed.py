"""The processes that train together: which one this is, and how they communicate.

torchrun starts one process per device and gives each its rank through the environment. Without it there is one process,
for which `Group` and `Job` have nothing to do, and open no socket. torch_group.py implements the same for several.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.config.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gptlab.runtime.processes.liveness import Failure


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
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them; one process if WORLD_SIZE is not set, or empty.
        UserError for values that make no sense together, and where one of several processes lacks its numbers."""
        return cls._of_torchrun(environment) if environment.get("WORLD_SIZE") else cls()

    @classmethod
    def _of_torchrun(cls, given: Mapping[str, str]) -> World:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        alone = {"RANK": "0", "LOCAL_RANK": "0"} if given["WORLD_SIZE"] == "1" else {}
        known = {"LOCAL_WORLD_SIZE": "1", **alone, **{name: value for name, value in given.items() if value}}
        try:
            rank, size, local_rank, local_size = (int(known[name]) for name in names)
        except (KeyError, ValueError):
            rank, size, local_rank, local_size = -1, 0, 0, 1
        if not 0 <= rank < size or local_rank < 0 or local_size < 1:
            text = ", ".join(f"{name}={known.get(name, '(not set)')}" for name in names)
            raise UserError(f"the environment says {text}: start several processes with torchrun, one without these")
        return cls(rank, size, local_rank, local_size)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder and the console."""
        return self.rank == 0


ALONE = World()
"""One process."""

TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables in which srun and mpirun (Open MPI; MPICH and Intel's) say how many processes they have started."""


def apart(environment: Mapping[str, str] = os.environ) -> str | None:
    """What to warn of where srun or mpirun has started several processes, and nothing tells each which one it is. Not
    where a person types: all that is started in a shell that srun started has its variables."""
    if sys.stdin is not None and sys.stdin.isatty():
        return None
    for name in TASK_COUNTS:
        count = environment.get(name, "")
        if count not in ("", "1") and not environment.get("WORLD_SIZE"):
            return (
                f"{count} processes were started ({name}), and each works on its own: for one run of all, start "
                "torchrun once on each machine (docs/cluster.md)"
            )
    return None


class Group:
    """The processes of one run, this one alone: every call is free and changes nothing.

    The docstrings say what `TorchGroup` does for several. All ranks make the same calls in the same order. The
    function that a method `..._later` returns waits for the result (on a GPU: work queued from then on comes after it);
    PeerFailed if a rank is lost.
    """

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.rank, self.size, self.is_main = self.world.rank, self.world.size, self.world.is_main

    def start_collectives(self, device: torch.device, *, timeout_seconds: float) -> None:
        """Create torch's process group, which collectives on `device` and on the CPU need.

        From here on a rank that keeps the others waiting for `timeout_seconds` ends the run. A second call does
        nothing.
        """

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """All-reduce in place, and return the sum: the same bits on every rank. `what`: for messages."""
        self.sum_later(tensor, what)()
        return tensor

    def sum_later(self, tensor: Tensor, what: str) -> Callable[[], None]:
        """The same without waiting: the sum is in `tensor` once the returned function has waited."""
        return lambda: None

    def reduce_scatter_later(self, own: Tensor, flat: Tensor, what: str) -> Callable[[], None]:
        """Sum the `flat` of all ranks, `size` chunks as long as `own`; once the returned function has waited, `own`
        is the chunk of this rank."""
        own.copy_(flat)
        return lambda: None

    def all_gather_later(self, flat: Tensor, own: Tensor, what: str) -> Callable[[], None]:
        """Concatenate the `own` of all ranks, of one length: in `flat` once the returned function has waited."""
        flat.copy_(own)
        return lambda: None

    def all_to_all_later(self, flat: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        """Send the first `send[0]` numbers of `flat` to rank 0, the next `send[1]` to rank 1, and so on. The returned
        function waits, and returns `receive[0]` numbers from rank 0, then those from rank 1, and so on."""
        return lambda: flat

    def exchange(self, partner: int, *, give: Tensor | None, take: Tensor | None) -> None:
        """Send `give` to the rank `partner` and fill `take` with what it sends, at the same time; None: nothing in that
        direction. The partner calls it with the same shapes, the other way round. PeerFailed if a rank is lost."""

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Within the context any number of `exchange` count as one collective of all ranks, so that a rank that hangs
        is distinguished from those that wait for it in their turn."""
        yield

    @contextmanager
    def in_passes(self) -> Iterator[None]:
        """Around code that communicates by itself (FSDP2 in forward and backward passes), so that a rank lost meanwhile
        ends it by name."""
        yield

    def all_agree(self, number: int, what: str, *, every: int = 1) -> list[int]:
        """Ranks r whose `number` (0 <= number < 2^62) differs from that of rank r % every, by default rank 0's."""
        return []

    def broadcast(self, name: str, value: Any = None) -> Any:
        """Rank 0's `value`, JSON data, on every rank. Waits as long as rank 0 lives."""
        return value

    def gather(self, name: str, value: Any, *, within_seconds: float = math.inf, timed: bool = False) -> list[Any]:
        """Every rank's `value`, JSON data, in order of the ranks, on every rank. Waits as long as all live; UserError
        after `within_seconds`. `timed`: a rank that keeps the others waiting as long as in a collective ends the
        run."""
        return [value]

    def barrier(self, name: str) -> None:
        """Return when all ranks have called it."""
        self.gather(name, None)

    def when_lost(self, action: Callable[[Failure], None]) -> None:
        """If a rank is lost while the main thread is deep in a library, another thread ends the process; `action` runs
        there before."""

    def leave(self, error: BaseException, exit_code: int) -> None:
        """Tell the other processes, from any thread, that this one ends by `error`: they end with the same code."""

    def at_step(self, step: int) -> None:
        """Note the current step, from 1, for messages about a rank that is lost in it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An end that a retry would reach again: a signal asked for it, the input is wrong, the loss broke."""

    exit_code: int
    text: str


class Job:
    """What one attempt of a torchrun job leaves for the next, the same for all ranks: the run folder that it began or
    resumed, and how the run ended. Without torchrun: nothing."""

    id: str | None = None
    """A random word of this job; None if nothing is remembered."""

    def folder(self) -> Path | None:
        """The folder given to `will_begin`, in this attempt or an earlier one."""

    def will_begin(self, folder: Path) -> None:
        """Called before the folder of a new run is made, so that no kill comes between the two: the `id` in the folder
        proves that this job made it. For a run that is resumed, called when that is recorded in its folder."""

    def ended(self) -> Ended | None:
        """What `ends` recorded on this machine in an attempt that its torchrun counts as failed. None on all ranks if
        the run is to continue."""

    def ends(self, exit_code: int, text: str) -> None:
        """Record that the run is not to be retried. The first rank to record it is the one that knows why."""
