"""A run that was killed, and resumed, is the run that was never killed: bit for bit, on the same machine."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
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
)

import gptlab
from gptlab.config.errors import UserError
from gptlab.runtime.hardware import place as place_module
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.hardware.rng import capture_rng, seed_everything
from gptlab.runtime.records.metrics import read_metrics
from gptlab.training.checkpoint.format import DamagedCheckpointError
from gptlab.training.checkpoint.load import Checkpoint, load_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.write import save_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Outcome:
    return outcome(train(folder, "uninterrupted", model__n_layer=2))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_process_that_is_killed(folder: Path) -> None:
    """The command line, in a process of its own, at a random step beyond two epochs, of about four steps each."""
    run, flags = folder / "cli-killed", {"steps": 14, "eval.every_steps": 7, "checkpoint.every_steps": 4}
    flags |= {"batch.micro_sequences": 8, "batch.total_tokens": 2 * 8 * 32}
    expected = outcome(train(folder, "cli-whole", **{name.replace(".", "__"): value for name, value in flags.items()}))
    last = json.loads([line for line in expected.lines if '"kind": "train"' in line][-1])
    assert last["epoch"] > 3, "the run must cross epoch boundaries"

    seen = f'"train", "step": {random.Random(3).randrange(9, 12)},'
    process = start(["train", *arguments(folder, run.name, flags)])
    while process.poll() is None:
        if (run / "metrics.jsonl").exists() and seen in (run / "metrics.jsonl").read_text(encoding="utf-8"):
            process.kill()
            break
        time.sleep(0.002)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, f"it was too late to kill: {output}"
    assert command(["train", "--resume", run])[0] == 0
    assert differences(expected, outcome(run)) == []


def test_killed_anywhere_again_and_again(folder: Path, uninterrupted: Outcome) -> None:
    """One run that is killed right after each of these lines, or before it, in turn."""
    run = folder / "again-and-again"
    for kind, step, before in [
        ("eval", 0, False),  # nothing is saved yet: the run starts from scratch
        ("checkpoint", 4, True),  # the first checkpoint is complete, its line is missing
        ("train", 5, False),
        ("eval", 6, False),  # evaluated, not sampled
        ("sample", 6, False),  # one of two samples made
        ("train", 12, False),  # the last step
        ("sample", 12, False),
        ("checkpoint", 12, True),
        ("checkpoint", 12, False),  # all done but the closing block
    ]:
        with killed_at(kind, step, before=before):
            if run.exists():
                gptlab.train(resume=run)
            else:
                train(folder, run.name, model__n_layer=2)
    assert gptlab.train(resume=run).exit_code == 0
    assert differences(uninterrupted, outcome(run)) == []


SHORT: Mapping[str, Any] = {"steps": 3, "checkpoint__every_steps": 2}
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
def test_killed_whatever_is_trained(folder: Path, variant: str) -> None:
    changes, name = VARIANTS[variant] | SHORT, variant.partition(",")[0]
    expected = outcome(train(folder, f"{name}-whole", **changes))
    with killed_at("train", 3):
        train(folder, name, **changes)
    assert gptlab.train(resume=folder / name).exit_code == 0
    assert differences(expected, outcome(folder / name)) == []


def test_the_dtype_that_was_timed_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` is the dtype of the faster products. Where they are about as fast, a second timing could find the other:
    a run keeps its dtype when it is resumed, repeated or evaluated."""

    def time(bfloat16_is_faster: bool) -> None:
        monkeypatch.setattr(place_module, "_is_faster_in_bfloat16", lambda device: bfloat16_is_faster)

    flags: dict[str, Any] = {"runtime__dtype": "auto", "runtime__device": "cpu", **SHORT}
    time(bfloat16_is_faster=True)
    expected = outcome(train(folder, "timed-whole", **flags))
    with killed_at("train", 3):
        train(folder, "timed", **flags)
    time(bfloat16_is_faster=False)
    for goes_on in (["--resume", folder / "timed"], ["--from", folder / "timed-whole", "--run-dir", folder / "again"]):
        code, out, _ = command(["train", *goes_on])
        assert (code, out.count("warning")) == (0, 0)
    assert differences(expected, outcome(folder / "timed")) == []
    assert differences(expected, outcome(folder / "again")) == []
    val_bpb = json.loads((folder / "timed/summary.json").read_text())["val_bpb"]
    assert json.loads(command(["eval", folder / "timed", "--json"])[1])["val_bpb"] == val_bpb
    # Another kind of processor times its own.
    record = json.loads((folder / "timed/run.json").read_text())
    (folder / "timed/run.json").write_text(json.dumps(record | {"cpu": "another", "resumes": []}))
    assert json.loads(command(["eval", folder / "timed", "--json"])[1])["val_bpb"] != val_bpb


def test_killed_with_everything_due_by_the_clock(folder: Path) -> None:
    """A horizon in seconds is exact too, as far as the clock is: here it is one that the test turns."""
    changes: dict[str, Any] = {
        "minutes": 0.15, "eval__every_steps": None, "eval__every_seconds": 4.0, "sample__every_steps": None,
        "sample__every_seconds": 3.0, "checkpoint__every_steps": None, "checkpoint__every_seconds": 2.5,
        "schedule__warmup_fraction": 0.0,
    }  # fmt: skip

    place_of(make_config(folder, "clock"))  # The machine is measured by the true clock.
    with FakeClock.running():
        train(folder, "clock-whole", **changes)
    with FakeClock.running(), killed_at("train", 7):
        train(folder, "clock", **changes)
    with FakeClock.running():
        gptlab.train(resume=folder / "clock")
    assert (folder / "clock/metrics.jsonl").read_bytes() == (folder / "clock-whole/metrics.jsonl").read_bytes()
    assert differences(outcome(folder / "clock-whole"), outcome(folder / "clock")) == []
    # The seconds off the clock add up over both processes, with a warm-up in each.
    for run, processes in (("clock-whole", 1), ("clock", 2)):
        summary = json.loads((folder / run / "summary.json").read_text())
        parts = [summary[f"{part}_seconds"] for part in ("training", "compile", "evaluation", "checkpoint", "startup")]
        assert parts[:2] == [9.0, processes * FakeClock.WARM_UP]
        n_samples = sum(line["kind"] == "sample" for line in read_metrics(folder / run / "metrics.jsonl"))
        assert summary["total_seconds"] == sum(parts) + n_samples * FakeClock.SAMPLE


def test_damaged_checkpoint_falls_back_to_an_older_one(folder: Path, uninterrupted: Outcome) -> None:
    run = folder / "damaged"
    with killed_at("train", 9):
        train(folder, "damaged", model__n_layer=2)
    weights = list_checkpoints(run / "checkpoints")[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    code, out, _ = command(["train", "--resume", run])
    assert code == 0
    assert "step-00000008 is damaged" in out
    assert differences(uninterrupted, outcome(run)) == []


def test_a_damaged_checkpoint_takes_no_intact_ones_place(folder: Path) -> None:
    """Its size is right, and the resumed run does not save it again: nothing but the load has found that out."""
    run = folder / "passed-over"
    with killed_at("train", 10):
        train(folder, "passed-over", checkpoint__every_steps=3, checkpoint__keep_last=2, checkpoint__keep_best=False)
    weights = run / "checkpoints" / "step-00000009" / "model.safetensors"
    damaged = weights.read_bytes()[:-1] + b"?"
    weights.write_bytes(damaged)
    assert command(["train", "--resume", run, "--checkpoint.every-steps", "4"])[0] == 0
    assert [path.name[-2:] for path in list_checkpoints(run / "checkpoints")] == ["08", "09", "12"]
    assert weights.read_bytes() == damaged


def test_a_damaged_checkpoint_that_is_saved_again_counts_again(folder: Path) -> None:
    run = folder / "saved-again"
    train(folder, "saved-again", checkpoint__keep_last=2, checkpoint__keep_best=False)
    weights = run / "checkpoints" / "step-00000012" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert command(["train", "--resume", run, "--checkpoint.keep-last", "1"])[0] == 0
    assert [path.name[-2:] for path in list_checkpoints(run / "checkpoints")] == ["12"]


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


Forget = Callable[[Checkpoint], Checkpoint]
"""A checkpoint as it would be if one of its parts had been forgotten."""


def tensors(suffix: str) -> Forget:
    def forget(saved: Checkpoint) -> Checkpoint:
        fresh = {name: torch.zeros_like(t) if name.endswith(suffix) else t for name, t in saved.optimizer.items()}
        assert any(not torch.equal(fresh[name], saved.optimizer[name]) for name in fresh), "there is nothing to forget"
        return replace(saved, optimizer=fresh)

    return forget


def generator(saved: Checkpoint) -> Checkpoint:
    seed_everything(99, CPU)
    return replace(saved, optimizer=saved.optimizer | {"rng.torch": capture_rng(CPU)["torch"]})


def entry(path: str, initial: Any) -> Forget:
    return lambda saved: replace(saved, state=_with_entry(saved.state, path.split("."), initial))


def _with_entry(state: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    assert path[0] in state
    return {**state, path[0]: value if len(path) == 1 else _with_entry(state[path[0]], path[1:], value)}


PARTS = {
    "momentum": tensors(".momentum"),
    "rng.torch": generator,
    "train_seconds": entry("train_seconds", 0.0),
    "optimizer": entry("optimizer", {}),
}
"""One of each kind. test_saved_parts.py (`make test-faults`) finds every part and removes each in turn."""


class TestSavedPartsCount:
    """Forget one part of a checkpoint, and the comparison of this file must notice.

    Without dropout here: dropout draws from a generator that each micro-batch seeds by (seed, step, micro-batch), so
    after a step with dropout the state of torch's generator is that step's own, and what a checkpoint says about it
    cannot matter.
    """

    PLAIN: Mapping[str, Any] = {"model__dropout": 0.0, **SHORT}

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, folder: Path) -> Outcome:
        place_of(make_config(folder, "parts-whole"))  # The machine is measured by the true clock.
        with FakeClock.running():  # a forgotten clock shows, however busy the machine is
            return outcome(train(folder, "parts-whole", **cls.PLAIN))

    @pytest.fixture(scope="class")
    @classmethod
    def killed(cls, folder: Path) -> Path:
        with FakeClock.running(), killed_at("train", 3):
            train(folder, "parts", **cls.PLAIN)
        return folder / "parts"

    def resumed(self, killed: Path, to: Path, forget: Forget = lambda saved: saved) -> Outcome:
        shutil.copytree(killed, to)
        saved = forget(load_checkpoint(list_checkpoints(to / "checkpoints")[-1]))
        save_checkpoint(to / "checkpoints", saved.step, model=saved.model, optimizer=saved.optimizer, state=saved.state)
        gptlab.train(resume=to)
        return outcome(to)

    def test_nothing_forgotten(self, tmp_path: Path, expected: Outcome, killed: Path) -> None:
        with FakeClock.running():
            assert differences(expected, self.resumed(killed, tmp_path / "run")) == []

    @pytest.mark.parametrize("name", PARTS)
    def test_forgotten(self, tmp_path: Path, expected: Outcome, killed: Path, name: str) -> None:
        with FakeClock.running(), pytest.raises(UserError) if name == "optimizer" else nullcontext():
            assert differences(expected, self.resumed(killed, tmp_path / "run", PARTS[name]))

    def test_another_step(self, killed: Path) -> None:
        """Two files know the step, and so it is noticed before anything is resumed."""
        saved = load_checkpoint(list_checkpoints(killed / "checkpoints")[-1])
        forgotten = entry("step", 0)(saved)
        folder = killed.parent / "another-step"
        path = save_checkpoint(folder, saved.step, model=saved.model, optimizer={}, state=forgotten.state)
        with pytest.raises(DamagedCheckpointError, match="of another step"):
            load_checkpoint(path)

    def test_loss_scale(self, folder: Path, tmp_path: Path) -> None:
        changes = {"runtime__dtype": "float16", **SHORT}
        expected = outcome(train(folder, "scale-whole", **changes))
        with killed_at("train", 3):
            train(folder, "scale", **changes)
        assert differences(expected, self.resumed(folder / "scale", tmp_path / "kept")) == []
        assert differences(expected, self.resumed(folder / "scale", tmp_path / "run", entry("scaler", {})))

        def as_before(saved: Checkpoint) -> Checkpoint:
            """As earlier versions saved it, by GradScaler."""
            return entry("scaler", torch.amp.GradScaler("cpu").state_dict() | saved.state["scaler"])(saved)

        assert differences(expected, self.resumed(folder / "scale", tmp_path / "older", as_before)) == []
