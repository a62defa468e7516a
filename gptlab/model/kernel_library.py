"""The kernels in C++ for float32 on CPUs: operators of torch, built once, where a compiler is at hand."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gptlab.data.cache import cache_root
from gptlab.runtime.device import cxx_compiler

_FOLDER = Path(__file__).parent
_SOURCES = tuple(_FOLDER / name for name in ("attention_kernel.cpp", "linear_kernel.cpp"))
_OPERATORS = _FOLDER / "operators.cpp"
_HEADERS = (_FOLDER / "vectors.h",)
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC")
_BUILD_TIMEOUT_SECONDS = 60


@functools.cache
def kernel_library() -> ctypes.CDLL | None:
    """The kernels, with torch.ops.gptlab as their operators. Builds them where that was not done before, in a few
    seconds; None where no compiler is to be found, or its cache cannot be written to."""
    compiler = cxx_compiler()
    if compiler is None or sys.platform == "win32":  # whose compilers take other options
        return None
    torch_folder = Path(torch.__file__).parent
    flags = (*_FLAGS, f"-I{torch_folder / 'include'}")
    libraries = (f"-L{torch_folder / 'lib'}", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}")
    try:
        return load_built(compiler, (*_SOURCES, _OPERATORS), flags, libraries)
    except (OSError, subprocess.SubprocessError):
        return None


def load_built(
    compiler: str, sources: Sequence[Path], flags: Sequence[str], libraries: Sequence[str] = ()
) -> ctypes.CDLL:
    """The shared library of these sources from the cache, built first if it is not there, or cannot be loaded. OSError
    or SubprocessError where that cannot be."""
    path = library_path(compiler, sources, (*flags, *libraries))
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        _build(compiler, sources, flags, libraries, path)
        return ctypes.CDLL(str(path))


def library_path(compiler: str, sources: Sequence[Path], options: Sequence[str]) -> Path:
    """Named by all that the kernels depend on; what -march=native means here is what the compiler says it does."""
    target = _run([compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    texts = [source.read_bytes() for source in (*sources, *_HEADERS)]
    key = hashlib.sha256(b"\0".join([target, torch.__version__.encode(), " ".join(options).encode(), *texts]))
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_root(None) / "compile")
    return folder / "gptlab" / f"kernels-{key.hexdigest()[:32]}.so"


def _build(compiler: str, sources: Sequence[Path], flags: Sequence[str], libraries: Sequence[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor() as pool:
        objects = [Path(folder, f"{source.stem}.o") for source in sources]

        def compiled(source: Path, to: Path) -> bytes:
            return _run([compiler, *flags, "-c", str(source), "-o", str(to)])

        list(pool.map(compiled, sources, objects))
        made = Path(folder, path.name)
        _run([compiler, *flags, "-shared", *map(str, objects), *libraries, "-o", str(made)])
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(path)  # in one piece, whoever else builds it


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_TIMEOUT_SECONDS).stdout
