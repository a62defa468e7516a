"""The size of a run follows from real steps, timed on this machine after compiling, and `plan` remembers them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tiny_runs import write_corpus

from gptlab.bench import timing, training_rate
from gptlab.bench.training_rate import PRODUCTS_SHARE, Rate, limited_machine, remember_rate, remembered_rate, time_rate
from gptlab.cli.main import main
from gptlab.config.load import apply_overrides
from gptlab.config.recipes.quickstart import quickstart
from gptlab.config.run import RunConfig
from gptlab.model.counting import flops_per_token
from gptlab.model.gpt import build_model
from gptlab.runtime.hardware.peak import Peak
from gptlab.runtime.hardware.place import place_of
from gptlab.training.state import TrainState
from gptlab.training.step import LossFunction

FIELDS = {
    "model.n_layer": 2, "model.n_embd": 32, "model.n_head": 2, "model.seq_len": 32, "tokenizer.vocab_size": 300,
    "batch.micro_sequences": 2, "batch.total_tokens": 8 * 64, "runtime.device": "cpu", "runtime.dtype": "float32",
    "runtime.compile": "off", "runtime.threads": 1,
}  # fmt: skip
RATE = Rate(tokens_per_second=1000.0, flops_per_second=2e9, tokens_per_step=64, date="2026-11-22")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path / "cache"))


def config(**changes: object) -> RunConfig:
    return apply_overrides(RunConfig(), FIELDS | {name.replace("__", "."): value for name, value in changes.items()})


def silent(text: str) -> None:
    """Shows nothing."""


def test_is_that_of_the_median_step_of_real_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps really run, on two micro-batches of 64 tokens each; by the clock one untimed, then 1, 2 and 9 s."""
    moved: list[bool] = []
    clock = iter([50.0, 1.0, 9.0, 2.0])
    whole_steps = timing.whole_steps

    def on_the_clock(state: TrainState, loss_sum: LossFunction, config: RunConfig, at_most: int) -> list[float]:
        before = [p.detach().clone() for p in state.model.parameters()]
        whole_steps(state, loss_sum, config, 1)
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True)))
        return [next(clock)]

    monkeypatch.setattr(timing, "whole_steps", on_the_clock)
    monkeypatch.setattr(training_rate, "TIMED_STEPS", 3)
    rate = time_rate(config(), place_of(config()), silent, silent)
    assert moved == [True] * 4
    assert (rate.tokens_per_second, rate.tokens_per_step) == (128 / 2, 128)
    model = build_model(
        replace(config().model, vocab_size=300), device=torch.device("cpu"), compute_dtype=torch.float32, seed=1
    )
    assert rate.flops_per_second == 64 * flops_per_token(model).total


def test_is_remembered_for_the_same_steps_only() -> None:
    place = place_of(config())
    assert remembered_rate(config(), place) is None
    remember_rate(config(), place, RATE)
    assert remembered_rate(config(), place) == RATE
    # What does not decide the speed of a step finds it too; what decides it does not.
    assert remembered_rate(config(seed=3, batch__total_tokens=64, optim__muon__lr=0.5), place) == RATE
    for field, value in (
        ("model.n_layer", 3), ("batch.micro_sequences", 4), ("data.mask_documents", True), ("runtime.compile", "auto"),
        ("runtime.products", "library"), ("runtime.activation_checkpointing", True), ("runtime.fp8", True),
        ("optim.matrix_optimizer", "adamw"), ("optim.muon.orthogonalizer", "svd"), ("optim.muon.iterations", 4),
    ):  # fmt: skip
        assert remembered_rate(apply_overrides(config(), {field: value}), place) is None, field
    in_steps = apply_overrides(config(), {"horizon.unit": "steps", "horizon.amount": 9.0})
    assert remembered_rate(in_steps, place) == RATE
    exact = apply_overrides(in_steps, {"parallel.exact_any_world_size": True})
    assert remembered_rate(exact, place) is None
    assert remembered_rate(config(), replace(place, threads=7)) is None


def test_a_busy_moment_does_not_change_the_first_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(peak: float | None, threads: int = 1) -> float | None:
        place = replace(place_of(config()), peak=Peak(peak, "measured"), threads=threads)
        monkeypatch.setattr(training_rate, "place_of", lambda *_: place)
        return limited_machine(config()).most_flops_per_second

    assert [limit(peak) for peak in (1e11, 2e11, 1.5e11)] == [PRODUCTS_SHARE * peak for peak in (1e11, 2e11, 2e11)]
    assert limit(1e11, threads=7) == PRODUCTS_SHARE * 1e11
    assert limit(None) is None


def test_faster_products_make_the_rest_of_a_step_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX, two threads multiply 2,000 GFLOP/s and train at 545 to 740 (docs/LOG.md, 2026-11-29): the first size
    that is timed is the one that three minutes are for."""
    place = replace(place_of(config()), peak=Peak(2e12, "measured"), threads=2)
    monkeypatch.setattr(training_rate, "place_of", lambda *_: place)
    machine = limited_machine(config())
    assert machine.most_flops_per_second == 680e9
    timed = [replace(machine, flops_per_second=rate) for rate in (545e9, 700e9)]
    sizes = [quickstart(machine=one) for one in (machine, *timed)]
    assert {(one.model.n_layer, one.batch.total_tokens) for one in sizes} == {(4, 8192)}


DAMAGES = [
    ("tokens_per_second", "fast"),
    ("tokens_per_second", -1.0),
    ("tokens_per_step", None),
    ("tokens_per_step", 0),
]


@pytest.mark.parametrize("text", ["", "{}", *(json.dumps(asdict(RATE) | {name: value}) for name, value in DAMAGES)])
def test_a_damaged_record_is_none(text: str, tmp_path: Path) -> None:
    place = place_of(config())
    remember_rate(config(), place, RATE)
    [path] = (tmp_path / "cache" / "training-rates").iterdir()
    path.write_text(text)
    assert remembered_rate(config(), place) is None


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    remember_rate(config(), place_of(config()), RATE)


def test_train_sizes_itself_by_its_steps_and_plan_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line: the steps are timed, the size follows and is explained, run.json holds the figure."""
    write_corpus(tmp_path / "corpus")
    timed: list[RunConfig] = []

    def rate(config: RunConfig, place: object, warn: object, show: object) -> Rate:
        timed.append(config)
        return replace(RATE, flops_per_second=2e6)

    monkeypatch.setattr(training_rate, "time_rate", rate)
    words = ["--data", str(tmp_path / "corpus"), "--run-dir", str(tmp_path / "run"), "--minutes", "0.001",
             "--tokenizer.kind", "byte", "--device", "cpu", "--compile", "off", "--runtime.threads", "1",
             "--eval.tokens", "1024", "--sample.max-tokens", "1", "--log.report", "false"]  # fmt: skip
    assert main(["train", *words]) == 0
    # The size guessed for so short a run also follows from its speed: the shallowest model, the smallest steps.
    assert [(c.model.n_layer, c.batch.micro_sequences) for c in timed] == [(1, 4)]
    assert (
        "= 1.2e+05 FLOP: at least 2.5 tokens per parameter, at most 4.6 sqrt(tokens) a step" in capsys.readouterr().out
    )
    assert json.loads((tmp_path / "run" / "run.json").read_text())["training_flops_per_second"] == 2e6
    assert json.loads((tmp_path / "run" / "config.json").read_text())["batch"]["total_tokens"] == 4096
