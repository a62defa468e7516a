"""AdamW by torch's fused kernel, settings by role, with its whole state there from the start.

The kernel is called as torch.optim.AdamW calls it, without that class around it: what that does in Python at every step
took as long as the kernel, for 27 small tensors on a CPU (0.3 ms of 0.6), and it imports torch's compiler.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gptlab.config.optim import AdamWConfig
from gptlab.config.roles import Role
from gptlab.optim.division import Leaf, Moment, Segment


@dataclass(frozen=True, slots=True)
class RoleGroup:
    role: Role
    parameters: dict[str, torch.nn.Parameter]
    config: AdamWConfig


class AdamW:
    """State of one parameter: NAME.exp_avg, NAME.exp_avg_sq (its shape) and NAME.step (0-d). With a `share`, only the
    elements in it are updated, and have a state here."""

    def __init__(self, groups: Sequence[RoleGroup], share: Collection[Segment] | None = None) -> None:
        self.parameters = {name: p for group in groups for name, p in group.parameters.items()}
        owned = {segment.name: segment for segment in share or () if segment.name in self.parameters}
        leaves = {name: Leaf.of(segment, self.parameters[name], (segment.count,)) for name, segment in owned.items()}
        self.leaves = list(leaves.values())
        """Empty without a share."""
        updated = self.parameters if share is None else {name: leaf.own for name, leaf in leaves.items()}
        self._starts = {name: owned[name].start if share is not None else 0 for name in updated}
        # torch.optim makes this state in the first step. Made here, a checkpoint has the same tensors before and after.
        self._state: dict[str, dict[str, Tensor]] = {}
        self._calls: list[_Call] = []
        by_config: dict[AdamWConfig, list[str]] = {}
        for group in groups:
            by_config.setdefault(group.config, []).extend(name for name in group.parameters if name in updated)
        for config, names in by_config.items():
            if names:
                call = _Call.of(config, [updated[name] for name in names])
                self._calls.append(call)
                self._state |= zip(names, call.states(), strict=True)

    @torch.no_grad()
    def step(self, lr_scale: float) -> None:
        for call in self._calls:
            call.step(lr_scale)

    def moments(self) -> list[Moment]:
        """The live tensors. The count of steps is saved by who has the first element."""
        moments = []
        for name, state in self._state.items():
            shape, start = tuple(self.parameters[name].shape), self._starts[name]
            moments.append(Moment(f"{name}.step", (), 0, state["step"], saved_here=start == 0))
            moments += [Moment(f"{name}.{key}", shape, start, state[key]) for key in ("exp_avg", "exp_avg_sq")]
        return moments

    def state_kinds(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of the whole state, by PARAMETER.MOMENT."""
        kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, p in self.parameters.items():
            kinds[f"{name}.step"] = ((), torch.float32)
            kinds |= {f"{name}.{key}": (tuple(p.shape), p.dtype) for key in ("exp_avg", "exp_avg_sq")}
        return kinds


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
