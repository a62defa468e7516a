"""Attention against brute force: odd sizes, windows that fit nowhere, shared key-value heads, low precision, cost."""

from __future__ import annotations

import itertools
from functools import partial

import oracle_model
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gptlab.model.attention import blocked_attention, cached_attention, offset_keys
from gptlab.model.kernels import torch_ops

HEADS = [(2, 2), (4, 2), (3, 1)]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, dropout: float = 0.0) -> Tensor:
    """`torch_ops.attention` with heads before tokens."""
    heads = torch.cat((q, k, v), dim=1).transpose(1, 2)
    return torch_ops.attention(heads, q.shape[1], window, dropout).transpose(1, 2)


def random_heads(
    n_tokens: int, n_head: int, n_kv_head: int, dtype: torch.dtype = torch.float64, width: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_tokens)
    shapes = [(2, heads, n_tokens, width) for heads in (n_head, n_kv_head, n_kv_head)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 64, 129, 301])
def test_equals_brute_force(n_tokens: int) -> None:
    """301 tokens make 3 blocks of full attention and 8 of a short window, with a shorter last one in both."""
    q, k, v = random_heads(n_tokens, 2, 1)
    for window in (None, 1, 2, 5, 64, 127, 128, 129, 300, 301, 302, 10_000):
        expected = oracle_model.attention(q, k, v, window)
        for attention in (blocked_attention, causal_attention):
            actual = attention(q, k, v, window=window)
            where = partial("window {}: {}".format, window)
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=where)


@pytest.mark.parametrize(("n_head", "n_kv_head"), HEADS)
@pytest.mark.parametrize("window", [None, 1, 30])
def test_gradients_and_grouped_heads_equal_brute_force(n_head: int, n_kv_head: int, window: int | None) -> None:
    inputs = [x.requires_grad_() for x in random_heads(150, n_head, n_kv_head)]
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    weight = torch.randn(2, n_head, 150, 4, dtype=torch.float64)
    (causal_attention(*inputs, window=window) * weight).sum().backward()
    (oracle_model.attention(*copies, window) * weight).sum().backward()
    for actual, expected in zip(inputs, copies, strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [None, 3])
def test_by_hand(window: int | None) -> None:
    """Equal scores: each output is the mean of the visible values 1, 2, 3, 4, 5."""
    q, k = torch.zeros(2, 1, 1, 5, 4)
    v = torch.arange(1.0, 6.0).view(1, 1, 5, 1).expand(1, 1, 5, 4)
    means = [1.0, 1.5, 2.0, 2.5, 3.0] if window is None else [1.0, 1.5, 2.0, 3.0, 4.0]
    out = causal_attention(q, k, v, window=window)
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor(means))


@pytest.mark.parametrize(("n_head", "n_kv_head"), HEADS)
def test_cached_attention_is_the_tail_of_the_whole(n_head: int, n_kv_head: int) -> None:
    q, k, v = random_heads(20, n_head, n_kv_head)
    for window, n_queries in itertools.product([None, 1, 4, 9, 50], [1, 3, 20]):
        expected = oracle_model.attention(q, k, v, window)[:, :, -n_queries:]
        actual = cached_attention(q[:, :, -n_queries:], k, v, window=window)
        where = partial("window {}, {} queries: {}".format, window, n_queries)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=where)


@pytest.mark.parametrize("window", [None, 40])
def test_bfloat16_keeps_its_type_and_stays_near(window: int | None) -> None:
    """Outputs of size up to 3 with 8 bits of mantissa: a rounding is 2^-8 of that, and three come together."""
    q, k, v = random_heads(200, 4, 2, torch.bfloat16, width=16)
    out = causal_attention(q, k, v, window=window)
    assert out.dtype == torch.bfloat16
    expected = oracle_model.attention(q.double(), k.double(), v.double(), window)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.05)


def test_key_offset_by_hand() -> None:
    """Heads of width 8 have four rotary frequencies: channels 2 and 3, 6 and 7 are the slower half. Token 0 keeps its
    own, and token 2 too where it begins a document."""
    k = torch.arange(24.0).view(1, 3, 1, 8)
    expected = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 2, 3, 12, 13, 6, 7], [16, 17, 10, 11, 20, 21, 14, 15]])
    assert torch.equal(offset_keys(k)[0, :, 0], expected.float())
    begins = torch.tensor([[True, False, True]])
    assert torch.equal(offset_keys(k, begins)[0, :2, 0], expected[:2].float())
    assert torch.equal(offset_keys(k, begins)[0, 2], k[0, 2])


def test_large_scores_do_not_overflow() -> None:
    q, k, v = random_heads(20, 2, 2, torch.float32)
    out = causal_attention(1e4 * q, 1e4 * k, v, window=6)
    expected = oracle_model.attention(1e4 * q.double(), 1e4 * k.double(), v.double(), 6)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


def test_cost_falls_with_the_window() -> None:
    """2048 tokens: 2 products of 2 T keys D operations a query; a window of W costs at most W + block keys."""

    def flops(window: int | None) -> int:
        q = torch.empty(1, 1, 2048, 8, device="meta")
        with FlopCounterMode(display=False) as counter:
            blocked_attention(q, q, q, window=window)
        return counter.get_total_flops()

    per_key = 2 * 2 * 2048 * 8
    assert flops(None) < 0.6 * per_key * 2048  # the upper triangle is skipped, up to the blocks on the diagonal
    for window in (16, 128, 512):
        assert flops(window) <= per_key * (window + max(256, window))
    assert flops(16) < flops(128) < flops(512) < flops(None)


def test_dropout_drops_weights_and_keeps_their_mean() -> None:
    """With all values 1 an output is the sum of the kept weights, doubled: mean 1, but never exactly at the first."""
    q, k = torch.zeros(2, 4, 8, 256, 4)
    v = torch.ones(4, 8, 256, 4)
    torch.manual_seed(0)
    out = causal_attention(q, k, v, window=None, dropout=0.5)
    first = out[:, :, 0, 0]  # one weight of 1: kept as 2, or dropped
    assert set(first.unique().tolist()) == {0.0, 2.0}
    # 32 x 256 sums of up to 256 weights; their mean has a standard error of about 0.003.
    assert out[..., 0].mean().item() == pytest.approx(1.0, abs=0.02)
