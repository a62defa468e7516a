"""Several processes on one lab: every experiment judged once, every run trained once, no gain dropped."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Forked
from lab_world import formula, new_lab, quiet

from gptlab.lab.experiments import runs
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import Experiment, baseline_of
from gptlab.lab.experiments.proposal import Proposal, submit
from gptlab.lab.experiments.runs import Variant
from gptlab.lab.experiments.trial import BusyError, finish, measure, measure_baseline
from gptlab.lab.workers.night import run_night

NIGHT = tuple(
    Proposal({f"optim.{'vector' if worth < 0 else 'head'}.lr": abs(worth)})
    for worth in (-1.0, 0.5, 1.5, -2.0, 1.0, 2.5, 2.0, -3.0)
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labs")
    with formula():
        measure_baseline(new_lab(folder, seeds=3), quiet)
    return folder / "lab"


@pytest.fixture
def lab(measured: Path, tmp_path: Path) -> Lab:
    return Lab.open(shutil.copytree(measured, tmp_path / "lab"))


def next_of_night(lab: Lab) -> Proposal | None:
    made = sum(one.number > 1 and not one.by.endswith("again") for one in lab.ledger.experiments().values())
    return NIGHT[made] if made < len(NIGHT) else None


def work(lab: Lab, log: Path, *, experiments: int | None, before: Callable[[Variant, int], None] | None = None) -> None:
    """A worker's night. `before`: called before a run is trained. `log`: gets `EXPERIMENT SEED` of each that was."""
    with formula() as patch:
        train = runs.train

        def logged(lab: Lab, variant: Variant, seed: int) -> object:
            if before is not None:
                before(variant, seed)
            found = train(lab, variant, seed)
            with log.open("a") as file:
                file.write(f"{variant.number} {seed}\n")
            return found

        patch.setattr(runs, "train", logged)
        run_night(lab, next_of_night, at_once=True, experiments=experiments, say=quiet, judged=lambda one: None)


def slowly(variant: Variant, seed: int) -> None:
    time.sleep(0.01)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_workers_share_a_night(lab: Lab, tmp_path: Path) -> None:
    log = tmp_path / "trained"
    workers = [Forked(lambda: work(lab, log, experiments=None, before=slowly)) for _ in range(3)]
    for worker in workers:
        output, _ = worker.communicate()
        assert worker.returncode == 0, output
    trained = Counter(log.read_text().splitlines())
    assert max(trained.values()) == 1
    experiments = lab.ledger.experiments()
    assert all(one.says for one in experiments.values() if one.number > 1)
    first = [one for one in experiments.values() if not one.by.endswith("again") and one.number > 1]
    assert [one.fields for one in first] == [proposal.fields for proposal in NIGHT]
    kept = [one for one in experiments.values() if one.is_kept]
    assert [one.against for one in kept] == [0, *(one.number for one in kept[:-1])]
    assert kept[-1].fields == {"optim.head.lr": 2.5}


def test_an_improvement_on_a_replaced_baseline_is_proposed_again(lab: Lab) -> None:
    with formula():
        small, large = (submit(lab, Proposal({"optim.head.lr": rate}, why="more")) for rate in (1.0, 2.0))
        assert finish(lab, small, quiet).is_kept
        judged = finish(lab, large, quiet)
        assert (judged.says, judged.verdict["reason"]) == (  # type: ignore[index]
            "inconclusive", "better than 0, but the baseline is 2 since: proposed again as 4",
        )  # fmt: skip
        assert baseline_of(lab.ledger.experiments()).number == small
        assert finish(lab, 4, quiet).is_kept
    again = lab.ledger.experiments()[4]
    assert (again.fields, again.against, again.why) == ({"optim.head.lr": 2.0}, small, "more")
    assert again.by == "experiment 3 again"
    # It was better with the seeds of its first race: the second one has others.
    first, second = ({seed for _, seed in lab.ledger.experiments()[number].bpb} for number in (large, 4))
    assert first <= {*range(1, 21)}
    assert second <= {*range(21, 41)}


class TestCode:
    """Two workers change code at the same time."""

    def changed(self, lab: Lab, folder: Path, name: str, text: str) -> Path:
        shutil.copytree(lab.path / "code", folder)
        with (folder / "gptlab" / name).open("a") as file:
            file.write(text)
        return folder

    def judged(self, lab: Lab, *trees: Path) -> list[Experiment]:
        """Both are better than experiment 0."""
        with formula():
            numbers = [
                submit(lab, Proposal({"optim.head.lr": rate}, tree)) for rate, tree in enumerate(trees, start=1)
            ]  # fmt: skip
            return [finish(lab, number, quiet) for number in numbers]

    def test_files_are_combined(self, lab: Lab, tmp_path: Path) -> None:
        trees = (
            self.changed(lab, tmp_path / name, f"optim/{name}.py", "\nEXTRA = 1\n") for name in ("schedule", "muon")
        )  # fmt: skip
        assert [one.says for one in self.judged(lab, *trees)] == ["keep", "inconclusive"]
        again = lab.ledger.experiments()[4]
        assert again.files == ("gptlab/optim/muon.py",)
        tree = lab.experiment(4) / "tree/gptlab/optim"
        assert "EXTRA" in (tree / "schedule.py").read_text()
        assert "EXTRA" in (tree / "muon.py").read_text()
        assert not list(lab.path.glob(".again*"))

    def test_changes_of_one_file_are_left_to_people(self, lab: Lab, tmp_path: Path) -> None:
        trees = (self.changed(lab, tmp_path / str(n), "optim/schedule.py", f"\nEXTRA = {n}\n") for n in (1, 2))
        _, second = self.judged(lab, *trees)
        assert second.verdict["reason"].endswith(  # type: ignore[index]
            "the baseline is 2 since: combine them by hand, both changed gptlab/optim/schedule.py"
        )
        assert max(lab.ledger.experiments()) == 3

    def test_a_tree_keeps_the_baseline_that_it_was_made_from(self, lab: Lab, tmp_path: Path) -> None:
        """A command that thought while the baseline's code changed does not propose to undo that change."""
        first = self.changed(lab, tmp_path / "a", "optim/schedule.py", "\nEXTRA = 1\n")
        self.judged(lab, first)
        second = self.changed(lab, tmp_path / "b", "optim/adamw.py", "\nEXTRA = 1\n")
        number = submit(lab, Proposal(tree=second, against=0))
        one = lab.ledger.experiments()[number]
        assert (one.files, one.against) == (("gptlab/optim/adamw.py",), 0)


def test_what_a_killed_worker_leaves_is_finished_by_another(lab: Lab, tmp_path: Path) -> None:
    begun, log = tmp_path / "begun", tmp_path / "trained"

    def hang(variant: Variant, seed: int) -> None:
        begun.touch()
        time.sleep(600)

    worker = Forked(lambda: work(lab, log, experiments=1, before=hang))
    wait_for(begun)
    with formula(), pytest.raises(BusyError, match="experiment 2 is being judged by another process"):
        finish(lab, 2, quiet)
    work(lab, log, experiments=2)
    assert [lab.ledger.experiments()[number].says for number in (2, 3)] == ["", "keep"]
    worker.kill()
    worker.wait()
    work(lab, log, experiments=2)
    assert lab.ledger.experiments()[2].says == "discard"


def test_a_seed_of_the_baseline_is_waited_for(lab: Lab, tmp_path: Path) -> None:
    """Another worker trains it: its result is taken."""
    begun, log, said = tmp_path / "begun", tmp_path / "trained", list[str]()

    def other() -> None:
        with formula() as patch:
            train = runs.train

            def slow(lab: Lab, variant: Variant, seed: int) -> object:
                begun.touch()
                time.sleep(0.3)
                return train(lab, variant, seed)

            patch.setattr(runs, "train", slow)
            measure(lab, 0, 9, "validation", quiet)

    worker = Forked(other)
    wait_for(begun)
    trained: list[tuple[int, int]] = []
    with formula(trained):
        bpb = measure(lab, 0, 9, "validation", said.append)
    assert worker.wait() == 0
    assert (trained, said) == ([], ["0000: waiting for seed 9 of another worker"])
    assert bpb == lab.ledger.experiments()[0].bpb["validation", 9]
    assert log.exists() is False
