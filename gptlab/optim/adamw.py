"""torch.optim.AdamW, one parameter group a role, with its whole state there from the start."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from gptlab.config.optim import AdamWConfig
from gptlab.config.roles import Role
from gptlab.optim.division import Leaf, Moment, Segment

# Devices that torch has a fused AdamW kernel for (torch.optim documentation).
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


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
        self._groups = [
            (group, [updated[name] for name in group.parameters if name in updated])
            for group in groups
            if not updated.keys().isdisjoint(group.parameters)
        ]
        self._updated = updated
        self._fused = all(p.device.type in _FUSED_DEVICES for p in self.parameters.values())
        # torch makes this state in the first step. Made here, a checkpoint has the same tensors before it and after.
        self._state = {
            name: {
                "step": torch.zeros((), dtype=torch.float32, device=p.device if self._fused else "cpu"),
                "exp_avg": torch.zeros_like(p.detach()),
                "exp_avg_sq": torch.zeros_like(p.detach()),
            }
            for name, p in updated.items()
        }

    def step(self, lr_scale: float) -> None:
        if not self._groups:
            return
        for param_group, (group, _) in zip(self._optimizer.param_groups, self._groups, strict=True):
            param_group["lr"] = group.config.lr * lr_scale
        self._optimizer.step()

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

    @functools.cached_property
    def _optimizer(self) -> torch.optim.AdamW:
        # Made in the first step: it imports torch's compiler, 0.8 s that `gptlab plan` need not spend.
        optimizer = torch.optim.AdamW([_param_group(*group) for group in self._groups], fused=self._fused)
        for name, p in self._updated.items():
            optimizer.state[p] = self._state[name]
        return optimizer


def _param_group(group: RoleGroup, parameters: list[torch.nn.Parameter]) -> dict[str, object]:
    config = group.config
    return {
        "params": parameters,
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
