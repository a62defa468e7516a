"""Reports: metrics thinned, pages of untrusted text."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    Mutation(
        "a chart has no dips, only peaks", "report/curves.py",
        "for sign in (1, -1):", "for sign in (-1, -1):",
        ["test_curves.py::TestThinning::test_keeps_first_last_and_every_extreme"],
    ),
    Mutation(
        "steps that a rewind has undone are drawn", "report/curves.py",
        "steps[:-1] < lowest_after[1:]", "steps[:-1] < np.inf",
        ["test_curves.py::TestReading::test_of_a_step_that_was_repeated_the_later_line_counts"],
    ),
    Mutation(
        "the charts' JSON can end its script", "report/page.py",
        '.replace("<", "\\\\u003c")', "",
        ["test_report_pages.py::TestUntrusted::test_is_text_in_the_page"],
    ),
    Mutation(
        "a field of another name is read as the recorder's", "report/curves.py",
        "if not lines or (fields == len(_FIELDS) and frame != _FRAME * lines):", "if not lines:",
        ["test_curves.py::TestReading::test_a_line_that_is_almost_the_recorders_is_not_misread"],
    ),
    Mutation(
        "the prompt box ignores top-p", "app/prompt_answers.py",
        'top_p=asked["top_p"], ', "",
        ["test_prompt_answers.py::test_top_p_and_min_p_are_those_of_the_question"],
    ),
    Mutation(
        "the tour multiplies nats by ln 2", "report/tour.py",
        "bits = last.loss / math.log(2)", "bits = last.loss * math.log(2)",
        ["test_tour.py::test_it_has_the_numbers_of_the_run"],
    ),
    Mutation(
        "a run that fails leaves no report", "app/run/run_session.py",
        "        if isinstance(error, TrainingFailed):\n", "        if False:\n",
        ["test_report_at_end.py::test_a_run_that_ends_early_leaves_its_report_to_another_process"],
    ),
    Mutation(
        "cropped rows are read again in each epoch", "report/token_fate.py",
        'kind = "cropped"', "pass",
        ["test_token_fate.py::test_cropped_rows_are_new_ones_in_each_epoch",
         "test_token_fate.py::test_of_cropped_rows_it_says_where_they_are_counted"],
    ),
    Mutation(
        "skipped steps count as trained on", "report/token_fate.py",
        "f\"{(steps - skipped) * step_tokens:,}: {counted(steps - skipped, 'step')} of {step_tokens:,}\"",
        "f\"{steps * step_tokens:,}: {counted(steps, 'step')} of {step_tokens:,}\"",
        ["test_token_fate.py::test_of_several_epochs_and_skipped_steps"],
    ),
    Mutation(
        "runs on other data differ by seed alone", "lab/sides.py",
        ', "data_fingerprint": data}', "}",
        ["test_report_pages.py::TestOverlay::test_what_cannot_be_compared_is_not",
         "test_sides.py::test_data_is_known_by_its_fingerprint_and_else_by_its_name"],
    ),
    Mutation(
        "a report names the lowest of bits per byte that cannot be compared", "report/overlay.py",
        "other_texts([record for *_, record in known])", "()",
        ["test_report_pages.py::TestOverlay::test_what_cannot_be_compared_is_not"],
    ),
    Mutation(
        "the mean of a configuration is that of the seeds that did not break", "report/overlay.py",
        "if broken := sum(map(_is_broken, runs)):", "if broken := 0:",
        ["test_report_pages.py::TestOverlay::test_a_configuration_with_a_broken_run_has_no_mean"],
    ),
    Mutation(
        "a run that exploded has the lowest bits per byte of a report", "report/overlay.py",
        "return run.record.exploded or (bpb", "return (bpb",
        ["test_report_pages.py::TestOverlay::test_a_configuration_with_a_broken_run_has_no_mean"],
    ),
    Mutation(
        "a prompt is HTML", "report/page.py",
        '{escape(prompt)}</span>', "{prompt}</span>",
        ["test_report_pages.py::TestUntrusted::test_is_text_in_the_page"],
    ),
    Mutation(
        "a billion tokens are shown as 1e+03M", "runtime/records/console.py",
        "if rounded >= one[1])", "if number >= one[1])",
        ["test_report_pages.py::TestWhatItSays::test_texts"],
    ),
    Mutation(
        "seeds that go on past a broken one are in no chart", "report/assets/charts.js",
        "finite(y) && at[i] !== end", "false",
        ["test_pages.py::test_seeds_that_go_on_past_a_broken_one_are_drawn_to_their_ends"],
    ),
    Mutation(
        "the first number of a run whose weights broke is that of an earlier validation", "report/run_facts.py",
        '(math.isfinite(value) or label == "bits per byte")', "math.isfinite(value)",
        ["test_report_pages.py::TestWhatItSays::test_the_first_number_of_a_run_whose_weights_broke_is_not_an_earlier_one"],
    ),
    Mutation(
        "a killed run has not done the steps that were skipped before its last validation", "lab/run_record.py",
        "lines = (last_step, validation)", "lines = (last_step,)",
        [
            "test_report_pages.py::TestWhatItSays::"
            "test_numbers_of_an_unfinished_run_count_steps_that_were_skipped_before_its_last_validation",
            "test_token_fate.py::test_skipped_steps_of_a_run_that_has_not_finished",
        ],
    ),
    Mutation(
        "the end of a run that is short beside others is in no chart", "report/assets/charts.js",
        "xs[first] + START_SHARE * (xs[last] - xs[first])", "from + START_SHARE * (to - from)",
        ["test_pages.py::test_the_end_of_a_short_run_fits_too"],
    ),
]  # fmt: skip
