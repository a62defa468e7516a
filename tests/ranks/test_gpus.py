"""Two GPUs under torchrun, as users start them: the run of one GPU. `make test-gpu` on a machine that has two."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distributed import FLAGS, assert_same_run
from test_exact_sum import FLAGS as EXACT
from tiny_runs import arguments, differences, outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(900),  # up to three runs, each compiled for the first time
]


def train(folder: Path, name: str, ranks: int, flags: Mapping[str, Any]) -> Path:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = arguments(folder, name, {**flags, "runtime.device": "cuda"})
    subprocess.run([sys.executable, *launcher, "-m", "gptlab", "train", *words], check=True)
    record = json.loads((folder / name / "run.json").read_text())
    assert (record["world_size"], record["status"]) == (ranks, "finished")
    assert record["implementations"]["compile"] == ("inductor" if flags["runtime.compile"] == "on" else "off")
    return folder / name


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """In float64, as on CPUs. With dropout, which compiled code draws: it is cut alike."""
    return FLAGS | {"model.dropout": 0.2, "runtime.compile": "on"}


@pytest.fixture(scope="module")
def alone(folder: Path, compiled: dict[str, Any]) -> Path:
    return train(folder, "one", 1, compiled)


@pytest.mark.parametrize("mode", ["data", "sharded"])
def test_train_what_one_does(folder: Path, compiled: dict[str, Any], alone: Path, mode: str) -> None:
    """Gradients, new weights and the matrices that Muon orthogonalizes travel by NCCL. Losses, norms, weights and
    moments differ by the order of float64's additions."""
    assert_same_run(train(folder, mode, 2, compiled | {"parallel.mode": mode}), alone)


@pytest.mark.parametrize("compile_", ["off", "on"])
def test_have_the_bits_of_one_with_exact_any_world_size(folder: Path, compile_: str) -> None:
    """In bfloat16, with dropout. Sums are exchanged in pairs by NCCL."""
    flags = EXACT | {"model.n_layer": 2, "runtime.dtype": "bfloat16", "runtime.compile": compile_}
    one, two = (outcome(train(folder, f"exact-{compile_}-{ranks}", ranks, flags)) for ranks in (1, 2))
    assert differences(two, one) == []
