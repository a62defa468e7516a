"""A candidate against the baseline: at equal steps, tokens, seconds and FLOPs, at their ends, and in compute.

A value between two validations is interpolated linearly, and none is extrapolated. A broken run (its loss exploded, or
its last validation is not finite) is worse than all others: it counts as infinite bits per byte, so that no mean hides
it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from gptlab.lab.run_record import AXES, At, Axis, RunRecord, is_broken
from gptlab.lab.sides import size_of
from gptlab.lab.statistics import ALPHA, Difference, mean_of, paired_difference, seeds_needed, unpaired_difference

Verdict = Literal["better", "worse", "undecided", "identical", "broken", "unknown"]
END: Literal["end"] = "end"
Runs = Sequence[RunRecord]
Side = tuple[str, Runs]
"""Name and runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The difference at an equal amount, or at the ends."""

    at: At
    amount: float | None = None
    """The largest that all runs reached, in steps, tokens, seconds or FLOPs; None at the end, or where unknown."""
    baseline_bpb: float = math.nan
    """Mean over the seeds that `difference` is of; infinite where one of them is broken."""
    candidate_bpb: float = math.nan
    difference: Difference | None = None
    """Candidate minus baseline, in bits per byte; None where unknown."""
    seeds: tuple[int, int] = (0, 0)
    """How many seeds baseline and candidate have. Where they are paired, those without a partner do not count."""
    interpolated: tuple[str, ...] = ()
    """Sides with a value between two validations."""
    before_end: tuple[str, ...] = ()
    """Sides with a run that trains beyond `amount`: its learning rate had not decayed there."""
    broken: tuple[str, ...] = ()
    """Folders of runs that count as infinite."""
    unknown: str | None = None
    """Why there is no difference; None where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    baseline: str
    candidate: str
    size: str | None
    """Layers and width, where the sides have several sizes."""
    baseline_runs: Runs
    candidate_runs: Runs
    rows: Sequence[Row]
    judged: Row
    """The one of `rows` that the verdict is of."""
    p_adjusted: float = math.nan
    """The p-value of `judged`, adjusted by Holm for all contrasts of the comparison."""
    contrasts: int = 1
    """How many these are."""

    @property
    def verdict(self) -> Verdict:
        """What the candidate is. undecided: the difference may be noise. identical: to the last bit."""
        found = self.judged.difference
        if found is None:
            return "unknown"
        if not math.isfinite(found.mean):
            return "broken"
        if found.mean == 0 and (found.half_width == 0 or found.pairs == 1):
            return "identical"
        if self.p_adjusted < ALPHA:
            return "better" if found.mean < 0 else "worse"
        return "undecided"

    @property
    def seeds_needed(self) -> int | None:
        """With 80% power, for a difference as large and as noisy as this one, at a level divided among all contrasts.
        None: more than MAX_SEEDS, or unknown."""
        found = self.judged.difference
        return None if found is None else seeds_needed(found, alpha=ALPHA / self.contrasts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplier:
    """How many times the candidate's FLOPs the baseline needs for the candidate's final bits per byte."""

    baseline: str
    candidate: str
    size: str
    multiplier: float = math.nan
    """Geometric mean over the seeds; NaN where unknown."""
    low: float = math.nan
    """Of the 95% interval; NaN with one seed."""
    high: float = math.nan
    seeds: int = 0
    unknown: str | None = None
    """Why there is no multiplier; None where there is one."""


def sizes_of(runs: Runs) -> dict[str, list[RunRecord]]:
    """{layers and width: runs}."""
    sizes: dict[str, list[RunRecord]] = {}
    for run in runs:
        layers, width = size_of(run)
        sizes.setdefault(f"{layers} layer{'s' * (layers != 1)}, width {width}", []).append(run)
    return sizes


def contrasts_of(baseline: Side, candidate: Side, at: At) -> list[Contrast]:
    """One; where a side has several sizes, one for each size that both have. p-values are not adjusted yet."""
    sizes_a, sizes_b = sizes_of(baseline[1]), sizes_of(candidate[1])
    sizes: list[str | None] = [size for size in sizes_a if size in sizes_b]
    if len(sizes_a) == len(sizes_b) == 1:
        sizes = [None]
    found = []
    for size in sizes:
        a, b = (baseline[1], candidate[1]) if size is None else (sizes_a[size], sizes_b[size])
        rows = {where: _row(where, (baseline[0], a), (candidate[0], b)) for where in (*AXES, END)}
        found.append(
            Contrast(
                baseline=baseline[0], candidate=candidate[0], size=size, baseline_runs=a, candidate_runs=b,
                rows=[*rows.values()], judged=rows[at],
            )
        )  # fmt: skip
    return found


def _row(at: At, baseline: Side, candidate: Side) -> Row:
    amount, unknown = _largest_amount(at, (*baseline[1], *candidate[1]))
    return row_at(at, amount, baseline, candidate) if unknown is None else Row(at=at, amount=amount, unknown=unknown)


def row_at(at: At, amount: float | None, baseline: Side, candidate: Side) -> Row:
    """Of sides of which all runs that are not broken have validated before `amount` and after it, or at it."""
    sides, runs = (baseline, candidate), (*baseline[1], *candidate[1])
    values = {run.path: bpb_at(run, at, amount) for run in runs}
    a, b = (_by_seed(side, values) for _, side in sides)
    seeds = len(a), len(b)
    common = sorted(a.keys() & b.keys())
    alone_and_broken = any(math.isinf(own[seed]) for own in (a, b) for seed in own.keys() - set(common))
    if _are_paired(*seeds, len(common)) and not alone_and_broken:
        a, b = ({seed: own[seed] for seed in common} for own in (a, b))
        difference = paired_difference([*a.values()], [*b.values()])
    else:
        difference = unpaired_difference([*a.values()], [*b.values()])
    return Row(
        at=at,
        amount=amount,
        baseline_bpb=float(np.mean([*a.values()])),
        candidate_bpb=float(np.mean([*b.values()])),
        difference=difference,
        seeds=seeds,
        interpolated=tuple(name for name, own in sides if any(_is_between(run, at, amount) for run in own)),
        before_end=tuple(name for name, own in sides if any(_trains_beyond(run, at, amount) for run in own)),
        broken=tuple(str(run.path) for run in runs if math.isinf(values[run.path])),
    )


def _largest_amount(at: At, runs: Runs) -> tuple[float | None, str | None]:
    """What all runs that are not broken have reached, and why a value there is unknown (None where none is)."""
    sound = [run for run in runs if not is_broken(run)]
    if at == END:
        unfinished = [run for run in sound if run.status != "finished"]
        return None, f"{_paths(unfinished)} has not finished" if unfinished else None
    if not sound:
        return None, "every run is broken"
    if unlogged := [run for run in sound if math.isnan(run.curve.at[at][-1])]:
        return None, f"{_paths(unlogged)} logged no training step"
    amount = float(min(run.curve.at[at][-1] for run in sound))
    late = [run for run in runs if _is_between(run, at, amount) and amount < first_amount(run, at)]
    return amount, f"{_paths(late)} has not validated between its start and this" if late else None


def first_amount(run: RunRecord, axis: Axis) -> float:
    """From where on a curve is interpolated: its first validation after a step. No line leads to it from the weights
    that no step has trained."""
    at, steps = run.curve.at[axis], run.curve.at["steps"]
    return float(at[np.argmax(steps > 0)])


def _is_between(run: RunRecord, at: At, amount: float | None) -> bool:
    """Whether the run has no validation at `amount` itself, but others."""
    return (
        len(run.curve) > 0
        and at != END
        and amount is not None
        and not _at_last(run, at, amount)
        and amount not in run.curve.at[at]
    )


def _are_paired(a: int, b: int, common: int) -> bool:
    """Whether sides of so many seeds are compared over those in common. One pair says nothing about noise, so it is
    taken where there is nothing else, and a few pairs of many runs would waste the others."""
    return common >= min(2, max(a, b)) and 2 * common >= min(a, b)


def _by_seed(runs: Runs, values: Mapping[Path, float]) -> dict[int, float]:
    """{seed: value}. Runs of one seed repeat one another: their mean is one draw of the noise."""
    seeds: dict[int, list[float]] = {}
    for run in runs:
        seeds.setdefault(run.seed, []).append(values[run.path])
    return {seed: mean_of(np.array(own)) for seed, own in seeds.items()}


def bpb_at(run: RunRecord, at: At, amount: float | None) -> float:
    """Infinite where it is broken.

    Within one step of the run's last validation, that is the value, unless another was made just there: a run of 180
    seconds ends with the first step beyond them, and the line from a validation long before would be far above the
    curve.
    """
    if at == END or amount is None or _at_last(run, at, amount):
        value = None if is_broken(run) else float(run.curve.bpb[-1])
    else:
        value = run.curve.value(at, amount)
    return math.inf if value is None or not math.isfinite(value) else value


def _at_last(run: RunRecord, axis: Axis, amount: float) -> bool:
    if not len(run.curve) or amount in run.curve.at[axis][:-1]:
        return False
    last, steps = run.curve.at[axis][-1], run.curve.at["steps"][-1]
    return not amount < last - last / max(steps, 1)


def _trains_beyond(run: RunRecord, at: At, amount: float | None) -> bool:
    if at == END or amount is None or is_broken(run):
        return False
    return run.status != "finished" or not _at_last(run, at, amount)


def _paths(runs: Runs) -> str:
    return f"{runs[0].path}{f' (and {len(runs) - 1} more)' if len(runs) > 1 else ''}"


def multipliers_of(baseline: Side, candidate: Side) -> list[Multiplier]:
    """One for each size of the candidate; none unless both sides have two sizes or more."""
    base, sizes = sizes_of(baseline[1]), sizes_of(candidate[1])
    if min(len(base), len(sizes)) < 2:
        return []
    found = []
    for size, runs in sizes.items():
        one = Multiplier(baseline=baseline[0], candidate=candidate[0], size=size)
        logs = _log_multipliers([_ends(own) for own in base.values()], _ends(runs))
        if isinstance(logs, str):
            found.append(replace(one, unknown=logs))
            continue
        log = paired_difference(np.zeros(len(logs)), logs)
        one = replace(one, multiplier=math.exp(log.mean), seeds=len(logs))
        if math.isfinite(log.half_width):
            one = replace(one, low=math.exp(log.mean - log.half_width), high=math.exp(log.mean + log.half_width))
        found.append(one)
    return found


Ends = dict[int, tuple[float, float]]
"""{seed: (FLOPs, bits per byte)} of a size."""


def _ends(runs: Runs) -> Ends:
    finished = [run for run in runs if run.status == "finished" or is_broken(run)]
    flops = _by_seed(finished, {run.path: float([math.nan, *run.curve.at["flops"]][-1]) for run in finished})
    bpb = _by_seed(finished, {run.path: bpb_at(run, END, None) for run in finished})
    return {seed: (flops[seed], bpb[seed]) for seed in flops}


def _log_multipliers(baseline: Sequence[Ends], candidate: Ends) -> list[float] | str:
    """ln(FLOPs that the baseline needs / FLOPs of the candidate), a seed each; in words why one is unknown.

    The baseline's bits per byte are interpolated linearly over the logarithm of its FLOPs, as between the points of a
    scaling law. Seeds that would be extrapolated are not dropped: the others would be a choice of the lucky ones.
    """
    seeds = sorted(set(candidate).intersection(*baseline))
    if not seeds:
        return "no seed is finished in this size and in all of the baseline"
    ratios = []
    for seed in seeds:
        flops, bpb = np.array(sorted(ends[seed] for ends in baseline)).T
        own_flops, own_bpb = candidate[seed]
        if not np.all(np.isfinite([*flops, *bpb, own_flops, own_bpb])):
            return f"with seed {seed}, a run is broken, or its FLOPs are unknown"
        if not (np.all(np.diff(bpb) < 0) and np.all(np.diff(flops) > 0)):
            return f"with seed {seed}, the baseline does not get better with every size"
        if not bpb[-1] <= own_bpb <= bpb[0]:
            return (
                f"with seed {seed}, {own_bpb:.4f} bpb is outside of the baseline's {bpb[-1]:.4f} to {bpb[0]:.4f}, and "
                "nothing is extrapolated"
            )
        ratios.append(float(np.interp(own_bpb, bpb[::-1], np.log(flops)[::-1])) - math.log(own_flops))
    return ratios
