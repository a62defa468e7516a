"""From a proposal to its verdict, with runs that are formulas (support/lab_world.py)."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lab_world
import numpy as np
import psutil
import pytest
from forked import Forked
from lab_world import CRASHES, PAIRED_SD, bpb_of, formula, in_order, new_lab, quiet, told

from gptlab.cli.lab import _seconds
from gptlab.config.errors import UserError
from gptlab.lab.experiments import runs, trial
from gptlab.lab.experiments.equal_time import ProcessFailedError
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import Experiment, Ledger, baseline_of
from gptlab.lab.experiments.overview import best, details, status_lines
from gptlab.lab.experiments.proposal import Proposal, read_proposal, submit
from gptlab.lab.experiments.runs import Trained, Variant
from gptlab.lab.experiments.trial import finish, measure_baseline, noise
from gptlab.lab.judge.supervise import Finished
from gptlab.lab.workers.night import agent, nobody, run_night


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a lab whose baseline is measured with five seeds."""
    folder = tmp_path_factory.mktemp("labs")
    lab = new_lab(folder, seeds=5)
    with formula():
        measure_baseline(lab, quiet)
    return folder


@pytest.fixture
def lab(measured: Path, tmp_path: Path) -> Lab:
    return Lab.open(shutil.copytree(measured / "lab", tmp_path / "lab"))


def tried(lab: Lab, **proposal: object) -> dict[str, object]:
    """The verdict of one proposal."""
    with formula():
        one = finish(lab, submit(lab, Proposal(**proposal)), quiet)  # type: ignore[arg-type]
    assert one.verdict is not None
    return dict(one.verdict)


def test_a_night_completes_what_was_killed_after_its_verdict(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the ledger, but not yet in results.tsv and verdict.json, and weights that nobody needs are left."""
    append = Ledger.append

    def killed(self: Ledger, kind: str, **values: Any) -> None:
        append(self, kind, **values)
        if kind == "verdict":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, formula():
        patch.setattr(Ledger, "append", killed)
        number = submit(lab, Proposal({"optim.vector.lr": 1.0}))
        with pytest.raises(KeyboardInterrupt):
            finish(lab, number, quiet)
    verdict = dict(lab.ledger.experiments()[number].verdict or {})
    assert (verdict["verdict"], trial.in_flight(lab)) == ("discard", [number])
    told = []
    run_night(lab, nobody, say=quiet, judged=told.append)
    assert [(one.number, one.says) for one in told] == [(number, "discard")]
    assert f"{number:04}\t" in (lab.path / "results.tsv").read_text()
    written = json.loads((lab.experiment(number) / "verdict.json").read_text())
    assert written == {name: value for name, value in verdict.items() if name not in ("kind", "time", "experiment")}
    assert not [*lab.experiment(number).glob("runs/*/checkpoints")]
    assert trial.in_flight(lab) == []


def test_the_baseline_and_its_noise(lab: Lab) -> None:
    experiments = lab.ledger.experiments()
    assert experiments[0].steps == 100
    assert list(experiments[0].bpb) == [("validation", seed) for seed in range(1, 6)]
    differences = noise(experiments)
    nudged = dict(experiments[1].fields)
    assert differences == [bpb_of({}, seed) - bpb_of(nudged, seed) for seed in range(1, 6)]
    assert 0.2 < np.std(differences) / (np.sqrt(2) * PAIRED_SD) < 3
    kept = {path.name for path in lab.experiment(0).glob("runs/*/checkpoints/*/*")}
    assert kept == {"model.safetensors"}, "moments are most of a lab's disk"


def test_nothing_is_tried_before_the_baseline_is_measured(tmp_path: Path) -> None:
    """`lab new` may be stopped at any moment, here while it timed the steps and after its first seed."""
    lab = new_lab(tmp_path, seeds=2)

    def stop(text: str) -> None:
        if "timing" in text or "seed 2" in text:
            raise KeyboardInterrupt

    for _ in ("while it timed the steps", "after its first seed"):
        with formula(), contextlib.suppress(KeyboardInterrupt):
            measure_baseline(lab, stop)
        with pytest.raises(UserError, match="has no baseline yet"):
            submit(lab, Proposal(fields={"optim.head.lr": 1.0}))
        with pytest.raises(UserError, match="has no baseline yet"):
            best(lab)
        assert "not trained yet" in [*status_lines(lab)][-1]
        with formula():
            trial.time_baseline(lab, 0, quiet)
    with formula():
        measure_baseline(lab, quiet)
    assert submit(lab, Proposal(fields={"optim.head.lr": 1.0})) == 2


def test_the_command_for_the_best_can_be_pasted(lab: Lab, tmp_path: Path) -> None:
    moved = Lab.open(lab.path.rename(tmp_path / "ä lab"))
    words = shlex.split(str(best(moved)["command"]))
    assert words[:7] == ["gptlab", "train", "--from", str(moved.path / "baseline"), "--steps", "100", "--eval.at-end"]


def test_measuring_the_baseline_again_trains_nothing(lab: Lab) -> None:
    trained: list[tuple[int, int]] = []
    with formula(trained):
        measure_baseline(lab, quiet)
    assert trained == []


def test_an_improvement_is_kept_and_becomes_the_baseline(lab: Lab) -> None:
    verdict = tried(lab, fields={"optim.head.lr": 1.0}, why="better", expect=-0.01)
    assert verdict["verdict"] == "keep"
    assert verdict["difference"] == pytest.approx(-0.01, abs=0.002)
    experiments = lab.ledger.experiments()
    assert baseline_of(experiments).number == 2
    assert tried(lab, fields={"optim.head.lr": 1.0})["verdict"] == "no-op"
    assert lab.ledger.experiments()[3].against == 2


def test_a_harm_is_discarded_after_one_pair(lab: Lab) -> None:
    verdict = tried(lab, fields={"optim.vector.lr": 1.0})
    assert (verdict["verdict"], verdict["pairs"]) == ("discard", 1)
    assert not list(lab.experiment(2).glob("runs/*/checkpoints"))


def test_runs_of_the_baseline_are_shared(lab: Lab) -> None:
    trained: list[tuple[int, int]] = []
    with formula(trained):
        finish(lab, submit(lab, Proposal({"optim.vector.lr": 1.0})), quiet)
        finish(lab, submit(lab, Proposal({"optim.vector.lr": 2.0})), quiet)
    assert trained == [(2, 1), (3, 2)]  # with seeds 1 and 2, which the baseline has


def test_equal_time_gives_a_faster_candidate_more_steps(lab: Lab) -> None:
    tried(lab, fields={"batch.micro_sequences": 8})
    one = lab.ledger.experiments()[2]
    assert (one.steps, one.speed) == (125, pytest.approx(1.25))
    [line] = [line for line in details(lab, one) if line.startswith("training")]
    assert line == "training    125 steps, 1.250 of the baseline's speed (1.250 to 1.250)"


def test_a_candidate_that_makes_no_step_in_the_baselines_time(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lab_world.SPEED, "batch.total_tokens", 0.001)
    verdict = tried(lab, fields={"batch.total_tokens": 65_536})
    assert (verdict["verdict"], trial.in_flight(lab)) == ("timed-out", [])
    assert verdict["reason"] == "one of its steps takes more time than the baseline's whole run"


def test_another_rate_is_not_timed(lab: Lab) -> None:
    """A step does the same work, so that it takes the same time."""
    rate = lab.baseline_config()["optim.muon.lr"]
    number = submit(lab, Proposal({"optim.muon.lr": 2 * rate}))
    with formula() as patch:
        patch.setattr(runs, "steps_of", None)
        one = finish(lab, number, quiet)
    assert (one.steps, one.speed, one.speed_interval) == (100, 1.0, None)
    assert one.says == "discard"


def test_fields_that_the_judge_needs_cannot_be_proposed(lab: Lab) -> None:
    verdict = tried(lab, fields={"data.source": ["mine"]})
    assert (verdict["verdict"], verdict["rule"]) == ("invalid", "field")


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [("optim.muon.lr", "abc", "must be a number"), ("depth", 2.5, "must be a whole number"),
     ("model.activation", "mine", "must be one of"), ("optim.muon.lr", -1.0, "must not be negative"),
     ("model.n_head", 7, "heads must divide")],
)  # fmt: skip
def test_a_value_that_cannot_be_is_invalid(lab: Lab, field: str, value: object, why: str) -> None:
    verdict = tried(lab, fields={field: value})
    assert (verdict["verdict"], verdict["rule"]) == ("invalid", "field")
    assert str(verdict["reason"]).startswith(f"{field} = {value!r}: {why}")


def test_texts_that_utf_8_cannot_encode(lab: Lab) -> None:
    """A byte of a command line that is not UTF-8, half of a surrogate pair in JSON."""
    fields = {"model.activation": ["crash\ud800"], "\ud800": {"\udcff": 1}}
    assert tried(lab, fields=fields, why="bad \udcff byte", by="\udcff")["verdict"] == "invalid"
    one = lab.ledger.experiments()[2]
    assert (one.why, one.by) == ("bad ? byte", "?")
    assert one.fields == {"model.activation": ["crash?"], "?": {"?": 1}}
    assert "bad ? byte (model.activation=['crash?'] ?={'?': 1})" in (lab.path / "results.tsv").read_text()


def test_what_crashes(lab: Lab) -> None:
    verdict = tried(lab, fields=CRASHES)
    assert (verdict["verdict"], verdict["reason"]) == ("crashed", "the activation failed")


def test_a_checkpoint_of_another_step_is_invalid(lab: Lab) -> None:
    """A run that was trained for longer than its steps."""
    number = submit(lab, Proposal({"optim.head.lr": 0.3}))
    with formula() as patch:
        honest = runs.judge

        def judge(*given: Any) -> Any:
            judged = honest(*given)
            judged.step += given[1].number == number
            return judged

        patch.setattr(runs, "judge", judge)
        verdict = finish(lab, number, quiet).verdict
    assert verdict is not None
    assert (verdict["verdict"], verdict["rule"]) == ("invalid", "checkpoint")


@pytest.mark.parametrize(
    ("first", "again", "rule"),
    [((10, 100), (10, 11), None), ((10, 100), (10, 90), "wall-clock"), ((50, 100), (10, 10), "cpu-time")],
)
def test_only_what_is_slow_twice_trained_off_the_clock(
    lab: Lab, first: tuple[float, float], again: tuple[float, float], rule: str | None
) -> None:
    """CPU seconds and seconds of the candidate's run with the first seed, and when it trains again. A run of the
    baseline takes 10 of both. A stall of the machine costs no CPU seconds."""
    number = submit(lab, Proposal({"optim.vector.lr": 1.0}))
    repeated: list[tuple[int, Path | None]] = []
    with formula() as patch:
        honest = runs.train

        def train(lab: Lab, variant: Variant, seed: int) -> Trained:
            return replace(honest(lab, variant, seed), finished=finished(*first))

        def train_again(lab: Lab, variant: Variant, seed: int, *, candidate: int, same_as: Any = None) -> Finished:
            repeated.append((variant.number, same_as))
            return finished(*(again if variant.number == number else (10, 10)))

        patch.setattr(runs, "train", train)
        patch.setattr(runs, "train_again", train_again)
        verdict = finish(lab, number, quiet).verdict
    assert verdict is not None
    assert verdict["rule"] == rule
    candidates = [] if rule == "cpu-time" else [(number, runs.run_folder(lab, number, 1))]
    assert repeated == [(0, None), *candidates]


def test_what_was_measured_is_kept_where_the_moments_cannot_be_dropped(lab: Lab) -> None:
    """A disk may be full, or the lab killed meanwhile."""
    number, trained = submit(lab, Proposal({"optim.vector.lr": 1.0})), list[tuple[int, int]]()

    def drop_moments(run: Path) -> None:
        raise UserError("the disk is full")

    with formula(trained) as patch:
        patch.setattr(runs, "drop_moments", drop_moments)
        with pytest.raises(UserError, match="disk is full"):
            finish(lab, number, quiet)
    assert len(lab.ledger.experiments()[number].bpb) == 1
    with formula(trained):
        finish(lab, number, quiet)
    assert len(trained) == len(set(trained)), "none is trained again"


def test_the_last_part_of_a_run_is_no_measure_for_others(tmp_path: Path) -> None:
    """The baseline's with seed 2 was stopped, and resumed just before its end."""
    lab = new_lab(tmp_path, seeds=2)
    with formula() as patch:
        honest = runs.train

        def train(lab: Lab, variant: Variant, seed: int) -> Trained:
            trained = honest(lab, variant, seed)
            is_part = (variant.number, seed) == (0, 2)
            return replace(trained, finished=finished(0.1, 0.1), resumed=True) if is_part else trained

        patch.setattr(runs, "train", train)
        patch.setattr(runs, "train_again", None)
        measure_baseline(lab, quiet)
    [_, part] = lab.ledger.experiments()[0].costs
    assert (part["wall_seconds"], part["peak_mb"], part["resumed"]) == (0.1, 1.0, True)


def finished(cpu_seconds: float, wall_seconds: float) -> Finished:
    return Finished(0, wall_seconds, cpu_seconds, 2**20, None, (), ())


def test_a_baseline_that_fails_with_a_new_seed_is_not_the_candidates_fault(lab: Lab) -> None:
    number = submit(lab, Proposal({"optim.head.lr": 0.3}))
    with formula() as patch:
        honest = runs.train

        def train(lab: Lab, variant: Variant, seed: int) -> object:
            if variant.number == 0:
                raise ProcessFailedError("the loss is not finite")
            return honest(lab, variant, seed)

        patch.setattr(runs, "train", train)
        verdict = finish(lab, number, quiet).verdict
    assert verdict is not None
    assert (verdict["verdict"], verdict["pairs"]) == ("inconclusive", 5)  # the baseline has seeds 1 to 5
    assert verdict["reason"] == "the baseline failed with seed 6: the loss is not finite"


def test_what_a_run_prints_is_shortened_and_printable(lab: Lab) -> None:
    def judge(*arguments: object) -> object:
        raise ProcessFailedError("\x1b[2Jno\nsuch" * 1000)

    number = submit(lab, Proposal({"optim.head.lr": 1.0}))
    with formula() as patch:
        patch.setattr(runs, "judge", judge)
        verdict = finish(lab, number, quiet).verdict
    assert verdict is not None
    assert len(verdict["reason"]) == 500
    assert verdict["reason"].isprintable()


def test_weights_equal_to_the_bit_are_a_no_op(lab: Lab) -> None:
    """A field that changes the configuration and nothing that is computed."""
    verdict = tried(lab, fields={"runtime.allocator": "expandable_segments:True"})
    assert (verdict["verdict"], verdict["pairs"]) == ("no-op", 1)


@pytest.mark.parametrize("what", ["ledger.jsonl", "private/validation/val_000000.bin", "code/gptlab/model/gpt.py"])
def test_files_of_the_lab_that_change_without_namespaces(lab: Lab, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that cannot be kept from writing, which writes while it trains."""
    monkeypatch.setattr(trial, "why_not_isolated", lambda: "no namespaces here")
    path = lab.path / what
    with formula() as patch:
        honest = runs.train

        def train(*arguments: object) -> object:
            line = b'{"kind": "verdict", "experiment": 2, "verdict": "keep"}\n' if path.suffix == ".jsonl" else b"x"
            path.write_bytes(path.read_bytes() + line)
            return honest(*arguments)  # type: ignore[arg-type]

        patch.setattr(runs, "train", train)
        one = finish(lab, submit(lab, Proposal({"optim.head.lr": 1.0})), quiet)
    assert one.verdict is not None
    assert (one.says, one.verdict["rule"]) == ("invalid", "private-files")
    assert baseline_of(lab.ledger.experiments()).number == 0


class TestCode:
    def changed(self, lab: Lab, tmp_path: Path, name: str, old: str, new: str) -> Path:
        tree = tmp_path / "tree"
        shutil.copytree(lab.path / "code", tree)
        path = tree / "gptlab" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        return tree

    def test_the_diff_is_kept_of_what_is_discarded_too(self, lab: Lab, tmp_path: Path) -> None:
        tree = self.changed(lab, tmp_path, "optim/schedule.py", "def lr_scale(", "EXTRA = 1\n\n\ndef lr_scale(")
        tried(lab, tree=tree, fields={"optim.vector.lr": 1.0})
        one = lab.ledger.experiments()[2]
        assert (one.says, one.files) == ("discard", ("gptlab/optim/schedule.py",))
        assert "+EXTRA = 1" in (lab.experiment(2) / "changes.patch").read_text()
        assert not (lab.experiment(2) / "tree").exists()

    def test_of_a_kept_one_the_code_stays_and_is_the_next_baselines(self, lab: Lab, tmp_path: Path) -> None:
        tree = self.changed(lab, tmp_path, "optim/schedule.py", "def lr_scale(", "EXTRA = 1\n\n\ndef lr_scale(")
        assert tried(lab, tree=tree, fields={"optim.head.lr": 1.0})["verdict"] == "keep"
        assert "EXTRA" in (lab.experiment(2) / "tree/gptlab/optim/schedule.py").read_text()
        words = shlex.split(str(best(lab)["command"]))
        assert words[:5] == [f"PYTHONPATH={lab.experiment(2) / 'tree'}", sys.executable, "-P", "-m", "gptlab"]
        same = tried(lab, tree=lab.experiment(2) / "tree", fields={"optim.vector.lr": 3.0})
        assert same["verdict"] == "discard"
        assert lab.ledger.experiments()[3].files == ()

    def test_changed_code_may_take_other_values(self, lab: Lab, tmp_path: Path) -> None:
        tree = self.changed(lab, tmp_path, "optim/schedule.py", "def lr_scale(", "EXTRA = 1\n\n\ndef lr_scale(")
        assert tried(lab, tree=tree, fields={"model.activation": "mine", "optim.head.lr": 1.0})["verdict"] == "keep"
        assert tried(lab, fields={"model.activation": "other"})["verdict"] == "discard"

    def test_comments_are_a_no_op(self, lab: Lab, tmp_path: Path) -> None:
        tree = self.changed(lab, tmp_path, "optim/schedule.py", "def lr_scale(", "# slower\n\n\ndef lr_scale(")
        assert tried(lab, tree=tree)["verdict"] == "no-op"

    def test_the_judge_cannot_be_changed(self, lab: Lab, tmp_path: Path) -> None:
        tree = self.changed(lab, tmp_path, "eval/bits_per_byte.py", "def evaluate(", "BETTER = 1\n\n\ndef evaluate(")
        verdict = tried(lab, tree=tree)
        assert (verdict["verdict"], verdict["rule"]) == ("invalid", "protected")
        assert "+BETTER = 1" in (lab.experiment(2) / "changes.patch").read_text()

    def test_a_file_name_that_is_not_utf_8(self, lab: Lab, tmp_path: Path) -> None:
        tree = Path(shutil.copytree(lab.path / "code", tmp_path / "tree"))
        try:
            Path(os.fsdecode(os.fsencode(tree / "gptlab/model") + b"/\xff.py")).touch()
        except OSError:
            pytest.skip("this file system has no such names")
        verdict = tried(lab, tree=tree)
        assert (verdict["verdict"], verdict["rule"]) == ("invalid", "tree")

    @pytest.mark.parametrize("what", ["pipe.py", "folder", "large.py", "large.bin"])
    def test_what_no_tree_may_hold_is_refused_unread(self, what: str, lab: Lab, tmp_path: Path) -> None:
        """A pipe that nobody writes to, a link to a folder, files larger than memory."""
        tree = Path(shutil.copytree(lab.path / "code", tmp_path / "tree"))
        path = tree / "gptlab" / "model" / what
        if what == "folder":
            path.symlink_to(tmp_path)
        elif what == "pipe.py":
            os.mkfifo(path)
        else:
            path.touch()
            os.truncate(path, 2**40)
        verdict = tried(lab, tree=tree)
        assert (verdict["verdict"], verdict["rule"]) == ("invalid", "shipped-data" if "large" in what else "tree")
        assert lab.ledger.experiments()[2].files == (f"gptlab/model/{what}",)

    def test_a_folder_without_a_package(self, lab: Lab, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="has no gptlab/"):
            submit(lab, Proposal(tree=tmp_path))


NIGHT = (
    Proposal({"optim.vector.lr": 1.0}, why="worse"),
    Proposal({"optim.head.lr": 2.0}, why="better"),
    Proposal({"data.source": ["x"]}, why="not allowed"),
    Proposal({"batch.micro_sequences": 8}, why="faster, no better"),
)


@pytest.mark.parametrize("text", ["8", "nanh", "infh", "-8h", "0s", "h", ""])
def test_what_is_no_time_to_end_a_night(text: str) -> None:
    with pytest.raises(UserError, match="give a time with its unit"):
        _seconds(text)


def test_a_night_ends_at_its_number(lab: Lab) -> None:
    judged: list[str] = []
    with formula():
        run_night(lab, in_order(*NIGHT), experiments=4, say=quiet, judged=lambda one: judged.append(one.says))
    assert judged[:3] == ["discard", "keep", "invalid"]
    assert len(judged) == 4
    assert lab.ledger.experiments()[5].against == 3
    told: list[str] = []
    run_night(lab, in_order(*NIGHT), experiments=4, say=told.append, judged=lambda one: None)
    assert told == ["--experiments 4 is reached: it counts those of earlier nights too"]


@pytest.mark.parametrize("expect", ["1e999", "9" * 401])
def test_a_prediction_that_is_no_finite_number(expect: str, tmp_path: Path) -> None:
    (tmp_path / "proposal.json").write_text(f'{{"expect": {expect}}}')
    with pytest.raises(UserError, match=r"expect \(a number\)"):
        read_proposal(tmp_path / "proposal.json", None, "test")


@pytest.mark.parametrize("command", ["", "no-such-command --fast", "notes.txt"])
def test_what_is_no_command_that_proposes(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").touch()
    with pytest.raises(UserError, match="give a command of PATH"):
        agent(command, 60.0)


def test_a_night_leaves_no_copy_of_the_package(lab: Lab, tmp_path: Path) -> None:
    program = tmp_path / "propose.py"
    program.write_text("""open("proposal.json", "w").write('{"fields": {"optim.vector.lr": 1.0}}')""")
    with formula():
        propose = agent(shlex.join([sys.executable, str(program)]), 60.0)
        run_night(lab, propose, experiments=1, say=quiet, judged=lambda one: None)
    assert lab.ledger.experiments()[2].says == "discard"
    assert [path.suffix for path in (lab.path / "work").iterdir()] == [".log"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere SIGKILL leaves the command running")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_program_that_proposes_ends_with_the_night(lab: Lab, number: signal.Signals) -> None:
    def propose() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup make test` ignores
        run_night(lab, agent("sleep 987", 60.0), say=quiet, judged=lambda one: None)

    night = Forked(propose)
    while not (started := [one for one in psutil.Process(night.pid).children() if one.name() == "sleep"]):
        time.sleep(0.01)
    night.send_signal(number)
    assert night.wait() == (-number if number == signal.SIGKILL else 128 + number)
    until = time.monotonic() + 5
    while is_there := started[0].is_running() and started[0].status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            started[0].kill()
            break
        time.sleep(0.01)
    assert not is_there
    run_night(lab, nobody, say=quiet, judged=lambda one: None)  # what SIGKILL left goes with the next night
    assert [path.suffix for path in (lab.path / "work").iterdir()] == [".log"]


def test_what_a_night_on_another_machine_of_this_name_does_stays(lab: Lab) -> None:
    folder = lab.path / "work" / f"{platform.node()}-another-{2**30}"  # a pid that no process has
    folder.mkdir(parents=True)
    run_night(lab, nobody, say=quiet, judged=lambda one: None)
    assert folder.is_dir()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that nights pause, which pass at once."""
    waited: list[float] = []
    clock = SimpleNamespace(sleep=waited.append, monotonic=lambda: sum(waited))
    monkeypatch.setattr("gptlab.lab.workers.night.time", clock)
    return waited


def no_idea(lab: Lab) -> Proposal:
    raise UserError("no idea")


def test_a_program_that_proposes_nothing_ends_the_night(lab: Lab, pauses: list[float]) -> None:
    with pytest.raises(UserError, match="5 times in a row; the last time: no idea"):
        run_night(lab, no_idea, experiments=4, say=quiet, judged=lambda one: None)
    assert (pauses, max(lab.ledger.experiments())) == ([1, 10, 60, 300], 1)


def test_a_model_that_is_away_for_minutes_does_not_end_the_night(lab: Lab, pauses: list[float]) -> None:
    proposals = in_order(*NIGHT)

    def sometimes(lab: Lab) -> Proposal:
        return proposals(lab) if len(pauses) % 5 == 4 else no_idea(lab)

    def judged(one: Experiment) -> None:
        pauses.append(0)  # and away again after each experiment

    with formula():
        run_night(lab, sometimes, experiments=2, say=quiet, judged=judged)
    assert pauses == [1, 10, 60, 300, 0] * 2


def test_a_pause_ends_with_the_night(lab: Lab, pauses: list[float]) -> None:
    run_night(lab, no_idea, until=30, say=quiet, judged=lambda one: None)
    assert pauses == [1, 10, 19]


def test_a_command_that_thinks_ends_with_the_night(lab: Lab) -> None:
    said, until = list[str](), time.monotonic() + 0.1
    propose = agent("sleep 5", 60.0, until)
    run_night(lab, propose, until=until, say=said.append, judged=lambda one: None)
    assert time.monotonic() < until + 2
    assert said == ["no proposal: the command did not propose anything within 0 s"]


def test_results_in_autoresearchs_columns(lab: Lab) -> None:
    with formula():
        run_night(lab, in_order(*NIGHT), experiments=3, say=quiet, judged=lambda one: None)
    submit(lab, Proposal({"optim.head.lr": 9.0}))  # in flight: it has no line yet, and no verdict
    tried(lab, fields={"optim.vector.lr": 9.0})
    header, *rows = (line.split("\t") for line in (lab.path / "results.tsv").read_text().splitlines())
    assert header == ["commit", "val_bpb", "memory_gb", "status", "description"]
    assert [(row[0], row[3]) for row in rows] == [
        ("0000", "keep"), ("0002", "discard"), ("0003", "keep"), ("0004", "crash"), ("0006", "discard"),
    ]  # fmt: skip
    shown = ["".join(details(lab, lab.ledger.experiments()[number])) for number in (0, 1, 3, 5)]
    assert ["in flight" in text for text in shown] == [False, False, False, True]
    assert ["verdict" in text for text in shown] == [False, False, True, True]
    assert float(rows[0][1]) == pytest.approx(1.5, abs=0.02)
    assert told(lab.ledger.experiments()[3])["fields"] == {"optim.head.lr": 2.0}
