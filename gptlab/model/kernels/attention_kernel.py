"""Causal attention in float32 on CPUs, by attention_kernel.cpp."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gptlab.model.kernels.library import Library, kernel_library

_UNLIMITED = 2**62
"""The window of full attention."""


def attention_by_kernel(heads: Tensor, n_head: int, window: int | None) -> Tensor:
    """heads: (B, T, n_head + 2 n_kv_head, D), float32: queries, keys and values of each token. Each query sees itself
    and the `window - 1` tokens before it (None: all). Returns (B, T, n_head, D). Needs `load_attention_kernel`.
    """
    return _Attention.apply(heads, n_head, _UNLIMITED if window is None else window)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, n_head: int, window: int) -> Tensor:
        y, lse = torch.ops.gptlab.attention_forward(heads, n_head, window)
        ctx.save_for_backward(heads, y, lse)
        ctx.window = window
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.gptlab.attention_backward(*ctx.saved_tensors, dy, ctx.window), None, None


@functools.cache
def load_attention_kernel() -> Library | str | None:
    """The library with this kernel, built if necessary; where there is none, why, as `kernel_library` says it."""
    if isinstance(library := kernel_library(), Library):
        torch.library.register_fake("gptlab::attention_forward", _forward_shapes)
        torch.library.register_fake("gptlab::attention_backward", _backward_shapes)
        # For torch's FlopCounterMode, with its convention for attention, which counts what causality hides.
        register_flop_formula(torch.ops.gptlab.attention_forward)(_forward_flops)
        register_flop_formula(torch.ops.gptlab.attention_backward)(_backward_flops)
    return library


def _forward_shapes(heads: Tensor, n_head: int, window: int) -> tuple[Tensor, Tensor]:
    batch, tokens, _, width = heads.shape
    return heads.new_empty(batch, tokens, n_head, width), heads.new_empty(batch, n_head, tokens)


def _backward_shapes(heads: Tensor, y: Tensor, lse: Tensor, dy: Tensor, window: int) -> Tensor:
    return torch.empty_like(heads, memory_format=torch.contiguous_format)


def _forward_flops(heads: Sequence[int], n_head: int, window: int, **rest: object) -> int:
    batch, tokens, _, width = heads
    return 2 * 2 * batch * n_head * tokens * min(tokens, window) * width


def _backward_flops(
    heads: Sequence[int], y: Sequence[int], lse: object, dy: object, window: int, **rest: object
) -> int:
    return 2 * _forward_flops(heads, y[2], window)
