"""How the processes of a run begin and end together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gptlab.runtime.processes.distributed import Group, World


@contextmanager
def join(world: World, exit_code: Callable[[BaseException], int]) -> Iterator[Group]:
    """The group of this process; the context ends when all processes have come to its end.

    An error inside is reported to the others, which end by PeerFailed with its `exit_code`.
    """
    if world.size == 1:
        yield Group(world)
        return
    from gptlab.runtime.processes.torch_group import join_others

    with join_others(world, exit_code) as group:
        yield group
