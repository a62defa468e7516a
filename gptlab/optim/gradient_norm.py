"""The global norm of the gradients: logged every step, and a limit where the run has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.model.kernels import ops


def sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The sum over all elements, 0-d. In float64, which holds the square of every float32, so that the norm of finite
    gradients is finite; Apple's GPUs have no float64."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not gradients:
        return torch.zeros((), dtype=dtype, device=device)
    return ops.sum_of_squares(gradients, dtype)


def joint_norm(gradients: list[Tensor]) -> Tensor:
    """The L2 norm of tensors of one device and type, 0-d. torch's get_total_norm takes five times as long."""
    return sum_of_squares(gradients, gradients[0].device if gradients else torch.device("cpu")).sqrt()


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Parameter], max_norm: float | None, total_norm: Callable[[list[Tensor]], Tensor] = joint_norm
) -> float:
    """Scale all gradients so that their joint L2 norm is at most `max_norm` (None: no limit). Returns the norm before
    clipping. Gradients whose norm is not finite are not scaled: they show where it comes from. `total_norm` includes
    other processes where these gradients are only a part."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = float(total_norm(gradients))
    if max_norm is not None and math.isfinite(norm):
        factor = max_norm / (norm + 1e-6)  # as in torch.nn.utils.clip_grad_norm_
        if factor < 1:
            torch._foreach_mul_(gradients, factor)
    return norm
