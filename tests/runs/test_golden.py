"""Golden losses: the first 30 training losses of two tiny runs, as they were when they were last meant to change.

A change that should move no number leaves this test green. One that should move them writes the file anew, and the
file's diff shows by how much:

    PYTHONPATH=tests/support python tests/runs/test_golden.py
"""

from __future__ import annotations

import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import lines_of, train, write_corpus

from gptlab.runtime.hardware.cpu import cpu_model

GOLDEN = Path(__file__).with_name("golden") / "quick.json"

# Four epochs, without dropout, whose draws are torch's business.
COMMON: dict[str, Any] = {
    "model__n_layer": 2, "steps": 30, "model__dropout": 0.0, "eval__every_steps": None, "checkpoint__every_steps": None,
    "sample__prompts": [],
}  # fmt: skip
ADAMW = {"lr": 3e-3, "beta1": 0.9, "eps": 1e-8}
RUNS: dict[str, tuple[dict[str, Any], float]] = {
    # What quickstart is made of. In float64, since Muon makes all directions of a gradient equally long, also those
    # that are nothing but rounding: in float32 other processors' code moves these losses by up to 4e-3.
    "modern": ({"runtime__dtype": "float64"}, 1e-6),
    # nanoGPT's parts, in the float32 of everyday runs.
    "gpt2": (
        {
            "model__norm": "layernorm", "model__position": "learned", "model__activation": "gelu", "model__bias": True,
            "model__tied_head": True, "model__init": "gpt2", "model__qk_norm": False, "model__key_offset": False,
            "model__embedding_norm": False, "model__value_embeddings": False, "model__residual_lambdas": False,
            "model__logit_softcap": None,
            "model__window_pattern": "L", "optim__matrix_optimizer": "adamw", "schedule__kind": "cosine",
            **{f"optim__{role}__{name}": x for role in ("matrix", "embedding", "vector") for name, x in ADAMW.items()},
        },
        1e-5,
    ),
}  # fmt: skip
"""Name: (configuration, relative tolerance). Measured on one machine with torch's, oneDNN's and MKL's code for other
processors (ATEN_CPU_CAPABILITY=default, ONEDNN_MAX_CPU_ISA=SSE41, MKL_CBWR=COMPATIBLE), and on two threads: at most
5e-8 (modern) and 1e-7 (gpt2)."""


def losses(folder: Path, name: str) -> list[float]:
    """nats/token, one a step."""
    return [line["loss"] for line in lines_of(train(folder, name, **COMMON, **RUNS[name][0]), "train")]


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_golden(tmp_path: Path, name: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    write_corpus(tmp_path / "corpus")
    assert losses(tmp_path, name) == pytest.approx(golden["losses"][name], rel=RUNS[name][1]), (
        f"recorded with torch {golden['torch_version']} on {golden['cpu']}, {golden['threads']} thread; {__doc__}"
    )


def write_golden() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus")
        content = {
            "torch_version": torch.__version__,
            "python_version": platform.python_version(),
            "cpu": cpu_model(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": 1,
            "losses": {name: losses(folder, name) for name in RUNS},
        }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_golden()
