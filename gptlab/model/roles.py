"""The role of each parameter: all that the optimizer knows of the model."""

from __future__ import annotations

from gptlab.config.roles import Role
from gptlab.model.gpt import GPT

_BY_MODULE = {
    "token_embedding": Role.EMBEDDING,
    "position_embedding": Role.POSITION_EMBEDDING,
    "value_embeddings": Role.VALUE_EMBEDDING,
    "head": Role.HEAD,
    "residual_lambdas": Role.RESIDUAL_LAMBDA,
    "x0_lambdas": Role.X0_LAMBDA,
}


def parameter_roles(model: GPT) -> dict[str, Role]:
    """{name: role}. A shared table (tied head) appears once, as the embedding."""
    return {name: _role(name, parameter.ndim) for name, parameter in model.named_parameters()}


def fused_rows(model: GPT) -> dict[str, tuple[int, ...]]:
    """Row counts of the matrices that stack several: query, key and value."""
    c = model.config
    kv = c.kv_heads * c.head_dim
    return {name: (c.n_embd, kv, kv) for name, _ in model.named_parameters() if name.endswith("qkv.weight")}


def _role(name: str, ndim: int) -> Role:
    by_module = _BY_MODULE.get(name.split(".")[0])
    if by_module is not None and not name.endswith(".bias"):
        return by_module
    return Role.MATRIX if ndim == 2 else Role.VECTOR
