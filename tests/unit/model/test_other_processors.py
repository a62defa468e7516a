"""The C++ kernels built for other processors, some of them emulated, compute what they do here; and built with
sanitizers, they keep to their memory."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from gptlab.model.kernels import library
from gptlab.model.kernels.library import Activations
from gptlab.runtime.hardware.installed import cxx_compiler

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "gptlab/model/kernels"
# No optimization, which takes eight times as long to compile: what differs is the tiles and lanes in the sources.
FLAGS = ["-O0", *(flag for flag in library._FLAGS if flag not in ("-O3", "-march=native", "-fPIC")), "-Wno-psabi"]

pytestmark = [
    pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler here"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names processors of x86-64"),
]


def outputs(
    folder: Path, compiler: str, *flags: str, emulator: tuple[str, ...] = (), types: Iterable[str] = library._REAL
) -> dict[str, np.ndarray]:
    """What kernel_driver.cpp prints for each type of activations."""
    sources = [ROOT / "tests/support/kernel_driver.cpp", *chain(*library._UNITS)]
    program, found = folder / "driver", {}
    for real in types:
        command = [
            compiler,
            *FLAGS,
            library._REAL[real],
            *flags,
            f"-I{KERNELS}",
            *map(str, sources),
            "-o",
            str(program),
        ]
        subprocess.run(command, check=True)
        printed = subprocess.run([*emulator, str(program)], check=True, stdout=subprocess.PIPE, text=True).stdout
        found[real] = np.array(printed.split(), dtype=np.float64)
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """With this processor's vectors, without AMX: otherwise what is compared would have the same defects of it."""
    compiler = cxx_compiler()
    assert compiler is not None
    return outputs(
        tmp_path_factory.mktemp("here"), compiler, "-march=native", *(["-mno-amx-bf16"] if has_amx() else [])
    )


def has_amx() -> bool:
    return sys.platform == "linux" and "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def require_same(found: dict[str, np.ndarray], here: dict[str, np.ndarray]) -> None:
    """Sums of products of numbers up to 1."""
    for real, numbers in found.items():
        assert len(numbers) > 200_000
        assert np.abs(here[real]).max() > 1
        # What is rounded to bfloat16 may be the next number of that type, where float32 is close to the middle. So may
        # the weights and gradients that attention multiplies, which shifts its sums by up to 2^-9 of a term; only few.
        np.testing.assert_allclose(numbers, here[real], rtol=2**-7, atol=1e-3)
        assert np.mean(np.abs(numbers - here[real]) > 1e-5) < 1e-3


@pytest.mark.parametrize("processor", ["x86-64", "haswell", "armv8-a", "armv8.6-a+bf16"])
def test_computes_the_same(processor: str, here: dict[str, np.ndarray], tmp_path: Path) -> None:
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
        # Emulated, each takes 10 s. In float32 the two are the same code.
        types = ["bfloat16"] if processor == "armv8-a" else library._REAL
        flags = ("-static", f"-march={processor}")
        found = outputs(tmp_path, compiler, *flags, emulator=(emulator, "-cpu", "max"), types=types)
    else:
        found = outputs(tmp_path, str(cxx_compiler()), f"-march={processor}")
    require_same(found, here)


@pytest.mark.parametrize("real", library._REAL)
def test_clang_takes_the_sources(real: Activations) -> None:
    """The compiler of macOS, which is stricter than g++."""
    if (compiler := shutil.which("clang++")) is None:
        pytest.skip("no clang (Debian: clang)")
    flags = [flag for flag in FLAGS if flag != library._OPENMP]  # whose header comes with libomp
    for unit in library._UNITS:
        command = [compiler, *flags, library._REAL[real], "-march=native", "-fsyntax-only"]
        subprocess.run([*command, *library._as_one_source(unit)], check=True)


def test_amx_computes_the_same(here: dict[str, np.ndarray], tmp_path: Path) -> None:
    """By an emulation of its instructions, on processors with those that come with it; by the instructions themselves
    where the processor has them."""
    if sys.platform != "linux" or "avx512_bf16" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this processor has no AVX512-BF16, which is not emulated, or its system is not Linux")
    emulation = ROOT / "tests/support/amx_emulation.h"
    flags = ["-march=native", "-mamx-tile", "-mamx-bf16", "-include", str(emulation)]
    for built in [flags, ["-march=native"]] if has_amx() else [flags]:
        found = outputs(tmp_path, str(cxx_compiler()), *built)
        require_same(found, here)
        # Float32 is a sum of three terms there, and nothing of it is lost: roundings of sums of up to 12 make 9e-6, and
        # 2e-7 in the mean. Without one of the six products of terms it is 9e-5 and 3e-6.
        differences = found["float32"] - here["float32"]
        assert np.abs(differences).max() < 2e-5
        assert np.sqrt(np.mean(differences**2)) < 5e-7


@pytest.mark.parametrize("real", library._REAL)
def test_keeps_to_its_memory(real: Activations, tmp_path: Path) -> None:
    """AddressSanitizer ends the program at a read or write outside of an array, UndefinedBehaviorSanitizer at what C++
    does not define, such as a sum of integers that overflows."""
    compiler, flags = cxx_compiler(), ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    assert compiler is not None
    (tmp_path / "empty.cpp").write_text("int main() {}\n")
    command = [compiler, *flags, str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty")]
    if any(subprocess.run(one, capture_output=True).returncode for one in (command, [str(tmp_path / "empty")])):
        pytest.skip("this compiler comes without sanitizers (Debian: libasan and libubsan, by g++), or they cannot run")
    outputs(tmp_path, compiler, "-march=native", *flags, types=[real])
