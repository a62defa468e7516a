"""How the parts of a model are computed that have several implementations. This is the one place that chooses.

    ACTIVATIONS   PyTorch; a new activation is one entry
    attention     the C++ kernel (float32 on a CPU, without dropout), scaled_dot_product_attention (full attention on a
                  GPU), or blocks of queries (everything else)
    one token     a C++ kernel (float32 and bfloat16 on a CPU), or PyTorch (`model/decoder.py`)

Shapes: B sequences, T positions, H query heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlab.config.model import Activation
from gptlab.model.attention import blocked_attention

if TYPE_CHECKING:
    from gptlab.model.kernels.library import Library

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_attention_kernel: Callable[[Tensor, int, int | None], Tensor] | None = None
"""The C++ kernel of this process, once `load_kernels` has loaded it. Not a cached function: torch.compile would trace
the loading."""
_library: Library | str | None = None
"""What `load_kernels` found: the library of that kernel, or why there is none."""


def attention(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, T, G, D)
    v: Tensor,  # (B, T, G, D)
    *,
    window: int | None,
    dropout: float = 0.0,
    packed: Tensor | None = None,
) -> Tensor:  # (B, T, H, D)
    """Causal attention: each query sees itself and the `window - 1` tokens before it (all of them if window is None).

    `packed` (B, T, H + 2 G, D) holds q, k and v side by side, if the caller has them so: it saves the kernel a copy.
    """
    if _attention_kernel is not None and suits_kernels(q.device, q.dtype) and dropout == 0:
        heads = torch.cat((q, k, v), dim=2) if packed is None else packed
        return _attention_kernel(heads, q.shape[2], window)
    return _attention_by_torch(q, k, v, window, dropout)


def _attention_by_torch(q: Tensor, k: Tensor, v: Tensor, window: int | None, dropout: float) -> Tensor:
    """`attention` without the C++ kernel."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if window is None and q.device.type != "cpu":
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped)
    else:
        y = blocked_attention(q, k, v, window=window, dropout=dropout)
    return y.transpose(1, 2)


def suits_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the C++ kernels are for this device and compute type."""
    return device.type == "cpu" and dtype == torch.float32


def load_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Load the C++ kernels if they suit, building them first unless the cache has them (about ten seconds).

    Call it before the model computes or is compiled. Where they cannot be built, PyTorch computes: `missing_kernels`.
    """
    global _attention_kernel, _library
    if suits_kernels(device, dtype):
        from gptlab.model.kernels.attention_kernel import attention_by_kernel, load_attention_kernel

        _library = load_attention_kernel()
        _attention_kernel = None if isinstance(_library, str | None) else attention_by_kernel


def decodes_by_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a C++ kernel computes single tokens (`model/decoder.py`). The first call builds it: three seconds."""
    if not _suits_decode_kernel(device, dtype):
        return False
    from gptlab.model.kernels.decode_kernel import load_decode_kernel

    return load_decode_kernel() is not None


def missing_decode_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    """A warning if that kernel suits but could not be built; otherwise None."""
    if not _suits_decode_kernel(device, dtype) or decodes_by_kernel(device, dtype):
        return None
    return "tokens are sampled without gptlab's C++ kernel, half as fast: no C++ compiler here builds it"


def _suits_decode_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)


def missing_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """A warning with the reason, if the C++ kernels suit but could not be built; otherwise None."""
    if not (suits_kernels(device, dtype) and isinstance(_library, str)):
        return None
    return f"attention is computed without gptlab's C++ kernel, which is slower: {_library}"


def implementations(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Which implementation computes each part, for run.json and checkpoints: the bits depend on it.

    `attention` is "torch" or "kernels HASH", the hash of the library's bytes. `linear` is always "torch"; runs before
    2026-11-22 may have recorded kernels. On a CPU, `vectors` is the instruction set of PyTorch's own kernels.
    """
    found = {"attention": "torch", "linear": "torch"}
    if suits_kernels(device, dtype) and not isinstance(_library, str | None):
        found["attention"] = f"kernels {_library.sha256}"
    if device.type == "cpu":
        found["vectors"] = torch.backends.cpu.get_cpu_capability()
    return found
