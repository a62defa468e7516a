"""From parameter roles to an optimizer: the only thing that it knows of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from gptlab.config.optim import AdamWConfig, OptimConfig
from gptlab.config.roles import Role
from gptlab.optim.adamw import AdamW, RoleGroup
from gptlab.optim.combined import CombinedOptimizer
from gptlab.optim.division import MESSAGE_BYTES, Division, Segment, divide
from gptlab.optim.muon import Muon, matrices_of, row_split
from gptlab.optim.sharded_muon import ShardedMuon

Parameters = Iterable[tuple[str, torch.nn.Parameter, Role]]
"""(name, parameter, role) of each."""


def build_optimizer(
    parameters: Parameters,
    config: OptimConfig,
    *,
    compute_dtype: torch.dtype,
    row_splits: Mapping[str, tuple[int, ...]] | None = None,
    share: Collection[Segment] | None = None,
    make_muon: Callable[..., ShardedMuon] | None = None,
) -> CombinedOptimizer:
    """One optimizer over all parameters, each in exactly one group.

    Args:
        parameters: (name, parameter, role) of each.
        config: settings by role.
        compute_dtype: type of Muon's matrix products.
        row_splits: rows of each part of a fused matrix, by parameter name, where Muon is to treat the parts as
            matrices of their own. modded-nanogpt splits whatever has three times as many rows as columns; here the
            caller says what is fused, since an MLP of ratio 3 has that shape too and parts may be unequal.
        share: what this process updates (`Division.share`), where others update the rest. None: everything.
        make_muon: what makes Muon of its matrices by name, with arguments as `Muon`. None: `Muon`.

    Raises ValueError when a parameter comes twice, a role is unknown, or a split does not fit.
    """
    matrices, groups = _by_optimizer(parameters, config, row_splits or {})
    options: dict[str, Any] = {"compute_dtype": compute_dtype, "row_splits": dict(row_splits or {})}
    muon: Muon | ShardedMuon | None = None
    if matrices and make_muon is not None:
        muon = make_muon(matrices, config.muon, **options)
    elif matrices:
        muon = Muon(matrices, config.muon, **options, share=share)
    adamw = AdamW(groups, share) if groups else None
    return CombinedOptimizer(muon, adamw, is_shared=share is not None)


def divide_work(
    parameters: Parameters,
    config: OptimConfig,
    n_ranks: int,
    *,
    row_splits: Mapping[str, tuple[int, ...]] | None = None,
    message_bytes: int = MESSAGE_BYTES,
) -> Division:
    """What each of `n_ranks` updates, of the parameters that `build_optimizer` takes, in the model's order; all of one
    type. Errors as there."""
    known = list(parameters)
    matrices, groups = _by_optimizer(known, config, row_splits or {})
    blocks = [
        block
        for name, p in matrices.items()
        for block in matrices_of(name, p.size(1), row_split(name, tuple(p.shape), config.muon, row_splits or {}))
    ]
    return divide(
        {name: p.numel() for name, p, _ in known},
        blocks,
        [list(group.parameters) for group in groups],
        n_ranks,
        message_elements=message_bytes // known[0][1].element_size(),
    )


def _by_optimizer(
    parameters: Parameters, config: OptimConfig, row_splits: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, torch.nn.Parameter], list[RoleGroup]]:
    """Muon's matrices by name, and AdamW's groups."""
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
