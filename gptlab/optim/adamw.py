"""torch.optim.AdamW, one parameter group a role, with its whole state there from the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptlab.config.optim import AdamWConfig
from gptlab.config.roles import Role

# Devices that torch has a fused AdamW kernel for (torch.optim documentation).
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True, slots=True)
class RoleGroup:
    role: Role
    parameters: dict[str, torch.nn.Parameter]
    config: AdamWConfig


class AdamW:
    """State of one parameter: NAME.exp_avg, NAME.exp_avg_sq (its shape) and NAME.step (0-d)."""

    def __init__(self, groups: Sequence[RoleGroup]) -> None:
        self.parameters = {name: p for group in groups for name, p in group.parameters.items()}
        self._peak_lrs = [group.config.lr for group in groups]
        fused = all(p.device.type in _FUSED_DEVICES for p in self.parameters.values())
        self._optimizer = torch.optim.AdamW([_param_group(group) for group in groups], fused=fused)
        # torch makes this state in the first step. Made here, a checkpoint has the same tensors before it and after.
        for p in self.parameters.values():
            self._optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(p.detach()),
                "exp_avg_sq": torch.zeros_like(p.detach()),
            }

    def step(self, lr_scale: float) -> None:
        for group, peak_lr in zip(self._optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = peak_lr * lr_scale
        self._optimizer.step()

    def state_tensors(self) -> dict[str, Tensor]:
        """The live tensors, by PARAMETER.MOMENT."""
        state = self._optimizer.state
        return {f"{name}.{key}": tensor for name, p in self.parameters.items() for key, tensor in state[p].items()}


def _param_group(group: RoleGroup) -> dict[str, object]:
    config = group.config
    return {
        "params": list(group.parameters.values()),
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
