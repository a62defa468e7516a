from __future__ import annotations

import functools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import racing_nights
import scipy  # its parts are imported where a test first needs them: `stats` takes a second
from racing_nights import CHOSEN, METHODS, Scenario

from gptlab.lab.racing import RaceRules, decide, e_value, level_of_next, likelihood_ratio, seed_order

RULES = RaceRules()
simulate = functools.cache(racing_nights.simulate)  # some tests look at the same nights


class TestLikelihoodRatio:
    @pytest.mark.parametrize("pairs", [2, 3, 8, 20])
    @pytest.mark.parametrize("effect", [0.5, 2.0, 8.0])
    @pytest.mark.parametrize("mean", [0.0, 1.0, 6.0])
    def test_is_noncentral_t_over_central_t(self, pairs: int, effect: float, mean: float) -> None:
        differences = (np.random.default_rng(pairs).standard_normal(pairs) + mean) * 4e-4
        t = scipy.stats.ttest_1samp(differences, 0).statistic
        expected = scipy.stats.nct.pdf(t, pairs - 1, effect * math.sqrt(pairs)) / scipy.stats.t.pdf(t, pairs - 1)
        # 1e-7: scipy's noncentral t is a series with that many digits where the density is small
        assert likelihood_ratio(differences, effect) == pytest.approx(expected, rel=1e-7, abs=1e-12)

    def test_integrates_the_sd_out_of_normal_densities(self) -> None:
        differences, noise, effect = np.array([0.9, 2.3, -0.2]), np.array([0.4, -1.3]), 2.0

        def density(sd: float, effect: float) -> float:
            at = [*scipy.stats.norm.pdf(differences, effect * sd, sd), *scipy.stats.norm.pdf(noise, 0, sd)]
            return math.prod(at) / sd

        marginal = [
            scipy.integrate.quad(density, 0, np.inf, args=(e,), epsabs=0, epsrel=1e-10)[0] for e in (effect, 0.0)
        ]
        ratio = likelihood_ratio(differences * 1e-3, effect, noise * 1e-3)
        assert ratio == pytest.approx(marginal[0] / marginal[1], rel=1e-9)

    @pytest.mark.parametrize("pairs", [2, 3, 7])
    def test_has_a_mean_of_one_where_there_is_no_effect(self, pairs: int) -> None:
        """Normal differences have every direction alike: the angle to (1, ..., 1) has the density sin^(pairs - 2)."""
        angles = (np.arange(4000) + 0.5) * math.pi / 4000
        along, across = np.ones(pairs) / math.sqrt(pairs), np.eye(pairs)[0] - np.eye(pairs)[1]
        differences = np.outer(np.cos(angles), along) + np.outer(np.sin(angles), across / math.sqrt(2))
        weights = np.sin(angles) ** (pairs - 2)
        # The midpoint rule is exact to rounding for even pairs, and to 1e-6 for the odd powers of the sine.
        assert np.average(e_value(differences, RULES.effects), weights=weights) == pytest.approx(1, rel=1e-5)

    def test_of_extremes(self) -> None:
        assert likelihood_ratio([0.0, 0.0], 2.0) == pytest.approx(math.exp(-4))
        assert likelihood_ratio([1e300, 1e300], 2.0) == pytest.approx(float(likelihood_ratio([1e-300, 1e-300], 2.0)))
        assert likelihood_ratio([-5.0] * 20, 8.0) >= 0


class TestRaceByHand:
    """In units of 1e-4 bits per byte. With N values in all, S the sum of differences, Q the sum of all squares and
    x = effect S / sqrt(Q), the integral over the chi distribution is elementary for N = 2: 1 + x sqrt(2 pi) e^(x^2 / 2)
    Phi(x)."""

    def test_first_pair(self) -> None:
        """Difference 4, do-nothing 3: x = 2 * 4 / 5 = 1.6, and the promise is e^-2 (1 + 1.6 * 2.50663 * 3.59664 *
        0.945201) = 1.98050. The evidence of one pair is that of its sign: 2 Phi(effect), the mean of 1.9545 and 2."""
        decision = decide([4e-4], [3e-4], level=1 / 2000, rules=RULES)
        assert decision.promise == pytest.approx(1.98050, abs=1e-4)
        assert decision.evidence == pytest.approx(1.97725, abs=1e-4)
        assert (decision.verdict, decision.threshold) == ("another pair", 2000)

    def test_two_pairs(self) -> None:
        """Differences 3 and 4: S / sqrt(Q) = 7 / 5. Effect 2: x = 2.8, e^-4 (1 + 2.8 * 2.50663 * 50.4004 * 0.997445) =
        6.4807. Effect 8: x = 11.2, e^-64 (1 + 11.2 * 2.50663 e^62.72) = 7.8057. Mean 7.1432."""
        decision = decide([3e-4, 4e-4], [], level=1 / 7.2, rules=RULES)
        assert decision.promise == pytest.approx(6.4807, abs=1e-3)
        assert decision.evidence == pytest.approx(7.1432, abs=1e-3)
        assert decision.verdict == "another pair"
        assert decide([3e-4, 4e-4], [], level=1 / 7.1, rules=RULES).verdict == "keep"

    def test_a_worse_candidate_is_discarded_after_a_pair(self) -> None:
        assert decide([-1e-9], [3e-4, -2e-4, 4e-4], level=0.05, rules=RULES).verdict == "discard"
        assert decide([-1e-9], [], level=0.05, rules=RULES).verdict == "discard"


class TestDecide:
    @pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
    def test_what_is_not_finite_discards(self, bad: float) -> None:
        better = [0.01, 0.011, 0.009, 0.0105, 0.01, 0.0101, 0.0102, 0.0099, 0.01, 0.0101]
        assert decide(better, [1e-4], level=5e-4, rules=RULES).verdict == "keep"
        for place in range(len(better)):
            decision = decide([*better[:place], bad, *better[place + 1 :]], [1e-4], level=5e-4, rules=RULES)
            assert (decision.verdict, decision.evidence) == ("discard", 0)

    def test_ends_after_the_most_pairs(self) -> None:
        small = [1.0, 0.2, 0.9, -0.1]  # promising, and never proven at this level
        assert decide(small[:3], [0.5], level=1e-6, rules=replace(RULES, most_pairs=4)).verdict == "another pair"
        assert decide(small, [0.5], level=1e-6, rules=replace(RULES, most_pairs=4)).verdict == "inconclusive"
        assert decide([1.0] * 20, [0.5], level=5e-4, rules=RULES).verdict == "keep"  # also with the last pair

    def test_do_nothing_edit_cannot_help_to_keep(self) -> None:
        """A do-nothing SD that is far too small makes an edit promising, and proves nothing."""
        noisy = [3.0, -1.0, 2.0, 4.0]
        evidence = {decide(noisy, noise, level=5e-4, rules=RULES).evidence for noise in ([1e-9] * 8, [1.0], [])}
        assert len(evidence) == 1
        assert decide(noisy, [1e-9] * 8, level=5e-4, rules=RULES).verdict == "another pair"


class TestLevels:
    def test_add_up_to_the_session(self) -> None:
        exact = sum(Fraction(100, (100 + earlier) * (101 + earlier)) for earlier in range(5000))
        assert exact == Fraction(5000, 5100)  # N / (N + 100): half after 100, all in the limit
        spent = [level_of_next(earlier, RULES) for earlier in range(5000)]
        assert sum(spent) == pytest.approx(0.05 * float(exact))
        assert sum(spent[:100]) == pytest.approx(0.025)

    def test_lord_and_saffron_as_published(self) -> None:
        """Against their definitions with loops, for a history with rejections and candidates."""
        rng = np.random.default_rng(0)
        p = rng.random((1, 30)) ** 3
        kept = p < 0.01
        rejected = [t for t in range(1, 31) if kept[0, t - 1]]
        assert len(rejected) > 2
        gamma, t = racing_nights.LORD_GAMMA, 31
        lord = 0.025 * gamma[t - 1] + 0.025 * gamma[t - rejected[0] - 1]
        lord += 0.05 * sum(gamma[t - time - 1] for time in rejected[1:])
        assert racing_nights.lord(kept, p) == pytest.approx(lord)
        gamma = racing_nights.SAFFRON_GAMMA
        candidates = [t for t in range(1, 31) if p[0, t - 1] <= 0.5]
        after = {time: sum(c > time for c in candidates) for time in [0, *rejected]}
        weights = {0: 0.025, rejected[0]: 0.025} | dict.fromkeys(rejected[1:], 0.05)
        saffron = sum(weight * gamma[t - time - after[time] - 1] for time, weight in weights.items())
        assert racing_nights.saffron(kept, p) == pytest.approx(min(0.5, 0.5 * saffron))
        for level in (racing_nights.lord, racing_nights.saffron, racing_nights.e_lond, racing_nights.alpha_investing):
            nothing = level(np.zeros((3, 0), dtype=bool), np.ones((3, 0)))
            assert nothing.shape == (3,)
            assert (nothing > 0).all()


class TestSeeds:
    def test_races_begin_with_each_starting_seed_in_turn(self) -> None:
        orders = [seed_order(earlier, RULES) for earlier in range(20)]
        assert [order[0] for order in orders] == [*range(10), *range(10)]
        assert all(sorted(order) == list(range(20)) for order in orders)
        assert orders[3] == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2, *range(10, 20)]

    def test_of_a_race_shorter_than_the_starting_seeds(self) -> None:
        assert seed_order(5, replace(RULES, most_pairs=4)) == [1, 2, 3, 0]


class TestNights:
    """The short form of `python tests/support/racing_nights.py`: fewer nights, so each bound has room for chance: the
    number seen would be this far off with a probability of 1 in 1,000 if the rate were just what is allowed."""

    NIGHTS = 250

    def test_races_are_decided_as_decide_says(self) -> None:
        nights = simulate(CHOSEN, Scenario(good=(1, 2, 4), share=0.5), nights=3, edits=40)
        for night, edit in np.ndindex(nights.kept.shape):
            noise, level = nights.do_nothing[night].tolist(), level_of_next(edit, RULES)
            differences = nights.differences[night, edit, : nights.pairs[night, edit]].tolist()
            verdicts = [decide(differences[:n], noise, level, RULES).verdict for n in range(1, len(differences) + 1)]
            assert set(verdicts[:-1]) <= {"another pair"}
            assert verdicts[-1] != "another pair"
            assert (verdicts[-1] == "keep") == nights.kept[night, edit]

    @pytest.mark.parametrize(
        "scenario",
        [Scenario(), Scenario(sd=2.0), Scenario(noise="heavy")],
        ids=["plain", "twice the SD", "heavy tails"],
    )
    def test_nights_without_effect_keep_nothing(self, scenario: Scenario) -> None:
        nights = simulate(CHOSEN, scenario, self.NIGHTS)
        assert nights.kept.any(axis=1).sum() <= scipy.stats.binom.ppf(0.999, self.NIGHTS, 0.05)

    @pytest.mark.parametrize(("do_nothing_pairs", "most"), [(8, 1.5), (5, 1.5), (3, 1.55)])
    def test_an_edit_without_effect_costs_a_pair_and_a_half(self, do_nothing_pairs: int, most: float) -> None:
        """In 6,000 nights it was 1.39, 1.43 and 1.49 pairs; the standard error of these nights is 0.02."""
        assert simulate(CHOSEN, Scenario(do_nothing_pairs=do_nothing_pairs), self.NIGHTS).pairs.mean() <= most

    def test_improvements_are_kept_and_harms_cost_a_pair(self) -> None:
        nights = simulate(CHOSEN, Scenario(good=(-2, 2), share=0.1), self.NIGHTS)
        improved = nights.kept[nights.effect == 2]
        assert improved.sum() >= scipy.stats.binom.ppf(0.001, improved.size, 0.8)
        assert not nights.kept[nights.effect == -2].any()
        assert nights.mean_pairs(-2) < 1.05
        assert nights.false_discovery_rate < 0.05

    def test_the_do_nothing_sd_taken_as_known_breaks_the_level(self) -> None:
        """The simulation can tell: what lost, loses here too."""
        plugged_in = next(method for method in METHODS if "known" in method.name)
        assert simulate(plugged_in, Scenario(), self.NIGHTS).false_nights > 80
