"""The global gradient norm: logged every step, and a limit where the run has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The sum over all elements, 0-d. In float64, which holds the square of every float32, so that the norm of finite
    gradients is finite; Apple's GPUs have no float64."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not gradients:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.stack(torch._foreach_norm(gradients, dtype=dtype)).square().sum()


def joint_norm(gradients: list[Tensor]) -> Tensor:
    """The L2 norm of all elements, 0-d, for tensors of one device and type. As torch.nn.utils.get_total_norm, which
    takes five times as long for 27 small tensors on a CPU because it groups them by device and type."""
    return sum_of_squares(gradients, gradients[0].device if gradients else torch.device("cpu")).sqrt()


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[torch.nn.Parameter],
    max_norm: float | None,
    total_norm: Callable[[list[Tensor]], Tensor] = joint_norm,
) -> float:
    """Scale all gradients so that their joint L2 norm is at most `max_norm` (None: no limit).

    Gradients whose norm is not finite are not scaled: they show where it comes from. `total_norm` includes other
    processes where these gradients are only a part. Returns the norm before clipping, which waits for the device: the
    update needs it, and gradients that are small enough need no second pass.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = float(total_norm(gradients))
    if max_norm is not None and math.isfinite(norm):
        factor = max_norm / (norm + 1e-6)  # as in torch.nn.utils.clip_grad_norm_
        if factor < 1:
            torch._foreach_mul_(gradients, factor)
    return norm
