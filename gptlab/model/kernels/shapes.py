"""The shapes and targets that the functions of `fused` require: from others, the kernels would read and write beyond
the memory of a tensor. A caller's own parts may give them anything."""

from __future__ import annotations

import torch
from torch import Tensor


def require_shape(name: str, tensor: Tensor | None, *shape: int) -> None:
    """ValueError unless the tensor has this shape, or is None."""
    if tensor is not None and tensor.shape != shape:
        raise ValueError(f"the {name} must have the shape {shape}, not {tuple(tensor.shape)}")


def require_width(x: Tensor, weight: Tensor) -> None:
    """ValueError unless x (..., C) can be multiplied by the weight (P, C)."""
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has width {x.shape[-1]}, and the weight is for {weight.shape[1]}")


def require_head(x: Tensor, weight: Tensor, vocab_size: int) -> None:
    """`require_width`; ValueError unless the head has a row for each entry."""
    require_width(x, weight)
    if len(weight) < vocab_size:
        raise ValueError(f"the head has {len(weight)} rows for {vocab_size} entries of the vocabulary")


def key_value_heads(heads: Tensor, n_head: int) -> int:
    """G of heads (B, T, H + 2 G, D), H = n_head. ValueError unless G divides H."""
    n_kv_head, rest = divmod(heads.shape[2] - n_head, 2)
    if rest or n_kv_head < 1 or n_head % n_kv_head:
        raise ValueError(f"{heads.shape[2]} heads, {n_head} of them of queries: the rest cannot be keys and values")
    return n_kv_head


def checked_targets(targets: Tensor, positions: int, vocab_size: int) -> Tensor:
    """Contiguous. TypeError unless they are int64, ValueError unless there is one for each position, IndexError for
    one that is no entry."""
    if targets.dtype != torch.int64:
        raise TypeError(f"targets are int64, not {targets.dtype}")
    if targets.numel() != positions:
        raise ValueError(f"{targets.numel()} targets for {positions} positions")
    if targets.numel() and int(targets.max()) >= vocab_size:
        raise IndexError(f"target {int(targets.max())} is out of bounds for {vocab_size} entries")
    return targets.contiguous()
