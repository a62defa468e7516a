"""Slow and obvious versions of the optimizer's rules: one matrix at a time, Python floats for the hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# The five triples as nanochat has them, a second time, so that a slip in the program's own table is seen.
PUBLISHED_POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_factor(matrix: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


def quintic_on_singular_values(matrix: Tensor, coefficients: list[tuple[float, float, float]], norm: float) -> Tensor:
    """What the matrix iteration does in exact arithmetic: the polynomials, on the singular values alone."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / norm
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


def newton_schulz_on_the_matrix(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """modded-nanogpt's zeropower_via_newtonschulz5 of five steps: one matrix, products in `dtype` (there: bfloat16)."""
    x = matrix.to(dtype)
    x = x / (x.norm() + 1e-7)
    turned = len(x) > len(x.T)
    if turned:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        once = gram @ x
        x = 3.4445 * x - 4.7750 * once + 2.0315 * gram @ once
    return (x.T if turned else x).to(matrix.dtype)


def polar_express_on_the_matrix(matrix: Tensor) -> Tensor:
    """nanochat's five steps on one matrix, in its own type."""
    x = matrix / (1.02 * matrix.norm() + 1e-6)
    for a, b, c in PUBLISHED_POLAR_EXPRESS:
        cube = x @ x.T @ x
        x = a * x + b * cube + c * cube @ x.T @ x
    return x


class Seed1Muon:
    """modded-nanogpt's first Muon: summed momentum, Nesterov, fused QKV in three, update times sqrt(longest side)."""

    def __init__(self, weight: Tensor, lr: float, momentum: float, zero_power: Callable[[Tensor], Tensor]) -> None:
        self.weight = weight.clone()
        self.buffer = torch.zeros_like(weight)
        self.lr, self.momentum, self.zero_power = lr, momentum, zero_power

    def step(self, gradient: Tensor, lr_scale: float = 1.0) -> None:
        self.buffer.mul_(self.momentum).add_(gradient)
        direction = gradient.add(self.buffer, alpha=self.momentum)
        rows, cols = direction.shape
        if rows == 3 * cols:
            update = torch.cat([self.zero_power(part) for part in direction.split(cols)])
            scale = cols**0.5
        else:
            update = self.zero_power(direction)
            scale = max(rows, cols) ** 0.5
        self.weight.add_(update, alpha=-self.lr * lr_scale * scale)


class CautiousNorMuon:
    """autoresearch and nanochat: averaged Nesterov momentum, Polar Express, NorMuon, then decay where update and weight
    agree.

    One matrix that is one block; the update and the decay grow with sqrt(rows / cols) where there are more rows.
    """

    def __init__(self, weight: Tensor, lr: float, beta2: float, weight_decay: float) -> None:
        self.weight = weight.clone()
        self.mean = torch.zeros_like(weight)
        self.moment = [0.0] * max(weight.shape)
        self.lr, self.beta2, self.weight_decay = lr, beta2, weight_decay

    def step(self, gradient: Tensor, lr_scale: float, momentum: float, weight_decay_scale: float) -> None:
        self.mean = momentum * self.mean + (1 - momentum) * gradient
        direction = (1 - momentum) * gradient + momentum * self.mean
        update, self.moment = normuon(polar_express_on_the_matrix(direction), self.moment, self.beta2)
        rows, cols = update.shape
        lr = self.lr * lr_scale
        decay = self.weight_decay * weight_decay_scale
        for i in range(rows):
            for j in range(cols):
                u, w = float(update[i, j]), float(self.weight[i, j])
                grown = lr * max(1.0, rows / cols) ** 0.5
                self.weight[i, j] = w - grown * u - (grown * decay * w if u * w >= 0 else 0.0)


def normuon(update: Tensor, moment: list[float], beta2: float) -> tuple[Tensor, list[float]]:
    """One matrix: each neuron (row of a tall matrix, column of a wide one) over its own root mean square; norm kept."""
    rows, cols = update.shape
    neurons = update if rows >= cols else update.T
    moment = [beta2 * m + (1 - beta2) * float((n**2).mean()) for m, n in zip(moment, neurons, strict=True)]
    even = torch.stack([n / math.sqrt(max(m, 1e-10)) for m, n in zip(moment, neurons, strict=True)])
    even = even * (float(update.norm()) / max(float(even.norm()), 1e-10))
    return (even if rows >= cols else even.T), moment


class HandAdamW:
    """Decoupled weight decay (arXiv:1711.05101, algorithm 2), entry by entry in Python floats."""

    def __init__(self, weight: Tensor, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
        self.weight = weight.flatten().tolist()
        self.m = [0.0] * len(self.weight)
        self.v = [0.0] * len(self.weight)
        self.t = 0
        self.lr, self.beta1, self.beta2, self.eps, self.weight_decay = lr, beta1, beta2, eps, weight_decay

    def step(self, gradient: Tensor, lr_scale: float) -> None:
        self.t += 1
        lr = self.lr * lr_scale
        for i, g in enumerate(gradient.flatten().tolist()):
            self.m[i] = self.beta1 * self.m[i] + (1 - self.beta1) * g
            self.v[i] = self.beta2 * self.v[i] + (1 - self.beta2) * g * g
            m = self.m[i] / (1 - self.beta1**self.t)
            v = self.v[i] / (1 - self.beta2**self.t)
            self.weight[i] -= lr * (m / (math.sqrt(v) + self.eps) + self.weight_decay * self.weight[i])
