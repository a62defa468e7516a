"""The C++ kernels of training on CPUs: a shared library for each type of activations, built when first needed and
cached. Importing this takes no torch, so that a run can begin to build them before.

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
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from gptlab.config.errors import UserError
from gptlab.runtime.files.cache import cache_root
from gptlab.runtime.hardware.installed import cxx_compiler

Activations = Literal["float32", "bfloat16"]

_FOLDER = Path(__file__).parent
# What a compiler takes as one source: that it reads headers and makes functions of their templates once saves a quarter
# of its time (docs/LOG.md, 2026-11-29).
_UNITS = tuple(
    tuple(_FOLDER / f"{name}.cpp" for name in names)
    for names in (
        ("attention_kernel", "fused_kernels", "muon_kernel"),
        ("head_kernel", "linear_kernel", "block_kernel"),
    )
)
_HEADERS = tuple(
    _FOLDER / f"{name}.h"
    for name in (
        "vectors",
        "products",
        "amx",
        "terms",
        "scratch",
        "tasks",
        "panels",
        "layers",
        "activations",
        "heads",
        "parts",
    )
)
_OPENMP = "-fopenmp"
# The loop of a product's tile takes up to 8% longer where it does not begin at a cache line (Zen 3; docs/LOG.md,
# 2026-11-26).
_FLAGS = ("-std=c++17", "-O3", "-march=native", _OPENMP, "-fPIC", "-fno-math-errno", "-falign-loops=64")
_REAL: dict[Activations, str] = {"float32": "-DREAL=float", "bfloat16": "-DREAL=bfloat16"}
# For a compiler that hangs. A build takes two seconds of two cores. A busy machine may stretch that a hundredfold, and
# must still compute with the same kernels.
_BUILD_TIMEOUT_SECONDS = 600
# A unit takes two seconds of one core and 160 MB. More processes than cores would delay what the run does meanwhile.
_BUILD_PROCESSES = min(4, os.cpu_count() or 1)
_HASH_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Library:
    functions: Any = None
    """A ctypes.CDLL; None where there is none."""
    sha256: str = "none"
    """The first 32 hexadecimal digits, of the file's bytes. The same sources, compiler and processor give the same
    bytes, wherever torch and gptlab are installed."""
    problem: str | None = None
    """Why it could not be built; or only without OpenMP, so that it computes in one thread. None on Windows, which is
    not supported."""
    compiler_hangs: bool = False
    """It did not finish in time: who calls it again without a limit may wait forever."""


def begin_kernels(activations: Activations) -> threading.Thread:
    """The thread that builds them, unless the cache has them; `kernel_library` waits for it."""
    building = threading.Thread(target=kernel_library, args=(activations,), name="gptlab-kernels", daemon=True)
    building.start()
    return building


@functools.cache
def kernel_library(activations: Activations) -> Library:
    """The kernels, as `load_built` gives them; the first call in a process builds them unless the cache has them."""
    flags = (*_FLAGS, _REAL[activations])
    built = load_built(_UNITS, flags)
    if built.functions is not None and not built.functions.products_are_permitted():
        built = load_built(_UNITS, (*flags, "-mno-amx-bf16"))
    return built


def load_built(units: Sequence[Sequence[Path]], flags: Sequence[str]) -> Library:
    """The shared library of these sources from the cache. It is built first if it is missing, damaged or does not
    load; without OpenMP where the compiler fails with it."""
    if sys.platform == "win32":  # its compilers take other options
        return Library()
    if (compiler := cxx_compiler()) is None:
        return Library(problem="no C++ compiler (g++ or clang++) was found")
    try:
        stem = library_stem(compiler, units, flags)
        folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_root(None) / "compile") / "gptlab"
        return _load_intact(folder, stem) or _build(compiler, units, flags, folder, stem)
    except (OSError, subprocess.SubprocessError, UserError) as error:
        return _without_openmp(error, compiler, units, flags)


def _without_openmp(
    error: OSError | subprocess.SubprocessError | UserError,
    compiler: str,
    units: Sequence[Sequence[Path]],
    flags: Sequence[str],
) -> Library:
    """The library for one thread, if the compiler failed with OpenMP: Apple's clang refuses the option, and others come
    without its library. Otherwise none, and why."""
    hangs = isinstance(error, subprocess.TimeoutExpired)
    without = Library(problem=_why_not_built(error, compiler), compiler_hangs=hangs)
    if isinstance(error, subprocess.CalledProcessError) and _OPENMP in flags:
        without = replace(load_built(units, [flag for flag in flags if flag != _OPENMP]), problem=without.problem)
    return without


def library_stem(compiler: str, units: Sequence[Sequence[Path]], flags: Sequence[str]) -> str:
    """The first part of a library's name: every environment finds one library. The compiler's macros cover what
    -march=native and its defaults mean."""
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    texts = [source.read_bytes() for source in (*chain(*units), *_HEADERS)]
    together = [str(len(unit)) for unit in units]
    key = hashlib.sha256(b"\0".join([macros, " ".join([*flags, *together]).encode(), *texts]))
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


def _build(compiler: str, units: Sequence[Sequence[Path]], flags: Sequence[str], folder: Path, stem: str) -> Library:
    """Build and load it, unless a process that started at the same time has built it."""
    # No path of an installation gets into the library, so that its hash says what it computes and nothing else.
    places = f"-ffile-prefix-map={_FOLDER}=gptlab"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{stem}.lock"):
        if (found := _load_intact(folder, stem)) is None:
            for left in folder.glob(f".{stem}.*"):  # by a killed process: the lock says that it is nobody's
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{stem}.", dir=folder) as temporary:
                built = Path(temporary, "built.so")
                objects = [str(Path(temporary, f"{unit[-1].stem}.o")) for unit in units]
                commands = [
                    [compiler, *flags, places, *_as_one_source(unit), "-c", "-o", made]
                    for unit, made in zip(units, objects, strict=True)
                ]
                with ThreadPoolExecutor(_BUILD_PROCESSES) as pool:
                    list(pool.map(_run, commands))
                _run([compiler, *flags, "-shared", *objects, "-o", str(built)])
                with built.open("rb") as file:
                    os.fsync(file.fileno())
                found = _load(built.replace(folder / _name(stem, built)))
    return found


def _as_one_source(unit: Sequence[Path]) -> list[str]:
    """A compiler's arguments."""
    return [*chain(*(("-include", str(source)) for source in unit[:-1])), str(unit[-1])]


def require_memory(functions: Any, name: str) -> None:
    """MemoryError if the function of this name, which this thread has just called, found too little memory."""
    if functions.memory_ran_out():
        raise MemoryError(f"too little memory for the C++ kernel {name}")


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_TIMEOUT_SECONDS).stdout


def _why_not_built(error: OSError | subprocess.SubprocessError | UserError, compiler: str) -> str:
    """Why there is no library: the compiler's first error message, else how it ended."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{compiler} did not finish within {error.timeout:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line.strip() for line in error.stderr.decode(errors="replace").splitlines() if line.strip()]
        ended = lines[0] if lines else f"exit code {error.returncode}"
        return f"{compiler} failed: {next((line for line in lines if 'error' in line), ended)[:300]}"
    assert isinstance(error, OSError)
    where = f" ({error.filename})" if error.filename else ""
    return f"it cannot be built in the cache: {error.strerror or error}{where}"
