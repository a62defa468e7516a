"""The statistics of comparisons: against scipy's tests, by hand, and by simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy  # its parts are imported where a test first needs them: `stats` takes a second

from gptlab.lab.statistics import (
    ALPHA,
    CONFIDENCE,
    MAX_SEEDS,
    POWER,
    Difference,
    holm,
    paired_difference,
    power,
    seeds_needed,
    unpaired_difference,
)

ROUNDING = 1e-10
"""Both sides compute the same formula, of quantiles that are accurate to about 1e-13."""


def approx(value: float) -> object:
    return pytest.approx(value, rel=ROUNDING)


@pytest.mark.parametrize("pairs", [2, 3, 5, 40])
@pytest.mark.parametrize("scale", [1.0, 1e-100, 1e100])
def test_paired_is_that_of_scipy(pairs: int, scale: float) -> None:
    draws = np.random.default_rng(pairs)
    a = draws.normal(size=pairs) * scale
    b = a + draws.normal(0.3, 0.5, size=pairs) * scale
    ours, theirs = paired_difference(a, b), scipy.stats.ttest_rel(b / scale, a / scale)
    low, high = theirs.confidence_interval(CONFIDENCE)
    assert (ours.mean, ours.half_width) == (approx(scale * (low + high) / 2), approx(scale * (high - low) / 2))
    assert (ours.p_value, ours.pairs) == (approx(theirs.pvalue), pairs)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 9), (20, 7)])
def test_unpaired_is_welch_of_scipy(n: int, m: int) -> None:
    draws = np.random.default_rng(n * m)
    a, b = draws.normal(0, 1, size=n), draws.normal(0.5, 4, size=m)
    ours, theirs = unpaired_difference(a, b), scipy.stats.ttest_ind(b, a, equal_var=False)
    low, high = theirs.confidence_interval(CONFIDENCE)
    assert (ours.mean, ours.half_width) == (approx((low + high) / 2), approx((high - low) / 2))
    assert (ours.p_value, ours.pairs) == (approx(theirs.pvalue), 0)


def test_paired_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard deviation 1, t = 2 sqrt(3) with 2 degrees of freedom, of which the table
    says 4.303 for 97.5%; there P(|T| > t) = 1 - t / sqrt(2 + t^2)."""
    ours = paired_difference([0, 0, 0], [1, 2, 3])
    assert (ours.mean, ours.pairs, ours.variances) == (2, 3, (approx(1),))
    assert ours.half_width == pytest.approx(4.303 / math.sqrt(3), abs=5e-4)
    assert ours.p_value == approx(1 - math.sqrt(12 / 14))


def test_one_value_says_nothing_about_noise() -> None:
    for ours in (paired_difference([1.0], [1.5]), unpaired_difference([1.0], [1.5]), unpaired_difference([1], [1, 2])):
        assert ours.mean == 0.5
        assert (ours.half_width, math.isnan(ours.p_value), seeds_needed(ours)) == (math.inf, True, None)


def test_without_any_noise() -> None:
    same = paired_difference([1.0, 2.0], [1.0, 2.0])
    assert (same.mean, same.half_width, same.p_value) == (0, 0, 1)
    other = paired_difference([1.0, 2.0], [1.5, 2.5])
    assert (other.mean, other.half_width, other.p_value) == (0.5, 0, 0)
    assert (seeds_needed(same), seeds_needed(other)) == (None, 2)
    # The mean of ten of these, summed, is another number.
    alike = unpaired_difference([0.801498] * 10, [0.801498] * 3)
    assert (alike.mean, alike.half_width, alike.p_value) == (0, 0, 1)


def test_values_that_are_not_finite_make_no_interval() -> None:
    worse = paired_difference([1, 1, 1], [1, math.inf, 1])
    assert (worse.mean, worse.half_width, math.isnan(worse.p_value)) == (math.inf, math.inf, True)
    assert unpaired_difference([1, math.inf], [1, 2]).mean == -math.inf
    both = paired_difference([math.inf, 1], [math.inf, 1])
    assert (math.isnan(both.mean), both.half_width, seeds_needed(both)) == (True, math.inf, None)


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([[1.0]], [[1.0]])])
def test_pairs_need_partners(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="of one length"):
        paired_difference(a, b)


class TestPower:
    @pytest.mark.parametrize("effect", [0.3, 0.5, 1.0, 2.5])
    def test_is_what_a_simulation_finds(self, effect: float) -> None:
        """At the number of seeds that are said to be needed, and at one less: 20,000 experiments have a standard error
        of 0.003; 0.012 is four of them."""
        draws, difference = np.random.default_rng(7), Difference(effect, 1, 0.5, 3, (1.0,))
        needed = seeds_needed(difference)
        assert needed is not None
        assert power(difference, needed) >= POWER > power(difference, needed - 1)
        samples = draws.normal(effect, 1, size=(20_000, needed))
        found = (scipy.stats.ttest_1samp(samples, 0, axis=1).pvalue < ALPHA).mean()
        assert found == pytest.approx(power(difference, needed), abs=0.012)

    def test_of_unpaired_sides_is_what_a_simulation_finds(self) -> None:
        """Welch's degrees of freedom are random, and their expectation is used: hence 0.02."""
        draws, difference = np.random.default_rng(8), Difference(1.0, 1, 0.5, 0, (1.0, 4.0))
        needed = seeds_needed(difference)
        assert needed is not None
        a, b = draws.normal(0, 1, size=(10_000, needed)), draws.normal(1, 2, size=(10_000, needed))
        found = (scipy.stats.ttest_ind(a, b, axis=1, equal_var=False).pvalue < ALPHA).mean()
        assert found == pytest.approx(POWER, abs=0.02)

    def test_of_cohens_table(self) -> None:
        """Medium and large effects, two-sided at 0.05, 80% power: G*Power 3.1 gives 34 and 15 pairs, 64 and 26 a
        side."""
        paired = [seeds_needed(Difference(d, 1, 0.5, 3, (1.0,))) for d in (0.5, 0.8)]
        unpaired = [seeds_needed(Difference(d, 1, 0.5, 0, (1.0, 1.0))) for d in (0.5, 0.8)]
        assert (paired, unpaired) == ([34, 15], [64, 26])

    @pytest.mark.parametrize("effect", [0.20, 0.45, 0.525, 0.54, 1.7, 3e9])
    def test_is_found_where_the_power_of_many_seeds_is_one(self, effect: float) -> None:
        """Among them effects of which ncfdtr returns NaN at thousands of seeds, or at two. The power by the mean over
        quantiles of the chi distribution, seed count by seed count."""

        def power_of(seeds: int) -> float:
            freedom, mean = seeds - 1, effect * math.sqrt(seeds)
            deviations = np.sqrt(scipy.stats.chi2.ppf((np.arange(2_000) + 0.5) / 2_000, freedom) / freedom)
            limits = scipy.stats.t.ppf(1 - ALPHA / 2, freedom) * deviations
            return float((scipy.stats.norm.cdf(mean - limits) + scipy.stats.norm.cdf(-mean - limits)).mean())

        needed = next(seeds for seeds in range(2, MAX_SEEDS) if power_of(seeds) >= POWER)
        assert seeds_needed(Difference(effect, 1, 0.5, 3, (1.0,))) == needed

    def test_has_a_limit(self) -> None:
        """Of many seeds, (1.960 + 0.842)^2 / effect^2 are needed: 10,011 for 0.028, 9,869 for 0.0282."""
        tiny = Difference(0.028, 1, 0.5, 3, (1.0,))
        assert [seeds_needed(replace(tiny, mean=mean)) for mean in (0.028, 0.0, 1e-300)] == [None, None, None]
        assert seeds_needed(replace(tiny, mean=0.0282)) in range(9_860, MAX_SEEDS)
        assert seeds_needed(replace(tiny, mean=-1e6)) == 2


class TestHolm:
    def test_by_hand(self) -> None:
        """Sorted: 0.01 * 4, 0.02 * 3, 0.03 * 2, 0.5 * 1; none may be below the one before it."""
        assert holm([0.03, 0.5, 0.01, 0.02]) == [approx(0.06), approx(0.5), approx(0.04), approx(0.06)]
        assert holm([0.04, 0.03]) == [approx(0.06), approx(0.06)]
        assert holm([0.9, 0.8]) == [1, 1]
        assert holm([0.2]) == [0.2]
        assert holm([]) == []

    def test_counts_tests_that_could_not_be_made(self) -> None:
        adjusted = holm([math.nan, 0.02, 0.03])
        assert math.isnan(adjusted[0])
        assert adjusted[1:] == [approx(0.06), approx(0.06)]

    def test_keeps_the_error_of_a_family(self) -> None:
        """Five comparisons without effect: in at most 5% of families is one below 0.05 (4,000 families, four standard
        errors of 0.0035); unadjusted, in 1 - 0.95^5 = 23%."""
        p_values = np.random.default_rng(9).uniform(size=(4_000, 5))
        found = np.mean([min(holm(row)) < ALPHA for row in p_values.tolist()])
        assert found == pytest.approx(1 - (1 - ALPHA / 5) ** 5, abs=0.014)
