"""Racing: when pairs of runs are enough, and for what."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    Mutation(
        "every experiment has the level of the first", "lab/racing.py",
        "((half + earlier) * (half + earlier + 1))", "(half * (half + 1))",
        ["test_racing.py::TestLevels::test_add_up_to_the_session"],
    ),
    Mutation(
        "the do-nothing edit's SD helps to keep", "lab/racing.py",
        "evidence = float(e_value(differences, rules.effects))",
        "evidence = float(likelihood_ratio(differences, rules.effects[0], noise))",
        ["test_racing.py::TestDecide::test_do_nothing_edit_cannot_help_to_keep",
         "test_racing.py::TestRaceByHand::test_first_pair"],
    ),
    Mutation(
        "a candidate whose loss broke with one seed may be kept", "lab/racing.py",
        "if not np.isfinite(differences).all():", "if not np.isfinite(differences).any():",
        ["test_racing.py::TestDecide::test_what_is_not_finite_discards"],
    ),
    Mutation(
        "the do-nothing edit's differences are not degrees of freedom", "lab/racing.py",
        "log_terms = (count - 1) * np.log(v)", "log_terms = (pairs - 1) * np.log(v)",
        ["test_racing.py::TestLikelihoodRatio::test_integrates_the_sd_out_of_normal_densities",
         "test_racing.py::TestRaceByHand::test_first_pair"],
    ),
    Mutation(
        "all races begin with the same seed", "lab/racing.py",
        "first = earlier % min(rules.starting_seeds, rules.most_pairs)", "first = 0",
        ["test_racing.py::TestSeeds::test_races_begin_with_each_starting_seed_in_turn"],
    ),
]  # fmt: skip
