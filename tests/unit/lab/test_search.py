"""Optuna's proposals, from the ledger alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from lab_world import bpb_of, formula, new_lab, quiet

from gptlab.config.errors import UserError
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import Experiment, baseline_of
from gptlab.lab.experiments.overview import comparable_bpb
from gptlab.lab.experiments.proposal import Proposal, submit
from gptlab.lab.experiments.trial import finish, measure_baseline
from gptlab.lab.workers.night import run_night
from gptlab.lab.workers.search import read_space, search

SPACE = '"optim.head.lr" = {low = 0.001, high = 3.0, log = true}\nmodel.activation = ["relu2", "gelu"]\n'


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labs")
    with formula():
        measure_baseline(new_lab(folder, seeds=3), quiet)
    return folder / "lab"


@pytest.fixture
def lab(measured: Path, tmp_path: Path) -> Lab:
    return Lab.open(shutil.copytree(measured, tmp_path / "lab"))


def night(lab: Lab, experiments: int, text: str, tmp_path: Path, said: list[str] | None = None) -> list[Experiment]:
    """A night of search until there are so many experiments; those that it judged. `said`: what the search says."""
    path, judged = tmp_path / "space.toml", list[Experiment]()
    said = [] if said is None else said
    path.write_text(text)
    with formula():
        run_night(
            lab, search(read_space(path), said.append), at_once=True, experiments=experiments, say=quiet,
            judged=judged.append,
        )  # fmt: skip
    return judged


RATES = '"optim.head.lr" = {low = 0.001, high = 3.0}\n'


def test_a_search_finds_the_better_values(lab: Lab, tmp_path: Path) -> None:
    judged = night(lab, 22, RATES, tmp_path)
    rates = [one.fields["optim.head.lr"] for one in judged]
    assert len(rates) == len(set(rates)) == 22
    assert all(0.001 <= rate <= 3.0 for rate in rates)
    assert np.median(rates[-8:]) > np.median(rates[:8])  # more is better (lab_world)
    assert lab.ledger.experiments()[2].by == "search trial 1"
    best = baseline_of(lab.ledger.experiments())
    assert best.fields["optim.head.lr"] > 2


def test_a_stopped_search_continues_as_if_it_had_not_been(lab: Lab, tmp_path: Path) -> None:
    """Proposals follow from the ledger, whichever process reads it."""
    other = Lab.open(shutil.copytree(lab.path, tmp_path / "other"))
    whole = night(lab, 12, RATES, tmp_path)
    parts = [one for end in (3, 11, 12) for one in night(other, end, RATES, tmp_path)]
    assert [one.fields for one in parts] == [one.fields for one in whole]
    assert [one.by for one in parts] == [f"search trial {number}" for number in range(1, 13)]


def told(lab: Lab, text: str, tmp_path: Path) -> list[tuple[str, dict[str, object], float | None]]:
    """What Optuna learns: (state, values, bits per byte) of each trial."""
    from gptlab.lab.workers import search as module

    path = tmp_path / "space.toml"
    path.write_text(text)
    trials = module._trials(read_space(path), lab, lab.ledger.experiments())
    return [(trial.state.name, trial.params, trial.value) for trial in trials]


def test_what_the_sampler_learns(lab: Lab, tmp_path: Path) -> None:
    proposals = (
        Proposal({"optim.head.lr": 2.0}, by="search trial 1"),
        Proposal({"optim.head.lr": 1.0}, by="somebody"),
        Proposal({"optim.head.lr": 1.5, "batch.micro_sequences": 8}, by="not a point of the space"),
        Proposal({"optim.head.lr": 9.0}, by="out of its range"),
    )
    with formula():
        for proposal in proposals:
            finish(lab, submit(lab, proposal), quiet)
        submit(lab, Proposal({"optim.head.lr": 2.5}))
    crashed = submit(lab, Proposal({"optim.head.lr": 3.0, "model.activation": "gelu"}))
    lab.ledger.append("verdict", experiment=crashed, verdict="crashed", reason="out of memory")
    baseline = lab.baseline_config()
    states = [(state, values["optim.head.lr"]) for state, values, _ in told(lab, SPACE, tmp_path)]
    assert states == [
        ("COMPLETE", baseline["optim.head.lr"]), ("COMPLETE", 2.0), ("COMPLETE", 1.0), ("RUNNING", 2.5), ("FAIL", 3.0),
    ]  # fmt: skip
    assert all(values["model.activation"] in ("relu2", "gelu") for _, values, _ in told(lab, SPACE, tmp_path))


def test_values_are_comparable_whatever_the_seeds_and_the_baseline(lab: Lab) -> None:
    """Experiment 2 becomes the baseline; 3 is worse, and raced with one seed, whose luck is not its own."""
    with formula():
        for fields in ({"optim.head.lr": 2.0}, {"optim.vector.lr": 3.0}):
            finish(lab, submit(lab, Proposal(fields)), quiet)
    experiments = lab.ledger.experiments()
    assert (experiments[3].against, len(experiments[3].bpb)) == (2, 1)
    values = [comparable_bpb(experiments[number], experiments) for number in (0, 2, 3)]
    seeds = range(1, 4)
    expected = [np.mean([bpb_of(fields, seed) for seed in seeds]) for fields in ({}, {"optim.head.lr": 2.0})]
    # A mean of three to five differences has about half the paired SD of 0.0014; seeds alone make 0.01.
    np.testing.assert_allclose(values, [expected[0], expected[0] - 0.02, expected[0] + 0.01], atol=0.004)


def test_a_space_of_few_points_ends(lab: Lab, tmp_path: Path) -> None:
    judged = night(lab, 100, 'model.activation = ["relu2", "gelu"]\nmodel.n_layer = {low = 1, high = 3}\n', tmp_path)
    points = {tuple(one.fields.values()) for one in judged}
    assert len(points) == len(judged) == 5  # the sixth is the baseline


def test_points_that_fit_together_only(lab: Lab, tmp_path: Path) -> None:
    """No experiment is spent on a width that its heads do not divide."""
    judged = night(lab, 4, "model.n_embd = {low = 30, high = 60}\nmodel.n_head = [4]\n", tmp_path)
    assert all(one.fields["model.n_embd"] % 4 == 0 for one in judged)


def test_a_space_of_few_points_that_fit_together(lab: Lab, tmp_path: Path) -> None:
    """One width in 250 is an even multiple of the heads; all the others are drawn in vain."""
    judged = night(lab, 2, "model.n_embd = {low = 1, high = 1000}\nmodel.n_head = [125]\n", tmp_path)
    assert [one.fields["model.n_embd"] % 250 for one in judged] == [0, 0]


def test_a_space_in_which_nothing_fits_together_is_not_searched_but_wrong(lab: Lab, tmp_path: Path) -> None:
    said = list[str]()
    assert night(lab, 3, "model.n_embd = {low = 33, high = 63}\nmodel.n_head = [32]\n", tmp_path, said) == []
    assert said == ["the values of none of 2,000 points of the space fit together: narrow its ranges"]
    night(lab, 3, 'model.activation = ["relu2"]\n', tmp_path, said)
    assert len(said) == 1  # its only point is the baseline


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no field"),
        ('"optim.muon.rate" = {low = 1, high = 2}', "there is no such field"),
        ("seed = [1, 2]", "seed cannot be changed: both sides share it"),
        ('"optim.muon.lr" = {low = 0.1}', r"must be a list of choices, or for a number \{low = A, high = B\}"),
        ('"optim.muon.lr" = {low = 0.1, high = 0.05}', "low must be less than high"),
        ("depth = {low = 1, high = 4, step = 0.5}", "depth = "),
        ('"optim.muon.lr" = {low = 0.0, high = 0.05, log = true}', "low"),
        ('"optim.muon.lr" = 0.1', "must be a list of choices"),
        ('"model.n_layer" = {low = 1.5, high = 3}', "must be a whole number"),
        ('"model.n_layer" = {low = 0, high = 3}', "must be"),
        ('"model.activation" = ["relu3"]', "must be one of"),
        ("depth = {low = 1, high = 4, log = true, step = 2}", "step"),
    ],
)
def test_a_space_is_checked_before_anything_is_trained(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_space(path)
    assert str(path) in str(caught.value)


def test_integers_for_fields_of_integers(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text("depth = {low = 1, high = 4}\n[optim.muon]\nlr = {low = 1, high = 2}\n")
    kinds = {name: type(distribution).__name__ for name, distribution in read_space(path).items()}
    assert kinds == {"depth": "IntDistribution", "optim.muon.lr": "FloatDistribution"}


def test_without_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install 'gptlab\[search\]'"):
        read_space(tmp_path / "space.toml")


def test_a_search_before_the_baseline_is_refused(tmp_path: Path) -> None:
    """`lab new` was stopped before it recorded anything."""
    with pytest.raises(UserError, match="has no baseline yet"):
        search({}, quiet)(new_lab(tmp_path))
