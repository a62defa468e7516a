"""The ledger: what is in it has happened, whatever killed the process that wrote it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from gptlab.config.errors import UserError
from gptlab.lab.experiments.ledger import Experiment, Ledger, all_fields, baseline_of
from gptlab.lab.experiments.overview import proposals


def propose(ledger: Ledger, number: int, *, against: int = 0, **fields: object) -> None:
    ledger.append(
        "proposed", experiment=number, fields=fields, files=[], why="", expect=None, by="test", against=against
    )


def test_lines_become_experiments(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    propose(ledger, 0)
    ledger.append("timed", experiment=0, speed=1.0, step_seconds=0.5, steps=120)
    ledger.append("measured", experiment=0, seed=1, slice="validation", bpb=1.25, peak_mb=10.0)
    ledger.append("measured", experiment=0, seed=1, slice="promotion", bpb=1.5)
    propose(ledger, 2, seq=3)
    ledger.append("verdict", experiment=2, verdict="discard", reason="worse", difference=0.01)
    baseline, other = Ledger(tmp_path / "ledger.jsonl").experiments().values()
    assert (baseline.steps, baseline.step_seconds) == (120, 0.5)
    assert baseline.bpb == {("validation", 1): 1.25, ("promotion", 1): 1.5}
    assert (other.fields, other.says, other.is_kept) == ({"seq": 3}, "discard", False)


def test_infinite_losses_come_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    propose(ledger, 0)
    ledger.append("measured", experiment=0, seed=1, slice="validation", bpb=float("inf"))
    assert ledger.experiments()[0].bpb["validation", 1] == float("inf")


def test_half_a_line_never_happened(tmp_path: Path) -> None:
    """At every length to which a kill can cut the file, what is read is what was written whole."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    propose(ledger, 0)
    propose(ledger, 2)
    content = ledger.path.read_bytes()
    first = content.index(b"\n") + 1
    for length in range(len(content) + 1):
        ledger.path.write_bytes(content[:length])
        whole = (length >= first) + (length == len(content))
        assert len(ledger.experiments()) == whole
    ledger.path.write_bytes(content[: first + 5])
    propose(ledger, 3)  # removes the rest of the half line
    assert list(ledger.experiments()) == [0, 3]
    assert all(json.loads(line) for line in ledger.path.read_text().splitlines())


def test_a_damaged_line_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.path.write_text('{"kind": "verdict", "experiment": 4}\n')
    with pytest.raises(UserError, match="the ledger is damaged in line 1: KeyError: 4"):
        ledger.experiments()
    ledger.path.write_text("\n\nnonsense\n")
    with pytest.raises(UserError, match="is damaged: line 3 is not a JSON object"):
        ledger.experiments()
    ledger.path.write_text("\n \n")
    assert ledger.experiments() == {}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"kind": "verdict", "verdict": "discard", "difference": "a lot"}, "in line 3: ValueError: could not convert"),
        ({"kind": "verdict", "verdict": "great"}, "in line 3: ValueError: verdict 'great'"),
        ({"kind": "proposed", "against": 2}, "in line 3: ValueError: experiment 2 against 2"),
        ({"kind": "proposed", "against": 1}, "in line 3: ValueError: experiment 2 against 1, which there is not"),
    ],
)
def test_a_line_that_no_lab_wrote_is_refused(line: dict[str, object], says: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    propose(ledger, 0)
    propose(ledger, 2)
    given = {"experiment": 2, "fields": {}, "files": [], "why": "", "expect": None, "by": "", "reason": ""}
    ledger.append(**(given | line))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=says):
        ledger.experiments()


def test_many_writers_lose_no_line(tmp_path: Path) -> None:
    def write(start: int) -> None:
        for number in range(start, start + 20):
            propose(Ledger(tmp_path / "ledger.jsonl"), number)

    threads = [threading.Thread(target=write, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Ledger(tmp_path / "ledger.jsonl").experiments()) == 80


def test_fields_add_up_along_the_baselines(tmp_path: Path) -> None:
    """0 <- 2 (kept) <- 3 (kept) <- 5; 4 was proposed against 2."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    propose(ledger, 0)
    propose(ledger, 2, a=1, b=1)
    propose(ledger, 3, against=2, b=2)
    propose(ledger, 4, against=2, c=9)
    for number in (2, 3):
        ledger.append("verdict", experiment=number, verdict="keep", reason="")
    propose(ledger, 5, against=3, d=4)
    experiments = ledger.experiments()
    assert baseline_of(experiments).number == 3
    assert all_fields(experiments[5], experiments) == {"a": 1, "b": 2, "d": 4}
    assert all_fields(experiments[4], experiments) == {"a": 1, "b": 1, "c": 9}


def test_a_depth_replaces_the_layers_that_were_kept(tmp_path: Path) -> None:
    """They are a field, which would win over what the recipe makes of the depth."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    propose(ledger, 0)
    propose(ledger, 2, **{"model.n_layer": 5, "optim.grad_clip": 1.0})
    propose(ledger, 3, against=2, depth=3)
    propose(ledger, 4, against=3, **{"model.n_layer": 4})
    experiments = ledger.experiments()
    assert all_fields(experiments[3], experiments) == {"optim.grad_clip": 1.0, "depth": 3}
    assert all_fields(experiments[4], experiments) == {"optim.grad_clip": 1.0, "depth": 3, "model.n_layer": 4}


def test_a_proposal_counts_whatever_reason_it_gives() -> None:
    """The baseline and the edit of nothing are the first two."""
    experiments = {number: Experiment(number, why="nothing") for number in range(4)}
    assert [one.number for one in proposals(experiments)] == [2, 3]
