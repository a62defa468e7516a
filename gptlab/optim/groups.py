"""From parameter roles to an optimizer: the only thing that it knows of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from gptlab.config.optim import AdamWConfig, OptimConfig
from gptlab.config.roles import Role
from gptlab.optim.adamw import AdamW, RoleGroup
from gptlab.optim.combined import CombinedOptimizer
from gptlab.optim.muon import Muon

Parameters = Iterable[tuple[str, torch.nn.Parameter, Role]]
"""(name, parameter, role) of each."""


def build_optimizer(
    parameters: Parameters,
    config: OptimConfig,
    *,
    compute_dtype: torch.dtype,
    row_splits: Mapping[str, tuple[int, ...]] | None = None,
) -> CombinedOptimizer:
    """One optimizer over all parameters, each in exactly one group.

    Args:
        parameters: (name, parameter, role) of each.
        config: settings by role.
        compute_dtype: type of Muon's matrix products.
        row_splits: rows of each part of a fused matrix, by parameter name, where Muon treats the parts as matrices of
            their own. modded-nanogpt splits whatever has three times as many rows as columns. Here the caller says
            what is fused: an MLP of ratio 3 has that shape too, and parts may be unequal.

    Raises ValueError when a parameter comes twice, a role is unknown, or a split does not fit.
    """
    splits = row_splits or {}
    matrices, groups = divide_by_optimizer(parameters, config, splits)
    muon = Muon(matrices, config.muon, compute_dtype=compute_dtype, row_splits=splits) if matrices else None
    return CombinedOptimizer(muon, AdamW(groups) if groups else None)


def divide_by_optimizer(
    parameters: Parameters, config: OptimConfig, row_splits: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, torch.nn.Parameter], list[RoleGroup]]:
    """Muon's matrices by name, and AdamW's groups. Errors as `build_optimizer`."""
    by_role: dict[Role, dict[str, torch.nn.Parameter]] = {}
    names: dict[int, str] = {}
    for name, parameter, role in parameters:
        if id(parameter) in names or name in names.values():
            raise ValueError(f"{name} is already in the optimizer, as {names.get(id(parameter), name)}")
        names[id(parameter)] = name
        by_role.setdefault(Role(role), {})[name] = parameter
    if unknown := sorted(row_splits.keys() - by_role.get(Role.MATRIX, {}).keys()):
        raise ValueError(f"a row split is given for {unknown[0]}, which is no matrix of the model")
    matrices = by_role.pop(Role.MATRIX, {}) if config.matrix_optimizer == "muon" else {}
    return matrices, [RoleGroup(role, by_role[role], role_config(config, role)) for role in Role if role in by_role]


def role_config(config: OptimConfig, role: Role) -> AdamWConfig:
    """AdamW's settings for a role (`MATRIX`: where Muon does not update the matrices)."""
    match role:
        case Role.EMBEDDING | Role.POSITION_EMBEDDING:
            return config.embedding
        case Role.VALUE_EMBEDDING:
            return config.value_embedding
        case Role.HEAD:
            return config.head
        case Role.MATRIX:
            return config.matrix
        case Role.RESIDUAL_LAMBDA:
            return config.residual_lambda
        case Role.X0_LAMBDA:
            return config.x0_lambda
        case Role.VECTOR:
            return config.vector
