"""Causal attention on GPUs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gptlab.model.kernels import torch_ops


def attention(heads: Tensor, n_head: int, window: int | None, dropout: float) -> Tensor:
    """As `ops.attention`."""
    if window is not None:
        return torch_ops.attention(heads, n_head, window, dropout)
    n_kv_head = (heads.shape[2] - n_head) // 2
    q, k, v = (one.transpose(1, 2) for one in heads.split((n_head, n_kv_head, n_kv_head), dim=2))
    grouped = n_head != n_kv_head
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped)
    return y.transpose(1, 2)
