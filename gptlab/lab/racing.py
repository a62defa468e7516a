"""When the pairs of an experiment say keep, discard or train another pair, with one error level for the whole lab.

A pair is a baseline run and a candidate run with the same seed. Its difference is the baseline's validation bits per
byte minus the candidate's: positive where the candidate is better. After each pair `decide` asks two questions.

*Is it proven?* The evidence is an e-value: the likelihood ratio of an improvement to none, for differences that are
normal with an unknown standard deviation (SD). Without an improvement it ever reaches 1 / level with a probability of
at most `level` (Ville's inequality), however often it is looked at. It uses the experiment's own differences and
nothing else, because a change of the model may vary more between seeds than the do-nothing edit did. This is the
sequential t-test (Rushton 1950, Biometrika 37), as a mixture of two effects (Robbins 1970, Annals of Mathematical
Statistics 41); for why it is an e-value see Pérez-Ortiz, Lardy, de Heide and Grünwald (2024, Annals of Statistics 52).

*Is it still worth a pair?* The promise is the same ratio for the smallest effect that is looked for. It also uses the
differences of the do-nothing edit, so that one pair can be enough to discard. A wrong promise costs pairs or misses an
improvement; it cannot make a useless edit more likely to be kept.

Levels are alpha-spending (Bonferroni's inequality over an unlimited sequence): their sum bounds the probability that
anything without effect is ever kept, also where experiments share the baseline's runs. docs/lab.md has the simulation
behind these choices, and its limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.polynomial.legendre import leggauss
from numpy.typing import ArrayLike, NDArray

RaceVerdict = Literal["keep", "discard", "another pair", "inconclusive"]


@dataclass(frozen=True, slots=True)
class RaceRules:
    """How an experiment is raced. The defaults were chosen by simulation (docs/lab.md)."""

    false_keep_probability: float = 0.05
    """Probability, at most, that the lab ever keeps an edit without effect."""
    half_spent_after: int = 100
    """Experiments after which half of it is spent."""
    effects: tuple[float, ...] = (2.0, 8.0)
    """Improvements that the evidence looks for, in paired SDs, smallest first, with equal weights. 2 is what a race is
    for; 8 lets large improvements be kept after five pairs instead of eight."""
    futility: float = 0.75
    """Promise below which an experiment is discarded. 0: never."""
    most_pairs: int = 20
    """Pairs after which an experiment that is still open is inconclusive, and so the number of seeds."""
    starting_seeds: int = 10
    """Seeds with which races begin, in turn: where all begin with the same one, a baseline that was lucky with it hides
    every improvement."""


PROMOTION, PROMOTION_LEVEL = RaceRules(futility=0.0, most_pairs=10), 0.05
"""For pairs with fresh seeds, of an edit that was kept: its improvement is likely, so nothing is discarded early."""


@dataclass(frozen=True, slots=True)
class Decision:
    verdict: RaceVerdict
    evidence: float
    """The e-value; 1 says nothing."""
    threshold: float
    """Evidence that keeps the edit: 1 / level."""
    promise: float
    """Likelihood ratio of the smallest effect looked for, with the SD of the do-nothing edit."""


def level_of_next(earlier: int, rules: RaceRules) -> float:
    """Probability that the next experiment may spend on a false keep.

    Args:
        earlier: Experiments of the lab before it. Those of which no difference was seen spend nothing; counting them
            too only lowers the level.

    The levels K / ((K + earlier) (K + earlier + 1)), K = `half_spent_after`, add up to 1 as a telescoping series.
    """
    half = rules.half_spent_after
    return rules.false_keep_probability * half / ((half + earlier) * (half + earlier + 1))


def seed_order(earlier: int, rules: RaceRules) -> list[int]:
    """Which of the lab's seeds, 0 to most_pairs - 1, each pair of the next race takes; `earlier`: see level_of_next."""
    seeds = list(range(rules.most_pairs))
    first = earlier % min(rules.starting_seeds, rules.most_pairs)
    return seeds[first : rules.starting_seeds] + seeds[:first] + seeds[rules.starting_seeds :]


def decide(differences: Sequence[float], noise: Sequence[float], level: float, rules: RaceRules) -> Decision:
    """What the pairs so far say.

    Args:
        differences: Of the experiment, in the order of its pairs, in bits per byte, at least one. One that is NaN or
            infinite discards: a candidate without a finite loss is the worst there is, and a baseline without one
            proves nothing.
        noise: Paired differences of the do-nothing edit, in bits per byte, all finite. May be empty: one pair is then
            discarded where the candidate is worse, and says nothing otherwise.
        level: From level_of_next, the same for all pairs of an experiment.
    """
    threshold = 1 / level
    if not np.isfinite(differences).all():
        return Decision("discard", evidence=0.0, threshold=threshold, promise=0.0)
    evidence = float(e_value(differences, rules.effects))
    promise = float(likelihood_ratio(differences, rules.effects[0], noise))
    verdict: RaceVerdict = "another pair"
    if evidence >= threshold:
        verdict = "keep"
    elif promise < rules.futility:
        verdict = "discard"
    elif len(differences) >= rules.most_pairs:
        verdict = "inconclusive"
    return Decision(verdict, evidence, threshold, promise)


def e_value(differences: ArrayLike, effects: Sequence[float]) -> NDArray[np.float64]:
    """Mean likelihood ratio of the effects, from the differences (..., pairs) alone. Shape (...)."""
    return np.mean([likelihood_ratio(differences, effect) for effect in effects], axis=0)


NODES, WEIGHTS = leggauss(64)


def likelihood_ratio(differences: ArrayLike, effect: float, noise: ArrayLike = ()) -> NDArray[np.float64]:
    """Likelihood ratio of a mean of `effect` SDs to a mean of zero, for normal values of unknown SD.

    Args:
        differences: (..., n), with that mean.
        noise: (..., m), of the same SD, with mean zero. Without noise this is the ratio of the densities of Student's
            t: noncentral, with noncentrality effect * sqrt(n), over central.

    Returns:
        (...). Scale-invariant: the unknown SD has the density 1 / SD (the right Haar prior). With
        N = n + m, S = sum of the differences and Q = sum of all squares, it is exp(-n effect^2 / 2) times the mean of
        exp(effect S / sqrt(Q) v), where v has the chi distribution with N degrees of freedom.
    """
    differences, noise = np.asarray(differences, dtype=np.float64), np.asarray(noise, dtype=np.float64)
    pairs, count = differences.shape[-1], differences.shape[-1] + noise.shape[-1]
    largest = np.maximum(np.abs(differences).max(axis=-1), np.abs(noise).max(axis=-1, initial=0.0))
    unit = np.where(largest > 0, largest, 1.0)[..., None]  # squares must not overflow
    squares = np.square(differences / unit).sum(axis=-1) + np.square(noise / unit).sum(axis=-1)
    slope = effect * (differences / unit).sum(axis=-1) / np.sqrt(np.where(squares > 0, squares, 1.0))
    # The integrand v^(N-1) exp(slope v - v^2 / 2) is log-concave with a curvature of at least 1, so that it is below
    # exp(-40) of its peak 9 from it.
    peak = (slope + np.sqrt(slope**2 + 4 * (count - 1))) / 2
    low, high = np.maximum(peak - 9, 0.0), peak + 9
    v = low[..., None] + (high - low)[..., None] * (NODES + 1) / 2
    log_terms = (count - 1) * np.log(v) + slope[..., None] * v - np.square(v) / 2
    log_peak = log_terms.max(axis=-1)
    integral = (np.exp(log_terms - log_peak[..., None]) @ WEIGHTS) * (high - low) / 2
    log_of_no_effect = (count / 2 - 1) * math.log(2) + math.lgamma(count / 2)
    return np.exp(log_peak + np.log(integral) - log_of_no_effect - pairs * effect**2 / 2)
