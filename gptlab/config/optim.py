"""Parameter roles, optimizer settings for each of them, and schedules as functions of progress."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Annotated, Literal

from gptlab.config.fields import BelowOne, Limit, NotNegative, Positive, Share, checked_dataclass, require

MatrixOptimizer = Literal["muon", "adamw"]
Orthogonalizer = Literal["polar_express", "newton_schulz", "svd"]
UpdateScale = Literal["aspect", "max_side", "rms"]
ScheduleKind = Literal["trapezoid", "cosine"]

_NO_EPS = "may be zero in float32, and an update without a gradient 0 / 0"

Epsilon = Annotated[Positive[float], Limit(lambda value: value >= 2.0**-126, _NO_EPS, 2.0**-126)]
"""At least the least normal number of float32."""
Rate = Annotated[NotNegative[float], Limit(lambda value: value <= 1e9, "is more than any run uses", 1e9)]
"""A learning rate or weight decay, so that a product of both is finite in float32."""


class Role(StrEnum):
    """What a parameter is for. Roles connect model and optimizer, which know nothing else of each other."""

    EMBEDDING = "embedding"
    POSITION_EMBEDDING = "position_embedding"
    VALUE_EMBEDDING = "value_embedding"
    HEAD = "head"
    MATRIX = "matrix"
    """Two-dimensional weights inside the blocks."""
    RESIDUAL_LAMBDA = "residual_lambda"
    X0_LAMBDA = "x0_lambda"
    VECTOR = "vector"
    """Norm weights and biases."""


@checked_dataclass("optim.")
class AdamWConfig:
    """Settings of torch.optim.AdamW for one parameter role."""

    lr: Rate = 0.001
    """Peak learning rate."""
    beta1: BelowOne = 0.8
    """Decay of the first moment (nanochat, autoresearch: 0.8)."""
    beta2: BelowOne = 0.95
    """Decay of the second moment."""
    eps: Epsilon = 1e-10
    """Added to the root of the second moment (nanochat: 1e-10, since embedding gradients are tiny)."""
    weight_decay: Rate = 0.0
    """Decoupled decay, multiplied by the learning rate."""


@checked_dataclass("optim.muon.")
class MuonConfig:
    """Momentum orthogonalized by a matrix iteration (K. Jordan et al., 2024), for matrices inside the blocks."""

    lr: Rate = 0.02
    """Peak learning rate (nanochat: 0.02; autoresearch: 0.04; modded-nanogpt: 0.1 * 0.0036)."""
    momentum: BelowOne = 0.95
    """Momentum at the end of the ramp."""
    momentum_start: BelowOne = 0.85
    """Momentum at step 0 (nanochat, autoresearch: 0.85)."""
    momentum_ramp_steps: NotNegative[int] = 300
    """Steps from momentum_start to momentum (nanochat, autoresearch: 300). 0: no ramp."""
    nesterov: bool = True
    """Nesterov momentum."""
    orthogonalizer: Orthogonalizer = "polar_express"
    """polar_express (arXiv:2505.16932) | newton_schulz (quintic 3.4445, -4.7750, 2.0315) | svd (exact, slow)."""
    iterations: Positive[int] = 5
    """Steps of the matrix iteration."""
    update_scale: UpdateScale = "aspect"
    """aspect: sqrt(max(1, rows/cols)) | max_side: sqrt(max(rows, cols)) (modded-nanogpt) | rms:
    0.2*sqrt(max(rows, cols)) (arXiv:2502.16982)."""
    normuon_beta2: BelowOne | None = 0.95
    """Decay of NorMuon's second moment per neuron (arXiv:2510.05491). None: plain Muon."""
    weight_decay: Rate = 0.2
    """Decay at the start of the run, multiplied by the learning rate; see schedule.weight_decay_final."""
    cautious_decay: bool = True
    """Decay only entries whose update has the sign of their weight (arXiv:2510.12402)."""
    scaled_decay: bool = False
    """Also multiply the decay by the update scale, as the code of nanochat and autoresearch does: it doubles the decay
    of the MLP's first matrix and changes no other. Off: learning rate times decay for all, as in torch.optim.Muon."""
    split_qkv: bool = True
    """Orthogonalize query, key and value separately where they are one fused matrix."""

    def __post_init__(self) -> None:
        limit = self.orthogonalizer != "polar_express" or self.iterations <= 5
        require(limit, "optim.muon.iterations", self.iterations, "Polar Express has five coefficient triples", 5)


@checked_dataclass("schedule.")
class ScheduleConfig:
    """Multipliers as pure functions of progress (0 at the start of the run, 1 at its end)."""

    kind: ScheduleKind = "trapezoid"
    """trapezoid: warm-up, constant, linear warm-down | cosine: warm-up, half a cosine."""
    warmup_fraction: Share = 0.0
    """Share of the run in which the learning rate rises from zero."""
    warmdown_fraction: Share = 0.5
    """trapezoid: share of the run in which it falls (nanochat, autoresearch: 0.5)."""
    final_lr_scale: Share = 0.0
    """Learning-rate multiplier at the end of the run."""
    weight_decay_final: Share = 0.0
    """Muon's weight-decay multiplier at the end, reached linearly (nanochat: 0). 1: constant."""

    def __post_init__(self) -> None:
        both = self.warmup_fraction + (self.warmdown_fraction if self.kind == "trapezoid" else 0.0)
        require(both <= 1, "schedule.warmup_fraction", self.warmup_fraction, "warm-up and warm-down exceed the run")


def _adamw(lr: float, beta1: float = 0.8) -> AdamWConfig:
    return AdamWConfig(lr=lr, beta1=beta1)


@checked_dataclass("optim.")
class OptimConfig:
    """Defaults: nanochat's numbers, tuned there at 2^19 tokens a step and width 768."""

    matrix_optimizer: MatrixOptimizer = "muon"
    """Optimizer of the matrices inside the blocks: muon | adamw (with the settings of `matrix`)."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    matrix: AdamWConfig = field(default_factory=lambda: _adamw(0.001))
    embedding: AdamWConfig = field(default_factory=lambda: _adamw(0.3))
    """Token and position tables."""
    value_embedding: AdamWConfig = field(default_factory=lambda: _adamw(0.3))
    head: AdamWConfig = field(default_factory=lambda: _adamw(0.004))
    """Output head, unless tied to the embedding."""
    residual_lambda: AdamWConfig = field(default_factory=lambda: _adamw(0.005))
    """A hundredth of the x0 lambdas' rate (nanochat): they multiply in every layer."""
    x0_lambda: AdamWConfig = field(default_factory=lambda: _adamw(0.5, beta1=0.96))
    vector: AdamWConfig = field(default_factory=lambda: _adamw(0.004))
    """Norm weights and biases."""
    grad_clip: Positive[float] | None = None
    """Maximum global gradient norm. None: no clipping (the norm is still logged)."""
