"""Other programs on the cores that a run computes on: each parallel loop waits for the thread that has to share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

WINDOW_SECONDS = 10.0
REPEAT_SECONDS = 600.0
# Cores that the threads lack. A quiet desktop uses 0.05 to 0.2.
LACKING_CORES = 0.3
# Far outside of what a quiet machine does: 348 to 393 ms within one run of quickstart (README).
SLOW_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Core seconds since some moment."""

    machine: float
    """Of all programs, and of other virtual machines that took this one's cores."""
    process: float
    """Of this process."""


def cpu_seconds() -> CpuSeconds:
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Linux counts the time of virtual guests in `user` and `nice` too.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return CpuSeconds(sum(times) - idle - guests, own.user + own.system)


class MachineLoad:
    """Watches the duration of a run's steps, and reports when other programs slow them down.

    `threads` compute in this process; `processes` such processes train on this machine.
    """

    def __init__(
        self,
        threads: int,
        *,
        processes: int = 1,
        cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[], CpuSeconds] = cpu_seconds,
    ) -> None:
        self._threads = threads * processes
        self._processes = processes
        self._cores = cores or psutil.cpu_count() or 1
        self._clock, self._read = clock, read
        self._began, self._used = clock(), read()
        self._steps: list[float] = []
        self._fastest: float | None = None
        """Median step of the fastest window so far."""
        self._silent_until = 0.0

    def step(self, seconds: float) -> str | None:
        """Note the duration of a step. Returns a warning at the end of a window in which the machine was busy, at most
        every REPEAT_SECONDS."""
        self._steps.append(seconds)
        now = self._clock()
        elapsed = now - self._began
        if elapsed < WINDOW_SECONDS:
            return None
        used, before = self._read(), self._used
        own = (used.process - before.process) * self._processes
        others = max(0.0, used.machine - before.machine - own) / elapsed
        median = statistics.median(self._steps)
        fastest = median if self._fastest is None else self._fastest
        self._began, self._used, self._steps = now, used, []
        self._fastest = min(fastest, median)
        lacking = self._threads - (self._cores - others)
        slow = median > SLOW_FACTOR * fastest
        if now < self._silent_until or not (slow or lacking > LACKING_CORES):
            return None
        self._silent_until = now + REPEAT_SECONDS
        took = f"steps take {median:.3g} s" + (f", {fastest:.3g} s at best" if slow else "")
        if lacking > LACKING_CORES:
            return f"this machine is busy: other programs use {others:.1f} of its {self._cores} cores; {took}"
        return f"this machine is slower than before: {took}, though other programs leave {self._threads} cores free"
