"""Weights shared among processes (parallel.mode = "sharded"): the run of one process, and its checkpoints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed_scenes import play_scenes
from test_distributed import FLAGS, assert_same_run, of
from tiny_runs import arguments, lines_of

from gptlab.training.checkpoint.load import load_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tried on Linux")

SMALL: dict[str, Any] = {
    "model.n_layer": 2, "model.n_embd": 24, "model.n_head": 3, "model.seq_len": 32, "model.vocab_multiple": 32,
    "tokenizer.kind": "byte", "data.val_fraction": 0.15, "batch.micro_sequences": 4,
    "batch.total_tokens": 3 * 4 * 32, "eval.tokens": None, "eval.train_tokens": None, "eval.every_steps": None,
    "eval.at_start": False, "checkpoint.every_steps": None, "sample.prompts": "the", "sample.max_tokens": 3, "steps": 2,
    "runtime.device": "cpu", "runtime.dtype": "float64", "runtime.compile": "off", "runtime.threads": 1,
    "log.report": False,
}  # fmt: skip
"""A recipe's model and optimizer, made small; three micro-batches a step."""
LINEAGES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    # Layer norms and biases, a tied table, learned positions, AdamW alone.
    "nanogpt/gpt2-124m-tiny": ((1, 2), {"model.bias": True}),
    # A tied table beside Muon.
    "speedrun/muon-2024-10-tiny": ((1, 2), {}),
    # Value embeddings, residual lambdas, gates of three rows; a rank without a micro-batch.
    "autoresearch-tiny": ((1, 3), {"batch.total_tokens": 2 * 4 * 32}),
    # A fused matrix of unequal parts, gates of one row; five micro-batches, each of which is reduced at once.
    "nanochat-tiny": (
        (2, 2),
        {"model.n_kv_head": 1, "batch.total_tokens": 5 * 4 * 32, "parallel.reduce_each_micro_batch": True},
    ),
}
"""Copies of the weights and the ranks of each, and what is special."""


def lineage(folder: Path, recipe: str, name: str, copies: int, shards: int) -> dict[str, Any]:
    flags = SMALL | LINEAGES[recipe][1] | {
        "data.source": folder / "corpus", "data.cache_dir": folder / "cache", "run_dir": folder / name,
        "parallel.mode": "sharded", "parallel.shard_ranks": shards if copies > 1 else None,
    }  # fmt: skip
    words = [word for field, value in flags.items() for word in (f"--{field}", str(value))]
    return {"name": name, "ranks": copies * shards, "argv": ["train", recipe, *words]}


def scenes(folder: Path) -> list[dict[str, Any]]:
    def train(name: str, ranks: int, mode: str = "sharded", **changes: Any) -> dict[str, Any]:
        flags = FLAGS | {"parallel.mode": mode, "checkpoint.every_steps": 2}
        flags |= {field.replace("__", "."): value for field, value in changes.items()}
        return {"name": name, "ranks": ranks, "argv": ["train", *arguments(folder, name, flags)]}

    def resume(run: str, name: str, ranks: int, mode: str, *more: str) -> dict[str, Any]:
        argv = ["train", "--resume", str(folder / run), "--parallel.mode", mode, *more]
        return {"name": name, "ranks": ranks, "argv": argv}

    core = {"eval__core_every_steps": 4, "eval__core_dir": folder / "bundle"}
    half = {"runtime__dtype": "float16", "steps": 3}
    # Few parts, each of which takes time to trace: what counts is that the backward pass finds its weights.
    off = ("model__residual_lambdas", "model__qk_norm", "model__embedding_norm")
    small = dict.fromkeys(off, False) | {
        "model__dropout": 0.0, "model__n_layer": 1, "model__window_pattern": "L", "model__value_embeddings": "off",
        "model__position": "learned", "model__logit_softcap": None, "steps": 1,
    }  # fmt: skip
    return [
        train("one", 1, "data", **core),
        train("three", 3, **core),
        *(lineage(folder, recipe, f"{recipe.replace('/', '-')}-1", 1, 1) for recipe in LINEAGES),
        *(lineage(folder, recipe, f"{recipe.replace('/', '-')}-n", *LINEAGES[recipe][0]) for recipe in LINEAGES),
        # Written by two ranks that share; read by three that do not, then by four with two copies, then by one.
        # Each of them reduces the gradients of every micro-batch.
        train("stopped", 2, **core, parallel__reduce_each_micro_batch=True) | {"signal": ["SIGTERM", 1, 1]},
        resume("stopped", "whole", 3, "data") | {"signal": ["SIGINT", 2, 2]},
        resume("stopped", "copies", 4, "sharded", "--parallel.shard_ranks", "2") | {"signal": ["SIGTERM", 0, 3]},
        resume("stopped", "alone", 1, "sharded"),
        train("broken-one", 1, "data", steps=3) | {"in_pass": ["nan", 0, 2]},
        train("broken", 3, steps=3) | {"in_pass": ["nan", 2, 2], "queued": True},
        train("compiled", 2, runtime__compile="on", **small) | {"compiler": "aot_eager"},
        train("eager", 2, "data", **small),
        train("begun", 2, init_from=folder / "one", eval__only=True),
        train("half-one", 1, "data", **half) | {"in_pass": ["nan", 0, 2]},
        train("half", 2, **half) | {"in_pass": ["nan", 1, 2]},
        train("unlike", 2) | {"more": {"1": ["--parallel.mode", "data"]}},
        # The last one: a rank does not come back.
        train("killed", 3) | {"in_pass": ["SIGKILL", 2, 2]},
    ]


@pytest.fixture(scope="module")
def played(folder: Path) -> Path:
    """The folder, when all scenes have been played in it; what the processes themselves said is in output.txt."""
    (folder / "output.txt").write_text(
        play_scenes(folder, scenes(folder), ["torch._inductor.compile_fx", "torch.distributed.fsdp"])
    )
    return folder


class TestTheSameRun:
    def test_three_ranks(self, played: Path) -> None:
        """4 micro-batches, of which ranks take 2, 1 and 1; CORE, samples, checkpoints in the background."""
        assert_same_run(played / "three", played / "one")
        assert lines_of(played / "three", "core")[-1]["tasks"] == lines_of(played / "one", "core")[-1]["tasks"]
        ours, theirs = (lines_of(played / name, "sample") for name in ("three", "one"))
        assert [line["text"] for line in ours] == [line["text"] for line in theirs]

    @pytest.mark.parametrize("recipe", LINEAGES)
    def test_every_lineage(self, played: Path, recipe: str) -> None:
        name = recipe.replace("/", "-")
        assert_same_run(played / f"{name}-n", played / f"{name}-1")

    def test_blocks_are_compiled_within_what_gathers_them(self, played: Path) -> None:
        assert "compiling" in of(played, "compiled", 0)["out"]
        assert_same_run(played / "compiled", played / "eager")

    def test_it_begins_with_the_weights_of_another_run(self, played: Path) -> None:
        best = min(line["val_loss"] for line in lines_of(played / "one", "eval"))
        assert lines_of(played / "begun", "eval")[0]["val_loss"] == pytest.approx(best, rel=1e-12)


class TestCheckpoints:
    def test_each_mode_and_number_of_ranks_reads_those_of_the_others(self, played: Path) -> None:
        codes = {name: of(played, name, 0)["code"] for name in ("stopped", "whole", "copies", "alone")}
        assert codes == {"stopped": 75, "whole": 75, "copies": 75, "alone": 0}
        assert_same_run(played / "stopped", played / "one")

    def test_every_rank_writes_its_share(self, played: Path) -> None:
        """A third of the weights and of the moments, plus vectors and what rows do not divide by three."""
        last = list_checkpoints(played / "three" / "checkpoints")[-1]
        for kind in ("model", "optimizer"):
            sizes = [(last / f"{kind}-{rank:05}-of-00003.safetensors").stat().st_size for rank in (1, 2, 3)]
            assert max(sizes) < 0.45 * sum(sizes), kind

    def test_copies_share_it(self, played: Path) -> None:
        """A quarter each, though every rank holds a half."""
        saved = played / "stopped" / "checkpoints" / "step-00000003"
        for kind in ("model", "optimizer"):
            sizes = [(saved / f"{kind}-{rank:05}-of-00004.safetensors").stat().st_size for rank in (1, 2, 3, 4)]
            assert max(sizes) < 0.35 * sum(sizes), kind


class TestFaults:
    def test_all_ranks_skip_what_is_broken_on_one(self, played: Path) -> None:
        assert_same_run(played / "broken", played / "broken-one")
        (event,) = lines_of(played / "broken", "event")
        assert (event["what"], event["step"], event["reason"]) == ("skipped", 2, "gradient")
        said = "first non-finite gradient: residual_lambdas"
        assert said in (played / "broken" / "log.txt").read_text()

    def test_float16_overflows_on_one_rank_halve_the_scale_of_all(self, played: Path) -> None:
        assert {of(played, "half", rank)["code"] for rank in range(2)} == {0}
        lines, one = (lines_of(played / name, "train") for name in ("half", "half-one"))
        assert [line["grad_norm"] == "nan" for line in lines] == [False, True, False]
        for field, rel in (("loss", 1e-3), ("grad_norm", 1e-2)):
            # float16 keeps 11 bits of each activation and gradient.
            assert lines[0][field] == pytest.approx(one[0][field], rel=rel)
            assert lines[2][field] == pytest.approx(one[2][field], rel=rel)
        saved = load_checkpoint(list_checkpoints(played / "half" / "checkpoints")[-1])
        assert saved.state["scaler"] == {"scale": 65536.0 / 2, "_growth_tracker": 1}
        assert lines_of(played / "half", "event") == [], "an overflow is no fault"

    def test_ranks_of_two_modes_do_not_wait_for_each_other(self, played: Path) -> None:
        assert {of(played, "unlike", rank)["code"] for rank in range(2)} == {2}
        assert (
            "rank 1's configuration differs from rank 0's (parallel.mode = 'data', not 'sharded')"
            in of(played, "unlike", 0)["err"]
        )

    def test_a_rank_that_dies_within_a_pass_is_named(self, played: Path) -> None:
        assert re.findall(r"CODES (.*)", (played / "output.txt").read_text()) == ["[0, 0, -9, 0]"]
        for rank in (0, 1):
            killed = of(played, "killed", rank)
            assert killed["code"] == 3
            speaker = "training failed" if rank == 0 else "rank 1"
            assert re.search(rf"error: {speaker}: rank 2 died \(process \d+\) in step 2", killed["err"])
        assert json.loads((played / "killed" / "run.json").read_text())["status"] == "failed"
        assert "rank 2 died" in (played / "killed" / "log.txt").read_text()
