"""The kernel for float32 attention on CPUs: against brute force in float64, against itself, and without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import oracle_model
import pytest
import torch
from torch import Tensor

from gptlab.config.model import ModelConfig
from gptlab.model.gpt import build_model
from gptlab.model.kernels import ops
from gptlab.model.kernels.attention_kernel import attention_by_kernel, load_attention_kernel
from gptlab.model.kernels.library import Library
from gptlab.runtime.hardware.device import compiler_available

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not compiler_available(CPU), reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def _kernel() -> None:
    load_attention_kernel()


def brute_force(heads: Tensor, n_head: int, window: int | None) -> Tensor:
    n_kv_head = (heads.shape[2] - n_head) // 2
    q, k, v = (x.transpose(1, 2) for x in heads.split((n_head, n_kv_head, n_kv_head), dim=2))
    return oracle_model.attention(q, k, v, window).transpose(1, 2)


def random_heads(tokens: int, rows: int, width: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, tokens, rows, width, generator=torch.Generator().manual_seed(tokens))


def both_ways(heads: Tensor, n_head: int, window: int | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's output, and the gradient of its sum weighted by `weight`."""
    heads = heads.detach().requires_grad_()
    y = attention_by_kernel(heads, n_head, window)
    (y * weight).sum().backward()
    assert heads.grad is not None
    return y.detach(), heads.grad


@needs_compiler
def test_a_machine_that_compiles_has_the_kernel() -> None:
    assert isinstance(load_attention_kernel(), Library)


@needs_compiler
@pytest.mark.parametrize(("n_head", "n_kv_head", "width"), [(2, 2, 32), (4, 2, 16), (3, 1, 40)])
def test_equals_brute_force(n_head: int, n_kv_head: int, width: int) -> None:
    """Blocks of 64: less than one, one, more; windows that end in them, at their edges, and beyond the text; widths
    that are whole vectors and that are not. A few roundings of float32, of sums of up to 200 products."""
    for tokens, window in [
        (1, None), (5, 2), (5, 10_000), (63, 7), (64, None), (64, 64), (65, 1), (65, 64), (128, 65), (200, None),
    ]:  # fmt: skip
        heads = random_heads(tokens, n_head + 2 * n_kv_head, width)
        weight = torch.randn(2, tokens, n_head, width, generator=torch.Generator().manual_seed(1))
        exact = heads.double().requires_grad_()
        expected = brute_force(exact, n_head, window)
        (expected * weight).sum().backward()
        assert exact.grad is not None
        y, gradient = both_ways(heads, n_head, window, weight)
        where = partial("{} tokens, window {}: {}".format, tokens, window)
        torch.testing.assert_close(y.double(), expected.detach(), rtol=0, atol=5e-6, msg=where)
        torch.testing.assert_close(gradient.double(), exact.grad, rtol=0, atol=5e-5, msg=where)


@needs_compiler
def test_by_hand() -> None:
    """Equal scores: each output is the mean of the values so far, 1, 2, 3. The gradient of their sum reaches value 1
    as 1 + 1/2 + 1/3, value 2 as 1/2 + 1/3, value 3 as 1/3."""
    heads = torch.zeros(1, 3, 3, 4)
    heads[0, :, 2, 0] = torch.tensor([1.0, 2.0, 3.0])
    weight = torch.zeros(1, 3, 1, 4)
    weight[..., 0] = 1
    y, gradient = both_ways(heads, 1, None, weight)
    torch.testing.assert_close(y[0, :, 0, 0], torch.tensor([1.0, 1.5, 2.0]))
    torch.testing.assert_close(gradient[0, :, 2, 0], torch.tensor([11 / 6, 5 / 6, 1 / 3]))


@needs_compiler
def test_large_scores_stay_finite() -> None:
    """Scores of +-1e4: the best key takes all, as in float64, forward and backward."""
    heads = random_heads(130, 3, 16)
    heads[:, :, :2] *= 50
    y, gradient = both_ways(heads, 1, None, torch.ones(2, 130, 1, 16))
    torch.testing.assert_close(y.double(), brute_force(heads.double(), 1, None), rtol=0, atol=2e-3)
    assert gradient.isfinite().all()


@needs_compiler
@pytest.mark.parametrize("row", [0, 1, 2])
def test_what_is_no_number_is_not_lost(row: int) -> None:
    """In the query, the key or the value of token 70: it must reach the loss, where training looks for it. What comes
    before it stays, but for values in the same tile: nothing times NaN is NaN in any product of matrices."""
    heads = random_heads(100, 3, 16)
    heads[0, 70, row, 3] = torch.nan
    y = attention_by_kernel(heads, 1, None)
    assert y[0, :64].isfinite().all()
    assert y[1].isfinite().all()
    assert not y[0, 70].isfinite().all()
    if row != 0:
        assert not y[0, 71:].isfinite().all(dim=-1).any()


@needs_compiler
def test_what_is_no_number_stays_with_its_query() -> None:
    """In a width that is no whole vector, where the next token's numbers lie in the same one."""
    heads = random_heads(100, 3, 40)
    heads[0, 70, 0, 3] = torch.nan
    _, gradient = both_ways(heads, 1, None, torch.ones(2, 100, 1, 40))
    assert not gradient[0, 70, 0].isfinite().any()
    assert gradient[0, :70, 0].isfinite().all()
    assert gradient[0, 71:, 0].isfinite().all()
    assert gradient[1].isfinite().all()


@needs_compiler
def test_bits_depend_neither_on_threads_nor_on_the_rest_of_the_batch() -> None:
    heads = random_heads(150, 8, 32, batch=6)
    weight = torch.randn(6, 150, 4, 32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = both_ways(heads, 4, 40, weight)
        torch.set_num_threads(3)
        together = both_ways(heads, 4, 40, weight)
    finally:
        torch.set_num_threads(threads)
    halves = [both_ways(heads[i : i + 3], 4, 40, weight[i : i + 3]) for i in (0, 3)]
    for one, three, half in zip(alone, together, zip(*halves, strict=True), strict=True):
        assert torch.equal(one, three)
        assert torch.equal(one, torch.cat(half))


def counted(calls: list[int]) -> Callable[[Tensor, int, int | None], Tensor]:
    def kernel(heads: Tensor, n_head: int, window: int | None) -> Tensor:
        calls.append(n_head)
        return attention_by_kernel(heads, n_head, window)

    return kernel


MODELS = {
    "packed": ModelConfig(
        n_layer=2, n_embd=32, n_head=2, seq_len=80, vocab_size=50, norm="layernorm", position="learned"
    ),
    "rope, norms, windows, values": ModelConfig(
        n_layer=2, n_embd=64, n_head=4, n_kv_head=2, seq_len=80, vocab_size=50, position="rope", qk_norm=True,
        window_pattern="SL", value_embeddings=True,
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, None) for kind in MODELS), ("rope, norms, windows, values", "aot_eager")],
)
def test_a_model_with_it_is_the_model_without(kind: str, backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and every gradient, to float32's roundings; compiled, with this backend. To a compiler the kernel is one
    operator; Inductor itself compiles a run in test_train.py."""
    config = MODELS[kind]
    tokens = torch.randint(50, (3, 80), generator=torch.Generator().manual_seed(0))
    gradients = []
    for by_kernel in (True, False):
        model = build_model(config, device=CPU, compute_dtype=torch.float32, seed=1)
        calls: list[int] = []
        monkeypatch.setattr(ops, "_attention_kernel", counted(calls) if by_kernel else None)
        loss = torch.compile(model.loss, backend=backend, dynamic=False) if backend and by_kernel else model.loss
        loss(tokens, tokens.roll(-1, 1)).backward()
        assert len(calls) == (config.n_layer if by_kernel else 0)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[1].items():
        assert gradient is not None
        torch.testing.assert_close(
            gradients[0][name], gradient, rtol=1e-4, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@needs_compiler
def test_what_it_is_not_for_is_computed_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other types and devices, and dropout: also after a model of float32 has loaded it."""
    calls: list[int] = []
    monkeypatch.setattr(ops, "_attention_kernel", counted(calls))
    heads = torch.randn(1, 4, 2, 8)
    for other in (heads.double(), heads.bfloat16(), heads.to("meta")):
        assert ops.attention(other, other, other, window=None).dtype == other.dtype
    ops.attention(heads, heads, heads, window=None, dropout=0.5)
    assert calls == []
    ops.attention(heads, heads, heads, window=None)
    assert calls == [2]
