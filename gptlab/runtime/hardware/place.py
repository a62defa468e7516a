"""Where a run happens, determined once: device, dtype, threads, and the device's peak."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass

import torch

from gptlab.config.errors import ConfigError
from gptlab.config.fields import require_choice
from gptlab.config.run import AutoProducts, RunConfig
from gptlab.runtime.hardware.cpu import one_thread, set_threads
from gptlab.runtime.hardware.device import keep_freed_memory, resolve_device, set_gpu_allocator
from gptlab.runtime.hardware.installed import BFLOAT16_INSTRUCTIONS, cpu_lists_bfloat16
from gptlab.runtime.hardware.peak import Peak, peak_flops_per_second, product_times
from gptlab.runtime.processes.distributed import ALONE, World

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class Place:
    device: torch.device
    dtype: torch.dtype
    threads: int
    peak: Peak
    products: AutoProducts = "auto"
    """As in runtime.products."""

    @property
    def dtype_name(self) -> str:
        """As in runtime.dtype: "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


def place_of(config: RunConfig, world: World = ALONE) -> Place:
    """The place that a configuration selects. UserError where this machine does not have it."""
    runtime = config.runtime
    if runtime.allocator is not None or torch.cuda.is_available():
        set_gpu_allocator(runtime.allocator)
    device = resolve_device(runtime.device, world.local_rank if world.size > 1 else None)
    dtype = resolve_dtype(runtime.dtype, device)
    if device.type == "cpu":
        keep_freed_memory()
    threads = set_threads(runtime.threads)
    return Place(device, dtype, threads, _peak_once(device, dtype, threads), runtime.products)


@functools.cache
def _peak_once(device: torch.device, dtype: torch.dtype, threads: int) -> Peak:
    # A recipe that sizes itself and the run that follows share half a second of measurement.
    return peak_flops_per_second(device, dtype)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of activations and matrix products.

    `auto`: bfloat16 if the hardware multiplies it faster than float32, float16 on older CUDA devices with tensor cores
    (training then needs a loss scale), else float32. ConfigError for a dtype that the device does not have.
    """
    if name == "auto":
        return _best_dtype(device)
    require_choice("runtime.dtype", name, ("auto", *_DTYPES))
    if device.type == "mps":
        _require_metal_dtype(name)
    return _DTYPES[name]


def _require_metal_dtype(name: str) -> None:
    if name == "float64":
        raise ConfigError("runtime.dtype", name, "Apple GPUs have no double precision", "float32")
    if name == "bfloat16" and not _mps_has_bfloat16():
        raise ConfigError("runtime.dtype", name, "Metal has bfloat16 from macOS 14 on", "float32")


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        # bfloat16 came with Ampere (compute capability 8.0); tensor cores, for float16, with Volta (7.0). ROCm's
        # devices count alike from 9.0 (MI100) on, which is where AMD's matrix cores have bfloat16.
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 0):
            return torch.bfloat16
        return torch.float16 if capability >= (7, 0) else torch.float32
    return torch.bfloat16 if _is_faster_in_bfloat16(device) else torch.float32


def _mps_has_bfloat16() -> bool:
    return bool(torch.backends.mps.is_macos_or_newer(14, 0))


@functools.cache
def _is_faster_in_bfloat16(device: torch.device) -> bool:
    """Whether a product of two bfloat16 matrices takes less time than one of float32: on a CPU in one thread, which
    waits for no other; on an Apple GPU of matrices that keep it busy. Measured only where the device has the type.

    A CPU's instructions alone are no answer. On one Xeon, products in bfloat16 run at 2.4 times the rate of float32
    with AMX, 0.65 times with AVX512-BF16 alone (a virtual machine may hide AMX), 0.01 times where ONEDNN_MAX_CPU_ISA
    allows only AVX2, and uncompiled training at 1.2, 0.7 and 0.05 times (docs/LOG.md, 2026-11-22).
    """
    if not (_cpu_has_bfloat16() if device.type == "cpu" else _mps_has_bfloat16()):
        return False
    size, fastest = 256 if device.type == "cpu" else 2048, {torch.float32: math.inf, torch.bfloat16: math.inf}
    with one_thread():
        for _ in range(3):  # by turns: another program slows both down
            for dtype, time_seen in fastest.items():
                fastest[dtype] = min(time_seen, *product_times(size, device, dtype, 0))
    return fastest[torch.bfloat16] < fastest[torch.float32]


def _cpu_has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16, and torch oneDNN to use them (macOS's has not, and multiplies
    bfloat16 slowly)."""
    if sys.platform == "darwin" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.cpu, "get_capabilities"):  # before torch 2.13
        return cpu_lists_bfloat16()
    known = torch.cpu.get_capabilities()
    return any(known.get(name) for name in BFLOAT16_INSTRUCTIONS)
