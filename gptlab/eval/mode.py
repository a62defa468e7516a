"""Evaluates a model without changing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Turn dropout and gradients off; afterwards, put every submodule back into the mode it was in.

    `no_grad`, not `inference_mode`: tensors that a module caches meanwhile must stay usable in training.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
