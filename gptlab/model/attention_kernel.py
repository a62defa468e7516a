"""The kernel of attention_kernel.cpp as an operator of torch: built once, where a C++ compiler is at hand."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gptlab.data.cache import cache_root
from gptlab.runtime.device import cxx_compiler

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_BUILD_TIMEOUT_SECONDS = 60
_EVERYTHING = 2**62
"""The window of full attention."""


def attention_by_kernel(heads: Tensor, n_head: int, *, window: int | None) -> Tensor:
    """heads: (B, T, n_head + 2 n_kv_head, D), float32: the queries, keys and values of each token. Each query sees
    itself and the `window - 1` tokens before it (None: all). Returns (B, T, n_head, D). Only where `kernel_available`.
    """
    return _Attention.apply(heads, n_head, _EVERYTHING if window is None else window)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, n_head: int, window: int) -> Tensor:
        y, lse = torch.ops.gptlab.attention_forward(heads, n_head, window)
        ctx.save_for_backward(heads, y, lse)
        ctx.window = window
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.gptlab.attention_backward(*ctx.saved_tensors, dy, ctx.window), None, None


def kernel_available() -> bool:
    """Whether `attention_by_kernel` can be had here. Builds the kernel where that was not done before, in a second or
    two; where no compiler is to be found, or its cache cannot be written to, there is none."""
    return _operators() is not None


@functools.cache
def _operators() -> torch.library.Library | None:
    """torch knows the operators as long as this object lives."""
    compiler = cxx_compiler()
    if compiler is None or sys.platform == "win32":  # whose compilers take other options
        return None
    try:
        return _register(_load(compiler))
    except (OSError, subprocess.SubprocessError):
        return None


def _load(compiler: str) -> ctypes.CDLL:
    """The kernel from the cache, built first if it is not there, or cannot be loaded."""
    path = _library_path(compiler)
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        _build(compiler, path)
        library = ctypes.CDLL(str(path))
    pointer, integer = ctypes.c_void_p, ctypes.c_long
    library.attention_scratch.argtypes, library.attention_scratch.restype = [integer] * 2, integer
    for function, pointers in ((library.attention_forward, 4), (library.attention_backward, 6)):
        function.argtypes, function.restype = [pointer] * pointers + [integer] * 6 + [ctypes.c_int], None
    return library


def _library_path(compiler: str) -> Path:
    """Named by all that the kernel depends on; what -march=native means here is what the compiler says it does."""
    target = _run([compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    key = hashlib.sha256(b"\0".join([target, " ".join(_FLAGS).encode(), _SOURCE.read_bytes()])).hexdigest()
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_root(None) / "compile")
    return folder / "gptlab" / f"attention-{key[:32]}.so"


def _build(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        _run([compiler, *_FLAGS, str(_SOURCE), "-o", str(made)])
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(path)  # in one piece, whoever else builds it


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_TIMEOUT_SECONDS).stdout


def _register(library: ctypes.CDLL) -> torch.library.Library:
    def scratch(tokens: int, width: int, threads: int) -> Tensor:
        return torch.empty(threads, library.attention_scratch(tokens, width), dtype=torch.float32)

    def forward(heads: Tensor, n_head: int, window: int) -> tuple[Tensor, Tensor]:
        heads = heads.contiguous()
        batch, tokens, rows, width = heads.shape
        threads = torch.get_num_threads()
        y, lse = heads.new_empty(batch, tokens, n_head, width), heads.new_empty(batch, n_head, tokens)
        own = scratch(tokens, width, threads)
        library.attention_forward(
            *(t.data_ptr() for t in (heads, y, lse, own)),
            batch, tokens, n_head, (rows - n_head) // 2, width, window, threads,
        )  # fmt: skip
        return y, lse

    def backward(heads: Tensor, y: Tensor, lse: Tensor, dy: Tensor, window: int) -> Tensor:
        heads, dy = heads.contiguous(), dy.contiguous()
        batch, tokens, rows, width = heads.shape
        n_head, threads = y.shape[2], torch.get_num_threads()
        dheads = torch.empty_like(heads)
        own = scratch(tokens, width, threads)
        library.attention_backward(
            *(t.data_ptr() for t in (heads, y, lse, dy, dheads, own)),
            batch, tokens, n_head, (rows - n_head) // 2, width, window, threads,
        )  # fmt: skip
        return dheads

    def forward_shapes(heads: Tensor, n_head: int, window: int) -> tuple[Tensor, Tensor]:
        batch, tokens, _, width = heads.shape
        return heads.new_empty(batch, tokens, n_head, width), heads.new_empty(batch, n_head, tokens)

    def backward_shapes(heads: Tensor, y: Tensor, lse: Tensor, dy: Tensor, window: int) -> Tensor:
        return torch.empty_like(heads, memory_format=torch.contiguous_format)

    def forward_flops(heads: Sequence[int], n_head: int, window: int, **rest: object) -> int:
        batch, tokens, _, width = heads
        return 2 * 2 * batch * n_head * tokens * min(tokens, window) * width

    def backward_flops(
        heads: Sequence[int], y: Sequence[int], lse: object, dy: object, window: int, **_: object
    ) -> int:
        return 2 * forward_flops(heads, y[2], window)

    operators = torch.library.Library("gptlab", "DEF")
    operators.define("attention_forward(Tensor heads, int n_head, int window) -> (Tensor, Tensor)")
    operators.define("attention_backward(Tensor heads, Tensor y, Tensor lse, Tensor dy, int window) -> Tensor")
    operators.impl("attention_forward", forward, "CPU")
    operators.impl("attention_backward", backward, "CPU")
    torch.library.register_fake("gptlab::attention_forward", forward_shapes, lib=operators)
    torch.library.register_fake("gptlab::attention_backward", backward_shapes, lib=operators)
    # For torch's FlopCounterMode, by its convention for attention, which counts what causality hides.
    register_flop_formula(torch.ops.gptlab.attention_forward)(forward_flops)
    register_flop_formula(torch.ops.gptlab.attention_backward)(backward_flops)
    return operators
