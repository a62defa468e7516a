"""What multiplies: the faster of two, timed once, and the same for a run's whole life."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_runs import command, killed_at, train
from torch import Tensor

from gptlab.config.model import ModelConfig
from gptlab.config.run import Products
from gptlab.model.gpt import build_model
from gptlab.model.kernels import blocks, choice, fused, ops
from gptlab.runtime.hardware.device import compiler_available

CPU = torch.device("cpu")
MODEL = ModelConfig(n_layer=2, n_embd=32, n_head=2, seq_len=32, vocab_size=1024)

pytestmark = pytest.mark.skipif(not compiler_available(CPU), reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def _cache_and_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "cache_root", lambda _: tmp_path / "cache")
    monkeypatch.setattr(ops, "_products", "kernels")
    ops.load_kernels(CPU, torch.bfloat16)


def time(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[str]:
    """Both parts take so long by the kernels and by the library; returns what is timed from here on."""
    timed: list[str] = []

    def taken(function: Callable[[], None]) -> float:
        function()
        timed.append(ops.products())
        return seconds[ops.products()]

    monkeypatch.setattr(choice, "_seconds", taken)
    return timed


@pytest.mark.parametrize(
    ("library", "chosen"), [(0.5, "library"), (0.89, "library"), (0.91, "kernels"), (2.0, "kernels")]
)
def test_the_library_is_chosen_where_it_is_clearly_faster(
    library: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = time(monkeypatch, kernels=1.0, library=library)
    assert choice.faster_products(MODEL, torch.bfloat16) == chosen
    in_turn = (["kernels"] * 2 + ["library"] * 2) * choice._ROUNDS
    assert timed == in_turn * (3 if chosen == "library" else 1), "MLP and head by each; a surprise three times"
    assert ops.products() == "kernels", "as before"


def test_another_program_that_slows_the_kernels_down_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all rounds of one timing, and in every other of the next."""
    calls: list[str] = []

    def taken(function: Callable[[], None]) -> float:
        turn = len(calls) // 4
        calls.append(ops.products())
        disturbed = turn < choice._ROUNDS or turn % 2 == 0
        return 9.0 if ops.products() == "kernels" and disturbed else 1.0

    monkeypatch.setattr(choice, "_seconds", taken)
    assert choice.faster_products(MODEL, torch.bfloat16) == "kernels"
    assert len(calls) == 8 * choice._ROUNDS


def test_a_large_model_is_timed_for_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, now = time(monkeypatch, kernels=1.0, library=2.0), itertools.count()
    monkeypatch.setattr(choice, "time", mock.Mock(perf_counter=lambda: next(now)))
    assert choice.faster_products(MODEL, torch.bfloat16) == "kernels"
    assert len(timed) == 3 * 4


def test_it_is_timed_once_for_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed = time(monkeypatch, kernels=1.0, library=2.0)
    once = 4 * choice._ROUNDS
    first = choice.product_times(MODEL, torch.bfloat16)
    assert first == choice.ProductTimes(kernels=3.0, library=6.0)  # two MLPs and the head
    assert choice.product_times(MODEL, torch.bfloat16) == first
    assert len(timed) == once
    choice.product_times(replace(MODEL, n_layer=3), torch.bfloat16)
    assert len(timed) == 2 * once
    for damage in ("", "{}", '{"kernels": 1.0, "library": -1.0}', '{"kernels": "x", "library": 1.0}'):
        for file in (tmp_path / "cache/products").iterdir():
            file.write_text(damage)
        before = len(timed)
        assert choice.product_times(MODEL, torch.bfloat16) == first
        assert len(timed) == before + once, damage


def test_a_cache_that_cannot_be_written_costs_only_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    timed = time(monkeypatch, kernels=1.0, library=0.5)
    assert choice.faster_products(MODEL, torch.bfloat16) == choice.faster_products(MODEL, torch.bfloat16) == "library"
    assert len(timed) == 2 * 12 * choice._ROUNDS


def test_float32_has_a_choice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    time(monkeypatch, kernels=1.0, library=2.0)
    assert choice.faster_products(MODEL, torch.bfloat16) == "kernels"
    ops.load_kernels(CPU, torch.float32)
    time(monkeypatch, kernels=1.0, library=0.5)
    assert choice.faster_products(MODEL, torch.float32) == "library"


def test_without_kernels_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = time(monkeypatch, kernels=1.0, library=0.1)
    monkeypatch.setattr(ops, "_fused", None)  # no compiler
    assert choice.faster_products(MODEL, torch.bfloat16) == "kernels"
    assert timed == []


def test_real_times() -> None:
    """Whether they were remembered or not, random numbers are those that the seed gives."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    times = choice.product_times(MODEL, torch.bfloat16)
    assert times is not None
    assert 0 < times.kernels < 10
    assert 0 < times.library < 10
    assert torch.equal(torch.get_rng_state(), before)


def test_what_the_library_multiplies() -> None:
    """Linear layers and the head, and nothing else; to what bfloat16 rounds, to 2^-9 of each number."""
    model = build_model(MODEL, device=CPU, compute_dtype=torch.bfloat16, seed=0)
    model.head.weight.data.mul_(100)
    tokens = torch.randint(1024, (8, 32), generator=torch.Generator().manual_seed(0))

    def computed(products: Products) -> tuple[set[str], Tensor, Tensor, Tensor]:
        """Which kernels were called; the loss, the logits, and all gradients."""
        names = (
            "attention", "linear", "mlp", "head_loss", "capped_logits", "sum_and_rms_norm", "relu2",
            "loss_and_gradient", "softcap",
        )  # fmt: skip
        with ExitStack() as stack:
            kernels = {
                name: stack.enter_context(mock.patch.object(fused, name, wraps=getattr(fused, name))) for name in names
            }
            kernels["blocks"] = stack.enter_context(mock.patch.object(blocks, "hidden", wraps=blocks.hidden))
            ops.multiply_by(products)
            loss = model.loss(tokens, tokens.roll(1, 1))
            loss.backward()
            with torch.no_grad():
                logits = model(tokens)
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return {name for name, kernel in kernels.items() if kernel.called}, loss.detach(), logits, torch.cat(gradients)

    ours, *by_kernels = computed("kernels")
    theirs, *by_library = computed("library")
    assert ours == {"blocks", "head_loss", "capped_logits"}
    assert theirs == {"attention", "sum_and_rms_norm", "relu2", "loss_and_gradient", "softcap"}
    for found, expected in zip(by_kernels, by_library, strict=True):
        assert (found - expected).norm() < 2**-7 * expected.norm()


def test_a_run_keeps_what_it_multiplies_by(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is resumed, repeated or evaluated, whatever is faster by then."""
    flags: dict[str, Any] = {"runtime__dtype": "bfloat16", "runtime__device": "cpu", "steps": 5}

    def timed_as(products: str) -> None:
        monkeypatch.setattr(choice, "faster_products", lambda *_: products)

    def recorded(name: str) -> str:
        return json.loads((folder / name / "run.json").read_text())["implementations"]["products"]

    timed_as("library")
    train(folder, "by-library", **flags)
    with killed_at("train", 3):
        train(folder, "stopped", **flags)
    timed_as("kernels")
    assert ops.products() == "library"
    code, out, _ = command(["train", "--resume", folder / "stopped"])
    assert (code, out.count("warning")) == (0, 0)
    assert recorded("stopped") == recorded("by-library") == "library"
    metrics = [(folder / name / "metrics.jsonl").read_text().splitlines() for name in ("stopped", "by-library")]
    losses = [[json.loads(line).get("loss") for line in lines] for lines in metrics]
    assert losses[0] == losses[1]
    ops.multiply_by("kernels")
    val_bpb = json.loads((folder / "stopped/summary.json").read_text())["val_bpb"]
    assert json.loads(command(["eval", folder / "stopped", "--json"])[1])["val_bpb"] == val_bpb
    assert ops.products() == "library"
    train(folder, "by-kernels", **flags)
    assert (recorded("by-kernels"), ops.products()) == ("kernels", "kernels")
    train(folder, "asked", **flags, runtime__products="library")
    assert recorded("asked") == "library"
