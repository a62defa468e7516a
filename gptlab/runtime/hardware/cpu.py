"""The processor: its name, the cores that this process may compute on, how its threads wait for one another, and what
other programs take of it."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_CPU_INFO = Path("/proc/cpuinfo")
_CPU_FOLDER = Path("/sys/devices/system/cpu")
_CGROUP_FOLDER = Path("/sys/fs/cgroup")

# A waiting thread spins, since waking it takes tens of microseconds. GNU's runtime spins for 300,000 rounds: on a busy
# machine it then uses up the very time slices that the thread it waits for needs. Beside two busy loops 60 steps of
# nanogpt/shakespeare-char-cpu took 16.8 s, with 10,000 rounds 3.9 s and without spinning 6.1 s; alone 25.2, 27.5 and
# 35 ms a step (docs/LOG.md, 2026-11-22).
GNU_SPIN_ROUNDS = 10_000
# Intel's and LLVM's runtimes (torch on Windows and macOS) count milliseconds, 200 by default; 1 is the least.
KMP_BLOCK_MILLISECONDS = 1

WINDOW_SECONDS = 10.0
REPEAT_SECONDS = 600.0
# Cores that the threads lack. A quiet desktop uses 0.05 to 0.2.
LACKING_CORES = 0.3
# Far outside of what a quiet machine does: 137 to 164 ms within one run of quickstart (README).
SLOW_FACTOR = 2.0


def cpu_model() -> str:
    """The processor's name as its maker gives it, or the architecture if the system does not say."""
    name = ""
    with suppress(OSError, subprocess.SubprocessError):
        name = _linux_cpu_model() if sys.platform == "linux" else _other_cpu_model()
    return name.strip() or platform.machine()


def _linux_cpu_model() -> str:
    """x86 says "model name"; ARM kernels mostly give only numbers."""
    lines = _CPU_INFO.read_text(errors="replace").splitlines()
    return next((line.partition(":")[2] for line in lines if line.startswith("model name")), "")


def _other_cpu_model() -> str:
    if sys.platform != "darwin":
        return platform.processor()
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    answer = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=10, check=True)
    return answer.stdout.decode(errors="replace")


def prepare_torch(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch and OpenMP's runtimes read when they are loaded, unless the user has set it: that threads wait
    without spinning for long, and that tensors of 2 MiB and more are put on pages of that size, where Linux has them
    for who asks (steps take 0.95 to 1.02 times as long; docs/LOG.md, 2026-11-30). Without effect once torch is loaded.
    """
    if "torch" in sys.modules:
        return
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "OMP_WAIT_POLICY" in environment:
        return
    environment.setdefault("GOMP_SPINCOUNT", str(GNU_SPIN_ROUNDS))
    if "KMP_LIBRARY" not in environment:
        environment.setdefault("KMP_BLOCKTIME", str(KMP_BLOCK_MILLISECONDS))


def set_threads(n: int | None) -> int:
    """Let torch compute on `n` threads, and return the number in force.

    None: OMP_NUM_THREADS where the user set it, else one thread a physical core that this process may run on (two
    hyperthreads share one multiply unit, so a second thread on a core gains a matrix product nothing). On macOS
    torch's own choice is kept: it counts the performance cores.
    """
    import torch

    wanted = n or _threads_of_environment() or (None if sys.platform == "darwin" else usable_cores())
    if wanted is not None and wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)
    return torch.get_num_threads()


def _threads_of_environment() -> int:
    """What OMP_NUM_THREADS says; 0 where it says nothing."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # of a list, such as "4,2"
    return int(first) if first.isdecimal() else 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the context torch computes on one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def threads_beside_others() -> int | None:
    """How many threads leave other programs the cores that they use: where they did for the last minute, by the load
    average, and still do, for half a second. None where all cores can be had, and where OMP_NUM_THREADS decides.

    Each parallel loop waits for the thread that shares its core. Beside one busy program on two Zen 5 cores, two
    threads take 1.6 times as long for a step of quickstart as one, and 2 times for small steps; pinning them helps less
    (docs/LOG.md, 2026-11-25).
    """
    cores, logical = usable_cores(), psutil.cpu_count() or 1
    ours = cores == psutil.cpu_count(logical=False)  # otherwise the load may be that of other cores
    if not ours or _threads_of_environment() or sys.platform in ("darwin", "win32"):  # see `set_threads`
        return None
    for_a_minute = max(1, min(cores, round(logical - os.getloadavg()[0])))
    return None if for_a_minute == cores else _threads_left_now(cores, logical, for_a_minute)


def _threads_left_now(cores: int, logical: int, for_a_minute: int) -> int | None:
    """The same by half a second of measurement, where the last minute was busy."""
    own = psutil.Process()
    own.cpu_percent()
    used = psutil.cpu_percent(interval=0.5) / 100 * logical - own.cpu_percent() / 100
    now = max(1, min(cores, round(logical - used)))
    return None if now == cores else max(for_a_minute, now)


def usable_cores() -> int:
    """Physical cores that this process may use: by the machine, its CPU affinity, and its cgroup's quota."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, _physical_cores(os.sched_getaffinity(0), _CPU_FOLDER))
    quota = _cgroup_quota(_CGROUP_FOLDER, Path("/proc/self/cgroup"))
    # Rounded down: with a thread more than the quota pays for, OpenMP's barrier waits for the one that is throttled.
    return cores if quota is None else max(1, min(cores, int(quota)))


def _physical_cores(logical: set[int], cpu_folder: Path) -> int:
    """Physical cores of these logical CPUs. Linux lists the hyperthreads of a core in `thread_siblings_list`."""
    try:
        return len({(cpu_folder / f"cpu{i}/topology/thread_siblings_list").read_text() for i in logical})
    except OSError:
        return len(logical)


def _cgroup_quota(root: Path, membership: Path) -> float | None:
    """CPUs that the tightest cgroup around this process pays for (Docker's --cpus); None where nothing limits it.

    Version 2 has "QUOTA PERIOD" or "max PERIOD" in cpu.max, version 1 two files with -1 for no limit (kernel
    documentation: admin-guide/cgroup-v2.rst; scheduler/sched-bwc.rst).
    """
    limits: list[float] = []
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers  # version 2 names none: one hierarchy for all
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        group = base / name.lstrip("/")
        for folder in (group, *group.parents[: len(group.parts) - len(base.parts)]):
            with suppress(OSError, ValueError, ZeroDivisionError):
                quota, period = " ".join((folder / file).read_text() for file in files).split()
                limits += [int(quota) / int(period)] if quota not in ("max", "-1") else []
    return min(limits, default=None)


@dataclass(slots=True)
class MachineLoad:
    """Watches the duration of a run's steps, and reports when other programs slow them down: each parallel loop waits
    for the thread that has to share its core."""

    threads: int
    """That compute in this process."""
    processes: int = 1
    """Processes on this machine that train with so many threads each."""
    cores: int = field(default_factory=lambda: psutil.cpu_count() or 1)
    clock: Callable[[], float] = time.monotonic
    _process: psutil.Process = field(default_factory=psutil.Process)
    _steps: list[float] = field(default_factory=list)
    _fastest: float = float("inf")
    """Median step of the fastest window so far."""
    _silent_until: float = 0.0
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._cores_used()

    def step(self, seconds: float) -> str | None:
        """Note the duration of a step. Returns a warning at the end of a window in which the machine was busy, at most
        every REPEAT_SECONDS."""
        self._steps.append(seconds)
        elapsed = self.clock() - self._began
        return None if elapsed < WINDOW_SECONDS else self._end_window(elapsed)

    def _end_window(self, elapsed: float) -> str | None:
        machine, own = self._cores_used()
        others = max(0.0, machine - own * self.processes)
        median, best = statistics.median(self._steps), self._fastest
        now = self._began + elapsed
        self._began, self._steps, self._fastest = now, [], min(best, median)
        needed = min(self.threads * self.processes, self.cores)
        slow, busy = median > SLOW_FACTOR * best, needed - (self.cores - others) > LACKING_CORES
        if now < self._silent_until or not (slow or busy):
            return None
        self._silent_until = now + REPEAT_SECONDS
        took = f"steps take {median:.3g} s" + (f", {best:.3g} s at best" if slow else "")
        if busy:
            return f"this machine is busy: other programs use {others:.1f} of its {self.cores} cores; {took}"
        return f"this machine is slower than before: {took}, though other programs leave {needed} cores free"

    def _cores_used(self) -> tuple[float, float]:
        """Cores in use since the last call: by all programs (and other virtual machines), by this process."""
        return psutil.cpu_percent() / 100 * self.cores, self._process.cpu_percent() / 100
