"""`gptlab` on a GPU that is not there: torch.compile, Triton and ptxas make its code, the program calls all of it, and
nothing is computed.

    python -m tests.support.null_gpu train quickstart --depth 2 --steps 5
    NULL_GPU_COUNT=2 torchrun --nproc-per-node 2 -m tests.support.null_gpu train quickstart --depth 2 --steps 5

Losses are garbage; what torch's allocator holds, and what is compiled, is what a GPU of this compute capability would
have. Needs Linux, gcc, nm and a build of torch with CUDA (`pip install torch` from PyPI). null_gpu.c has the settings.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("null_gpu.c")
LIBRARIES = ("cuda", "cublas", "nccl", "nvml", "cu")
"""Whose functions are replaced, by the beginning of their names."""


def main() -> None:
    if "NULL_GPU" not in os.environ:
        start_again()
    import torch

    from gptlab.training import compilation

    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is not replaced
    compilation._require_gradients = lambda state: None  # they are garbage, or zero
    sys.argv[0] = "gptlab"
    runpy.run_module("gptlab", run_name="__main__", alter_sys=True)


def start_again() -> None:
    """This command in a process that has the libraries, which are built once for each torch."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    key = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes() + torch.origin.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"null-gpu-{key}")
    if not folder.exists():
        building = Path(tempfile.mkdtemp(prefix="null-gpu-"))
        build(building / "libcuda.so.1", Path(torch.origin).parents[1])
        for name in ("libcuda.so", "libnvidia-ml.so.1"):
            (building / name).symlink_to("libcuda.so.1")
        try:
            building.rename(folder)
        except OSError:  # another process was sooner
            shutil.rmtree(building)
    places = {"LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder), "NULL_GPU": "on"}
    os.execve(
        sys.executable, [sys.executable, "-m", "tests.support.null_gpu", *sys.argv[1:]],
        os.environ | places | {"LD_PRELOAD": str(folder / "libcuda.so.1")},
    )  # fmt: skip


def build(library: Path, site: Path) -> None:
    """The functions of null_gpu.c, and one that does nothing for each other one that torch or Triton calls or names."""
    # The runtime's own headers, since a struct differs between versions; they lack some that Triton brings.
    triton = site / "triton/backends/nvidia"
    headers = [f"-I{folder}" for folder in (*site.glob("nvidia/cu*/include"), triton / "include")]
    options = ["-shared", "-fPIC", "-O1", "-w", *headers, "-Wl,-soname,libcuda.so.1"]
    own = set(re.findall(r"^\S.*?\b(\w+)\([^;]*\{", SOURCE.read_text(), re.MULTILINE))
    wanted = set(re.findall(r"\bcu[A-Z]\w+", (triton / "driver.c").read_text()))
    for path in sorted(site.glob("torch/lib/*.so")):
        called = subprocess.run(
            ["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True
        ).stdout
        named = path.read_bytes() if path.name in ("libc10_cuda.so", "libtorch_python.so") else b""
        wanted |= {word.partition("@")[0] for word in re.findall(r" U (\S+)", called)}
        wanted |= {word.decode() for word in re.findall(rb"\0((?:cu[A-Z]|nvml[A-Z])\w+)(?=\0)", named)}
    missing = {n for n in wanted if re.fullmatch(rf"({'|'.join(LIBRARIES)})[A-Z]\w*", n) and not n.startswith("cuFile")}
    rest = library.with_suffix(".c")
    rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(missing - own)))
    subprocess.run(["gcc", *options, str(SOURCE), str(rest), "-o", str(library), "-ldl", "-lpthread"], check=True)


if __name__ == "__main__":
    main()
