"""The nearest (semi-)orthogonal matrix, U V^T where M = U S V^T: exactly, or by a short polynomial iteration.

Both iterations apply an odd quintic p(x) = a x + b x^3 + c x^5 to every singular value again and again, which takes
matrix products only: X <- a X + (b A + c A A) X with A = X X^T. They differ in the coefficients and in what the
singular values end up as: between 0.86 and 1.14 after five steps of Polar Express, between 0.68 and 1.21 after five of
Newton-Schulz, for singular values down to 1/250 of the Frobenius norm; smaller ones get part of the way.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from gptlab.config.optim import Orthogonalizer
from gptlab.model.kernels import ops

Coefficients = tuple[float, float, float]

NEWTON_SCHULZ: Coefficients = (3.4445, -4.7750, 2.0315)
"""Chosen by K. Jordan (2024) for the steepest slope at zero; the same in every step."""

POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Minimax-optimal polynomials, one a step (arXiv:2505.16932): those of modded-nanogpt and nanochat, made for five steps
with a safety factor of 1.02."""

# (factor, addend) on the Frobenius norm that a matrix is divided by, so that no singular value exceeds 1.
# The 1.02 is nanochat's: bfloat16 rounding may lift a value above 1, where the polynomials are not made for it.
_POLAR_EXPRESS_NORM = (1.02, 1e-6)
# modded-nanogpt adds 1e-7 to the norm of its summed momentum, which is 1 / (1 - 0.95) = 20 times the mean that is
# orthogonalized here.
_NEWTON_SCHULZ_NORM = (1.0, 5e-9)


def orthogonalize(stack: Tensor, backend: Orthogonalizer, iterations: int = 5, *, dtype: torch.dtype) -> Tensor:
    """Orthogonalize every matrix of a stack (..., rows, cols), in its dtype; a zero matrix stays zero.

    Args:
        backend: "polar_express", "newton_schulz", or "svd" (exact and slow; takes no iterations).
        iterations: steps of the iteration, 1 or more; at most five for Polar Express.
        dtype: type of the matrix products (bfloat16 where the hardware has it); the svd uses the stack's own.
    """
    if backend == "svd":
        return _polar_factor(stack)
    if backend == "polar_express":
        if not 1 <= iterations <= len(POLAR_EXPRESS):
            raise ValueError(f"Polar Express has coefficients for 1 to {len(POLAR_EXPRESS)} steps, not {iterations}")
        return _iterate(stack, POLAR_EXPRESS[:iterations], _POLAR_EXPRESS_NORM, dtype)
    if backend == "newton_schulz":
        return _iterate(stack, (NEWTON_SCHULZ,) * iterations, _NEWTON_SCHULZ_NORM, dtype)
    raise ValueError(f"unknown orthogonalizer {backend!r}")


def _iterate(
    stack: Tensor, coefficients: tuple[Coefficients, ...], norm: tuple[float, float], dtype: torch.dtype
) -> Tensor:
    if (kernels := ops.orthogonalization(stack, dtype)) is not None:
        return cast(Tensor, kernels.orthogonalize(stack, coefficients, norm, dtype))
    factor, addend = norm
    x = stack / (torch.linalg.matrix_norm(stack, keepdim=True) * factor + addend)
    x = x.to(dtype).reshape(-1, *stack.shape[-2:])
    # The Gram matrix of the short side, so that the inner products are the smallest. A tall matrix is multiplied from
    # the right instead of being transposed: copying it there and back took a twentieth of the step on the CPU.
    tall = stack.size(-2) > stack.size(-1)
    for a, b, c in coefficients:
        gram = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, polynomial, beta=a) if tall else torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(stack.dtype).view(stack.shape)


def _polar_factor(stack: Tensor) -> Tensor:
    """U V^T over the directions that the matrix has: for a singular matrix the rest of U and V is arbitrary."""
    u, s, vh = torch.linalg.svd(stack, full_matrices=False)
    # The usual tolerance, below which a singular value counts as zero (NumPy, torch.linalg).
    tolerance = max(stack.shape[-2:]) * torch.finfo(stack.dtype).eps * s[..., :1]
    return (u * (s > tolerance).unsqueeze(-2)) @ vh
