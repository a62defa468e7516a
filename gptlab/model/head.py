"""The output head's loss and its gradient in one pass, a slice of the logits at a time.

Cross-entropy's gradient is known as soon as the loss is: dz = (softmax(c) - onehot) * dc/dz, with c = cap tanh(z/cap).
Computing it at once saves the second softmax and tanh of a backward pass, and the logits (positions times vocabulary)
never exist whole. Measured on two Zen 4 cores, bf16, compiled, 8,192 positions, width 128, 4,096
entries: 94 ms forward and backward, against 157 ms by autograd; its three matrix products alone take 59.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gptlab.model.hooks import is_by_weight
from gptlab.model.kernels import torch_ops
from gptlab.model.kernels.ops import implementation, multiplication, multiplication_of_many
from gptlab.model.kernels.shapes import require_head

# Logits that exist at one time, 8 MiB of float32: they stay in the cache. At quickstart's size forward and backward
# took 314 ms with slices of this size and 322 with slices four times as large (medians of 10) ...
SLICE_LOGITS = 2**21
# ... but no more slices than this, since a compiled graph holds each of them.
MAX_SLICES = 16
SLICES_IN_TURN = torch.__version__ >= "2.12"
"""Whether what torch compiles for a GPU has the logits of one slice at a time. 2.11 would keep those of all in a region
that is compiled once."""


def capped_logits(head: nn.Linear, x: Tensor, vocab_size: int, cap: float | None) -> Tensor:
    """x (..., C) -> (..., V) after the softcap, at least float32."""
    kernels = None if torch.is_grad_enabled() else multiplication_of_many(x)
    if kernels is not None and head.bias is None and is_by_weight(head):
        return kernels.capped_logits(x, head.weight, vocab_size, cap)
    logits = head(x)[..., :vocab_size]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if cap is None else implementation(logits).softcap(logits, cap)


class HeadLoss(torch.autograd.Function):
    """Sum of the cross-entropy in nats of softcap(x @ weight.T) over all targets >= 0; differentiable once.

    x: (N, C) in the compute type; weight: (P, C), which is rounded to it; targets: (N,); entries from `vocab_size` on
    are padding. `scale` (0-d float32), for float16: a factor on the gradients and not on the loss, from before they are
    rounded.

    `forward` casts its result only where that changes the type: otherwise it would return an alias, for which torch
    2.11 compiles a backward pass of zeros (https://github.com/pytorch/pytorch/issues/180642).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, cap: float | None,
        scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        require_head(x, weight, vocab_size)
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.weight_dtype = weight.dtype
        if (kernels := multiplication(x)) is not torch_ops:
            total, *gradients = kernels.head_loss(x, weight, targets, vocab_size, cap)
        else:
            total, *gradients = _loss_and_gradients(x, weight.to(x.dtype), targets, vocab_size, cap, scale)
        ctx.save_for_backward(*gradients)
        return total if total.dtype == wide else total.to(wide)  # float64 by the CPU kernels; see above

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        # `once_differentiable` would see a second derivative only through `upstream`, which needs none.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("the head's loss is differentiable once: its gradients have none (create_graph=True)")
        of_x, of_weight = ctx.saved_tensors
        return (of_x * upstream).to(of_x.dtype), (of_weight * upstream).to(ctx.weight_dtype), None, None, None, None


def _loss_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, cap: float | None, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss, and its gradients for x (N, C) and weight (P, C), by the library's products."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=x.device)
    x_gradients = []
    weight_gradient = torch.zeros(weight.shape, dtype=wide, device=weight.device)
    positions = max(SLICE_LOGITS // len(weight), -(-len(x) // MAX_SLICES))
    one_slice = _slice if x.device.type == "cpu" else _slice_compiled_once
    for xs, ys in zip(x.split(positions), targets.split(positions), strict=True):
        nats, x_gradient, product = one_slice(xs, weight, ys, vocab_size, cap, scale)
        total = total + nats
        x_gradients.append(x_gradient)
        weight_gradient += product
    return total, torch.cat(x_gradients), weight_gradient


def _slice(
    xs: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, cap: float | None, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss of some positions, and its gradients for them and for the weight, in the type of xs."""
    logits = xs @ weight.t()
    if scale is None:
        nats, dz = implementation(xs).loss_and_gradient(logits, targets, vocab_size, cap)
    else:
        nats, dz = _loss_and_scaled_gradient(logits, targets, vocab_size, cap, scale)
    return nats, dz @ weight, dz.t() @ xs


# Compiled once, and run one after the other. From a graph that holds each slice, Inductor computes the logits or their
# gradients of most slices before it multiplies the first, and compiles a kernel for each, in more than twice the time
# (docs/LOG.md, 2026-11-27). The C++ wrapper, which it makes for CPUs, cannot hold such a region.
_slice_compiled_once = torch.compiler.nested_compile_region(_slice) if SLICES_IN_TURN else _slice


def _loss_and_scaled_gradient(
    logits: Tensor, targets: Tensor, vocab_size: int, cap: float | None, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """For float16, which makes 0 of all that is below 3e-8: the gradient of an entry is its probability."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nats, gradient = implementation(logits).loss_and_gradient(wide, targets, vocab_size, cap)
    return nats, (gradient * scale).to(logits.dtype)
