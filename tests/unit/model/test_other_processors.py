"""The C++ kernels built for other processors, some of them emulated, compute what they do here."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gptlab.model.kernels import library
from gptlab.runtime.hardware.installed import cxx_compiler

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "gptlab/model/kernels"
# No optimization, which takes eight times as long to compile: what differs is the tiles and lanes in the sources.
FLAGS = ["-O0", *(flag for flag in library._FLAGS if flag not in ("-O3", "-march=native", "-fPIC")), "-Wno-psabi"]

pytestmark = [
    pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler here"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names processors of x86-64"),
]


def outputs(folder: Path, compiler: str, *flags: str, emulator: tuple[str, ...] = ()) -> np.ndarray:
    """What kernel_driver.cpp prints for each type of activations."""
    sources = [ROOT / "tests/support/kernel_driver.cpp", *library._SOURCES]
    program, printed = folder / "driver", ""
    for real in library._REAL.values():
        command = [compiler, *FLAGS, real, *flags, f"-I{KERNELS}", *map(str, sources), "-o", str(program)]
        subprocess.run(command, check=True, capture_output=True)
        printed += subprocess.run([*emulator, str(program)], check=True, capture_output=True, text=True).stdout
    return np.array(printed.split(), dtype=np.float64)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """With this processor's vectors, which the other tests of the kernels compare with PyTorch."""
    compiler = cxx_compiler()
    assert compiler is not None
    return outputs(tmp_path_factory.mktemp("here"), compiler, "-march=native")


def require_same(found: np.ndarray, here: np.ndarray) -> None:
    """Sums of products of numbers up to 1."""
    assert len(found) > 200_000
    assert np.abs(here).max() > 1
    # What is rounded to bfloat16 may be the next number of that type, where float32 is close to the middle. So may the
    # weights and gradients that attention multiplies, which shifts its sums by up to 2^-9 of a term; only few of them.
    np.testing.assert_allclose(found, here, rtol=2**-7, atol=1e-3)
    assert np.mean(np.abs(found - here) > 1e-5) < 1e-3


@pytest.mark.parametrize("processor", ["x86-64", "haswell", "armv8-a", "armv8.6-a+bf16"])
def test_computes_the_same(processor: str, here: np.ndarray, tmp_path: Path) -> None:
    """SSE2, AVX2, and NEON without and with products of bfloat16."""
    if processor == "haswell":
        instructions = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if "avx2" not in instructions:
            pytest.skip("this processor has no AVX2")
        if "avx512f" not in instructions:
            pytest.skip("this processor has no AVX-512, so that AVX2 is what `here` has")
    if processor.startswith("arm"):
        compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
        if compiler is None or emulator is None:
            pytest.skip("no ARM processor to emulate (Debian: g++-aarch64-linux-gnu, qemu-user)")
        found = outputs(tmp_path, compiler, "-static", f"-march={processor}", emulator=(emulator, "-cpu", "max"))
    else:
        found = outputs(tmp_path, str(cxx_compiler()), f"-march={processor}")
    require_same(found, here)


def test_amx_computes_the_same(here: np.ndarray, tmp_path: Path) -> None:
    """By an emulation of its instructions, on processors with those that come with it."""
    if sys.platform != "linux" or "avx512_bf16" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this processor has no AVX512-BF16, which is not emulated, or its system is not Linux")
    emulation = ROOT / "tests/support/amx_emulation.h"
    flags = ["-march=native", "-mamx-tile", "-mamx-bf16", "-include", str(emulation)]
    require_same(outputs(tmp_path, str(cxx_compiler()), *flags), here)
