"""Looking at a model without changing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Dropout off and no gradients inside; afterwards every submodule is back in the mode it was in.

    `no_grad`, not `inference_mode`: what a module caches inside (a rotary table, say) must stay usable in training.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
