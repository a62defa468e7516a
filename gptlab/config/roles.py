"""Parameter roles connect model and optimizer, which know nothing else of each other."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    EMBEDDING = "embedding"
    POSITION_EMBEDDING = "position_embedding"
    VALUE_EMBEDDING = "value_embedding"
    HEAD = "head"
    MATRIX = "matrix"
    """Two-dimensional weights inside the blocks."""
    RESIDUAL_LAMBDA = "residual_lambda"
    X0_LAMBDA = "x0_lambda"
    VECTOR = "vector"
    """Norm weights and biases."""
