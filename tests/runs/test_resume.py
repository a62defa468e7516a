"""A run that was killed, and resumed, is the run that was never killed: bit for bit, on the same machine."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    FakeClock,
    Outcome,
    arguments,
    command,
    differences,
    killed_at,
    make_config,
    outcome,
    start,
    train,
    write_bundle,
    write_corpus,
)

import gptlab
from gptlab.app.place import place_of
from gptlab.config.errors import UserError
from gptlab.runtime.records.metrics import read_metrics
from gptlab.runtime.hardware.rng import capture_rng, seed_everything
from gptlab.training.checkpoint.load import (
    Checkpoint,
    DamagedCheckpointError,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds one corpus, its prepared tokens, and every run of this file."""
    folder = tmp_path_factory.mktemp("resume")
    write_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Outcome:
    return outcome(train(folder, "uninterrupted"))


class TestKilledProcess:
    """The command line, in processes of their own that are killed without warning."""

    STEPS = 40

    def test_killed_twice_at_random_steps(self, folder: Path) -> None:
        changes = {"steps": self.STEPS, "model.dropout": 0.2}
        assert command(["train", *arguments(folder, "cli-whole", changes)])[0] == 0
        expected = outcome(folder / "cli-whole")
        last_step = [line for line in read_metrics(folder / "cli-whole/metrics.jsonl") if line["kind"] == "train"][-1]
        assert float(str(last_step["epoch"])) > 3, "the run must cross epoch boundaries"

        chance = random.Random(3)
        run = folder / "cli-killed"
        self.kill_after(["train", *arguments(folder, "cli-killed", changes)], run, chance.randrange(5, 14))
        self.kill_after(["train", "--resume", run], run, chance.randrange(16, 25))
        assert command(["train", "--resume", run])[0] == 0
        assert differences(expected, outcome(run)) == []

    def kill_after(self, argv: list[object], run: Path, step: int) -> None:
        """SIGKILL (TerminateProcess on Windows) as soon as a train line of `step` or later is to be seen."""
        process = start(argv)
        metrics = run / "metrics.jsonl"
        while process.poll() is None:
            if metrics.exists() and f'"train", "step": {step},' in metrics.read_text(encoding="utf-8"):
                process.kill()
                break
            time.sleep(0.002)
        output, _ = process.communicate()
        assert process.returncode != 0, output
        assert int(str(read_metrics(metrics)[-1]["step"])) < self.STEPS, "it was too late to kill"

    def test_killed_between_a_checkpoint_and_its_metrics_line(self, folder: Path, uninterrupted: Outcome) -> None:
        # os._exit runs no handler and flushes nothing, as a SIGKILL at this very place would.
        dies_at_step_8 = (
            "import os\n"
            "from gptlab.train import saving\n"
            "save = saving.save_checkpoint\n"
            "def save_and_die(folder, step, **parts):\n"
            "    save(folder, step, **parts)\n"
            "    if step == 8: os._exit(9)\n"
            "saving.save_checkpoint = save_and_die\n"
        )
        run = folder / "renamed"
        process = start(["train", *arguments(folder, "renamed")], prelude=dies_at_step_8)
        assert process.wait() == 9, process.communicate()[0]
        assert read_metrics(run / "metrics.jsonl")[-1]["kind"] == "train"
        assert list_checkpoints(run / "checkpoints")[-1].name == "step-00000008"
        assert command(["train", "--resume", run])[0] == 0
        assert differences(uninterrupted, outcome(run)) == []


@pytest.mark.parametrize(
    ("kind", "step", "before"),
    [
        ("eval", 0, False),  # nothing is saved yet: the run begins anew
        ("train", 3, False),
        ("checkpoint", 4, True),  # the first checkpoint stands, its line does not
        ("train", 5, False),
        ("eval", 6, False),  # evaluated, not sampled
        ("sample", 6, False),  # one of two samples made
        ("train", 12, False),  # the last step
        ("eval", 12, False),
        ("sample", 12, False),
        ("checkpoint", 12, True),
        ("checkpoint", 12, False),  # all done but the closing block
    ],
)
def test_killed_anywhere(folder: Path, uninterrupted: Outcome, kind: str, step: int, before: bool) -> None:
    name = f"{kind}-{step}-{before}"
    with killed_at(kind, step, before=before):
        train(folder, name)
    assert gptlab.train(resume=folder / name).exit_code == 0
    assert differences(uninterrupted, outcome(folder / name)) == []


VARIANTS: dict[str, dict[str, Any]] = {
    "adamw, random rows, gpt2 parts": {
        "optim__matrix_optimizer": "adamw", "data__rows": "random", "model__norm": "layernorm", "model__bias": True,
        "model__position": "learned", "model__activation": "gelu", "model__init": "gpt2", "model__tied_head": True,
        "schedule__kind": "cosine",
    },
    "newton-schulz, sequential rows, float64": {
        "optim__muon__orthogonalizer": "newton_schulz", "data__rows": "sequential", "runtime__dtype": "float64",
    },
    "cropped rows, bfloat16, one key-value head, plain Muon": {
        "data__long_documents": "crop", "runtime__dtype": "bfloat16", "model__n_kv_head": 1,
        "optim__muon__normuon_beta2": None, "optim__grad_clip": None,
    },
    "float16 with a loss scale": {"runtime__dtype": "float16"},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_twice_whatever_is_trained(folder: Path, variant: str) -> None:
    changes, name = VARIANTS[variant], variant.partition(",")[0]
    expected = outcome(train(folder, f"{name}-whole", **changes))
    with killed_at("train", 5):
        train(folder, name, **changes)
    with killed_at("train", 10):
        gptlab.train(resume=folder / name)
    assert gptlab.train(resume=folder / name).exit_code == 0
    assert differences(expected, outcome(folder / name)) == []


def test_killed_with_everything_due_by_the_clock(folder: Path) -> None:
    """A horizon in seconds is exact too, as far as the clock is: here it is one that the test turns."""
    changes: dict[str, Any] = {
        "minutes": 0.25, "eval__every_steps": None, "eval__every_seconds": 4.0, "checkpoint__every_steps": None,
        "checkpoint__every_seconds": 2.5, "schedule__warmup_fraction": 0.0,
    }  # fmt: skip

    place_of(make_config(folder, "clock"))  # The machine is measured by the true clock.
    with FakeClock.running():
        train(folder, "clock-whole", **changes)
    with FakeClock.running(), killed_at("train", 9):
        train(folder, "clock", **changes)
    with FakeClock.running():
        gptlab.train(resume=folder / "clock")
    assert (folder / "clock/metrics.jsonl").read_bytes() == (folder / "clock-whole/metrics.jsonl").read_bytes()
    assert differences(outcome(folder / "clock-whole"), outcome(folder / "clock")) == []
    # The seconds off the clock add up over both processes, with a warm-up in each.
    for run, processes in (("clock-whole", 1), ("clock", 2)):
        summary = json.loads((folder / run / "summary.json").read_text())
        parts = [summary[f"{part}_seconds"] for part in ("training", "compile", "evaluation", "checkpoint", "startup")]
        assert parts[:2] == [15.0, processes * FakeClock.WARM_UP]
        n_samples = sum(line["kind"] == "sample" for line in read_metrics(folder / run / "metrics.jsonl"))
        assert summary["total_seconds"] == sum(parts) + n_samples * FakeClock.SAMPLE


def test_damaged_checkpoint_falls_back_to_an_older_one(folder: Path, uninterrupted: Outcome) -> None:
    run = folder / "damaged"
    with killed_at("train", 9):
        train(folder, "damaged")
    weights = list_checkpoints(run / "checkpoints")[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    code, out, _ = command(["train", "--resume", run])
    assert code == 0
    assert "step-00000008 is damaged" in out
    assert differences(uninterrupted, outcome(run)) == []


def test_lost_checkpoints_are_no_reason_to_begin_anew(folder: Path) -> None:
    """Metrics that nobody can make again must not be cut off because somebody tidied up."""
    run = folder / "tidied"
    with killed_at("train", 9):
        train(folder, "tidied")
    before = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    code, _, err = command(["train", "--resume", run])
    assert code == 2
    assert "no checkpoint" in err
    assert (run / "metrics.jsonl").read_bytes() == before


@dataclass(frozen=True)
class Part:
    """One saved part, and a checkpoint as it would be if that part had been forgotten."""

    forget: Callable[[Checkpoint], Checkpoint]
    of_whole_run: bool = False
    """Forgotten in the last checkpoint, since only a run at its end still asks for it."""


def tensors(suffix: str) -> Part:
    def forget(saved: Checkpoint) -> Checkpoint:
        fresh = {name: torch.zeros_like(t) if name.endswith(suffix) else t for name, t in saved.optimizer.items()}
        assert any(not torch.equal(fresh[name], saved.optimizer[name]) for name in fresh), "there is nothing to forget"
        return replace(saved, optimizer=fresh)

    return Part(forget)


def weights() -> Part:
    return Part(lambda saved: replace(saved, model={n: torch.zeros_like(t) for n, t in saved.model.items()}))


def generator(name: str) -> Part:
    def forget(saved: Checkpoint) -> Checkpoint:
        seed_everything(99, CPU)
        return replace(saved, optimizer=saved.optimizer | {f"rng.{name}": capture_rng(CPU)[name]})

    return Part(forget)


def entry(path: str, initial: Any, *, of_whole_run: bool = False) -> Part:
    def forget(saved: Checkpoint) -> Checkpoint:
        return replace(saved, state=_with_entry(saved.state, path.split("."), initial))

    return Part(forget, of_whole_run)


def _with_entry(state: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    assert path[0] in state
    return {**state, path[0]: value if len(path) == 1 else _with_entry(state[path[0]], path[1:], value)}


PARTS = {
    "weights": weights(),
    "momentum": tensors(".momentum"),
    "second_moment": tensors(".second_moment"),
    "exp_avg": tensors(".exp_avg"),
    "exp_avg_sq": tensors(".exp_avg_sq"),
    # Named apart from the suffix of AdamW's counter: `residual_lambdas.step`, and so on.
    "adamw step": tensors(".step"),
    "rng.python": generator("python"),
    "rng.numpy": generator("numpy"),
    "rng.torch": generator("torch"),
    "train_seconds": entry("train_seconds", 0.0),
    "loss_ema": entry("loss_ema", {"sum": 0.0, "count": 0}),
    "faults": entry("faults", {"skipped": 0, "skipped_in_a_row": 0, "rewinds": 0, "good_step": None, "losses": []}),
    "loader": entry("loader", {"next_step": 0}),
    "optimizer": entry("optimizer", {}),
    "metrics_bytes": entry("metrics_bytes", 0),
    "log_bytes": entry("log_bytes", 0),
    "scheduled": entry("scheduled", False),
    "marks.evaluated": entry("marks.evaluated", None, of_whole_run=True),
    "marks.core_measured": entry("marks.core_measured", None, of_whole_run=True),
    "marks.sampled": entry("marks.sampled", None, of_whole_run=True),
    "marks.saved": entry("marks.saved", None, of_whole_run=True),
    "val_loss": entry("val_loss", None, of_whole_run=True),
    "val_bpb": entry("val_bpb", None, of_whole_run=True),
    "min_val_bpb": entry("min_val_bpb", None, of_whole_run=True),
    "core_metric": entry("core_metric", None, of_whole_run=True),
    "best": entry("best", None, of_whole_run=True),
    "best_saved": entry("best_saved", None, of_whole_run=True),
}


@pytest.fixture(scope="module")
def everything(folder: Path) -> dict[str, Any]:
    """What makes a run come to use each saved part."""
    bundle = write_bundle(folder / "bundle")
    return {
        "model__dropout": 0.0, "eval__core_every_steps": 6, "eval__core_dir": bundle, "faults__spike_factor": 50.0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def expected(folder: Path, everything: dict[str, Any]) -> Outcome:
    return outcome(train(folder, "parts-whole", **everything))


@pytest.fixture(scope="module")
def killed(folder: Path, everything: dict[str, Any]) -> dict[bool, Path]:
    """{of_whole_run: run folder}: one killed at step 9, one killed before its closing block."""
    for name, kind, step in (("parts-step", "train", 9), ("parts-end", "checkpoint", 12)):
        with killed_at(kind, step):
            train(folder, name, **everything)
    return {False: folder / "parts-step", True: folder / "parts-end"}


class TestEverySavedPartCounts:
    """Forget one part of a checkpoint, and the comparison of this file must notice.

    Without dropout here: dropout draws from a generator that each micro-batch seeds anew, by (seed, step, micro-batch),
    so behind a step with dropout torch's generator stands where that step put it, and what a checkpoint says about it
    cannot matter.
    """

    def resumed(self, killed: Path, to: Path, forget: Callable[[Checkpoint], Checkpoint]) -> Outcome:
        shutil.copytree(killed, to)
        saved = forget(load_checkpoint(list_checkpoints(to / "checkpoints")[-1]))
        save_checkpoint(to / "checkpoints", saved.step, model=saved.model, optimizer=saved.optimizer, state=saved.state)
        gptlab.train(resume=to)
        return outcome(to)

    @pytest.mark.parametrize("of_whole_run", [False, True])
    def test_nothing_forgotten(
        self, tmp_path: Path, expected: Outcome, killed: dict[bool, Path], of_whole_run: bool
    ) -> None:
        whole = self.resumed(killed[of_whole_run], tmp_path / "run", lambda saved: saved)
        assert differences(expected, whole) == []

    @pytest.mark.parametrize("name", PARTS)
    def test_forgotten(self, tmp_path: Path, expected: Outcome, killed: dict[bool, Path], name: str) -> None:
        part = PARTS[name]
        with pytest.raises(UserError) if name == "optimizer" else nullcontext():
            assert differences(expected, self.resumed(killed[part.of_whole_run], tmp_path / "run", part.forget))

    def test_another_step(self, killed: dict[bool, Path]) -> None:
        """Two files know the step, and so it is noticed before anything is resumed."""
        saved = load_checkpoint(list_checkpoints(killed[False] / "checkpoints")[-1])
        forgotten = entry("step", 0).forget(saved)
        folder = killed[False].parent / "another-step"
        path = save_checkpoint(folder, saved.step, model=saved.model, optimizer={}, state=forgotten.state)
        with pytest.raises(DamagedCheckpointError, match="of another step"):
            load_checkpoint(path)

    def test_the_list_is_complete(self, killed: dict[bool, Path]) -> None:
        saved = load_checkpoint(list_checkpoints(killed[False] / "checkpoints")[-1])
        entries = {name for name in saved.state if name != "marks"} | {f"marks.{name}" for name in saved.state["marks"]}
        # float16 has the scaler, see below; what off_clock holds is seconds, see the test with the test's own clock.
        # Of step see above, of run see test_identity.py, of implementations test_implementations.py.
        assert entries - {"scaler", "off_clock", "step", "run", "implementations"} <= PARTS.keys()
        kinds = {name if name.startswith("rng.") else name.rpartition(".")[2] for name in saved.optimizer}
        assert kinds - {"step"} <= PARTS.keys()

    def test_loss_scale(self, folder: Path, tmp_path: Path) -> None:
        changes = {"runtime__dtype": "float16", "steps": 9, "model__n_layer": 1}
        expected = outcome(train(folder, "scale-whole", **changes))
        with killed_at("train", 9):
            train(folder, "scale", **changes)
        forget = entry("scaler", {}).forget
        assert differences(expected, self.resumed(folder / "scale", tmp_path / "kept", lambda saved: saved)) == []
        assert differences(expected, self.resumed(folder / "scale", tmp_path / "run", forget))
