"""Mirrors of metrics.jsonl, fed by processes of their own: what arrives, and that nothing there reaches the run."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_runs import arguments, command, lines_of, write_corpus
from written_runs import write_run

from gptlab.config.errors import UserError
from gptlab.runtime.records import mirrors
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.mirror_process import follow, scalars
from gptlab.runtime.records.run_directory import RunDirectory

LIBRARY = """\
import json, os, sys, time

def note(what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(what) + "\\n")

class Run:
    url, dir = "https://example.org/x", None
    def log(self, values, step):
        if os.environ.get("FAULT") == "raises":
            raise RuntimeError("the server\\nsaid no")
        if os.environ.get("FAULT") == "hangs":
            note("hangs")
            time.sleep(1000)
        if os.environ.get("FAULT") == "dies":
            os._exit(7)
        note([step, values])
    def finish(self):
        note("finished")

def login(prompt):
    return False

def init(**given):
    print("noise on stdout")
    print("noise on stderr", file=sys.stderr)
    note(given)
    return Run()
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of the name and the interface of wandb; the file in which it notes its calls."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "wandb.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / "library")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "notes"


def noted(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_mirrored(folder: Path, *, wait_for: Path | None = None) -> str:
    """A run whose third and later lines are mirrored; what its console says."""
    run, out = RunDirectory(write_run(folder, [3.0, 2.0], status="running")), io.StringIO()
    with (
        MetricsLog(run.metrics_path) as metrics,
        Console(stream=out) as console,
        mirrors.mirrored(("wandb",), run, {"seed": 3}, console),
    ):
        metrics.write("train", step=11, loss=2.5, loss_ema=2.75, mfu=0.25, grad_norm=None, tokens=88)
        metrics.write("sample", step=11, prompt="a", text="b")
        metrics.write("eval", step=11, val_loss=2.0, val_bpb=float("nan"), train_seconds=1.5, tokens=88)
        while wait_for is not None and "hangs" not in noted(wait_for):
            time.sleep(0.01)
    return out.getvalue()


def test_lines_arrive_by_nanochats_names(notes: Path, tmp_path: Path) -> None:
    """Those that are written within the context, without what has no number."""
    said = run_mirrored(tmp_path / "run")
    init, train, validation, end = noted(notes)
    assert (init["project"], init["name"], init["mode"], init["resume"]) == ("gptlab", "run", "offline", "allow")
    assert init["config"] == {"seed": 3}
    assert init["id"] == json.loads((tmp_path / "run" / "run.json").read_text())["run_id"]
    assert train == [11, {"train/loss": 2.75, "train/step_loss": 2.5, "train/mfu": 25.0, "total_training_tokens": 88.0}]
    assert math.isnan(validation[1].pop("val/bpb"))
    assert validation == [11, {"val/loss": 2.0, "total_training_time": 1.5, "total_training_tokens": 88.0}]
    assert end == "finished"
    assert "wandb: https://example.org/x\n" in said
    assert "noise" not in said
    assert "warning" not in said


def test_files_of_the_current_folder_are_not_imported(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "json.py").write_text("raise SystemExit('json.py was run')")
    monkeypatch.chdir(tmp_path / "here")
    assert "warning" not in run_mirrored(tmp_path / "run")
    assert noted(notes)[-1] == "finished"


def test_core_by_task() -> None:
    line = {"kind": "core", "step": 3, "core_metric": 0.5, "tasks": {"a": 1.0}, "centered": {"a": 0.75}}
    assert scalars(line) == {"core_metric": 0.5, "centered_results/a": 0.75}
    assert scalars({"kind": "event", "step": 3, "what": "failed", "value": 2.0}) == {}


@pytest.mark.parametrize(("fault", "reason"), [("raises", "RuntimeError: the server said no"), ("dies", "exit code 7")])
def test_one_that_fails_costs_a_warning(
    fault: str, reason: str, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    said = run_mirrored(tmp_path / "run")
    (warning,) = [line for line in said.splitlines() if "warning" in line]
    assert reason in warning
    assert warning.endswith("off; the run is not affected")


def test_one_that_hangs_is_stopped(notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps no line waiting, and the end of the run only so long. Lines that it did not get are counted."""
    monkeypatch.setenv("FAULT", "hangs")
    monkeypatch.setattr(mirrors, "FINISH_SECONDS", 0.2)
    began = time.monotonic()
    said = run_mirrored(tmp_path / "run", wait_for=notes)
    assert time.monotonic() - began < 20  # 0.2 s, and the start of a Python on a busy machine
    assert "stopped, with 3 lines not sent; the run is not affected" in said
    assert not [child for child in psutil.Process().children() if "mirror_process" in " ".join(child.cmdline())]


def test_none_outlives_a_start_that_is_interrupted(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    made = mirrors._Mirror.__init__

    def make(mirror: mirrors._Mirror, name: str, console: Console) -> None:
        made(mirror, name, console)
        mirror.imported = Interrupted()

    monkeypatch.setattr(mirrors._Mirror, "__init__", make)
    with pytest.raises(KeyboardInterrupt):
        run_mirrored(tmp_path / "run")
    assert not [child for child in psutil.Process().children() if "mirror_process" in " ".join(child.cmdline())]


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is prepared. The folder `wandb` that the library makes is no library."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wandb").mkdir()
    with pytest.raises(UserError, match=r"log.to = wandb: not installed; `pip install wandb`"):
        mirrors.require_mirrors(["wandb"])
    write_corpus(tmp_path / "corpus")
    code, _, said = command(["train", *arguments(tmp_path, "run", {"log.to": "wandb"})])
    assert code == 2
    assert "pip install wandb" in said
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


def test_a_run_is_the_same_with_a_mirror(
    notes: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and every step is mirrored. A run without one does not import the code."""
    small = {"steps": 3, "eval.every_steps": 3, "sample.prompts": []}
    for name in [name for name in sys.modules if name.startswith("gptlab.runtime.records.mirror")]:
        monkeypatch.delitem(sys.modules, name)
    assert command(["train", *arguments(folder, "plain", small)])[0] == 0
    assert not [name for name in sys.modules if name.startswith("gptlab.runtime.records.mirror")]
    code, said, _ = command(["train", *arguments(folder, "mirrored", small | {"log.to": "wandb"})])
    assert code == 0
    assert said.rstrip().splitlines()[-1].startswith("depth:"), "the closing block comes last"
    losses = [[line["loss"] for line in lines_of(folder / name, "train")] for name in ("plain", "mirrored")]
    assert losses[0] == losses[1]
    sent = [note for note in noted(notes) if isinstance(note, list) and "train/step_loss" in note[1]]
    assert [step for step, _ in sent] == [1, 2, 3]
    assert [values["train/step_loss"] for _, values in sent] == losses[0]


def test_follows_a_file_that_grows_by_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is passed on once it is complete, and only once."""
    monkeypatch.setattr("gptlab.runtime.records.mirror_process.POLL_SECONDS", 0.001)
    path, ended, found = tmp_path / "lines", threading.Event(), list[tuple[list[bytes], int]]()
    path.write_bytes(b"old\n")
    reader = threading.Thread(target=lambda: found.extend(follow(path, 4, ended)))
    reader.start()
    with path.open("ab", buffering=0) as file:
        for piece in (b"a", b"b\nc", b"\n", b"d\ne\n", b"not whole"):
            file.write(piece)
            time.sleep(0.005)
    ended.set()
    reader.join()
    assert b"".join(line for lines, _ in found for line in lines) == b"ab\nc\nd\ne\n"
    assert found[-1][1] == len(b"old\nab\nc\nd\ne\n")
    assert os.path.getsize(path) > found[-1][1]
