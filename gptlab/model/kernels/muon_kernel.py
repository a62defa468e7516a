"""Muon's update on CPUs by muon_kernel.cpp: one pass over weights and state where PyTorch makes a dozen, and products
of matrices that stay in a core's cache.

All tensors are float32 and contiguous; rates are numbers, or 0-d tensors as in a step that is captured. A matrix's bits
depend neither on the number of threads nor on other matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptlab.model.kernels.fused import call


def directions(
    means: Sequence[Tensor], gradients: Sequence[Tensor], momentum: float | Tensor, nesterov: bool
) -> Tensor:
    """Move the means of some tensors of one shape to their gradients; returns what is to be orthogonalized, stacked."""
    stack = means[0].new_empty(len(means), *means[0].shape)
    gradients = [gradient.float().contiguous() for gradient in gradients]
    arrays = _arrays(means, gradients, stack.unbind())
    call("muon_directions", None, arrays, len(means), 1.0 - float(momentum), nesterov)
    return stack


def orthogonalize(
    stack: Tensor, polynomials: Sequence[tuple[float, float, float]], norm: tuple[float, float], dtype: torch.dtype
) -> Tensor:
    """Each matrix of a stack (n, rows, cols), divided by its Frobenius norm times norm[0] plus norm[1], after
    X <- a X + (b A + c A A) X for each polynomial (a, b, c), where A = X X^T; with operands in `dtype`."""
    out = torch.empty_like(stack)
    call("orthogonalize", dtype, stack, out, *stack.shape, stack.new_tensor(polynomials), len(polynomials), *norm)
    return out


def even_out(updates: Tensor, second_moments: Tensor, beta2: float, scale: float) -> None:
    """Multiply each of the updates (n, rows, cols) by NorMuon's factors times `scale`. `second_moments`: (n, rows, 1)
    or (n, 1, cols), which move as well."""
    call("normuon", None, updates, second_moments, *updates.shape, beta2, scale)


def step(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    lr: float | Tensor,
    weight_decay: float | Tensor,
    cautious: bool,
) -> None:
    """Each weight minus lr (update + weight_decay weight)."""
    call("muon_step", None, _arrays(weights, updates), len(weights), float(lr), float(weight_decay), cautious)
    torch.autograd.graph.increment_version(weights)  # a backward pass that needs the old ones now says so


def _arrays(*columns: Sequence[Tensor]) -> Tensor:
    """Rows of addresses, each with the number of elements."""
    rows = [(*(x.data_ptr() for x in row), row[0].numel()) for row in zip(*columns, strict=True)]
    return torch.tensor(rows, device="cpu")
