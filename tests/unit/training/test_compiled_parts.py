"""Which functions torch.compile is given, by the platform that is planned for: nothing is compiled here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import make_config
from torch import Tensor

from gptlab.app.run.session import open_session
from gptlab.runtime.hardware.device import Platform
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.processes.distributed import Group, World
from gptlab.runtime.records.console import QuietConsole
from gptlab.training.compilation import make_passes, warm_up

BLOCKS = {"Block": 1, "GPT.head_loss": 1, "GPT.logits": 1}


@pytest.mark.parametrize(
    ("platform", "ranks", "expected"),
    [
        ("cuda", 1, {"updated": 1, "GPT.loss": 1, "GPT.forward": 1}),
        ("cuda", 2, {"updated": 1, "GPT.embed": 1, **BLOCKS}),
        ("cpu", 2, BLOCKS),
    ],
    ids=["a GPU", "several GPUs", "a CPU"],
)
def test_what_is_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, platform: Platform, ranks: int, expected: dict[str, int]
) -> None:
    """A GPU computes nothing but compiled code. Of several, each part of the model is compiled by itself."""
    config = make_config(folder, "never-made", runtime__compile="on", model__dropout=0.0)
    session = open_session(config, place_of(config), QuietConsole())
    session.state.model.platform = platform
    session.state.strategy.group = Group(World(0, ranks))
    names: dict[str, int] = {}

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        name = getattr(function, "__qualname__", type(function).__name__)
        names[name] = names.get(name, 0) + 1
        assert options["dynamic"] is False
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr("gptlab.training.compilation.WHOLE_MODEL_FLOPS", 0.0)
    passes = make_passes(session.state, session.config, pytest.fail)
    assert names == expected
    tokens = torch.zeros(2, config.model.seq_len, dtype=torch.int64)
    assert torch.equal(passes.loss_sum(tokens, tokens), session.state.model.loss(tokens, tokens))
    assert torch.equal(passes.logits(tokens), session.state.model(tokens))


def fails(*args: Any) -> None:
    raise OSError("no linker")


def gives_zeros(loss: Tensor) -> Tensor:
    """As torch 2.11 compiled the loss of the head."""
    return loss.detach() + 0.0 * loss


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (fails, "no linker"),
        (gives_zeros, f"torch {torch.__version__} compiled a backward pass whose gradients are all zero"),
    ],
)
def test_a_gpu_whose_compiler_fails_trains_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, result: Callable[..., Any], problem: str
) -> None:
    """Muon's update included, which is compiled beside the passes."""

    def broken(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda *args: result(function(*args))

    config = make_config(folder, "never-made", runtime__dtype="float64", runtime__compile="auto")
    session = open_session(config, place_of(config), QuietConsole())
    state = session.state
    state.model.platform = "cuda"
    monkeypatch.setattr(torch, "compile", broken)
    passes = make_passes(state, session.config, pytest.fail)
    assert passes.compiled
    warnings: list[str] = []
    warm_up(state, passes, session.config, session.eval_sequences, warnings.append)
    assert warnings == [f"training without torch.compile, which is slower: torch.compile failed: {problem}"]
    assert not passes.compiled
