"""`--resume RUN --resume-from-step N`: the same steps once more, and nothing of what came after N is lost."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tiny_runs import arguments, command, differences, killed_at, outcome, train, write_corpus
from torch.distributed import TCPStore

from gptlab.runtime.processes import torch_group
from gptlab.runtime.processes.torch_group import TorchrunJob
from gptlab.training.checkpoint.load import verify_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints


def test_it_is_the_same_run_again_and_what_was_there_is_set_aside(folder: Path) -> None:
    run = train(folder, "run", checkpoint__keep_last=9)  # 12 steps, saved at 4, 8 and 12
    before = outcome(run)
    kept = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "log.txt", "summary.json", "run.json")}
    code, out, err = command(["train", "--resume", run, "--resume-from-step", "4"])
    assert (code, err) == (0, "")
    (said,) = [line for line in out.splitlines() if "back to step 4" in line]
    assert said.startswith("warning: ")
    assert "later steps (8, 12)" in said
    assert said.endswith(f"are in {run / 'set-aside-1'}")
    assert differences(before, outcome(run)) == []
    aside = run / "set-aside-1"
    assert {name: (aside / name).read_bytes() for name in kept} == kept
    assert [path.name for path in list_checkpoints(aside / "checkpoints")] == ["step-00000008", "step-00000012"]
    for path in list_checkpoints(aside / "checkpoints"):
        verify_checkpoint(path)
    assert command(["train", "--resume", run, "--resume-from-step", "8"])[0] == 0
    assert [path.name for path in list_checkpoints(run / "set-aside-2" / "checkpoints")] == ["step-00000012"]
    assert differences(before, outcome(run)) == []


def test_a_refusal_changes_nothing(tmp_path: Path) -> None:
    """The data is found to be another one only after the checkpoint was loaded."""
    write_corpus(tmp_path / "corpus")
    run = train(tmp_path, "run", checkpoint__keep_last=9, steps=8)
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    write_corpus(tmp_path / "more", documents=21).joinpath("documents.jsonl").replace(
        tmp_path / "corpus/documents.jsonl"
    )
    code, out, err = command(["train", "--resume", run, "--resume-from-step", "4"])
    assert (code, "back to step" in out) == (2, False)
    assert f"the data is not what {run} was trained on" in err
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before


def test_a_step_that_is_not_there_is_refused_and_nothing_moves(folder: Path) -> None:
    run = train(folder, "other", steps=8)
    there = sorted(path.name for path in run.iterdir())
    code, _, err = command(["train", "--resume", run, "--resume-from-step", "5"])
    assert code == 2
    assert "no checkpoint of step 5" in err
    assert "(steps there: 4, 8)" in err
    assert sorted(path.name for path in run.iterdir()) == there
    code, _, err = command(["train", "quickstart", "--resume-from-step", "5"])
    assert (code, err) == (2, "gptlab: error: --resume-from-step needs --resume RUN, the run to continue\n")


def test_torchrun_restarts_it_from_its_newest_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It went back again after each lost process."""
    run = train(folder, "restarted", checkpoint__keep_last=9)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(torch_group, "torchrun_job", lambda: TorchrunJob(store))
    back = ["train", "--resume", run, "--resume-from-step", "4"]
    with killed_at("train", 10):
        command(back)
    code, out, _ = command(back)
    assert (code, f"restarted by torchrun: resuming {run}" in out, "back to step" in out) == (0, True, False)
    assert not (run / "set-aside-2").exists()


def test_a_signal_that_comes_early_after_a_restart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is the job's from the beginning."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(torch_group, "torchrun_job", lambda: TorchrunJob(store))
    run = folder / "early"
    with killed_at("train", 5):
        command(["train", *arguments(folder, run.name)])
    with monkeypatch.context() as patch:
        patch.setattr("gptlab.app.run.session.build_state", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
        code, out, _ = command(["train", *arguments(folder, run.name)])
    said = f"SIGTERM: stopped before the first step; resume with gptlab train --resume {run}"
    assert (code, out.splitlines()[-1]) == (75, said)
    assert json.loads((run / "run.json").read_text())["status"] == "preempted"
