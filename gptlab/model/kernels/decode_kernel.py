"""One token for each of several rows through a GPT in one call, on CPUs, by decode_kernel.cpp."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gptlab.config.model import Activation
from gptlab.model.kernels.library import Library, load_built, require_memory

_SOURCE = Path(__file__).with_name("decode_kernel.cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC")
_UNLIMITED = 2**62
"""The window of full attention."""
_ACTIVATIONS: dict[Activation, int] = {"relu2": 0, "gelu": 1, "gelu_tanh": 2}
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class _Norm(ctypes.Structure):
    _fields_ = [("kind", _LONG), ("eps", _FLOAT), ("weight", _POINTER), ("bias", _POINTER)]


class _Linear(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("outputs", _LONG), ("inputs", _LONG)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("heads", "out", "up", "down")),
        *((name, _Norm) for name in ("attention_norm", "mlp_norm", "head_norm")),
        ("values", _POINTER), ("cache", _POINTER), ("window", _LONG),
        *((name, _FLOAT) for name in ("residual_lambda", "x0_lambda", "scale")),
    ]  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *((name, _LONG) for name in ("n_layer", "n_head", "n_kv_head", "width", "channels", "columns", "narrow")),
        ("activation", _LONG), ("key_offset", _LONG),
        *((name, _POINTER) for name in ("embedding", "positions", "cos", "sin")),
        ("embedding_norm", _Norm), ("final_norm", _Norm), ("head", _Linear),
    ]  # fmt: skip


@functools.cache
def load_decode_kernel() -> Library:
    """With `decode_step`, built unless the cache has it (three seconds)."""
    library = load_built(((_SOURCE,),), _FLAGS)
    if library.functions is not None:
        function = library.functions.decode_step
        function.argtypes = [_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, ctypes.c_int]
        function.restype = None
    return library


class DecodeKernel:
    """A model's weights as the kernel takes them. It keeps what they point to."""

    def __init__(
        self,
        model: Any,  # a GPT
        layers: Sequence[Any],  # of a Decoder: each with its weights in the compute type
        head: Tensor,  # (V, C)
        cache: Tensor,  # (layers, 2, B, G, S, D) float32
        rotary: tuple[Tensor, Tensor] | None,  # each (seq_len, D)
    ) -> None:
        config = model.config
        self._kept: list[Tensor] = []
        self._functions, self._vocab_size = load_decode_kernel().functions, len(head)
        blocks = [
            _Layer(
                self._linear(layer.heads, layer.heads_bias), self._linear(layer.attention_out, layer.attention_bias),
                self._linear(layer.up, layer.up_bias), self._linear(layer.mlp_out, layer.mlp_bias),
                self._norm(block.attention_norm), self._norm(block.mlp_norm), self._norm(block.attention.qk_norm),
                self._floats(layer.value_table), self._floats(kept), layer.window or _UNLIMITED,
                *(layer.lambdas or (1.0, 0.0)), layer.scale,
            )
            for layer, block, kept in zip(layers, model.blocks, cache, strict=True)
        ]  # fmt: skip
        cos, sin = rotary or (None, None)
        position = None if model.position_embedding is None else model.position_embedding.weight
        self._layers = (_Layer * len(blocks))(*blocks)
        self._model = _Model(
            self._layers, config.n_layer, config.n_head, config.kv_heads, config.head_dim, config.n_embd,
            cache.shape[4], head.dtype == torch.bfloat16, _ACTIVATIONS[config.activation], config.key_offset,
            self._floats(model.token_embedding.weight), self._floats(position), self._floats(cos), self._floats(sin),
            self._norm(model.embedding_norm), self._norm(model.final_norm), self._linear(head, None),
        )  # fmt: skip

    def step(self, tokens: Sequence[int], positions: Sequence[int], starts: Sequence[int], column: int) -> Tensor:
        """Logits (B, V) in float32 before the softcap; writes `column` of the cache. MemoryError if it finds too little
        memory."""
        rows = len(tokens)
        logits = torch.empty(rows, self._vocab_size, dtype=torch.float32)
        longs = _LONG * rows
        self._functions.decode_step(
            ctypes.byref(self._model), rows, longs(*tokens), longs(*positions), longs(*starts), column,
            logits.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        require_memory(self._functions, "decode_step")
        return logits

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _floats(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._address(tensor.detach().float())

    def _linear(self, weight: Tensor, bias: Tensor | None) -> _Linear:
        return _Linear(self._address(weight), self._floats(bias), *weight.shape)

    def _norm(self, module: nn.Module | None) -> _Norm:
        if module is None:
            return _Norm(0, 0.0, None, None)
        if isinstance(module, nn.LayerNorm):
            return _Norm(2, module.eps, self._floats(module.weight), self._floats(module.bias))
        return _Norm(1, float(module.eps), None, None)  # type: ignore[arg-type]
