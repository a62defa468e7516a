"""The global gradient norm: logged every step, and a limit where the run has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[torch.nn.Parameter],
    max_norm: float | None,
    total_norm: Callable[[list[Tensor]], Tensor] = torch.nn.utils.get_total_norm,
) -> Tensor:
    """Scale all gradients so that their joint L2 norm is at most `max_norm` (None: leave them alone).

    Gradients whose norm is not finite are left as they are: they show where it comes from. `total_norm` counts those of
    other processes too where these are only a part. Returns the norm before clipping, a 0-d tensor on the gradients'
    device: reading it is what waits for the device.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(gradients)
    if max_norm is not None:
        # (norm + 1e-6) and the clamp at 1 of torch.nn.utils.clip_grad_norm_, without a branch on the norm's value.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, torch.where(norm.isfinite(), factor, torch.ones_like(factor)))
    return norm
