"""The device of a run: which one, its memory, deterministic kernels, and whether it can compile."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from gptlab.config.errors import ConfigError
from gptlab.config.fields import require_device
from gptlab.runtime.hardware.cpu import cpu_model
from gptlab.runtime.hardware.installed import c_compiler, cxx_compiler, has_nvidia_gpu
from gptlab.runtime.hardware.unused_gpu import cuda_problem

Platform = Literal["cpu", "cuda", "mps"]
"""What a model is computed on. Where code differs between them, it asks for this value and not for a tensor's device,
so that the meta device takes the path of the platform that is planned for."""

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
# glibc takes an int of at most half a heap segment for the mmap threshold; 1 GiB is accepted on 64-bit Linux.
_LARGEST_HEAP_BLOCK_BYTES = 1 << 30
_HEAP_GROWTH_BYTES = 64 << 20

_DETERMINISTIC_ENVIRONMENT = {
    # A workspace of its own for every stream (cuBLAS documentation, "Results Reproducibility"); torch insists on it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # torch.compile then does not choose by timing what shows in the bits. Set as a variable, since a setting in
    # torch._inductor.config holds only in the thread that makes it, and backward passes compile in another.
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Torch 2.11 to 2.13 read the first that is set; the other two are deprecated."""


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """`auto` (cuda, mps or cpu: the first available), `cpu`, `cuda` (the first one), `cuda:N` or `mps`.

    Of several processes on a machine, each takes the CUDA device of its `local_rank` (None: one process alone). A CUDA
    device becomes the current one. ConfigError for an unknown name or a missing device.
    """
    require_device(name)
    if local_rank is not None:
        _make_current(name, local_rank)
    if name == "auto":
        works = torch.cuda.is_available() and cuda_problem(local_rank or 0) is None
        name = "cuda" if works else "mps" if torch.backends.mps.is_available() else "cpu"
    return torch.device("cpu") if name == "cpu" else _accelerator(name, local_rank)


def _make_current(name: str, local_rank: int) -> None:
    """Before anything else on CUDA: otherwise each process also has a context, and its memory, on the first GPU."""
    if name in ("auto", "cuda") and local_rank < _cuda_devices():
        torch.cuda.set_device(local_rank)


def unused_gpu(name: str, allocator: str | None = None, index: int = 0) -> str | None:
    """A warning, if `name` (auto, cpu, cuda, ...) will mean the CPU although the machine has an NVIDIA GPU.
    `allocator`: as in runtime.allocator."""
    if name != "auto" or not has_nvidia_gpu():
        return None
    set_gpu_allocator(allocator)  # torch reads it as soon as it is asked for the device's properties
    if (problem := cuda_problem(index)) is None:
        return None
    return f"this machine has an NVIDIA GPU, which will not be used: {problem}"


def _accelerator(name: str, local_rank: int | None) -> torch.device:
    kind, _, number = name.partition(":")
    if number and local_rank is not None:
        raise ConfigError("runtime.device", name, "of several processes each takes a device of its own", "cuda")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("runtime.device", name, f"torch {torch.__version__} sees no Apple GPU here", "cpu")
    if kind == "mps":
        return torch.device("mps")
    index = int(number or local_rank or 0)
    count = _cuda_devices()
    if count == 0 and not has_nvidia_gpu():
        raise ConfigError("runtime.device", name, f"torch {torch.__version__} sees no CUDA device here", "cpu")
    if index >= count > 0 and local_rank is not None:
        lacking = f"process {index} of this machine has no GPU of its own: torch sees {count}; start one per GPU"
        raise ConfigError("runtime.device", name, lacking, "cpu")
    if index >= count > 0:
        raise ConfigError("runtime.device", name, f"this machine has {count} CUDA device(s)", f"cuda:{count - 1}")
    if (problem := cuda_problem(index)) is not None:
        raise ConfigError("runtime.device", name, problem, "cpu")
    torch.cuda.set_device(index)  # events are recorded on the current device, and capabilities are asked of it
    return torch.device("cuda", index)


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def set_gpu_allocator(settings: str | None) -> None:
    """Pass `runtime.allocator` to torch, which reads it before the first tensor is put on a GPU. The environment takes
    precedence. None: expandable segments on an NVIDIA GPU under Linux, so that blocks of changing sizes leave no gaps.
    """
    if settings is None and torch.cuda.is_available() and torch.version.cuda and sys.platform == "linux":
        settings = "expandable_segments:True"
    if settings is not None and not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = settings


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work; the CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory_mb(device: torch.device) -> float:
    """The most memory used so far, in MiB: allocated tensors on CUDA, resident memory of this process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == "linux":
        # Not getrusage: its maximum survives exec, so a small child of a large process would report its parent's.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    return _peak_resident_bytes() / 2**20


def forget_peak_memory(device: torch.device) -> None:
    """Begin again with what is allocated now. The peak of a CPU stays that of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_resident_bytes() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def device_name(device: torch.device) -> str:
    """The product name, as its driver gives it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()} GPU" if device.type == "mps" else cpu_model()


def keep_freed_memory() -> None:
    """Serve blocks of up to 1 GiB from glibc's heap and never trim it. Other C libraries stay as they are.

    glibc returns large blocks to the kernel at every free, and page faults bring them back; a training step allocates
    the same activations every time. Measured on two Zen 4 cores (4 layers, width 256, 4,096 tokens, bf16, compiled):
    forward and backward take 451 ms by default and 400 ms with the heap kept, 12% less.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, _HEAP_GROWTH_BYTES)


@contextmanager
def deterministic_kernels(name: str) -> Iterator[None]:
    """Within the context torch uses kernels whose bits do not change from run to run and from process to process, if
    `name` (auto, cpu, cuda, ...) may mean a CUDA device. On a CPU all kernels are so for a fixed number of threads;
    GPU kernels that add atomically, or are chosen by timing, are not, and torch has slower replacements.

    Enter it before the process multiplies its first matrices there, or compiles: the environment is read then, once.
    """
    if name.partition(":")[0] not in ("auto", "cuda") or not torch.cuda.is_available():
        yield
        return
    for variable, value in _DETERMINISTIC_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    settings: Any = torch.utils.deterministic  # its type lacks this setting
    enabled, fills = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # a debugging aid: a pass over every new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)
        settings.fill_uninitialized_memory = fills


def compiler_available(device: torch.device) -> bool:
    """Can torch.compile build code here? On the CPU it needs a C++ compiler and Python's headers, on CUDA Triton,
    which builds its launchers with a C compiler. On Apple GPUs it is a prototype (pytorch issue 150121), so: no.
    """
    if device.type == "cuda":
        has_triton = importlib.util.find_spec("triton") is not None
        new_enough = torch.cuda.get_device_capability(device) >= (7, 0)  # Triton's oldest
        # The Windows build of Triton brings its own C compiler.
        return has_triton and new_enough and (sys.platform == "win32" or c_compiler() is not None)
    if device.type != "cpu":
        return False
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    return has_headers and cxx_compiler() is not None
