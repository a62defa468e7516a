"""Kernels whose bits do not change from run to run and from process to process.

On a CPU all are such, as long as the number of threads stays the same. On a GPU those are not that add atomically, and
those that are chosen by measuring; torch has others in their place, which are slower.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ENVIRONMENT = {
    # A workspace of its own for every stream (cuBLAS documentation, "Results Reproducibility"); torch insists on it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # torch.compile then chooses nothing that shows in the bits by measuring it. Set as a variable, since what is set
    # in torch._inductor.config counts in the thread that sets it alone, and backward passes compile in another.
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}


@contextmanager
def deterministic_kernels(device_name: str) -> Iterator[None]:
    """Within the context torch computes by deterministic kernels where `device_name` (auto, cpu, cuda, ...) may stand
    for a GPU of CUDA. To be entered before the process multiplies its first matrices there, and compiles: what the
    environment says is read then, and stays for the process."""
    import torch

    if device_name.partition(":")[0] not in ("auto", "cuda") or not torch.cuda.is_available():
        yield
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    settings: Any = torch.utils.deterministic  # which its type does not know to have this setting
    enabled, fills = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # shows reads of memory that nobody wrote: a pass over every new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)
        settings.fill_uninitialized_memory = fills
