"""`--resume RUN --steps MORE`: a finished run trains on, and nothing of it is lost."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
from tiny_runs import arguments, command, differences, lines_of, outcome, train, write_corpus

from gptlab.app.run.run_request import RunRequest
from gptlab.config.errors import UserError
from gptlab.config.length import Horizon, HorizonUnit
from gptlab.config.recipes import RECIPES, configure
from gptlab.data.tokenizer import tokenizer
from gptlab.lab.experiments.runs import drop_moments
from gptlab.runtime.processes.liveness import Failure, PeerFailed
from gptlab.runtime.records.run_directory import RunDirectory

CONSTANT = {"schedule.warmup_fraction": 0.0, "schedule.warmdown_fraction": 0.0, "schedule.weight_decay_final": 1.0}
"""The same rates whatever the length, so that a run that trains on must be the longer run, bit for bit."""


def test_it_is_the_longer_run_bit_for_bit_where_the_schedule_allows(folder: Path) -> None:
    assert command(["train", *arguments(folder, "long", CONSTANT | {"steps": 10})])[0] == 0
    assert command(["train", *arguments(folder, "short", CONSTANT | {"steps": 5})])[0] == 0
    code, out, err = command(["train", "--resume", folder / "short", "--steps", "10"])
    assert (code, err) == (0, "")
    (said,) = [line for line in out.splitlines() if "training on from step 5" in line]
    assert said.startswith("warning: ")
    assert "to 10 steps (was 5 steps): the schedule is a new one, 50% of which is done" in said
    for kind, key in (("train", "loss"), ("train", "grad_norm")):
        long, short = ([line[key] for line in lines_of(folder / name, kind)] for name in ("long", "short"))
        assert short == long
    config = json.loads((folder / "short" / "config.json").read_text())
    assert config["horizon"]["amount"] == 10
    last = folder / "short" / "checkpoints" / "step-00000010" / "state.json"
    assert json.loads(last.read_text())["run"]["config"] == config
    (change,) = json.loads((folder / "short" / "run.json").read_text())["config_changes"]
    assert (change["step"], change["fields"]) == (5, {"horizon.amount": [5.0, 10.0]})
    assert json.loads((folder / "short" / "summary.json").read_text())["num_steps"] == 10
    code, out, _ = command(["train", "--resume", folder / "short"])
    assert code == 0
    assert f"is finished; to train it on: gptlab train --resume {folder / 'short'} --steps 20" in out


@pytest.mark.parametrize(
    ("recipe", "phase", "steps"),
    [("nanogpt/shakespeare-char-cpu", "warmup_fraction", 101), ("speedrun/muon-2024-10", "warmdown_fraction", 1800)],
)
def test_a_phase_that_its_recipe_counts_in_steps_keeps_their_number(recipe: str, phase: str, steps: int) -> None:
    run = configure(recipe, horizon=Horizon(amount=2 * steps, unit="steps"))
    request = RunRequest(overrides={"horizon.amount": 8.0 * steps, "horizon.unit": "steps"})
    assert getattr(request.with_length(run).schedule, phase) == 1 / 8
    changed = replace(run, schedule=replace(run.schedule, **{phase: 0.25}))
    assert request.with_length(changed).schedule == changed.schedule


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("unit", get_args(HorizonUnit))
def test_every_recipe_takes_another_length(recipe: str, unit: HorizonUnit) -> None:
    run, amount = configure(recipe), {"flops": 1e16, "tokens": 1e9}.get(unit, 500.0)
    longer = RunRequest(overrides={"horizon.amount": amount, "horizon.unit": unit}).with_length(run)
    assert longer.schedule == configure(recipe, horizon=Horizon(amount=amount, unit=unit)).schedule


def test_the_schedule_of_the_new_length_is_recorded(folder: Path) -> None:
    size = {"model.n_layer": 1, "model.n_embd": 32, "model.n_head": 1, "model.seq_len": 16, "batch.total_tokens": 64}
    fields = size | {"batch.micro_sequences": 4, "data.source": folder / "corpus", "eval.tokens": 64, "steps": 101}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
    run = folder / "nanogpt"
    start = ["train", "nanogpt/shakespeare-char-cpu", *words, "--eval.train-tokens=none", f"--run-dir={run}"]
    assert command(start)[0] == 0
    assert command(["train", "--resume", run, "--steps", "104"])[0] == 0
    (change,) = json.loads((run / "run.json").read_text())["config_changes"]
    assert change["fields"] == {"horizon.amount": [101.0, 104.0], "schedule.warmup_fraction": [1.0, 101 / 104]}
    assert command(["train", "--resume", run])[0] == 0
    assert command(["train", "--from", run, "--steps", "202", "--eval.only", "--run-dir", folder / "again"])[0] == 0
    assert json.loads((folder / "again" / "config.json").read_text())["schedule"]["warmup_fraction"] == 0.5


def test_what_is_no_longer_is_refused(folder: Path) -> None:
    run = train(folder, "done", steps=4)
    before = {path: path.read_bytes() for path in run.rglob("*.json")}
    code, _, err = command(["train", "--resume", run, "--steps", "3"])
    assert code == 2
    assert "3 steps is no more than the run has trained already (4 steps" in err
    code, _, err = command(["train", "--resume", run, "--steps", "8", "--seed", "3"])
    assert code == 2
    assert "another configuration: seed: 1337 vs 3; leave it out" in err  # the length is no part of what is wrong
    assert "which fields may be given, such as checkpoint.every_steps and faults.max_rewinds, is in docs/con" in err
    code, _, err = command(["train", "--resume", run, "--until-val-loss", "50"])
    assert code == 2
    assert {path: path.read_bytes() for path in before if ".lock" not in path.name} == before


def test_a_run_of_a_lab_has_nothing_to_train_on_with(folder: Path) -> None:
    tokens = write_corpus(folder / "lab" / "data" / "tokens")
    (folder / "lab" / "lab.json").touch()
    never = {"eval__every_steps": "none", "eval__at_end": "false"}
    run = train(folder, "judged", steps=2, data__source=[tokens], **never)
    drop_moments(run)
    before = (run / "config.json").read_bytes()
    code, out, _ = command(["train", "--resume", run])
    assert (code, out.startswith(f"{run} is finished\n")) == (0, True)
    code, _, err = command(["train", "--resume", run, "--steps", "4"])
    assert (code, err.count("\n")) == (2, 1)
    assert f"step-00000002 has no optimizer state, as a lab keeps none: train again with --from {run}, or " in err
    assert (run / "config.json").read_bytes() == before


def test_a_run_that_is_not_finished_keeps_its_length(folder: Path) -> None:
    run = train(folder, "unfinished", steps=4)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"status": "preempted"}))
    code, _, err = command(["train", "--resume", run, "--steps", "8"])
    assert code == 2
    assert "another configuration: horizon.amount" in err
    assert "a finished run may be given another length" in err


def test_a_finished_run_gets_back_its_tokenizer(folder: Path) -> None:
    run = train(folder, "tokenizer", steps=2)
    before = outcome(run)
    shutil.rmtree(run / "tokenizer")
    code, out, _ = command(["train", "--resume", run])
    assert (code, "written again" in out) == (0, True)
    assert command(["eval", run])[0] == 0
    assert differences(before, outcome(run)) == []


def test_a_run_keeps_its_tokenizer_where_another_would_be_learned(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another version of gptlab, or of the library that learns merges."""
    bpe: dict[str, Any] = {"tokenizer.kind": "bpe", "tokenizer.vocab_size": 280, "data.cache_dir": tmp_path}
    assert command(["train", *arguments(folder, "merges", CONSTANT | bpe | {"steps": 4})])[0] == 0
    assert command(["train", *arguments(folder, "more-merges", CONSTANT | bpe | {"steps": 8})])[0] == 0
    shutil.rmtree(tmp_path)
    train_bpe = tokenizer.train_bpe
    monkeypatch.setattr(
        tokenizer, "train_bpe", lambda config, texts, *more: train_bpe(config, [text[::-1] for text in texts], *more)
    )
    code, _, err = command(["train", "--resume", folder / "merges", "--steps", "8"])
    assert (code, err) == (0, "")
    losses = [[line["loss"] for line in lines_of(folder / name, "train")] for name in ("merges", "more-merges")]
    assert losses[0] == losses[1]


def test_a_run_whose_corpus_was_moved(folder: Path) -> None:
    """Fields that do not change what is trained may be given again."""
    run = train(folder, "moved", steps=2, data__cache_dir=str(folder / "cache-of-moved"))
    (folder / "corpus").rename(folder / "elsewhere")
    shutil.rmtree(folder / "cache-of-moved")
    try:
        for words in (["--resume", run, "--steps", "4"], ["--from", run]):
            code, _, err = command(["train", *words])
            assert (code, err.count("\n"), "no corpus" in err) == (2, 1, True)
            assert err.endswith("; if the run's corpus was moved, --data or --data.val-source says where it is\n")
        words = ["--data", folder / "elsewhere", "--checkpoint.keep-last", "1"]
        code, _, err = command(["train", "--resume", run, "--steps", "4", *words])
        assert (code, err) == (0, "")
        assert len([*(run / "checkpoints").iterdir()]) == 1
    finally:
        (folder / "elsewhere").rename(folder / "corpus")


def test_the_command_that_trains_on_a_run_with_a_loss_to_reach(folder: Path) -> None:
    run = folder / "reached"
    words = arguments(folder, "reached", {"steps": 6, "eval.every-steps": 2})
    code, out, _ = command(["train", *words, "--until-val-loss", "50"])
    assert code == 0
    (line,) = [line for line in out.splitlines() if "train it on:" in line]
    assert line.endswith(f"train --resume {run} --steps 12 --until-val-loss none")
    assert command(["train", *shlex.split(line[line.index("--resume") :])])[0] == 0


def test_a_run_that_does_not_validate_on_the_way_has_no_loss_to_reach(folder: Path) -> None:
    """The remedy that it named was refused too."""
    run = train(folder, "blind", steps=2, eval__every_steps=None)
    for words in ([], ["--eval.every-steps", "1"]):
        code, _, err = command(["train", "--resume", run, "--until-val-loss", "5", *words])
        said = f"{run} does not validate on the way, so it cannot stop at a loss: train it again with --from {run} "
        assert (code, err) == (2, f"gptlab: error: {said}--until-val-loss 5 --eval.every-steps N\n")
    again = ["--until-val-loss", "5", "--eval.every-steps", "1", "--run-dir", folder / "sees"]
    assert command(["train", "--from", run, *again])[0] == 0


def test_a_run_that_only_validates(folder: Path) -> None:
    run = folder / "only"
    assert command(["train", *arguments(folder, "only"), "--eval.only"])[0] == 0
    assert "no checkpoint yet: it only validates" in command(["eval", run])[2]
    code, _, err = command(["train", "--resume", run, "--steps", "9"])
    assert (code, f"only validates: to train, gptlab train --from {run} --eval.no-only" in err) == (2, True)
    again = ["train", "--from", run, "--eval.no-only", "--steps", "2", "--run-dir", folder / "trained"]
    assert command(again)[0] == 0
    assert json.loads((folder / "trained" / "summary.json").read_text())["num_steps"] == 2


@pytest.mark.parametrize("words", [["--steps", "4"], ["--resume-from-step", "1"]])
def test_a_signal_or_a_lost_rank_before_it_trains_on_leaves_it_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """It became a preempted run of the old length, which the same command was refused for."""
    run = train(folder, f"early{words[0]}", steps=2, checkpoint__every_steps=1, checkpoint__keep_last=9)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def lost(*args: object, **also: object) -> None:
        raise PeerFailed(Failure(1, 3, "rank 1 died", said_by_itself=False))

    with monkeypatch.context() as patch:
        patch.setattr("gptlab.app.run.session.build_state", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
        code, out, _ = command(["train", "--resume", run, *words])
        said = f"SIGTERM: stopped while preparing; {run} is unchanged: the same command continues it"
        assert (code, out.splitlines()[-1]) == (75, said)
        patch.setattr("gptlab.app.run.session.build_state", lost)
        assert command(["train", "--resume", run, *words])[0] == 3
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert command(["train", "--resume", run, *words])[0] == 0
    assert json.loads((run / "summary.json").read_text())["num_steps"] == (4 if words[0] == "--steps" else 2)


@pytest.mark.parametrize("place", ["gptlab.app.run.run_session._warm_up", "gptlab.training.state.TrainState.restore"])
@pytest.mark.parametrize("words", [["--steps", "4"], ["--resume-from-step", "1"]])
def test_what_ends_it_while_it_gets_ready_leaves_it_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], place: str
) -> None:
    """It had failed then, or was preempted, at a length that it was never trained to and that nothing could undo; later
    checkpoints were aside."""
    run = train(folder, f"ready{words[0]}{place}", steps=2, checkpoint__every_steps=1, checkpoint__keep_last=9)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(place, Mock(side_effect=UserError("no compiler")))
        assert command(["train", "--resume", run, *words])[0] == 2
        patch.setattr(place, lambda *_: signal.raise_signal(signal.SIGTERM))
        code, out, _ = command(["train", "--resume", run, *words])
        said = f"SIGTERM: stopped while preparing; {run} is unchanged: the same command continues it"
        assert (code, out.splitlines()[-1]) == (75, said)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert command(["train", "--resume", run])[0] == 0
    assert command(["train", "--resume", run, *words])[0] == 0


def test_an_unfinished_run_whose_warm_up_fails_has_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left as running, a job script would queue it again and again (docs/cluster.md)."""
    run = train(folder, "killed", steps=2)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"status": "running"}))
    monkeypatch.setattr("gptlab.app.run.run_session._warm_up", Mock(side_effect=UserError("no compiler")))
    assert command(["train", "--resume", run])[0] == 2
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], record["failure"]["reason"]) == ("failed", "no compiler")


def test_what_fails_right_after_it_has_its_new_length_is_continued(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was finished then, at a length that it had never been trained to."""
    run = train(folder, "between", steps=2)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"end": "2026-01-01T00:00:00+00:00"}))
    with monkeypatch.context() as patch:
        full = Mock(side_effect=UserError("No space left on device"))
        patch.setattr(RunDirectory, "set_status", full)
        assert command(["train", "--resume", run, "--steps", "4"])[0] == 2
    assert command(["train", "--resume", run, "--steps", "4"])[0] == 0
    assert json.loads((run / "summary.json").read_text())["num_steps"] == 4


def test_a_signal_once_it_has_its_new_length_is_continued_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(folder, "later", steps=2)
    with monkeypatch.context() as patch:
        patch.setattr("gptlab.app.run.earlier_run._record_resume", lambda *_: signal.raise_signal(signal.SIGTERM))
        code, out, _ = command(["train", "--resume", run, "--steps", "4"])
    assert (code, out.splitlines()[-1].partition(";")[0]) == (75, "SIGTERM: stopped before the first step")
    assert command(["train", "--resume", run])[0] == 0
    assert json.loads((run / "summary.json").read_text())["num_steps"] == 4
