"""8-bit products: rounding against the list of all numbers of the type, products against exact ones of what was
rounded, and a model that trains with them and is evaluated without."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import arguments, command
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gptlab.config.errors import ConfigError
from gptlab.config.model import ModelConfig
from gptlab.config.recipes import RECIPES
from gptlab.model.gpt import GPT, Linear, build_model
from gptlab.model.head import SLICE_LOGITS, HeadLoss
from gptlab.model.kernels import fp8
from gptlab.model.kernels.fp8 import E4M3, E5M2, Fp8HeadLoss, Fp8Linear, Fp8Product, use_fp8

CPU = torch.device("cpu")
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def nearest(x: Tensor, kind: torch.dtype) -> Tensor:
    """What 8 bits make of x, in float64: scaled so that its largest entry is the largest of the type, each entry
    becomes the nearest of all numbers of the type, of two equally near the one with an even last bit."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(kind).double()
    is_number = values.isfinite()
    order = values[is_number].argsort(stable=True)
    values, codes = values[is_number][order], codes[is_number][order]
    factor = x.double().abs().max() / LARGEST[kind]
    distance = (x.double()[..., None] / factor - values).abs()
    closest = distance.amin(-1, keepdim=True)
    choice = ((distance <= closest * (1 + 1e-9)) * torch.where(codes % 2 == 0, 2, 1)).argmax(-1)
    return values[choice] * factor


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
def test_rounding_takes_the_nearest_number_of_the_type(kind: torch.dtype, size: float) -> None:
    x = torch.randn(40, 30) * size * 10 ** torch.linspace(-6, 0, 30)
    values, factor = fp8.rounded(x, kind)
    assert values.dtype == kind
    # float32's quotient may be on the other side of a middle: one in thousands, and as near to within 2^-23.
    differ = (values.double() * factor.double() - nearest(x, kind)).abs() > 1e-6 * x.abs()
    assert differ.sum() <= 1
    assert values.double().abs().max() == LARGEST[kind]


def test_rounding_of_what_is_no_number_and_of_zeros() -> None:
    """A broken gradient stays one, so that the step is skipped."""
    for broken in (torch.nan, torch.inf, -torch.inf):
        values, factor = fp8.rounded(torch.tensor([1.0, broken]), E5M2)
        assert not (values.float() * factor).isfinite().all()
    values, factor = fp8.rounded(torch.zeros(3), E4M3)
    assert (values.float() * factor == 0).all()


def test_product_and_its_gradients_are_those_of_the_rounded_factors() -> None:
    """In float32, where only the order of additions differs."""
    x, weight, dy = torch.randn(48, 160), torch.randn(128, 160) / 12, torch.randn(48, 128)
    x.requires_grad_()
    weight.requires_grad_()
    y = Fp8Product.apply(x, weight)
    y.backward(dy)
    x8, weight8, dy8 = nearest(x.detach(), E4M3), nearest(weight.detach(), E4M3), nearest(dy, E5M2)
    for found, expected in ((y, x8 @ weight8.T), (x.grad, dy8 @ weight8), (weight.grad, dy8.T @ x8)):
        assert found is not None
        error = (found.detach().double() - expected).norm() / expected.norm()
        assert error < 1e-5
    true = x @ weight.T
    assert 0.005 < (y - true).norm() / true.norm() < 0.05  # 3 bits: at most 6.25% for an entry


def test_head_loss_is_that_of_the_rounded_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slices of 16 positions, by the definition of cross-entropy; then its gradient by autograd through it."""
    monkeypatch.setattr(fp8, "SLICE_LOGITS", 16 * 144)
    monkeypatch.setattr(fp8, "MAX_SLICES", 48)
    x, weight = torch.randn(48, 160), torch.randn(144, 160) / 12
    targets = torch.randint(140, (48,))
    targets[5] = -1
    x.requires_grad_()
    weight.requires_grad_()
    loss = Fp8HeadLoss.apply(x, weight, targets, 140, 15.0)
    loss.backward()
    weight8, expected, dx, dw = nearest(weight.detach(), E4M3), 0.0, [], torch.zeros(144, 160, dtype=torch.float64)
    for xs, ys in zip(x.detach().split(16), targets.split(16), strict=True):
        x8 = nearest(xs, E4M3)
        logits = (x8 @ weight8.T).requires_grad_()
        capped = 15 * torch.tanh(logits / 15)[:, :140]
        nats = torch.nn.functional.cross_entropy(capped, ys, ignore_index=-1, reduction="sum")
        expected += nats.item()
        dz8 = nearest(torch.autograd.grad(nats, logits)[0], E5M2)
        dx.append(dz8 @ weight8)
        dw += dz8.T @ x8
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    for found, right in ((x.grad, torch.cat(dx)), (weight.grad, dw)):
        assert found is not None
        # A few gradients are rounded to the other neighbor, since the logits differ in their last bits.
        assert (found.double() - right).norm() < 1e-3 * right.norm()


MODEL = ModelConfig(n_layer=1, n_embd=128, n_head=2, seq_len=32, vocab_size=300, window_pattern="L", init="gpt2")


def small_model(seed: int = 1) -> GPT:
    """Planned for a GPU, computed on a CPU."""
    model = GPT(MODEL, torch.bfloat16, "cuda")
    model.init_weights(seed)
    return model


def gradients(model: GPT, tokens: Tensor) -> tuple[float, Tensor]:
    loss = model.loss(tokens, tokens.roll(-1, 1))
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_model_trains_in_8_bits_and_is_evaluated_in_16() -> None:
    plain, tokens = small_model(), torch.randint(300, (2, 32))
    narrow = copy.deepcopy(plain)
    use_fp8(narrow)
    assert list(narrow.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(narrow.eval()(tokens), plain.eval()(tokens))
        assert not torch.equal(narrow.train()(tokens), plain.train()(tokens))
    (loss, gradient), (expected, exact) = gradients(narrow, tokens), gradients(plain, tokens)
    assert loss == pytest.approx(expected, rel=0.01)
    assert torch.nn.functional.cosine_similarity(gradient, exact, 0) > 0.98
    odd = tokens[:, :31]  # 62 rows are no multiple of 16: in 16 bits
    assert torch.equal(narrow.loss(odd, odd), plain.loss(odd, odd))


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_layers_of_nanochat_on_the_meta_device() -> None:
    """All but the gates of value embeddings, which are 32 wide: three products for each, and nothing waits."""
    config = replace(RECIPES["nanochat"]().model, n_layer=2, vocab_size=4096)
    with torch.device("meta"):
        model = GPT(config, torch.bfloat16, "cuda")
        tokens = torch.empty(2, config.seq_len, dtype=torch.int64)
    use_fp8(model)
    left = {name for name, module in model.named_modules() if type(module) is Linear}
    assert left == {"blocks.1.attention.value_gate"}
    slices = 2 * 2048 * 4096 // SLICE_LOGITS
    n_layers = sum(isinstance(module, Fp8Linear) for module in model.modules())
    assert n_layers == 2 * 4 + 1
    with Counted() as counted:
        model.loss(tokens, tokens).backward()
    assert counted.operators["aten._scaled_mm.default"] == 3 * (n_layers - 1) + 3 * slices
    assert counted.operators["aten._local_scalar_dense.default"] == 0


def test_compiles_to_one_graph() -> None:
    with torch.device("meta"):
        model = GPT(MODEL, torch.bfloat16, "cuda")
        tokens = torch.empty(2, 32, dtype=torch.int64)
    use_fp8(model)

    def loss(x: Tensor) -> Tensor:
        return model.head_loss(model.blocks[0].mlp(x), tokens)

    x = torch.empty(2, 32, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    torch.compile(loss, backend="aot_eager", dynamic=False, fullgraph=True)(x).backward()
    assert x.grad is not None


def test_sizes_that_stay_in_16_bits() -> None:
    with torch.device("meta"):
        sizes = [(128, 128), (112, 256), (256, 112), (136, 128), (128, 136)]
        assert [fp8.suits(Linear(*size)) for size in sizes] == [True, False, False, False, False]


def test_where_it_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refused(dtype: torch.dtype = torch.bfloat16) -> str:
        with torch.device("meta"):
            model = GPT(MODEL, dtype, "cuda")
        with pytest.raises(ConfigError) as error:
            use_fp8(model)
        assert not any(isinstance(module, Fp8Linear) for module in model.modules())
        return str(error.value)

    assert "give runtime.dtype bfloat16" in refused(torch.float16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert "this GPU has compute capability 8.6, and 8.9 (Ada, Hopper) is the first" in refused()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    use_fp8(small_model())
    monkeypatch.undo()
    code, _, text = command(["train", *arguments(folder, "refused", {"runtime.fp8": "true"})])
    assert code == 2
    assert "runtime.fp8" in text
    assert "only NVIDIA's GPUs" in text


def test_loss_of_other_models_is_unchanged() -> None:
    assert small_model().head.loss is HeadLoss


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu(compiled: bool) -> None:
    """cuBLAS takes these layouts, and its products are those of the CPU: loss and gradients to bfloat16's 8 bits."""
    if torch.cuda.get_device_capability() < fp8.CAPABILITY:
        pytest.skip("needs a CUDA device of compute capability 8.9")
    here, tokens = small_model(), torch.randint(300, (2, 32))
    there = build_model(MODEL, device=torch.device("cuda"), compute_dtype=torch.bfloat16, seed=1)
    for model in (here, there):
        use_fp8(model)
    if compiled:
        there.loss = torch.compile(there.loss, dynamic=False)  # type: ignore[method-assign]
    (expected, exact), (loss, gradient) = gradients(here, tokens), gradients(there, tokens.cuda())
    assert loss == pytest.approx(expected, rel=2e-3)
    assert torch.nn.functional.cosine_similarity(gradient.cpu(), exact, 0) > 0.999
