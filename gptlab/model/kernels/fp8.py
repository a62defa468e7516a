"""Matrix products of training in 8-bit floating point (`runtime.fp8`), on GPUs that have it.

Tensorwise scaling, as in nanochat and torchao: before a product, each tensor is multiplied by the one number that
brings its largest entry to the largest of the type, and rounded: activations and weights to e4m3 (3 bits of mantissa,
up to 448), gradients to e5m2 (2 bits, up to 57,344), by "FP8 Formats for Deep Learning" (arXiv:2209.05433).

Evaluation and sampling (modules that are not in training mode) compute in bfloat16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptlab.config.errors import ConfigError
from gptlab.model.gpt import GPT, Linear
from gptlab.model.head import MAX_SLICES, SLICE_LOGITS, HeadLoss
from gptlab.model.kernels import torch_ops

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CAPABILITY = (8, 9)
"""Ada and Hopper, and later."""
MULTIPLE = 16
"""cuBLAS wants rows of 16 bytes: all three sizes of a product must be multiples, since each is the inner one of one of
the three products of a layer."""
LEAST_SIZE = 128
"""Layers narrower than this stay in bfloat16, where rounding costs more than the product saves (nanochat)."""
_LEAST_LARGEST = 1e-12
"""The largest entry of a tensor of zeros counts as this (torchao)."""


def use_fp8(model: GPT) -> None:
    """Have the linear layers that are large enough, the head included, multiply in 8 bits from here on, in training.
    ConfigError where the GPU cannot. Without a GPU here, one that can is planned for."""
    why = None
    if model.platform != "cuda" or torch.version.hip is not None:
        why = "only NVIDIA's GPUs multiply in the 8-bit types that this uses"
    elif model.compute_dtype != torch.bfloat16:
        why = "what is between the products is bfloat16: give runtime.dtype bfloat16"
    elif torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) < CAPABILITY:
        found, needed = (".".join(map(str, one)) for one in (capability, CAPABILITY))
        why = f"this GPU has compute capability {found}, and {needed} (Ada, Hopper) is the first with 8-bit products"
    if why is not None:
        raise ConfigError("runtime.fp8", True, why, False)
    for module in model.modules():
        if type(module) is Linear and suits(module):
            module.__class__ = Fp8Linear


def suits(layer: Linear) -> bool:
    sizes = layer.in_features, layer.out_features
    return min(sizes) >= LEAST_SIZE and all(size % MULTIPLE == 0 for size in sizes)


class Rounded(NamedTuple):
    values: Tensor  # 8-bit
    factor: Tensor
    """0-d float32: what `values` are multiplied by."""

    def transposed(self) -> Rounded:
        """For a product along the other dimension. cuBLAS takes a left factor by rows and a right one by columns."""
        return Rounded(self.values.t().contiguous(), self.factor)


def rounded(x: Tensor, kind: torch.dtype) -> Rounded:
    """x to 8 bits. Not finite where an entry of x is not."""
    most = torch.finfo(kind).max
    factor = x.abs().amax().float().clamp(min=_LEAST_LARGEST) / most
    return Rounded((x.float() / factor).to(kind), factor)


def product(a: Rounded, b: Rounded, out: torch.dtype, *, fast: bool = False) -> Tensor:
    """a @ b.T in `out`; a: (m, n), b: (k, n). `fast`: Hopper's accumulation in fewer bits, precise enough for the
    forward pass (torchao)."""
    return torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.factor, scale_b=b.factor, out_dtype=out, use_fast_accum=fast
    )


class Fp8Product(torch.autograd.Function):
    """x (n, in) @ weight (out, in).T"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, weight8 = rounded(x, E4M3), rounded(weight, E4M3)
        ctx.save_for_backward(*x8, *weight8)
        return product(x8, weight8, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        saved = ctx.saved_tensors
        x8, weight8, dy8 = Rounded(*saved[:2]), Rounded(*saved[2:]), rounded(dy, E5M2)
        dx = product(dy8, weight8.transposed(), dy.dtype)
        return dx, product(dy8.transposed(), x8.transposed(), dy.dtype)


class Fp8HeadLoss(HeadLoss):
    """HeadLoss whose three products are in 8 bits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, cap: float | None,
        scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert scale is None  # float16's
        if len(x) % MULTIPLE:
            return HeadLoss.forward(ctx, x, weight, targets, vocab_size, cap)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        x_gradients, weight_gradient = [], torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
        ctx.weight_dtype = weight.dtype
        weight8 = rounded(weight.to(x.dtype), E4M3)
        columns = weight8.transposed()
        positions = max(SLICE_LOGITS // len(weight), -(-len(x) // MAX_SLICES))
        positions = -(-positions // MULTIPLE) * MULTIPLE
        for xs, ys in zip(x.split(positions), targets.split(positions), strict=True):
            x8 = rounded(xs, E4M3)
            logits = product(x8, weight8, x.dtype, fast=True)
            nats, dz = torch_ops.loss_and_gradient(logits, ys, vocab_size, cap)
            dz8 = rounded(dz, E5M2)
            total = total + nats
            x_gradients.append(product(dz8, columns, x.dtype))
            weight_gradient += product(dz8.transposed(), x8.transposed(), x.dtype)
        ctx.save_for_backward(torch.cat(x_gradients), weight_gradient)
        return total


class Fp8Linear(Linear):
    loss = Fp8HeadLoss
    evaluates_as = Linear

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        if not self.training or len(flat) % MULTIPLE:
            return super().forward(x)
        y: Tensor = Fp8Product.apply(flat, self.weight.to(x.dtype))
        y = y if self.bias is None else y + self.bias.to(x.dtype)
        return y.unflatten(0, x.shape[:-1])
