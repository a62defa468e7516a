"""The real torchrun, once: it starts the command again when a rank was killed, and not when it is asked to stop."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from forked import Forked
from tiny_runs import arguments, lines_of, read_to_step, write_corpus
from torch.distributed.run import main

import gptlab
from gptlab.runtime.records.console import PlainDisplay
from gptlab.training.checkpoint.format import list_checkpoints

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tried on Linux")


def test_a_killed_rank_restarts_the_run_and_two_signals_end_it(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    flags = {"steps": 100_000, "eval.every_steps": None, "checkpoint.every_steps": 4, "sample.every_steps": None}
    launcher = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    # Ranks are forked from torchrun's process, and that from this one: none of them has to import torch.
    launcher += ["--start-method", "fork", "--run-path", str(Path(gptlab.__file__).parent / "__main__.py")]

    def torchrun() -> None:
        PlainDisplay.progress_seconds = 0.0  # a line for each step
        main([*launcher, "train", *arguments(tmp_path, "r", flags)])

    process = Forked(torchrun, GLOO_SOCKET_IFNAME="lo")
    try:
        read_to_step(process, 5)
        _, rank_1 = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)
        rank_1.kill()
        read_to_step(process, 10, after="restarted by torchrun: resuming")
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()
    assert process.returncode == 1  # torchrun's own, for whatever ended by a signal
    assert "restarted by torchrun" not in output
    assert "forcefully" not in output, "torchrun kills after 30 s what has not ended by then"
    record = json.loads((tmp_path / "r" / "run.json").read_text())
    assert (record["status"], len(record["resumes"])) == ("preempted", 1)
    steps = [line["step"] for line in lines_of(tmp_path / "r", "train")]
    assert steps == list(range(1, len(steps) + 1))
    assert list_checkpoints(tmp_path / "r" / "checkpoints")[-1].name == f"step-{steps[-1]:08d}"
