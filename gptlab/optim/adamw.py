"""AdamW by torch's fused kernel, settings by role, with its whole state there from the start.

The kernel is called as torch.optim.AdamW calls it, without that class around it: what that does in Python at every step
took as long as the kernel, for 27 small tensors on a CPU (0.3 ms of 0.6), and it imports torch's compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gptlab.config.optim import AdamWConfig
from gptlab.config.roles import Role


@dataclass(frozen=True, slots=True)
class RoleGroup:
    role: Role
    parameters: dict[str, torch.nn.Parameter]
    config: AdamWConfig


class AdamW:
    """State of one parameter: NAME.step (0-d), NAME.exp_avg and NAME.exp_avg_sq (its shape)."""

    def __init__(self, groups: Sequence[RoleGroup]) -> None:
        self.parameters = {name: p for group in groups for name, p in group.parameters.items()}
        # torch.optim makes this state in the first step. Made here, a checkpoint has the same tensors before and after.
        self._state: dict[str, Tensor] = {}
        by_config: dict[AdamWConfig, dict[str, torch.nn.Parameter]] = {}
        for group in groups:
            by_config.setdefault(group.config, {}).update(group.parameters)
        self._calls = [_Call.of(config, list(parameters.values())) for config, parameters in by_config.items()]
        for call, names in zip(self._calls, by_config.values(), strict=True):
            for name, state in zip(names, call.states(), strict=True):
                self._state |= {f"{name}.{key}": tensor for key, tensor in state.items()}

    @torch.no_grad()
    def step(self, lr_scale: float) -> None:
        for call in self._calls:
            call.step(lr_scale)

    def state_tensors(self) -> dict[str, Tensor]:
        """The live tensors, by PARAMETER.MOMENT."""
        return dict(self._state)


@dataclass(frozen=True, slots=True)
class _Call:
    """Parameters of the same settings, which the kernel takes together, and their state."""

    config: AdamWConfig
    parameters: list[torch.nn.Parameter]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    steps: Tensor
    step_of_each: list[Tensor]
    """The elements of `steps`, so that one operation counts for all."""

    @classmethod
    def of(cls, config: AdamWConfig, parameters: list[torch.nn.Parameter]) -> _Call:
        first, second = ([torch.zeros_like(p.detach()) for p in parameters] for _ in range(2))
        steps = torch.zeros(len(parameters), dtype=torch.float32, device=parameters[0].device)
        return cls(config, parameters, first, second, steps, list(steps.unbind()))

    def states(self) -> list[dict[str, Tensor]]:
        """Of each parameter."""
        every = zip(self.step_of_each, self.exp_avg, self.exp_avg_sq, strict=True)
        return [{"step": step, "exp_avg": first, "exp_avg_sq": second} for step, first, second in every]

    def step(self, lr_scale: float) -> None:
        config = self.config
        self.steps.add_(1)
        torch._fused_adamw_(
            cast(list[Tensor], self.parameters),
            [cast(Tensor, p.grad) for p in self.parameters],
            self.exp_avg,
            self.exp_avg_sq,
            [],
            self.step_of_each,
            lr=config.lr * lr_scale,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=config.weight_decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
        )
