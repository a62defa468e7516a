"""What happens before data is prepared: the GPU that will not be used, the size."""

from __future__ import annotations

import io
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_runs as tiny
import torch

from gptlab.app import sizing
from gptlab.app.commands import next_commands
from gptlab.app.run import run_session, session, train_run
from gptlab.app.run.attempt import Attempt
from gptlab.app.run.run_request import RunRequest
from gptlab.app.run.run_session import describe
from gptlab.app.run.train_run import _configured
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.lab import launch
from gptlab.runtime.hardware import installed
from gptlab.runtime.processes.distributed import Group, World, apart
from gptlab.runtime.processes.liveness import Failure
from gptlab.runtime.processes.own_python import own_python
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.run_directory import RunDirectory


@pytest.mark.parametrize(("most", "rate"), [(None, 3e14), (5e12, 3e14), (5e14, None)])
def test_a_gpu_trains_four_epochs_of_the_text_that_was_prepared(
    most: float | None, rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are timed unless a tenth of the rate that is assumed of the GPU would be enough for these epochs."""
    prepared: list[RunConfig] = []

    def prepare(config: RunConfig, *rest: object) -> Any:
        prepared.append(config)
        return SimpleNamespace(train=SimpleNamespace(n_tokens=10_000_000))

    def timed(config: RunConfig, *rest: object) -> Machine:  # the text is known to be Python's, about
        return Machine(device="cuda:0", flops_per_second=3e14, training_tokens=8_600_000)

    monkeypatch.setattr(sizing, "prepared", prepare)
    monkeypatch.setattr(sizing, "timed_machine", timed)
    limit = Machine(
        device="cuda:0", flops_per_second=None, most_flops_per_second=most, training_tokens=8_600_000 if most else None
    )
    monkeypatch.setattr(sizing, "limited_machine", lambda *_: limit)
    monkeypatch.setattr(sizing, "place_of", lambda *_: None)
    with Console() as console:
        config, machine = _configured(Attempt(console, ["gptlab"], 0.0), RunRequest())
    assert len(prepared) == 1
    assert machine is not None
    assert (machine.flops_per_second, machine.training_tokens) == (rate, 10_000_000)
    assert config.model.n_layer == 10 or rate is not None
    assert (config.horizon.amount, config.horizon.unit) == (40_000_000, "tokens")


def test_a_run_leaves_other_programs_their_cores_and_keeps_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_corpus(tmp_path / "corpus")
    monkeypatch.setattr(train_run, "threads_beside_others", lambda: 1)
    monkeypatch.setattr(train_run, "usable_cores", lambda: 2)
    monkeypatch.delitem(tiny.FLAGS, "runtime.threads")
    code, out, err = tiny.command(["train", *tiny.arguments(tmp_path, "a", {"steps": 1})])
    assert code == 0, err
    assert out.count("training on 1 of 2, which is faster beside them; --runtime.threads 2 uses all") == 1
    assert json.loads((tmp_path / "a" / "config.json").read_text())["runtime"]["threads"] == 1
    code, out, err = tiny.command(["train", *tiny.arguments(tmp_path, "b", {"steps": 1, "runtime.threads": 2})])
    assert (code, out.count("other programs")) == (0, 0), err


class TestFewSaves:
    """Warnings at the start, while they can still be answered."""

    def said(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
        tiny.write_corpus(tmp_path / "corpus")
        opened = tiny.open_tiny(tmp_path, **changes)
        describe(opened, Console(), None)
        return capsys.readouterr().out

    @pytest.mark.parametrize(
        ("minutes", "every_seconds", "restarts", "warns"),
        [(61, None, 0, True), (59, None, 0, False), (61, 1800, 0, False), (1, None, 3, True), (1, 600, 3, False)],
    )
    def test_of_a_long_run_that_saves_nothing_before_its_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        minutes: int, every_seconds: int | None, restarts: int, warns: bool,
    ) -> None:  # fmt: skip
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
        saves = {"checkpoint__every_steps": None, "checkpoint__every_seconds": every_seconds}
        said = self.said(tmp_path, capsys, minutes=minutes, **saves)
        assert ("warning: this run saves nothing before its end" in said) == warns

    def test_of_a_length_in_steps_at_the_peak(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "saves nothing" in self.said(tmp_path, capsys, steps=10**9, checkpoint__every_steps=None)

    @pytest.mark.parametrize(
        ("every_steps", "keep", "warns"), [(4, 8, False), (4, 2, False), (4, 6, True), (None, 4, True)]
    )
    def test_whose_steps_are_hardly_those_that_are_kept(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], every_steps: int | None, keep: int, warns: bool
    ) -> None:
        said = self.said(tmp_path, capsys, checkpoint__every_steps=every_steps, checkpoint__keep_every_steps=keep)
        assert (f"warning: checkpoint.keep_every_steps = {keep} keeps few checkpoints" in said) == warns


@pytest.mark.parametrize(("processes", "idle"), [(2, None), (3, 1), (6, 4)])
def test_processes_without_a_micro_batch_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], processes: int,
    idle: int | None,
) -> None:  # fmt: skip
    """A step has two micro-batches."""
    for asks_the_others in ("require_same_run", "require_same_implementations"):
        monkeypatch.setattr(session, asks_the_others, lambda *_: None)
    tiny.write_corpus(tmp_path / "corpus")
    opened = tiny.open_tiny(tmp_path)
    opened.group = Group(World(0, processes))
    session.require_agreement(opened, {}, Console())
    out = capsys.readouterr().out
    assert ("have no micro-batch" in out) == (idle is not None)
    assert idle is None or f"warning: {idle} of {processes} processes have no micro-batch: lower" in out


@pytest.mark.parametrize(("threads", "processes", "warns"), [(2, 1, False), (3, 1, True), (1, 2, False), (1, 3, True)])
def test_more_threads_than_cores_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], threads: int, processes: int,
    warns: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(run_session, "usable_cores", lambda: 2)
    tiny.write_corpus(tmp_path / "corpus")
    opened = tiny.open_tiny(tmp_path)
    opened.place, opened.group = replace(opened.place, threads=threads), Group(World(0, 4, local_size=processes))
    describe(opened, Console(), None)
    said = "warning: 3 threads share 2 cores, which is slower than one for each\n"
    assert (said in capsys.readouterr().out) == warns


@pytest.mark.parametrize(
    ("rank", "lost", "said", "status"),
    [(0, 1, False, "failed"), (1, 0, False, "failed"), (2, 0, False, "running"), (1, 0, True, "running"),
     (1, 2, False, "running"), (0, 0, False, "failed")],
)  # fmt: skip
def test_a_lost_process_is_recorded_by_rank_0_and_of_rank_0_by_rank_1(
    tmp_path: Path, rank: int, lost: int, said: bool, status: str
) -> None:
    run = RunDirectory.create(tmp_path / "r", {}, {})
    attempt = Attempt(Console(), (), 0.0, run=run, group=Group(World(rank, 3)))
    attempt.note_lost(Failure(lost, 3, f"rank {lost} died", said_by_itself=said))
    record = run.read_provenance()
    assert record.get("status", "running") == status
    assert status == "running" or record["failure"] == {"reason": f"rank {lost} died", "step": None, "loss": None}


def test_a_gpu_that_torch_cannot_use_is_named_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "_NVIDIA_SIGNS", (str(tmp_path),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "empty.txt").touch()
    refused = ["train", "quickstart", "--depth", "1", "--steps", "1", "--data", tmp_path / "empty.txt"]
    code, out, err = tiny.command(refused)
    assert (code, out.count("warning: this machine has an NVIDIA GPU, which will not be used: torch")) == (2, 1), err
    code, out, err = tiny.command([*refused, "--device", "cpu"])
    assert (code, out.count("NVIDIA")) == (2, 0), err


def test_copies_that_do_not_know_of_each_other_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trains a run of its own, where one of all was meant."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, out, err = tiny.command(["train", "--resume", tmp_path])
    assert (code, out.count("warning: 2 processes were started (SLURM_STEP_NUM_TASKS)")) == (2, 1), err
    assert "SLURM_STEP_NUM_TASKS" not in launch._environment(), "each run of a worker's would warn"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert apart() is None, "it is in the shell of `srun --pty bash` too"


def test_a_folder_that_is_taken_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    train = 'from gptlab.cli.main import main; code = main(["train", "--run-dir", "taken"])'
    program = f"import sys; {train}; sys.exit(100 if 'torch' in sys.modules else code)"
    ended = subprocess.run(own_python(program), cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, "is not empty" in ended.stderr) == (2, True), ended.stderr


@pytest.mark.parametrize(
    ("prompts", "words"),
    [((), " --interactive"), (("two\nlines",), ""), (("two\nlines", "the fox"), " --prompt 'the fox'")],
)
def test_the_command_that_samples_has_a_prompt(tmp_path: Path, prompts: tuple[str, ...], words: str) -> None:
    """Without a prompt it continues those of the run; a run that has none, and no BOS, has nothing to start from."""
    lines = next_commands(tmp_path, tiny.make_config(tmp_path, "run"), prompts, trained=True)
    (line,) = [one for one in lines if "sample it" in one]
    assert line.endswith(f" sample {tmp_path}{words}")
