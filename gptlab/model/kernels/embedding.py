"""Rows of an embedding table on CPUs, and the table's gradient, by fused_kernels.cpp.

PyTorch looks rows up in float32, rounds them in another pass, and for the gradient makes float32 of all that arrives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlab.model.kernels.fused import call


def look_up(table: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a float32 table (P, C) for tokens (...) of whole numbers, rounded to `dtype`, float32 or bfloat16:
    (..., C). IndexError for a token that is no row."""
    rows: Tensor = _LookUp.apply(table, tokens, dtype)
    return rows


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        table, tokens, ctx.sizes = table.contiguous(), tokens.long().contiguous(), (tokens.numel(), *table.shape[::-1])
        if tokens.numel():
            least, most = torch.aminmax(tokens)
            if least < 0 or most >= len(table):
                token = int(least if least < 0 else most)
                raise IndexError(f"token {token} is out of bounds for a table of {len(table)} rows")
        rows = table.new_empty(*tokens.shape, table.shape[1], dtype=dtype)
        call("look_up", dtype, table, tokens, rows, *ctx.sizes[:2])
        ctx.save_for_backward(tokens)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
        (tokens,), (_, width, entries) = ctx.saved_tensors, ctx.sizes
        dtable = drows.new_empty(entries, width, dtype=torch.float32)
        call("look_up_backward", drows.dtype, drows.contiguous(), tokens, dtable, *ctx.sizes)
        return dtable, None, None
