"""A run in a process of its own: trained, resumed where it was stopped, skipped where it has finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import gptlab
from gptlab.config.errors import cannot
from gptlab.runtime.hardware.cpu import usable_cores
from gptlab.runtime.processes.distributed import TASK_COUNTS
from gptlab.runtime.records.run_directory import RunDirectory

# Of a run whose launcher was killed: it finishes its step and saves.
_RELEASE_SECONDS = 60.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# Standard input is a pipe that only the launcher can write to, and never does: it ends when the launcher does, however
# that happens and on every system. SIGTERM then makes the run save and end.
_CHILD = """\
import os, runpy, signal, threading
def end_with_launcher():
    os.read(0, 1)
    # On Windows os.kill ends a process without a word; elsewhere raise_signal does not wake the main thread.
    signal.raise_signal(signal.SIGTERM) if os.name == "nt" else os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end_with_launcher, daemon=True).start()
runpy.run_module("gptlab", run_name="__main__", alter_sys=True)
"""


@dataclass
class Stop:
    """Within the context, SIGINT and SIGTERM are forwarded to the run that is training, and remembered. Outside of the
    main thread, where Python can install no handler, they are not."""

    requested: bool = False
    """Whether a signal came: nothing else should be started."""
    _process: subprocess.Popen[bytes] | None = None
    _former: dict[signal.Signals, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        with suppress(ValueError):
            self._former = {number: signal.signal(number, self._forward) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._process is not None:
            with suppress(ValueError):  # Windows, where the console itself interrupts every process
                self._process.send_signal(number)

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """The exit code of a process that has just been started; 128 + N, as shells report it, for signal N."""
        self._process = process
        if self.requested:  # between its start and now
            process.terminate()
        try:
            code = process.wait()
        finally:
            self._process = None
        return code if code >= 0 else 128 - code


def launch(folder: Path, arguments: Sequence[str], *, log: Path, stop: Stop) -> int:
    """Train `gptlab train ARGUMENTS` into `folder` and return the exit code as it is (docs/contracts.md): 0 at once if
    that run has finished, and `--resume` in place of the arguments if it was started.

    `log`: the file to which its output is appended. `stop`: what forwards signals to it.

    The process never outlives this one: it saves and ends when this one is killed.
    """
    words = resumed_arguments(folder)
    if words is None:
        return 0
    with cannot(f"write {log}"):
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
    with (
        output,
        subprocess.Popen(
            # -P: a `gptlab` in the current folder does not hide this one.
            [sys.executable, "-P", "-c", _CHILD, "train", *(words or [*arguments, "--run-dir", str(folder)])],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
            # Otherwise Ctrl-C reaches the run twice, and it stops in the middle of a step.
            process_group=0,
        ) as process,
    ):
        return stop.wait(process)


def resumed_arguments(folder: Path) -> list[str] | None:
    """The arguments that resume the run in `folder`: empty if there is none, None if it has finished. Waits for a
    process that is still saving it, since its launcher was killed."""
    run = RunDirectory(folder)
    until = time.monotonic() + _RELEASE_SECONDS
    while run.in_use() and time.monotonic() < until:
        time.sleep(0.1)
    if not run.config_path.is_file():
        return []
    return None if run.recorded().get("status") == "finished" else ["--resume", str(folder)]


def _environment() -> dict[str, str]:
    """The variables of this process, in which `gptlab` is this one."""
    # srun may have started several workers, each of which starts runs of one process.
    variables = {name: value for name, value in os.environ.items() if name not in TASK_COUNTS}
    if sys.platform != "darwin":  # as `set_threads` chooses, whatever else computes: runs are compared
        variables.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    own = Path(gptlab.__file__).parents[1]
    if own != Path(sysconfig.get_path("purelib")):
        paths = [str(own.resolve()), *filter(None, [variables.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables
