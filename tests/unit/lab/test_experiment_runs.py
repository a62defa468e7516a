"""What an experiment's processes are told and shown, and what the judge gets of the baseline. The processes are not
started: `make test-faults` (test_killed_labs) does that."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lab_world import formula, new_lab, quiet

from gptlab.config.errors import UserError
from gptlab.config.load import config_to_json
from gptlab.lab.experiments import equal_time, runs, trial
from gptlab.lab.experiments.equal_time import LAST_BYTES, ProcessFailedError, StepProcess, last_words
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.proposal import Proposal, submit
from gptlab.lab.experiments.runs import Trained, Variant, variant_of
from gptlab.lab.experiments.trial import measure_baseline
from gptlab.lab.judge.rules import RuleError
from gptlab.lab.judge.supervise import Finished
from gptlab.runtime.files.plain_file import to_json
from gptlab.training.checkpoint import write
from gptlab.training.checkpoint.load import load_checkpoint
from gptlab.training.checkpoint.write import save_checkpoint

CANDIDATE = 2


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A lab with a measured baseline and one proposal that was timed."""
    lab = new_lab(tmp_path, seeds=1)
    with formula():
        measure_baseline(lab, quiet)
    submit(lab, Proposal({"model.activation": "gelu"}))
    lab.ledger.append("timed", experiment=CANDIDATE, speed=1.0, step_seconds=0.5, steps=80)
    return lab


def candidate(lab: Lab) -> Variant:
    experiments = lab.ledger.experiments()
    return variant_of(lab, experiments[CANDIDATE], experiments)


class Processes:
    """In the place of `supervise`: notes what is started, and ends as it is told."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        exit_code: int = 0,
        *,
        timed_out: bool = False,
        opened: tuple[str, ...] = (),
    ) -> None:
        self.started: list[dict[str, Any]] = []
        self.leave: Callable[[dict[str, Any]], object] = lambda process: None
        """What the process does in its folders."""
        monkeypatch.setattr(runs, "supervise", self._supervise)
        monkeypatch.setattr(runs, "start", self._start)
        self._ended = Finished(exit_code, 1.0, 1.0, 2**20, "wall_seconds" if timed_out else None, (), opened)

    def _supervise(self, argv: list[str], *, log: Path, **process: Any) -> Finished:
        self.started.append({"argv": argv, **process})
        log.write_text("step 1\ngptlab: error: out of luck\n")
        if self._ended.exit_code == 0:
            words = dict(word.split("=", 1) for word in argv if "=" in word)
            run = Path(words["--run-dir"] if "--run-dir" in words else argv[argv.index("--resume") + 1])
            run.mkdir(exist_ok=True)
            (run / "run.json").write_text(json.dumps({"status": "finished"}))
        self.leave(process)
        return self._ended

    @contextmanager
    def _start(self, argv: list[str], **process: Any) -> Iterator[Any]:
        self.started.append({"argv": argv, **process})
        yield SimpleNamespace(stop=lambda: None, finish=lambda: self._ended)
        self.leave(process)


def save(run: Path, weight: float, step: int = 80) -> Path:
    return save_checkpoint(run / "checkpoints", step, model={"w": torch.tensor([weight])}, optimizer={}, state={})


def _gone(question: bytes) -> None:
    raise BrokenPipeError


class TestTraining:
    def test_the_command(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        """The baseline's configuration, the lab's data, this seed and length, and the fields of the proposal."""
        processes = Processes(monkeypatch)
        runs.train(lab, candidate(lab), seed=7)
        [process] = processes.started
        words = process["argv"][3:]
        assert words[0] == "train"
        given = dict(word.split("=", 1) for word in words if "=" in word)
        assert given == {
            "--from": str(lab.path / "baseline"), "--steps": "80", "--seed": "7", "--model.activation": "gelu",
            "--data.source": str(lab.path / "data/tokens"), "--tokenizer.path": str(lab.path / "data/tokenizer"),
            "--run-dir": str(lab.experiment(CANDIDATE) / "work-seed-7/seed-7"),
        }  # fmt: skip
        assert process["limits"].wall_seconds == runs.LEAST_SECONDS + runs.SLOWER * 80 * 0.5

    def test_no_proposed_field_replaces_what_the_lab_decides(self, lab: Lab) -> None:
        variant = replace(candidate(lab), fields={"steps": 999, "seed": 9, "from": "elsewhere"})
        given = runs.arguments(lab, variant, seed=7, steps=80)
        assert (given["steps"], given["seed"], given["from"]) == (80, 7, str(lab.path / "baseline"))

    def test_it_sees_training_data_and_code_and_no_secrets(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SOMEBODYS_TOKEN", "secret")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/everybody")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        processes = Processes(monkeypatch)
        runs.train(lab, candidate(lab), seed=7)
        [process] = processes.started
        folder = lab.experiment(CANDIDATE)
        corpus, cache = (lab.path.parent / name for name in ("corpus", "cache"))
        assert {lab.path, corpus, cache} <= {*process["hidden"]}
        assert process["readable"] == [lab.path / "baseline", lab.path / "data", lab.path / "code"]
        assert process["writable"] == [folder / "work-seed-7", folder / "cache"]
        assert process["cwd"] == folder / "work-seed-7"
        assert process["environment"]["PYTHONPATH"] == str(lab.path / "code")
        assert process["environment"]["GPTLAB_CACHE"] == str(folder / "cache")
        assert process["environment"]["OMP_NUM_THREADS"] == "1"
        assert "SOMEBODYS_TOKEN" not in process["environment"]
        assert "TORCHINDUCTOR_CACHE_DIR" not in process["environment"], "compiled code is in its own cache"

    def test_one_that_was_stopped_is_resumed_and_a_finished_one_left_alone(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        processes = Processes(monkeypatch)
        run = runs.run_folder(lab, CANDIDATE, 7)
        began = lab.experiment(CANDIDATE) / "work-seed-7" / "seed-7"
        began.mkdir(parents=True)
        (began / "config.json").write_text(to_json(config_to_json(lab.run_config(7, 257))))
        (began / "run.json").write_text(json.dumps({"status": "preempted"}))
        resumed = runs.train(lab, candidate(lab), seed=7)
        assert processes.started[0]["argv"][3:] == ["train", "--resume", str(began), "--quiet"]
        assert resumed == Trained(run, Finished(0, 1.0, 1.0, 2**20, None, (), ()), resumed=True)
        assert (run / "config.json").is_file()
        assert not began.parent.exists()
        assert runs.train(lab, candidate(lab), seed=7) == resumed
        assert len(processes.started) == 1

    def test_what_a_run_cost_outlives_the_lab_and_no_run_is_without(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        processes = Processes(monkeypatch)
        trained = runs.train(lab, candidate(lab), seed=7)
        assert runs.train(lab, candidate(lab), seed=7) == trained
        assert (trained.finished.wall_seconds, trained.resumed) == (1.0, False)
        trained.run.with_name("seed-7.json").unlink()  # that of a lab that was killed before it wrote it
        assert runs.train(lab, candidate(lab), seed=7) == trained
        assert len(processes.started) == 2

    @pytest.mark.parametrize("status", ["running", "finished"])
    def test_one_that_began_where_the_lab_was_is_trained_anew(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch, status: str
    ) -> None:
        """Its data is not there any more, and its config.json names another tokenizer than the baseline's."""
        run = runs.run_folder(lab, CANDIDATE, 7)
        if status == "running":
            run = lab.experiment(CANDIDATE) / "work-seed-7" / "seed-7"
        run.mkdir(parents=True)
        (run / "config.json").write_text(to_json(config_to_json(lab.run_config(7, 257))))
        (run / "run.json").write_text(json.dumps({"status": status}))
        run.with_name("seed-7.json").write_text(json.dumps({"finished": {}}))
        moved = replace(lab, path=lab.path.rename(lab.path.with_name("moved")))
        processes = Processes(monkeypatch)
        assert not runs.train(moved, candidate(moved), seed=7).resumed
        [process] = processes.started
        assert "--resume" not in process["argv"]

    def test_what_one_process_of_changed_code_leaves_no_other_finds(
        self, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Weights that one trained off the clock, for the next to begin with, in a run or among compiled code."""
        built = lab.experiment(0) / "cache" / "kernel.so"
        built.parent.mkdir(parents=True)
        built.write_bytes(b"built")
        processes, variant = Processes(monkeypatch), replace(candidate(lab), code=tmp_path / "tree")

        def plant(process: dict[str, Any]) -> None:
            assert (Path(process["environment"]["GPTLAB_CACHE"]) / "kernel.so").read_bytes() == b"built"
            for folder in process["writable"]:
                assert not [*folder.rglob("planted")]
                (folder / "planted").touch()
            if printed := process.get("stderr"):
                assert os.fstat(printed.fileno()).st_size == 0
                os.write(printed.fileno(), b"planted\n")

        processes.leave = plant
        for seed in (7, 8):
            assert not runs.train(lab, variant, seed).resumed
        assert runs.train_again(lab, variant, 7, candidate=9) is not None
        for _ in range(2):
            with runs.steps_of(lab, variant, steps=80):
                pass
        assert (lab.experiment(CANDIDATE) / "timing.log").read_text() == "planted\n" * 2
        assert len(processes.started) == 5
        for process in processes.started:
            assert not [folder for folder in process["writable"] if folder.exists()]
        left = {path.name for path in lab.experiment(CANDIDATE).rglob("*") if path.is_file()}
        of_seeds = {f"seed-{seed}.{kind}" for seed in (7, 8) for kind in ("json", "log")}
        assert left <= {"overrides.json", "run.json", "again-for-9.log", "timing.log"} | of_seeds

    def test_a_timing_that_failed_for_an_empty_decoy_broke_a_rule(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Processes(monkeypatch, opened=("val.txt",))
        broken = pytest.raises(RuleError, match=r"the timing of its steps opened val\.txt")
        with broken, runs.steps_of(lab, candidate(lab), steps=80):
            raise ProcessFailedError("IndexError")

    def test_what_it_compiles_for_its_timing_is_kept_where_runs_are_compiled(
        self, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To compile again for each of them takes a GPU longer than a run of changed code may."""
        processes, variant = Processes(monkeypatch), replace(candidate(lab), code=tmp_path / "tree")
        processes.leave = lambda process: (Path(process["environment"]["GPTLAB_CACHE"]) / process["cwd"].name).touch()
        run = runs.run_folder(lab, 0, lab.settings.first_seed)
        run.mkdir(parents=True, exist_ok=True)
        (run / "run.json").write_text(json.dumps({"implementations": {"compile": "inductor"}}))
        with runs.steps_of(lab, variant, steps=80):
            pass
        runs.train(lab, variant, 7)
        [kept] = (lab.experiment(CANDIDATE) / "cache").iterdir()
        assert kept.name.startswith("work-timing-")

    def test_workers_time_a_baseline_at_one_time_in_folders_of_their_own(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        processes = Processes(monkeypatch)
        with runs.steps_of(lab, candidate(lab), steps=80):
            with runs.steps_of(lab, candidate(lab), steps=80):
                pass
            first, second = (process["cwd"] for process in processes.started)
            assert first.is_dir()
            assert not second.exists()
        assert not first.exists()

    def test_what_a_killed_timing_left_goes_with_the_next_look_at_its_experiment(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also of the baseline, which is timed in the folder of the experiment: other workers may be timing it now."""
        processes = Processes(monkeypatch)
        number, now = submit(lab, Proposal({"model.activation": "gelu"})), lab.experiment(0) / "work-timing-now"
        with runs.steps_of(lab, candidate(lab), steps=80, place=lab.experiment(number)):
            left = lab.experiment(number) / "work-timing-then"
            for folder in (left, now):
                shutil.copytree(processes.started[0]["cwd"], folder)
        places = []
        with formula() as patch:
            steps_of = runs.steps_of

            def noted(lab: Lab, variant: Variant, *given: Any, place: Path | None = None) -> Any:
                assert not left.exists()
                places.append(place or lab.experiment(variant.number))
                return steps_of(lab, variant, *given)

            patch.setattr(runs, "steps_of", noted)
            trial.finish(lab, number, quiet)
            assert places == [lab.experiment(number)] * 2
            assert now.is_dir()
            measure_baseline(lab, quiet)
            assert not now.exists()

    def test_a_killed_lab_leaves_no_run_in_the_way(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        left = lab.experiment(CANDIDATE) / "work-again-for-9" / "again-for-9" / "config.json"
        left.parent.mkdir(parents=True)
        left.touch()
        processes = Processes(monkeypatch)
        processes.leave = lambda process: left.unlink()  # which fails unless it is there
        with pytest.raises(FileNotFoundError):
            runs.train_again(lab, candidate(lab), 7, candidate=9)

    @pytest.mark.parametrize(
        ("weight", "manifest", "rule"),
        [(1.0, None, None), (2.0, None, "wall-clock"), (2.0, 1.0, "checkpoint"), (None, None, "checkpoint")],
    )
    def test_what_trains_again_for_its_time_must_end_with_its_weights(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch, weight: float | None, manifest: float | None, rule: str | None
    ) -> None:
        """Otherwise it may train off the clock the first time alone. It may lie in its manifest, or save nothing."""
        first = runs.run_folder(lab, CANDIDATE, 7)
        first.mkdir(parents=True)
        save(first, 1.0)

        def trains(process: dict[str, Any]) -> None:
            run = process["cwd"] / "again-for-2"
            if weight is not None:
                saved = save(run, weight)
            if manifest is not None:
                (saved / "manifest.json").write_bytes((save(lab.path, manifest) / "manifest.json").read_bytes())

        Processes(monkeypatch).leave = trains
        with nullcontext() if rule is None else pytest.raises(RuleError, match=f"^{rule}: "):
            runs.train_again(lab, candidate(lab), 7, candidate=CANDIDATE, same_as=first)
        assert [path.name for path in first.parent.iterdir() if path.is_dir()] == ["seed-7"]

    @pytest.mark.parametrize(("status", "steps"), [("running", 80), ("finished", 79), (None, 80)])
    def test_what_trains_again_for_its_time_must_finish(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch, status: str | None, steps: int
    ) -> None:
        """Otherwise its time is not that of a whole run."""
        first = runs.run_folder(lab, CANDIDATE, 7)
        first.mkdir(parents=True)
        for step in (steps, 80):
            save(first, 1.0, step)

        def trains(process: dict[str, Any]) -> None:
            save(run := process["cwd"] / "again-for-2", 1.0, steps)
            (run / "run.json").write_text(json.dumps({} if status is None else {"status": status}))

        Processes(monkeypatch).leave = trains
        with pytest.raises(RuleError, match=r"^checkpoint: "):
            runs.train_again(lab, candidate(lab), 7, candidate=CANDIDATE, same_as=first)

    @pytest.mark.parametrize("where", ["", "run.json", "checkpoints/step-00000080"])
    @pytest.mark.parametrize("exit_code", [0, 3])
    def test_a_link_leads_to_no_other_run(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch, where: str, exit_code: int
    ) -> None:
        """The lab would judge the weights of that run, and remove them when it forgets the experiment."""
        (other := lab.path / "other").mkdir()
        saved = save(other, 1.0)

        def plant(process: dict[str, Any]) -> None:
            link = process["cwd"] / "seed-7" / where
            shutil.rmtree(process["cwd"] / "seed-7", ignore_errors=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(other / where)

        Processes(monkeypatch, exit_code).leave = plant
        with pytest.raises(RuleError, match=r"^checkpoint: .* is not a regular file or folder$"):
            runs.train(lab, candidate(lab), seed=7)
        assert load_checkpoint(saved).model["w"] == 1.0
        folder = lab.experiment(CANDIDATE)
        assert not os.path.lexists(folder / "runs" / "seed-7")
        assert not (folder / "work-seed-7").exists()

    def test_a_link_that_a_killed_lab_left_is_removed(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        other = lab.path / "other"
        other.mkdir()
        (other / "config.json").write_text(to_json(config_to_json(lab.run_config(7, 257))))
        began = lab.experiment(CANDIDATE) / "work-seed-7" / "seed-7"
        began.parent.mkdir(parents=True)
        began.symlink_to(other)
        moved = replace(lab, path=lab.path.rename(lab.path.with_name("moved")))
        (moved.path.with_name("lab")).symlink_to(moved.path)
        Processes(monkeypatch)
        assert not runs.train(moved, candidate(moved), seed=7).resumed
        assert (moved.path / "other" / "config.json").is_file()

    def test_the_lab_may_write_in_every_folder_of_a_run(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise it could not keep the weights alone, nor remove them."""

        def close(process: dict[str, Any]) -> None:
            save(run := process["cwd"] / "seed-7", 1.0)
            for folder in (run / "checkpoints", run):
                folder.chmod(0o555)

        Processes(monkeypatch).leave = close
        run = runs.train(lab, candidate(lab), seed=7).run
        assert [folder.stat().st_mode & 0o777 for folder in (run, run / "checkpoints")] == [0o755] * 2

    def test_how_it_may_end(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        Processes(monkeypatch, exit_code=3)
        with pytest.raises(ProcessFailedError, match=r"^out of luck$") as crashed:
            runs.train(lab, candidate(lab), seed=7)
        Processes(monkeypatch, exit_code=-9, timed_out=True)
        with pytest.raises(ProcessFailedError, match="longer than 280 s") as late:
            runs.train(lab, candidate(lab), seed=7)
        assert (crashed.value.timed_out, late.value.timed_out) == (False, True)

    def test_of_what_a_candidate_printed_the_end_alone_is_read(self, lab: Lab, tmp_path: Path) -> None:
        """It may have printed more than memory holds."""
        log = tmp_path / "log.txt"
        log.write_text("error: long ago\n" + "noise\n" * LAST_BYTES + "the end\n")
        with log.open("rb") as printed:
            assert last_words(printed) == "the end"
            process = StepProcess(SimpleNamespace(stdin=SimpleNamespace(write=_gone)), printed, 1.0, 1.0)  # type: ignore[arg-type]
            with pytest.raises(ProcessFailedError, match=r"^the end$"):
                process.step()

    @pytest.mark.parametrize(
        ("start", "compiled", "run_seconds", "first", "longest"),
        [
            (5.0, False, 5.0, 120, 120), (5.0, False, 60.0, 240, 240), (5.0, False, 1e4, 900, 900),
            (30.0, False, 5.0, 300, 120), (200.0, False, 5.0, 900, 120), (5.0, True, 5.0, 900, 120),
        ],
    )  # fmt: skip
    def test_a_step_that_hangs_costs_no_more_than_some_runs(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch, start: float, compiled: bool, run_seconds: float, first: int,
        longest: int,
    ) -> None:  # fmt: skip
        """A start and the first step, which may compile, cost no more than ten starts of the baseline, where it does
        not."""
        Processes(monkeypatch)
        lab.ledger.append("timed", experiment=0, speed=1.0, step_seconds=0.1, steps=100, start_seconds=start)
        monkeypatch.setattr(runs, "_is_compiled", lambda lab: compiled)
        asked, (read, write) = [], os.pipe()
        answers = SimpleNamespace(
            stdin=SimpleNamespace(write=asked.append), stdout=os.fdopen(read, "rb", buffering=0),
            stop=lambda: None, finish=lambda: SimpleNamespace(opened=()),
        )  # fmt: skip
        monkeypatch.setattr(runs, "start", lambda argv, **process: nullcontext(answers))
        waits: list[float] = []
        monkeypatch.setattr(equal_time, "select", lambda *given: waits.append(given[3]) or given[:3])
        with answers.stdout, runs.steps_of(lab, candidate(lab), 80, run_seconds) as process:
            os.write(write, b"{}\n")
            process.ready()
            for _ in range(2):
                os.write(write, b"{}\n")
                process.step()
            os.close(write)
        assert [round(seconds) for seconds in waits] == [first, first, longest]

    def test_a_full_disk_is_not_the_candidates_fault(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        Processes(monkeypatch, exit_code=3)
        saved = runs.run_folder(lab, 0, 1) / "checkpoints" / "step-00000100" / "model.safetensors"
        saved.write_bytes(bytes(2**20))
        needed = runs._space_of_run(lab)
        assert 6 * 2**20 <= needed - runs.MIN_FREE_BYTES < 6.1 * 2**20
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
        with pytest.raises(UserError, match=r"has [0-9,]+ bytes left: free some space"):
            trial.finish(lab, CANDIDATE, quiet)
        assert trial.in_flight(lab) == [CANDIDATE]
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
        assert trial.finish(lab, CANDIDATE, quiet).says == "crashed"


def test_of_a_judged_run_the_weights_stay_alone(tmp_path: Path) -> None:
    weights, moments, state = {"w": torch.ones(3)}, {"w.mean": torch.ones(3)}, {"step": 80}
    saved = save_checkpoint(tmp_path / "checkpoints", 80, model=weights, optimizer=moments, state=state)
    before = load_checkpoint(saved)
    runs.drop_moments(tmp_path)
    after = load_checkpoint(saved)
    assert (after.step, after.state, after.optimizer) == (80, before.state, {})
    assert after.model["w"].tolist() == [1.0, 1.0, 1.0]
    assert (saved / "optimizer.safetensors").stat().st_size < 100


def test_a_state_that_cannot_be_saved_again_does_not_end_the_night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has numbers that no float is."""
    weights, moments = {"w": torch.ones(3)}, {"w.mean": torch.ones(3)}
    with monkeypatch.context() as patch:
        patch.setattr(write, "_state_text", lambda state: b'{"x": 1e999}')
        saved = save_checkpoint(tmp_path / "checkpoints", 80, model=weights, optimizer=moments, state={})
    runs.drop_moments(tmp_path)
    assert load_checkpoint(saved).model["w"].tolist() == [1.0, 1.0, 1.0]
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_the_judge_is_shown_where_the_baseline_stands(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nats of the baseline's run with the same seed and text, which audits look for gains over; and what it finds
    of this run is kept for the next."""
    asked: list[dict[str, Any]] = []

    def judge_run(run: Path, questions: Any, **given: Any) -> Any:
        asked.append({"run": run, "questions": questions, **given})
        return SimpleNamespace(nats=np.full(3, len(asked), np.float32))

    monkeypatch.setattr(runs, "judge_run", judge_run)
    experiments = lab.ledger.experiments()
    base = variant_of(lab, experiments[0], experiments)
    for variant, seed in ((base, 1), (candidate(lab), 1), (candidate(lab), 2)):
        run = runs.run_folder(lab, variant.number, seed)
        runs.judge(lab, variant, run, "validation", seed, against=0)
    first, second, third = asked
    assert first["baseline"].nats is None
    assert second["baseline"].nats.tolist() == [1.0, 1.0, 1.0]
    assert third["baseline"].nats is None, "the baseline has not run with seed 2"
    assert second["hidden"] == [lab.path, *(lab.path.parent / name for name in ("corpus", "cache"))]
    assert second["tree"] == lab.path / "code"
    assert second["cache"] == lab.experiment(0) / "cache", "that of a candidate may hold anything"
    _, targets = second["questions"].read(np.arange(second["questions"].count))
    assert (targets >= 0).sum() == lab.settings.validation_bytes["validation"]  # a byte a token
