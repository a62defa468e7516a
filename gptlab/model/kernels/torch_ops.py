"""What is between a model's matrix products, by PyTorch: on GPUs, compiled, and wherever there are no C++ kernels.

Shapes: B sequences, T positions, C channels, H query heads, G key-value heads, D head width, P rows of the head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlab.model.attention import apply_rotary, blocked_attention, offset_keys

LOG2_E = 1 / math.log(2)
HIGHEST_CAP = 40.0
"""Of a cap, from which logits between it and its negative are taken off: exp(-2 cap) is a normal float32."""


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32 (float64 for float64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def sum_and_rms_norm(x: Tensor, y: Tensor, a: float | Tensor, b: float | Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`weighted_sum`, and its `rms_norm`."""
    total = weighted_sum(x, y, a, b)
    return total, rms_norm(total, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Over the last dimension, in the type of the weights; weight and bias: (C,)."""
    wide = x.to(weight.dtype)
    return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(x.dtype)


def sum_and_layer_norm(
    x: Tensor, y: Tensor, a: float | Tensor, b: float | Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """`weighted_sum`, and its `layer_norm`."""
    total = weighted_sum(x, y, a, b)
    return total, layer_norm(total, weight, bias, eps)


def weighted_sum(x: Tensor, y: Tensor, a: float | Tensor, b: float | Tensor) -> Tensor:
    """a x + b y. The weights are numbers, or both are 0-d float32 tensors."""
    return _times(a, x) + _times(b, y)


def _times(factor: float | Tensor, x: Tensor) -> Tensor:
    if isinstance(factor, Tensor):
        return factor.to(x.dtype) * x
    return x if factor == 1.0 else factor * x


def prepare_heads(
    heads: Tensor,  # (B, T, H + 2 G, D): queries, keys and values of each token
    n_head: int,
    gates: Tensor | None,  # (B, T, G)
    value: Tensor | None,  # (B, T, G * D), with gates
    rotary: tuple[Tensor, Tensor] | None,  # each (T, D / 2)
    norm_eps: float | None,
) -> Tensor:  # as heads
    """What attention takes: queries and keys rotated by their positions, then normalized unless norm_eps is None; to
    the values, `value` is added, 2 sigmoid(gates) times."""
    n_kv_head = (heads.shape[2] - n_head) // 2
    qk, v = heads.split((n_head + n_kv_head, n_kv_head), dim=2)
    v = _with_value(v, gates, value)
    if rotary is not None:
        qk = apply_rotary(qk, *rotary)
    if norm_eps is not None:
        qk = rms_norm(qk, norm_eps)
    return torch.cat((qk, v), dim=2)


def _with_value(v: Tensor, gates: Tensor | None, value: Tensor | None) -> Tensor:
    if gates is not None and value is not None:
        v = v + (2 * torch.sigmoid(gates)).unsqueeze(-1) * value.view_as(v)
    return v


def prepare_heads_apart(
    heads: Tensor, n_head: int, gates: Tensor | None, value: Tensor | None, rotary: tuple[Tensor, Tensor] | None,
    norm_eps: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`prepare_heads` for GPUs, which leaves its results apart: q (B, T, H, D), k and v (B, T, G, D).

    From `prepare_heads` Inductor makes kernels that write the rotated queries and keys in float32, for the norm and for
    the gradient, and that copy the values: they read and write 3.2 GB for 32 rows of 2,048 tokens and 768 channels,
    forward and backward, in 1.1 ms on an H100. From this, 1.2 GB.
    """
    n_kv_head = (heads.shape[2] - n_head) // 2
    q, k, v = heads.split((n_head, n_kv_head, n_kv_head), dim=2)
    v = _with_value(v, gates, value)
    if rotary is not None and norm_eps is not None:
        return _RotatedAndNormed.apply(q, *rotary, norm_eps), _RotatedAndNormed.apply(k, *rotary, norm_eps), v
    if rotary is not None:
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
    if norm_eps is not None:
        q, k = rms_norm(q, norm_eps), rms_norm(k, norm_eps)
    return q, k, v


class _RotatedAndNormed(torch.autograd.Function):
    """`rms_norm` of `apply_rotary`, by the norm of x itself, which a rotation keeps; rounded once.

    Its gradient is that of its result, which attention keeps anyway, so that x can be freed. It has few enough
    operations for Inductor to write it where that of all heads has it. That of autograd has more, and is written in
    float32 and copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y = _turned(wide, cos, sin) * scale
        y = y if y.dtype == x.dtype else y.to(x.dtype)  # no alias: see `HeadLoss`
        ctx.save_for_backward(y, scale, cos, sin)
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        y, scale, cos, sin = ctx.saved_tensors
        wide, gradient = y.to(scale.dtype), upstream.to(scale.dtype)
        across = gradient - wide * (gradient * wide).mean(-1, keepdim=True)
        return (_turned(across, cos, -sin) * scale).to(y.dtype), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rotary`, not rounded to the type of x, and without `cat`, which would be a kernel of its own."""
    halves = x.unflatten(-1, (2, -1))
    sign = 1 - 2 * torch.arange(2, device=x.device)[:, None]
    return (halves * cos[:, None, None, :] + halves.flip(-2) * (sign * sin[:, None, None, :])).flatten(-2)


def attention(
    heads: Tensor,  # (B, T, H + 2 G, D)
    n_head: int,
    window: int | None,
    dropout: float,
    key_offset: bool = False,
) -> Tensor:  # (B, T, H, D)
    """Causal attention: each query sees itself and the `window - 1` tokens before it (None: all of them), by keys as
    `offset_keys` makes them if `key_offset`."""
    n_kv_head = (heads.shape[2] - n_head) // 2
    q, k, v = heads.split((n_head, n_kv_head, n_kv_head), dim=2)
    k = offset_keys(k) if key_offset else k
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return blocked_attention(q, k, v, window=window, dropout=dropout).transpose(1, 2)


def dropout(x: Tensor, rate: float) -> Tensor:
    return F.dropout(x, rate)


def relu2(x: Tensor) -> Tensor:
    y: Tensor = _ReLU2.apply(x)
    return y


class _ReLU2(torch.autograd.Function):
    """The square of ReLU. Its result, which the next product keeps anyway, tells its slope: twice the square root.
    autograd, and torch.compile, also keep what goes into it: a fifth of all that blocks of nanochat keep. In float16
    the slope of what is below 0.0002 is lost with its square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = F.relu(x).square()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        return (2 * upstream * wide.sqrt()).to(y.dtype)


def gelu(x: Tensor) -> Tensor:
    """x times the probability that a normal variable is at most x: not the approximation by tanh."""
    return F.gelu(x)


def softcap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def loss_and_gradient(
    logits: Tensor,  # (n, P), before the softcap; may be overwritten
    targets: Tensor,  # (n,) int64; negative: not counted
    vocab_size: int,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in nats, at least float32, and its gradient with respect to the logits, in their type.
    Entries from `vocab_size` on are padding."""
    if cap is not None and cap <= HIGHEST_CAP and logits.device.type != "cpu":
        return _loss_and_gradient_of_bounded(logits, targets, vocab_size, cap)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # tanh through one exponential, to an absolute error of one ulp of 1: a fifth of the head's time less than tanh.
    squashed = None if cap is None else 1 - 2 / (1 + torch.exp(z * (2 / cap)))
    capped = z if squashed is None or cap is None else cap * squashed
    entries = torch.arange(z.shape[1], device=z.device)
    if vocab_size < z.shape[1]:
        capped = capped.masked_fill(entries >= vocab_size, -torch.inf)
    highest = capped.amax(-1, keepdim=True)
    weights = torch.exp(capped - highest)
    norm = weights.sum(-1, keepdim=True)
    counted, is_target = (targets >= 0)[:, None], entries == targets[:, None]
    of_target = torch.where(is_target, capped, 0).sum(-1, keepdim=True)
    nats = ((highest + norm.log() - of_target) * counted).sum()
    gradient = (weights / norm - is_target.to(z.dtype)) * counted
    gradient = gradient if squashed is None else gradient * (1 - squashed * squashed)
    return nats, gradient.to(logits.dtype)


def _loss_and_gradient_of_bounded(
    logits: Tensor, targets: Tensor, vocab_size: int, cap: float
) -> tuple[Tensor, Tensor]:
    """`loss_and_gradient` for GPUs, with a third of its instructions, which bound it: on an H100 it took 0.57 ms for
    logits that are read twice and written in 0.27.

    A capped logit is 2 cap `below` less than cap, which is taken off all of them, so that their highest is not needed.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    below = 1 / (1 + torch.exp2(z * (2 * LOG2_E / cap)))
    weights = torch.exp2(below * (-2 * LOG2_E * cap))
    entries = torch.arange(z.shape[1], device=z.device)
    if vocab_size < len(entries):
        weights = weights.masked_fill(entries >= vocab_size, 0)
    counted, is_target = targets[:, None] >= 0, targets[:, None] == entries
    norm = weights.sum(-1, keepdim=True)
    below_of_target = torch.where(is_target, below, 0).sum(-1, keepdim=True)
    nats = (counted * (norm.log() + 2 * cap * below_of_target)).sum()
    gradient = weights * (4.0 * counted / norm) - torch.where(is_target & counted, 4.0, 0.0)
    return nats, (gradient * (below - below * below)).to(logits.dtype)


def losses(
    logits: Tensor,  # (n, V), float32 or float64, after the softcap
    targets: Tensor,  # (n,) int64; -1: not counted
) -> Tensor:  # (n,), as logits
    """Cross-entropy of each row in nats, 0 where it is not counted."""
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
