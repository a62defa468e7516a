"""SIGKILL at any moment, again and again, and resumes from every step: the run ends as if nothing had been."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fault_figures
import pytest
from forked_runs import ForkedRuns
from tiny_runs import Outcome, arguments, differences, outcome

from gptlab.training.checkpoint.names import checkpoint_path

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs fork and SIGKILL"),
    pytest.mark.faults,
    pytest.mark.timeout(1800),
]

STEPS = 40
FLAGS: dict[str, Any] = {
    "steps": STEPS, "model.n_layer": 1, "eval.every_steps": 5, "eval.tokens": 64, "checkpoint.every_steps": 1,
    "checkpoint.keep_last": 2, "sample.every_steps": 10,
}  # fmt: skip
SEED = 4
"""Of the moments."""


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[ForkedRuns]:
    with ForkedRuns(folder) as runs:
        yield runs


def start(runs: ForkedRuns, run: Path, ranks: int, **options: Any) -> Any:
    """Begin the run, or resume it."""
    if (run / "config.json").exists():
        return runs.run(["train", "--resume", run], ranks=ranks, **options)
    return runs.run(["train", *arguments(run.parent, run.name, FLAGS)], ranks=ranks, **options)


def whole(runs: ForkedRuns, folder: Path, ranks: int) -> tuple[Outcome, float]:
    """The run that nobody kills, and how long it takes."""
    run = folder / f"whole-{ranks}"
    shutil.rmtree(run, ignore_errors=True)
    ended = start(runs, run, ranks)
    assert ended.codes == [0] * ranks, ended.output
    return outcome(run), ended.seconds


@pytest.mark.parametrize(
    ("row", "ranks", "kills"), [("kills-1", 1, 50), ("kills-2-one", 2, 25), ("kills-2-all", 2, 25)]
)
def test_killed_at_random_moments(runs: ForkedRuns, folder: Path, row: str, ranks: int, kills: int) -> None:
    """Each run is killed until it ends: the moments are drawn from the time that a whole run takes."""
    started = time.perf_counter()
    expected, seconds = whole(runs, folder, ranks)
    chance = random.Random(f"{SEED} {row}")
    run = folder / row
    done, of_this_run, problems = 0, 0, []
    while done < kills or of_this_run:
        moment = chance.uniform(0.0, seconds)
        victims = {0: moment, 1: moment} if row == "kills-2-all" else {chance.randrange(ranks): moment}
        ended = start(runs, run, ranks, kill=victims if done < kills else {})
        if ended.was_killed:
            done += 1
            of_this_run += 1
            # By itself, within 5 s; where the two did not know of each other yet, torchrun's signal ends it. Of a run
            # that has come to its end, one rank may leave before the other is killed.
            ends = {-9, 3, 0} if f"num_steps:        {STEPS}\n" in ended.output else {-9, 3}
            if set(ended.codes) - ends and "run folder" in ended.output:
                problems.append(f"at {moment:.2f} s, ranks {sorted(victims)}: {ended}")
            continue
        found = differences(expected, outcome(run)) if set(ended.codes) == {0} else [str(ended)]
        problems += [f"one of {of_this_run} kills: {found}"] * (of_this_run if found else 0)
        of_this_run = 0
        shutil.rmtree(run)
    fault_figures.note(row, done=done, problems=problems, started=started)


@pytest.mark.parametrize("ranks", [1, 2])
def test_resumed_from_each_step(runs: ForkedRuns, folder: Path, ranks: int) -> None:
    """All checkpoints of one run are kept; then those after a step are taken away, and the run goes on from there."""
    started = time.perf_counter()
    kept = folder / f"kept-{ranks}"
    argv = ["train", *arguments(folder, kept.name, FLAGS | {"checkpoint.keep_last": STEPS})]
    assert runs.run(argv, ranks=ranks).codes == [0] * ranks
    expected = outcome(kept)
    problems = []
    for step in range(1, STEPS + 1):
        run = folder / f"from-{ranks}"
        shutil.copytree(kept, run)
        (run / "summary.json").unlink()  # so that the run is not taken for finished
        for later in range(step + 1, STEPS + 1):
            shutil.rmtree(checkpoint_path(run / "checkpoints", later))
        ended = start(runs, run, ranks)
        said = f"{ended.output[:0]}" if set(ended.codes) == {0} else str(ended)
        if said or (found := differences(expected, outcome(run))):
            problems.append(f"from step {step}: {said or found}")
        shutil.rmtree(run)
    fault_figures.note(f"steps-{ranks}", done=STEPS, problems=problems, started=started)
