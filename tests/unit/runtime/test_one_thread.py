"""Work in the background where the system has no thread to give, as at a container's limit of processes."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
import torch
from tiny_runs import train, write_corpus

from gptlab.runtime.files.tensor_file import read_tensors, write_tensors
from gptlab.runtime.processes.one_thread import OneThread
from gptlab.runtime.records.console import Console


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_work_is_done_at_once_and_once(monkeypatch: pytest.MonkeyPatch, no_threads: None) -> None:
    done: list[int] = []
    with OneThread() as thread:
        assert thread.submit(done.append, 1).done()
        assert isinstance(thread.submit(int, "x").exception(), ValueError)
        monkeypatch.undo()  # there is one again: what it was refused for stays done
        thread.submit(done.append, 2)
    assert done == [1, 2]


def test_after_its_end_nothing_is_done() -> None:
    with OneThread() as thread:
        pass
    with pytest.raises(RuntimeError, match="after shutdown"):
        thread.submit(int)


def test_files_of_tensors(tmp_path: Path, no_threads: None) -> None:
    tensors = {"a": torch.arange(5.0), "b": torch.ones(3, 2)}
    record = write_tensors(tmp_path / "file", tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_tensors(tmp_path / "file", record).items())


def test_what_only_shows_that_there_is_work(no_threads: None) -> None:
    with Console(stream=io.StringIO()) as console, console.busy("waiting"):
        pass


def test_a_run_is_trained_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the threads that it would like to have beside those that it begins with."""
    begin, refused = threading.Thread.start, set()

    def start(thread: threading.Thread) -> None:
        name = thread.name.partition("_")[0]
        if name not in {"gptlab-busy", "gptlab-evidence", "gptlab-hash", "gptlab-loader", "gptlab-save"}:
            return begin(thread)
        refused.add(name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    write_corpus(tmp_path / "corpus")
    run = train(tmp_path, "run", checkpoint__every_steps=4)
    assert [path.name for path in sorted((run / "checkpoints").iterdir())][-1] == "step-00000012"
    assert {"gptlab-evidence", "gptlab-hash", "gptlab-loader", "gptlab-save"} <= refused
