"""A night that is killed at any file operation, and continued, ends with the ledger of one that nobody disturbed."""

from __future__ import annotations

import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import fault_figures
import pytest
from failpoints import Failpoints, changes_files, spread
from forked import Forked
from lab_world import formula, in_order, new_lab, quiet, told

from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.proposal import Proposal
from gptlab.lab.experiments.trial import measure_baseline
from gptlab.lab.workers.night import run_night

NIGHT = (
    Proposal({"optim.vector.lr": 1.0}, why="worse"),
    Proposal({"optim.head.lr": 2.0}, why="better"),
    Proposal({"data.source": ["x"]}, why="not allowed"),
)


def night(folder: Path) -> None:
    """The baseline with one seed, then three experiments: discarded, kept, refused."""

    with formula():
        lab = Lab.open(folder / "lab")
        measure_baseline(lab, quiet)
        run_night(lab, in_order(*NIGHT), experiments=len(NIGHT), say=quiet, judged=lambda one: None)


def outcome(folder: Path) -> tuple[list[dict[str, Any]], str, list[Path]]:
    """The ledger, results.tsv, and what is kept of each experiment."""
    lab = Lab.open(folder / "lab")
    kept = sorted(path for name in ("verdict.json", "runs/*/checkpoints") for path in lab.path.rglob(name))
    told_of = [told(one) for one in lab.ledger.experiments().values()]
    return told_of, (lab.path / "results.tsv").read_text(), [path.relative_to(lab.path) for path in kept]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    new_lab(folder, seeds=1)
    return folder


def killed_nights(template: Path, tmp_path: Path, chosen: Callable[[Iterable[str]], Sequence[str]]) -> int:
    """How many nights were killed, each at one of the `chosen` points, and ended as they should."""
    undisturbed = Path(shutil.copytree(template, tmp_path / "undisturbed"))
    points = Failpoints(undisturbed / "lab")
    with points.installed():
        night(undisturbed)
    wanted = outcome(undisturbed)
    assert [one["verdict"].get("verdict") for one in wanted[0]] == [None, None, "discard", "keep", "invalid"]
    victims = chosen(points.reached)
    for number, point in enumerate(victims):
        folder = Path(shutil.copytree(template, tmp_path / f"killed-{number}"))
        report = tmp_path / f"report-{number}"

        def until_killed(folder: Path = folder, point: str = point, report: Path = report) -> None:
            with Failpoints(folder / "lab", point, report).installed():
                night(folder)

        process = Forked(until_killed)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, f"{point} was never reached"
        night(folder)
        assert outcome(folder) == wanted, point
        lines = Lab.open(folder / "lab").ledger.path.read_text().splitlines()
        measured = Counter(line.split('"bpb"')[0].split('"experiment"')[1] for line in lines if '"measured"' in line)
        assert max(measured.values()) == 1, point
        shutil.rmtree(folder)
    return len(victims)


def test_at_file_operations_of_many_kinds(template: Path, tmp_path: Path) -> None:
    """One operation of every sixth kind; all of them: `make test-faults`."""
    assert killed_nights(template, tmp_path, lambda points: spread(filter(changes_files, points))[::6]) > 3


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_at_every_file_operation_that_leaves_a_trace(template: Path, tmp_path: Path) -> None:
    started = time.perf_counter()
    done = killed_nights(template, tmp_path, lambda points: list(filter(changes_files, points)))
    fault_figures.note("lab-failpoints", done=done, problems=[], started=started)
