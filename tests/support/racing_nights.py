"""Simulated nights of the lab: how often each way of judging keeps what has no effect, and what has one.

`python tests/support/racing_nights.py` prints the tables of docs/lab.md, in two to four minutes.

Everything is in units of the paired SD of the do-nothing edit. A run is its edit's quality plus noise of its own; what
a seed does to baseline and candidate alike cancels in the difference. All experiments against one baseline, and the
do-nothing edit, share the baseline's runs, so that a lucky baseline makes a whole night of edits look bad.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import scipy  # its parts are imported where a test first needs them: `stats` takes a second
from numpy.typing import NDArray

from gptlab.lab.racing import (
    PROMOTION,
    PROMOTION_LEVEL,
    RaceRules,
    e_value,
    level_of_next,
    likelihood_ratio,
    seed_order,
)

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]
Integers = NDArray[np.int64]

RULES = RaceRules()
ALPHA = RULES.false_keep_probability
SEED = 13


# --- levels: what the next experiment may spend, from verdicts (nights, earlier) and p-values (nights, earlier)

Level = Callable[[Booleans, Floats], Floats]


def spending(kept: Booleans, p: Floats) -> Floats:
    return np.full(len(kept), level_of_next(kept.shape[1], RULES))


def e_lond(kept: Booleans, p: Floats) -> Floats:
    """Xu and Ramdas (2024), Online multiple testing with e-values."""
    return spending(kept, p) * (1 + kept.sum(axis=1))


LORD_GAMMA = np.array([math.log(max(j, 2)) / (j * math.exp(math.sqrt(math.log(j)))) for j in range(1, 1_000)])
LORD_GAMMA *= 0.0722  # the published constant; the infinite sum is 1


def lord(kept: Booleans, p: Floats) -> Floats:
    """LORD++ with the published sequence and an initial wealth of half the level: Ramdas, Yang, Wainwright and Jordan
    (2017), Online control of the false discovery rate with decaying memory."""
    t, wealth = kept.shape[1] + 1, ALPHA / 2
    earned = kept * LORD_GAMMA[t - 2 :: -1][: t - 1]  # gamma(t - time of the rejection)
    first = np.take_along_axis(earned, kept.argmax(axis=1)[:, None], axis=1)[:, 0] if t > 1 else 0.0
    return LORD_GAMMA[t - 1] * wealth + ALPHA * earned.sum(axis=1) - wealth * first


SAFFRON_GAMMA = np.arange(1, 1_000) ** -1.6 / 2.2858  # zeta(1.6)


def saffron(kept: Booleans, p: Floats, candidate: float = 0.5) -> Floats:
    """Ramdas, Zrnic, Wainwright and Jordan (2018), with its published defaults."""
    t, wealth = kept.shape[1] + 1, ALPHA / 2
    candidates = p <= candidate
    later = candidates.sum(axis=1, keepdims=True) - candidates.cumsum(axis=1)  # (nights, earlier): after each
    earned = kept * SAFFRON_GAMMA[t - 2 - np.arange(t - 1) - later]
    first = np.take_along_axis(earned, kept.argmax(axis=1)[:, None], axis=1)[:, 0] if t > 1 else 0.0
    started = SAFFRON_GAMMA[t - 1 - candidates.sum(axis=1)]
    level = (1 - candidate) * (wealth * started + ALPHA * earned.sum(axis=1) - wealth * first)
    return np.minimum(candidate, level)


def alpha_investing(kept: Booleans, p: Floats) -> Floats:
    """Foster and Stine (2008), their policy for discoveries that come in clusters."""
    wealth, since = np.full(len(kept), ALPHA * (1 - ALPHA)), np.zeros(len(kept))
    for keep in kept.T:
        bid = wealth / (2 + since)
        wealth = np.where(keep, wealth + ALPHA, wealth - bid / (1 - bid))
        since = np.where(keep, 0, since + 1)
    return wealth / (2 + since)


# --- evidence: a p-value of each race, from differences (races, pairs) and the do-nothing edit's (races, m)

Evidence = Callable[[Floats, Floats], Floats]


def own_e_value(differences: Floats, noise: Floats) -> Floats:
    return 1 / e_value(differences, RULES.effects)


def pooled_e_value(differences: Floats, noise: Floats) -> Floats:
    return 1 / np.mean([likelihood_ratio(differences, effect, noise) for effect in RULES.effects], axis=0)


def plugged_in(differences: Floats, noise: Floats) -> Floats:
    """Wald's likelihood ratio, as if the do-nothing SD were the SD."""
    z = differences.sum(axis=1) / np.sqrt(np.square(noise).mean(axis=1))
    return np.exp(np.minimum(differences.shape[1] * 2.0 - 2.0 * z, 0.0))


def t_test_at_the_end(differences: Floats, noise: Floats) -> Floats:
    pairs = differences.shape[1]
    if pairs < 12:
        return np.ones(len(differences))
    t = differences.mean(axis=1) / differences.std(axis=1, ddof=1) * math.sqrt(pairs)
    return scipy.stats.t.sf(t, pairs - 1)


def any_gain(differences: Floats, noise: Floats) -> Floats:
    return np.where(differences[:, 0] > 0, 0.0, 1.0)


@dataclass(frozen=True)
class Method:
    name: str
    evidence: Evidence = own_e_value
    level: Level = spending
    rules: RaceRules = RULES


CHOSEN = Method("**own SD, alpha-spending** (gptlab)")
METHODS = (
    Method("one pair, the lower is kept", any_gain, rules=replace(RULES, most_pairs=1, starting_seeds=1)),
    Method("do-nothing SD taken as known, spending", plugged_in),
    Method("do-nothing SD pooled, spending", pooled_e_value),
    Method("own SD, t-test after 12 pairs, spending", t_test_at_the_end, rules=replace(RULES, most_pairs=12)),
    CHOSEN,
    Method("own SD, e-LOND", level=e_lond),
    Method("own SD, LORD++", level=lord),
    Method("own SD, SAFFRON", level=saffron),
    Method("own SD, alpha-investing", level=alpha_investing),
)


# --- nights

Noise = Literal["normal", "heavy", "skewed"]


@dataclass(frozen=True)
class Scenario:
    good: Sequence[float] = ()
    """Effects, in paired SDs of the do-nothing edit, of the edits that have one: each edit has one of them with the
    probability `share`, else none."""
    share: float = 0.05
    sd: float = 1.0
    """Paired SD of an edit."""
    noise: Noise = "normal"
    """Of a run, always with the same SD. Heavy: Student's t with 3 degrees of freedom. Skewed: of candidates,
    exponential, so that a few are much worse."""
    do_nothing_pairs: int = 5
    shared: bool = True
    """Experiments share the baseline's runs, and the winner's are the next baseline's. Otherwise every pair is two."""


@dataclass(frozen=True)
class Nights:
    """Arrays of (nights, edits)."""

    effect: Floats
    kept: Booleans
    pairs: Integers
    baseline_runs: Integers
    """Runs of the baseline that no earlier experiment had made."""
    differences: Floats
    """(nights, edits, most pairs), in the order of the race."""
    do_nothing: Floats
    """(nights, do-nothing pairs)."""

    @property
    def false_nights(self) -> float:
        """Of 1,000: in which something without effect was kept."""
        return float(1000 * (self.kept & (self.effect <= 0)).any(axis=1).mean())

    @property
    def false_discovery_rate(self) -> float:
        """Mean over all nights of the share of kept edits that have no effect."""
        return float(((self.kept & (self.effect <= 0)).sum(axis=1) / np.maximum(self.kept.sum(axis=1), 1)).mean())

    @property
    def runs(self) -> float:
        """Of a night."""
        return float((self.pairs + self.baseline_runs).sum(axis=1).mean())

    def power(self, effect: float) -> float:
        return float(self.kept[self.effect == effect].mean())

    def mean_pairs(self, effect: float) -> float:
        return float(self.pairs[self.effect == effect].mean())

    def mean_pairs_of_kept(self, effect: float) -> float:
        return float(self.pairs[(self.effect == effect) & self.kept].mean())


def simulate(method: Method, scenario: Scenario, nights: int = 1000, edits: int = 100, seed: int = SEED) -> Nights:
    rng = np.random.default_rng(seed)
    most, m = method.rules.most_pairs, scenario.do_nothing_pairs
    seeds = max(most, m)

    def runs(variance: float = 0.5, *, candidate: bool = False) -> Floats:
        shape = (nights, seeds)
        if scenario.noise == "heavy":
            values = rng.standard_t(3, shape) / math.sqrt(3)
        elif scenario.noise == "skewed" and candidate:
            values = 1 - rng.standard_exponential(shape)
        else:
            values = rng.standard_normal(shape)
        return values * math.sqrt(variance)

    effect = np.zeros((nights, edits))
    if scenario.good:
        has_one = rng.random(effect.shape) < scenario.share
        effect[has_one] = rng.choice(scenario.good, has_one.sum())
    baseline = runs()
    do_nothing = (runs() - baseline)[:, :m]
    trained = np.broadcast_to(np.arange(seeds) < m, baseline.shape)
    kept, p = np.zeros(effect.shape, dtype=bool), np.ones(effect.shape)
    pairs, baseline_runs = np.zeros(effect.shape, dtype=np.int64), np.zeros(effect.shape, dtype=np.int64)
    differences = np.zeros((*effect.shape, most))
    for edit in range(edits):
        order = seed_order(edit, method.rules)
        candidate = runs(scenario.sd**2 - 0.5, candidate=True)
        differences[:, edit] = (candidate - baseline)[:, order] + effect[:, edit : edit + 1]
        level = method.level(kept[:, :edit], p[:, :edit])
        kept[:, edit], pairs[:, edit], p[:, edit] = race(method, differences[:, edit], do_nothing, level)

        used = np.zeros(baseline.shape, dtype=bool)
        used[:, order] = np.arange(most) < pairs[:, edit : edit + 1]
        won = kept[:, edit : edit + 1]
        if scenario.shared:
            baseline_runs[:, edit] = (used & ~trained).sum(axis=1)
            trained = np.where(won, used, trained | used)
            baseline = np.where(won, candidate, baseline)
        else:
            baseline_runs[:, edit] = pairs[:, edit]
            baseline = runs()
    return Nights(effect, kept, pairs, baseline_runs, differences, do_nothing)


def race(method: Method, differences: Floats, do_nothing: Floats, level: Floats) -> tuple[Booleans, Integers, Floats]:
    """Many races at once: whether each edit was kept, after how many pairs, and its smallest p-value.

    Args:
        differences: (races, most pairs).
        do_nothing: (races, m).
        level: (races,).
    """
    kept, pairs = np.zeros(len(differences), dtype=bool), np.zeros(len(differences), dtype=np.int64)
    p, live = np.ones(len(differences)), np.arange(len(differences))
    for n in range(1, method.rules.most_pairs + 1):
        seen, noise = differences[live, :n], do_nothing[live]
        pairs[live] = n
        p[live] = np.minimum(p[live], method.evidence(seen, noise))
        kept[live] = p[live] <= level[live]
        promise = likelihood_ratio(seen, method.rules.effects[0], noise)
        live = live[~kept[live] & (promise >= method.rules.futility)]
        if not len(live):
            break
    return kept, pairs, p


# --- tables


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of_methods() -> str:
    def row(method: Method) -> list[str]:
        null, wide, heavy = (simulate(method, s) for s in (Scenario(), Scenario(sd=2), Scenario(noise="heavy")))
        mixed = simulate(method, Scenario(good=(1, 2, 4)))
        return [
            method.name, *(f"{nights.false_nights:.0f}" for nights in (null, wide, heavy)),
            *(f"{mixed.power(effect):.0%}" for effect in (1, 2, 4)), f"{null.mean_pairs(0):.2f}",
            f"{mixed.mean_pairs_of_kept(2):.1f}", f"{mixed.false_discovery_rate:.1%}", f"{mixed.runs:.0f}",
        ]  # fmt: skip

    heads = ["method", "no effect", "... 2 x SD", "... heavy tails", "1 SD", "2 SD", "4 SD", "pairs, no effect"]
    return markdown([*heads, "pairs, 2 SD kept", "false among kept", "runs"], map(row, METHODS))


NIGHTS_OF_CHOSEN = {
    "5 do-nothing pairs": Scenario(),
    "3 do-nothing pairs": Scenario(do_nothing_pairs=3),
    "8 do-nothing pairs": Scenario(do_nothing_pairs=8),
    "edits: 2 x SD": Scenario(sd=2),
    "edits: 4.7 x SD (unpaired seeds)": Scenario(sd=4.7),
    "heavy tails": Scenario(noise="heavy"),
    "skewed": Scenario(noise="skewed"),
    "no run is shared": Scenario(shared=False),
    "all races begin with one seed": Scenario(),
}


def table_of_chosen() -> str:
    def row(named: tuple[str, Scenario]) -> list[str]:
        name, scenario = named
        method = replace(CHOSEN, rules=replace(RULES, starting_seeds=1)) if "begin" in name else CHOSEN
        null = simulate(method, scenario)
        mixed = simulate(method, replace(scenario, good=(-2, 1, 2, 4)))
        good = simulate(method, replace(scenario, good=(2,)))
        return [
            name, f"{null.false_nights:.0f}", f"{mixed.power(1):.0%}", f"{good.power(2):.0%}", f"{mixed.power(4):.0%}",
            f"{null.mean_pairs(0):.2f}", f"{mixed.mean_pairs(-2):.2f}", f"{mixed.power(-2):.0%}", f"{good.runs:.0f}",
        ]  # fmt: skip

    heads = ["nights", "no effect", "1 SD", "2 SD", "4 SD", "pairs, no effect", "pairs, -2 SD", "-2 SD", "runs"]
    return markdown(heads, map(row, NIGHTS_OF_CHOSEN.items()))


def races(method: Method, effect: float, level: float, count: int = 20_000) -> tuple[Booleans, Integers, Floats]:
    """Races of one effect at one level, no run shared: kept, pairs, and the mean difference at the end."""
    rng = np.random.default_rng(SEED)
    differences = rng.standard_normal((count, method.rules.most_pairs)) + effect
    kept, pairs, _ = race(method, differences, rng.standard_normal((count, 5)), np.full(count, level))
    return kept, pairs, differences.cumsum(axis=1)[np.arange(count), pairs - 1] / pairs


def table_of_age() -> str:
    def row(earlier: int) -> list[str]:
        level = level_of_next(earlier, RULES)
        found = [races(CHOSEN, effect, level)[:2] for effect in (1, 2, 4, 10)]
        return [
            f"{earlier:,}",
            f"{level:.1e}",
            *(f"{kept.mean():.0%}, {pairs[kept].mean():.1f}" for kept, pairs in found),
        ]

    heads = ["experiments before", "level", *(f"{effect} SD: kept, pairs" for effect in (1, 2, 4, 10))]
    return markdown(heads, map(row, (0, 100, 300, 1000, 3000)))


def table_of_promotion() -> str:
    def row(effect: float) -> list[str]:
        winners, _, raced = races(CHOSEN, effect, level_of_next(50, RULES))
        kept, pairs, fresh = races(Method("promotion", rules=PROMOTION), effect, PROMOTION_LEVEL)
        shown = f"{raced[winners].mean():.2f}" if winners.sum() >= 100 else "-"
        return [f"{effect:g} SD", f"{kept.mean():.1%}", f"{pairs.mean():.1f}", shown, f"{fresh.mean():.2f}"]

    heads = ["effect", "promoted", "pairs", "mean difference in the race, if kept", "mean difference in the promotion"]
    return markdown(heads, map(row, (0, 1, 2, 4)))


if __name__ == "__main__":
    for table in (table_of_methods, table_of_chosen, table_of_age, table_of_promotion):
        print(table(), end="\n\n", flush=True)
