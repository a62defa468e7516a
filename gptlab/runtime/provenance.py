"""Where a run's numbers come from: the facts that run.json keeps so that a result can be explained later."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import gptlab

_GIT_SECONDS = 10.0


def provenance(
    *,
    argv: Sequence[str],
    device: str,
    device_name: str,
    dtype: str,
    threads: int,
    peak_flops_per_second: float | None,
    peak_source: str,
    data_fingerprint: str,
    tokenizer_fingerprint: str,
    world_size: int = 1,
) -> dict[str, object]:
    """The contents of run.json, status aside. No host name and no user name: run directories are shared."""
    return {
        "gptlab_version": _version("gptlab"),
        **git_state(Path(gptlab.__file__).parent),
        "argv": list(argv),
        "start": datetime.now(UTC).isoformat(timespec="seconds"),
        "python_version": platform.python_version(),
        "torch_version": _version("torch"),
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
    }


def git_state(package: Path) -> dict[str, object]:
    """`git_commit` of the tree that holds `package`, and `git_dirty`: does the package differ from that commit?

    Both None where the package is not part of a repository; one that is merely installed below somebody's
    repository (in its .venv) is not.
    """
    commit = dirty = None
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None:
        commit = _git(package, "rev-parse", "HEAD")
        changes = _git(package, "status", "--porcelain", "--", ".")
        dirty = None if changes is None else bool(changes)
    return {"git_commit": commit, "git_dirty": dirty}


def cpu_model() -> str:
    """The processor's name as its maker gives it, or the architecture where the system does not tell."""
    if sys.platform == "linux":
        return _linux_cpu_model(Path("/proc/cpuinfo")) or platform.machine()
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"], Path("/")) or platform.machine()
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


def _git(folder: Path, *arguments: str) -> str | None:
    return _output(["git", *arguments], folder)


def _output(command: list[str], folder: Path) -> str | None:
    """What `command` prints, or None where it fails, hangs or does not exist."""
    # Inside a git hook GIT_DIR and its kin point elsewhere; `git status` must not take the index lock for a refresh.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, timeout=_GIT_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
