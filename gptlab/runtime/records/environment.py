"""What stood around a run besides its code: Python, every distribution, the variables that matter, the GPU's report.

Run directories are shared: no host name, no user name, no home folder, and no secret goes into them.
"""

from __future__ import annotations

import functools
import getpass
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from gptlab.runtime.records.code_snapshot import output_of

# Variables that change what is computed, how fast, or where: of OpenMP and BLAS, CUDA, torch, the allocator, gptlab.
_RELEVANT = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|VECLIB|BLIS|DNNL|ONEDNN|ATEN|GPTLAB|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|HIP|ROCR|HSA|MIOPEN"
    r"|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|MALLOC)_\w+|(LOCAL_)?(RANK|WORLD_SIZE)|PYTHONHASHSEED|LD_PRELOAD|CXX|CC"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


def environment_text(variables: Mapping[str, str]) -> str:
    """A pip requirements file that says in comments what pip cannot install; `variables` are a process's own."""
    relevant = {
        name: _anonymous(value)
        for name, value in sorted(variables.items())
        if _RELEVANT.fullmatch(name) and not _SECRET.search(name)
    }
    distributions = dict(_distributions(tuple(sys.path)))
    own = distributions.pop("gptlab", None)
    lines = [
        f"# gptlab {own or 'from a source tree that is not installed'}",
        f"# Python {' '.join(sys.version.split())}",
        f"# {platform.platform()}",
        *(f"# {name}={value}" for name, value in relevant.items()),
        *(f"{name}=={version}" for name, version in sorted(distributions.items())),
    ]
    return "\n".join(lines) + "\n"


def gpu_report() -> str | None:
    """What the GPU's own tool prints, as modded-nanogpt logs it; None where there is none."""
    for tool in ("nvidia-smi", "rocm-smi"):
        if (output := output_of([tool], Path.cwd())) is not None:
            return _without(platform.node(), "HOST", output.decode(errors="replace"))
    return None


@functools.cache  # Reading the metadata of 60 distributions takes 0.1 s.
def _distributions(search_path: tuple[str, ...]) -> dict[str, str]:
    """{name in pip's normal form: version} of what is installed; of two of a name, the one that is imported."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=list(search_path)):
        try:
            metadata = distribution.metadata
            name, version = metadata["Name"], metadata["Version"]
        except (OSError, KeyError, ValueError):  # a half-removed one
            continue
        if name and version:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found


def _anonymous(value: str) -> str:
    """`value` without the home folder, the user's name and the machine's."""
    try:
        home, user = str(Path.home()), getpass.getuser()
    except (OSError, KeyError, RuntimeError, ImportError):  # a user id without an entry, as in some containers
        home, user = os.environ.get("HOME", ""), ""
    if len(home) > 1:
        value = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", value)
    return _without(platform.node(), "HOST", _without(user, "USER", " ".join(value.split())))


def _without(name: str, label: str, text: str) -> str:
    return re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", label, text) if name else text
