"""The kernels for what is between matrix products, on CPUs: against PyTorch's own operations in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptlab.config.model import Activation, ModelConfig
from gptlab.eval.bits_per_byte import nats_of, token_nats
from gptlab.model.gpt import MLP, Linear, build_model
from gptlab.model.head import HeadLoss, capped_logits
from gptlab.model.kernels import blocks, fused, ops, torch_ops
from gptlab.runtime.hardware.device import compiler_available

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not compiler_available(CPU), reason="no C++ compiler here")

TYPES = [(torch.float32, 3e-6), (torch.bfloat16, 1e-2)]
"""With the error of what is rounded once (2^-24, 2^-8), relative to the largest element; gradients add a few."""
WIDTHS = [1, 8, 24, 37, 128]
"""Less than a vector, whole ones of 4, 8 and 16 elements, and rests."""


@pytest.fixture(autouse=True)
def kernels() -> None:
    ops.load_kernels(CPU, torch.float32)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def require_equal(
    ours: Callable[..., Sequence[Tensor]],
    exact: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    error: float,
) -> None:
    """Outputs, and the gradients of their sum with random weights, of the same numbers in float64."""
    found = []
    for function, wide in ((ours, False), (exact, True)):
        given = [(x.double() if wide else x).detach().requires_grad_() for x in inputs]
        outputs = function(*given)
        weights = [random(*y.shape, seed=9).to(y.dtype) for y in outputs]
        sum(((y * w).sum().double() for y, w in zip(outputs, weights, strict=True)), torch.zeros(())).backward()
        found.append([*(y.detach() for y in outputs), *(x.grad for x in given)])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        size = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=error * size)


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=eps)


@pytest.mark.parametrize(("dtype", "error"), TYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(width: int, dtype: torch.dtype, error: float) -> None:
    x = random(3, 5, width, dtype=dtype)
    require_equal(lambda x: [fused.rms_norm(x, 1e-6)], lambda x: [rms_norm(x)], [x], 4 * error)


@pytest.mark.parametrize(("dtype", "error"), TYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weights", [(1.0, 0.5), (1.0, 1.0)])
def test_sum_and_norm(width: int, weights: tuple[float, float], dtype: torch.dtype, error: float) -> None:
    """200 rows: more than the parts in which sums over rows are made."""
    a, b = weights

    def exact(x: Tensor, y: Tensor) -> list[Tensor]:
        return [a * x + b * y, rms_norm(a * x + b * y)]

    inputs = [random(2, 100, width, seed=seed, dtype=dtype) for seed in (1, 2)]
    require_equal(lambda x, y: fused.sum_and_rms_norm(x, y, a, b, 1e-6), exact, inputs, 4 * error)


@pytest.mark.parametrize(("dtype", "error"), TYPES)
@pytest.mark.parametrize("width", WIDTHS[1:])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(biased: bool, width: int, dtype: torch.dtype, error: float) -> None:
    """Far from zero: the mean is taken away before anything is squared. Gradients of the weights are sums of 200."""
    x = 3 + random(2, 100, width, dtype=dtype)
    weights = [random(width, seed=seed) for seed in ((3, 4) if biased else (3,))]

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        return [fused.layer_norm(x, weight, bias, 1e-5)]

    def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        return [F.layer_norm(x, (width,), weight, bias, 1e-5)]

    require_equal(ours, exact, [x, *weights], 8 * error)


@pytest.mark.parametrize(("dtype", "error"), TYPES)
@pytest.mark.parametrize("weights", [(1.0, 0.5), (1.0, 1.0)])
def test_sum_and_layer_norm(weights: tuple[float, float], dtype: torch.dtype, error: float) -> None:
    a, b = weights

    def exact(x: Tensor, y: Tensor, weight: Tensor) -> list[Tensor]:
        return [a * x + b * y, F.layer_norm(a * x + b * y, (37,), weight, None, 1e-5)]

    inputs = [*(random(2, 100, 37, seed=seed, dtype=dtype) for seed in (1, 2)), random(37, seed=3)]
    require_equal(lambda x, y, w: fused.sum_and_layer_norm(x, y, a, b, w, None, 1e-5), exact, inputs, 8 * error)


def test_learned_weights_before_a_layer_norm() -> None:
    inputs = [*(random(3, 24, seed=seed) for seed in (1, 2)), torch.tensor(0.9), torch.tensor(0.3), random(24, seed=3)]

    def of(norms: ModuleType) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda x, y, a, b, weight: norms.sum_and_layer_norm(x, y, a, b, weight, None, 1e-5)

    require_equal(of(fused), of(torch_ops), inputs, 1e-5)


SIZES = [(1, 1, 1), (37, 25, 51), (130, 700, 70), (9, 64, 2), (531, 20, 8200)]
"""Rests of tiles, panels, and pairs; inputs of more than one panel's depth, few outputs; more rows than a slice has."""
# A few roundings of float32 of sums of up to 8,200 products; in bfloat16, what is rounded is summed once more.
LAYER_ERRORS = [(torch.float32, 3e-6), (torch.bfloat16, 2**-6)]


@pytest.mark.parametrize(("dtype", "error"), LAYER_ERRORS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_linear(rows: int, inputs: int, outputs: int, dtype: torch.dtype, error: float) -> None:
    """Weights are rounded to the type of x; their gradient is not rounded."""
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, seed=1) / inputs**0.5
    require_equal(lambda x, w: [fused.linear(x, w)], lambda x, w: [x @ w.t()], [x, rounded(weight, dtype)], error)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = fused.linear(x, weight)
    torch.testing.assert_close(y, fused.linear(x, rounded(weight, dtype)), rtol=0, atol=0)
    y.backward(torch.ones_like(y))
    assert weight.grad is not None
    expected = x.detach().double().sum(0).expand_as(weight)
    size = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(weight.grad.double(), expected, rtol=0, atol=3e-6 * size)


def test_float32_is_as_exact_as_by_the_library() -> None:
    """Whatever multiplies: AMX has no float32, and sums products of terms (terms.h)."""
    x, weight, dy = random(1000, 300), random(200, 300, seed=1), random(1000, 200, seed=2)

    def products(layer: Callable[[Tensor, Tensor], Tensor], *given: Tensor) -> list[Tensor]:
        leaves = [one.detach().requires_grad_() for one in given[:2]]
        y = layer(*leaves)
        return [y, *torch.autograd.grad(y, leaves, given[2])]

    exact = products(F.linear, x.double(), weight.double(), dy.double())
    ours, library = products(fused.linear, x, weight, dy), products(F.linear, x, weight, dy)
    for right, found, by_library in zip(exact, ours, library, strict=True):
        # Vectors make up to 1.2 times the library's error, AMX less. Without one product of terms it would be far more.
        assert (found - right).norm() < 1.5 * (by_library - right).norm()


@pytest.mark.parametrize(("dtype", "error"), LAYER_ERRORS)
@pytest.mark.parametrize("activation", ["relu2", "gelu"])
@pytest.mark.parametrize(("rows", "width", "hidden"), SIZES)
def test_mlp(rows: int, width: int, hidden: int, activation: Activation, dtype: torch.dtype, error: float) -> None:
    x = random(rows, width, dtype=dtype)
    up, out = random(hidden, width, seed=1) / width**0.5, random(width, hidden, seed=2) / hidden**0.5

    def exact(x: Tensor, up: Tensor, out: Tensor) -> list[Tensor]:
        hidden = F.relu(x @ up.t()).square() if activation == "relu2" else F.gelu(x @ up.t())
        return [hidden @ out.t()]

    inputs = [x, rounded(up, dtype), rounded(out, dtype)]
    require_equal(lambda *given: [fused.mlp(*given, activation)], exact, inputs, error)
    up.requires_grad_()
    with torch.no_grad():  # keeps no derivatives
        y = fused.mlp(x, up, out, activation)
    assert torch.equal(y, fused.mlp(x, up, out, activation))


def test_the_mlp_keeps_the_derivatives_that_a_gradient_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ReLU^2 follow from the hidden activations."""
    given: list[object] = []
    monkeypatch.setattr(fused, "call", lambda name, dtype, *values: given.extend(values[5:6]))
    x, up, out = random(3, 8), random(16, 8).requires_grad_(), random(8, 16).requires_grad_()
    with torch.no_grad():
        fused.mlp(x, up, out, "gelu")
    fused.mlp(x, up, out, "relu2")
    assert given == [None, None]
    fused.mlp(x, up, out, "gelu")
    assert isinstance(given[2], Tensor)


def test_a_layer_norm_whose_weights_are_rounded() -> None:
    """As sharded weights may be: the kernel reads float32."""
    x, weight, bias = (random(*shape, seed=seed) for seed, shape in enumerate(((5, 24), (24,), (24,))))
    rounded = [one.to(torch.bfloat16).requires_grad_() for one in (weight, bias)]
    y = fused.layer_norm(x, *rounded, 1e-5)
    torch.testing.assert_close(y, F.layer_norm(x, (24,), *(one.float() for one in rounded), 1e-5), rtol=0, atol=1e-5)
    y.sum().backward()
    assert [one.grad.dtype for one in rounded if one.grad is not None] == [torch.bfloat16] * 2


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to(dtype).float()


@pytest.mark.parametrize("positions", [ops.KERNEL_POSITIONS - 1, ops.KERNEL_POSITIONS])
def test_many_positions_are_multiplied_by_a_kernel(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the layer has a bias, or the activation is another one."""
    config = replace(MODELS["nanochat"], n_layer=1)
    x = random(1, positions, 64)
    calls: list[str] = []
    for name in ("linear", "mlp"):
        monkeypatch.setattr(fused, name, counted(getattr(fused, name), name, calls))
    monkeypatch.setattr(ops, "_fused", fused)
    many = positions == ops.KERNEL_POSITIONS
    for kind, called in (
        ({}, ["mlp"]), ({"bias": True, "norm": "layernorm"}, []), ({"activation": "gelu_tanh"}, ["linear", "linear"])
    ):  # fmt: skip
        module = MLP(replace(config, **kind))
        y = module(x)
        assert calls == (called if many else [])
        calls.clear()
        exact = module.double()(x.double())
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "error"), TYPES)
def test_learned_weights_of_a_sum(dtype: torch.dtype, error: float) -> None:
    """Their gradients are sums of 2 * 33 * 40 products: in float32 however the activations are rounded."""

    def exact(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [a * x + b * y, rms_norm(a * x + b * y)]

    inputs = [random(2, 33, 40, seed=seed, dtype=dtype) for seed in (1, 2)] + [torch.tensor(0.9), torch.tensor(0.3)]
    require_equal(lambda x, y, a, b: fused.sum_and_rms_norm(x, y, a, b, 1e-6), exact, inputs, 4 * error)


def test_where_only_one_of_the_two_is_used() -> None:
    x, y = random(2, 7, 24, seed=1), random(2, 7, 24, seed=2)
    require_equal(
        lambda x, y: [fused.sum_and_rms_norm(x, y, 1.0, 0.5, 1e-6)[0]], lambda x, y: [x + 0.5 * y], [x, y], 1e-6
    )
    require_equal(
        lambda x, y: [fused.sum_and_rms_norm(x, y, 1.0, 0.5, 1e-6)[1]],
        lambda x, y: [rms_norm(x + 0.5 * y)],
        [x, y],
        1e-5,
    )


@pytest.mark.parametrize(("dtype", "error"), TYPES)
@pytest.mark.parametrize("width", [2, 16, 40])
@pytest.mark.parametrize(("rotates", "normalizes", "adds"), [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_heads(rotates: bool, normalizes: bool, adds: bool, width: int, dtype: torch.dtype, error: float) -> None:
    """Four query heads and two of keys and values. Against PyTorch's operations one by one, which test_model.py
    compares with an oracle."""
    tokens, n_head, n_kv_head = 9, 4, 2
    heads = random(2, tokens, n_head + 2 * n_kv_head, width, dtype=dtype)
    extra = [random(2, tokens, n, seed=5, dtype=dtype) for n in (n_kv_head, n_kv_head * width)] if adds else []
    angles = random(tokens, width // 2, seed=7)
    rotary = (angles.cos(), angles.sin()) if rotates else None

    def exact(heads: Tensor, gates: Tensor | None = None, value: Tensor | None = None) -> list[Tensor]:
        tables = None if rotary is None else (rotary[0].double(), rotary[1].double())
        eps = 1e-6 if normalizes else None
        return [torch_ops.prepare_heads(heads, n_head, gates, value, tables, eps)]

    def ours(heads: Tensor, gates: Tensor | None = None, value: Tensor | None = None) -> list[Tensor]:
        return [fused.prepare_heads(heads, n_head, gates, value, rotary, 1e-6 if normalizes else None)]

    # Two numbers have a norm's gradient in which almost everything cancels.
    require_equal(ours, exact, [heads, *extra], error * (400 if width == 2 else 8))


def test_softcap() -> None:
    """Up to twelve times the cap, where it is flat."""
    x = 12 * random(1003)
    require_equal(lambda x: [fused.softcap(x, 3.0)], lambda x: [3 * torch.tanh(x / 3)], [x], 12e-6)


@pytest.mark.parametrize(("dtype", "error"), TYPES)
@pytest.mark.parametrize("count", [1, 100, 40_000])
def test_relu2(count: int, dtype: torch.dtype, error: float) -> None:
    """One by one, and in so many that threads share them, with a rest."""
    x = random(count + 3, dtype=dtype)
    require_equal(lambda x: [fused.relu2(x)], lambda x: [F.relu(x).square()], [x], error)


@pytest.mark.parametrize(("dtype", "error"), TYPES)
@pytest.mark.parametrize("count", [1, 100, 40_000])
def test_gelu(count: int, dtype: torch.dtype, error: float) -> None:
    """From where it is 0 to where it is x."""
    x = 4 * random(count + 3, dtype=dtype)
    require_equal(lambda x: [fused.gelu(x)], lambda x: [F.gelu(x)], [x], error)


def test_gelu_by_hand() -> None:
    """A normal variable is at most 1 with probability 0.84134; its density there is 0.24197."""
    x = torch.tensor([0.0, 1.0, -1.0, 100.0, -100.0], requires_grad=True)
    y = fused.gelu(x)
    y.sum().backward()
    assert y.tolist() == pytest.approx([0.0, 0.8413447, -0.1586553, 100.0, 0.0], abs=1e-6)
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([0.5, 1.0833155, -0.0833155, 1.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(("dtype", "error"), TYPES)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout(rate: float, dtype: torch.dtype, error: float) -> None:
    """The same elements, forward and backward, whatever the number of threads; how many, within five standard
    deviations. test_attention_kernel.py shows that each is drawn alone."""
    found = []
    threads = torch.get_num_threads()
    try:
        for n, given in ((1, torch.ones(3, 900, 37, dtype=dtype)), (3, random(3, 900, 37, dtype=dtype))):
            torch.set_num_threads(n)
            torch.manual_seed(3)
            x = given.requires_grad_()
            y = fused.dropout(x, rate)
            y.backward(x.detach())
            assert x.grad is not None
            assert torch.equal(y, x.grad)
            found.append(y.detach().double())
    finally:
        torch.set_num_threads(threads)
    factors, dropped = found
    share = factors.eq(0).double().mean().item()
    assert abs(share - rate) < 5 * (rate * (1 - rate) / factors.numel()) ** 0.5
    torch.testing.assert_close(factors[factors > 0].mean().item(), 1 / (1 - rate), rtol=error, atol=0)
    torch.testing.assert_close(dropped, x.detach().double() * factors, rtol=2 * error, atol=0)
    assert not torch.equal(fused.dropout(x, rate), y), "the next draws are others"


@pytest.mark.parametrize(("dtype", "error"), TYPES)
@pytest.mark.parametrize("cap", [None, 15.0, 2.0])
@pytest.mark.parametrize(("entries", "padded"), [(11, 16), (50, 50), (64, 64)])
def test_loss(entries: int, padded: int, cap: float | None, dtype: torch.dtype, error: float) -> None:
    logits, targets = 3 * random(37, padded, dtype=dtype), torch.arange(37) % entries
    targets[::5] = -1
    exact = logits.double().requires_grad_()
    capped = exact[:, :entries] if cap is None else cap * torch.tanh(exact[:, :entries] / cap)
    expected = F.cross_entropy(capped, targets, ignore_index=-1, reduction="sum")
    expected.backward()
    assert exact.grad is not None
    nats, gradient = fused.loss_and_gradient(logits.clone(), targets, entries, cap)
    assert (nats.dtype, gradient.dtype) == (torch.float64, dtype)
    assert nats.item() == pytest.approx(expected.item(), rel=1e-6 if dtype == torch.float32 else 1e-5)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=0, atol=error)
    assert gradient[:, entries:].eq(0).all()
    assert gradient[::5].eq(0).all()


@pytest.mark.parametrize(
    ("dtype", "loss_error", "error"),
    # A few roundings of float32 of sums of up to 8,200 products. In bfloat16 exponentials are right to 4e-6, and an
    # element of a gradient is rounded by 2^-9 before its products, the largest of which make the sum; x's after too.
    [(torch.float32, 1e-6, 3e-6), (torch.bfloat16, 1e-5, 2**-7)],
)
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(
    ("rows", "width", "entries", "vocab"),
    [(1, 1, 1, 1), (37, 25, 51, 45), (130, 300, 70, 70), (531, 20, 8200, 8197)],
)
def test_whole_head(
    rows: int, width: int, entries: int, vocab: int, cap: float | None,
    dtype: torch.dtype, loss_error: float, error: float,
) -> None:  # fmt: skip
    """Rests of tiles, panels and pairs, inputs of more than one panel's depth, and two slices and 19 rows; errors are
    relative to the largest element."""
    x, weight = random(rows, width, dtype=dtype), 3 * random(entries, width, seed=1) / width**0.5
    targets = torch.arange(rows) % vocab
    targets[1::5] = -1
    exact = [one.double().requires_grad_() for one in (x, weight.to(dtype))]
    logits = (exact[0] @ exact[1].t())[:, :vocab]
    capped = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = F.cross_entropy(capped, targets, ignore_index=-1, reduction="sum")
    expected.backward()
    nats, *gradients = fused.head_loss(x, weight, targets, vocab, cap)
    assert nats.item() == pytest.approx(expected.item(), rel=loss_error, abs=loss_error)
    assert [one.dtype for one in gradients] == [dtype, torch.float32]
    for found, one in zip(gradients, exact, strict=True):
        assert one.grad is not None
        size = one.grad.abs().max().item()
        torch.testing.assert_close(found.double(), one.grad, rtol=0, atol=error * size)
    assert gradients[0][1::5].eq(0).all()
    assert gradients[1][vocab:].eq(0).all()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)])
@pytest.mark.parametrize("entries", [7, 1024])
def test_a_kernel_computes_the_whole_head(
    entries: int, dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("head_loss", "loss_and_gradient"):
        monkeypatch.setattr(fused, name, counted(getattr(fused, name), name, calls))
    monkeypatch.setattr(ops, "_fused", fused)
    x, weight = random(5, 8, dtype=dtype).requires_grad_(), random(entries, 8, seed=1).requires_grad_()
    loss = HeadLoss.apply(x, weight, torch.arange(5), entries, 3.0)
    (loss / 5).backward()
    assert calls == ["head_loss"]
    assert loss.dtype == torch.float32
    exact = [one.detach().to(dtype).double().requires_grad_() for one in (x, weight)]
    HeadLoss.apply(*exact, torch.arange(5), entries, 3.0).div(5).backward()
    for ours, theirs in zip((x, weight), exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == ours.dtype
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(
    ("rows", "width", "vocab", "padded"), [(1, 1, 1, 1), (37, 25, 45, 51), (50, 300, 70, 70), (3, 20, 530, 530)]
)
def test_capped_logits(rows: int, width: int, vocab: int, padded: int, cap: float | None, dtype: torch.dtype) -> None:
    """Of numbers in `dtype`; sums of up to 300 products, up to 60, are float32: 14 roundings of the largest. In
    bfloat16, the softcap's exponential is exact to 4e-6 of it, which moves a logit by half the cap times that."""
    x, weight = random(1, rows, width, dtype=dtype), random(padded, width, seed=1)
    exact = (x.double() @ weight.to(dtype).double().t())[..., :vocab]
    logits = fused.capped_logits(x, weight, vocab, cap)
    assert logits.dtype == torch.float32
    capped = exact if cap is None else cap * torch.tanh(exact / cap)
    torch.testing.assert_close(logits.double(), capped, rtol=0, atol=5e-5)


@pytest.mark.parametrize("positions", [ops.KERNEL_POSITIONS - 1, ops.KERNEL_POSITIONS])
def test_logits_of_many_positions_are_computed_by_a_kernel(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they need a gradient; and they are the same."""
    calls: list[str] = []
    monkeypatch.setattr(fused, "capped_logits", counted(fused.capped_logits, "capped_logits", calls))
    monkeypatch.setattr(ops, "_fused", fused)
    head, x = Linear(8, 70, bias=False), random(positions, 8)
    with torch.no_grad():
        found = capped_logits(head, x, 65, 3.0)
    assert bool(calls) == (positions == ops.KERNEL_POSITIONS)
    calls.clear()
    differentiable = capped_logits(head, x, 65, 3.0)
    assert differentiable.requires_grad
    assert not calls
    torch.testing.assert_close(found, differentiable.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("rows", "width", "vocab", "padded"), [(1, 1, 1, 1), (37, 25, 45, 51), (300, 70, 1000, 1000)])
def test_losses_of_few_logits_at_a_time(
    rows: int, width: int, vocab: int, padded: int, cap: float | None, dtype: torch.dtype
) -> None:
    """The bits of the losses of all logits at once."""
    x, weight = random(2, rows, width, dtype=dtype), random(padded, width, seed=1)
    targets = torch.arange(2 * rows).view(2, rows) % (vocab + 1) - 1
    whole = fused.losses(fused.capped_logits(x, weight, vocab, cap).flatten(0, 1), targets.flatten())
    assert torch.equal(fused.head_nats(x, weight, targets, vocab, cap), whole.view(2, rows))


def test_the_losses_of_a_model_are_those_of_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit; by the kernel, unless only `forward` has what a caller hooked."""
    calls: list[str] = []
    monkeypatch.setattr(fused, "head_nats", counted(fused.head_nats, "head_nats", calls))
    config = ModelConfig(n_layer=2, n_embd=32, n_head=2, seq_len=128, vocab_size=65, logit_softcap=2.0)
    model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=0)
    torch.nn.init.normal_(model.head.weight)
    tokens = torch.randint(65, (2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(nats_of(model)(tokens, tokens), token_nats(model(tokens), tokens))
        assert calls == ["head_nats"]
        for part in (model, model.head):
            with part.register_forward_hook(lambda *of_call: 0 * of_call[-1]):
                assert nats_of(model)(tokens, tokens).tolist() == [pytest.approx([math.log(65)] * 128)] * 2
    assert calls == ["head_nats"]


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (37, 45), (300, 4096), (0, 5)])
def test_losses(rows: int, vocab: int) -> None:
    """Logits from -60 to 60; float32 has 2^-24 of the largest of what is added, some 120 nats."""
    logits, targets = 20 * random(rows, vocab), torch.arange(rows) % (vocab + 1) - 1
    exact = F.cross_entropy(logits.double(), targets, ignore_index=-1, reduction="none")
    for computed in (fused.losses(logits, targets), torch_ops.losses(logits, targets)):
        assert computed.dtype == torch.float32
        torch.testing.assert_close(computed.double(), exact, rtol=0, atol=1e-5)


def test_losses_by_hand() -> None:
    """Logits 0 and ln 3: probabilities 1/4 and 3/4. No number among the logits, no number as a loss."""
    logits = torch.tensor([[0.0, 3.0]]).repeat(3, 1).maximum(torch.ones(2)).log()
    assert fused.losses(logits, torch.tensor([0, 1, -1])).tolist() == pytest.approx([1.3862944, 0.2876821, 0], abs=1e-6)
    hidden = torch.tensor([[-torch.inf, 0.0], [torch.nan, 0.0], [torch.inf, 0.0]])
    of_none = fused.losses(hidden, torch.ones(3, dtype=torch.int64))
    assert of_none[0] == 0
    assert of_none[1:].isnan().all()
    with pytest.raises(IndexError, match="target 2 is out of bounds for 2 entries"):
        fused.losses(logits, torch.tensor([0, 2, 1]))


def test_loss_by_hand() -> None:
    """Logits 0 and ln 3: probabilities 1/4 and 3/4."""
    nats, gradient = fused.loss_and_gradient(torch.tensor([[0.0, 3.0]]).log1p().mul(1), torch.tensor([0]), 2, None)
    assert nats.item() == pytest.approx(1.6094379, abs=1e-6)  # ln 5: log1p makes 0 and ln 4 of 0 and 3
    assert gradient.flatten().tolist() == pytest.approx([-0.8, 0.8], abs=1e-6)


def test_a_target_that_is_no_entry() -> None:
    """The kernel would write beyond its memory."""
    with pytest.raises(IndexError, match="target 9 is out of bounds for 7 entries"):
        fused.loss_and_gradient(torch.zeros(3, 8), torch.tensor([0, 9, -1]), 7, None)
    with pytest.raises(IndexError, match="target 7 is out of bounds for 7 entries"):
        fused.head_loss(torch.zeros(3, 4), torch.zeros(8, 4), torch.tensor([0, 7, -1]), 7, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_beyond_the_range_of_exp(dtype: torch.dtype) -> None:
    """Without a softcap the largest takes all; with one, both ends are flat."""
    for cap, expected in ((None, 2000.0), (15.0, 30.0)):
        logits = torch.tensor([[1000.0, -1000.0]], dtype=dtype)
        nats, gradient = fused.loss_and_gradient(logits, torch.tensor([1]), 2, cap)
        assert nats.item() == pytest.approx(expected, abs=1e-3)
        assert gradient.flatten().tolist() == ([1.0, -1.0] if cap is None else [0.0, 0.0])


def test_softcap_of_tiny_and_huge_numbers() -> None:
    """As in float64: 4e-7 is the error of its tanh, and 1e-7 that of dividing by the cap and multiplying by it."""
    sizes = torch.logspace(-30, 30, 6001)
    for x in (sizes, -sizes):
        expected = 15 * torch.tanh(x.double() / 15)
        torch.testing.assert_close(fused.softcap(x, 15.0).double(), expected, rtol=5e-7, atol=0)
    huge = torch.tensor([150.0, torch.inf])
    assert fused.softcap(huge, 15.0).tolist() == [15.0, 15.0]
    assert fused.softcap(-huge, 15.0).tolist() == [-15.0, -15.0]


@pytest.mark.parametrize("cap", [None, 15.0, 40.0, 41.0, 1000.0])
def test_loss_of_equal_logits(cap: float | None) -> None:
    """At both ends of what a softcap makes of them: of two, each is ln 2."""
    for logit in (-1e4, 1e4):
        nats, _ = fused.loss_and_gradient(torch.full((1, 2), logit), torch.tensor([0]), 2, cap)
        assert nats.item() == pytest.approx(0.6931472, abs=1e-5)


@pytest.mark.parametrize("cap", [None, 15.0])
@pytest.mark.parametrize("payload", [1, 2**21 + 1])
def test_any_bits_of_nan_reach_the_loss(payload: int, cap: float | None) -> None:
    """Arithmetic keeps them, and a kernel that adds to an exponent would make a number of them."""
    nan = torch.tensor([0x7FC00000 + payload], dtype=torch.int32).view(torch.float32)
    logits = torch.cat([torch.zeros(39), nan])[None]
    assert fused.loss_and_gradient(logits, torch.tensor([3]), 40, cap)[0].isnan()


@pytest.mark.parametrize("place", [0, 20, 39])
def test_loss_of_one_large_logit(place: int) -> None:
    """All others are 0, in vectors before and after it."""
    logits = torch.zeros(1, 40)
    logits[0, place] = 1000
    for target, expected in ((place, 0), (39 - place, 1000)):
        assert fused.loss_and_gradient(logits.clone(), torch.tensor([target]), 40, None)[0].item() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_reaches_the_loss(bad: float, dtype: torch.dtype) -> None:
    """Where training looks for it. A kernel that compares might lose it."""

    def of(make: Callable[[Tensor], Tensor], *shape: int) -> bool:
        x = random(*shape).to(dtype)
        x.view(-1)[3] = bad
        return bool(make(x).isfinite().all())

    rotary = torch.ones(4, 4), torch.ones(4, 4)
    assert not of(lambda x: fused.rms_norm(x, 1e-6), 2, 24)
    assert not of(lambda x: fused.sum_and_rms_norm(x, x, 1.0, 0.5, 1e-6)[0], 2, 24)
    assert not of(lambda x: fused.prepare_heads(x, 1, None, None, rotary, 1e-6), 1, 4, 3, 8)
    assert not of(lambda x: fused.layer_norm(x, torch.ones(24), None, 1e-5), 2, 24)
    assert not of(lambda x: fused.linear(x, torch.ones(3, 24)), 2, 24)
    assert not of(lambda x: fused.mlp(x, torch.ones(3, 24), torch.ones(24, 3), "gelu"), 2, 24)
    assert not of(fused.gelu, 24)
    assert of(fused.relu2, 24) == (bad == -torch.inf)  # of which PyTorch makes 0, too
    if bad != -torch.inf:  # the logit of an entry that never occurs
        assert not of(lambda x: fused.loss_and_gradient(x, torch.tensor([1, 2]), 24, None)[0], 2, 24)
        if dtype == torch.float32:
            assert not of(lambda x: fused.head_loss(x, torch.ones(24, 8), torch.tensor([1, 2]), 24, None)[0], 2, 8)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """Sums over rows are those of learned weights; everything else belongs to a row."""
    x, y = random(5, 100, 96, seed=1), random(5, 100, 96, seed=2)
    logits, targets = random(300, 500), torch.arange(300)
    found = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            given = [one.detach().requires_grad_() for one in (x, y, torch.tensor(0.9), torch.tensor(0.3))]
            total, normed = fused.sum_and_rms_norm(*given, 1e-6)
            given.append(torch.ones(96).requires_grad_())
            (fused.relu2(normed) * total).sum().backward()
            up, out = (random(*shape, seed=5).requires_grad_() for shape in ((120, 96), (96, 120)))
            normed = fused.layer_norm(fused.mlp(x, up, out, "gelu"), given[-1], None, 1e-5)
            fused.linear(normed, up).square().sum().backward()
            given += [up, out]
            losses = fused.loss_and_gradient(logits.clone(), targets, 500, 9.0)
            head = fused.head_loss(logits, random(900, 500, seed=3), targets, 900, None)
            found.append([*(one.grad for one in given), *losses, *head])
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        assert one is not None
        assert three is not None
        assert torch.equal(one, three)


MODELS = {
    "nanogpt": ModelConfig(
        n_layer=2, n_embd=32, n_head=2, seq_len=80, vocab_size=50, norm="layernorm", position="learned", bias=True,
        qk_norm=False, residual_lambdas=False, activation="gelu", value_embeddings=False, tied_head=True,
    ),
    "nanogpt without bias": ModelConfig(
        n_layer=2, n_embd=32, n_head=2, seq_len=80, vocab_size=50, norm="layernorm", position="learned", bias=False,
        qk_norm=False, residual_lambdas=False, activation="gelu", value_embeddings=False, tied_head=True,
    ),
    "nanochat": ModelConfig(
        n_layer=2, n_embd=64, n_head=4, n_kv_head=2, seq_len=80, vocab_size=50, position="rope", qk_norm=True,
        window_pattern="SL", value_embeddings=True, residual_lambdas=True, logit_softcap=15.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_with_them_is_the_model_without(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and every gradient against those in float64, part by part, as with a hook, and of all blocks at once: the
    error is at most that of PyTorch's own operations in the type, and a third more, since both round at random."""
    config = MODELS[kind]
    tokens = torch.randint(50, (4, 80), generator=torch.Generator().manual_seed(0))
    of_one = {
        "nanogpt": {"attention", "layer_norm", "sum_and_layer_norm", "gelu"},
        "nanogpt without bias": {"attention", "layer_norm", "sum_and_layer_norm", "linear", "mlp"},
        "nanochat": {"attention", "rms_norm", "sum_and_rms_norm", "prepare_heads", "linear", "mlp"},
    }
    whole = {
        "nanogpt": of_one["nanogpt"],
        "nanogpt without bias": {"blocks", "layer_norm"}, "nanochat": {"blocks", "rms_norm"},
    }  # fmt: skip
    found = []
    for compute_dtype, by_kernel, hooked in (
        (torch.float64, False, False), (dtype, False, False), (dtype, True, True), (dtype, True, False),
    ):  # fmt: skip
        model = build_model(config, device=CPU, compute_dtype=compute_dtype, seed=1)
        calls: list[str] = []
        for name in ("head_loss", "relu2", *set().union(*of_one.values())):
            monkeypatch.setattr(fused, name, counted(getattr(fused, name), name, calls))
        monkeypatch.setattr(blocks._Blocks, "apply", counted(blocks._Blocks.apply, "blocks", calls))
        if hooked:
            model.blocks[0].register_forward_hook(lambda *_: None)
        if not by_kernel:
            monkeypatch.setattr(ops, "_fused", None)
        with torch.no_grad():
            for number, weight in enumerate(model.parameters()):  # none is zero, as some are at first
                weight.add_(0.1 * random(*weight.shape, seed=number))
        loss = model.loss(tokens, tokens.roll(-1, 1))
        loss.backward()
        assert bool(calls) == by_kernel
        if by_kernel:
            assert set(calls) == {"head_loss"} | (of_one if hooked else whole)[kind]
        found.append([loss.double()] + [p.grad.double() for p in model.parameters() if p.grad is not None])
        monkeypatch.undo()
    exact, *others = found
    plain, *ours = [
        sum(((one - true).norm() / true.norm()) ** 2 for one, true in zip(x, exact, strict=True)) for x in others
    ]
    assert max(ours) < 1.33**2 * plain


@pytest.mark.parametrize(
    "function",
    [
        lambda x: fused.rms_norm(x, 1e-6),
        lambda x: fused.sum_and_rms_norm(x, x, 1.0, 0.5, 1e-6)[0],
        lambda x: fused.prepare_heads(x, 1, None, None, None, 1e-6),
        lambda x: fused.attention(x, 1, None, 0.0),
        fused.relu2,
        fused.gelu,
        lambda x: fused.softcap(x, 2.0),
        lambda x: fused.dropout(x, 0.5),
        lambda x: fused.layer_norm(x, torch.ones(8), None, 1e-5),
        lambda x: fused.linear(x, torch.ones(3, 8)),
        lambda x: fused.mlp(x, torch.ones(3, 8), torch.ones(8, 3), "relu2"),
    ],
)
def test_a_second_derivative_is_an_error(function: Callable[[Tensor], Tensor]) -> None:
    """It would be wrong without a word: gradients come from C++, which autograd does not see."""
    x = random(1, 4, 3, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def counted(function: Callable[..., Tensor], name: str, calls: list[str]) -> Callable[..., Tensor]:
    def call(*args: object) -> Tensor:
        calls.append(name)
        return function(*args)

    return call


def test_a_compiled_model_does_not_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile fuses what it sees; a kernel would be a break in its graph."""
    config = replace(MODELS["nanochat"], n_layer=1)
    model = build_model(config, device=CPU, compute_dtype=torch.float32, seed=1)
    calls: list[str] = []
    monkeypatch.setattr(fused, "attention", counted(fused.attention, "attention", calls))
    tokens = torch.zeros(1, 80, dtype=torch.int64)
    # Only traced: what Inductor makes of a whole graph is another test's.
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True, dynamic=False)
    assert compiled(tokens, tokens).item() == pytest.approx(model.loss(tokens, tokens).item(), rel=1e-5)
    assert calls == ["attention"], "of the model that is not compiled"
