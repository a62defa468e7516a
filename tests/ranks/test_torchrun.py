"""The real torchrun: it starts the command again when a rank was killed, and not when it is asked to stop.

Its own `--start-method fork` makes the ranks from a process that has torch imported, a third of the work. `make
test-faults` has them in interpreters of their own, as users start them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from forked import Forked
from tiny_runs import arguments, lines_of, write_corpus

import gptlab
from gptlab.training.checkpoint.names import list_checkpoints

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tried on Linux")


LAUNCHER = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]


def forked(argv: list[str]) -> Forked:
    from torch.distributed.run import main as torchrun

    program = str(Path(gptlab.__file__).with_name("__main__.py"))
    words = [*LAUNCHER, "--start-method", "fork", "--run-path", program, *argv]
    return Forked(lambda: torchrun(words), GLOO_SOCKET_IFNAME="lo")


def started(argv: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *LAUNCHER, "-m", "gptlab", *argv],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_until(condition: Callable[[], bool], process: Forked | subprocess.Popen[str]) -> None:
    """By the files of the run: the log in a pipe has a line every five seconds."""
    while process.poll() is None and not condition():
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()[0]


@pytest.mark.parametrize("start", [forked, pytest.param(started, marks=pytest.mark.faults)])
def test_a_killed_rank_restarts_the_run_and_two_signals_end_it(
    start: Callable[[list[str]], Forked | subprocess.Popen[str]], tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus")
    flags = {"steps": 100_000, "eval.every_steps": None, "checkpoint.every_steps": 4, "sample.every_steps": None}
    process = start(["train", *arguments(tmp_path, "r", flags)])
    run = tmp_path / "r"

    def trained(step: int, *, resumes: int) -> bool:
        if not (run / "log.txt").exists() or (run / "log.txt").read_text().count("start-up") <= resumes:
            return False  # right after a restart, metrics.jsonl still has lines after the checkpoint
        steps = lines_of(run, "train")
        return bool(steps) and steps[-1]["step"] >= step

    try:
        wait_until(lambda: trained(5, resumes=0), process)
        _, rank_1 = psutil.Process(process.pid).children()  # by their numbers, which grow
        rank_1.kill()
        wait_until(lambda: trained(10, resumes=1), process)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 1  # torchrun's own, for whatever ended by a signal
    assert output.count("restarted by torchrun") == 1  # when a rank was killed, not after the signals
    assert "forcefully" not in output, "torchrun kills after 30 s what has not ended by then"
    record = json.loads((tmp_path / "r" / "run.json").read_text())
    assert (record["status"], len(record["resumes"])) == ("preempted", 1)
    steps = [line["step"] for line in lines_of(tmp_path / "r", "train")]
    assert steps == list(range(1, len(steps) + 1))
    assert list_checkpoints(tmp_path / "r" / "checkpoints")[-1].name == f"step-{steps[-1]:08d}"
