"""The kernels built for another processor than this one, called without torch's operators, which are those of this."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from torch import Tensor

from gptlab.model.kernels import library
from gptlab.runtime.hardware.device import cxx_compiler


def kernels_for(processor: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """`processor`: as g++ calls it. Built in `folder`. Skips where this one cannot do what that one can."""
    if processor == "haswell" and "avx2" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this processor has no AVX2")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    compiler = cxx_compiler()
    assert compiler is not None
    flags = [flag.replace("native", processor) for flag in library._FLAGS]
    built = library.load_built(compiler, library._SOURCES, [*flags, "-Wno-psabi"]).functions
    built.attention_scratch.restype = ctypes.c_long
    return built


def call(function: object, *arguments: object) -> None:
    """With tensors as pointers to their elements, and integers as C's long, of which an int takes the lower half."""
    assert callable(function)
    function(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_long(a) for a in arguments))  # type: ignore[arg-type]
