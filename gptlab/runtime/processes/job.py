"""What one attempt of a torchrun job leaves for the next: the run folder that it began, and how the run ended.

With --max-restarts torchrun starts the same command again after a process was lost. Nothing is left of the processes
then but the store in torchrun's own process, which no other job ever had. So whatever it holds, this very job has
written, and the folder that it names may be resumed.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEY = "gptlab job"


@dataclass(frozen=True, slots=True)
class Ended:
    """An end that a retry would reach again: a signal asked for it, the input is wrong, the loss broke."""

    exit_code: int
    text: str


class Job:
    """What is remembered of one run, the same for all ranks. Without torchrun: nothing."""

    id: str | None = None
    """A random word of this job; None if nothing is remembered."""

    def folder(self) -> Path | None:
        """The folder given to `will_begin`, in this attempt or an earlier one."""

    def will_begin(self, folder: Path) -> None:
        """Called before the folder of a new run is made, so that no kill comes between the two. The `id` in the folder
        proves that this job made it."""

    def ended(self) -> Ended | None:
        """What `ends` recorded in an attempt that torchrun counts as failed; None if the run is to continue."""

    def ends(self, exit_code: int, text: str) -> None:
        """Record that the run is not to be retried. The first rank to record it is the one that knows why."""


class TorchrunJob(Job):
    """A store that does not answer is not an error: torchrun is gone, and will not restart anything."""

    def __init__(self, store: Any, *, run: str = "", attempt: int = 0) -> None:
        """`store`: torchrun's. `run`: which of the runs that this program makes in sequence. `attempt`: from 0."""
        self._store = store
        self._run = run
        self._attempt = attempt
        self.id = store.compare_set(_KEY, "", uuid.uuid4().hex).decode()

    def folder(self) -> Path | None:
        said = self._get("folder")
        return None if said is None else Path(said)

    def will_begin(self, folder: Path) -> None:
        self._set("folder", str(folder.absolute()))

    def ended(self) -> Ended | None:
        said = self._get("ended")
        if said is not None and said["attempt"] < self._attempt:
            return Ended(said["exit_code"], said["text"])
        # Restarts for machines that join are not counted: torchrun's SIGTERM did not mean to end the run.
        self._set("ended", None)
        return None

    def ends(self, exit_code: int, text: str) -> None:
        said = json.dumps({"attempt": self._attempt, "exit_code": exit_code, "text": text})
        with suppress(RuntimeError):
            for nothing in ("", json.dumps(None)):
                self._store.compare_set(self._key("ended"), nothing, said)

    def _get(self, name: str) -> Any:
        with suppress(RuntimeError):
            if self._store.check([self._key(name)]):
                return json.loads(self._store.get(self._key(name)))
        return None

    def _set(self, name: str, value: object) -> None:
        with suppress(RuntimeError):
            self._store.set(self._key(name), json.dumps(value))

    def _key(self, name: str) -> str:
        return f"{_KEY}/{self._run}/{name}"


def open_job(environment: Mapping[str, str] = os.environ) -> Job:
    """The memory of the torchrun job that this process belongs to."""
    # Where torchrun does not lend its store, rank 0 has one, which ends with it.
    lent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return _torchrun_job(environment) if lent else Job()


def _torchrun_job(given: Mapping[str, str]) -> Job:
    import psutil
    import torch.distributed as dist

    try:
        store = dist.TCPStore(given["MASTER_ADDR"], int(given["MASTER_PORT"]), None, False, wait_for_workers=False)
        process = psutil.Process()
        # A Python program may train several runs in sequence: the n-th after a restart is the n-th before it.
        run = store.add(f"{_KEY}/process/{process.pid}/{process.create_time()}", 1)
        return TorchrunJob(store, run=str(run), attempt=int(given.get("TORCHELASTIC_RESTART_COUNT", "0")))
    except (RuntimeError, KeyError, ValueError):
        return Job()
