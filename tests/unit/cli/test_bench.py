"""`gptlab bench`: time is that of the part that spent it, figures agree, noise is reported; nothing is left."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import weights_of
from torch import Tensor

from gptlab.bench import timing, training_rate
from gptlab.bench.measure import Bench
from gptlab.cli.bench import describe, noise
from gptlab.cli.main import main
from gptlab.config.load import apply_overrides
from gptlab.config.run import RunConfig
from gptlab.data.loader import Loader
from gptlab.model.counting import FlopsPerToken
from gptlab.model.kernels.choice import ProductTimes
from gptlab.optim.adamw import AdamW
from gptlab.optim.muon import Muon
from gptlab.runtime.hardware import peak
from gptlab.training.state import TrainState, build_state

FIELDS = {
    "model.n_layer": 2, "model.n_embd": 32, "model.n_head": 2, "model.seq_len": 32, "tokenizer.vocab_size": 300,
    "batch.micro_sequences": 2, "batch.total_tokens": 128, "runtime.device": "cpu", "runtime.dtype": "float32",
    "runtime.compile": "off", "runtime.threads": 1,
}  # fmt: skip
CPU = torch.device("cpu")
SUSTAINED_SHARE = peak.sustained_share  # Itself: the tests below run with another in its place.


def argv(*more: str) -> list[str]:
    flags = [word for name, value in FIELDS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["bench", *flags, "--bench-steps", "4", *more]


def config() -> RunConfig:
    return apply_overrides(RunConfig(), FIELDS | {"model.vocab_size": 300})


@pytest.fixture
def state() -> Iterator[TrainState]:
    made = build_state(config(), timing.made_up_rows(config()), device=CPU, compute_dtype=torch.float32)
    with made.loader:
        yield made


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Peaks and shares that a quiet machine would have, at once; a cache folder that a run could leave things in."""
    monkeypatch.setattr(peak, "measure_matmul_flops", lambda device, dtype: 100e9)
    monkeypatch.setattr(peak, "sustained_share", lambda device, dtype: 0.95)
    monkeypatch.setattr(training_rate, "TIMED_SECONDS", 0.01)
    monkeypatch.setattr(timing, "MADE_UP_TOKENS", 10_000)
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache" / "compile"))


class Clock:
    """What time.perf_counter reads: moves only when it is told to."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def figures(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main(argv("--json", *more)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


class TestParts:
    def test_time_lands_on_the_part_that_spent_it(
        self, state: TrainState, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each part takes a time of its own; forward and backward half of it for each of the two micro-batches."""
        taken = {"data": 0.02, "forward": 0.06, "backward": 0.1, "norm, clip": 0.05, "muon": 0.07, "adamw": 0.09}
        real = {
            "next": Loader.__next__, "clip": timing.update.__globals__["clip_gradients"],
            "muon": Muon.step, "adamw": AdamW.step,
        }  # fmt: skip

        def late(name: str, function: Any) -> Any:
            def call(*args: Any) -> Any:
                clock.now += taken[name]
                return function(*args)

            return call

        def loss_sum(tokens: Tensor, targets: Tensor) -> Tensor:
            clock.now += taken["forward"] / 2
            loss = state.model.loss(tokens, targets)
            loss.register_hook(lambda grad: setattr(clock, "now", clock.now + taken["backward"] / 2))
            return loss

        monkeypatch.setattr(Loader, "__next__", late("data", real["next"]))
        monkeypatch.setattr("gptlab.training.step.clip_gradients", late("norm, clip", real["clip"]))
        monkeypatch.setattr(Muon, "step", late("muon", real["muon"]))
        monkeypatch.setattr(AdamW, "step", late("adamw", real["adamw"]))
        timing.whole_steps(state, loss_sum, config(), 1)  # The first step starts the loader's thread.
        parts = timing.step_by_parts(state, loss_sum, config())
        assert parts == pytest.approx(taken)

    def test_parts_make_up_the_step(self, state: TrainState, clock: Clock) -> None:
        """By a clock that counts calls of Python functions: between the parts stand a few lines."""

        def count(frame: object, event: str, argument: object) -> None:
            clock.now += event == "call"

        wanted = config()
        timing.step_by_parts(state, state.model.loss, wanted)  # imports, and the loader's thread
        sys.setprofile(count)
        try:
            started = time.perf_counter()
            parts = timing.step_by_parts(state, state.model.loss, wanted)
            whole = time.perf_counter() - started
        finally:
            sys.setprofile(None)
        assert 0.0 <= whole - sum(parts.values()) < whole / 20

    def test_a_timed_step_trains_like_any_other(self) -> None:
        def trained(step: Any) -> dict[str, Tensor]:
            made = build_state(config(), timing.made_up_rows(config()), device=CPU, compute_dtype=torch.float32)
            with made.loader:
                for _ in range(3):
                    step(made, made.model.loss, config())
            assert made.step == 3
            return {name: tensor.clone() for name, tensor in weights_of(made).items()}

        whole, by_parts = trained(partial(timing.whole_steps, at_most=1)), trained(timing.step_by_parts)
        assert all(torch.equal(whole[name], by_parts[name]) for name in whole)

    def test_nothing_stays_behind_on_the_optimizer(self, state: TrainState) -> None:
        timing.step_by_parts(state, state.model.loss, config())
        assert state.optimizer.muon is not None
        assert "step" not in vars(state.optimizer.muon)
        assert "step" not in vars(state.optimizer.adamw)

    def test_an_optimizer_without_muon(self) -> None:
        only_adamw = apply_overrides(config(), {"optim.matrix_optimizer": "adamw"})
        made = build_state(only_adamw, timing.made_up_rows(only_adamw), device=CPU, compute_dtype=torch.float32)
        with made.loader:
            parts = timing.step_by_parts(made, made.model.loss, only_adamw)
        assert parts["muon"] == 0.0 < parts["adamw"]

    def test_as_many_steps_as_were_asked_for(self, state: TrainState) -> None:
        times = timing.time_steps(state, state.model.loss, config(), max_steps=3, max_seconds=60.0)
        assert len(times.whole_seconds) == 3
        assert {len(seconds) for seconds in times.part_seconds.values()} == {3}
        assert state.step == 7  # One more, untimed.
        assert (
            len(timing.time_steps(state, state.model.loss, config(), max_steps=99, max_seconds=1e-9).whole_seconds) == 1
        )

    def test_steps_add_up_over_both_halves(self) -> None:
        one = timing.StepTimes([1.0], {"data": [2.0]}) + timing.StepTimes([3.0], {"data": [4.0]})
        assert one == timing.StepTimes([1.0, 3.0], {"data": [2.0, 4.0]})


@pytest.mark.parametrize("rows", ["packed", "sequential", "random"])
def test_made_up_rows_are_made_by_the_real_row_maker(rows: str) -> None:
    source = timing.made_up_rows(apply_overrides(config(), {"data.rows": rows}))
    inputs, targets = source.read(0, np.arange(50))
    assert inputs.shape == targets.shape == (50, 32)
    assert 0 <= inputs.min() < inputs.max() <= 299
    assert source.rows_per_epoch * 32 >= 4 * 128
    if rows == "packed":
        assert (inputs[:, 0] == 299).all()


class TestReport:
    @staticmethod
    def bench(**fields: Any) -> Bench:
        """A step of 100 tokens in 1 s at 3 GFLOP a token, of which causality would spare 1: 300 of 400 GFLOP/s."""
        values: dict[str, Any] = {
            "device": "cpu", "device_name": "X", "threads": 2, "dtype": "bfloat16", "recipe": "r", "model": "m",
            "parameters": 5, "shape": "s", "tokens_per_step": 100,
            "flops_per_token": FlopsPerToken(matmul=10**9, attention=2 * 10**9, attention_causal=1e9),
            "forward_flops_per_token": 2e9,
            "vendor_peak_flops_per_second": None, "measured_peaks_flops_per_second": (390e9, 400e9, 395e9),
            "sustained_shares": (0.95, 0.93, 0.96), "compiled": "cached", "compile_seconds": 2.0, "graphs": False,
            "steps": 20, "step_seconds": 1.0, "best_step_seconds": 0.8,
            "part_seconds": {"data": 0.01, "forward": 0.2, "backward": 0.4, "norm, clip": 0.05, "muon": 0.2,
                             "adamw": 0.1},
        }  # fmt: skip
        return Bench(**values | fields)

    def test_steps_that_are_graphs_and_parts_that_are_not(self) -> None:
        assert "graphs    whole steps are CUDA graphs; their parts" in describe(self.bench(graphs=True))
        assert "CUDA graphs" not in describe(self.bench())

    def test_figures_by_hand(self) -> None:
        made = self.bench()
        assert made.peak_flops_per_second == 400e9
        assert made.tokens_per_second == 100
        assert made.mfu == pytest.approx(0.75)
        assert made.causal_mfu == pytest.approx(0.5)
        assert made.forward_backward_flops_per_second == pytest.approx(500e9)
        assert made.rest_seconds == pytest.approx(0.04)
        assert made.peak_spread == pytest.approx(0.025)

    def test_table_by_hand(self) -> None:
        text = describe(self.bench())
        assert "forward       200.00   20.0%    1,000   250.0%" in text  # 2 of 3 GFLOP a token in 0.2 s.
        assert "backward      400.00   40.0%      250    62.5%" in text
        assert "rest           40.00    4.0%\n" in text
        assert "step        1,000.00  100.0%      300    75.0%" in text
        assert "MFU       75.0% with attention counted over the whole context" in text
        assert "50.0% with attention counted causally (2,000,000,000 FLOP a token)" in text
        assert "compiled  in 2.0 s (from its cache)" in text
        assert "tokens/s  100 (best 125)" in text
        assert all(line == line.rstrip() for line in text.splitlines())
        assert "\nproducts  " not in text

    def test_what_multiplies(self) -> None:
        """Where there is a choice."""
        slower, faster = (describe(self.bench(product_times=ProductTimes(0.01, took))) for took in (0.0095, 0.007))
        assert "products  kernels: kernels 10.00 ms, library 9.50 ms" in slower
        assert "products  library: kernels 10.00 ms, library 7.00 ms" in faster

    def test_the_vendors_peak_counts_before_a_measured_one(self) -> None:
        made = self.bench(vendor_peak_flops_per_second=600e9)
        assert made.mfu == pytest.approx(0.5)
        assert "600 GFLOP/s by the data sheet" in describe(made)

    def test_an_unknown_peak_gives_no_figure(self) -> None:
        made = self.bench(measured_peaks_flops_per_second=(), sustained_shares=())
        assert (made.mfu, made.peak_spread, noise(made)) == (None, 0.0, None)
        assert "MFU       unknown" in describe(made)

    def test_noise(self) -> None:
        assert noise(self.bench()) is None
        assert noise(self.bench(measured_peaks_flops_per_second=(400e9, 345e9, 400e9))) is None
        assert "335 GFLOP/s at one time and 400" in str(
            noise(self.bench(measured_peaks_flops_per_second=(400e9, 335e9, 400e9)))
        )
        assert "kept up 30.0% of their best rate" in str(noise(self.bench(sustained_shares=(0.95, 0.3, 0.95))))


class TestCommand:
    def test_printed_figures_follow_from_each_other(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert main(argv()) == 0
        text = capsys.readouterr().out
        table = {
            found[1].strip(): float(found[2].replace(",", ""))
            for found in re.finditer(r"^([a-z, ]+?) +(-?[\d,]+\.\d\d) +-?[\d.]+%", text, re.M)
        }
        assert list(table) == [*timing.PARTS, "rest", "step"]
        # Eight figures, each rounded to 0.01 ms.
        assert sum(table.values()) - table["step"] == pytest.approx(table["step"], abs=8 * 0.005 + 1e-9)

        def number(pattern: str) -> float:
            found = re.search(pattern, text)
            assert found is not None, pattern
            return float(found[1].replace(",", ""))

        flops, tokens = number(r"([\d,]+) FLOP a token"), number(r"([\d,]+) tokens: ")
        mfu = flops * tokens / (table["step"] / 1e3 * number(r"peak +([\d,]+) GFLOP/s") * 1e9)
        # The percentage is rounded to one digit after the decimal point, the milliseconds to two.
        assert number(r"MFU +([\d.]+)%") / 100 == pytest.approx(mfu, abs=0.0005 + mfu * 0.01 / table["step"])
        assert number(r"tokens/s +([\d,]+) ") == pytest.approx(tokens / table["step"] * 1e3, rel=0.01)
        assert re.search(r"^ *compiled +no$", text, re.MULTILINE)

    def test_json_follows_from_the_model_counted_by_hand(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = figures(capsys)
        # 6 a weight (head, two blocks of 12 * 32^2, one gate of 32 * 2); attention 12 * width * context a layer.
        flops = 6 * (32 * 320 + 2 * 12 * 32**2 + 32 * 2) + 2 * 12 * 32 * 32
        assert found["flops_per_token"]["matmul"] + found["flops_per_token"]["attention"] == flops
        assert found["forward_flops_per_token"] == flops / 3 + 4 * 32 * 320
        assert found["mfu"] == pytest.approx(flops * 128 / (found["step_seconds"] * 100e9))
        assert found["tokens_per_second"] == pytest.approx(128 / found["step_seconds"])
        assert found["rest_seconds"] + sum(found["part_seconds"].values()) == pytest.approx(found["step_seconds"])
        assert found["steps"] == 4
        assert figures(capsys, "--bench-steps", "1")["steps"] == 1
        assert found["compiled"] == "off"

    def test_noise_is_told_on_stderr(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        assert main(argv()) == 0
        assert "warning" not in capsys.readouterr().err
        peaks = iter([100e9, 60e9, 100e9])
        monkeypatch.setattr(peak, "measure_matmul_flops", lambda device, dtype: next(peaks))
        assert main(argv()) == 0
        assert "another process seems to be running; figures are low" in capsys.readouterr().err

    def test_a_device_without_products(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(device: torch.device, dtype: torch.dtype) -> float:
            raise RuntimeError("no kernel")

        monkeypatch.setattr(peak, "measure_matmul_flops", refuse)
        assert figures(capsys)["mfu"] is None

    def test_no_text_is_needed_and_only_figures_are_left(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(argv("--data", "missing.txt")) == 0
        left = {path.parent.name for path in tmp_path.rglob("*") if path.is_file()}
        assert "training-rates" in left
        assert left <= {"training-rates", "products"}, "the latter where bfloat16 is the faster type"

    def test_wrong_usage(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "run.toml").write_text("bench_steps = 3\n")
        for words, says in [
            (["--bench-steps", "0"], "--bench-steps = 0"),
            (["--bench-seconds", "-1"], "--bench-seconds = -1"),
            (["--resume", "runs/x"], "--resume"),
            ([str(tmp_path / "run.toml")], "bench_steps"),
            (["--optim.muon.lr", "1e9", "--optim.muon.weight-decay", "1e9"], "cannot be timed"),
        ]:
            assert main(argv(*words)) == 2
            assert says in capsys.readouterr().err


def test_sustained_share_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up that does not count, then products of 1 and 4 seconds: 2 / 5 of the best rate on average."""
    ticks = iter([0.0, 0.0, 9.0, 9.0, 10.0, 10.0, 14.0, 14.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert SUSTAINED_SHARE(CPU, torch.float64, seconds=0.0) == pytest.approx(2 / 5)
