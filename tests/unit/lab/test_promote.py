"""What a night kept, confirmed with fresh seeds, unread text and a second size; runs are formulas."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from lab_world import CRASHES, formula, new_lab, quiet

from gptlab.cli import lab as command
from gptlab.config.errors import UserError
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.overview import details, proposals, state
from gptlab.lab.experiments.promote import promote, sentence
from gptlab.lab.experiments.proposal import Proposal, submit
from gptlab.lab.experiments.trial import finish, in_flight, measure_baseline
from gptlab.lab.racing import e_value

BETTER, BETTER_STILL, USELESS = 2, 3, 4


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lab that kept two experiments, the second on top of the first, and discarded one."""
    folder = tmp_path_factory.mktemp("labs")
    with formula():
        lab = new_lab(folder, seeds=3)
        measure_baseline(lab, quiet)
        for fields in ({"optim.head.lr": 1.0}, {"optim.head.lr": 2.5}, {"optim.head.lr": 2.4999}):
            finish(lab, submit(lab, Proposal(fields)), quiet)
    assert [one.says for one in proposals(lab.ledger.experiments())][:2] == ["keep", "keep"]
    return folder / "lab"


@pytest.fixture
def lab(measured: Path, tmp_path: Path) -> Lab:
    return Lab.open(shutil.copytree(measured, tmp_path / "lab"))


def test_the_best_is_confirmed_against_the_first_baseline(lab: Lab) -> None:
    with formula():
        [answer] = promote(lab, None, seeds=5, depth=None, say=quiet)
    assert (answer["experiment"], answer["confirmed"], answer["depth"]) == (BETTER_STILL, True, None)
    assert answer["difference"] == pytest.approx(-0.025, abs=0.003)
    experiments = lab.ledger.experiments()
    pairs = [
        {seed: bpb for (where, seed), bpb in experiments[number].bpb.items() if where == "promotion"}
        for number in (0, BETTER_STILL)
    ]
    assert [*pairs[0]] == [*pairs[1]] == [*range(10_001, 10_001 + answer["pairs"])]
    differences = [pairs[0][seed] - pairs[1][seed] for seed in pairs[0]]
    assert answer["evidence"] == float(e_value(differences, (2.0, 8.0))) >= 20
    assert experiments[BETTER_STILL].promotions == [answer]
    assert sentence([answer]).startswith("experiment 3 is confirmed against experiment 0: -0.02")
    [line] = [line for line in details(lab, experiments[BETTER_STILL]) if line.startswith("promotion")]
    assert line.startswith("promotion   confirmed: -0.02")
    told = json.dumps(state(lab))
    assert "confirmed" not in told  # Whoever proposes would learn from the second text.
    assert "10001" not in told


def test_nothing_is_trained_twice_and_said_once(lab: Lab) -> None:
    trained: list[tuple[int, int]] = []
    with formula(trained):
        first = promote(lab, BETTER, seeds=5, depth=None, say=quiet)
        pairs = len(trained)
        assert promote(lab, BETTER, seeds=5, depth=None, say=quiet) == first
    assert len(trained) == len(set(trained)) == pairs == 2 * first[0]["pairs"]
    assert len(lab.ledger.experiments()[BETTER].promotions) == 1


def test_weights_of_fresh_seeds_are_removed_and_others_stay(lab: Lab) -> None:
    with formula():
        promote(lab, BETTER, seeds=5, depth=None, say=quiet)
    for number in (0, BETTER):
        runs = {path.parent.name for path in lab.experiment(number).glob("runs/*/checkpoints")}
        assert "seed-1" in runs
        assert not [name for name in runs if name.startswith("seed-100")]


def test_what_does_nothing_is_not_confirmed(lab: Lab) -> None:
    """With as many fresh seeds as are allowed."""
    with formula():
        number = submit(lab, Proposal({"optim.head.lr": 0.0001}, against=0))
        finish(lab, number, quiet)
        [answer] = promote(lab, number, seeds=3, depth=6, say=quiet)
    assert (answer["confirmed"], answer["pairs"]) == (False, 3)
    assert "is not confirmed against experiment 0" in sentence([answer])


def test_a_second_size(lab: Lab) -> None:
    tried = len(proposals(lab.ledger.experiments()))
    with formula():
        own, deep = promote(lab, BETTER, seeds=5, depth=6, say=quiet)
        trained: list[tuple[int, int]] = []
        with formula(trained):
            assert promote(lab, BETTER, seeds=5, depth=6, say=quiet) == [own, deep]
    assert trained == []
    assert (own["confirmed"], deep["confirmed"], deep["depth"]) == (True, True, 6)
    assert own["difference"] != deep["difference"]
    experiments = lab.ledger.experiments()
    base, candidate = [one for one in experiments.values() if one.fields.get("depth") == 6]
    assert (base.against, candidate.against) == (0, BETTER)
    assert base.steps == candidate.steps == 100
    assert in_flight(lab) == []
    assert len(proposals(experiments)) == tried
    assert "at depth 6 -0.0" in sentence([own, deep])


def test_a_second_size_is_another_one(lab: Lab) -> None:
    """The same runs again would count as a second confirmation."""
    own = lab.baseline_config()["model.n_layer"]
    with formula():
        with pytest.raises(UserError, match=f"depth {own} is the lab's own"):
            promote(lab, BETTER, seeds=5, depth=own, say=quiet)
        assert lab.ledger.experiments()[BETTER].promotions == []
        promote(lab, BETTER, seeds=5, depth=6, say=quiet)
        second = max(lab.ledger.experiments())
        with pytest.raises(UserError, match=f"there is no experiment {second} to confirm"):
            promote(lab, second, seeds=5, depth=None, say=quiet)


def test_what_cannot_be_confirmed(lab: Lab, measured: Path) -> None:
    for number, message in ((99, "there is no experiment 99"), (0, "there is no experiment 0 to confirm")):
        with pytest.raises(UserError, match=message):
            promote(lab, number, seeds=5, depth=None, say=quiet)
    with formula():
        number = submit(lab, Proposal(CRASHES))
        finish(lab, number, quiet)
        with pytest.raises(UserError, match=f"experiment {number} cannot be confirmed: with seed 10001, the "):
            promote(lab, number, seeds=5, depth=None, say=quiet)
    folder = measured.parent / "fresh"
    if not folder.exists():
        folder.mkdir()
    with formula():
        empty = new_lab(folder, seeds=1)
        measure_baseline(empty, quiet)
    with pytest.raises(UserError, match="nothing was kept yet"):
        promote(empty, None, seeds=5, depth=None, say=quiet)


def test_the_command(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    with formula():
        assert command.main(["promote", str(lab.path), str(BETTER), "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["confirmed"] is True
        assert printed["answers"] == lab.ledger.experiments()[BETTER].promotions
        assert command.main(["promote", str(lab.path), "--seeds", "1"]) == 10
    assert capsys.readouterr().out.startswith("experiment 3 is not confirmed")
