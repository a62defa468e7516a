"""The kernels for linear layers on CPUs: against float64, against themselves, and without them. On processors where
they do not pay they are tested all the same: there nothing else would call them."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from narrow_kernels import call, kernels_for
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gptlab.config.model import Activation, ModelConfig
from gptlab.model.gpt import GPT, Attention, Linear, build_model
from gptlab.model.kernels import linear_kernel
from gptlab.model.kernels.linear_kernel import enough_tokens, linear_by_kernel, linear_kernel_pays, mlp_by_kernel
from gptlab.runtime.hardware.device import compiler_available

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not compiler_available(CPU), reason="no C++ compiler here")

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


@pytest.fixture(autouse=True)
def _kernels() -> None:
    linear_kernel._multiple()


def draw(seed: int, *shape: int, deviation: float = 1.0) -> Tensor:
    return deviation * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def results(function: Callable[..., Tensor], inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    """The function's value, and the gradients of its sum weighted by `weight`."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), inputs)]


def assert_close(got: Tensor, exact: Tensor) -> None:
    """To the roundings of float32: sums of up to 1,600 products, each partial sum with an error of 6e-8 of its size.
    The library's largest errors are 4e-7 of the largest element, the kernels' 5e-7."""
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


def assert_as_exact(function: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    doubles = [x.double() for x in inputs]
    weight = draw(9, *exact(*doubles).shape)
    for got, expected in zip(results(function, inputs, weight), results(exact, doubles, weight.double()), strict=True):
        assert_close(got, expected)


# Tokens: tiles of 6 in blocks of 48, sums of 256 at a time, stages of 768: less than one of each, one, and more.
@needs_compiler
@pytest.mark.parametrize("tokens", [1, 5, 6, 47, 48, 49, 100, 257, 700, 1600])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (64, 192), (80, 48), (320, 112), (32, 272)])
def test_linear_equals_float64(tokens: int, inputs: int, outputs: int) -> None:
    x, weight = draw(tokens, tokens, inputs), draw(1, outputs, inputs, deviation=inputs**-0.5)
    assert_as_exact(linear_by_kernel, F.linear, [x, weight])


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 48, 131, 900])
@pytest.mark.parametrize(("width", "hidden"), [(16, 64), (48, 144), (64, 272)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_equals_float64(tokens: int, width: int, hidden: int, activation: Activation) -> None:
    x = draw(tokens, 2, tokens, width)
    up, out = draw(1, hidden, width, deviation=width**-0.5), draw(2, width, hidden, deviation=hidden**-0.5)
    assert_as_exact(
        lambda *t: mlp_by_kernel(*t, activation), lambda x, u, o: F.linear(ACTIVATIONS[activation](x @ u.T), o),
        [x, up, out],
    )  # fmt: skip


@needs_compiler
def test_by_hand() -> None:
    """Two tokens, (1, 2) and (3, 4) in the first channels; weights that add and subtract them, then ReLU squared:
    h = (3, -1) and (7, -1), a = (9, 0) and (49, 0), y = 2 a. Backward from ones: da = 2, dh = 2 * 2 h = 12 and 28."""
    x, up, out = torch.zeros(2, 16), torch.zeros(16, 16), torch.zeros(16, 16)
    x[:, :2] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    up[:2, :2] = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    out[0, :2] = 2
    weight = torch.zeros(2, 16)
    weight[:, 0] = 1
    y, dx, dup, dout = results(lambda *t: mlp_by_kernel(*t, "relu2"), [x, up, out], weight)
    torch.testing.assert_close(y[:, 0], torch.tensor([18.0, 98.0]))
    torch.testing.assert_close(dx[:, :2], torch.tensor([[12.0, 12.0], [28.0, 28.0]]))
    torch.testing.assert_close(dup[:2, :2], torch.tensor([[12.0 + 3 * 28, 2 * 12.0 + 4 * 28], [0.0, 0.0]]))
    torch.testing.assert_close(dout[0, :2], torch.tensor([58.0, 0.0]))


@needs_compiler
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_their_ends(activation: Activation) -> None:
    """h from -1e4 to 1e4: the value is 0 or h (h squared), the derivative 0, 1 or 2 h, and nothing overflows."""
    h = torch.tensor([0.0, -0.0, 1e-30, 1e-4, -1e-4, 3.0, -3.0, 6.0, -6.0, 13.0, -13.0, 90.0, -90.0, 1e4, -1e4, 0.5])
    eye = torch.eye(16)
    y, dx, _, _ = results(lambda *t: mlp_by_kernel(*t, activation), [h.expand(4, 16), eye, eye], torch.ones(4, 16))
    exact = h.double().requires_grad_()
    value = ACTIVATIONS[activation](exact)
    (derivative,) = torch.autograd.grad(value.sum(), exact)
    torch.testing.assert_close(y[0].double(), value.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx[0].double(), derivative, rtol=1e-6, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_lost(activation: Activation, broken: float) -> None:
    """In one channel of token 70: it must reach that token's outputs, where training looks for it, and no other's."""
    x, up, out = draw(0, 100, 32), draw(1, 64, 32), draw(2, 32, 64)
    x[70, 3] = broken
    for y in (mlp_by_kernel(x, up, out, activation), linear_by_kernel(x, up)):
        assert not y[70].isfinite().any()
        assert y[:70].isfinite().all()
        assert y[71:].isfinite().all()


@needs_compiler
def test_bits_depend_neither_on_threads_nor_on_the_other_tokens() -> None:
    x, up, out = draw(0, 300, 48), draw(1, 112, 48), draw(2, 48, 112)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(
                results(lambda *t: mlp_by_kernel(*t, "gelu"), [x, up, out], torch.ones(300, 48))
                + results(linear_by_kernel, [x, up], torch.ones(300, 112))
            )
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        assert torch.equal(one, three)
    assert torch.equal(mlp_by_kernel(x[77:], up, out, "gelu"), mlp_by_kernel(x, up, out, "gelu")[77:])
    assert torch.equal(linear_by_kernel(x[77:], up), linear_by_kernel(x, up)[77:])


MODELS = {
    "nanogpt": ModelConfig(
        n_layer=2, n_embd=32, n_head=2, seq_len=80, vocab_size=50, norm="layernorm", position="learned",
        activation="gelu", tied_head=True,
    ),
    "nanochat": ModelConfig(
        n_layer=2, n_embd=64, n_head=4, n_kv_head=2, seq_len=80, vocab_size=50, position="rope", qk_norm=True,
        window_pattern="SL", value_embeddings=True, activation="relu2",
    ),
}  # fmt: skip


class Called(TorchDispatchMode):
    """Counts the kernels' operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "gptlab":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


@needs_compiler
def test_a_block_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two linear layers and an MLP a layer; a text of few tokens calls none of them. FLOPs are those of the layers."""
    monkeypatch.setattr(linear_kernel, "_multiple", lambda: 16)
    model = build_model(MODELS["nanogpt"], device=CPU, compute_dtype=torch.float32, seed=1)
    with Called() as called, FlopCounterMode(display=False) as by_kernels:
        gradients_of(model, model.loss)
    linear = {name: n for name, n in called.counts.items() if not name.startswith("attention")}
    assert linear == {"linear_forward": 4, "linear_backward": 4, "mlp_forward": 2, "mlp_backward": 2}
    with Called() as called:
        model(torch.zeros(1, 63, dtype=torch.int64))
    assert not [name for name in called.counts if not name.startswith("attention")]
    for module in model.modules():
        if isinstance(module, Linear):
            module.by_kernel = False
    with FlopCounterMode(display=False) as by_library:
        gradients_of(model, model.loss)
    assert by_kernels.get_total_flops() == by_library.get_total_flops()


def gradients_of(model: GPT, loss: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    tokens = torch.randint(50, (3, 80), generator=torch.Generator().manual_seed(0))
    loss(tokens, tokens.roll(-1, 1)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@needs_compiler
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_with_them_is_the_model_without(kind: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient, to float32's roundings."""
    monkeypatch.setattr(linear_kernel, "_multiple", lambda: 16)
    with_them = build_model(MODELS[kind], device=CPU, compute_dtype=torch.float32, seed=1)
    monkeypatch.setattr(linear_kernel, "_multiple", lambda: None)
    without = build_model(MODELS[kind], device=CPU, compute_dtype=torch.float32, seed=1)
    for model, expected in ((with_them, True), (without, False)):
        for block in model.blocks:
            assert isinstance(block.attention, Attention)
            assert [layer.by_kernel for layer in (block.attention.qkv, block.attention.out)] == [expected] * 2
            assert [layer.by_kernel for layer in (block.mlp.up, block.mlp.out)] == [expected] * 2  # type: ignore[union-attr]
    loss = torch.compile(with_them.loss, dynamic=False) if compiled else with_them.loss
    got, expected_gradients = gradients_of(with_them, loss), gradients_of(without, without.loss)
    assert got.keys() == expected_gradients.keys() == dict(without.named_parameters()).keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_what_they_are_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases, widths that are no whole vectors, large layers, other types and devices, few tokens, other processors."""
    monkeypatch.setattr(linear_kernel, "_multiple", lambda: 16)
    assert linear_kernel_pays(Linear(32, 48, bias=False))
    assert not linear_kernel_pays(Linear(32, 48))
    assert not linear_kernel_pays(Linear(40, 48, bias=False))
    assert not linear_kernel_pays(Linear(48, 40, bias=False))
    assert not linear_kernel_pays(Linear(4096, 4096, bias=False))
    assert enough_tokens(torch.zeros(2, 32, 5))
    assert not enough_tokens(torch.zeros(1, 63, 5))
    for dtype in (torch.float64, torch.bfloat16):
        assert not any(by_kernel(build_model(MODELS["nanogpt"], device=CPU, compute_dtype=dtype, seed=1)))
    with torch.device("meta"):
        model = GPT(MODELS["nanogpt"])
    model.choose_kernels()
    assert not any(by_kernel(model))
    monkeypatch.setattr(linear_kernel, "_multiple", lambda: None)
    assert not linear_kernel_pays(Linear(32, 48, bias=False))


def by_kernel(model: nn.Module) -> list[bool]:
    return [module.by_kernel for module in model.modules() if isinstance(module, Linear)]


@needs_compiler
def test_they_are_for_amd_processors_with_avx512() -> None:
    """Linux says what processor this is."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("no /proc/cpuinfo here")
    text = cpuinfo.read_text(encoding="utf-8")
    assert linear_kernel_pays(Linear(32, 48, bias=False)) == ("AuthenticAMD" in text and "avx512f" in text)


@needs_compiler
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names processors of x86-64")
@pytest.mark.parametrize("processor", ["x86-64", "haswell"])
def test_built_for_narrower_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    """SSE2 and AVX2: tiles of other shapes."""
    library = kernels_for(processor, tmp_path, monkeypatch)
    assert not library.linear_pays()
    multiple = library.linear_multiple()
    assert multiple == {"x86-64": 4, "haswell": 8}[processor]
    tokens, width, hidden = 300, 5 * multiple, 13 * multiple
    x, dy = draw(0, tokens, width), draw(3, tokens, width)
    up, out = draw(1, hidden, width, deviation=width**-0.5), draw(2, width, hidden, deviation=hidden**-0.5)
    h, y, dx, dup, dout = (torch.empty_like(t) for t in (x @ up.T, x, x, up, out))
    scratch = torch.empty(max(library.mlp_forward_scratch(width, hidden, 1), 2 * tokens * hidden))
    call(library.mlp_forward, x, up, out, h, y, scratch, tokens, width, hidden, 0, 1)
    call(library.mlp_backward, x, up, out, h, dy, dx, dup, dout, scratch, tokens, width, hidden, 0, 1)
    exact = [t.double() for t in (x, up, out)]
    expected = results(lambda x, u, o: F.linear(F.gelu(x @ u.T), o), exact, dy.double())
    for got, should in zip((y, dx, dup, dout), expected, strict=True):
        assert_close(got, should)
    one, back = torch.empty(tokens, hidden), draw(4, tokens, hidden)
    call(library.linear_forward, x, up, one, scratch, tokens, width, hidden, 1)
    call(library.linear_backward, x, up, back, dx, dup, tokens, width, hidden, 1)
    expected = results(F.linear, exact[:2], back.double())
    for got, should in zip((one, dx, dup), expected, strict=True):
        assert_close(got, should)
