"""The workers of a lab as Slurm jobs, submitted with submitit. A job is `gptlab lab run` on the shared folder; one that
is preempted, or whose time is over, is queued again and continues: nothing but the ledger has to survive."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError, one_line

SHARED_NAMES = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")
"""submitit's own names of a job's options. Any other is sbatch's, which submitit takes with `slurm_` before it."""


class Worker:
    """What a job does: one command, to its end."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = [*command]
        self._process: subprocess.Popen[bytes] | None = None

    def __reduce__(self) -> tuple[type[Worker], tuple[list[str]]]:
        return Worker, (self.command,)

    def __call__(self) -> None:
        """RuntimeError where the command fails, so that Slurm reports the job as failed."""
        # SIGUSR2, by which submitit learns that the time is over, reaches the whole job.
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        )
        if code := self._process.wait():
            raise RuntimeError(f"the worker ended with exit code {code}")

    def checkpoint(self) -> Any:
        """Called by submitit when the job is about to lose its machine: what to queue again."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.terminate()
        return DelayedSubmission(self)


def submit_workers(
    command: Sequence[str], workers: int, *, logs: Path, options: Mapping[str, Any], cluster: str = "slurm"
) -> list[Any]:
    """Submit jobs that all run `command`; submitit's jobs.

    Args:
        logs: Where their output goes.
        options: Of each job, such as {"partition": "gpu", "gpus_per_node": 1, "timeout_min": 480}.
        cluster: slurm, or submitit's local, which starts processes here.

    UserError without submitit or Slurm, and for an option that there is not.
    """
    try:
        import submitit
    except ImportError:
        raise UserError("--launcher slurm needs submitit: pip install 'gptlab[slurm]'") from None
    named = {name if name in SHARED_NAMES else f"slurm_{name}": value for name, value in options.items()}
    try:
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        executor.update_parameters(**named)
        with executor.batch():
            return [executor.submit(Worker(command)) for _ in range(workers)]
    except (AssertionError, NameError, RuntimeError, TypeError, ValueError, OSError) as error:  # submitit asserts types
        raise UserError(f"the jobs cannot be submitted: {one_line(error)}") from None


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """{name: value} of `partition=gpu gpus_per_node=1`; numbers as such. UserError for a word without `=`."""
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise UserError(f"--slurm {word}: give NAME=VALUE, such as partition=gpu or timeout_min=480")
        number = float(value) if re.fullmatch(r"\d+\.\d+", value) else value
        options[name.replace("-", "_")] = int(value) if value.isdecimal() else number
    return options
