"""Muon and AdamW as one optimizer, whose state is complete, strict on loading, and there before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.optim.adamw import AdamW
from gptlab.optim.muon import Muon
from gptlab.optim.sharded_muon import ShardedMuon

_STATE_VERSION = 1


class CombinedOptimizer:
    """Learning rate, momentum and decay come with every step: what the schedules say is not part of the state."""

    def __init__(self, muon: Muon | ShardedMuon | None, adamw: AdamW | None) -> None:
        self.muon = muon
        self.adamw = adamw
        self.parameters = (muon.parameters if muon else {}) | (adamw.parameters if adamw else {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All parameters in the form that torch.amp.GradScaler looks for in an optimizer."""
        return [{"params": list(self.parameters.values())}]

    def step(self, lr_scale: float, momentum: float, weight_decay_scale: float) -> None:
        """One update from the gradients in place.

        Args:
            lr_scale: factor on every peak learning rate.
            momentum: Muon's momentum in this step.
            weight_decay_scale: factor on Muon's weight decay; AdamW's stays constant.

        Raises RuntimeError, with nothing changed, when a parameter has no gradient.
        """
        for name, p in self.parameters.items():
            if p.grad is None:
                raise RuntimeError(f"{name} has no gradient: every parameter takes part in every step")
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
        for p in self.parameters.values():
            p.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by PARAMETER.MOMENT. Live tensors: the next step changes them."""
        return (self.muon.state_tensors() if self.muon else {}) | (self.adamw.state_tensors() if self.adamw else {})

    def state_json(self) -> dict[str, Any]:
        """What the tensors' names and shapes do not tell: into which rows a fused matrix was split."""
        splits = self.muon.row_splits if self.muon else {}
        return {"version": _STATE_VERSION, "row_splits": {name: list(rows) for name, rows in splits.items()}}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Take over a saved state. Raises UserError, with nothing changed, when it is not exactly this optimizer's."""
        own = self.state_tensors()
        if json != self.state_json():
            raise UserError(f"optimizer state: saved as {_differences(json, self.state_json())}")
        if missing := sorted(own.keys() - tensors.keys()):
            raise UserError(f"optimizer state: missing {_some(missing)}")
        if unexpected := sorted(tensors.keys() - own.keys()):
            raise UserError(f"optimizer state: unexpected {_some(unexpected)}")
        for key, tensor in own.items():
            if (tensors[key].shape, tensors[key].dtype) != (tensor.shape, tensor.dtype):
                raise UserError(
                    f"optimizer state: {key} is {_kind(tensors[key])}, but the model's configuration asks for "
                    f"{_kind(tensor)}"
                )
        for key, tensor in own.items():
            tensor.copy_(tensors[key])


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


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
