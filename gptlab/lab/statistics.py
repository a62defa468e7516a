"""Differences between two sets of results: interval, p-value, the seeds that would be needed, several comparisons.

Student's t over paired differences; without pairs, Welch's t with Satterthwaite's degrees of freedom (Welch 1947, "The
generalization of Student's problem"). Both are one formula: a mean whose squared standard error is a sum of
variance / count, over the one sample of differences or over the two samples. Power is that of the noncentral t
distribution (Cohen 1988, "Statistical Power Analysis", chapter 2), several p-values are adjusted by Holm (1979, "A
simple sequentially rejective multiple test procedure").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ncfdtr, stdtr, stdtrit

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
POWER = 0.8
MAX_SEEDS = 10_000


@dataclass(frozen=True, slots=True)
class Difference:
    """b minus a, in the unit of both."""

    mean: float
    """Infinite where one side holds an infinite value, NaN where both do."""
    half_width: float
    """The 95% confidence interval is mean ± half_width. Infinite where there is nothing to estimate the noise by: one
    value a side, or a value that is not finite."""
    p_value: float
    """Two-sided, of a mean difference of zero. NaN where half_width is infinite."""
    pairs: int
    """0: the two sides are not paired."""
    variances: tuple[float, ...]
    """Sample variance of the paired differences; of a and of b where they are not paired. NaN of a single value."""


def paired_difference(a: ArrayLike, b: ArrayLike) -> Difference:
    """b minus a, element by element. ValueError unless both have the same shape (pairs,) with at least one pair."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(f"pairs need two arrays of one length, these have the shapes {a.shape} and {b.shape}")
    with np.errstate(invalid="ignore"):  # inf - inf
        differences = b - a
        mean = mean_of(differences)
    return _difference(mean, [differences], pairs=a.size)


def unpaired_difference(a: ArrayLike, b: ArrayLike) -> Difference:
    """mean(b) minus mean(a), of shapes (n,) and (m,). ValueError where one is empty."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if not a.size or not b.size:
        raise ValueError("a side without values has no mean")
    with np.errstate(invalid="ignore"):
        return _difference(mean_of(b) - mean_of(a), [a, b], pairs=0)


def mean_of(sample: np.ndarray) -> float:
    """Of equal numbers that number, where the rounded sum may give its neighbour."""
    first = sample[0]
    return float(first + (sample - first).mean()) if math.isfinite(first) else float(sample.mean())


def _difference(mean: float, samples: Sequence[np.ndarray], *, pairs: int) -> Difference:
    if not math.isfinite(mean) or min(map(len, samples)) < 2:
        return Difference(mean, math.inf, math.nan, pairs, (math.nan,) * len(samples))
    variances = tuple(float((sample - sample[0]).var(ddof=1)) for sample in samples)
    error, freedom = _error_and_freedom(variances, [len(sample) for sample in samples])
    if error == 0:  # not one bit of noise: t is 0 / 0 for equal sides, otherwise infinite
        return Difference(mean, 0.0, float(mean == 0), pairs, variances)
    p_value = 2 * float(stdtr(freedom, -abs(mean) / error))
    return Difference(mean, critical_t(freedom, ALPHA) * error, p_value, pairs, variances)


def _error_and_freedom(variances: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """The standard error and Satterthwaite's degrees of freedom; for one sample, those of Student."""
    parts = [variance / count for variance, count in zip(variances, counts, strict=True)]
    total = sum(parts)
    if total == 0:
        return 0.0, math.nan
    # Shares of the total, since squares of small variances underflow.
    return math.sqrt(total), 1 / sum((part / total) ** 2 / (n - 1) for part, n in zip(parts, counts, strict=True))


def critical_t(freedom: float, alpha: float) -> float:
    """What the absolute value of Student's t exceeds with probability `alpha`."""
    return float(stdtrit(freedom, 1 - alpha / 2))


def seeds_needed(difference: Difference, *, alpha: float = ALPHA) -> int | None:
    """The smallest number of seeds (pairs, or runs a side) with which a test at level `alpha` finds a difference of
    this mean and these variances with 80% power. None: more than `MAX_SEEDS`, or unknown."""
    low, high = 1, MAX_SEEDS
    if not power(difference, high, alpha=alpha) >= POWER:  # NaN too
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(difference, middle, alpha=alpha) >= POWER else (middle, high)
    return high


def power(difference: Difference, seeds: int, *, alpha: float = ALPHA) -> float:
    """The probability that a two-sided test at level `alpha`, on this many seeds (pairs, or runs a side; at least two),
    finds an effect of the size of `difference` under its variances. NaN where the variances are unknown."""
    error, freedom = _error_and_freedom(difference.variances, [seeds] * len(difference.variances))
    if error == 0:
        return float(difference.mean != 0)
    critical, noncentrality = critical_t(freedom, alpha), abs(difference.mean) / error
    # The square of noncentral t is noncentral F, whose function is accurate where that of t returns NaN. At some large
    # noncentralities it too returns NaN; above five times the critical value, the power differs from 1 by less than
    # 1e-6 (the tail of the chi distribution with one degree of freedom).
    if noncentrality > 5 * critical:
        return 1.0
    return 1 - float(ncfdtr(1, freedom, noncentrality**2, critical**2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the given order: rejecting below `ALPHA` has a family-wise error of at most `ALPHA`. NaN,
    of a test that was planned and could not be made (a run broke), counts like the others and stays NaN."""
    adjusted, largest = [math.nan] * len(p_values), 0.0
    order = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, place) in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        adjusted[place] = largest
    return adjusted
