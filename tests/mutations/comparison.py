"""Runs compared: statistics, sides, contrasts."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    Mutation(
        "the interval is that of a one-sided test", "lab/statistics.py",
        "1 - alpha / 2", "1 - alpha",
        ["test_statistics.py::test_paired_is_that_of_scipy", "test_statistics.py::test_paired_by_hand"],
    ),
    Mutation(
        "the smallest p-value is not adjusted more than the largest", "lab/statistics.py",
        "(len(p_values) - rank) * p", "len(p_values) * p",
        ["test_statistics.py::TestHolm::test_by_hand",
         "test_compare.py::test_several_candidates_are_adjusted_by_holm"],
    ),
    Mutation(
        "a pair or two of many runs are all that is compared", "lab/contrast.py",
        " and 2 * common >= min(a, b)", "",
        ["test_compare.py::TestSeeds::test_that_match_are_paired"],
    ),
    Mutation(
        "one seed against several is compared with one of them", "lab/contrast.py",
        "min(2, max(a, b))", "min(2, a, b)",
        ["test_compare.py::TestSeeds::test_that_match_are_paired"],
    ),
    Mutation(
        "runs that end within a step of one another are compared on the line before it", "lab/contrast.py",
        "last - last / max(steps, 1)", "last",
        ["test_compare.py::TestAmounts::test_of_runs_that_end_within_one_step_are_their_final_values"],
    ),
    Mutation(
        "a run one step longer is compared by its last validation, though it validated there", "lab/contrast.py",
        " or amount in run.curve.at[axis][:-1]", "",
        ["test_compare.py::TestAmounts::test_of_a_validation_there_is_its_value"],
    ),
    Mutation(
        "the rounded mean of equal values makes a difference", "lab/statistics.py",
        "first + (sample - first).mean()", "sample.mean()",
        ["test_statistics.py::test_without_any_noise"],
    ),
    Mutation(
        "compare does not say that foreign tokens validate by data.rows", "lab/sides.py",
        "*_about_rows(sides), ", "",
        ["test_sides.py::TestComparable::test_rows_by_which_documents_of_foreign_tokens_validate"],
    ),
    Mutation(
        "a verdict at the end hides that budgets differ", "lab/compare.py",
        "{' of runs of different lengths' * differ}", "",
        ["test_compare.py::test_a_verdict_at_the_end_says_that_lengths_differ"],
    ),
    Mutation(
        "a run that exploded has its last value", "lab/run_record.py",
        "return run.exploded or not", "return not",
        ["test_compare.py::TestBrokenRuns::test_that_exploded_earlier_do_not_hold_up_the_others"],
    ),
    Mutation(
        "runs that exploded before they validated leave their variant", "lab/run_record.py",
        "return self.exploded or len", "return len",
        ["test_sweep.py::TestTraining::test_a_run_that_exploded_before_it_validated_counts"],
    ),
    Mutation(
        "the last validation of a file that was cut short is the final one", "lab/run_record.py",
        'end not in found.at["steps"]:', "False:",
        ["test_run_record.py::test_metrics_that_end_before_their_run_are_refused"],
    ),
    Mutation(
        "a legend covers a hundred curves", "lab/plot.py",
        "len(curves) <= MAX_LEGEND", "True",
        ["test_cli_compare.py::TestPlot::test_a_legend_that_would_cover_the_curves_is_left_out"],
    ),
    Mutation(
        "validations that jq -c wrote again are none", "runtime/records/metrics.py",
        '"kind": ?"%s"', '"kind": "%s"',
        ["test_run_record.py::test_metrics_that_another_program_wrote_again_are_read_alike"],
    ),
    Mutation(
        "a training line whose keys were sorted is none", "runtime/records/metrics.py",
        "text[_line_start(text, at) : text.find", "text[at : text.find",
        ["test_run_record.py::test_metrics_that_another_program_wrote_again_are_read_alike"],
    ),
    Mutation(
        "a folder of runs cannot be compared where it holds one that may not be read", "lab/sides.py",
        "with suppress(PermissionError):", "with suppress():",
        ["test_sides.py::TestFinding::test_a_folder_that_may_not_be_read_is_skipped"],
    ),
    Mutation(
        "a folder of runs cannot be compared where it holds an exported model too", "lab/sides.py",
        "return folder.is_dir() and is_run(os.listdir(folder))", 'return (folder / "config.json").is_file()',
        ["test_sides.py::TestFinding::test_an_exported_model_is_skipped_among_others_and_refused_by_name"],
    ),
    Mutation(
        "a compute multiplier is extrapolated by the baseline's largest size", "lab/contrast.py",
        "bpb[-1] <= own_bpb <= bpb[0]", "own_bpb <= bpb[0]",
        ["test_compare.py::TestComputeMultiplier::test_of_power_laws"],
    ),
    Mutation(
        "a part of the validation text is compared between tokenizers by tokens", "lab/sides.py",
        "tokens[0] is not None and not same_tokenizer", "False",
        ["test_sides.py::TestComparable::test_other_text"],
    ),
    Mutation(
        "a validation text that only the second run names is overlooked", "lab/sides.py",
        'any(run.fields.get("data.val_source") for run in (a, b))', 'a.fields.get("data.val_source")',
        ["test_sides.py::TestComparable::test_a_validation_text_that_one_side_alone_names"],
    ),
    Mutation(
        "a tokenizer that was trained again explains that the text has changed", "lab/sides.py",
        "explained = any(", "explained = not same_tokenizer or any(",
        ["test_sides.py::TestComparable::test_other_text"],
    ),
    Mutation(
        "runs are compared with the first one's text alone", "lab/sides.py",
        "in itertools.combinations(runs, 2):", "in ((runs[0], run) for run in runs[1:]):",
        ["test_sides.py::TestComparable::test_a_first_run_that_could_be_compared_with_both",
         "test_report_pages.py::TestOverlay::test_a_first_run_that_does_not_say_its_data_hides_no_other_text"],
    ),
    Mutation(
        "a copy that trained on is the run that was copied", "lab/sides.py",
        '[run_id, what_was_trained(run), run.curve.at["steps"][-1:].tolist()]', "run_id",
        ["test_sides.py::TestComparable::test_a_copy_that_trained_on_is_another_run"],
    ),
    Mutation(
        "a folder of runs cannot be compared before all have validated", "cli/compare.py",
        "if not run.has_result and", "if False and",
        ["test_cli_compare.py::test_runs_without_a_validation_are_left_out_of_folders_and_patterns"],
    ),
    Mutation(
        "seeds that name one folder in two ways are two sides", "lab/run_record.py",
        'NOT_COMPARED | {"data.source", "data.val_source"}', "NOT_COMPARED",
        ["test_sides.py::test_data_is_known_by_its_fingerprint_and_else_by_its_name",
         "test_index.py::TestRow::test_seeds_of_one_configuration_have_one_group"],
    ),
]  # fmt: skip
