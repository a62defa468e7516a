"""The C++ kernels of training on CPUs: a shared library, built when first needed and cached.

key       SHA-256 over everything that decides the compiler's output: sources, options, its macros; nothing that says
          where gptlab is installed
file      kernels-KEY-HASH.so; HASH is the SHA-256 of its bytes, which is verified before every load
build     by one process at a time, into a temporary folder; flushed; one rename
"""

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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from gptlab.runtime.files.cache import cache_root
from gptlab.runtime.hardware.device import cxx_compiler

_FOLDER = Path(__file__).parent
_SOURCES = tuple(
    _FOLDER / f"{name}.cpp" for name in ("attention_kernel", "fused_kernels", "head_kernel", "linear_kernel")
)
_HEADERS = tuple(_FOLDER / f"{name}.h" for name in ("vectors", "products", "amx", "panels", "activations"))
# The loop of a product's tile takes up to 8% longer where it does not begin at a cache line (Zen 3; docs/LOG.md,
# 2026-11-26).
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-falign-loops=64")
# For a compiler that hangs. A build takes eight seconds of one core. A busy machine may stretch that a hundredfold, and
# must still compute with the same kernels.
_BUILD_TIMEOUT_SECONDS = 600
# A source takes two seconds of one core and 300 MB.
_BUILD_PROCESSES = 4
_HASH_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Library:
    functions: ctypes.CDLL
    sha256: str
    """The first 32 hexadecimal digits, of the file's bytes. The same sources, compiler and processor give the same
    bytes, wherever torch and gptlab are installed."""


@functools.cache
def kernel_library() -> Library | str | None:
    """The kernels; the first call in a process builds them unless the cache has them. A line that says why they cannot
    be built; None on Windows, which is not supported."""
    if sys.platform == "win32":  # its compilers take other options
        return None
    compiler = cxx_compiler()
    if compiler is None:
        return "no C++ compiler (g++ or clang++) was found"
    try:
        built = load_built(compiler, _SOURCES, _FLAGS)
        if not built.functions.products_are_permitted():
            built = load_built(compiler, _SOURCES, (*_FLAGS, "-mno-amx-bf16"))
        return built
    except (OSError, subprocess.SubprocessError) as error:
        return _reason(error, compiler)


def call(name: str, dtype: torch.dtype, *values: Tensor | float | None) -> None:
    """Call a function for activations of `dtype`, float32 or bfloat16: tensors as pointers, integers as long, other
    numbers as float, and at last the number of threads."""
    library = kernel_library()
    assert isinstance(library, Library)
    getattr(library.functions, name)(*map(_as_c, (dtype == torch.bfloat16, *values, torch.get_num_threads())))


def _as_c(value: Tensor | float | None) -> Any:
    if isinstance(value, int):
        return ctypes.c_long(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_void_p(None if value is None else value.data_ptr())


def load_built(compiler: str, sources: Sequence[Path], flags: Sequence[str]) -> Library:
    """The shared library of these sources from the cache. It is built first if it is missing, damaged or does not load.
    Raises OSError or SubprocessError if that fails."""
    stem = library_stem(compiler, sources, flags)
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_root(None) / "compile") / "gptlab"
    return _load_intact(folder, stem) or _build(compiler, sources, flags, folder, stem)


def library_stem(compiler: str, sources: Sequence[Path], flags: Sequence[str]) -> str:
    """The first part of a library's name: every environment finds one library. The compiler's macros cover what
    -march=native and its defaults mean."""
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    texts = [source.read_bytes() for source in (*sources, *_HEADERS)]
    key = hashlib.sha256(b"\0".join([macros, " ".join(flags).encode(), *texts]))
    return f"kernels-{key.hexdigest()[:16]}"


def _load_intact(folder: Path, stem: str) -> Library | None:
    """A library in the cache whose bytes match the hash in its name. Others are removed: the loader maps a truncated
    library without complaint, and the process dies by SIGBUS when it reaches what is missing."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        with suppress(OSError):  # unreadable, or this machine's loader refuses it
            if path.name == _name(stem, path):
                return _load(path)
            path.unlink()
    return None


def _load(path: Path) -> Library:
    return Library(ctypes.CDLL(str(path)), path.stem.rpartition("-")[2])


def _name(stem: str, path: Path) -> str:
    return f"{stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:_HASH_DIGITS]}.so"


def _build(compiler: str, sources: Sequence[Path], flags: Sequence[str], folder: Path, stem: str) -> Library:
    """Build and load it, unless a process that started at the same time has built it."""
    # No path of an installation gets into the library, so that its hash says what it computes and nothing else.
    places = f"-ffile-prefix-map={_FOLDER}=gptlab"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{stem}.lock"):
        if (found := _load_intact(folder, stem)) is None:
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                built = Path(temporary, "built.so")
                objects = [str(Path(temporary, f"{source.stem}.o")) for source in sources]
                commands = [
                    [compiler, *flags, places, "-c", str(source), "-o", made]
                    for source, made in zip(sources, objects, strict=True)
                ]
                with ThreadPoolExecutor(_BUILD_PROCESSES) as pool:
                    list(pool.map(_run, commands))
                _run([compiler, *flags, "-shared", *objects, "-o", str(built)])
                with built.open("rb") as file:
                    os.fsync(file.fileno())
                found = _load(built.replace(folder / _name(stem, built)))
    return found


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_TIMEOUT_SECONDS).stdout


def _reason(error: OSError | subprocess.SubprocessError, compiler: str) -> str:
    """Why there is no library: the compiler's first error message, else how it ended."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{compiler} did not finish within {error.timeout:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line.strip() for line in error.stderr.decode(errors="replace").splitlines() if line.strip()]
        ended = lines[0] if lines else f"exit code {error.returncode}"
        return f"{compiler} failed: {next((line for line in lines if 'error' in line), ended)[:300]}"
    assert isinstance(error, OSError)
    where = f" ({error.filename})" if error.filename else ""
    return f"it cannot be built in the cache: {error.strerror or error}{where}"
