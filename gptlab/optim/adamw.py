"""AdamW by torch's fused kernel, settings by role, with its whole state there from the start.

The kernel is called as torch.optim.AdamW calls it, without that class around it: what that does in Python at every step
took as long as the kernel, for 27 small tensors on a CPU (0.3 ms of 0.6), and it imports torch's compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.config.optim import AdamWConfig


class AdamWGroup(NamedTuple):
    """The parameters of one role."""

    parameters: dict[str, Parameter]
    config: AdamWConfig


class _Call(NamedTuple):
    """Parameters of the same settings, which the kernel takes together, and their state."""

    config: AdamWConfig
    parameters: list[Parameter]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    steps: Tensor
    step_of_each: list[Tensor]
    """The elements of `steps`, so that one operation counts for all."""


class AdamW:
    """State of one parameter: NAME.step (0-d), NAME.exp_avg and NAME.exp_avg_sq (its shape)."""

    def __init__(self, groups: Sequence[AdamWGroup]) -> None:
        self.parameters = {name: p for group in groups for name, p in group.parameters.items()}
        # torch.optim makes this state in the first step. Made here, a checkpoint has the same tensors before and after.
        self._state: dict[str, Tensor] = {}
        self._calls: list[_Call] = []
        by_config: dict[AdamWConfig, dict[str, Parameter]] = {}
        for group in groups:
            by_config.setdefault(group.config, {}).update(group.parameters)
        for config, named in by_config.items():
            parameters = list(named.values())
            first, second = ([p.detach().new_zeros(p.shape) for p in parameters] for _ in range(2))
            steps = torch.zeros(len(parameters), dtype=torch.float32, device=parameters[0].device)
            self._calls.append(_Call(config, parameters, first, second, steps, list(steps.unbind())))
            for name, *state in zip(named, steps.unbind(), first, second, strict=True):
                kinds = ("step", "exp_avg", "exp_avg_sq")
                self._state |= {f"{name}.{kind}": tensor for kind, tensor in zip(kinds, state, strict=True)}

    @torch.no_grad()
    def step(self, lr_scale: float, made: Tensor | None = None) -> None:
        """`made`: as for `CombinedOptimizer.step`."""
        broken = None if made is None else (~made).to(torch.float32)
        for call in self._calls:
            config = call.config
            call.steps.add_(1 if made is None else made)
            torch._fused_adamw_(
                cast(list[Tensor], call.parameters), [_gradient(p) for p in call.parameters],
                call.exp_avg, call.exp_avg_sq, [], call.step_of_each,
                lr=config.lr * lr_scale, beta1=config.beta1, beta2=config.beta2, weight_decay=config.weight_decay,
                eps=config.eps, amsgrad=False, maximize=False, found_inf=broken,
            )  # fmt: skip

    def state_tensors(self) -> dict[str, Tensor]:
        """The live tensors, by PARAMETER.MOMENT."""
        return dict(self._state)


def _gradient(parameter: Parameter) -> Tensor:
    """Its gradient, in the order of memory of the parameter: torch takes both as they lie there."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)
