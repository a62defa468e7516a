"""Memory that runs out in the warm-up: the run continues with a micro-batch that fits, and records it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import arguments, command, lines_of

from gptlab.app import run_session
from gptlab.config.run import RunConfig
from gptlab.runtime.hardware.memory import fewer_micro_sequences
from gptlab.training.state import TrainState

FIELDS = {"model.dropout": 0.0, "steps": 4, "checkpoint.every_steps": 2}


def with_room_for(rows: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device with memory for so many rows. Returns the numbers of rows that were tried."""
    tried: list[int] = []

    def warm_up(state: TrainState, passes: Any, config: RunConfig, *rest: Any) -> float:
        tried.append(config.batch.micro_sequences)
        if tried[-1] > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")
        return 0.0

    monkeypatch.setattr(run_session, "MEMORY_RUNS_OUT", ("cpu",))
    monkeypatch.setattr(run_session, "warm_up", warm_up)
    return tried


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines_of(run, "train")]


def test_halved_until_it_fits_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is, bit for bit, that of the smaller flag, also where it is stopped and resumed."""
    one_row = ["train", *arguments(folder, "asked", FIELDS | {"batch.micro_sequences": 1})]
    assert command(one_row)[0] == 0
    tried = with_room_for(1, monkeypatch)
    code, out, _ = command(["train", *arguments(folder, "found", FIELDS)])
    assert (code, tried) == (0, [4, 2, 1])
    assert "out of memory with batch.micro_sequences = 4: now 2, in 4 micro-batches a step" in out
    assert losses(folder / "found") == losses(folder / "asked")
    assert json.loads((folder / "found" / "config.json").read_text())["batch"]["micro_sequences"] == 1
    changes = json.loads((folder / "found" / "run.json").read_text())["config_changes"]
    assert [change["fields"] for change in changes] == [
        {"batch.micro_sequences": [4, 2]},
        {"batch.micro_sequences": [2, 1]},
    ]
    tried.clear()
    whole = losses(folder / "found")
    resumed = ["train", "--resume", folder / "found", "--resume-from-step", "2"]
    assert command(resumed)[0] == 0
    assert tried == [1]
    assert losses(folder / "found") == whole


@pytest.mark.parametrize("changes", [{"batch.micro_sequences": 1}, {"parallel.exact_any_world_size": True}])
def test_what_must_not_be_halved_ends_with_the_advice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    tried = with_room_for(0, monkeypatch)
    code, _, err = command(["train", *arguments(folder, next(iter(changes)), FIELDS | changes)])
    assert (code, len(tried)) == (2, 1)
    assert "gptlab: error: out of memory" in err


def test_steps_stay_whole() -> None:
    assert [fewer_micro_sequences(rows) for rows in (2, 9, 12, 32)] == [1, 3, 6, 16]
