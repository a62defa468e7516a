"""Equal time without luck of the clock: how many steps a candidate makes in the time of the baseline's.

Both programs make steps of real training, one at a time and in turn, so that whatever else the machine does slows both
alike. The candidate then trains (baseline's steps x speed) steps. Its result no longer depends on the load of the
machine, and repeats bit for bit.

A ratio above the true one gives steps that nobody paid for, and a race cannot tell them from an improvement. So a speed
other than the baseline's has to be as certain as what is kept; and where both do the same work, nothing is timed.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from select import select
from typing import IO, Any

import numpy as np
from scipy.special import bdtrik

from gptlab.config.errors import UserError
from gptlab.lab.judge.supervise import Supervised

WARM_STEPS = 3
"""Untimed: caches are filled, batches are made ahead."""
MIN_ROUNDS, MAX_ROUNDS = 12, 600
"""A round is one step of each program. All ratios of twelve are on one side of their median with a probability of 2^-12
a side, which is that of `OUTSIDE`."""
OUTSIDE = 0.00025
"""Probability, at most, that the true ratio is above the interval of a timing, and that it is below. So in one night in
40, one of 100 edits that cost what the baseline costs gets steps too many; with 95% intervals two do in every night. On
two cores with load 8, 1 was outside of the 95% interval in 3 of 40 timings of a program against itself (at 0.95, 1.10
and 1.20), and outside of this one in none (docs/LOG.md, 2026-11-22)."""
MAX_REPLY = 1 << 20
LAST_BYTES = 1 << 16
"""Of a log, which may be more than memory holds."""
LAST_WORDS = 500

ENOUGH = 0.01
"""Half the width of the interval, relative, at which timing ends: the ratio is then within half a percent in 19 of 20
timings, and half a percent of the time is worth less than the noise between seeds."""
ROUGH = 0.05
"""The same for a machine too busy for ENOUGH: what follows from the usual time, if the interval is no wider."""


class ProcessFailedError(Exception):
    """A candidate's process that ended with an error or took too long; the message is the last of what it printed, or
    the limit."""

    def __init__(self, what: str, *, timed_out: bool = False) -> None:
        super().__init__(what)
        self.timed_out = timed_out


class StepProcess:
    """`gptlab.app.step_timer` in a supervised process: it makes one step of training whenever it is asked."""

    def __init__(self, running: Supervised, printed: IO[bytes], timeout: float, step_timeout: float) -> None:
        """`printed`: where its errors go. `timeout`: seconds that it may take to be ready, and the first step, both
        with compilation; `step_timeout`: any other step."""
        self._running, self._printed, self._buffer = running, printed, b""
        self._timeout, self._step_timeout = timeout, step_timeout

    def ready(self) -> Mapping[str, Any]:
        """Wait until it can make steps; config, tokens_per_step, flops_per_step. ProcessFailedError if it cannot."""
        return self._reply()

    def step(self) -> float:
        """Make one step; seconds from the question to the answer, by this process's clock."""
        started = time.perf_counter()
        try:
            self._running.stdin.write(b"step\n")
        except OSError:
            raise self._ended() from None
        self._reply()
        self._timeout = self._step_timeout
        return time.perf_counter() - started

    def _reply(self) -> dict[str, Any]:
        """The next line that it prints. ProcessFailedError where it ends, says something else, or takes too long."""
        descriptor, deadline = self._running.stdout.fileno(), time.monotonic() + self._timeout
        while b"\n" not in self._buffer:
            if not select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ProcessFailedError(f"no step within {self._timeout:.0f} s", timed_out=True)
            piece = os.read(descriptor, 1 << 16)
            self._buffer += piece
            if not piece or len(self._buffer) > MAX_REPLY:
                raise self._ended()
        line, _, self._buffer = self._buffer.partition(b"\n")
        with suppress(ValueError):
            if isinstance(reply := json.loads(line), dict):
                return reply
        what = "it answered with something that is not a JSON object; the last words of its log"
        raise ProcessFailedError(f"{what}: {last_words(self._printed) or 'there are none'}")

    def _ended(self) -> ProcessFailedError:
        return ProcessFailedError(last_words(self._printed) or "it ended without a message")


def last_words(printed: IO[bytes]) -> str:
    """The last line with an error that a process printed, else its last line, without the name of the program,
    shortened. It is data from untrusted code, so only the last LAST_BYTES are read. Empty where there is none."""
    # Not by read(): a process that still prints would go on where that ended.
    first = max(0, os.fstat(printed.fileno()).st_size - LAST_BYTES)
    lines = os.pread(printed.fileno(), LAST_BYTES, first).decode(errors="replace").strip().splitlines() or [""]
    line = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
    return "".join(c for c in line.removeprefix("gptlab: error: ") if c.isprintable())[:LAST_WORDS]


@dataclass(frozen=True, slots=True)
class Speed:
    """Steps per second of a candidate over those of the baseline."""

    ratio: float
    """The median over rounds."""
    low: float
    high: float
    """The interval of the median in which it is but for OUTSIDE on each side."""
    rounds: int
    baseline_seconds: float
    """Median seconds of a step of the baseline, in these rounds."""

    @property
    def settled(self) -> float:
        """The ratio that steps follow from: 1 where the interval holds 1, so that an edit which changes no speed is
        paired with the baseline step by step; else in whole percents, so that another timing gives the same."""
        return 1.0 if self.low <= 1.0 <= self.high else round(self.ratio, 2)


def same_work(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether steps of two configurations, {dotted name: value}, make the same computation with other numbers: only
    rates, decays and the like of optimizer and schedule differ, and none of them is or becomes 0, which may be
    skipped."""
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return all(
        name.startswith(("optim.", "schedule."))
        and all(isinstance(values.get(name), float) and values[name] != 0 for values in (before, after))
        for name in changed
    )


def compare_speed(
    baseline: StepProcess, candidate: StepProcess, *, usual_seconds: float, max_seconds: float
) -> Speed:  # fmt: skip
    """Time steps of both in turn, the first of each round alternating, until the ratio is known to ENOUGH; to ROUGH
    after `usual_seconds`; in any case for `max_seconds` at most. When it ends depends on the width of the interval
    alone, never on which program seems faster: otherwise the interval would not be what it says."""
    for _ in range(WARM_STEPS):
        baseline.step()
        candidate.step()
    seconds: list[tuple[float, float]] = []
    began = time.monotonic()
    while True:
        if len(seconds) % 2:
            second = candidate.step()
            seconds.append((baseline.step(), second))
        else:
            seconds.append((baseline.step(), candidate.step()))
        speed = speed_of(seconds)
        width = (speed.high - speed.low) / speed.ratio / 2
        elapsed = time.monotonic() - began
        over = len(seconds) >= MAX_ROUNDS or elapsed > max_seconds
        if len(seconds) >= MIN_ROUNDS and (over or width <= (ENOUGH if elapsed <= usual_seconds else ROUGH)):
            return speed


def time_alone(process: StepProcess, *, max_seconds: float) -> float:
    """Median seconds of a step."""
    seconds: list[float] = []
    deadline = time.monotonic() + max_seconds
    for _ in range(WARM_STEPS):
        process.step()
    while len(seconds) < MIN_ROUNDS or (len(seconds) < MAX_ROUNDS and time.monotonic() < deadline):
        seconds.append(process.step())
    return float(np.median(seconds))


def speed_of(seconds: Sequence[tuple[float, float]]) -> Speed:
    """From the seconds of (baseline, candidate) in each round. The interval is that of order statistics, which assumes
    nothing of how the ratios are distributed (Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2)."""
    times = np.array(seconds)
    ratios = np.sort(times[:, 0] / times[:, 1])
    number = len(ratios)
    outside = max(0, math.ceil(bdtrik(OUTSIDE, number, 0.5)) - 1)  # excluded at each end
    return Speed(
        float(np.median(ratios)), float(ratios[outside]), float(ratios[number - 1 - outside]), number,
        float(np.median(times[:, 0])),
    )  # fmt: skip


def require_positive_steps(steps: float) -> int:
    """Whole steps, at least one. UserError where the time is not enough for one step."""
    if steps < 1:
        raise UserError("the time is not enough for one step: give --minutes more")
    return round(steps)
