"""How fast torch does the matrix products of a model's linear layers on this machine, each by itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlab.model.gpt import GPT
from gptlab.runtime.hardware.place import fastest_seconds

# Enough for a dozen tries of the largest product of a laptop's model.
_SECONDS_A_PRODUCT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The three products of all linear layers of one shape: in each, 2 * tokens * inputs * outputs operations."""

    layers: int
    """Layers of this shape in the model."""
    tokens: int
    inputs: int
    outputs: int
    forward_seconds: float
    """x W^T: (tokens, inputs) @ (inputs, outputs), one layer."""
    input_gradient_seconds: float
    """g W: (tokens, outputs) @ (outputs, inputs)."""
    weight_gradient_seconds: float
    """g^T x: (outputs, tokens) @ (tokens, inputs)."""

    @property
    def flops(self) -> int:
        """Of one product."""
        return 2 * self.tokens * self.inputs * self.outputs

    @property
    def seconds(self) -> float:
        """The three products in all layers."""
        return self.layers * (self.forward_seconds + self.input_gradient_seconds + self.weight_gradient_seconds)


def time_products(model: GPT, tokens: int, device: torch.device) -> list[Products]:
    """One entry a shape, the most expensive ones first. `tokens`: of one micro-batch."""
    shapes = Counter((m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear))
    timed = [_time(n, tokens, inputs, outputs, device, model.compute_dtype) for (inputs, outputs), n in shapes.items()]
    return sorted(timed, key=lambda products: -products.layers * products.flops)


def _time(layers: int, tokens: int, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype) -> Products:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, weight, grad = random(tokens, inputs), random(outputs, inputs), random(tokens, outputs)

    def seconds(product: Callable[[], Tensor]) -> float:
        return fastest_seconds(product, device, time.perf_counter() + _SECONDS_A_PRODUCT)

    return Products(
        layers=layers,
        tokens=tokens,
        inputs=inputs,
        outputs=outputs,
        forward_seconds=seconds(lambda: F.linear(x, weight)),
        input_gradient_seconds=seconds(lambda: grad @ weight),
        weight_gradient_seconds=seconds(lambda: grad.T @ x),
    )
