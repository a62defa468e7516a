"""What this machine has, as far as files say: compilers, an NVIDIA GPU, instructions for bfloat16.

Importing this takes no torch, so that a run can begin with what needs none of it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
"""For bfloat16 products (AVX512-BF16, AMX, Armv8.6 BF16), by the names of torch and of Linux."""

# What NVIDIA's driver makes on Linux (also in a container that was given a GPU), in WSL and on Windows.
_NVIDIA_SIGNS = ("/dev/nvidiactl", "/usr/lib/wsl/lib/nvidia-smi", r"C:\Windows\System32\nvidia-smi.exe")


def has_nvidia_gpu() -> bool:
    """Whether the driver shows one that the environment does not hide, whatever torch says. Takes microseconds."""
    return any(map(os.path.exists, _NVIDIA_SIGNS)) and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def cpu_lists_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Linux lists instruction sets as "flags" (x86) or "Features" (ARM)."""
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return not set(BFLOAT16_INSTRUCTIONS).isdisjoint(flags)


def cxx_compiler() -> str | None:
    """The path of the C++ compiler that $CXX names, else of a usual one."""
    usual = ("cl", "clang-cl", "icx-cl") if sys.platform == "win32" else ("g++", "clang++", "c++")
    return _find_any("CXX", *usual)


def c_compiler() -> str | None:
    """The path of the C compiler that $CC names, else of a usual one, but on Windows."""
    return _find_any("CC", "cc", "gcc", "clang")


def _find_any(variable: str, *commands: str) -> str | None:
    """Path of the command that the environment variable names, else of the first of `commands` that exists."""
    named = (os.environ.get(variable), *commands)
    return next((path for command in named if command and (path := shutil.which(command))), None)
