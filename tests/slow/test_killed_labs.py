"""`gptlab lab run`, killed at random moments with everything real, ends with the ledger of an undisturbed night."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fault_figures
import pytest
from lab_world import told
from tiny_runs import arguments, write_corpus

from gptlab.lab.experiments.folder import Lab

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs SIGKILL"),
    pytest.mark.faults,
    pytest.mark.timeout(7200),
]

KILLS = 30
SEED = 7
EXPERIMENTS: tuple[dict[str, Any], ...] = (
    {"optim.embedding.lr": 0.1}, {"model.activation": "gelu"}, {"data.source": ["x"]}, {"optim.muon.lr": 0.0},
)  # fmt: skip
AGENT = """\
import json
done = len(json.load(open("state.json"))["experiments"])
json.dump({"fields": %s[done], "why": f"number {done}"}, open("proposal.json", "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labs")
    write_corpus(folder / "corpus", documents=60)
    (folder / "agent.py").write_text(AGENT % json.dumps(EXPERIMENTS))
    return folder


def commands(folder: Path, name: str) -> list[list[str]]:
    """`lab new`, and the night. Equal steps: timings differ from night to night."""
    words = arguments(folder, "unused", {"steps": 20, "sample.prompts": [], "model.dropout": 0.0})
    at = words.index("--run-dir")
    lab = [sys.executable, "-m", "gptlab", "lab"]
    agent = f"{sys.executable} {folder / 'agent.py'}"
    return [
        [*lab, "new", str(folder / name), *words[:at], *words[at + 2 :], "--seeds", "1", "--at", "steps"],
        [*lab, "run", str(folder / name), "--agent", agent, "--experiments", str(len(EXPERIMENTS))],
    ]


def night(folder: Path, name: str, kill_after: float | None = None) -> bool:
    """Begin or continue; whether it came to its end before it was killed."""
    until = None if kill_after is None else time.monotonic() + kill_after
    for words in commands(folder, name):
        process = subprocess.Popen(
            words, cwd=folder, env=os.environ | {"GPTLAB_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return False
        assert process.returncode == 0, errors.decode()
    return True


def outcome(folder: Path, name: str) -> list[dict[str, Any]]:
    found = [told(one) for one in Lab.open(folder / name).ledger.experiments().values()]
    for one in found:
        one["verdict"].pop("evidence", None)
    return found


def test_a_night_killed_at_random_moments(folder: Path) -> None:
    started = time.perf_counter()
    assert night(folder, "whole")
    seconds = time.perf_counter() - started
    expected = outcome(folder, "whole")
    assert [one["verdict"].get("verdict") for one in expected[2:]].count("invalid") == 1
    chance, done, number, problems = random.Random(SEED), 0, 0, []
    while done < KILLS:
        name = f"killed-{number}"
        while not night(folder, name, chance.uniform(0.0, 0.5 * seconds) if done < KILLS else None):
            done += 1
        if outcome(folder, name) != expected:
            problems.append(f"{name}: {outcome(folder, name)} instead of {expected}")
        shutil.rmtree(folder / name)
        number += 1
    left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True).stdout
    assert left == "", "processes are left"
    fault_figures.note("lab-kills", done=done, problems=problems, started=started)
