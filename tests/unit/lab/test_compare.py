"""Comparisons of runs with given curves: what is compared, and what is said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy  # its parts are imported where a test first needs them: `stats` takes a second
from written_runs import FLOPS_PER_TOKEN, write_run

from gptlab.lab.compare import Comparison, compare_runs, describe, rows_of, sentence
from gptlab.lab.contrast import Contrast, Row
from gptlab.lab.run_record import AXES, Curve, RunRecord, read_run
from gptlab.lab.statistics import paired_difference, unpaired_difference
from gptlab.runtime.records.run_directory import RunDirectory

STEPS = {"horizon__unit": "steps", "horizon__amount": 20}


def side(folder: Path, name: str, finals: Mapping[int, float], **fields: Any) -> list[RunRecord]:
    """A run of 20 steps for each {seed: final bpb}, which falls from 4 over the mean of both."""
    return [
        read_run(write_run(folder / f"{name}-{seed}", [4.0, 2 + final / 2, final], seed=seed, **{**STEPS, **fields}))
        for seed, final in finals.items()
    ]


def run(path: Path, bpb: Sequence[float], **fields: Any) -> RunRecord:
    return read_run(write_run(path, bpb, **{**STEPS, **fields}))


def exploded_at_once(path: Path, **fields: Any) -> RunRecord:
    """Without a validation before its first step, and so without any."""
    RunDirectory(write_run(path, [], status="running", **{**STEPS, **fields})).set_failed("the loss exploded", loss=9e9)
    return read_run(path)


def only(comparison: Comparison) -> Contrast:
    (contrast,) = comparison.contrasts
    return contrast


def row(comparison: Comparison, at: str) -> Row:
    return next(row for row in only(comparison).rows if row.at == at)


def test_three_pairs_by_hand(tmp_path: Path) -> None:
    """Differences -0.02, -0.02, -0.01: mean -1/60, standard deviation 0.01/sqrt(3), t = -5 with 2 degrees of freedom,
    of which the table says 4.303."""
    sides = {
        "A": side(tmp_path, "a", {1: 1.20, 2: 1.22, 3: 1.24}),
        "B": side(tmp_path, "b", {3: 1.23, 1: 1.18, 2: 1.20}, model__activation="gelu"),
    }
    comparison = compare_runs(sides)
    contrast = only(comparison)
    assert (comparison.at, contrast.verdict, comparison.warnings) == ("steps", "better", [])
    assert [one.amount for one in contrast.rows] == [20, 20_000, 20, 20_000 * FLOPS_PER_TOKEN, None]
    assert contrast.judged.baseline_bpb == pytest.approx(1.22)
    assert contrast.judged.candidate_bpb == pytest.approx(1.22 - 1 / 60)
    assert sentence(contrast) == "B is better than A by 0.0167 ± 0.0143 bpb at equal steps (3 paired seeds, p = 0.038)"
    lines = describe(comparison).replace(f"{tmp_path}/", "").splitlines()
    assert lines == [
        "A  a-1 and 2 more, seeds 1, 2, 3",
        "B  b-3 and 2 more, seeds 1, 2, 3",
        "",
        "field             A        B",
        'model.activation  "relu2"  "gelu"',
        "",
        "at equal   amount       A       B   difference, 95%      p",
        "steps          20  1.2200  1.2033  -0.0167 ± 0.0143  0.038",
        "tokens     20,000  1.2200  1.2033  -0.0167 ± 0.0143  0.038",
        "seconds      20.0  1.2200  1.2033  -0.0167 ± 0.0143  0.038",
        "FLOPs     1.2e+08  1.2200  1.2033  -0.0167 ± 0.0143  0.038",
        "the end            1.2200  1.2033  -0.0167 ± 0.0143  0.038",
        "",
        sentence(contrast),
    ]


def test_long_names_of_sides_are_no_headings(tmp_path: Path) -> None:
    names = {"a": "model.activation=relu2", "b": "model.activation=gelu"}
    comparison = compare_runs({long: side(tmp_path, name, {1: 1.2, 2: 1.1}) for name, long in names.items()})
    lines = describe(comparison).splitlines()
    place = lines.index(f"{names['b']} against {names['a']}")
    assert lines[place + 1].split() == ["at", "equal", "amount", "baseline", "candidate", "difference,", "95%", "p"]


class TestAmounts:
    def test_is_the_largest_that_all_reached_and_says_who_trains_on(self, tmp_path: Path) -> None:
        """B takes 1.5 seconds a step: at 20 seconds it is at step 13 1/3, a third between 2.6 and 1.2."""
        sides = {
            "A": [run(tmp_path / "a", [4.0, 3.0, 1.0])],
            "B": [run(tmp_path / "b", [4.0, 2.6, 1.2, 1.1], seconds_per_step=1.5)],
        }
        comparison = compare_runs(sides, "seconds")
        judged = only(comparison).judged
        assert (judged.at, judged.amount, judged.baseline_bpb) == ("seconds", 20, 1.0)
        assert judged.candidate_bpb == pytest.approx(2.6 - 1.4 / 3)
        assert row(comparison, "steps").candidate_bpb == 1.2
        assert row(comparison, "end").candidate_bpb == 1.1
        assert [one.before_end for one in only(comparison).rows] == [("B",)] * 4 + [()]
        assert [one.interpolated for one in only(comparison).rows] == [(), (), ("B",), (), ()]
        text = describe(comparison)
        assert "\nseconds: values of B are interpolated between two validations\n" in text
        assert "\nsteps, tokens, seconds, FLOPs: runs of B train beyond this, so their learning rate" in text

    def test_of_runs_that_end_within_one_step_are_their_final_values(self, tmp_path: Path) -> None:
        """21 and 20.2 seconds: a line from the validation at 10 steps would give A 1.04 at 20.2 seconds."""
        sides = {
            "A": [run(tmp_path / "a", [4.0, 2.0, 1.0], seconds_per_step=1.05)],
            "B": [run(tmp_path / "b", [4.0, 2.0, 1.0], seconds_per_step=1.01, model__bias=True)],
        }
        judged = only(compare_runs(sides, "seconds")).judged
        assert (judged.amount, judged.baseline_bpb, judged.candidate_bpb) == (20.2, 1.0, 1.0)
        assert judged.before_end == ()

    def test_of_a_validation_there_is_its_value(self, tmp_path: Path) -> None:
        """B trains for one step more, and validates at A's last one."""
        a = run(tmp_path / "a", [4.0, 3.0, 2.0], every_steps=1)
        b = run(tmp_path / "b", [4.0, 3.0, 2.0, 1.0], every_steps=1)
        comparison = compare_runs({"A": [a], "B": [b]}, "steps")
        for at in AXES:
            assert (row(comparison, at).candidate_bpb, row(comparison, at).before_end) == (2.0, ("B",))
        assert only(comparison).verdict == "identical"

    def test_flops_that_nobody_logged_are_unknown(self, tmp_path: Path) -> None:
        a, b = (run(tmp_path / name, [4.0, 2.0]) for name in "ab")
        lines = (b.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (b.path / "metrics.jsonl").write_text("".join(line for line in lines if '"eval"' in line))
        comparison = compare_runs({"A": [a], "B": [b]})
        flops = row(comparison, "flops")
        assert (flops.amount, flops.difference) == (None, None)
        assert f"FLOPs: ? since {b.path} logged no training step" in describe(comparison)
        assert row(comparison, "steps").difference is not None
        assert sentence(only(compare_runs({"A": [a], "B": [b]}, "flops"))).startswith(
            "B against A is unknown at equal FL"
        )

    def test_before_the_first_validation_nothing_is_known(self, tmp_path: Path) -> None:
        a, b = run(tmp_path / "a", [4.0, 2.0]), run(tmp_path / "b", [4.0, 3.0, 2.0, 1.0])
        lines = (b.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (b.path / "metrics.jsonl").write_text("".join(line for line in lines if '"step": 30' in line))
        steps = row(compare_runs({"A": [a], "B": [b]}), "steps")
        assert (steps.amount, steps.difference, steps.unknown) == (
            10,
            None,
            f"{b.path} has not validated between its start and this",
        )

    def test_no_line_is_drawn_from_weights_that_were_not_trained(self, tmp_path: Path) -> None:
        """A line from 4.0 to 1.0 would make B worse by 1.5 in the middle of its run."""
        a, b = run(tmp_path / "a", [4.0, 1.0]), run(tmp_path / "b", [4.0, 1.0], every_steps=20)
        steps = row(compare_runs({"A": [a], "B": [b]}), "steps")
        assert (steps.amount, steps.difference) == (10, None)
        assert steps.unknown == f"{b.path} has not validated between its start and this"
        started = run(tmp_path / "started", [4.0], status="running")
        comparison = compare_runs({"A": [started], "B": [b]}, "steps")
        assert row(comparison, "steps").candidate_bpb == 4.0
        assert sentence(only(comparison)).startswith("B and A have the same bpb before the first step, ")

    def test_a_run_that_has_not_finished_has_no_end(self, tmp_path: Path) -> None:
        a = run(tmp_path / "a", [4.0, 2.0, 1.0])
        b = run(tmp_path / "b", [4.0, 2.0], status="preempted")
        comparison = compare_runs({"A": [a], "B": [b]})
        assert row(comparison, "end").unknown == f"{b.path} has not finished"
        assert (row(comparison, "steps").amount, row(comparison, "steps").before_end) == (10, ("A", "B"))
        assert any("b has not finished" in warning for warning in comparison.warnings)


@pytest.mark.parametrize(
    ("units", "at"),
    [(("steps",) * 2, "steps"), (("seconds",) * 2, "seconds"), (("tokens_per_param",) * 2, "end"),
     (("steps", "seconds"), "end"), (("flops",) * 2, "flops")],
)  # fmt: skip
def test_the_verdict_is_of_what_the_length_is_counted_in(tmp_path: Path, units: tuple[str, str], at: str) -> None:
    a, b = (run(tmp_path / f"{n}", [4.0, 2.0], horizon__unit=unit) for n, unit in enumerate(units))
    assert compare_runs({"A": [a], "B": [b]}).at == at
    assert compare_runs({"A": [a], "B": [b]}, "tokens").at == "tokens"


def test_a_verdict_at_the_end_says_that_lengths_differ(tmp_path: Path) -> None:
    sides = {"A": side(tmp_path, "a", {1: 1.2, 2: 1.3}), "B": [
        run(tmp_path / f"b-{seed}", [4.0, 3.0, 2.0, bpb], seed=seed, horizon__amount=30)
        for seed, bpb in ((1, 1.0), (2, 1.1))
    ]}  # fmt: skip
    equal, end = compare_runs(sides), compare_runs(sides, "end")
    assert equal.at == "steps"
    assert equal.warnings == ["the sides have different lengths: --at end compares their final values"]
    assert end.warnings == ["the sides have different lengths: their budgets differ at the end"]
    assert sentence(only(end)).startswith(
        "B is better than A by 0.2000 ± 0.0000 bpb at the end of runs of different le"
    )
    same = compare_runs({name: side(tmp_path, f"same-{name}", {1: 1.2, 2: 1.3}) for name in "AB"}, "end")
    assert same.warnings == []
    assert sentence(only(same)).startswith("B and A have the same bpb at the end,")


class TestSeeds:
    @pytest.mark.parametrize(
        ("a", "b", "pairs"),
        [([1, 2, 3], [3, 2, 1], 3), ([1, 2, 3], [2, 3, 4], 2), ([1, 2, 3, 4, 5], [4, 5], 2), ([1, 2], [2, 3], 0),
         ([1, 2, 3, 4, 5], [4, 5, 6, 7, 8], 0), ([1, 2], [3, 4], 0), ([1], [1], 1), ([1, 2, 3], [2], 0), ([1], [2], 0)],
    )  # fmt: skip
    def test_that_match_are_paired(self, tmp_path: Path, a: list[int], b: list[int], pairs: int) -> None:
        sides = {
            "A": side(tmp_path, "a", {seed: 1 + seed**2 / 100 for seed in a}),
            "B": side(tmp_path, "b", {seed: 1.1 + seed / 100 for seed in b}),
        }
        judged = only(compare_runs(sides)).judged
        common = sorted({*a} & {*b})
        expected = (
            paired_difference([1 + s**2 / 100 for s in common], [1.1 + s / 100 for s in common])
            if pairs
            else unpaired_difference([1 + s**2 / 100 for s in a], [1.1 + s / 100 for s in b])
        )
        assert judged.difference is not None
        assert judged.difference.pairs == pairs
        assert repr(judged.difference) == repr(expected)  # NaN is equal to itself there
        assert judged.seeds == (len(a), len(b))

    def test_without_a_partner_are_mentioned(self, tmp_path: Path) -> None:
        sides = {"A": side(tmp_path, "a", {1: 1.2, 2: 1.1, 3: 1.0}), "B": side(tmp_path, "b", {1: 1.2, 2: 1.0})}
        assert "\n1 seed without a partner on the other side: not compared\n" in describe(compare_runs(sides))

    def test_repeated_within_a_side_are_one_value(self, tmp_path: Path) -> None:
        a = side(tmp_path, "a", {1: 1.0, 2: 1.2}) + side(tmp_path, "again", {1: 1.1})
        b = side(tmp_path, "b", {1: 1.0, 2: 1.1})
        judged = only(compare_runs({"A": a, "B": b})).judged
        assert judged.difference == paired_difference([1.05, 1.2], [1.0, 1.1])

    def test_of_one_run_a_side_say_nothing_about_noise(self, tmp_path: Path) -> None:
        contrast = only(compare_runs({"A": side(tmp_path, "a", {1: 1.2}), "B": side(tmp_path, "b", {1: 1.1})}))
        assert (contrast.verdict, contrast.seeds_needed) == ("undecided", None)
        assert sentence(contrast) == "one run a side says nothing about noise: B - A is -0.1000 bpb at equal steps"
        two = only(compare_runs({"A": side(tmp_path, "c", {1: 1.2, 2: 1.3}), "B": side(tmp_path, "d", {7: 1.1})}))
        assert sentence(two).startswith("one run of B says nothing about noise")

    def test_that_would_be_needed(self, tmp_path: Path) -> None:
        noise = {1: 0.02, 2: -0.02, 3: 0.01, 4: -0.008}
        sides = {
            "A": side(tmp_path, "a", dict.fromkeys(noise, 1.0)),
            "B": side(tmp_path, "b", {seed: 1 + own for seed, own in noise.items()}),
        }
        contrast = only(compare_runs(sides))
        assert contrast.verdict == "undecided"
        assert contrast.seeds_needed is None
        assert sentence(contrast) == (
            "B is not distinguishable from A: +0.0005 ± 0.0285 bpb at equal steps (4 paired seeds, p = 0.96); "
            "more than 10,000 seeds would be needed"
        )
        apart = {"A": sides["A"], "B": side(tmp_path, "c", {seed + 9: 1.005 + own for seed, own in noise.items()})}
        assert sentence(only(compare_runs(apart))).endswith("; about 86 seeds a side would be needed")

    def test_without_any_noise(self, tmp_path: Path) -> None:
        finals = {1: 1.2, 2: 1.1}
        contrast = only(compare_runs({"A": side(tmp_path, "a", finals), "B": side(tmp_path, "b", finals)}))
        assert contrast.verdict == "identical"
        assert sentence(contrast) == "B and A have the same bpb at equal steps, to the last bit (2 paired seeds)"
        one = only(compare_runs({"A": side(tmp_path, "c", {1: 1.2}), "B": side(tmp_path, "d", {1: 1.2})}))
        assert sentence(one) == "B and A have the same bpb at equal steps, to the last bit (1 paired seed)"
        other = only(compare_runs({"A": side(tmp_path, "e", {1: 1.2}), "B": side(tmp_path, "f", {2: 1.2})}))
        assert other.verdict == "undecided"


class TestBrokenRuns:
    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    def test_are_worse_than_all_and_never_averaged_away(self, tmp_path: Path, broken: float) -> None:
        sides = {
            "A": side(tmp_path, "a", {1: 1.2, 2: 1.3, 3: 1.2}),
            "B": side(tmp_path, "b", {1: 1.0, 2: broken, 3: 1.0}),
        }
        comparison = compare_runs(sides)
        contrast = only(comparison)
        assert (contrast.verdict, contrast.judged.candidate_bpb) == ("broken", math.inf)
        assert sentence(contrast) == (
            f"no mean at equal steps, since 0 of 3 runs of A and 1 of 3 runs of B broke: {sides['B'][1].path}"
        )
        assert "broken" in describe(comparison)
        assert next(rows_of(comparison))["p_value"] is None
        assert only(compare_runs({"A": sides["B"], "B": sides["A"]})).verdict == "broken"

    def test_that_exploded_earlier_do_not_hold_up_the_others(self, tmp_path: Path) -> None:
        """Without the exploded run's early end, all could be compared at its step 10 only."""
        sides = {"A": side(tmp_path, "a", {1: 1.2, 2: 1.3}), "B": side(tmp_path, "b", {1: 1.0})}
        exploded = write_run(tmp_path / "exploded", [4.0, 3.0], seed=2, **STEPS)
        RunDirectory(exploded).set_failed("the loss exploded", step=12, loss=200.0)
        sides["B"].append(read_run(exploded))
        comparison = compare_runs(sides)
        assert (row(comparison, "steps").amount, row(comparison, "end").candidate_bpb) == (20, math.inf)
        assert only(comparison).judged.broken == (str(exploded),)

    def test_that_exploded_before_they_validated_count_too(self, tmp_path: Path) -> None:
        sides = {"A": side(tmp_path, "a", {1: 1.2, 2: 1.3}), "B": side(tmp_path, "b", {1: 1.0})}
        exploded = exploded_at_once(tmp_path / "exploded", seed=2)
        comparison = compare_runs({**sides, "B": [*sides["B"], exploded]})
        assert (only(comparison).verdict, row(comparison, "steps").amount) == ("broken", 20)
        assert {one.candidate_bpb for one in only(comparison).rows} == {math.inf}
        assert comparison.warnings == [
            f"{exploded.path} has not finished (its status is failed): it has not validated"
        ]  # fmt: skip
        assert only(compare_runs({"A": [exploded], "B": sides["B"]})).verdict == "broken"
        again = exploded_at_once(tmp_path / "again", seed=1)
        assert only(compare_runs({"A": [exploded], "B": [again]})).judged.unknown == "every run is broken"

    def test_count_where_their_seed_has_no_partner(self, tmp_path: Path) -> None:
        sides = {
            "A": side(tmp_path, "a", {1: 1.2, 2: 1.3}),
            "B": side(tmp_path, "b", {1: 1.0, 2: 1.1, 3: math.nan}),
        }
        contrast = only(compare_runs(sides))
        assert (contrast.verdict, contrast.judged.candidate_bpb) == ("broken", math.inf)

    def test_count_until_they_break(self, tmp_path: Path) -> None:
        a = [run(tmp_path / "a", [4.0, 3.0], horizon__amount=10)]
        b = [run(tmp_path / "b", [4.0, 2.5, math.nan])]
        judged = only(compare_runs({"A": a, "B": b})).judged
        assert (judged.amount, judged.candidate_bpb, judged.broken) == (10, 2.5, ())

    def test_on_all_sides_leave_nothing(self, tmp_path: Path) -> None:
        contrast = only(compare_runs({s: side(tmp_path, s, {1: math.nan}) for s in "AB"}))
        assert (contrast.verdict, contrast.judged.unknown) == ("unknown", "every run is broken")

    def test_that_failed_for_another_reason_are_unfinished(self, tmp_path: Path) -> None:
        a, b = (run(tmp_path / name, [4.0, 2.0]) for name in "ab")
        b.directory.set_failed("No space left on device")
        comparison = compare_runs({"A": [a], "B": [read_run(b.path)]})
        assert row(comparison, "end").unknown == f"{b.path} has not finished"
        assert row(comparison, "steps").candidate_bpb == 2.0


def test_several_candidates_are_adjusted_by_holm(tmp_path: Path) -> None:
    finals = np.random.default_rng(3).normal(1, 0.01, size=(4, 5)) - [[0], [0.02], [0.012], [0]]
    sides = {
        name: side(tmp_path, name, dict(enumerate(own.tolist())), model__n_layer=1 + n)
        for n, (name, own) in enumerate(zip("ABCD", finals, strict=True))
    }
    comparison = compare_runs(sides)
    p = [scipy.stats.ttest_rel(own, finals[0]).pvalue for own in finals[1:]]
    order = np.argsort(p)
    by_hand = np.maximum.accumulate(np.minimum(1, np.array(p)[order] * [3, 2, 1]))
    assert [comparison.contrasts[place].p_adjusted for place in order] == pytest.approx(by_hand)
    assert {(one.baseline, one.candidate) for one in comparison.contrasts} == {("A", name) for name in "BCD"}
    assert all("after Holm for 3 comparisons)" in sentence(one) for one in comparison.contrasts)
    assert "p-values of the tables are not adjusted" in describe(comparison)


def ladder(folder: Path, name: str, scale: Mapping[int, float], **fields: Any) -> list[RunRecord]:
    """Runs of 1, 2, 4 and 8 layers that follow bpb = scale * FLOPs^-0.1 for each {seed: scale}."""
    runs = []
    for layers in (1, 2, 4, 8):
        flops_per_token = 1_000 * layers**2
        for seed, factor in scale.items():
            bpb = [4.0, factor * (20_000 * flops_per_token) ** -0.1]
            runs.append(
                run(folder / f"{name}-{layers}-{seed}", bpb, every_steps=20, flops_per_token=flops_per_token, seed=seed,
                    model__n_layer=layers, **fields)
            )  # fmt: skip
    return runs


class TestComputeMultiplier:
    def test_of_power_laws(self, tmp_path: Path) -> None:
        """b F^-0.1 = a G^-0.1 at G = F (a / b)^10. A line over ln FLOPs, h = ln 4 long, is above the convex curve by at
        most 0.1^2 h^2 / 8 of the bpb, which falls by 0.1 of it per unit of ln G: G is at most 0.1 h^2 / 8 = 2.4% too
        large. The largest candidate would need a larger baseline than there is."""
        ratios = {1: 1.05, 2: 1.06, 3: 1.07}
        sides = {
            "A": ladder(tmp_path, "a", dict.fromkeys(ratios, 8.0)),
            "B": ladder(tmp_path, "b", {seed: 8.0 / ratio for seed, ratio in ratios.items()}, model__bias=True),
        }
        comparison = compare_runs(sides)
        logs = 10 * np.log([*ratios.values()])
        half = scipy.stats.t.ppf(0.975, 2) * logs.std(ddof=1) / math.sqrt(3)
        *inside, largest = comparison.multipliers
        assert [one.size for one in inside] == ["1 layer, width 256", "2 layers, width 256", "4 layers, width 256"]
        for one in inside:
            assert one.multiplier == pytest.approx(math.exp(logs.mean()), rel=0.024)
            assert (one.low, one.high) == pytest.approx(
                (math.exp(logs.mean() - half), math.exp(logs.mean() + half)), rel=0.03
            )
            assert (one.seeds, one.unknown) == (3, None)
        assert math.isnan(largest.multiplier)
        assert largest.unknown is not None
        assert "is outside of the baseline's" in largest.unknown
        assert "compute multiplier" in describe(comparison)
        assert [one.size for one in comparison.contrasts] == [one.size for one in comparison.multipliers]
        assert len({one.judged.amount for one in comparison.contrasts}) == 1
        assert sentence(comparison.contrasts[0]).startswith("1 layer, width 256: B is better than A by")

    def test_of_one_seed_has_no_interval(self, tmp_path: Path) -> None:
        sides = {"A": ladder(tmp_path, "a", {5: 8.0}), "B": ladder(tmp_path, "b", {5: 7.6}, model__bias=True)}
        one = compare_runs(sides).multipliers[0]
        assert one.multiplier == pytest.approx((8 / 7.6) ** 10, rel=0.024)
        assert math.isnan(one.low)
        assert math.isnan(one.high)

    def test_is_unknown_where_the_baseline_does_not_say(self, tmp_path: Path) -> None:
        a, b = ladder(tmp_path, "a", {1: 8.0}), ladder(tmp_path, "b", {1: 7.6})
        others = ladder(tmp_path, "c", {2: 7.6})
        worse = [
            *a[:2],
            run(tmp_path / "worse", [4.0, 3.0], every_steps=20, flops_per_token=16_000, model__n_layer=4, seed=1),
        ]
        broken = [*a[:2], run(tmp_path / "broken", [4.0, math.nan], flops_per_token=16_000, model__n_layer=4, seed=1)]

        def why(baseline: list[RunRecord], candidate: list[RunRecord]) -> str | None:
            return compare_runs({"A": baseline, "B": candidate}).multipliers[0].unknown

        assert why(a, others) == "no seed is finished in this size and in all of the baseline"
        assert why(worse, b) == "with seed 1, the baseline does not get better with every size"
        assert why(broken, b) == "with seed 1, a run is broken, or its FLOPs are unknown"
        at_once = [*a[:2], exploded_at_once(tmp_path / "at-once", model__n_layer=4, seed=1)]
        assert why(at_once, b) == "with seed 1, a run is broken, or its FLOPs are unknown"
        assert why(b, a) is not None  # B's smallest size is worse than all of A's
        one = compare_runs({"A": a, "B": b[:1]})
        assert (one.multipliers, one.contrasts[0].size) == ([], "1 layer, width 256")
        alone = "2 layers, width 256; 4 layers, width 256; 8 layers, width 256"
        assert f"only one of A and B has {alone}: sizes are compared one by one" in one.warnings

    def test_needs_no_common_size(self, tmp_path: Path) -> None:
        a, b = ladder(tmp_path, "a", {1: 8.0}), ladder(tmp_path, "b", {1: 7.6}, model__n_embd=128)
        comparison = compare_runs({"A": a, "B": b})
        assert comparison.contrasts == []
        assert comparison.multipliers[0].unknown is None
        assert "no size is on both sides" in describe(comparison)


class TestFalsePositives:
    """Sides that differ by noise alone, seeds by 0.0018 and the two runs of a pair by 0.0003 bpb, as measured."""

    @staticmethod
    def record(name: str, seed: int, bpb: float) -> RunRecord:
        """A finished run that was not written."""
        made = RunRecord(RunDirectory(Path(name)), {"seed": seed, "horizon.unit": "steps"})
        curve = Curve({axis: np.array([0.0, 20.0]) for axis in AXES}, np.array([4.0, bpb]))
        vars(made).update(curve=curve, provenance={"status": "finished"})
        return made

    def rate(self, comparisons: int, *, first_seeds: tuple[int, int]) -> float:
        draws, found = np.random.default_rng(11), 0
        for _ in range(comparisons):
            values = draws.normal(1.2, 0.0018, size=5) + draws.normal(0, 0.0003, size=(2, 5))
            sides = {
                name: [self.record(f"{name}{n}", first + n, value) for n, value in enumerate(own)]
                for name, first, own in zip("AB", first_seeds, values.tolist(), strict=True)
            }
            found += only(compare_runs(sides)).verdict in ("better", "worse")
        return found / comparisons

    def test_are_one_in_twenty(self) -> None:
        """Of 500 comparisons, the share has a standard deviation of 0.0097, of which 0.035 is 3.6."""
        assert self.rate(500, first_seeds=(0, 0)) == pytest.approx(0.05, abs=0.035)

    def test_are_rarer_where_pairs_are_not_known(self) -> None:
        """What the two sides share makes them more alike than Welch's test expects."""
        assert self.rate(100, first_seeds=(0, 9)) < 0.05
