"""What run.json says of the functions that a Python caller gives."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gptlab.app.run.own_parts import OwnParts
from gptlab.config.model import ModelConfig
from gptlab.model.changed import apply_change
from gptlab.model.gpt import GPT, Linear, build_model
from gptlab.model.kernels import fused, ops
from gptlab.runtime.hardware.device import compiler_available

CPU = torch.device("cpu")


def plain(model: nn.Module) -> None:
    pass


def rescaled(model: nn.Module, x: float = 1.0, *, y: Any = None) -> None:
    pass


def around(x: object) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        rescaled(model, y=x)

    return change


def with_default(x: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module, x: float = x) -> None:
        rescaled(model, y=x)

    return change


class Change:
    def __init__(self, x: float) -> None:
        self.x = x

    def __call__(self, model: nn.Module) -> None:
        rescaled(model, self.x)

    def bound(self, model: nn.Module) -> None:
        rescaled(model, self.x)


def identity(part: Callable[..., Any]) -> Any:
    return OwnParts(change_model=part).facts()["own_parts"]["change_model"]


def test_a_part_has_one_name_in_the_program_and_for_programs_that_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(
        "from gptlab.app.run.own_parts import OwnParts\n"
        "def change(model):\n    pass\n"
        "print(OwnParts(change_model=change).facts()['own_parts']['change_model']['name'], end='')\n"
    )
    started = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, check=True, text=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert started.stdout == identity(importlib.import_module("program").change)["name"] == "program.change"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (around, "around.<locals>.change"),
        (lambda x: around({"rates": [x, (1, "a")]}), "around.<locals>.change"),
        (lambda x: around(around(x)), "around.<locals>.change"),
        (lambda x: around(torch.sin if x == 1 else torch.cos), "around.<locals>.change"),
        (with_default, "with_default.<locals>.change"),
        (lambda x: partial(rescaled, x=x), "rescaled"),
        (lambda x: partial(rescaled, y=around(x)), "rescaled"),
        (Change, "Change"),
        (lambda x: Change(x).bound, "Change.bound"),
    ],
)
def test_functions_of_one_source_differ_by_what_they_hold(make: Callable[[float], Any], name: str) -> None:
    one, again, other = identity(make(1.0)), identity(make(1.0)), identity(make(0.01))
    assert one["name"] == other["name"] == f"test_own_parts.{name}"
    assert one["sha256"] == again["sha256"] is not None
    assert one["sha256"] != other["sha256"]


def test_what_holds_nothing_is_its_source() -> None:
    """As in runs of earlier versions."""
    assert identity(plain)["sha256"] == hashlib.sha256(inspect.getsource(plain).encode()).hexdigest()


def test_what_has_no_text_is_named_by_its_type() -> None:
    """So that the source is still told: two tensors of other numbers are alike."""
    assert identity(around(torch.ones(2))) == identity(around(torch.zeros(3))) != identity(around(1.0))


def test_a_function_that_has_no_source() -> None:
    assert identity(eval("lambda model: None"))["sha256"] is None

    def itself(model: nn.Module) -> None:
        itself(model)

    assert identity(itself)["sha256"] is None


def test_layers_that_cast_their_weights_take_the_dtype_of_the_run() -> None:
    """The class that `help(gptlab.train)` names; torch's own fails."""
    config = ModelConfig(n_layer=1, n_embd=16, n_head=2, seq_len=8, vocab_size=32)
    model = build_model(config, device=CPU, compute_dtype=torch.bfloat16, seed=0)
    tokens = torch.zeros(2, 8, dtype=torch.int64)

    def with_layers(kind: type[nn.Linear]) -> Callable[[GPT], None]:
        def change(model: GPT) -> None:
            model.blocks[0].mlp = nn.Sequential(kind(16, 32), nn.GELU(), kind(32, 16))

        return change

    apply_change(model, with_layers(Linear), 0, CPU)
    model.loss(tokens, tokens).backward()
    assert {(w.dtype, w.grad.dtype) for w in model.blocks[0].mlp.parameters()} == {(torch.float32, torch.float32)}
    apply_change(model, with_layers(nn.Linear), 0, CPU)
    with pytest.raises(RuntimeError, match="dtype"):
        model.loss(tokens, tokens)


@pytest.mark.skipif(not compiler_available(CPU), reason="no C++ compiler here")
@pytest.mark.parametrize("place", ["hook", "change_model"])
def test_models_that_it_loads_change_nothing_for_the_run(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Not what multiplies matrices, nor how many threads do: a run went on with those of a run that its hook loaded."""
    config = ModelConfig(n_layer=1, n_embd=16, n_head=2, seq_len=8, vocab_size=32)
    model = build_model(config, device=CPU, compute_dtype=torch.float32, seed=0)
    monkeypatch.setattr(ops, "_products", "library")

    def state() -> tuple[object, ...]:
        return ops.products(), ops.implementations(CPU, torch.float32), fused.loaded, torch.get_num_threads()

    def load(_: object) -> None:
        build_model(config, device=CPU, compute_dtype=torch.bfloat16, seed=0)
        torch.set_num_threads(before[-1] + 1)
        assert all(now != then for now, then in zip(state(), before, strict=True))
        if place == "hook":
            raise ZeroDivisionError

    before: Any = state()
    if place == "hook":
        call = OwnParts(on_eval=load).on_line(CPU)
        assert call is not None
        with pytest.raises(ZeroDivisionError):
            call("eval", {})
    else:
        apply_change(model, load, 0, CPU)
    assert state() == before


def test_a_hook_may_turn_gradients_off() -> None:
    """The next step ended with a traceback: its loss had none."""
    call = OwnParts(on_step=lambda _: torch.set_grad_enabled(False)).on_line(CPU)
    assert call is not None
    try:
        call("train", {})
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
