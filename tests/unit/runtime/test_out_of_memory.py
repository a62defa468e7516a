"""Memory that runs out is one line that says what to lower, not a traceback."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

import psutil
import pytest
import torch
from forked import run_forked
from tiny_runs import arguments, command, lines_of, make_config, train, write_corpus

import gptlab
from gptlab.cli.main import main
from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.config.run import BatchConfig, EvalConfig, RunConfig
from gptlab.model.decoder import Decoder
from gptlab.model.gpt import build_model
from gptlab.model.kernels import fused, ops
from gptlab.runtime.hardware.device import compiler_available
from gptlab.runtime.hardware.memory import memory_errors_explained, ran_out_of_memory, smaller_model, what_to_lower

# As torch 2.13 words them.
CUDA = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.02 GiB is "
    "free. Including non-PyTorch memory, this process has 138.77 GiB memory in use."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4294967296 bytes. Error code 12 (Cannot allocate memory)"
)
WINDOWS = (
    "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."
)
MPS = "MPS backend out of memory (MPS allocated: 17.62 GB, other allocations: 416.00 KB). Tried to allocate 625.00 MB"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus")
    return tmp_path


class TestTelling:
    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError(CUDA), RuntimeError(CPU), RuntimeError(WINDOWS), RuntimeError(MPS), MemoryError(),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            RuntimeError("std::bad_alloc"),
        ],
    )  # fmt: skip
    def test_memory(self, error: Exception) -> None:
        assert ran_out_of_memory(error)
        wrapped = RuntimeError("backend='inductor' raised")
        wrapped.__cause__ = error
        assert ran_out_of_memory(wrapped)

    @pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError("out of memory"), ValueError(CPU)])
    def test_anything_else(self, error: Exception) -> None:
        assert not ran_out_of_memory(error)


class TestAdvice:
    @staticmethod
    def advice(rows: int, *, run: Path | None = None, eval_rows: int | None = None) -> str:
        batch = BatchConfig(micro_sequences=rows, total_tokens=rows * RunConfig().model.seq_len * 2)
        config = replace(RunConfig(), batch=batch, eval=EvalConfig(micro_sequences=eval_rows))
        line = what_to_lower(torch.OutOfMemoryError(CUDA), config, run)
        assert "\n" not in line
        return line

    def test_by_hand(self) -> None:
        assert self.advice(16, run=Path("runs/a")) == (
            "out of memory (the last 1.50 GiB were not there): batch.micro_sequences = 16: gptlab train --from runs/a "
            "with --batch.micro-sequences 8 needs half for activations and takes the same steps; or lower "
            f"model.seq_len = {RunConfig().model.seq_len}"
        )

    def test_the_step_stays_whole(self) -> None:
        assert "the command with --batch.micro-sequences 3 needs 1/3 " in self.advice(9)
        assert "with --batch.micro-sequences 1 needs 1/7 " in self.advice(7)

    def test_with_one_row(self) -> None:
        assert "lower model.seq_len" in self.advice(1)
        assert "batch.micro_sequences is 1 already" in self.advice(1)

    def test_a_larger_validation(self) -> None:
        assert "eval.micro_sequences = 64 is more than training's: lower it first" in self.advice(16, eval_rows=64)

    @pytest.mark.parametrize(("size", "told"), [(2**32, "4.0 GiB"), (2**20 * 48, "48.0 MiB"), (8, "8 bytes")])
    def test_bytes_are_told_in_larger_units(self, size: int, told: str) -> None:
        error = RuntimeError(CPU.replace(str(2**32), str(size)))
        assert f"(the last {told} were not there)" in what_to_lower(error, RunConfig(), None)


class TestRun:
    @pytest.mark.parametrize(
        "place",
        ["gptlab.app.run.session.build_state", "gptlab.app.run.run_session._warm_up", "gptlab.training.step.gradients"],
    )
    def test_on_a_gpu(self, folder: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        def exhausted(*args: object, **kwargs: object) -> None:
            raise torch.OutOfMemoryError(CUDA)

        monkeypatch.setattr(place, exhausted)
        code, _, err = command(["train", *arguments(folder, "r")])
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(
            "gptlab: error: out of memory (the last 1.50 GiB were not there): batch.micro_sequences = 4:"
        )
        if place.endswith("build_state"):
            assert not (folder / "r").exists()
        else:
            assert f"gptlab train --from {folder / 'r'} with --batch.micro-sequences 2 " in err
            assert json.loads((folder / "r" / "run.json").read_text())["status"] == "failed"

    def test_what_it_advises_works_and_trains_the_same(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(
                "gptlab.app.run.run_session._warm_up", lambda *a: (_ for _ in ()).throw(torch.OutOfMemoryError(CUDA))
            )
            assert command(["train", *arguments(folder, "r", {"model.dropout": 0.0, "steps": 3})])[0] == 2
        again = folder / "again"
        argv = ["--from", folder / "r", "--batch.micro-sequences", 2, "--run-dir", again]
        assert command(["train", *argv])[0] == 0
        assert command(["train", *arguments(folder, "whole", {"model.dropout": 0.0, "steps": 3})])[0] == 0
        # The same sums in another order. The first loss is of the same weights; then Muon, which makes the gradient's
        # small singular values as large as the others, has raised the rounding of float32 to 2e-5.
        for one, other in zip(lines_of(again, "train"), lines_of(folder / "whole", "train"), strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-6 if one["step"] == 1 else 1e-3)

    def test_from_python(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def exhausted(*args: object) -> None:
            raise RuntimeError(CPU)

        monkeypatch.setattr("gptlab.app.run.run_session._warm_up", exhausted)
        with pytest.raises(UserError, match="out of memory") as caught:
            gptlab.train(make_config(folder, "r"))
        assert isinstance(caught.value.__cause__, RuntimeError)

    def test_another_error_stays_what_it_is(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*args: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr("gptlab.app.run.run_session._warm_up", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            command(["train", *arguments(folder, "r")])

    @pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on address space")
    def test_under_a_real_limit(self, folder: Path) -> None:
        """A quarter of a gibibyte more than the process has, and activations that take several gibibytes."""
        changes = {
            "batch.micro_sequences": 512,
            "batch.total_tokens": 512 * 128,
            "model.seq_len": 128,
            "model.n_embd": 512,
            "model.dropout": 0.0,
        }
        words = arguments(folder, "r", {**changes, "data.val_fraction": 0.4})

        def work() -> int:
            limit = psutil.Process().memory_info().vms + 2**28
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            return main(["train", *words])

        done = run_forked(work)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("gptlab: error: out of memory"), done.stderr
        assert done.stderr.count("\n") == 1
        assert "--batch.micro-sequences 256 needs half" in done.stderr
        assert json.loads((folder / "r" / "run.json").read_text())["status"] == "failed"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a process that may die")
@pytest.mark.skipif(not compiler_available(torch.device("cpu")), reason="no C++ compiler here")
def test_too_little_for_a_kernel() -> None:
    """An exception that left a C++ function ended the process, or became Python's own SystemError. So many threads have
    no room in any address space."""

    def work() -> None:
        ops.load_kernels(torch.device("cpu"), torch.float32)
        x, up, down = (torch.ones(*sizes, requires_grad=True) for sizes in ((64, 1024), (4096, 1024), (1024, 4096)))
        heads, first = torch.ones(1, 64, 3, 2**16, requires_grad=True), torch.zeros(64, dtype=torch.long)
        config = ModelConfig(n_layer=1, n_head=1, n_embd=64, seq_len=64, vocab_size=64)
        model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=1)
        # One thread computes its norms, which need no memory for each.
        small = build_model(replace(config, n_embd=32), device=torch.device("cpu"), compute_dtype=torch.float32, seed=1)
        tokens = torch.zeros(4, 64, dtype=torch.long)
        calls: dict[str, Callable[[], object]] = {
            "linear_forward": partial(fused.linear, x, up),
            "linear_backward": fused.linear(x, up).sum().backward,
            "mlp_forward": partial(fused.mlp, x, up, down, "relu2"),
            "mlp_backward": fused.mlp(x, up, down, "relu2").sum().backward,
            "heads_forward": partial(fused.prepare_heads, heads, 1, None, None, None, 1e-6),
            "heads_backward": fused.prepare_heads(heads, 1, None, None, None, 1e-6).sum().backward,
            "attention_forward": partial(fused.attention, heads, 1, None, 0.0),
            "attention_backward": fused.attention(heads[..., :64], 1, None, 0.0).sum().backward,
            "head_loss": partial(fused.head_loss, x, up, first, 4096, 15.0),
            "head_nats": partial(fused.head_nats, x, up, first, 4096, 15.0),
            "capped_logits": partial(fused.capped_logits, x, up, 4096, 15.0),
            "loss_and_gradient": partial(fused.loss_and_gradient, torch.zeros(1, 2**17), first[:1], 2**17, 15.0),
            "blocks_forward": partial(small.hidden, tokens),
            "blocks_backward": small.hidden(tokens).sum().backward,
            "decode_step": partial(Decoder(model, 1024).step, [1] * 1024),
        }
        torch.get_num_threads = lambda: 2**30
        for name, call in calls.items():
            with pytest.raises(MemoryError, match=rf"^too little memory for the C\+\+ kernel {name}$"):
                call()
        torch.get_num_threads = lambda: 1
        fused.linear(x, up)

    done = run_forked(work)
    assert done.returncode == 0, done.stderr


class TestOtherCommands:
    @staticmethod
    def exhausted(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError(CUDA)

    def line_of(self, argv: list[object]) -> str:
        code, _, err = command(argv)
        assert (code, err.count("\n")) == (2, 1), err
        assert err.startswith("gptlab: error: out of memory (the last 1.50 GiB were not there): ")
        return err

    def test_eval_and_sample(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = train(folder, "r", steps=2)
        with monkeypatch.context() as patch:
            patch.setattr("gptlab.app.run.loaded_run.evaluate", self.exhausted)
            assert "--micro-sequences 10 instead of 20 gives nearly the same numbers" in self.line_of(["eval", run])
            alone = self.line_of(["eval", run, "--micro-sequences", 1])
            assert "--micro-sequences" not in alone
            assert "another --device" in alone
        with monkeypatch.context() as patch:
            patch.setattr("gptlab.eval.continuation.continue_text", self.exhausted)
            assert "another --device" in self.line_of(["sample", run, "--prompt", "the "])
        with monkeypatch.context() as patch:
            patch.setattr("gptlab.app.run.loaded_run.build_model", self.exhausted)
            for name in ("eval", "sample"):
                assert "another --device" in self.line_of([name, run])

    def test_bench(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gptlab.bench.timing.build_state", self.exhausted)
        words = [word for word in arguments(folder, "r") if word not in ("--steps", "12")]
        assert "batch.micro_sequences = 4: the command with --batch.micro-sequences 2" in self.line_of(
            ["bench", *words]
        )

    def test_another_error_is_left_alone(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="a bug"), memory_errors_explained(str):
            raise ValueError("a bug")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_says_it_in_these_words() -> None:
    expected = r"^out of memory \(the last [\d.]+ GiB were not there\)"
    with pytest.raises(UserError, match=expected), memory_errors_explained(smaller_model):
        torch.empty(2**40, device="cuda")
