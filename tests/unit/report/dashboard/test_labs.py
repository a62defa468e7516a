"""Labs beside the runs: their figures, when they are read again, and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile_files import deep, endless, hole, pipe

from gptlab.lab.experiments.ledger import Ledger
from gptlab.report.dashboard.bounds import MAX_CHARACTERS
from gptlab.report.dashboard.labs import WatchedLabs

SETTINGS = {"name": "first", "recipe": "quickstart", "seconds": None, "steps": 100, "validation_bytes": {}}


def propose(ledger: Ledger, number: int, verdict: str, difference: float, against: int = 0, **fields: object) -> None:
    """An experiment and what became of it."""
    ledger.append("proposed", experiment=number, fields=fields, files=[], why="", expect=None, by="", against=against)
    ledger.append("verdict", experiment=number, verdict=verdict, reason="", difference=difference, half_width=None)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A baseline of 1.5 bits per byte, an experiment that was kept and one that was not."""
    folder = tmp_path / "labs/first"
    folder.mkdir(parents=True)
    (folder / "lab.json").write_text(json.dumps(SETTINGS))
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.append("proposed", experiment=0, fields={}, files=[], why="", expect=None, by="", against=0)
    ledger.append("measured", experiment=0, seed=1, slice="validation", bpb=1.5, wall_seconds=30.0)
    propose(ledger, 2, "keep", -0.02, **{"optim.muon.lr": 0.03})
    propose(ledger, 3, "discard", 0.01, against=2, **{"model.activation": "x" * 1000})
    return folder


def test_the_frontier_of_a_lab(lab: Path) -> None:
    labs = WatchedLabs(lab.parent)
    assert labs.refresh()
    (found,) = labs.figures
    assert (found["name"], found["problem"], found["best"], found["verdicts"]) == (
        "first", None, 2, {"keep": 1, "discard": 1},
    )  # fmt: skip
    assert [round(row["bpb"], 4) for row in found["frontier"]] == [1.5, 1.48, 1.49]
    assert [round(row["best_bpb"], 4) for row in found["frontier"]] == [1.5, 1.48, 1.48]
    assert found["frontier"][1]["change"] == "optim.muon.lr=0.03"
    assert len(found["frontier"][2]["change"]) == MAX_CHARACTERS


def test_a_lab_is_read_again_when_its_ledger_has_grown(lab: Path) -> None:
    labs = WatchedLabs(lab.parent)
    labs.refresh()
    assert not labs.refresh()
    propose(Ledger(lab / "ledger.jsonl"), 4, "keep", -0.03, against=2)
    assert labs.refresh()
    assert labs.figures[0]["best"] == 4
    lab.rename(lab.parent / "second")
    assert labs.refresh()
    assert [one["name"] for one in labs.figures] == ["second"]


def test_without_labs_there_is_nothing(tmp_path: Path) -> None:
    labs = WatchedLabs(tmp_path / "labs")
    assert not labs.refresh()
    assert labs.figures == []


def _circle(path: Path) -> None:
    """Experiments that are each the other's baseline."""
    ledger = Ledger(path)
    propose(ledger, 5, "keep", -0.1, against=6)
    propose(ledger, 6, "keep", -0.1, against=5)


HARM: dict[str, Callable[[Path], object]] = {
    "a pipe": pipe,
    "endless": endless,
    "a hole": hole,
    "deep": deep,
    "a circle": _circle,
    "other values": lambda path: path.write_text('{"experiment": 0, "kind": "measured", "bpb": []}\n'),
    "empty": lambda path: path.write_text(""),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_hostile_ledger_is_one_line(lab: Path, harm: str) -> None:
    HARM[harm](lab / "ledger.jsonl")
    labs = WatchedLabs(lab.parent)
    labs.refresh()
    (found,) = labs.figures
    assert set(found) == {"name", "problem"}
    assert "\n" not in found["problem"]
    assert 0 < len(found["problem"]) <= MAX_CHARACTERS
