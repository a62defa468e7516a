"""The functions of `torch_ops` on CPUs, each in one pass over memory, linear layers, and the whole head: by
attention_kernel.cpp, fused_kernels.cpp, linear_kernel.cpp and head_kernel.cpp.

Activations are float32 or bfloat16, and so are their gradients. `ops.load_kernels` must have loaded the library.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlab.config.model import Activation
from gptlab.model.kernels import torch_ops
from gptlab.model.kernels.library import Library, kernel_library, require_memory
from gptlab.model.kernels.shapes import checked_targets, key_value_heads, require_head, require_shape, require_width

UNLIMITED = 2**62
"""The window of full attention."""
loaded = Library()
"""What `ops.load_kernels` has loaded for a model."""


def rms_norm(x: Tensor, eps: float) -> Tensor:
    return _SumAndNorm.apply(x, None, 1.0, 0.0, eps)


def sum_and_rms_norm(x: Tensor, y: Tensor, a: float | Tensor, b: float | Tensor, eps: float) -> tuple[Tensor, Tensor]:
    learned = [factor.shape for factor in (a, b) if isinstance(factor, Tensor)]
    suits = _are_alike(x, y) and learned in ([], [(), ()])  # the kernel has the gradients of both, or of none
    return _SumAndNorm.apply(x, y, a, b, eps) if suits else torch_ops.sum_and_rms_norm(x, y, a, b, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return _SumAndLayerNorm.apply(x, None, 1.0, 0.0, weight, bias, eps)


def sum_and_layer_norm(
    x: Tensor, y: Tensor, a: float | Tensor, b: float | Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    if not (isinstance(a, float) and isinstance(b, float) and _are_alike(x, y)):  # no lineage learns a and b here
        total = torch_ops.weighted_sum(x, y, a, b)
        return total, layer_norm(total, weight, bias, eps)
    return _SumAndLayerNorm.apply(x, y, a, b, weight, bias, eps)


def _are_alike(x: Tensor, y: Tensor) -> bool:
    """Whether a kernel may read both as it reads x. Autocast, or a caller's own part, may give y another type."""
    return x.dtype == y.dtype and x.shape == y.shape


def prepare_heads(
    heads: Tensor, n_head: int, gates: Tensor | None, value: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None, norm_eps: float | None,
) -> Tensor:  # fmt: skip
    if gates is None or value is None:
        gates = value = None
    return _Heads.apply(heads, gates, value, *(rotary or (None, None)), n_head, norm_eps)


def attention(heads: Tensor, n_head: int, window: int | None, dropout: float, key_offset: bool = False) -> Tensor:
    seed = _drawn_seed() if dropout > 0 else 0
    return _Attention.apply(heads, n_head, UNLIMITED if window is None else window, key_offset, dropout, seed)


def dropout(x: Tensor, rate: float) -> Tensor:
    return _Dropout.apply(x, rate, _drawn_seed())


def _drawn_seed() -> int:
    return int(torch.randint(2**62, ()))


def relu2(x: Tensor) -> Tensor:
    return _Elementwise.apply(x, "relu2", x.dtype)


def gelu(x: Tensor) -> Tensor:
    return _Gelu.apply(x)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., C) by weight (P, C), which is rounded to the type of x: (..., P)."""
    return _Linear.apply(x, weight)


def mlp(x: Tensor, up: Tensor, out: Tensor, activation: Activation) -> Tensor:
    """`linear` by out (C, H) of the activation of `linear` by up (H, C); "relu2" or "gelu"."""
    return _MLP.apply(x, up, out, activation, torch.is_grad_enabled())


def softcap(logits: Tensor, cap: float) -> Tensor:
    assert logits.dtype == torch.float32
    return _Elementwise.apply(logits, "softcap", None, float(cap))


def loss_and_gradient(logits: Tensor, targets: Tensor, vocab_size: int, cap: float | None) -> tuple[Tensor, Tensor]:
    """The loss is float64; the gradient takes the place of the logits. IndexError for a target that is no entry."""
    assert logits.is_contiguous()
    targets = checked_targets(targets, len(logits), vocab_size)
    nats, sizes = logits.new_empty((), dtype=torch.float64), (*logits.shape, vocab_size)
    call("loss_and_gradient", logits.dtype, logits, targets, *sizes, float(cap or 0), nats)
    return nats, logits


def head_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`loss_and_gradient` of x @ weight.T: the loss, and its gradients with respect to x (n, C), in its type, and
    weight (P, C), in float32."""
    require_head(x, weight, vocab_size)
    targets = checked_targets(targets, len(x), vocab_size)
    x, weight = x.contiguous(), weight.float().contiguous()
    nats, dx, dweight = x.new_empty((), dtype=torch.float64), torch.empty_like(x), torch.empty_like(weight)
    sizes = *x.shape, len(weight), vocab_size
    call("head_loss", x.dtype, x, weight, targets, dx, dweight, nats, *sizes, float(cap or 0))
    return nats, dx, dweight


def capped_logits(x: Tensor, weight: Tensor, vocab_size: int, cap: float | None) -> Tensor:
    """x (..., C) by weight (P, C): the first V of P logits in float32, after the softcap. Has no gradient."""
    require_head(x, weight, vocab_size)
    x, weight = x.contiguous(), weight.float().contiguous()
    logits = torch.empty(*x.shape[:-1], vocab_size, dtype=torch.float32)
    call("capped_logits", x.dtype, x, weight, logits, x.shape[:-1].numel(), x.shape[-1], vocab_size, float(cap or 0))
    return logits


def head_nats(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, cap: float | None) -> Tensor:
    """`losses` of `capped_logits`, computed a few rows at a time; x is (..., C), targets and the result are (...)."""
    require_head(x, weight, vocab_size)
    targets = checked_targets(targets, x.shape[:-1].numel(), vocab_size)
    x, weight = x.contiguous(), weight.float().contiguous()
    nats = torch.empty(targets.shape, dtype=torch.float32)
    call("head_nats", x.dtype, x, weight, targets, nats, targets.numel(), x.shape[-1], vocab_size, float(cap or 0))
    return nats


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    assert logits.dtype == torch.float32
    logits, nats = logits.contiguous(), torch.empty(len(logits), dtype=torch.float32)
    call("losses", None, logits, checked_targets(targets, *logits.shape), nats, *logits.shape)
    return nats


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Of contiguous float32 tensors, in float64."""
    arrays = torch.tensor([(x.data_ptr(), x.numel()) for x in tensors], device="cpu")
    total = arrays.new_empty((), dtype=torch.float64)
    call("sum_of_squares", None, arrays, len(arrays), total)
    return total


class _SumAndNorm(torch.autograd.Function):
    """(a x + b y, its norm); without y, the norm of x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, a: float | Tensor, b: float | Tensor, eps: float) -> Any:
        x, y = x.contiguous(), None if y is None else y.contiguous()
        ctx.weights, ctx.learned = (float(a), float(b)), isinstance(a, Tensor)
        total, normed = x if y is None else torch.empty_like(x), torch.empty_like(x)
        inverse = x.new_empty(x.shape[:-1], dtype=torch.float32)
        sizes = inverse.numel(), x.shape[-1]
        call("norm_forward", x.dtype, x, y, *ctx.weights, total, normed, inverse, *sizes, float(eps))
        ctx.save_for_backward(total, inverse, *((x, y) if ctx.learned else ()))
        ctx.set_materialize_grads(False)
        return normed if y is None else (total, normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total, inverse, *learned = ctx.saved_tensors
        sums = inverse.new_empty(2, dtype=torch.float64) if ctx.learned else None
        given = inverse, *(learned or (None, None))  # x and y
        dx, dy = _norm_backward("norm_backward", ctx.weights, gradients, total, given, (None, sums))
        of_weights = (None, None) if sums is None else sums.float().unbind()
        return dx, dy, *of_weights, None


class _SumAndLayerNorm(torch.autograd.Function):
    """(a x + b y, its norm); without y, the norm of x alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, a: float, b: float, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Any:
        require_shape("norm's weight", weight, x.shape[-1])
        require_shape("norm's bias", bias, x.shape[-1])
        x, y = x.contiguous(), None if y is None else y.contiguous()
        ctx.weights, ctx.biased, ctx.weight_dtype = (float(a), float(b)), bias is not None, weight.dtype
        weight, bias = weight.float().contiguous(), _floats(bias)
        total, normed = x if y is None else torch.empty_like(x), torch.empty_like(x)
        moments = x.new_empty(*x.shape[:-1], 2, dtype=torch.float32)
        given = x, y, *ctx.weights, weight, bias, total, normed, moments
        call("layer_norm_forward", x.dtype, *given, x.shape[:-1].numel(), x.shape[-1], float(eps))
        ctx.save_for_backward(total, moments, weight)
        ctx.set_materialize_grads(False)
        return normed if y is None else (total, normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total, moments, weight = ctx.saved_tensors
        made = dweight, dbias = torch.empty_like(weight), torch.empty_like(weight) if ctx.biased else None
        dx, dy = _norm_backward("layer_norm_backward", ctx.weights, gradients, total, (moments, weight), made)
        dbias = None if dbias is None else dbias.to(ctx.weight_dtype)
        return dx, dy, None, None, dweight.to(ctx.weight_dtype), dbias, None


def _norm_backward(
    name: str, weights: tuple[float, float], gradients: Any, total: Tensor, given: Any, made: Any
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and y, one tensor where a and b are equal; None without y. The kernel fills `made`, too."""
    dtotal, dnormed = (None, *gradients)[-2:]
    dtotal = None if dtotal is None else dtotal.contiguous()
    dnormed = torch.zeros_like(total) if dnormed is None else dnormed.contiguous()
    (a, b), sizes, dx = weights, (total.shape[:-1].numel(), total.shape[-1]), torch.empty_like(total)
    dy = dx if a == b else torch.empty_like(total) if len(gradients) == 2 else None
    call(name, total.dtype, dtotal, dnormed, total, *given, a, b, dx, None if dy is dx else dy, *made, *sizes)
    return dx, dy


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, gates: Tensor | None, value: Tensor | None, cos: Tensor | None, sin: Tensor | None,
        n_head: int, eps: float | None,
    ) -> Tensor:  # fmt: skip
        heads, cos, sin = heads.contiguous(), _floats(cos), _floats(sin)
        gates, value = (None if one is None else one.to(heads.dtype).contiguous() for one in (gates, value))
        batch, tokens, _, width = heads.shape
        n_kv_head = key_value_heads(heads, n_head)
        require_shape("rotary cosines", cos, tokens, width // 2)
        require_shape("rotary sines", sin, tokens, width // 2)
        require_shape("gates", gates, batch, tokens, n_kv_head)
        require_shape("value embedding", value, batch, tokens, n_kv_head * width)
        out = torch.empty_like(heads)
        inverse = None if eps is None else heads.new_empty(batch, tokens, n_head + n_kv_head, dtype=torch.float32)
        ctx.sizes = batch * tokens, tokens, n_head, n_kv_head, width
        norm_eps = -1.0 if eps is None else float(eps)
        call("heads_forward", heads.dtype, *ctx.sizes, heads, gates, value, cos, sin, norm_eps, out, inverse)
        ctx.save_for_backward(out, inverse, gates, value, cos, sin)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        out, inverse, gates, value, cos, sin = ctx.saved_tensors
        given = dout.contiguous(), out, inverse, gates, value, cos, sin
        gradients = [None if one is None else torch.empty_like(one) for one in (out, gates, value)]
        call("heads_backward", out.dtype, *ctx.sizes, *given, *gradients)
        return *gradients, None, None, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, n_head: int, window: int, key_offset: bool, dropout: float, seed: int
    ) -> Tensor:  # fmt: skip
        heads = heads.contiguous()
        batch, tokens, _, width = heads.shape
        y = heads.new_empty(batch, tokens, n_head, width)
        lse = heads.new_empty(batch, n_head, tokens, dtype=torch.float32)
        ctx.sizes = batch, tokens, n_head, key_value_heads(heads, n_head), width, window, key_offset, dropout, seed
        call("attention_forward", heads.dtype, heads, y, lse, *ctx.sizes)
        ctx.save_for_backward(heads, y, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        heads, y, lse = ctx.saved_tensors
        dheads = torch.empty_like(heads)
        call("attention_backward", heads.dtype, heads, y, lse, dy.contiguous(), dheads, *ctx.sizes)
        return dheads, None, None, None, None, None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, seed: int) -> Tensor:
        ctx.draws = rate, seed
        return _dropped(x, *ctx.draws)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _dropped(dy, *ctx.draws), None, None


def _dropped(x: Tensor, rate: float, seed: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    call("dropout", x.dtype, x, y, x.shape[:-1].numel(), x.shape[-1], float(rate), seed)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        require_width(x, weight)
        x, weight, ctx.weight_dtype = x.contiguous(), weight.float().contiguous(), weight.dtype
        ctx.sizes = x.shape[:-1].numel(), x.shape[-1], len(weight)
        y = x.new_empty(*x.shape[:-1], len(weight))
        call("linear_forward", x.dtype, x, weight, y, *ctx.sizes)
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        call("linear_backward", x.dtype, x, weight, dy.contiguous(), dx, dweight, *ctx.sizes)
        return dx, dweight.to(ctx.weight_dtype)


class _MLP(torch.autograd.Function):
    """Keeps the hidden activations and, with `keep`, their derivatives, unless these follow from them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, out: Tensor, activation: Activation, keep: bool) -> Tensor:
        require_width(x, up)
        require_shape("MLP's output weight", out, x.shape[-1], len(up))
        ctx.weight_dtype, ctx.sizes = up.dtype, (x.shape[:-1].numel(), x.shape[-1], len(up))
        x, up, out = x.contiguous(), up.float().contiguous(), out.float().contiguous()
        hidden, y = x.new_empty(*x.shape[:-1], len(up)), torch.empty_like(x)
        slope = torch.empty_like(hidden) if keep and activation == "gelu" else None
        call("mlp_forward", x.dtype, x, up, out, None, hidden, slope, y, *ctx.sizes, activation == "gelu")
        ctx.save_for_backward(x, up, out, hidden, slope)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, up, *others = ctx.saved_tensors
        dx, dup, dout = torch.empty_like(x), torch.empty_like(up), torch.empty_like(others[0])
        call("mlp_backward", x.dtype, x, up, *others, dy.contiguous(), dx, dup, dout, *ctx.sizes)
        return dx, dup.to(ctx.weight_dtype), dout.to(ctx.weight_dtype), None, None


class _Gelu(torch.autograd.Function):
    """Keeps the derivative instead of x: it is nearly free where GELU itself is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        y, slope = torch.empty_like(x), torch.empty_like(x) if ctx.needs_input_grad[0] else None
        call("gelu", x.dtype, x, y, slope, x.numel())
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * ctx.saved_tensors[0]


class _Elementwise(torch.autograd.Function):
    """The functions NAME_forward and NAME_backward for `dtype`, as in `call`, which take the same constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, dtype: torch.dtype | None, *constants: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        call(f"{name}_forward", dtype, x, y, *constants, x.numel())
        ctx.save_for_backward(x)
        ctx.name, ctx.dtype, ctx.constants = name, dtype, constants
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        call(f"{ctx.name}_backward", ctx.dtype, x, dy.contiguous(), dx, *ctx.constants, x.numel())
        return dx, None, None, *(None for _ in ctx.constants)


def _floats(tensor: Tensor | None) -> Tensor | None:
    """As the kernels read what is float32 whatever the type of activations."""
    return None if tensor is None else tensor.float().contiguous()


def call(name: str, dtype: torch.dtype | None, *values: Tensor | float | ctypes.Array[Any] | None) -> None:
    """Call a function for activations of `dtype`, with the number of threads as the last argument. None: one for
    float32 logits, which is there whatever the type of activations. MemoryError if it finds too little memory."""
    library = loaded if dtype is None else kernel_library("bfloat16" if dtype == torch.bfloat16 else "float32")
    function, given = getattr(library.functions, name), (*values, torch.get_num_threads())
    if function.argtypes is None:  # the first call: ctypes converts faster than Python
        function.argtypes = [*map(_type_in_c, given)]
    function(*[value.data_ptr() if isinstance(value, Tensor) else value for value in given])
    require_memory(library.functions, name)


def _type_in_c(value: Tensor | float | ctypes.Array[Any] | None) -> Any:
    """Tensors and arrays are pointers, integers long, other numbers float."""
    return ctypes.c_long if isinstance(value, int) else ctypes.c_float if isinstance(value, float) else ctypes.c_void_p
