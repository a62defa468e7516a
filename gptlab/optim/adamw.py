"""torch.optim.AdamW, one parameter group a role, with its whole state there from the start."""

from __future__ import annotations

import functools
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
        self._groups = list(groups)
        self._fused = all(p.device.type in _FUSED_DEVICES for p in self.parameters.values())
        # torch makes this state in the first step. Made here, a checkpoint has the same tensors before it and after.
        self._state = {
            name: {
                "step": torch.zeros((), dtype=torch.float32, device=p.device if self._fused else "cpu"),
                "exp_avg": torch.zeros_like(p.detach()),
                "exp_avg_sq": torch.zeros_like(p.detach()),
            }
            for name, p in self.parameters.items()
        }

    def step(self, lr_scale: float) -> None:
        for param_group, group in zip(self._optimizer.param_groups, self._groups, strict=True):
            param_group["lr"] = group.config.lr * lr_scale
        self._optimizer.step()

    def state_tensors(self) -> dict[str, Tensor]:
        """The live tensors, by PARAMETER.MOMENT."""
        return {f"{name}.{key}": tensor for name, state in self._state.items() for key, tensor in state.items()}

    @functools.cached_property
    def _optimizer(self) -> torch.optim.AdamW:
        # Made in the first step: it imports torch's compiler, 0.8 s that `gptlab plan` need not spend.
        optimizer = torch.optim.AdamW([_param_group(group) for group in self._groups], fused=self._fused)
        for name, p in self.parameters.items():
            optimizer.state[p] = self._state[name]
        return optimizer


def _param_group(group: RoleGroup) -> dict[str, object]:
    config = group.config
    return {
        "params": list(group.parameters.values()),
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
