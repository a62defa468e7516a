"""Commands of gptlab in processes of their own, which are forked from one that has found out what runs find out once.
They may be killed at a moment, or kill themselves (failpoints.py).

That one process reads a line of JSON for each command, and answers with one that says how it ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from forked import Forked

LIMIT_SECONDS = 120.0
"""For one command; who takes longer hangs."""
LAUNCHER_SECONDS = 6.0
"""From a death until the rest gets SIGTERM, as from torchrun, though that waits for a tenth of a second only: by then
the rest should have ended by itself."""


@dataclass(frozen=True)
class Ended:
    codes: list[int]
    """Exit code of each rank, or minus the number of the signal that killed it."""
    output: str
    """What the ranks printed."""
    seconds: float

    @property
    def was_killed(self) -> bool:
        return -signal.SIGKILL in self.codes


class ForkedRuns:
    """To be used as a context manager; `folder` is where output and ports are kept, and what is printed."""

    def __init__(self, folder: Path) -> None:
        """`folder`: with a corpus in it (tiny_runs.write_corpus)."""
        self._folder = folder
        read, write = os.pipe()

        def work() -> None:
            os.close(write)
            with os.fdopen(read, encoding="utf-8") as requests:
                _serve(folder, requests)

        self._process = Forked(work, err=2, GLOO_SOCKET_IFNAME="lo")
        os.close(read)
        self._requests = os.fdopen(write, "w", encoding="utf-8")

    def run(
        self,
        argv: Sequence[object],
        *,
        ranks: int = 1,
        within: Mapping[str, Mapping[str, Any]] | None = None,
        kill: Mapping[int, float] | None = None,
        all_die: bool = False,
    ) -> Ended:
        """`gptlab ARGV` on so many ranks.

        Args:
            within: context managers around the command, {dotted name: keyword arguments}; each also gets `rank`.
            kill: {rank: seconds from the start after which it is killed}.
            all_die: as soon as one was killed, all are.
        """
        request = {
            "argv": [str(word) for word in argv], "ranks": ranks, "within": dict(within or {}),
            "kill": {str(rank): seconds for rank, seconds in (kill or {}).items()}, "all_die": all_die,
        }  # fmt: skip
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that starts the others has died"
        return Ended(**json.loads(answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.close()
        self._process.communicate()


def _answer(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from distributed_scenes import free_ports

    (port,) = free_ports(1)
    started = time.monotonic()
    outputs = [folder / f"output-{rank}.txt" for rank in range(request["ranks"])]
    living: dict[int, int] = {}
    for rank, output in enumerate(outputs):
        if (pid := os.fork()) == 0:
            _play(request, rank, port, output)
        living[pid] = rank
    codes = _wait(living, request, started)
    text = "".join(output.read_text(encoding="utf-8", errors="replace") for output in outputs)
    return {"codes": codes, "output": text, "seconds": time.monotonic() - started}


def _wait(living: dict[int, int], request: Mapping[str, Any], started: float) -> list[int]:
    codes: dict[int, int] = {}
    due = {int(rank): seconds for rank, seconds in request["kill"].items()}
    sigterm_at = math.inf
    while living:
        pid, status = os.waitpid(-1, os.WNOHANG)
        seconds = time.monotonic() - started
        if pid:
            codes[living.pop(pid)] = os.waitstatus_to_exitcode(status)
            sigterm_at = min(sigterm_at, seconds + LAUNCHER_SECONDS)
        if seconds >= sigterm_at:
            sigterm_at = math.inf
            for pid in living:
                os.kill(pid, signal.SIGTERM)
        all_die = (request["all_die"] and -signal.SIGKILL in codes.values()) or seconds > LIMIT_SECONDS
        for pid, rank in living.items():
            if all_die or seconds >= due.get(rank, LIMIT_SECONDS):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[rank] for rank in sorted(codes)]


def _play(request: Mapping[str, Any], rank: int, port: int, output: Path) -> None:
    """One rank, in a process of its own: does not come back."""
    code = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        if request["ranks"] > 1:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"], "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
        with contextlib.ExitStack() as stack:
            for name, arguments in request["within"].items():
                stack.enter_context(pkgutil.resolve_name(name)(**arguments, rank=rank))
            code = _main(request["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _main(argv: list[str]) -> int:
    from gptlab.cli.main import main

    return main(argv)


def _serve(folder: Path, requests: TextIO) -> None:
    from distributed_scenes import freeze_libraries
    from tiny_runs import arguments, command

    from gptlab.training.checkpoint import background

    # On a busy machine a line more in the log, and so an operation more to be killed at.
    background._NOTICEABLE_SECONDS = math.inf
    # What is found out once, and what takes most of a start: the machine's speed, git's and pip's answers.
    code, out, err = command(["train", *arguments(folder, "warm-up", {"steps": 1, "model.n_layer": 1})])
    assert code == 0, out + err
    freeze_libraries()
    for line in requests:
        print(json.dumps(_answer(json.loads(line), folder)), flush=True)
