"""Where a run computes: the device, the dtype of its matrix products, its memory, and whether it can compile."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import psutil
import torch

from gptlab.config.errors import ConfigError, require_choice
from gptlab.runtime.hardware.cpu import cpu_model

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_MIB = 2**20


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """`auto` (cuda, mps or cpu: the first available), `cpu`, `cuda` (the first one), `cuda:N` or `mps`.

    Of several processes on a machine, each takes the CUDA device of its `local_rank` (None: one process alone).
    ConfigError for an unknown name or a missing device.
    """
    kind, _, number = name.partition(":")
    require_choice("runtime.device", kind, ("auto", "cpu", "cuda", "mps"))
    if number and not (kind == "cuda" and number.isdigit()):
        raise ConfigError("runtime.device", name, "only cuda takes a number, as in cuda:0", kind)
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if number and local_rank is not None:
        raise ConfigError("runtime.device", name, "of several processes each takes a device of its own", "cuda")
    if kind == "cuda":
        return _cuda_device(name, int(number or local_rank or 0))
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("runtime.device", name, f"torch {torch.__version__} sees no Apple GPU here", "cpu")
    return torch.device(kind)


def _cuda_device(name: str, index: int) -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("runtime.device", name, f"torch {torch.__version__} sees no CUDA device here", "cpu")
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError("runtime.device", name, f"this machine has {count} CUDA device(s)", f"cuda:{count - 1}")
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of activations and matrix products.

    `auto`: bfloat16 if the hardware multiplies it faster than float32, float16 on older CUDA devices with tensor cores
    (training then needs a gradient scaler), else float32. ConfigError for a dtype that the device does not have.
    """
    if name == "auto":
        return _best_dtype(device)
    require_choice("runtime.dtype", name, ("auto", *_DTYPES))
    if device.type == "mps" and name == "float64":
        raise ConfigError("runtime.dtype", name, "Apple GPUs have no double precision", "float32")
    if device.type == "mps" and name == "bfloat16" and not _mps_has_bfloat16():
        raise ConfigError("runtime.dtype", name, "Metal has bfloat16 from macOS 14 on", "float32")
    return _DTYPES[name]


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        # bfloat16 came with Ampere (compute capability 8.0); tensor cores, for float16, with Volta (7.0). ROCm's
        # devices count alike from 9.0 (MI100) on, which is where AMD's matrix cores have bfloat16.
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 0):
            return torch.bfloat16
        return torch.float16 if capability >= (7, 0) else torch.float32
    fast = _cpu_multiplies_bfloat16() if device.type == "cpu" else _mps_has_bfloat16()
    return torch.bfloat16 if fast else torch.float32


def _mps_has_bfloat16() -> bool:
    newer = getattr(torch.backends.mps, "is_macos_or_newer", None)
    return newer is not None and bool(newer(14, 0))


def _cpu_multiplies_bfloat16() -> bool:
    """Instructions for bfloat16 products (AVX512-BF16, AMX, Armv8.6 BF16), and oneDNN to use them.

    `torch.ops.mkldnn._is_mkldnn_bf16_supported` is no answer: it is true for plain AVX-512 too, where oneDNN converts
    to float32 and back. macOS's torch comes without oneDNN, and multiplies bfloat16 slowly on the CPU.
    """
    if sys.platform == "darwin" or not torch.backends.mkldnn.is_available():
        return False
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # a public query in the newest torch
    if capabilities is not None:
        known = capabilities()
        return any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(probe() for probe in probes if probe is not None) or _cpuinfo_has_bfloat16(Path("/proc/cpuinfo"))


def _cpuinfo_has_bfloat16(cpuinfo: Path) -> bool:
    """Linux lists instruction sets as "flags" (x86) or "Features" (ARM)."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work; the CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory_mb(device: torch.device) -> float:
    """The most memory used so far, in MiB: allocated tensors on CUDA, resident memory of this process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _MIB
    return _peak_resident_bytes() / _MIB


def _peak_resident_bytes() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    if sys.platform == "linux":
        # Not getrusage: its maximum survives exec, so a small child of a large process would report its parent's.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def device_name(device: torch.device) -> str:
    """The product name, as its driver gives it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()} GPU" if device.type == "mps" else cpu_model()


def cuda_version() -> str | None:
    """Of the CUDA that torch was built for; None for a build without."""
    return torch.version.cuda


def compiler_available(device: torch.device) -> bool:
    """Can torch.compile build code here? On the CPU it needs a C++ compiler and Python's headers, on CUDA Triton,
    which builds its launchers with a C compiler. On Apple GPUs its backend is a prototype, so: no.
    """
    if device.type == "cuda":
        has_triton = importlib.util.find_spec("triton") is not None
        new_enough = torch.cuda.get_device_capability(device) >= (7, 0)  # Triton's oldest
        # The Windows build of Triton brings its own C compiler.
        return has_triton and new_enough and (sys.platform == "win32" or bool(_find_any("CC", "cc", "gcc", "clang")))
    if device.type != "cpu":
        return False
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    return has_headers and cxx_compiler() is not None


def cxx_compiler() -> str | None:
    """The path of the C++ compiler that $CXX names, else of a usual one."""
    usual = ("cl", "clang-cl", "icx-cl") if sys.platform == "win32" else ("g++", "clang++", "c++")
    return _find_any("CXX", *usual)


def _find_any(variable: str, *commands: str) -> str | None:
    """Path of the command that the environment variable names, else of the first of `commands` that exists."""
    named = (os.environ.get(variable), *commands)
    return next((path for command in named if command and (path := shutil.which(command))), None)
