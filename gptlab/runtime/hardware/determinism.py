"""Kernels whose bits do not change from run to run and from process to process.

On a CPU all kernels are deterministic for a fixed number of threads. On a GPU, kernels that add atomically and kernels
chosen by timing are not; torch has slower replacements.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ENVIRONMENT = {
    # A workspace of its own for every stream (cuBLAS documentation, "Results Reproducibility"); torch insists on it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # torch.compile then does not choose by timing what shows in the bits. Set as a variable, since a setting in
    # torch._inductor.config holds only in the thread that makes it, and backward passes compile in another.
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}


@contextmanager
def deterministic_kernels(device_name: str) -> Iterator[None]:
    """Within the context torch uses deterministic kernels if `device_name` (auto, cpu, cuda, ...) may mean a CUDA
    device. Enter it before the process multiplies its first matrices there, or compiles: the environment is read then,
    once for the process."""
    import torch

    if device_name.partition(":")[0] not in ("auto", "cuda") or not torch.cuda.is_available():
        yield
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    settings: Any = torch.utils.deterministic  # its type lacks this setting
    enabled, fills = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # a debugging aid: a pass over every new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)
        settings.fill_uninitialized_memory = fills
