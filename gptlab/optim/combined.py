"""Muon and AdamW as one optimizer, whose state is complete, strict on loading, and there before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.optim.adamw import AdamW

_STATE_VERSION = 1


class MatrixOptimizer(Protocol):
    """`Muon`, or an optimizer that updates matrices of which this process holds a part."""

    parameters: dict[str, torch.nn.Parameter]
    row_splits: dict[str, tuple[int, ...]]

    def step(self, lr_scale: float, momentum: float, weight_decay_scale: float) -> None: ...
    def state_tensors(self) -> dict[str, Tensor]: ...


class CombinedOptimizer:
    """Learning rate, momentum and weight decay are arguments of every step: schedules are not part of the state."""

    def __init__(self, muon: MatrixOptimizer | None, adamw: AdamW | None) -> None:
        self.muon = muon
        self.adamw = adamw
        self.parameters = (muon.parameters if muon else {}) | (adamw.parameters if adamw else {})

    def step(self, lr_scale: float, momentum: float, weight_decay_scale: float) -> None:
        """One update from the gradients in place.

        Args:
            lr_scale: factor on every peak learning rate.
            momentum: Muon's momentum in this step.
            weight_decay_scale: factor on Muon's weight decay; AdamW's stays constant.

        Raises RuntimeError, with nothing changed, when a parameter has no gradient.
        """
        self.require_gradients()
        if self.muon is not None:
            self.muon.step(lr_scale, momentum, weight_decay_scale)
        if self.adamw is not None:
            self.adamw.step(lr_scale)

    def require_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise RuntimeError(f"{name} has no gradient: every parameter takes part in every step")

    def zero_grad(self) -> None:
        """Free the gradients."""
        for p in self.parameters.values():
            p.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by PARAMETER.MOMENT. Live tensors: the next step changes them."""
        parts = (part for part in (self.muon, self.adamw) if part is not None)
        return {key: tensor for part in parts for key, tensor in part.state_tensors().items()}

    def state_json(self) -> dict[str, Any]:
        """What names and shapes do not say: into which rows a fused matrix was split."""
        splits = self.muon.row_splits if self.muon else {}
        return {"version": _STATE_VERSION, "row_splits": {name: list(rows) for name, rows in splits.items()}}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """Take over a saved state. Raises UserError, with nothing changed, unless it is exactly this optimizer's."""
        self.require_state(tensors, json)
        for key, tensor in self.state_tensors().items():
            tensor.copy_(tensors[key])

    def require_state(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """UserError unless names, shapes, types and splits of a saved state are exactly this optimizer's."""
        own = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in self.state_tensors().items()}
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
