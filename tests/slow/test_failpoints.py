"""SIGKILL in every file operation of a run and of its resume: what comes back is the run that nobody killed."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fault_figures
import pytest
from failpoints import changes_files, spread
from forked_runs import Ended, ForkedRuns
from tiny_runs import Outcome, arguments, differences, outcome

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, SIGKILL and /proc")

FLAGS: dict[str, Any] = {
    "steps": 3, "model.n_layer": 1, "model.value_embeddings": "off", "eval.every_steps": 2, "eval.tokens": 64,
    "sample.prompts": [], "checkpoint.every_steps": 1, "checkpoint.keep_last": 1, "checkpoint.keep_best": False,
}  # fmt: skip
"""Two saves in the background and one that is waited for; two of them are removed again."""


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[ForkedRuns]:
    with ForkedRuns(folder) as runs:
        yield runs


class Victim:
    """One run on so many ranks, which `rank` does not survive."""

    def __init__(self, runs: ForkedRuns, folder: Path, ranks: int, rank: int, *, steps: int = FLAGS["steps"]) -> None:
        self.runs = runs
        self.flags = FLAGS | {"steps": steps}
        self.ranks = ranks
        self.rank = rank
        self.run = folder / "run"
        self.report = folder / "report.txt"
        self.template = folder / "template"
        self.whole = folder / "whole"
        self.points_of_run = self.points(self.start, self.whole)
        self.expected: Outcome = outcome(self.whole)

    def start(self, run: Path, **options: Any) -> Ended:
        argv = ["train", *arguments(run.parent, run.name, self.flags)]
        return self.runs.run(argv, ranks=self.ranks, **options)

    def go_on(self, run: Path, **options: Any) -> Ended:
        """As one would: from config.json on it is a run that can be resumed; before, the same command begins again."""
        if not (run / "config.json").exists():
            return self.start(run, **options)
        return self.runs.run(["train", "--resume", run], ranks=self.ranks, **options)

    def points(self, command: Callable[..., Ended], run: Path) -> list[str]:
        """All that `rank` comes by in a command that nobody kills."""
        within = {"folder": str(run), "report": str(self.report), "of_rank": self.rank}
        assert command(run, within={"failpoints.counting": within}).codes == [0] * self.ranks
        return self.report.read_text().splitlines()

    def killed(self, command: Callable[..., Ended], point: str, *, all_die: bool) -> str | None:
        """Kill `rank` at a point; None where that was done, else what was not."""
        self.report.unlink(missing_ok=True)
        within = {"folder": str(self.run), "report": str(self.report), "point": point, "of_rank": self.rank}
        ended = command(self.run, within={"failpoints.killing": within}, all_die=all_die)
        hit = ended.codes[self.rank] == -9 and self.report.exists() and self.report.read_text() == point
        return None if hit else f"{point}: not hit, {ended}"

    def wrong(self, point: str) -> str | None:
        """What keeps the run that was killed at `point` from ending as if it had not been; None where nothing does."""
        ended = self.go_on(self.run)
        if ended.codes != [0] * self.ranks:
            return f"{point}: went on with {ended.codes}: {ended.output[-2000:]}"
        if found := differences(self.expected, outcome(self.run)):
            return f"{point}: {found}"
        there, expected = tree(self.run), tree(self.whole)
        return None if there == expected else f"{point}: {sorted(there ^ expected)} in only one of the folders"

    def of_runs(self, points: Sequence[str]) -> list[str]:
        """Kill a run at each of the points, and see what is wrong when it has gone on."""
        problems = []
        for number, point in enumerate(points):
            shutil.rmtree(self.run, ignore_errors=True)
            # A rank that is left alone writes that it is, and ends; one that dies at the same time cannot.
            not_hit = self.killed(self.start, point, all_die=bool(number % 4))
            problems.append(not_hit or self.wrong(point))
        return [problem for problem in problems if problem]

    def of_loads(self, points: Sequence[str]) -> list[str]:
        problems = []
        for number, point in enumerate(points):
            copied(self.template, self.run)
            not_hit = self.killed(self.go_on, point, all_die=bool(number % 4))
            problems.append(not_hit or self.wrong(point))
        return [problem for problem in problems if problem]

    def make_template(self) -> None:
        """A run that was killed right behind the rename of step 2's checkpoint: its line is missing, and what it
        replaces is still there."""
        shutil.rmtree(self.run, ignore_errors=True)
        rank, self.rank = self.rank, 0  # which renames
        points = self.points_of_run if rank == 0 else self.points(self.start, self.run)
        (renamed,) = (i for i, point in enumerate(points) if re.match(r"rename \S*step-00000002\.tmp", point))
        shutil.rmtree(self.run, ignore_errors=True)
        assert self.killed(self.start, points[renamed + 1], all_die=True) is None
        self.rank = rank
        self.run.rename(self.template)


def tree(run: Path) -> set[str]:
    """What lies in a run folder."""
    return {str(path.relative_to(run)) for path in run.rglob("*")}


def link(folder: Path, to: Path) -> Path:
    """A folder for runs, with the corpus and the cache of another."""
    for name in ("corpus", "cache"):
        (to / name).symlink_to(folder / name)
    return to


def of_checkpoints(points: Sequence[str]) -> list[str]:
    return [point for point in points if " checkpoints" in point]


def coarse(points: Sequence[str]) -> list[str]:
    """Of the operations that leave a trace, one of each kind in each folder."""
    by_kind: dict[str, str] = {}
    for point in spread(filter(changes_files, points)):
        operation, place, _ = point.split(" ")
        by_kind[f"{operation} {re.sub('[0-9]+', 'N', os.path.dirname(place))}"] = point
    return list(by_kind.values())


class TestSpread:
    """The short form: one of each kind of operation."""

    def test_one_process(self, runs: ForkedRuns, folder: Path, tmp_path: Path) -> None:
        victim = Victim(runs, link(folder, tmp_path), ranks=1, rank=0)
        points = victim.points_of_run
        for sought in (
            r"write \S*/\.step-\d+\.tmp-/", r"fsync \S*/\.step-\d+\.tmp-/", r"rename \S*\.tmp-", "fsync checkpoints ",
            "fsync metrics", "fsync log", r"rename \S*/step-", r"unlink \S*removed-/", r"rmdir \S*removed-",
            "replace .run.json",
        ):  # fmt: skip
            assert any(re.match(sought, point) for point in points), sought
        assert victim.of_runs(coarse(points)[::5]) == []
        victim.make_template()
        points = victim.points(victim.go_on, copied(victim.template, victim.run))
        assert victim.of_loads(coarse(points)[1::5]) == []

    def test_two_processes(self, runs: ForkedRuns, folder: Path, tmp_path: Path) -> None:
        victim = Victim(runs, link(folder, tmp_path), ranks=2, rank=1)
        points = of_checkpoints(victim.points_of_run)
        assert any("write checkpoints/.step" in point for point in points), "rank 1 writes a share of its own"
        assert victim.of_runs(coarse(points)[:2]) == []


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
class TestEvery:
    """With one process, every file operation; with two, in saves and retention every one that leaves a trace, and in a
    resume one of each kind."""

    def test_of_a_run(self, runs: ForkedRuns, folder: Path, tmp_path: Path, ranks: int, rank: int) -> None:
        started = time.perf_counter()
        victim = Victim(runs, link(folder, tmp_path), ranks, rank, steps=3 if ranks == 1 else 2)
        points = victim.points_of_run
        if ranks > 1:
            points = [point for point in of_checkpoints(points) if changes_files(point)]
        problems = victim.of_runs(points)
        name = "failpoints-1" if ranks == 1 else f"failpoints-2-{rank}"
        fault_figures.note(name, done=len(points), problems=problems, started=started)

    def test_of_a_resume(self, runs: ForkedRuns, folder: Path, tmp_path: Path, ranks: int, rank: int) -> None:
        started = time.perf_counter()
        victim = Victim(runs, link(folder, tmp_path), ranks, rank)
        victim.make_template()
        points = victim.points(victim.go_on, copied(victim.template, victim.run))
        if ranks > 1:
            of_next_save = re.compile(r"\w+ checkpoints/\.step-\d+\.tmp-")
            points = spread(itertools.takewhile(lambda point: not of_next_save.match(point), points))
        problems = victim.of_loads(points)
        name = "failpoints-load-1" if ranks == 1 else f"failpoints-load-2-{rank}"
        fault_figures.note(name, done=len(points), problems=problems, started=started)


def copied(template: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(template, to))
