"""A command that several processes carry out together: rank 0 speaks, and all end alike."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from gptlab.config.errors import UserError
from gptlab.runtime.processes.distributed import Group, World, join
from gptlab.runtime.processes.liveness import PeerFailed
from gptlab.runtime.records.console import Console, QuietConsole


@contextmanager
def together() -> Iterator[tuple[Group, Console]]:
    """The processes that torchrun started for a command that writes no run (without it: this one), and a console, on
    stderr, for what is no result. SystemExit, with the exit code of the run, where another process has failed."""
    world = World.from_environment()
    try:
        with (
            Console(stream=sys.stderr) if world.is_main else QuietConsole() as console,
            join(world, exit_code) as group,
        ):
            yield group, console
    except PeerFailed as failed:
        raise SystemExit(tell_peer_failed(failed)) from None


def tell_peer_failed(failed: PeerFailed) -> int:
    """What failed elsewhere, on stderr, unless it has said so itself; returns the exit code."""
    if not failed.failure.said_by_itself:
        print(f"gptlab: error: rank {World.from_environment().rank}: {failed}", file=sys.stderr)
    return failed.failure.exit_code


def exit_code(error: BaseException, *, interrupted: int = 130) -> int:
    """What an error makes of this process, for the others to end alike."""
    if isinstance(error, UserError):
        return 2
    return interrupted if isinstance(error, KeyboardInterrupt) else 1
