"""Muon and AdamW as one optimizer: parameters by role, the global gradient norm, and one complete state.

The state is there before the first step, and strict on loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.config.errors import UserError
from gptlab.config.load import flatten
from gptlab.config.optim import AdamWConfig, OptimConfig, Role
from gptlab.optim.adamw import AdamW, AdamWGroup
from gptlab.optim.muon import Compile, Muon

_STATE_VERSION = 1


class MatrixOptimizer(Protocol):
    """`Muon`, or an optimizer that updates matrices of which this process holds a part."""

    parameters: dict[str, Parameter]
    row_splits: dict[str, tuple[int, ...]]

    def step(self, lr_scale: float, momentum: float, weight_decay_scale: float, made: Tensor | None = None) -> None: ...
    def compile(self, compiled: Compile | None) -> None: ...
    def state_tensors(self) -> dict[str, Tensor]: ...


def without_gradient(name: str) -> UserError:
    """Only a caller's `change_model` leaves a weight unused."""
    return UserError(
        f"{name} has no gradient, and every weight takes part in every step: turn off in the configuration what "
        "change_model leaves unused, or delete it there"
    )


class CombinedOptimizer:
    """Learning rate, momentum and weight decay are arguments of every step: schedules are not part of the state."""

    def __init__(self, muon: MatrixOptimizer | None, adamw: AdamW | None) -> None:
        self.muon = muon
        self.adamw = adamw
        self.parameters = (muon.parameters if muon else {}) | (adamw.parameters if adamw else {})

    def step(self, lr_scale: float, momentum: float, weight_decay_scale: float, made: Tensor | None = None) -> None:
        """One update. `lr_scale` is a factor on every peak learning rate, `weight_decay_scale` one on Muon's decay;
        AdamW's is constant. `made` (0-d bool, on the device): where False, weights and state stay as they are, whatever
        the gradients. UserError, with nothing changed, when a parameter has no gradient."""
        self.require_gradients()
        if self.muon is not None:
            self.muon.step(lr_scale, momentum, weight_decay_scale, made)
        if self.adamw is not None:
            self.adamw.step(lr_scale, made)

    def require_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise without_gradient(name)

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
        own, saved = _described(self.state_tensors(), self.state_json()), _described(tensors, json)
        for name in (*own, *saved):
            if saved.get(name) != own.get(name):
                raise UserError(
                    f"optimizer state: {name} is {saved.get(name, 'missing')}, but the model's configuration asks for "
                    f"{own.get(name, 'none')}"
                )


def _described(tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> dict[str, str]:
    """{name: value, or shape and type} of all that a state has. `json` may come from an untrusted file."""
    values = {name: str(value)[:100] for name, value in flatten(json).items()}
    return values | {name: f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()}


# --- from parameter roles to an optimizer: the only thing that it knows of the model

Parameters = Iterable[tuple[str, Parameter, Role]]
"""(name, parameter, role) of each."""


def build_optimizer(
    parameters: Parameters, config: OptimConfig, *, compute_dtype: torch.dtype,
    row_splits: Mapping[str, tuple[int, ...]] | None = None,
) -> CombinedOptimizer:  # fmt: skip
    """One optimizer over all parameters. `compute_dtype`: type of Muon's matrix products. `row_splits`: rows of each
    part of a fused matrix, by parameter name, where Muon treats the parts as matrices of their own. (modded-nanogpt
    splits whatever has three times as many rows as columns, but an MLP of ratio 3 has that shape too.)"""
    matrices, groups = divide_by_optimizer(parameters, config)
    muon = Muon(matrices, config.muon, compute_dtype=compute_dtype, row_splits=row_splits or {}) if matrices else None
    return CombinedOptimizer(muon, AdamW(groups) if groups else None)


def divide_by_optimizer(parameters: Parameters, config: OptimConfig) -> tuple[dict[str, Parameter], list[AdamWGroup]]:
    """Muon's matrices by name, and AdamW's groups."""
    by_role: dict[Role, dict[str, Parameter]] = {}
    for name, parameter, role in parameters:
        by_role.setdefault(role, {})[name] = parameter
    matrices = by_role.pop(Role.MATRIX, {}) if config.matrix_optimizer == "muon" else {}
    return matrices, [AdamWGroup(by_role[role], role_config(config, role)) for role in Role if role in by_role]


def role_config(config: OptimConfig, role: Role) -> AdamWConfig:
    """AdamW's settings for a role: the field of its name; both token and position tables are embeddings. `MATRIX` is
    for where Muon does not update the matrices."""
    return cast(AdamWConfig, getattr(config, Role.EMBEDDING if role is Role.POSITION_EMBEDDING else role))
