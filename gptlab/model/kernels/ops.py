"""How the parts of a model are computed that have several implementations. This is the one place that chooses.

between matrix products   `fused` (float32 and bfloat16 on a CPU, not compiled), or `torch_ops`
ACTIVATIONS               the same, or PyTorch
linear layers             the same for many positions, by `runtime.products`, the MLP as one; else PyTorch
all blocks                `blocks`, where `fused` would compute all of their parts; else part by part
attention                 the same on a CPU; `torch_attention` on GPUs and with document masks
embeddings                `embedding`, where there is `fused`; else PyTorch
the gradients' norm       `fused`, or PyTorch
Muon's update             `muon_kernel`, where there is `fused`; else PyTorch
the head                  `fused` as a whole, by `runtime.products`; else slices (`model/head.py`)
one token                 a C++ kernel (float32 and bfloat16 on a CPU), or PyTorch (`model/decoder.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlab.config.model import Activation
from gptlab.config.run import Products
from gptlab.model.hooks import is_by_weight
from gptlab.model.kernels import torch_ops
from gptlab.runtime.hardware.installed import cxx_compiler

if TYPE_CHECKING:
    from gptlab.model.kernels.library import Activations, Library

# From so many positions on, kernels multiply them by weights, which they pack each time.
KERNEL_POSITIONS = 256

_ACTIVATIONS: dict[torch.dtype, Activations] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Types of the C++ kernels, which have a library for each."""
_fused: ModuleType | None = None
"""The C++ kernels of this process, once `load_kernels` has loaded them."""
_library: Library | None = None
"""What `load_kernels` found."""
_products: Products = "kernels"
"""What multiplies matrices, where `_fused` can."""


def implementation(x: Tensor) -> ModuleType:
    """The module whose functions take `x`: `fused` or `torch_ops`, which have the same."""
    # torch.compile makes its own kernels of everything that it sees. Fake tensors, of another type, have no data.
    if _fused is None or not _suit_kernels(x.device, x.dtype) or torch.compiler.is_compiling() or type(x) is not Tensor:
        return torch_ops
    return _fused


def multiplication(x: Tensor) -> ModuleType:
    """`fused` for its `linear`, `mlp`, `head_loss` and `capped_logits`; `torch_ops`, which has none of them, where the
    library of torch multiplies."""
    return implementation(x) if _products == "kernels" else torch_ops


def multiplication_of_many(x: Tensor) -> ModuleType | None:
    """The module whose `linear`, `mlp` and `capped_logits` take x (..., C); None where torch multiplies, as it does for
    few positions."""
    kernels = multiplication(x)
    return None if kernels is torch_ops or x.shape[:-1].numel() < KERNEL_POSITIONS else kernels


def multiply_by(products: Products) -> None:
    """What `multiplication` chooses in this process, until kernels are loaded for another model."""
    global _products
    _products = products


def products() -> Products:
    return _products


@dataclass(frozen=True, slots=True)
class OfBoth:
    """An activation that `implementation` has; the kernels also compute it within an MLP."""

    name: Activation

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(implementation(x), self.name)(x)
        return y


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu2": OfBoth("relu2"),
    "gelu": OfBoth("gelu"),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""A new one also has its name in `config/model.py`, its formula in decode_kernel.cpp with a number in decode_kernel.py,
and what transformers computes in hf_config.py and modeling_gptlab.py, which takes any other name for GELU."""


def look_up(table: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table (P, C) for tokens (...), rounded to `dtype`: (..., C)."""
    suits = _fused is not None and table.dtype == torch.float32 and dtype in _ACTIVATIONS
    if suits and implementation(table.detach()) is not torch_ops:
        from gptlab.model.kernels import embedding

        return embedding.look_up(table, tokens, dtype)
    return F.embedding(tokens, table).to(dtype)


def sum_of_squares(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of the squares of all elements of one or more tensors of one device, 0-d, summed in `dtype`."""
    if dtype == torch.float64 and _kernels_take(tensors):
        from gptlab.model.kernels import fused

        return fused.sum_of_squares(tensors)
    return torch.stack(torch._foreach_norm(tensors, dtype=dtype)).square().sum()


def muon_kernels(*tensors: Tensor) -> ModuleType | None:
    """`muon_kernel`, if it takes these weights, gradients or moments; None where PyTorch updates them."""
    if not _kernels_take(tensors):
        return None
    from gptlab.model.kernels import muon_kernel

    return muon_kernel


def _kernels_take(tensors: Iterable[Tensor]) -> bool:
    """Whether kernels read weights, gradients and states of this type and layout."""
    return all(x.dtype == torch.float32 and x.is_contiguous() and implementation(x) is _fused for x in tensors)


def orthogonalization(stack: Tensor, dtype: torch.dtype) -> ModuleType | None:
    """`muon_kernel`, if it orthogonalizes this stack with products in `dtype`; None where PyTorch does."""
    suits = _products == "kernels" and _suit_kernels(stack.device, dtype)
    return muon_kernels(stack) if suits and stack.ndim == 3 else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., C) by weight (P, C), which is rounded to the type of x: (..., P)."""
    if bias is None and (kernels := multiplication_of_many(x)) is not None:
        product: Tensor = kernels.linear(x, weight)
        return product
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def mlp(x: Tensor, up: nn.Linear, activation: Callable[[Tensor], Tensor], out: nn.Linear) -> Tensor:
    """out(activation(up(x)))"""
    biased = up.bias is not None or out.bias is not None
    kernels = None if biased else multiplication_of_many(x)
    if isinstance(activation, OfBoth) and kernels is not None and is_by_weight(up) and is_by_weight(out):
        y: Tensor = kernels.mlp(x, up.weight, out.weight, activation.name)
    else:
        y = out(activation(up(x)))
    return y


def whole_blocks(model: Any, x0: Tensor, tokens: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """What all blocks of the `GPT` make of x0, in one call; None where they have to compute one by one."""
    if multiplication_of_many(x0) is None:
        return None
    from gptlab.model.kernels import blocks

    activations = [name for name, kind in ACTIVATIONS.items() if isinstance(kind, OfBoth) and kind.name == name]
    return blocks.hidden(model, x0, tokens, rotary, activations)


def _suit_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in _ACTIVATIONS


def begin_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Build the C++ kernels in another thread, if they suit and the cache lacks them; `load_kernels` then waits."""
    if _suit_kernels(device, dtype):
        from gptlab.model.kernels import library

        library.begin_kernels(_ACTIVATIONS[dtype])


def load_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Load the C++ kernels if they suit, building them first unless the cache has them: two seconds of two cores.

    Where they cannot be built, PyTorch computes: `missing_kernels`. Undoes `multiply_by`.
    """
    global _fused, _library, _products
    _products = "kernels"
    if _suit_kernels(device, dtype):
        from gptlab.model.kernels import fused, library

        fused.loaded = _library = library.kernel_library(_ACTIVATIONS[dtype])
        _fused = None if _library.functions is None else fused


@contextmanager
def implementations_kept() -> Iterator[None]:
    """Puts back, at the end, what this process computes by and on how many threads, which a model that was built or
    loaded meanwhile may have changed."""
    global _fused, _library, _products
    from gptlab.model.kernels import fused

    before, threads = (_fused, _library, _products, fused.loaded), torch.get_num_threads()
    try:
        yield
    finally:
        _fused, _library, _products, fused.loaded = before
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def decodes_by_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a C++ kernel computes single tokens (`model/decoder.py`). The first call builds it: three seconds."""
    if not _suit_kernels(device, dtype):
        return False
    from gptlab.model.kernels.decode_kernel import load_decode_kernel

    return load_decode_kernel().functions is not None


def missing_decode_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    """A warning with the reason, if that kernel suits but could not be built; otherwise None."""
    if not _suit_kernels(device, dtype):
        return None
    from gptlab.model.kernels.decode_kernel import load_decode_kernel

    found = load_decode_kernel()
    if found.functions is not None or found.problem is None:
        return None
    return f"tokens are sampled without gptlab's C++ kernel, half as fast: {found.problem}"


def missing_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """A warning with the reason, if the C++ kernels suit but could not be built, or only for one thread; otherwise
    None."""
    if not _suit_kernels(device, dtype) or _library is None or _library.problem is None:
        return None
    return _why_slower(_library)


def kernels_lack_compiler(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the C++ kernels suit but are missing for want of a compiler, or since it hangs: torch.compile, which
    needs it too, would wait for it without a limit."""
    hangs = _library is not None and _library.compiler_hangs
    return missing_kernels(device, dtype) is not None and (hangs or cxx_compiler() is None)


def _why_slower(library: Library) -> str:
    if library.functions is None:
        return f"models are computed without gptlab's C++ kernels, which is slower: {library.problem}"
    return (
        "gptlab's C++ kernels compute in one thread: install OpenMP for the compiler (libomp-dev for clang), or let "
        f"CXX name one that has it, such as g++ ({library.problem})"
    )


def outrun_compiler(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the C++ kernels, which need no compilation for each model, are there. They are as fast as torch.compile:
    1.01 to 1.09 times in float32 on two Zen 3 cores, 1.06 and 1.22 times in bfloat16 on two Zen 4 cores (docs/LOG.md,
    2026-11-23 and 2026-11-25)."""
    return _fused is not None and _suit_kernels(device, dtype)


def implementations(device: torch.device, dtype: torch.dtype, *, compiled: bool = False) -> dict[str, str]:
    """Which implementation computes each part, for run.json and checkpoints: the bits depend on it.

    `kernels` is "none", or the hash of the library of the C++ kernels; with them, `products` says what multiplies
    matrices. On a CPU, `vectors` is the instruction set of PyTorch's own kernels.
    """
    found = {"kernels": "none"}
    if _library is not None and outrun_compiler(device, dtype) and not compiled:
        found |= {"kernels": _library.sha256, "products": _products}
    if device.type == "cpu":
        found["vectors"] = torch.backends.cpu.get_cpu_capability()
    return found
