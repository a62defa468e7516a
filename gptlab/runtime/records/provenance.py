"""Where a run's numbers come from: what its folder keeps so that a result can be explained, and the run repeated."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import gptlab
from gptlab.runtime.records.code_snapshot import CodeSnapshot, output_of, take_code
from gptlab.runtime.records.environment import environment_text, gpu_report


@dataclass(frozen=True, slots=True)
class Evidence:
    """Code and environment of a process at its start."""

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
    """`variables` are the environment's, read when the process began: it sets some itself later."""
    return Evidence(take_code(Path(gptlab.__file__).parent), environment_text(variables), gpu_report())


class EvidenceTaker:
    """Takes the evidence in a thread of its own: a slow nvidia-smi must not hold up a start.

    Begin it first of all: the sooner, the surer that the files are those that this process imports.
    """

    def __init__(self) -> None:
        self._outcome: Evidence | Exception | None = None
        variables = dict(os.environ)
        self._thread = threading.Thread(target=self._take, args=(variables,), name="gptlab-evidence", daemon=True)
        self._thread.start()

    def result(self) -> Evidence:
        """Wait for it; raises what went wrong."""
        self._thread.join()
        if not isinstance(self._outcome, Evidence):
            assert self._outcome is not None
            raise self._outcome
        return self._outcome

    def _take(self, variables: Mapping[str, str]) -> None:
        try:
            self._outcome = take_evidence(variables)
        except Exception as error:  # to be raised where somebody waits for it
            self._outcome = error


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
    """The contents of run.json, status aside. No host name and no user name: run directories are shared."""
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
"""What run.json records of each process that resumed the run."""


def cpu_model() -> str:
    """The processor's name as its maker gives it, or the architecture where the system does not tell."""
    if sys.platform == "linux":
        return _linux_cpu_model(Path("/proc/cpuinfo")) or platform.machine()
    if sys.platform == "darwin":
        brand = output_of(["sysctl", "-n", "machdep.cpu.brand_string"], Path("/"))
        return (brand or b"").decode(errors="replace").strip() or platform.machine()
    return platform.processor() or platform.machine()


def _linux_cpu_model(cpuinfo: Path) -> str | None:
    """x86 says "model name"; ARM kernels mostly give only numbers."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return None
