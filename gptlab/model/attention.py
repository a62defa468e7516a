"""Causal attention over the whole context or a sliding window.

Shapes: B sequences, H query heads, G key-value heads (G divides H), T query positions, S key positions, D head width.
This is the version in plain PyTorch; `kernels/ops.py` chooses a faster one where there is one. Queries are taken in
blocks that each see only the keys they can reach, so time and memory fall with the window. On a CPU, such batched
matrix products also beat torch's own kernel (bf16, B=16 H=4 T=256 D=64, two Zen 4 cores: forward and backward take 9 ms
instead of 30).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# At most this many blocks a row: eight already skip 44% of the 50% that causality makes useless, and each block adds
# operations to compile. Blocks below 128 queries make matrix products too small to run at full rate on a CPU.
MAX_BLOCKS = 8
MIN_BLOCK_TOKENS = 128


def rotary_tables(seq_len: int, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position times frequency, each (seq_len, head_dim / 2). Source: RoPE, arXiv:2104.09864."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of x (B, T, H, D) by *minus* the position's angle.

    The sign is a convention, here that of modded-nanogpt, autoresearch and nanochat: scores depend only on the angle
    between query and key. cos, sin: (T, D / 2).
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    # Rounded before they are joined: torch 2.11 keeps what is joined for the backward pass, in float32 if it is that.
    rotated = first * cos + second * sin, second * cos - first * sin
    return torch.cat([half.to(x.dtype) for half in rotated], dim=-1)


def offset_keys(k: Tensor, begins: Tensor | None = None) -> Tensor:
    """Keys (B, T, G, D) whose channels of the slower half of the rotary frequencies are those of the token before. The
    first token of a row keeps its own, and so does the first of a document, where `begins` (B, T) is true."""
    before = torch.cat((k[:, :1], k[:, :-1]), dim=1)
    if begins is not None:
        before = torch.where(begins[:, :, None, None], k, before)
    return torch.where(slow_channels(k.shape[3], k.device), before, k)


def slow_channels(head_dim: int, device: torch.device) -> Tensor:
    """(D,) bool: the channels of the slower half of the rotary frequencies, in both halves of a head."""
    half = max(1, head_dim // 2)
    return torch.arange(head_dim, device=device) % half * 2 >= half


def blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    dropout: float = 0.0,
    first_seen: Tensor | None = None,
    key_multiple: int = 1,
) -> Tensor:
    """Causal attention by blocks of queries, each against the slice of keys that it can see.

    q: (B, H, T, D); k, v: (B, G, T, D). Returns (B, H, T, D). Each query sees itself and the `window - 1` tokens
    before it (all of them if window is None), but none before `first_seen` (B, T), where that is given. Slices of keys
    begin at multiples of `key_multiple`.
    """
    n_tokens = q.shape[2]
    reach = n_tokens if window is None else window
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    q = q * q.shape[-1] ** -0.5
    outputs = []
    for start, stop in _query_blocks(n_tokens, reach):
        first_key = max(0, start - reach + 1) // key_multiple * key_multiple
        scores = q[:, :, start:stop] @ k[:, :, first_key:stop].transpose(2, 3)  # (B, H, block, keys)
        queries = torch.arange(start, stop, device=q.device)[:, None]
        keys = torch.arange(first_key, stop, device=q.device)[None, :]
        hidden = keys > queries
        if first_key > 0 or stop > reach:
            hidden = hidden | (keys <= queries - reach)
        if first_seen is not None:
            hidden = hidden | (keys < first_seen[:, None, start:stop, None])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(hidden, -torch.inf)
        weights = F.softmax(scores, dim=-1).to(v.dtype)
        weights = F.dropout(weights, dropout) if dropout > 0 else weights
        outputs.append(weights @ v[:, :, first_key:stop])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def cached_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
    """The last T of S positions attend to themselves and all before. q: (B, H, T, D); k, v: (B, G, S, D)."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    queries = torch.arange(n_keys - n_queries, n_keys, device=q.device)[:, None]
    keys = torch.arange(n_keys, device=q.device)[None, :]
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])


def _query_blocks(n_tokens: int, reach: int) -> list[tuple[int, int]]:
    size = max(min(reach, MIN_BLOCK_TOKENS), -(-n_tokens // MAX_BLOCKS))
    return [(start, min(start + size, n_tokens)) for start in range(0, n_tokens, size)]


def _repeat_heads(x: Tensor, n_heads: int) -> Tensor:
    """(B, G, S, D) -> (B, n_heads, S, D), each key-value head standing for a run of query heads."""
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], dim=1)
