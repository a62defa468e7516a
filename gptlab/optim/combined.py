"""Muon and AdamW as one optimizer, whose state is complete, strict on loading, and there before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.optim.adamw import AdamW
from gptlab.optim.division import Moment
from gptlab.optim.muon import Muon
from gptlab.optim.sharded_muon import ShardedMuon

_STATE_VERSION = 1


class CombinedOptimizer:
    """Learning rate, momentum and decay come with every step: what the schedules say is not part of the state.

    Made for a share of the elements, it updates these alone, each through a leaf (`division.Leaf`) whose gradient is
    `leaf.own.grad`, or part of the whole parameter's.
    """

    def __init__(self, muon: Muon | ShardedMuon | None, adamw: AdamW | None, *, is_shared: bool = False) -> None:
        self.muon = muon
        self.adamw = adamw
        self.parameters = (muon.parameters if muon else {}) | (adamw.parameters if adamw else {})
        self.is_shared = is_shared
        """Whether other ranks update what this one does not."""
        self.leaves = {leaf.segment: leaf for part in (muon, adamw) if part is not None for leaf in part.leaves}
        """Empty unless the work is shared."""
        self.witness: torch.nn.Parameter | None = None
        """A parameter beside those of the model. What is not finite in its gradient, GradScaler sees on this rank."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All parameters in the form that torch.amp.GradScaler looks for in an optimizer."""
        return [{"params": [*self.updated, *([] if self.witness is None else [self.witness])]}]

    @property
    def updated(self) -> list[torch.nn.Parameter]:
        """What this rank updates, and whose gradients count: parameters, or parts of them."""
        return [leaf.own for leaf in self.leaves.values()] if self.is_shared else list(self.parameters.values())

    def step(
        self,
        lr_scale: float,
        momentum: float,
        weight_decay_scale: float,
        moved: Callable[[str | None], None] = lambda what: None,
    ) -> None:
        """One update from the gradients in place.

        Args:
            lr_scale: factor on every peak learning rate.
            momentum: Muon's momentum in this step.
            weight_decay_scale: factor on Muon's weight decay; AdamW's stays constant.
            moved: told, where the work is shared, what has its new weights: None for all that AdamW updates, which
                comes first, then each `Matrix.stack`; the same on all ranks.

        Raises RuntimeError, with nothing changed, when a parameter has no gradient.
        """
        for leaf in self.leaves.values():
            leaf.take_gradient()
        gradients = {leaf.segment.name: leaf.own.grad for leaf in self.leaves.values()}
        if not self.is_shared:
            gradients = {name: p.grad for name, p in self.parameters.items()}
        for name, gradient in gradients.items():
            if gradient is None:
                raise RuntimeError(f"{name} has no gradient: every parameter takes part in every step")
        if self.is_shared:
            if self.adamw is not None:
                self.adamw.step(lr_scale)
            moved(None)
            if isinstance(self.muon, Muon):
                self.muon.step(lr_scale, momentum, weight_decay_scale, moved)
            return
        finish = None
        if isinstance(self.muon, ShardedMuon):
            finish = self.muon.begin_step(lr_scale, momentum, weight_decay_scale)
        elif self.muon is not None:
            self.muon.step(lr_scale, momentum, weight_decay_scale)
        if self.adamw is not None:
            self.adamw.step(lr_scale)
        if finish is not None:
            finish()

    def zero_grad(self) -> None:
        """Free the gradients."""
        for p in (*self.parameters.values(), *self.updated):
            p.grad = None

    def moments(self) -> list[Moment]:
        """All of the state that is here. Live tensors: the next step changes them."""
        return (self.muon.moments() if self.muon else []) + (self.adamw.moments() if self.adamw else [])

    def state_kinds(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of the whole state, by PARAMETER.MOMENT."""
        return (self.muon.state_kinds() if self.muon else {}) | (self.adamw.state_kinds() if self.adamw else {})

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything here that the next step depends on, by PARAMETER.MOMENT, and by its first element where this is
        only a part of it. Live tensors: the next step changes them."""
        return {moment.key: moment.tensor for moment in self.moments()}

    def state_json(self) -> dict[str, Any]:
        """What the tensors' names and shapes do not tell: into which rows a fused matrix was split."""
        splits = self.muon.row_splits if self.muon else {}
        return {"version": _STATE_VERSION, "row_splits": {name: list(rows) for name, rows in splits.items()}}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Take over a saved state, whole, of which a share keeps its part. Raises UserError, with nothing changed, when
        it is not exactly this optimizer's."""
        own = self.state_kinds()
        if json != self.state_json():
            raise UserError(f"optimizer state: saved as {_differences(json, self.state_json())}")
        if missing := sorted(own.keys() - tensors.keys()):
            raise UserError(f"optimizer state: missing {_some(missing)}")
        if unexpected := sorted(tensors.keys() - own.keys()):
            raise UserError(f"optimizer state: unexpected {_some(unexpected)}")
        for key, kind in own.items():
            theirs = tuple(tensors[key].shape), tensors[key].dtype
            if theirs != kind:
                raise UserError(
                    f"optimizer state: {key} is {_kind(*theirs)}, but the model's configuration asks for {_kind(*kind)}"
                )
        for moment in self.moments():
            part = tensors[moment.name].reshape(-1)[moment.start : moment.start + moment.tensor.numel()]
            moment.tensor.copy_(part.view(moment.tensor.shape))


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    if saved.get("version") != own["version"]:
        return f"version {saved.get('version')}, but this program reads version {own['version']}"
    theirs, ours = saved.get("row_splits", {}), own["row_splits"]
    name = next((name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name)), None)
    if name is None:
        return f"{', '.join(saved)}, with other entries than {', '.join(own)}"
    return f"{name} split into rows {theirs.get(name)}, but the configuration asks for {ours.get(name)}"


def _some(names: list[str], limit: int = 3) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"
