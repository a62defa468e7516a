"""One recipe at several depths: a row a depth, and a power law through them.

The law bpb = irreducible + a FLOPs^-b is fitted by least squares of log(bpb), as errors of a loss grow with it. Without
the irreducible term that is a line in logarithms. With it, a, b and the term are found by nonlinear least squares
(scipy's trust region), and the interval of the term comes from the linearization at the optimum, sigma^2 (J'J)^-1 with
n - 3 degrees of freedom (Seber and Wild, Nonlinear Regression, 1989, section 2.1). The term is identifiable if that
interval lies above 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gptlab.lab.run_record import RunRecord, is_broken


@dataclass(frozen=True, slots=True)
class Rung:
    """A depth: means over its seeds."""

    depth: int
    seeds: int
    parameters: float
    tokens: float
    flops: float
    seconds: float
    """Of the training clock."""
    bpb: float


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """bpb = irreducible + a FLOPs^-b."""

    a: float
    b: float
    irreducible: float
    residuals: tuple[float, ...]
    """bpb minus the law's, in bits per byte, one a row."""
    half_width: float | None = None
    """Of the irreducible term's 95% interval; None where the term is not fitted."""

    def bpb(self, flops: float) -> float:
        return self.irreducible + self.a * flops**-self.b


def rungs_of(sides: Mapping[str, Sequence[RunRecord]]) -> list[Rung]:
    """A row for each side with finished runs of which none is broken, by depth: a mean of the others would be that of
    the lucky seeds."""
    rows = []
    for runs in sides.values():
        ended = [run.summary for run in runs if math.isfinite(float(run.summary.get("val_bpb") or "nan"))]
        if ended and not any(map(is_broken, runs)):
            keys = ("num_params_M", "total_tokens_M", "total_flops", "training_seconds", "val_bpb")
            parameters, tokens, flops, seconds, bpb = (_mean(ended, key) for key in keys)
            depth = int(ended[0]["depth"])
            rows.append(Rung(depth, len(ended), 1e6 * parameters, 1e6 * tokens, flops, seconds, bpb))
    return sorted(rows, key=lambda row: row.depth)


def _mean(summaries: Sequence[Mapping[str, float]], key: str) -> float:
    return float(np.mean([float(summary[key]) for summary in summaries]))


def power_law(flops: Sequence[float], bpb: Sequence[float]) -> PowerLaw | None:
    """Without an irreducible term; None for fewer than two different amounts of FLOPs."""
    x, y = np.log(flops), np.log(bpb)
    if len({*flops}) < 2:
        return None
    slope, intercept = np.polyfit(x, y, 1)
    law = PowerLaw(math.exp(intercept), -float(slope), 0.0, ())
    return PowerLaw(law.a, law.b, 0.0, _residuals(law, flops, bpb))


def power_law_with_term(flops: Sequence[float], bpb: Sequence[float]) -> PowerLaw | None:
    """With an irreducible term; None for fewer than four rows, or where the term is not identifiable."""
    start = power_law(flops, bpb)
    if start is None or len(bpb) < 4:
        return None
    from scipy import optimize

    from gptlab.lab.statistics import ALPHA, critical_t

    # FLOPs in units of their geometric mean, so that the three parameters are of one size: the value there above the
    # term, the exponent, the term.
    middle = math.exp(float(np.mean(np.log(flops))))
    x, y = np.asarray(flops) / middle, np.log(bpb)

    def residuals(p: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(p[2] + p[0] * x ** -p[1]) - y

    def jacobian(p: NDArray[np.float64]) -> NDArray[np.float64]:
        power = x ** -p[1]
        columns = np.stack([power, -p[0] * np.log(x) * power, np.ones_like(x)], axis=1)
        return columns / (p[2] + p[0] * power)[:, None]

    bounds = [1e-12, 1e-6, 0.0], [np.inf, 10.0, min(bpb)]
    tries = [  # The sum of squares may have a second minimum at a term of 0.
        optimize.least_squares(residuals, [(1 - share) * min(bpb), 0.3, share * min(bpb)], jacobian, bounds,
                               xtol=1e-12, ftol=1e-12, gtol=1e-12)
        for share in (0.05, 0.5, 0.9)
    ]  # fmt: skip
    best = min(tries, key=lambda found: found.cost)
    freedom = len(bpb) - 3
    information = best.jac.T @ best.jac
    if np.linalg.cond(information) > 1 / np.finfo(float).eps:
        return None
    variance = 2 * best.cost / freedom * np.linalg.inv(information)[2, 2]
    half_width = critical_t(freedom, ALPHA) * math.sqrt(variance)
    at_middle, b, term = map(float, best.x)
    if not half_width < term:
        return None
    law = PowerLaw(at_middle * middle**b, b, term, ())
    return PowerLaw(law.a, law.b, term, _residuals(law, flops, bpb), half_width)


def _residuals(law: PowerLaw, flops: Sequence[float], bpb: Sequence[float]) -> tuple[float, ...]:
    return tuple(value - law.bpb(amount) for amount, value in zip(flops, bpb, strict=True))
