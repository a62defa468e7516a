"""Where a run's numbers come from: what its folder keeps so that a result can be explained, and the run repeated.

Run folders are shared: no host name, user name, home folder or secret goes into them.
"""

from __future__ import annotations

import functools
import getpass
import importlib.metadata
import os
import platform
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import gptlab
from gptlab.runtime.hardware.cpu import cpu_model
from gptlab.runtime.records.code_snapshot import CodeSnapshot, output_of, take_code

# Variables that change what is computed, how fast, or where: of OpenMP and BLAS, CUDA, torch, the allocator, gptlab.
_RELEVANT = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|VECLIB|BLIS|DNNL|ONEDNN|ATEN|GPTLAB|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|HIP|ROCR|HSA|MIOPEN"
    r"|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|MALLOC)_\w+|(LOCAL_)?(RANK|WORLD_SIZE)|PYTHONHASHSEED|LD_PRELOAD|CXX|CC"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The code and environment of a process when it began."""

    code: CodeSnapshot
    environment: str
    gpu: str | None

    def files(self) -> dict[str, bytes]:
        """{path inside the run folder: contents}."""
        files = {"environment.txt": self.environment.encode()} | self.code_files("code")
        return files | ({} if self.gpu is None else {"gpu.txt": self.gpu.encode()})

    def code_files(self, folder: str) -> dict[str, bytes]:
        return {f"{folder}/{name}": content for name, content in self.code.files.items()}


def take_evidence(variables: Mapping[str, str]) -> Evidence:
    """`variables`: of the environment when the process began; it sets some itself later."""
    return Evidence(take_code(Path(gptlab.__file__).parent), environment_text(variables), gpu_report())


def begin_evidence() -> Future[Evidence]:
    """`take_evidence` in a thread of its own: a slow nvidia-smi must not hold up a start.

    Call it first of all: the sooner, the surer that the files are those that this process imports.
    """
    evidence: Future[Evidence] = Future()

    def take(variables: Mapping[str, str]) -> None:
        try:
            evidence.set_result(take_evidence(variables))
        except Exception as error:  # raised where somebody asks for the result
            evidence.set_exception(error)

    threading.Thread(target=take, args=(dict(os.environ),), name="gptlab-evidence", daemon=True).start()
    return evidence


def provenance(
    *,
    argv: Sequence[str],
    code: CodeSnapshot,
    device: str,
    device_name: str,
    dtype: str,
    threads: int,
    peak_flops_per_second: float | None,
    peak_source: str,
    data_fingerprint: str,
    tokenizer_fingerprint: str,
    cuda_version: str | None = None,
    world_size: int = 1,
    from_run: str | None = None,
) -> dict[str, object]:
    """The contents of run.json, status aside."""
    return {
        "gptlab_version": _version("gptlab"),
        **code.facts(),
        "argv": list(argv),
        "from": from_run,
        "start": datetime.now(UTC).isoformat(timespec="seconds"),
        "python_version": platform.python_version(),
        "torch_version": _version("torch"),
        "cuda_version": cuda_version,
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "device": device,
        "device_name": device_name,
        "dtype": dtype,
        "threads": threads,
        "peak_flops_per_second": peak_flops_per_second,
        "peak_source": peak_source,
        "data_fingerprint": data_fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint,
        "world_size": world_size,
        "resumes": [],
    }


RESUME_FACTS = (
    "start", "argv", "gptlab_version", "git_commit", "git_dirty", "code_fingerprint", "python_version", "torch_version",
    "cuda_version", "platform", "cpu", "device", "device_name", "dtype", "threads", "world_size",
)  # fmt: skip
"""What run.json keeps of each process that resumed the run."""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return None


def environment_text(variables: Mapping[str, str]) -> str:
    """A pip requirements file, with comments for what pip cannot install; `variables`: of the process's environment."""
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
    """What the GPU's own tool prints, as modded-nanogpt logs it; None without one."""
    for tool in ("nvidia-smi", "rocm-smi"):
        if (output := output_of([tool], Path.cwd())) is not None:
            return _without(platform.node(), "HOST", output.decode(errors="replace"))
    return None


@functools.cache  # Reading the metadata of 60 distributions takes 0.1 s.
def _distributions(search_path: tuple[str, ...]) -> dict[str, str]:
    """{name in pip's normal form: version} of what is installed; of two with one name, the one that is imported."""
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
