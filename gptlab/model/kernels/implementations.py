"""Which implementation computes each part of a model: recorded in run.json and checkpoints, since bits depend on it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gptlab.model.gpt import GPT, Attention, Linear
from gptlab.model.kernels.library import kernel_library, kernel_library_problem

TORCH = "torch"


def implementations(model: GPT) -> dict[str, str]:
    """{part: implementation}. `attention` and `linear` are "torch", or, where the C++ kernels compute any of the
    layers, "kernels HASH", the hash being that of the library's bytes. On a CPU, `vectors` is the instruction set of
    PyTorch's own kernels ("AVX2", "AVX512", ...)."""
    by_kernel = {
        "attention": any(module.by_kernel for module in model.modules() if isinstance(module, Attention)),
        "linear": any(module.by_kernel for module in model.modules() if isinstance(module, Linear)),
    }
    library = kernel_library() if any(by_kernel.values()) else None
    kernels = TORCH if library is None else f"kernels {library.sha256}"
    found = {part: kernels if chosen else TORCH for part, chosen in by_kernel.items()}
    if model.token_embedding.weight.device.type == "cpu":
        found["vectors"] = torch.backends.cpu.get_cpu_capability()
    return found


def missing_kernels(model: GPT) -> str | None:
    """Why the C++ kernels compute nothing of a model that they suit, in one line; None where they do, or do not
    suit."""
    if not model.suits_kernels or kernel_library() is not None:
        return None
    return kernel_library_problem()


def without_kernels(problem: str) -> str:
    """What a user is told of `missing_kernels`."""
    return f"attention and linear layers are computed without gptlab's C++ kernels, which is slower: {problem}"


def changed(recorded: object, now: Mapping[str, str]) -> str:
    """What is computed otherwise than `recorded`, as "attention: kernels 0a1b... -> torch"; empty where nothing is, and
    where a run or a checkpoint recorded nothing."""
    if not isinstance(recorded, dict):
        return ""
    names = [*now, *(name for name in recorded if name not in now)]
    return ", ".join(
        f"{_shown(name)}: {_shown(recorded.get(name))} -> {now.get(name)}"
        for name in names[:20]
        if recorded.get(name) != now.get(name)
    )


def _shown(value: object) -> str:
    """Of a file that anybody may have written, as much as a line can take."""
    return str(value)[:60]
