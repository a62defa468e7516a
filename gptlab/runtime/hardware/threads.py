"""How many CPU cores this process may compute on, and telling torch so."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import psutil

_CPU_FOLDER = Path("/sys/devices/system/cpu")
_CGROUP_FOLDER = Path("/sys/fs/cgroup")


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
