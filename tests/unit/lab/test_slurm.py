"""Workers as jobs, with submitit's local executor in the place of Slurm."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from pathlib import Path

import pytest
from lab_world import formula, new_lab, quiet

from gptlab.cli import lab as command
from gptlab.config.errors import UserError
from gptlab.lab.experiments.trial import measure_baseline
from gptlab.lab.workers import slurm
from gptlab.lab.workers.slurm import Worker, read_options, submit_workers


def test_jobs_run_the_command_each(tmp_path: Path) -> None:
    program = "import os, pathlib; pathlib.Path(str(os.getpid())).touch()"
    jobs = submit_workers(
        ["sh", "-c", f"cd {tmp_path} && exec {sys.executable} -S -c '{program}'"], 2,
        logs=tmp_path / "logs", options={"timeout_min": 2}, cluster="local",
    )  # fmt: skip
    assert [job.result() for job in jobs] == [None, None]
    assert len([path for path in tmp_path.iterdir() if path.name.isdecimal()]) == 2


def test_a_command_that_fails_fails_the_job() -> None:
    with pytest.raises(RuntimeError, match="the worker ended with exit code 3"):
        Worker(["sh", "-c", "exit 3"])()


def test_a_job_whose_time_is_over_is_queued_again() -> None:
    worker = Worker(["sleep", "600"])
    ended: list[BaseException] = []

    def run() -> None:
        try:
            worker()
        except RuntimeError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while worker._process is None:
        time.sleep(0.005)
    again = worker.checkpoint()
    thread.join(60)
    assert str(ended[0]) == "the worker ended with exit code -15"
    function = pickle.loads(pickle.dumps(again.function))
    assert isinstance(function, Worker)
    assert function.command == ["sleep", "600"]


def test_the_signal_for_the_job_does_not_end_the_worker() -> None:
    Worker(["sh", "-c", "kill -USR2 $$; exit 0"])()


def test_options() -> None:
    words = ("partition=gpu", "gpus-per-node=1", "timeout_min=480", "mem_gb=4.5", "comment=a=b")
    numbers = {"gpus_per_node": 1, "timeout_min": 480, "mem_gb": 4.5}
    assert read_options(words) == {"partition": "gpu", **numbers, "comment": "a=b"}
    with pytest.raises(UserError, match="--slurm gpu: give NAME=VALUE"):
        read_options(["gpu"])


def test_the_command_submits_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = new_lab(tmp_path, seeds=1)
    with formula():
        measure_baseline(lab, quiet)
    space = tmp_path / "space.toml"
    space.write_text("depth = [1, 2]")
    submitted: list[tuple[list[str], int, dict[str, object]]] = []

    class Job:
        job_id = "17"

    def submit(words: list[str], workers: int, *, logs: Path, options: dict[str, object]) -> list[Job]:
        submitted.append((words, workers, options))
        return [Job()]

    monkeypatch.setattr(slurm, "submit_workers", submit)
    given = ["--search", str(space), "--experiments", "7", "--until", "8h", "--agent-minutes", "5"]
    job = ["--launcher", "slurm", "--workers", "3", "--slurm", "partition=gpu"]
    assert command.main(["run", str(lab.path), *given, *job]) == 0
    words = [sys.executable, "-m", "gptlab", "lab", "run", str(lab.path)]
    [(found, workers, options)] = submitted
    assert found[:6] == words
    assert set(zip(found[6::2], found[7::2], strict=True)) == {
        ("--search", str(space)), ("--experiments", "7"), ("--until", "8h"), ("--agent-minutes", "5.0"),
    }  # fmt: skip
    assert (workers, options) == (3, {"partition": "gpu"})
    assert "job 17" in capsys.readouterr().out


def test_an_option_of_another_type_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the jobs cannot be submitted: .*timeout_min"):
        submit_workers(["true"], 1, logs=tmp_path, options={"timeout_min": "08:00:00"}, cluster="local")


def test_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="the jobs cannot be submitted"):
        submit_workers(["true"], 1, logs=tmp_path, options={})
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"pip install 'gptlab\[slurm\]'"):
        submit_workers(["true"], 1, logs=tmp_path, options={})
