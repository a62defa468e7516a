"""Whole runs on a GPU, as users start them: `make test-gpu` on a machine that has one (docs/gpu.md)."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    FLAGS,
    arguments,
    command,
    differences,
    lines_of,
    make_config,
    open_tiny,
    outcome,
    train,
    weights_of,
)  # fmt: skip
from torch import Tensor

import gptlab
from gptlab.config.run import RunConfig
from gptlab.data.loader import StepBatch
from gptlab.runtime.hardware.place import resolve_dtype
from gptlab.training import captured_steps, queued_steps
from gptlab.training.queued_steps import queued_update
from gptlab.training.state import TrainState
from gptlab.training.step import LossFunction, Rates, gradients

pytestmark = pytest.mark.gpu
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
APPLE = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU, or a CUDA device")

DETERMINISTIC: dict[str, Any] = {
    "runtime.device": "cuda", "runtime.dtype": "bfloat16", "runtime.compile": "on", "model.n_layer": 2,
    "parallel.exact_any_world_size": True,
}  # fmt: skip


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines_of(run, "train")]


@pytest.mark.parametrize(
    ("device", "compiled", "dtype", "recomputed"),
    [
        pytest.param("cuda", "on", "auto", False, marks=CUDA),
        pytest.param("cuda", "on", "float16", False, marks=CUDA),  # with a loss scale, which waits for each step
        pytest.param("cuda", "on", "auto", True, marks=CUDA),
        pytest.param("mps", "off", "auto", False, marks=APPLE),
        pytest.param("mps", "off", "bfloat16", False, marks=APPLE),
    ],
)
def test_a_run_learns_what_the_cpu_learns_in_float32(
    folder: Path, device: str, compiled: str, dtype: str, recomputed: bool
) -> None:
    """With --compile on, a compiler that fails is an error. Validation, samples through the KV cache and checkpoints
    are due in between. bfloat16 keeps 8 bits: 0.4% of the first 5.5 nats are 0.02; later the two runs drift apart.
    Activations that are computed again are the same numbers, in kernels that may round elsewhere."""
    model: dict[str, Any] = {"model__n_layer": 2, "model__dropout": 0.0, "steps": 40}
    name = f"{device}-{dtype}-{recomputed}"
    on_cpu = train(folder, f"cpu-beside-{name}", **model)
    run = train(
        folder, name, **model, runtime__device=device, runtime__dtype=dtype, runtime__compile=compiled,
        runtime__activation_checkpointing=recomputed,
    )  # fmt: skip
    record = json.loads((run / "run.json").read_text())
    expected = str(resolve_dtype(dtype, torch.device(device))).removeprefix("torch.")
    assert (record["device"].partition(":")[0], record["dtype"]) == (device, expected)
    assert record["implementations"]["compile"] == ("inductor" if compiled == "on" else "off")
    if device == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0):
        assert record["implementations"]["attention"].startswith("varlen FA")
    assert losses(run)[0] == pytest.approx(losses(on_cpu)[0], abs=0.02)
    assert losses(run)[-1] == pytest.approx(losses(on_cpu)[-1], abs=0.1)
    assert json.loads((run / "summary.json").read_text())["peak_vram_mb"] > 0
    assert (run / "gpu.txt").exists() == (device == "cuda")


@CUDA
def test_a_run_in_8_bits_learns(folder: Path) -> None:
    """Compiled, in layers wide enough for it. e4m3 rounds by 6% at most, gradients in e5m2 by 12%. After 40 steps the
    loss has fallen by 5 nats; on a CPU that multiplied in 8 bits it was then 0.005 from that in bfloat16."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device of compute capability 8.9")
    changes: dict[str, Any] = {
        "model__n_layer": 2, "model__n_embd": 128, "model__dropout": 0.0, "steps": 40, "runtime__device": "cuda",
        "runtime__dtype": "bfloat16", "runtime__compile": "on",
    }  # fmt: skip
    wide, narrow = (losses(train(folder, f"fp8-{fp8}", **changes, runtime__fp8=fp8)) for fp8 in (False, True))
    assert narrow != wide
    assert narrow[-1] < narrow[0] - 3
    assert narrow[-1] == pytest.approx(wide[-1], abs=0.1)


@CUDA
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_the_gpu_refuses_a_broken_update(folder: Path, compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All gradients and the loss are NaN in step 4, one number of one gradient is infinite in step 6. The host, which
    has queued the next step by then, counts both; AdamW's kernel and Muon's update keep every weight and moment."""
    kept: list[bool] = []

    def spoilt(state: TrainState, batch: StepBatch, loss_sum: LossFunction, config: RunConfig) -> Tensor:
        loss = gradients(state, batch, loss_sum, config)
        held = [p.grad for p in state.model.parameters() if p.grad is not None]
        if batch.step == 3:
            torch._foreach_mul_(held, math.nan)
            return loss * math.nan
        if batch.step == 5:
            held[-1][(0,) * held[-1].ndim] = math.inf
        return loss

    def watched(state: TrainState, config: RunConfig, loss: Tensor, rates: Rates) -> Tensor:
        live = [*(p.detach() for p in state.model.parameters()), *state.optimizer.state_tensors().values()]
        before = [tensor.clone() for tensor in live]
        norms = queued_update(state, config, loss, rates)
        kept.append(all(torch.equal(*pair) for pair in zip(live, before, strict=True)))
        return norms

    monkeypatch.setattr(captured_steps, "MOST_FLOPS", 0.0)
    monkeypatch.setattr(queued_steps, "gradients", spoilt)
    monkeypatch.setattr(queued_steps, "queued_update", watched)
    run = train(
        folder, f"broken-{compiled}", runtime__device="cuda", runtime__dtype="bfloat16", runtime__compile=compiled,
        model__n_layer=2, steps=8,
    )  # fmt: skip
    assert [place for place, same in enumerate(kept) if same] == [3, 5]
    assert [(line["step"], line["what"]) for line in lines_of(run, "event")] == [(4, "skipped"), (6, "skipped")]
    assert json.loads((run / "summary.json").read_text())["skipped_updates"] == 2
    assert all(math.isfinite(loss) for loss in losses(run))


@CUDA
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_a_captured_step_is_the_step(
    folder: Path, compiled: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run with a CUDA graph and without: the same kernels, on the same tokens, masks and rates, in steps of
    several micro-batches. AdamW's rate is rounded to float32 in a graph; other masks, or a rate that stays that of the
    first step, change the last losses by more than 0.05."""
    found: list[bool] = []
    capture = captured_steps.capture

    def noted(*args: Any) -> Any:
        found.append((captured := capture(*args)) is not None)
        return captured

    monkeypatch.setattr(captured_steps, "capture", noted)
    runs = []
    for most in (0.0, captured_steps.MOST_FLOPS):
        monkeypatch.setattr(captured_steps, "MOST_FLOPS", most)
        runs.append(
            train(
                folder, f"captured-{compiled}-{dropout}-{most}", runtime__device="cuda", runtime__dtype="bfloat16",
                runtime__compile=compiled, model__n_layer=2, model__dropout=dropout, steps=30, optim__grad_clip=1.0,
            )
        )  # fmt: skip
    assert found == [False, True]
    steps = [json.loads((run / "run.json").read_text())["implementations"].get("steps") for run in runs]
    assert steps == [None, "CUDA graphs"]
    norms = [[line["grad_norm"] for line in lines_of(run, "train")] for run in runs]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), abs=0.01)
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


@CUDA
def test_a_step_that_cannot_be_captured_runs_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that the host waits for ends a capture. Dropout still draws from the generator."""
    runs = []
    for name in ("none", "failed"):
        if name == "none":
            monkeypatch.setattr(captured_steps, "MOST_FLOPS", 0.0)
        else:
            monkeypatch.undo()
            monkeypatch.setattr(captured_steps, "queued_update", lambda state, config, loss, rates: loss.item())
        runs.append(train(folder, f"capture-{name}", runtime__device="cuda", runtime__dtype="bfloat16", steps=8))
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), abs=1e-3)


@CUDA
def test_a_captured_step_refuses_an_update(folder: Path) -> None:
    """From a weight that is infinite: no other weight and no moment moves."""
    session = open_tiny(folder, runtime__device="cuda", runtime__dtype="bfloat16")
    state = session.state
    session.warm_up(pytest.fail)
    assert state.captured is not None
    first, *others = [*weights_of(state).values(), *state.optimizer.state_tensors().values()]
    first.fill_(math.inf)
    before = [tensor.clone() for tensor in others]
    with state.loader:
        figures = state.captured(next(state.loader), Rates(1.0, 0.9, 1.0))
    assert not figures[1].isfinite()
    assert all(torch.equal(*pair) for pair in zip(others, before, strict=True))


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
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_gpu_that_is_not_the_first_makes_the_same_run(folder: Path) -> None:
    """Its figures are on the host when they are read: an event of the first GPU, which is idle, would not wait."""
    runs = [train(folder, f"gpu-{n}", runtime__device=f"cuda:{n}", runtime__dtype="float32") for n in (0, 1)]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-5)


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
@pytest.mark.parametrize(("compiled", "recomputed"), [("off", False), ("on", False), ("on", True)])
def test_the_plan_tells_the_memory_that_a_run_takes(folder: Path, compiled: str, recomputed: bool) -> None:
    """Against torch.cuda.max_memory_allocated: uncompiled code on the meta device, and the graphs of torch.compile,
    also with activation checkpointing. 10% is what `plan` promises for the GPU."""
    flags = {
        "model.n_layer": 6, "model.n_embd": 512, "model.n_head": 8, "model.seq_len": 512, "model.dropout": 0.0,
        "batch.micro_sequences": 16, "batch.total_tokens": 2 * 16 * 512, "eval.micro_sequences": 16, "steps": 4,
        "runtime.device": "cuda", "runtime.dtype": "bfloat16", "sample.prompts": [], "checkpoint.every_steps": "none",
        "runtime.compile": compiled, "runtime.activation_checkpointing": recomputed,
    }  # fmt: skip
    name = f"memory-{compiled}-{recomputed}"
    words = arguments(folder, name, flags)
    code, out, err = command(["plan", *words, "--json"])
    assert code == 0, err
    torch._C._cuda_clearCublasWorkspaces()  # those of earlier runs of this process, 64 MiB on Hopper
    torch.cuda.reset_peak_memory_stats()
    left = torch.cuda.memory_allocated()  # by earlier runs
    code, _, err = command(["train", *words])
    assert code == 0, err
    taken = 2**20 * json.loads((folder / name / "summary.json").read_text())["peak_vram_mb"]
    assert taken - left == pytest.approx(json.loads(out)["memory_bytes"], rel=0.1)


@CUDA
def test_bench_times_steps_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that did not wait for the GPU would show more than its peak, and parts that take less than the whole.
    Parts wait one by one, so that together they may take longer; they are launched, and so is the step here, which
    would be captured. The recipe's rows are made fewer where memory is."""
    monkeypatch.setattr(captured_steps, "MOST_FLOPS", 0.0)
    argv = ["bench", "nanochat", "--depth", "4", "--device", "cuda", "--bench-steps", "5", "--json"]
    code, out, err = command(argv)
    assert code == 0, err
    bench = json.loads(out)
    assert bench["compiled"] != "off"
    assert 0 < bench["mfu"] < 1
    parts = bench["part_seconds"]
    assert min(parts[name] for name in ("forward", "backward", "muon", "adamw")) > 0
    assert 0.8 < sum(parts.values()) / bench["step_seconds"] < 2


@CUDA
def test_bench_samples() -> None:
    code, out, err = command(["bench", "nanochat-tiny", "--device", "cuda", "--sampling", "--json"])
    assert code == 0, err
    rates = json.loads(out)["rates"]
    assert [rate["rows"] for rate in rates] == [1, 8]
    assert all(0 < rate["tokens_per_second"] < rate["bound_tokens_per_second"] for rate in rates)


@CUDA
@pytest.mark.timeout(900)  # it reads Python's sources, and compiles twice
def test_quickstart_as_a_user_starts_it(tmp_path: Path) -> None:
    """It times steps, chooses a size, compiles, and ends after 18 seconds of training. The report is written."""
    run = tmp_path / "run"
    words = ["quickstart", "--minutes", "0.3", "--run-dir", str(run), "--data.cache-dir", str(tmp_path / "cache")]
    subprocess.run([sys.executable, "-m", "gptlab", "train", *words], check=True)
    record, lines = json.loads((run / "run.json").read_text()), lines_of(run, "train")
    assert (record["device"].partition(":")[0], record["status"]) == ("cuda", "finished")
    assert record["implementations"]["compile"] == "inductor"
    assert lines[-1]["loss"] < lines[0]["loss"] - 2
    assert lines[-1]["train_seconds"] == pytest.approx(18, rel=0.1)
    assert all(0 < line["mfu"] < 1 for line in lines[len(lines) // 2 :])
    assert (run / "report.html").exists()
