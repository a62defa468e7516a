"""What several processes of one command do together: start alike, mean the same run, compute it alike, end alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from gptlab.config.errors import EXIT_INTERRUPTED, EXIT_USAGE, UserError
from gptlab.config.load import config_to_json
from gptlab.config.run import ParallelConfig, RunConfig
from gptlab.runtime.processes.distributed import Group, World, apart
from gptlab.runtime.processes.liveness import PeerFailed
from gptlab.runtime.records.console import Console, QuietConsole

if TYPE_CHECKING:
    from gptlab.runtime.hardware.place import Place

_FACTS = {
    "code_fingerprint": "gptlab code",
    "data_fingerprint": "training data",
    "tokenizer_fingerprint": "tokenizer",
    "init_from_fingerprint": "initial weights",
    "torch_version": "torch version",
    "dtype": "dtype",
}
"""What must be equal on all ranks, by its key in run.json."""


def join(world: World, exit_code: Callable[[BaseException], int]) -> AbstractContextManager[Group]:
    """The group of this process; the context ends when all processes have come to its end.

    An error inside is reported to the others, which end by PeerFailed with its `exit_code`.
    """
    if world.size == 1:
        return nullcontext(Group(world))
    from gptlab.runtime.processes.torch_group import join_others

    return join_others(world, exit_code)


@contextmanager
def together() -> Iterator[tuple[Group, Console]]:
    """The processes that torchrun started for a command that writes no run (without torchrun: this one), and a console
    on stderr for everything that is not a result.

    Raises SystemExit, with the exit code of the failed process, where another process fails.
    """
    world = World.from_environment()
    try:
        with (
            Console(stream=sys.stderr) if world.is_main else QuietConsole() as console,
            join(world, exit_code) as group,
        ):
            if (warning := apart()) is not None:
                console.warn(warning)
            yield group, console
    except PeerFailed as failed:
        raise SystemExit(report_peer_failure(failed)) from None


def report_peer_failure(failed: PeerFailed) -> int:
    """Print the failure of another rank on stderr, unless it was printed already; return the exit code."""
    if not failed.is_reported:
        print(f"gptlab: error: rank {World.from_environment().rank}: {failed}", file=sys.stderr)
    return failed.failure.exit_code


def exit_code(error: BaseException, *, interrupted: int = EXIT_INTERRUPTED) -> int:
    """The exit code that an error stands for; the other processes end with the same one."""
    if isinstance(error, UserError):
        return EXIT_USAGE
    return interrupted if isinstance(error, KeyboardInterrupt) else 1


@contextmanager
def rank_0_first(group: Group) -> Iterator[None]:
    """Rank 0 prepares data in the context first, then the others, which find it in the cache."""
    if not group.is_main:
        group.barrier("data prepared")
    yield
    if group.is_main:
        group.barrier("data prepared")


@contextmanager
def rank_0_reports(group: Group, what: str) -> Iterator[None]:
    """A UserError in the context, which all ranks find alike, is reported by rank 0 alone: the others end with it."""
    try:
        yield
    except UserError:
        if not group.is_main:
            group.barrier(what)  # rank 0 never comes: it reports the error
        raise


def agreed_place(place: Place, parallel: ParallelConfig, group: Group) -> Place:
    """`place`, on a CPU with rank 0's dtype: each rank has timed its own, and two alike may differ by chance.

    UserError on rank 0 where another rank shares the work in another way, and where so many ranks cannot share it so;
    the other ranks end with rank 0. To be called before the ranks first wait for each other in that way."""
    import torch

    mine = {"parallel": asdict(parallel), "dtype": place.dtype_name}
    everybody = group.gather("place", mine)
    ways = [theirs["parallel"] for theirs in everybody]
    other = next((rank for rank, theirs in enumerate(ways) if theirs != ways[0]), None)
    if other is None:
        with rank_0_reports(group, "parallel"):
            parallel.ranks_per_copy(group.size)
        dtype = getattr(torch, everybody[0]["dtype"])
        return replace(place, dtype=dtype) if place.device.type == "cpu" else place
    difference = _first_difference(ways[0], ways[other], "parallel")
    with rank_0_reports(group, "parallel"):
        raise UserError(f"rank {other}'s configuration differs from rank 0's ({difference}): {_START_ALIKE}")


def require_same_run(config: RunConfig, facts: Mapping[str, object], group: Group) -> None:
    """UserError on rank 0 where another rank's configuration, code or data differs: one line that names the rank and
    the first difference. The other ranks end with rank 0."""
    mine = {"config": config_to_json(config), **{name: facts.get(name) for name in _FACTS}}
    everybody = group.gather("what is trained", mine)
    if group.is_main:
        for rank, theirs in enumerate(everybody):
            if theirs != mine:
                raise UserError(f"rank {rank}'s {_difference(mine, theirs)}: {_START_ALIKE}")


def require_same_implementations(ours: Mapping[str, str], place: Place, group: Group) -> None:
    """UserError on rank 0 where another rank computes a part of the run by another implementation: the ranks' weights
    would soon differ. The other ranks end with rank 0. `ours`: {part: what computes it} on this rank."""
    from gptlab.model.kernels import ops

    missing = ops.missing_kernels(place.device, place.dtype)
    everybody = group.gather("implementations", {"found": dict(ours), "missing": missing})
    for rank, theirs in enumerate(everybody if group.is_main else []):
        found = theirs["found"]
        if found != ours:
            parts = [name for name in {**ours, **found} if found.get(name) != ours.get(name)]
            what = "; ".join(f"{name}: {found.get(name)}, not {ours.get(name)}" for name in parts)
            raise UserError(
                f"rank {rank}'s implementations differ from rank 0's ({theirs['missing'] or what}): give all of them "
                "the same C++ compiler, kind of processor and torch, and a writable cache ($GPTLAB_CACHE)"
            )


_START_ALIKE = "start all of them alike"


def _difference(mine: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    for name, what in _FACTS.items():
        if theirs[name] != mine[name]:
            return f"{what} differs from rank 0's ({str(theirs[name])[:16]}, not {str(mine[name])[:16]})"
    return f"configuration differs from rank 0's ({_first_difference(mine['config'], theirs['config'], '')})"


def _first_difference(mine: object, theirs: object, name: str) -> str:
    """The first field that differs, as `optim.muon.lr = 0.01, not 0.02`."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in (*mine, *(key for key in theirs if key not in mine)):
            if mine.get(key) != theirs.get(key):
                return _first_difference(mine.get(key), theirs.get(key), f"{name}.{key}" if name else key)
    return f"{name} = {theirs!r}, not {mine!r}"
