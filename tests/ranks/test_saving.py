"""Several ranks save together: one step, whole or not at all; what happens to one of them all decide alike."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_scenes import play_scenes
from tiny_runs import arguments, command, lines_of

from gptlab.runtime.records.metrics import read_metrics
from gptlab.training.checkpoint.load import load_checkpoint, verify_checkpoint
from gptlab.training.checkpoint.names import checkpoint_path, list_checkpoints

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tried on Linux")

FLAGS = {
    "steps": 6, "eval.every_steps": None, "eval.at_start": False,
    "checkpoint.every_steps": 2, "checkpoint.keep_last": 9, "sample.every_steps": None, "sample.prompts": [],
}  # fmt: skip
SPIKES = {"faults.spike_factor": 3.0, "faults.spike_window": 2}
REFUSED = {"rank": 1, "steps": [4], "how": "refuse", "call": "fsync"}
"""The disk of rank 1 is full when it writes its part of step 4."""


def scenes(folder: Path) -> list[dict[str, Any]]:
    def train(name: str, ranks: int, *harms: dict[str, Any], **changes: Any) -> dict[str, Any]:
        flags = FLAGS | {"batch.total_tokens": ranks * 4 * 32}
        flags |= {field.replace("__", "."): value for field, value in changes.items()}
        argv = ["train", *arguments(folder, name, flags)]
        return {"name": name, "ranks": ranks, "argv": argv, "harms": harms, "play": "saving_scenes.play_harmed"}

    slow = {"rank": 1, "steps": [2, 6], "how": "slow"}
    slower = {"rank": 1, "steps": [4], "how": "waited for", "note": str(folder / "waited-for")}
    bear: dict[str, Any] = {"checkpoint__on_failure": "continue"}
    spikes = {name.replace(".", "__"): value for name, value in SPIKES.items()}
    return [
        train("one", 1),
        train("blocking", 3, checkpoint__background=False),
        train("slow", 3, slow, slower, {**slow, "rank": 0, "steps": [2], "where": "complete_save"}),
        train("stops", 2, REFUSED),
        train("stops-blocking", 2, REFUSED, checkpoint__background=False),
        train("borne", 2, REFUSED, **bear),
        train("borne-by-rank-0", 2, {**REFUSED, "rank": 0, "call": "rename", "where": "complete_save"}, **bear),
        train("not-borne", 2, {**REFUSED, "steps": [4, 6]}, **bear),
        train("not-begun", 2, {**REFUSED, "rank": 0, "where": "begin_save", "call": "mkdir"}, **bear),
        # Rank 1 is still at work on step 4 when the run goes back to it.
        train("rewound", 2, {**slow, "steps": [4], "seconds": 1.0}, **spikes) | {"spike": 5},
        train("signalled", 2, {**slow, "steps": [2]}) | {"signal": ["SIGTERM", 1, 3]},
        # The last one: rank 1 does not come back.
        train("died", 3, {"rank": 1, "steps": [4], "how": "die"}),
    ]


@pytest.fixture(scope="module")
def played(folder: Path) -> Path:
    """The folder, when all scenes have been played in it."""
    play_scenes(folder, scenes(folder))
    return folder


def of(folder: Path, scene: str, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"{scene}-{rank}.json").read_text())


def codes(folder: Path, scene: str, ranks: int) -> set[int]:
    return {of(folder, scene, rank)["code"] for rank in range(ranks)}


def steps(run: Path) -> list[int]:
    """Of the complete checkpoints, all of them intact, with nothing beside them."""
    paths = list_checkpoints(run / "checkpoints")
    for path in paths:
        verify_checkpoint(path)
    assert {entry.name for entry in (run / "checkpoints").iterdir()} == {path.name for path in paths}
    return [int(path.name.removeprefix("step-")) for path in paths]


def saved_lines(run: Path) -> list[int]:
    return [line["step"] for line in lines_of(run, "checkpoint")]


def test_of_its_own_step_and_the_line_in_its_place(played: Path) -> None:
    """Rank 1 writes while the others train on; the checkpoints are those of a run that waits for every save."""
    assert codes(played, "slow", 3) == {0}
    lines = [(line["kind"], line["step"]) for line in read_metrics(played / "slow/metrics.jsonl")]
    assert lines == [(line["kind"], line["step"]) for line in read_metrics(played / "blocking/metrics.jsonl")]
    assert saved_lines(played / "slow") == steps(played / "slow") == steps(played / "blocking") == [2, 4, 6]
    for step in (2, 4, 6):
        slow, then = (
            load_checkpoint(checkpoint_path(played / name / "checkpoints", step)) for name in ("slow", "blocking")
        )
        assert slow.model.keys() == then.model.keys()
        assert slow.optimizer.keys() == then.optimizer.keys()
        for name, tensor in (then.model | then.optimizer).items():
            assert torch.equal((slow.model | slow.optimizer)[name], tensor), (step, name)
        assert slow.state["loader"] == {"next_step": step}
    assert "waited" in of(played, "slow", 0)["out"]


def test_each_rank_writes_a_share(played: Path) -> None:
    path = checkpoint_path(played / "slow/checkpoints", 4)
    sizes = {
        kind: [(path / f"{kind}-{rank:05d}-of-00003.safetensors").stat().st_size for rank in (1, 2, 3)]
        for kind in ("model", "optimizer")
    }
    for kind, files in sizes.items():
        assert max(files) < 0.6 * sum(files), (kind, files)  # a third, headers and generators beside it


@pytest.mark.parametrize("name", ["stops", "stops-blocking"])
def test_one_rank_that_cannot_write_stops_all(played: Path, name: str) -> None:
    assert codes(played, name, 2) == {2}
    said = of(played, name, 0)["err"]
    assert said.startswith("gptlab: error: rank 1: cannot save the checkpoint of step 4")
    assert os.strerror(28) in said
    assert said.count("\n") == 1
    assert of(played, name, 1)["err"] == ""
    assert steps(played / name) == [2]
    assert json.loads((played / name / "run.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("name", ["borne", "borne-by-rank-0", "not-begun"])
def test_a_run_that_is_told_to_bear_it_goes_on(played: Path, name: str) -> None:
    assert codes(played, name, 2) == {0}
    assert steps(played / name) == saved_lines(played / name) == [2, 6]
    (warning,) = [line for line in of(played, name, 0)["out"].splitlines() if line.startswith("warning")]
    assert "cannot save the checkpoint of step 4" in warning
    assert warning.startswith("warning: rank 1: " if name == "borne" else "warning: cannot")
    assert warning.endswith("training continues")


def test_no_run_bears_the_loss_of_its_final_weights(played: Path) -> None:
    assert codes(played, "not-borne", 2) == {2}
    assert of(played, "not-borne", 0)["err"].startswith("gptlab: error: rank 1: cannot save the checkpoint of step 6")
    assert "warning: rank 1: cannot save the checkpoint of step 4" in of(played, "not-borne", 0)["out"]
    assert steps(played / "not-borne") == [2]
    assert json.loads((played / "not-borne" / "run.json").read_text())["status"] == "failed"


def test_going_back_waits_for_all_ranks(played: Path) -> None:
    assert codes(played, "rewound", 2) == {0}
    (event,) = lines_of(played / "rewound", "event")
    assert (event["step"], event["to_step"]) == (6, 4)
    assert steps(played / "rewound")[-1] == 6
    assert "nothing to rewind to" not in of(played, "rewound", 0)["out"]


def test_a_signal_waits_for_all_ranks(played: Path) -> None:
    assert codes(played, "signalled", 2) == {75}
    assert steps(played / "signalled") == [2, 3]
    assert saved_lines(played / "signalled") == [2]


def test_a_rank_that_dies_while_it_saves_leaves_no_checkpoint(played: Path) -> None:
    """The run resumes from the one before it, with another number of processes."""
    folder = played / "died/checkpoints"
    for rank in (0, 2):
        assert not (played / f"died-{rank}.json").exists() or of(played, "died", rank)["code"] == 3
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000002"]
    assert command(["train", "--resume", played / "died"])[0] == 0
    assert steps(played / "died") == [2, 4, 6]
    last, its_last = (load_checkpoint(list_checkpoints(played / name / "checkpoints")[-1]) for name in ("died", "slow"))
    # float32, and another order of additions on the way from step 2.
    for name, tensor in last.model.items():
        torch.testing.assert_close(tensor, its_last.model[name], rtol=1e-2, atol=1e-2)
