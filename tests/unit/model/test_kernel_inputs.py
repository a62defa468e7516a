"""What a caller may give to the C++ kernels in place of what gptlab gives: computed all the same, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gptlab
from gptlab.config.model import Norm
from gptlab.model.gpt import GPT, Linear, build_model
from gptlab.model.head import HeadLoss
from gptlab.model.kernels import fused, ops
from gptlab.runtime.hardware.device import compiler_available

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not compiler_available(CPU), reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def kernels() -> None:
    ops.load_kernels(CPU, torch.float32)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small_model(**changes: Any) -> GPT:
    config = gptlab.recipes.nanochat(depth=1).model
    config = replace(config, n_embd=32, n_head=2, n_kv_head=2, seq_len=300, vocab_size=64, vocab_multiple=1, **changes)
    model = build_model(config, device=CPU, compute_dtype=torch.float32, seed=1)
    for weight in (
        model.head.weight,
        model.blocks[0].attention.out.weight,
    ):  # nothing, or nearly, comes of their first values
        nn.init.normal_(weight, generator=torch.Generator().manual_seed(2))
    return model


def loss_of(model: GPT) -> float:
    tokens = torch.arange(300).reshape(1, 300) % 64
    with torch.no_grad():
        return model.loss(tokens, tokens.roll(7)).item() / 300


class Rounded(nn.Module):
    """A part whose result has another type, as that of F.linear has under autocast."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *inputs: Any) -> Tensor:
        return self.part(*inputs).bfloat16()


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_part_may_return_another_type(norm: Norm) -> None:
    """The kernels would read its memory as if it were theirs: losses came out as nan, or other ones each time."""
    model = small_model(norm=norm, residual_lambdas=False)
    expected = loss_of(model)
    model.blocks[0].attention = Rounded(model.blocks[0].attention)
    assert loss_of(model) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_and_tables_may_have_another_type(dtype: torch.dtype) -> None:
    model = small_model()
    expected = loss_of(model)
    assert loss_of(model.to(dtype)) == pytest.approx(expected, abs=0.02)


def test_a_bias_of_the_second_layer_of_an_mlp_alone_is_added() -> None:
    up, out = Linear(8, 16, bias=False), Linear(16, 8, bias=True)
    x = random(300, 8, seed=1)
    y = ops.mlp(x, up, ops.ACTIVATIONS["relu2"], out)
    torch.testing.assert_close(y, out(up(x).relu().square()))


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
def test_the_default_type_does_not_matter() -> None:
    config = replace(gptlab.recipes.quickstart(depth=1).model, vocab_size=64, seq_len=300)
    model = build_model(config, device=CPU, compute_dtype=torch.float32, seed=1)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert loss_of(model) == pytest.approx(math.log(64), rel=1e-2)  # untrained
    targets = torch.zeros(2, dtype=torch.int64)
    assert fused.losses(torch.zeros(2, 4, dtype=torch.float32), targets).tolist() == pytest.approx([math.log(4)] * 2)
    x = random(3, 8, seed=0).float()
    torch.testing.assert_close(fused.capped_logits(x, x, 3, None), x @ x.T)


def test_whole_numbers_are_numbers() -> None:
    """C takes them in other registers than floats, so that each later one was read from the wrong place."""
    logits = 30 * random(4, 8, seed=3)
    assert torch.equal(fused.softcap(logits, 15), fused.softcap(logits, 15.0))
    x, weight = random(4, 8, seed=4), random(16, 8, seed=5)
    assert torch.equal(fused.capped_logits(x, weight, 16, 15), fused.capped_logits(x, weight, 16, 15.0))
    total, normed = fused.sum_and_layer_norm(x, x, 1, 2, torch.ones(8), None, 0)
    torch.testing.assert_close(total, 3 * x)
    torch.testing.assert_close(normed, nn.functional.layer_norm(3 * x, (8,), eps=0))


def test_value_embeddings_without_gates_and_gates_without_them_are_left_out() -> None:
    """As where a caller moves a block to a layer that has no value embedding, or has one: reading the one that is not
    there ended the process."""
    heads, gates, value = random(1, 3, 4, 6, seed=1), random(1, 3, 1, seed=2), random(1, 3, 6, seed=3)
    expected = fused.prepare_heads(heads, 2, None, None, None, None)
    assert torch.equal(fused.prepare_heads(heads, 2, gates, None, None, None), expected)
    assert torch.equal(fused.prepare_heads(heads, 2, None, value, None, None), expected)


X, WIDER, TARGETS = torch.zeros(300, 8), torch.zeros(33, 9), torch.zeros(300, dtype=torch.int64)


@pytest.mark.parametrize(
    "function",
    [
        lambda: fused.linear(X, WIDER),
        lambda: fused.mlp(X, WIDER, WIDER.T, "relu2"),
        lambda: fused.capped_logits(X, WIDER, 33, None),
        lambda: fused.head_loss(X, WIDER, TARGETS, 33, None),
    ],
    ids=["linear", "mlp", "capped logits", "head loss"],
)
def test_a_weight_of_another_width_is_refused(function: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="x has width 8, and the weight is for 9"):
        function()


HEADS, TABLE, GATES, VALUE = torch.zeros(1, 3, 4, 8), torch.zeros(3, 4), torch.zeros(1, 3, 1), torch.zeros(1, 3, 8)


def rotated(tables: tuple[Tensor, Tensor]) -> Tensor:
    return fused.prepare_heads(HEADS, 2, None, None, tables, None)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda: rotated((TABLE[:2], TABLE)), r"cosines .* \(3, 4\), not \(2, 4\)"),
        (lambda: rotated((TABLE, TABLE[:, :2])), r"sines .* \(3, 4\), not \(3, 2\)"),
        (lambda: fused.prepare_heads(HEADS, 2, GATES, VALUE[..., :4], None, None), r"\(1, 3, 8\), not \(1, 3, 4\)"),
        (lambda: fused.prepare_heads(HEADS, 2, VALUE, VALUE, None, None), r"gates .* \(1, 3, 1\), not \(1, 3, 8\)"),
        (lambda: fused.prepare_heads(HEADS, 1, None, None, None, 1e-5), "4 heads, 1 of them of queries"),
        (lambda: fused.attention(HEADS, 4, None, 0.0), "4 heads, 4 of them of queries"),
        (lambda: fused.attention(torch.zeros(1, 3, 7, 8), 3, None, 0.0), "7 heads, 3 of them of queries"),
        (lambda: fused.layer_norm(X, torch.ones(4), None, 0.0), r"norm's weight .* \(8,\), not \(4,\)"),
        (lambda: fused.layer_norm(X, torch.ones(8), torch.ones(4), 0.0), r"norm's bias .* \(8,\), not \(4,\)"),
        (lambda: fused.mlp(X, WIDER[:, 1:], WIDER, "relu2"), r"output weight .* \(8, 33\), not \(33, 9\)"),
        (lambda: fused.head_loss(X, X, TARGETS, 301, None), "300 rows for 301 entries of the vocabulary"),
        (lambda: fused.capped_logits(X, X, 301, None), "300 rows for 301 entries of the vocabulary"),
        (lambda: fused.head_nats(X, X, TARGETS, 301, None), "300 rows for 301 entries of the vocabulary"),
        (lambda: fused.head_loss(X[:299], X, TARGETS, 300, None), "300 targets for 299 positions"),
    ],
)
def test_other_shapes_are_refused(function: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        function()


def test_targets_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match=r"targets are int64, not torch\.int32"):
        fused.losses(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int32))


def test_a_second_derivative_of_the_loss_is_an_error() -> None:
    """The gradient that reaches a loss needs none itself, so that `once_differentiable` would say nothing."""
    x, head = random(8, 3, seed=1).requires_grad_(), random(32, 3, seed=2)
    loss = HeadLoss.apply(x, head, torch.zeros(8, dtype=torch.int64), 32, None)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(loss, x, create_graph=True)
