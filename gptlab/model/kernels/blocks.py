"""The blocks of a GPT on CPUs as one function of autograd, by block_kernel.cpp: the kernels of their parts, without
what PyTorch and Python do between two of them.

Shapes: B sequences, T positions, C channels, H query heads, G key-value heads, D head width.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Collection, Hashable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gptlab.model.hooks import all_are_hooked, is_hooked
from gptlab.model.kernels.fused import UNLIMITED, call

WRITTEN_FOR = "faaa75841655cb98"
"""The first digits of the SHA-256 of `computed_text`."""


_MadeOf = dict[str, tuple[Any, Any]]


class _Facts(NamedTuple):
    batch: int
    tokens: int
    width: int
    n_head: int
    n_kv_head: int
    head_width: int
    gate_width: int
    """0 without gates."""
    hidden_width: int
    window: int
    key_offset: bool
    gelu: bool
    of_attention: float
    norm_eps: float
    head_eps: float
    """Negative without a norm of queries and keys."""


_INTEGERS = _Facts._fields.index("of_attention")
_WEIGHTS = "first_weight", "first_bias", "qkv", "gate", "out", "second_weight", "second_bias", "up", "down"
_KEPT = (
    "stream_in", "normed_in", "gates", "heads", "attended", "stream", "normed", "hidden", "slope", "moments_in",
    "head_factors", "lse", "moments", "y",
)  # fmt: skip


class _Block(ctypes.Structure):
    """`Block` in parts.h, which says what they are."""

    _fields_ = [
        *((name, ctypes.c_long) for name in _Facts._fields[:_INTEGERS]),
        *((name, ctypes.c_float) for name in (*_Facts._fields[_INTEGERS:], "of_residual", "of_x0")),
        *((name, ctypes.c_void_p) for name in (*_WEIGHTS, "x", "x0", "value", "cos", "sin", *_KEPT)),
    ]


class _Gradients(ctypes.Structure):
    """`Gradients` there."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("dvalue", *_WEIGHTS, "factors")]


def computed_text(model: type) -> str:
    """What says in Python what block_kernel.cpp computes: the blocks of a class `GPT`, where its code comes from, and
    how `ops` and `fused` compute their parts. OSError where that is no file, ValueError where names are other ones."""
    gpt: Any = model.hidden.__code__.co_filename  # type: ignore[attr-defined]
    ops, fused = (Path(__file__).with_name(f"{name}.py") for name in ("ops", "fused"))
    texts = []
    for file, first, after in (
        (gpt, "class Linear(", "class GPT("), (gpt, "def hidden(", "def is_changed("),
        (ops, "class OfBoth", "def look_up("), (ops, "def linear(", "def whole_blocks("),
        (fused, "def rms_norm(", "def softcap("), (fused, "class _SumAndNorm(", "def call("),
    ):  # fmt: skip
        text = Path(file).read_text(encoding="utf-8")
        texts.append(text[text.index(first) : text.index(after)])
    return "".join(texts)


@functools.cache
def _is_written_for(model: Any) -> bool:
    """Who has edited the text, which is then what the blocks compute, gets what it says."""
    try:
        return hashlib.sha256(computed_text(model).encode()).hexdigest().startswith(WRITTEN_FOR)
    except (OSError, ValueError):
        return False


def hidden(
    model: Any, x0: Tensor, tokens: Tensor, rotary: tuple[Tensor, Tensor] | None, activations: Collection[str]
) -> Tensor | None:  # fmt: skip
    """What all blocks of the `GPT` make of x0 (B, T, C); None for what they compute themselves, or refuse, and for
    activations of other names."""
    layers, kind = list(model.blocks), cast(Hashable, type(model))
    if not layers or not _is_written_for(kind) or all_are_hooked():
        return None
    found = [one for block in layers if (one := _facts(block, model.made_of, activations, x0)) is not None]
    held = [id(weight) for _, weights in found for weight in weights if weight is not None]
    # The gradients of a weight that several blocks share are added up by autograd, in an order of its own.
    if len(found) < len(layers) or len(set(held)) < len(held):
        return None
    mixes, tables, (cos, sin) = model.config.residual_lambdas, model.value_embeddings, rotary or (None, None)
    factors = (model.residual_lambdas, model.x0_lambdas) if mixes else (None, None)
    suits = not mixes or len(layers) == len(model.residual_lambdas) == len(model.x0_lambdas)
    for number, (facts, weights) in enumerate(found):
        suits = (
            suits
            and (weights[3] is None) == (str(number) not in tables)
            and all(_has(table, torch.float32, (facts.tokens, facts.head_width // 2)) for table in (cos, sin))
            and not (mixes and weights[0] is not None)
        )
    given: list[Tensor | None] = []
    for number, (facts, weights) in enumerate(found if suits else ()):
        value = None if weights[3] is None else model.look_up(tables[str(number)], tokens).contiguous()
        suits = suits and _has(value, x0.dtype, (facts.batch, facts.tokens, facts.n_kv_head * facts.head_width))
        given += value, *weights
    if not suits:
        return None
    x0 = x0.contiguous()
    y: Tensor = _Blocks.apply([facts for facts, _ in found], torch.is_grad_enabled(), *factors, x0, cos, sin, *given)
    return y


def _facts(
    block: Any, made_of: _MadeOf, activations: Collection[str], x: Tensor
) -> tuple[_Facts, list[Any]] | None:  # fmt: skip
    """What the kernel has to know of a block, and its weights; None where the kernel does not compute it. Modules and
    parameters are taken from where PyTorch keeps them: to find one as an attribute takes it 0.7 us, and what a caller
    keeps elsewhere is not there."""
    is_a = partial(_is_a, made_of)
    if not is_a("Block", block):
        return None
    attention, mlp, first, second, dropout = map(
        block._modules.get, ("attention", "mlp", "attention_norm", "mlp_norm", "dropout")
    )
    if not (is_a("Attention", attention) and is_a("MLP", mlp)):
        return None
    qkv, out, up, down = *map(attention._modules.get, ("qkv", "out")), *map(mlp._modules.get, ("up", "out"))
    gate, qk_norm = attention.value_gate, attention.qk_norm
    drops_nothing = type(dropout) is nn.Identity or (is_a("Dropout", dropout) and not dropout.training)
    norm, linear = "LayerNorm" if isinstance(first, nn.LayerNorm) else "RMSNorm", [qkv, out, up, down]
    if not (
        all(is_a("Linear", part) and part._parameters.get("bias", part) is None for part in [*linear, gate or qkv])
        and is_a(norm, first) and is_a(norm, second) and (qk_norm is None or is_a("RMSNorm", qk_norm))
        and drops_nothing and not is_hooked(dropout) and not (attention.training and attention.dropout > 0)
        and attention.attend is None and first.eps == second.eps and mlp.activation in activations
    ):  # fmt: skip
        return None
    batch, tokens, width = x.shape
    n_head, n_kv_head, head_width = attention.n_head, attention.n_kv_head, attention.head_dim
    gate_width = 0 if gate is None else gate.in_features
    before, after = (first, second) if norm == "LayerNorm" else (None, None)
    weights, suits = [], gate_width <= width == n_head * head_width
    for part, name, shape in (
        (before, "weight", (width,)), (before, "bias", (width,)),
        (qkv, "weight", ((n_head + 2 * n_kv_head) * head_width, width)), (gate, "weight", (n_kv_head, gate_width)),
        (out, "weight", (width, width)), (after, "weight", (width,)), (after, "bias", (width,)),
        (up, "weight", (up.out_features, width)), (down, "weight", (width, up.out_features)),
    ):  # fmt: skip
        weight = None if part is None else part._parameters.get(name, False)
        is_optional = part is None or name == "bias"
        suits = suits and (
            is_optional if weight is None else weight is not False and _has(weight, torch.float32, shape)
        )
        weights.append(weight)
    numbers = block.attention_scale, first.eps, -1.0 if qk_norm is None else qk_norm.eps
    facts = _Facts(
        batch, tokens, width, n_head, n_kv_head, head_width, gate_width, up.out_features,
        UNLIMITED if attention.window is None else attention.window, attention.key_offset, mlp.activation == "gelu",
        *numbers,
    )  # fmt: skip
    return (facts, weights) if suits and all(isinstance(number, float) for number in numbers) else None


def _is_a(made_of: _MadeOf, name: str, part: Any) -> bool:
    """Whether it is a module of this kind, and nobody has changed what it computes."""
    kind, forward = made_of[name]
    return type(part) is kind and kind.forward is forward and not is_hooked(part)


def _has(tensor: Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Whether a kernel may read the tensor as one of this type and shape; or there is none."""
    return tensor is None or (tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous())


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, facts: list[_Facts], keep: bool, of_residual: Tensor | None, of_x0: Tensor | None, x0: Tensor,
        cos: Tensor | None, sin: Tensor | None, *given: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """of_residual, of_x0: (layers,), or None. given: of each block the value embedding, and _WEIGHTS."""
        ctx.facts = facts
        ctx.factors = [(1.0, 0.0)] * len(facts)
        if of_residual is not None and of_x0 is not None:
            ctx.factors = list(zip(of_residual.tolist(), of_x0.tolist(), strict=True))
        ctx.mixes, ctx.keeps = of_residual is not None, keep
        y, kept = torch.empty_like(x0), x0.new_empty(_layout(ctx, x0, given)[0], dtype=torch.uint8)
        call("blocks_forward", x0.dtype, _blocks(ctx, x0, cos, sin, given, kept, y), len(facts))
        ctx.save_for_backward(x0, cos, sin, kept, *given)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x0, cos, sin, kept, *given = ctx.saved_tensors
        if kept.dtype != torch.uint8:
            raise RuntimeError(
                "saved tensor hooks have changed what the C++ kernel keeps of the blocks, which are bytes"
            )
        made, dx0 = [None if one is None else torch.empty_like(one) for one in given], torch.empty_like(x0)
        layers, each = len(ctx.facts), 1 + len(_WEIGHTS)
        of_factors = x0.new_empty(layers, 2, dtype=torch.float64) if ctx.mixes else None
        gradients = (_Gradients * layers)()
        for layer in range(layers):
            of_layer = None if of_factors is None else of_factors[layer]
            gradients[layer] = _Gradients(*map(_address, (*made[each * layer : each * (layer + 1)], of_layer)))
        blocks = _blocks(ctx, x0, cos, sin, given, kept, None)
        call("blocks_backward", x0.dtype, blocks, gradients, layers, dy.contiguous(), dx0)
        of_both = (None, None) if of_factors is None else of_factors.float().unbind(1)
        return None, None, *of_both, dx0, None, None, *made


def _blocks(
    ctx: Any, x0: Tensor, cos: Tensor | None, sin: Tensor | None, given: Sequence[Tensor | None], kept: Tensor,
    y: Tensor | None,
) -> Any:  # fmt: skip
    """An array of `_Block`. y: of the last one, which is not kept."""
    _, layout = _layout(ctx, x0, given)
    x: int | None = x0.data_ptr()
    of_x0, tables = x if ctx.mixes else None, (_address(cos), _address(sin))
    each, begin = 1 + len(_WEIGHTS), kept.data_ptr()
    blocks = (_Block * len(layout))()
    for layer, offsets in enumerate(layout):
        value, *weights = map(_address, given[each * layer : each * (layer + 1)])
        places = [None if offset is None else begin + offset for offset in offsets]
        if not ctx.mixes:
            places[0] = x  # what is normed
        if layer == len(layout) - 1:
            places[-1] = _address(y)
        blocks[layer] = _Block(*ctx.facts[layer], *ctx.factors[layer], *weights, x, of_x0, value, *tables, *places)
        x = places[-1]
    return blocks


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layout(ctx: Any, x0: Tensor, given: Sequence[Tensor | None]) -> tuple[int, list[tuple[int | None, ...]]]:
    """The bytes that are kept, and where among them each of _KEPT begins for each block; None for what it lacks. Where
    no backward pass follows, every other block has the same memory."""
    last, each = len(ctx.facts) - 1, 1 + len(_WEIGHTS)
    sizes = [
        _bytes(facts, x0.element_size(), ctx.mixes, given[each * layer + 1] is not None, ctx.keeps, layer == last)
        for layer, facts in enumerate(ctx.facts)
    ]
    most, end, layout = max(map(sum, sizes)), 0, []
    for layer, n_bytes in enumerate(sizes):
        begin = end if ctx.keeps else layer % 2 * most
        *begins, end = accumulate(n_bytes, initial=begin)
        layout.append(tuple(place if n else None for place, n in zip(begins, n_bytes, strict=True)))
    return end if ctx.keeps else 2 * most, layout


@functools.lru_cache(maxsize=256)
def _bytes(s: _Facts, real_bytes: int, mixes: bool, is_layer_norm: bool, keeps: bool, is_last: bool) -> list[int]:
    """The size of each of _KEPT, in whole lines of the cache."""
    heads, moments = s.n_head + 2 * s.n_kv_head, 1 + is_layer_norm
    reals = (
        s.width * mixes, s.width, s.n_kv_head * (s.gate_width > 0), heads * s.head_width, s.width, s.width, s.width,
        s.hidden_width, s.hidden_width * (keeps and s.gelu),
    )  # fmt: skip
    floats = moments, (s.n_head + s.n_kv_head) * (s.head_eps >= 0), s.n_head, moments
    of_row = [*(n * real_bytes for n in reals), *(4 * n for n in floats), 0 if is_last else s.width * real_bytes]
    return [-(-s.batch * s.tokens * n // 64) * 64 for n in of_row]
