"""Activation checkpointing: the same bits, less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import differences, outcome, train
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gptlab.bench.memory import kept_for_backward
from gptlab.config.model import ModelConfig
from gptlab.config.run import RuntimeConfig
from gptlab.model.gpt import GPT
from gptlab.runtime.processes.distributed import Group
from gptlab.training.parallel.strategy import Strategy
from gptlab.training.state import _replace_passes


def test_is_the_same_run(folder: Path) -> None:
    """Dropout included, whose masks are drawn twice."""
    changes: dict[str, Any] = {"model__n_layer": 2, "steps": 3, "sample__prompts": []}
    plain = train(folder, "plain", **changes)
    recomputed = train(folder, "recomputed", runtime__activation_checkpointing=True, **changes)
    assert differences(outcome(plain), outcome(recomputed)) == []


@pytest.mark.parametrize("within_graphs", [True, False], ids=["within graphs", "around graphs"])
def test_blocks_that_are_compiled_one_by_one_are_compiled(within_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo does not look into a module whose `forward` is torch's `checkpoint`. A graph runs in the backward pass,
    too, where it does not compute again."""
    monkeypatch.setattr("gptlab.training.parallel.strategy.COMPILES_CHECKPOINTS", within_graphs)
    torch.compiler.reset()
    model = model_of(2)
    _replace_passes(model, RuntimeConfig(activation_checkpointing=True))
    computed: list[int] = []

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        return lambda *inputs: computed.append(len(inputs)) or graph.forward(*inputs)  # type: ignore[func-returns-value]

    strategy = Strategy(model, None, Group())  # type: ignore[arg-type]
    blocks = strategy.compiled_blocks(lambda function: torch.compile(function, dynamic=False, backend=count))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    expected = model.hidden(tokens)
    computed.clear()
    hidden = model.hidden(tokens, blocks)
    assert torch.equal(hidden, expected)
    assert len(computed) == 2
    hidden.sum().backward()
    assert len(computed) == (2 if within_graphs else 4)


def test_hooks_of_blocks_are_called_whether_these_are_compiled_or_not() -> None:
    """Of compiled blocks they were not, without a word."""
    model = model_of(1)
    model.blocks[0].register_forward_hook(lambda *given: given[2] * 0.0)
    _replace_passes(model, RuntimeConfig(activation_checkpointing=True))
    blocks = Strategy(model, None, Group()).compiled_blocks(  # type: ignore[arg-type]
        lambda function: torch.compile(function, dynamic=False, backend="eager")
    )
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert not model.hidden(tokens).any()
    assert not model.hidden(tokens, blocks).any()


def test_each_block_is_computed_again_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(3)
    calls: list[int] = []
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, of=number: calls.append(of))  # of the module, once
    counted = torch.nn.functional.linear
    products = 0

    def linear(*args: Any) -> Tensor:
        nonlocal products
        products += 1
        return counted(*args)

    monkeypatch.setattr("gptlab.model.kernels.ops.F.linear", linear)
    _replace_passes(model, RuntimeConfig(activation_checkpointing=True))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    loss = model.loss(tokens, tokens)
    forward = products
    loss.backward()
    assert calls == [0, 1, 2]
    assert products == 2 * forward, "the head's products are none of these"


def test_what_is_kept() -> None:
    """What autograd and the checkpoints hold: the plain pass, less what each block keeps beyond what goes into it. Of
    eight alike blocks, one is there at a time."""
    model = model_of(8)
    whole, recomputed = kept_for_backward(model, 4, 16), kept_for_backward(model, 4, 16, recomputed=True)
    short = model_of(7)
    one_more = whole - kept_for_backward(short, 4, 16)
    one_input = recomputed - kept_for_backward(short, 4, 16, recomputed=True)
    assert one_input == 4 * 16 * 32 * 4, "x of one more block, float32"
    # Blocks differ by a kilobyte of masks and statistics.
    assert recomputed == pytest.approx(whole - 7 * one_more + 7 * one_input, rel=0.02)
    seen = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal seen
        seen += tensor.nbytes
        return tensor

    _replace_passes(model, RuntimeConfig(activation_checkpointing=True))
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model.loss(tokens, tokens)
    assert seen < whole / 2


def model_of(n_layer: int) -> GPT:
    config = ModelConfig(
        n_layer=n_layer, n_embd=32, n_head=2, seq_len=16, vocab_size=64, window_pattern="L", value_embeddings="off"
    )
    model = GPT(config)
    model.init_weights(1)
    return model
