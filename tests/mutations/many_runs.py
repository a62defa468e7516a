"""Sweeps, ladders, and lists of runs."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    Mutation(
        "every seed of a sweep begins with the same variant", "lab/sweep.py",
        "variants[turn % len(variants) :] + variants[: turn % len(variants)]", "variants",
        ["test_sweep.py::TestPlan::test_every_seed_takes_the_variants_in_another_order"],
    ),
    Mutation(
        "a sweep that is resumed trains what failed again", "lab/sweep.py",
        "if run.name in failed or run.finished:", "if run.finished:",
        ["test_sweep.py::TestTraining::test_what_failed_is_a_result_until_it_shall_be_tried_again"],
    ),
    Mutation(
        "what a sweep's signal stopped is recorded as failed", "lab/sweep.py",
        "None if code == 0 or code in _STOPPED or stop.requested else code", "None if code == 0 else code",
        ["test_sweep.py::TestTraining::test_a_signal_ends_the_sweep_and_is_no_failure"],
    ),
    Mutation(
        "the interval of an irreducible term is of one standard error", "lab/ladder.py",
        "stats.t.ppf((1 + _LEVEL) / 2, freedom) * math.sqrt(variance)", "math.sqrt(variance)",
        ["test_ladder.py::test_its_interval_holds_the_true_term_19_times_in_20"],
    ),
]  # fmt: skip
