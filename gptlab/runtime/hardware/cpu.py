"""The processor: its name, the cores that this process may compute on, and how its threads wait for one another."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

import psutil

_CPU_FOLDER = Path("/sys/devices/system/cpu")
_CGROUP_FOLDER = Path("/sys/fs/cgroup")

# A waiting thread spins, since waking it takes tens of microseconds. GNU's runtime spins for 300,000 rounds: on a busy
# machine it then uses up the very time slices that the thread it waits for needs. Beside two busy loops 60 steps of
# nanogpt/shakespeare-char-cpu took 16.8 s, with 10,000 rounds 3.9 s and without spinning 6.1 s; alone 25.2, 27.5 and
# 35 ms a step (docs/LOG.md, 2026-11-22).
GNU_SPIN_ROUNDS = 10_000
# Intel's and LLVM's runtimes (torch on Windows and macOS) count milliseconds, 200 by default; 1 is the least.
KMP_BLOCK_MILLISECONDS = 1


def cpu_model() -> str:
    """The processor's name as its maker gives it, or the architecture if the system does not say."""
    if sys.platform == "linux":
        return _linux_cpu_model(Path("/proc/cpuinfo")) or platform.machine()
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            answer = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=10, check=True)
            return answer.stdout.decode(errors="replace").strip() or platform.machine()
        return platform.machine()
    return platform.processor() or platform.machine()


def set_threads(n: int | None) -> int:
    """Let torch compute on `n` threads, and return the number in force.

    None: OMP_NUM_THREADS where the user set it, else one thread a physical core that this process may run on (two
    hyperthreads share one multiply unit, so a second thread on a core gains a matrix product nothing). On macOS
    torch's own choice is kept: it counts the performance cores.
    """
    import torch

    wanted = n or _openmp_threads() or (None if sys.platform == "darwin" else usable_cores())
    if wanted is not None and wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)
    return torch.get_num_threads()


def usable_cores() -> int:
    """Physical cores that this process may use: by the machine, its CPU affinity, and its cgroup's quota."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, _physical_cores(os.sched_getaffinity(0), _CPU_FOLDER))
    quota = _cgroup_quota(_CGROUP_FOLDER, Path("/proc/self/cgroup"))
    # Rounded down: with a thread more than the quota pays for, OpenMP's barrier waits for the one that is throttled.
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what OpenMP's runtimes read when torch loads them, unless the user has set how threads wait. Without effect
    once torch is loaded."""
    if "torch" in sys.modules or "OMP_WAIT_POLICY" in environment:
        return
    environment.setdefault("GOMP_SPINCOUNT", str(GNU_SPIN_ROUNDS))
    if "KMP_LIBRARY" not in environment:
        environment.setdefault("KMP_BLOCKTIME", str(KMP_BLOCK_MILLISECONDS))


def _linux_cpu_model(cpuinfo: Path) -> str | None:
    """x86 says "model name"; ARM kernels mostly give only numbers."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _openmp_threads() -> int | None:
    """The first level of OMP_NUM_THREADS ("4" or "4,2"); None where it is unset or no positive number."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def _physical_cores(logical: set[int], cpu_folder: Path) -> int:
    """Physical cores of these logical CPUs. Linux lists the hyperthreads of a core in `thread_siblings_list`."""
    try:
        siblings = {(cpu_folder / f"cpu{i}/topology/thread_siblings_list").read_text() for i in logical}
    except OSError:
        return len(logical)
    return len(siblings)


def _cgroup_quota(root: Path, membership: Path) -> float | None:
    """CPUs that the tightest cgroup around this process pays for (Docker's --cpus); None where nothing limits it.

    Version 2 has "QUOTA PERIOD" or "max PERIOD" in cpu.max, version 1 two files with -1 for no limit (kernel
    documentation: admin-guide/cgroup-v2.rst; scheduler/sched-bwc.rst).
    """
    limits: list[float] = []
    for folder in _cgroup_folders(root, membership):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()[:2]
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
            if quota != "max" and int(quota) > 0:
                limits.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(limits, default=None)


def _cgroup_folders(root: Path, membership: Path) -> list[Path]:
    """The folder of this process's cgroup and its parents, in the one hierarchy (version 2) and in cpu's (1)."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        inside = base / name.lstrip("/")
        folders += [folder for folder in (inside, *inside.parents) if folder == base or base in folder.parents]
    return folders
