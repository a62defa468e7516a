"""Whole runs on a GPU, as users start them: `make test-gpu` on a machine that has one (docs/gpu.md)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import FLAGS, arguments, command, differences, make_config, outcome, train

import gptlab
from gptlab.runtime.records.metrics import read_metrics

pytestmark = pytest.mark.gpu
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
APPLE = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU, or a CUDA device")

DETERMINISTIC: dict[str, Any] = {
    "runtime.device": "cuda", "runtime.dtype": "bfloat16", "runtime.compile": "on", "model.n_layer": 2,
    "parallel.exact_any_world_size": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("device", "compiled"), [pytest.param("cuda", "on", marks=CUDA), pytest.param("mps", "off", marks=APPLE)]
)
def test_a_run_in_bfloat16_learns_what_the_cpu_learns_in_float32(folder: Path, device: str, compiled: str) -> None:
    """With --compile on, a compiler that fails is an error. Validation, samples through the KV cache and checkpoints
    are due in between. bfloat16 keeps 8 bits: 0.4% of the first 5.5 nats are 0.02; later the two runs drift apart."""
    model: dict[str, Any] = {"model__n_layer": 2, "model__dropout": 0.0, "steps": 40}
    on_cpu = train(folder, f"cpu-beside-{device}", **model)
    run = train(
        folder, device, **model, runtime__device=device, runtime__dtype="bfloat16", runtime__compile=compiled
    )  # fmt: skip
    record = json.loads((run / "run.json").read_text())
    assert (record["device"].partition(":")[0], record["dtype"]) == (device, "bfloat16")
    assert record["implementations"]["compile"] == ("inductor" if compiled == "on" else "off")
    losses = [
        [line["loss"] for line in read_metrics(path / "metrics.jsonl") if line["kind"] == "train"]
        for path in (on_cpu, run)
    ]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=0.02)
    assert losses[0][-1] == pytest.approx(losses[1][-1], abs=0.1)
    assert json.loads((run / "summary.json").read_text())["peak_vram_mb"] > 0
    assert (run / "gpu.txt").exists() == (device == "cuda")


@CUDA
def test_killed_and_resumed_is_never_killed_bit_for_bit(folder: Path) -> None:
    """With deterministic kernels. In processes of their own: what the environment says of kernels is read once."""
    started = [sys.executable, "-m", "gptlab", "train"]
    flags = FLAGS | DETERMINISTIC | {"steps": 24}
    subprocess.run([*started, *arguments(folder, "gpu-whole", flags)], check=True)
    run = folder / "gpu-killed"
    process = subprocess.Popen([*started, *arguments(folder, run.name, flags)])
    while process.poll() is None:
        if (run / "metrics.jsonl").exists() and '"train", "step": 14,' in (run / "metrics.jsonl").read_text():
            process.kill()
        time.sleep(0.002)
    assert process.returncode == -signal.SIGKILL, "it was too late to kill"
    subprocess.run([*started, "--resume", str(run)], check=True)
    assert differences(outcome(folder / "gpu-whole"), outcome(run)) == []


@CUDA
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_a_steady_step_never_waits_for_the_gpu(folder: Path, compiled: str) -> None:
    """torch raises an error at .item(), at a copy from pageable memory, at nonzero. The loss that a step reports is
    read from pinned memory, behind an event: that waits for the step before only."""
    steps: list[int] = []

    def on_step(line: dict[str, Any]) -> None:
        steps.append(line["step"])
        torch.cuda.set_sync_debug_mode("error" if 5 <= line["step"] < 35 else "default")

    config = make_config(
        folder, f"no-waiting-{compiled}", runtime__device="cuda", runtime__dtype="bfloat16", runtime__compile=compiled,
        model__n_layer=2, steps=40, eval__every_steps=None, sample__prompts=[], checkpoint__every_steps=None,
    )  # fmt: skip
    try:
        gptlab.train(config, on_step=on_step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert steps == list(range(1, 41))


@CUDA
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_the_plan_tells_the_memory_that_a_run_takes(folder: Path, compiled: str) -> None:
    """Against torch.cuda.max_memory_allocated: what autograd keeps of uncompiled code, and the graphs of torch.compile.
    Large enough that cuBLAS's workspace (32 MiB on Hopper) does not count. 10% is what `plan` promises for the GPU."""
    flags = {
        "model.n_layer": 6, "model.n_embd": 512, "model.n_head": 8, "model.seq_len": 512, "model.dropout": 0.0,
        "batch.micro_sequences": 16, "batch.total_tokens": 2 * 16 * 512, "eval.micro_sequences": 16, "steps": 4,
        "runtime.device": "cuda", "runtime.dtype": "bfloat16", "sample.prompts": [], "checkpoint.every_steps": "none",
        "runtime.compile": compiled,
    }  # fmt: skip
    words = arguments(folder, f"memory-{compiled}", flags)
    code, out, err = command(["plan", *words, "--json"])
    assert code == 0, err
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    code, _, err = command(["train", *words])
    assert code == 0, err
    taken = 2**20 * json.loads((folder / f"memory-{compiled}" / "summary.json").read_text())["peak_vram_mb"]
    assert taken == pytest.approx(json.loads(out)["memory_bytes"], rel=0.1)
