"""Weights shared among processes (parallel.mode = "sharded"): the run of one process, and its checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_distributed import ENVIRONMENT, FLAGS, TESTS, assert_same_run
from tiny_runs import arguments, write_bundle, write_corpus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tried on Linux")

SMALL: dict[str, Any] = {
    "model.n_layer": 2, "model.n_embd": 24, "model.n_head": 3, "model.seq_len": 32, "model.vocab_multiple": 32,
    "tokenizer.kind": "byte", "data.val_fraction": 0.15, "batch.micro_sequences": 4,
    "batch.total_tokens": 3 * 4 * 32, "eval.tokens": None, "eval.train_tokens": None, "eval.every_steps": None,
    "checkpoint.every_steps": None, "steps": 3, "runtime.device": "cpu", "runtime.dtype": "float64",
    "runtime.compile": "off", "runtime.threads": 1,
}  # fmt: skip
"""A recipe's model and optimizer, made small; three micro-batches a step."""
LINEAGES: dict[str, dict[str, Any]] = {
    "nanogpt/gpt2-124m-tiny": {"model.bias": True},  # layer norms and biases, a tied table, learned positions, AdamW
    "speedrun/muon-2024-10-tiny": {},  # a tied table beside Muon
    "autoresearch-tiny": {},  # value embeddings, residual lambdas, gates of three rows
    "nanochat-tiny": {"model.n_kv_head": 1},  # a fused matrix of unequal parts
}


def lineage(folder: Path, recipe: str, name: str, mode: str) -> list[str]:
    flags = SMALL | LINEAGES[recipe] | {
        "data.source": folder / "corpus", "data.cache_dir": folder / "cache", "run_dir": folder / name,
        "parallel.mode": mode,
    }  # fmt: skip
    return ["train", recipe, *(word for field, value in flags.items() for word in (f"--{field}", str(value)))]


def scenes(folder: Path) -> list[dict[str, Any]]:
    def train(name: str, ranks: int, mode: str = "sharded", **changes: Any) -> dict[str, Any]:
        flags = FLAGS | {"parallel.mode": mode}
        flags |= {field.replace("__", "."): value for field, value in changes.items()}
        return {"name": name, "ranks": ranks, "argv": ["train", *arguments(folder, name, flags)]}

    def resume(run: str, name: str, ranks: int, mode: str) -> dict[str, Any]:
        argv = ["train", "--resume", str(folder / run), "--parallel.mode", mode]
        return {"name": name, "ranks": ranks, "argv": argv}

    core = {"eval__core_every_steps": 4, "eval__core_dir": folder / "bundle"}
    hold = {"checkpoint__every_steps": 2, "checkpoint__background": True}
    few = {"batch__total_tokens": 2 * 4 * 32, "steps": 2}
    of_lineages = [
        {
            "name": f"{number}-{ranks}", "ranks": ranks,
            "argv": lineage(folder, recipe, f"{number}-{ranks}", "sharded" if ranks > 1 else "data"),
        }
        for number, recipe in enumerate(LINEAGES)
        for ranks in (1, 2)
    ]  # fmt: skip
    return [
        train("one", 1, "data", **core),
        train("two", 2, **core),
        train("three", 3, **core),
        train("few-one", 1, "data", **few),
        train("few-three", 3, **few),
        *of_lineages,
        # Written by two ranks that share, in the background too; read by one, by three that share, by two that do not.
        train("stopped", 2, **core, **hold) | {"signal": ["SIGTERM", 1, 1]},
        resume("stopped", "resumed", 3, "sharded") | {"signal": ["SIGINT", 2, 3]},
        resume("stopped", "ended", 2, "data"),
        train("whole", 2, "data", **core) | {"signal": ["SIGTERM", 0, 2]},
        resume("whole", "shared", 2, "sharded") | {"signal": ["SIGTERM", 0, 3]},
        resume("whole", "alone", 1, "sharded"),
        train("broken-one", 1, "data") | {"in_pass": ["nan", 0, 2]},
        train("broken", 3) | {"in_pass": ["nan", 2, 2]},
        train("float16", 2, runtime__dtype="float16"),
    ]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, when all scenes have been played in it."""
    folder = tmp_path_factory.mktemp("sharded")
    write_corpus(folder / "corpus")
    write_bundle(folder / "bundle")
    (folder / "scenes.json").write_text(json.dumps(scenes(folder), default=str))
    played = subprocess.run(
        [sys.executable, TESTS / "distributed_scenes.py", folder], env=os.environ | ENVIRONMENT, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    (folder / "output.txt").write_text(played.stdout)
    return folder


@pytest.mark.parametrize("name", ["two", "three"])
def test_the_run_is_that_of_one_process(played: Path, name: str) -> None:
    assert_same_run(played / name, played / "one")


def test_more_ranks_than_micro_batches(played: Path) -> None:
    assert_same_run(played / "few-three", played / "few-one")


@pytest.mark.parametrize("number", range(len(LINEAGES)), ids=LINEAGES)
def test_every_lineage(played: Path, number: int) -> None:
    assert_same_run(played / f"{number}-2", played / f"{number}-1")
