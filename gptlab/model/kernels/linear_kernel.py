"""Linear layers, and the two of an MLP at once, by linear_kernel.cpp: in float32 on AMD processors with AVX-512.

On those, MKL multiplies by kernels for AVX2: at the sizes of nanogpt/shakespeare-char-cpu 86 to 100 of the 115 GFLOP/s
that a core can do, where these do 105 to 112 (docs/LOG.md, 2026-11-21). Elsewhere the library is at home.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from gptlab.config.model import Activation
from gptlab.model.kernels.library import kernel_library

_ACTIVATIONS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "relu2")
"""As linear_kernel.cpp numbers them."""
assert set(_ACTIVATIONS) == set(get_args(Activation))

# A weight is transposed for each forward pass: with fewer tokens, as when a text is continued, that shows.
MIN_TOKENS = 64
# Of one weight: up to 384 x 1,536 the kernels won at every number of tokens that was tried, with 512 x 2,048 they lost,
# as they make no use of the levels of the cache beyond the second (docs/LOG.md, 2026-11-21).
MAX_WEIGHTS = 640 * 1024


def linear_by_kernel(x: Tensor, weight: Tensor) -> Tensor:
    """x: (..., inputs), weight: (outputs, inputs), float32 -> (..., outputs). Only for weights that
    `linear_kernel_pays` names, and `MIN_TOKENS` or more."""
    y: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight)
    return y.view(*x.shape[:-1], -1)


def mlp_by_kernel(x: Tensor, up: Tensor, out: Tensor, activation: Activation) -> Tensor:
    """out(activation(up(x))): x (..., width), up (hidden, width), out (width, hidden) -> (..., width). Where as
    `linear_by_kernel`."""
    y: Tensor = _MLP.apply(x.reshape(-1, x.shape[-1]), up, out, _ACTIVATIONS.index(activation))
    return y.view(x.shape)


def enough_tokens(x: Tensor) -> bool:
    """Whether x (..., channels) is worth a kernel."""
    return x.numel() >= MIN_TOKENS * x.shape[-1]


def linear_kernel_pays(layer: nn.Linear) -> bool:
    """Whether this layer, in float32, is faster by kernel here: one without bias, of whole vectors, and no
    larger than `MAX_WEIGHTS`."""
    multiple = _multiple()
    return (
        multiple is not None
        and layer.bias is None
        and layer.in_features % multiple == 0
        and layer.out_features % multiple == 0
        and layer.in_features * layer.out_features <= MAX_WEIGHTS
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.gptlab.linear_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.gptlab.linear_backward(*ctx.saved_tensors, dy)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, out: Tensor, activation: int) -> Tensor:
        y, hidden = torch.ops.gptlab.mlp_forward(x, up, out, activation)
        ctx.save_for_backward(x, up, out, hidden)
        ctx.activation = activation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        dx, dup, dout = torch.ops.gptlab.mlp_backward(*ctx.saved_tensors, dy, ctx.activation)
        return dx, dup, dout, None


@functools.cache
def _multiple() -> int | None:
    """Of which number widths have to be a multiple; None where the kernels do not pay."""
    library = kernel_library()
    if library is None:
        return None
    for name, shapes, flops in (
        ("linear_forward", _linear_shapes, _linear_flops),
        ("linear_backward", _linear_backward_shapes, _linear_backward_flops),
        ("mlp_forward", _mlp_shapes, _mlp_flops),
        ("mlp_backward", _mlp_backward_shapes, _mlp_backward_flops),
    ):
        torch.library.register_fake(f"gptlab::{name}", shapes)
        register_flop_formula(getattr(torch.ops.gptlab, name))(flops)
    return int(library.functions.linear_multiple()) if library.functions.linear_pays() else None


def _linear_shapes(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _linear_backward_shapes(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(weight.shape)


def _mlp_shapes(x: Tensor, up: Tensor, out: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], up.shape[0])


def _mlp_backward_shapes(
    x: Tensor, up: Tensor, out: Tensor, hidden: Tensor, dy: Tensor, activation: int
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(up.shape), x.new_empty(out.shape)


def _linear_flops(x: Sequence[int], weight: Sequence[int], **rest: object) -> int:
    return 2 * x[0] * weight[0] * weight[1]


def _linear_backward_flops(x: Sequence[int], weight: Sequence[int], dy: object, **rest: object) -> int:
    return 2 * _linear_flops(x, weight)


def _mlp_flops(x: Sequence[int], up: Sequence[int], out: object, activation: object, **rest: object) -> int:
    return 2 * _linear_flops(x, up)


def _mlp_backward_flops(
    x: Sequence[int], up: Sequence[int], out: object, hidden: object, dy: object, activation: object, **rest: object
) -> int:
    return 4 * _linear_flops(x, up)
