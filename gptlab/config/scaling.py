"""Rules that size a run: from depth to width, from compute to depth, from width to learning rate.

Each rule names the paper or measurement it rests on, and how far that reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# autoresearch's and nanochat's AdamW rates were tuned at this width.
REFERENCE_WIDTH = 768

# nanochat's rates were tuned at this many tokens a step, and its weight decay at this depth.
REFERENCE_BATCH_TOKENS = 2**19
REFERENCE_DEPTH = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a recipe may know of the machine in order to size itself."""

    device: str
    flops_per_second: float | None
    """What real training steps reach, forward and backward, all processes together; None: no step was timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Depth and width, and what they cost."""

    n_layer: int
    n_embd: int
    n_head: int
    scaling_params: int
    """Matrix and head parameters (nanochat: transformer_matrices + lm_head), which predict loss best there."""
    flops_per_token: float
    """Forward and backward: 6 a scaling parameter, and 12 * width * context a layer for attention."""


def shape_for_depth(depth: int, *, aspect: int, head_dim: int, vocab_size: int, seq_len: int) -> Shape:
    """The one dial (nanochat): width = depth * aspect, raised to a multiple of the head width."""
    width = math.ceil(depth * aspect / head_dim) * head_dim
    scaling_params = 12 * width * width * depth + vocab_size * width
    return Shape(
        n_layer=depth,
        n_embd=width,
        n_head=width // head_dim,
        scaling_params=scaling_params,
        flops_per_token=6 * scaling_params + 12 * width * seq_len * depth,
    )


def shape_for_compute(
    total_flops: float, *, tokens_per_param: float, aspect: int, head_dim: int, vocab_size: int, seq_len: int
) -> Shape:
    """The deepest shape that `total_flops` still trains on `tokens_per_param` tokens a scaling parameter.

    With tokens and parameters in a fixed ratio both grow with the square root of the compute (Hoffmann et al.,
    arXiv:2203.15556).
    """
    best = shape_for_depth(1, aspect=aspect, head_dim=head_dim, vocab_size=vocab_size, seq_len=seq_len)
    for depth in range(2, 129):
        shape = shape_for_depth(depth, aspect=aspect, head_dim=head_dim, vocab_size=vocab_size, seq_len=seq_len)
        if shape.flops_per_token * tokens_per_param * shape.scaling_params > total_flops:
            break
        best = shape
    return best


def adamw_lr_scale_for_width(n_embd: int) -> float:
    """AdamW's rates fall with the root of the width (autoresearch and nanochat: tuned at 768)."""
    return (n_embd / REFERENCE_WIDTH) ** -0.5


def lr_scale_for_batch(total_tokens: int) -> float:
    """All rates grow with the root of the batch (nanochat). Usual for AdamW; for Muon an assumption, it says."""
    return (total_tokens / REFERENCE_BATCH_TOKENS) ** 0.5


def weight_decay_for_depth(weight_decay: float, depth: int) -> float:
    """Decay falls with the square of the depth, which is that of the width at a constant aspect (nanochat)."""
    return weight_decay * (REFERENCE_DEPTH / depth) ** 2
