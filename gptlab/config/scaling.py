"""Scaling rules: from depth to width, from compute to depth, from width to learning rate.

Each rule names the paper or the measurement that it is based on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gptlab.config.fields import require_positive
from gptlab.config.optim import AdamWConfig, MuonConfig, OptimConfig

# autoresearch's and nanochat's AdamW rates were tuned at this width.
REFERENCE_WIDTH = 768

# nanochat's rates were tuned at this many tokens a step, and its weight decay at this depth.
REFERENCE_BATCH_TOKENS = 2**19
REFERENCE_DEPTH = 12

MANY_EPOCHS = 4
"""Up to four epochs teach almost as much as fresh text, later ones ever less (Muennighoff et al., arXiv:2305.16264)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a recipe may use to size itself: the machine, and how much text there is."""

    device: str
    flops_per_second: float | None
    """FLOP/s of timed training steps, forward and backward, over all processes. None: no step was timed."""
    most_flops_per_second: float | None = None
    """What its steps can reach at most, by the rate of its matrix products. None: unknown."""
    training_tokens: int | None = None
    """Of the text, each counted once. None: unknown."""
    processes: int = 1


SLOWEST, FASTEST = (Machine(device="cpu", flops_per_second=flops) for flops in (1e9, 1e18))
"""Recipes are pure and cheap: what one gives for both of these does not depend on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Depth and width, and their cost."""

    n_layer: int
    n_embd: int
    n_head: int
    scaling_params: int
    """Matrix and head parameters (nanochat: transformer_matrices + lm_head), which predict loss best there."""
    flops_per_token: float
    """Forward and backward: 6 per scaling parameter, plus 12 * width * (context or window) per layer for attention."""


def shape_for_depth(
    depth: int, *, aspect: int, head_dim: int, vocab_size: int, seq_len: int, window: int | None = None
) -> Shape:
    """The one dial (nanochat): width = depth * aspect, rounded up to a multiple of the head width.

    `window`: tokens that all layers but the last one attend to; None: all.
    """
    require_positive("depth", depth)
    width = math.ceil(depth * aspect / head_dim) * head_dim
    scaling_params = 12 * width * width * depth + vocab_size * width
    return Shape(
        n_layer=depth,
        n_embd=width,
        n_head=width // head_dim,
        scaling_params=scaling_params,
        flops_per_token=6 * scaling_params + 12 * width * (seq_len + (window or seq_len) * (depth - 1)),
    )


def shape_for_compute(total_flops: float, *, tokens_per_param: float, **size: int) -> Shape:
    """The deepest shape that `total_flops` can train on `tokens_per_param` tokens per scaling parameter; `size` as for
    `shape_for_depth`.

    At a fixed ratio, tokens and parameters both grow with the square root of the compute (Hoffmann et al.,
    arXiv:2203.15556).
    """
    shapes = [shape_for_depth(depth, **size) for depth in range(1, 129)]
    costs = (shape.flops_per_token * tokens_per_param * shape.scaling_params for shape in shapes)
    return shapes[max(0, sum(cost <= total_flops for cost in costs) - 1)]


def adamw_lr_scale_for_width(n_embd: int) -> float:
    """AdamW's learning rates fall with the square root of the width (autoresearch, nanochat: tuned at 768)."""
    return (n_embd / REFERENCE_WIDTH) ** -0.5


def lr_scale_for_batch(total_tokens: int) -> float:
    """All learning rates grow with the square root of the batch (nanochat; for Muon it calls that an assumption)."""
    return (total_tokens / REFERENCE_BATCH_TOKENS) ** 0.5


def weight_decay_for_depth(weight_decay: float, depth: int) -> float:
    """Weight decay falls with the square of the depth (nanochat), which at a constant aspect is that of the width."""
    return weight_decay * (REFERENCE_DEPTH / depth) ** 2


def muon_and_adamw(
    n_embd: int, *, matrix_lr: float = 0.02, embedding_lr: float = 0.3, head_lr: float = 0.004, scalar_lr: float = 0.5,
    beta1: float = 0.8, beta2: float = 0.95, weight_decay: float = 0.2, adamw_scale: float = 1.0,
    scaled_decay: bool = True,
) -> OptimConfig:  # fmt: skip
    """Muon and AdamW as in nanochat's and autoresearch's setup_optimizer (defaults: nanochat's learning rates).

    AdamW's rates fall with the square root of the width, except those of the lambdas; `adamw_scale` multiplies all of
    AdamW's. Residual lambdas get a hundredth of the rate of the x0 lambdas, which average longer (beta1 0.96).
    """
    scale = adamw_scale * adamw_lr_scale_for_width(n_embd)
    adamw = AdamWConfig(beta1=beta1, beta2=beta2)
    return OptimConfig(
        muon=MuonConfig(lr=matrix_lr, weight_decay=weight_decay, scaled_decay=scaled_decay),
        embedding=replace(adamw, lr=embedding_lr * scale),
        value_embedding=replace(adamw, lr=embedding_lr * scale),
        head=replace(adamw, lr=head_lr * scale),
        residual_lambda=replace(adamw, lr=0.01 * scalar_lr * adamw_scale),
        x0_lambda=AdamWConfig(lr=scalar_lr * adamw_scale, beta1=0.96),
        vector=replace(adamw, lr=head_lr * scale),  # neither has any: for ablations with LayerNorm or biases
    )
