"""The kernel for attention on CPUs: against brute force in float64, and against itself."""

from __future__ import annotations

from functools import partial

import oracle_model
import pytest
import torch
from torch import Tensor

from gptlab.model.kernels import fused, ops, torch_ops
from gptlab.runtime.hardware.device import compiler_available

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not compiler_available(CPU), reason="no C++ compiler here")


def brute_force(heads: Tensor, n_head: int, window: int | None, key_offset: bool = False) -> Tensor:
    n_kv_head = (heads.shape[2] - n_head) // 2
    q, k, v = (x.transpose(1, 2) for x in heads.split((n_head, n_kv_head, n_kv_head), dim=2))
    if key_offset:
        k = torch.stack([torch.stack([oracle_model.offset_key(keys) for keys in sequence]) for sequence in k])
    return oracle_model.attention(q, k, v, window).transpose(1, 2)


def random_heads(tokens: int, rows: int, width: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, tokens, rows, width, generator=torch.Generator().manual_seed(tokens))


def both_ways(
    heads: Tensor, n_head: int, window: int | None, weight: Tensor, dropout: float = 0.0, key_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """The kernel's output, and the gradient of its sum weighted by `weight`."""
    heads = heads.detach().requires_grad_()
    y = fused.attention(heads, n_head, window, dropout, key_offset)
    (y * weight).sum().backward()
    assert heads.grad is not None
    return y.detach(), heads.grad


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "error", "gradient_error"),
    # A few roundings of float32, of sums of up to 200 products; in bfloat16 one of the output (up to 4: 2^-7), and one
    # of the weights, whose sum is 1, and of the gradients that products take.
    [(torch.float32, 5e-6, 5e-5), (torch.bfloat16, 2**-7 + 2**-8, 2**-5)],
)
@pytest.mark.parametrize("key_offset", [False, True])
@pytest.mark.parametrize(("n_head", "n_kv_head", "width"), [(2, 2, 32), (4, 2, 16), (3, 1, 40)])
def test_equals_brute_force(
    n_head: int, n_kv_head: int, width: int, key_offset: bool, dtype: torch.dtype, error: float, gradient_error: float
) -> None:
    """Blocks of 64: less than one, one, more, and more than a window needs at one time; windows that end in them, at
    their edges, and beyond the text; widths that are whole vectors and that are not."""
    for tokens, window in [
        (1, None), (5, 2), (5, 10_000), (63, 7), (64, None), (64, 64), (65, 1), (65, 64), (128, 65), (200, None),
        (320, 66), (250, 20),
    ]:  # fmt: skip
        heads = random_heads(tokens, n_head + 2 * n_kv_head, width).to(dtype)
        weight = torch.randn(2, tokens, n_head, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        exact = heads.double().requires_grad_()
        expected = brute_force(exact, n_head, window, key_offset)
        (expected * weight).sum().backward()
        assert exact.grad is not None
        y, gradient = both_ways(heads, n_head, window, weight, key_offset=key_offset)
        where = partial("{} tokens, window {}: {}".format, tokens, window)
        assert y.dtype == gradient.dtype == dtype
        torch.testing.assert_close(y.double(), expected.detach(), rtol=0, atol=error, msg=where)
        torch.testing.assert_close(gradient.double(), exact.grad, rtol=0, atol=gradient_error, msg=where)


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
    y = fused.attention(heads, 1, None, 0.0)
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


def kept(batch: int, tokens: int, n_head: int, window: int | None, dropout: float, seed: int) -> Tensor:
    """The factor of each weight, (batch, n_head, queries, keys), as the kernel draws it: with equal scores and values
    that are rows of an identity matrix, its output is the weights."""
    heads = torch.zeros(batch, tokens, 3 * n_head, tokens)
    heads[:, :, 2 * n_head :] = torch.eye(tokens)[:, None]
    torch.manual_seed(seed)
    y = fused.attention(heads, n_head, window, dropout)
    return y.transpose(1, 2) * torch.arange(1, tokens + 1).clamp(max=window or tokens)[:, None]


@needs_compiler
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 5e-5), (torch.bfloat16, 2**-4)])
@pytest.mark.parametrize(("tokens", "window"), [(5, None), (130, None), (130, 70)])
def test_dropout_equals_brute_force(tokens: int, window: int | None, dtype: torch.dtype, error: float) -> None:
    """Outputs and gradients of (softmax(scores) * factors) @ values in float64."""
    n_head, n_kv_head, width = 4, 2, 24
    factors = kept(2, tokens, n_head, window, 0.3, seed=5).double()
    assert {round(x, 4) for x in factors.unique().tolist()} == {0, 1.4286}
    heads = random_heads(tokens, n_head + 2 * n_kv_head, width).to(dtype)
    exact = heads.double().requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in exact.split((n_head, n_kv_head, n_kv_head), dim=2))
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    positions = torch.arange(tokens)
    distance = positions[:, None] - positions
    hidden = (distance < 0) | (distance >= (window or tokens))
    weights = (q @ k.transpose(2, 3) / width**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    expected = ((weights * factors) @ v).transpose(1, 2)
    weight = torch.randn(2, tokens, n_head, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    (expected * weight).sum().backward()
    assert exact.grad is not None
    torch.manual_seed(5)
    y, gradient = both_ways(heads, n_head, window, weight, dropout=0.3)
    torch.testing.assert_close(y.double(), expected.detach(), rtol=0, atol=error)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=0, atol=error)


@needs_compiler
@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_draws_each_weight_alone(dropout: float) -> None:
    """The share of zeros, and of pairs that are both zero: with the next key, query, head, sequence, and seed. Within
    five standard deviations."""
    tokens = 192
    lost = torch.stack([kept(3, tokens, 3, None, dropout, seed) for seed in range(3)]) == 0
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(lost.shape)
    centered = (lost.double() - dropout) * seen

    def require_none(products: Tensor, count: Tensor, variance: float) -> None:
        assert abs(products.sum()) < 5 * (count.sum() * variance).sqrt()

    variance = dropout * (1 - dropout)
    require_none(centered, seen, variance)
    for axis in range(5):
        pairs, of_seen = (x.unfold(axis, 2, 1).unbind(-1) for x in (centered, seen))
        require_none(pairs[0] * pairs[1], of_seen[0] & of_seen[1], variance**2)


@needs_compiler
def test_dropout_takes_its_draws_from_torch() -> None:
    """So that a resumed run, which restores torch's generator, repeats them; on any number of threads."""
    heads, weight = random_heads(100, 9, 16), torch.ones(2, 100, 3, 16)
    threads = torch.get_num_threads()
    found = []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            torch.manual_seed(7)
            found += both_ways(heads, 3, None, weight, dropout=0.2), both_ways(heads, 3, None, weight, dropout=0.2)
    finally:
        torch.set_num_threads(threads)
    first, second, *again = found
    assert not torch.equal(first[0], second[0])
    for one, other in zip((*first, *second), (*again[0], *again[1]), strict=True):
        assert torch.equal(one, other)


@needs_compiler
def test_which_module_computes() -> None:
    """Also after a model of float32 has loaded the kernels."""
    ops.load_kernels(CPU, torch.float32)
    x = torch.zeros(1)
    assert {ops.implementation(one) for one in (x, x.bfloat16())} == {fused}
    assert {ops.implementation(one) for one in (x.double(), x.half(), x.to("meta"))} == {torch_ops}
