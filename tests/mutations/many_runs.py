"""Sweeps, ladders, and lists of runs."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    Mutation(
        "a launcher that dies on Windows kills its run unsaved", "lab/launch.py",
        'if os.name == "nt" else os.kill', 'if os.name == "" else os.kill',
        ["test_launch.py::test_a_run_does_not_outlive_a_launcher_that_was_killed"],
    ),
    Mutation(
        "Ctrl-C reaches a launched run as SIGTERM", "lab/launch.py",
        "self._process.send_signal(number)", "self._process.terminate()",
        ["test_launch.py::test_signals_are_forwarded_and_the_end_is_awaited"],
    ),
    Mutation(
        "every seed of a sweep begins with the same variant", "lab/sweep.py",
        "variants[turn % len(variants) :] + variants[: turn % len(variants)]", "variants",
        ["test_sweep.py::TestPlan::test_every_seed_takes_the_variants_in_another_order"],
    ),
    Mutation(
        "later runs of a ladder are given the depth alone", "lab/sweep.py",
        "**given, **run.changes}", "**run.changes}",
        ["test_sweep.py::TestPlan::test_a_field_that_equals_the_first_recipe_s_is_that_of_all_depths"],
    ),
    Mutation(
        "a run of a sweep does not say that the data has changed", "app/run/earlier_run.py",
        " if value != stored[name]}", "}",
        ["test_from.py::TestWarnings::test_what_is_given_as_it_was_is_expected_to_be_the_same"],
    ),
    Mutation(
        "a sweep that is resumed trains what failed again", "lab/sweep.py",
        "if run.name in failed or run.finished:", "if run.finished:",
        ["test_sweep.py::TestTraining::test_what_failed_is_a_result_until_it_shall_be_tried_again"],
    ),
    Mutation(
        "a run that was refused in another working folder stays failed", "lab/sweep.py",
        "if code != EXIT_USAGE}", "}",
        ["test_sweep.py::TestTraining::test_what_failed_is_a_result_until_it_shall_be_tried_again"],
    ),
    Mutation(
        "a failed run whose folder is gone is a result", "lab/sweep.py",
        "if run.started or codes[run.name] != EXIT_TRAINING_FAILED", "if True",
        ["test_sweep.py::TestTraining::test_a_failed_run_whose_folder_is_gone_is_trained_again"],
    ),
    Mutation(
        "what a sweep's signal stopped is recorded as failed", "lab/sweep.py",
        "None if code == 0 or code in _STOPPED or stop.requested else code", "None if code == 0 else code",
        ["test_sweep.py::TestTraining::test_a_signal_ends_the_sweep_and_is_no_failure"],
    ),
    Mutation(
        "a sweep whose base alone is not valid is refused", "cli/sweep.py",
        "config_of({**base, **variants[0]}).seed", "config_of(base).seed",
        ["test_sweep.py::TestVary::test_what_only_the_variants_make_valid"],
    ),
    Mutation(
        "the JSON of a sweep does not say why nothing is compared", "cli/sweep.py",
        '"not_compared": str(error)', '"not_compared": None',
        ["test_sweep.py::TestCommand::test_json_says_why_there_is_no_comparison"],
    ),
    Mutation(
        "a sweep over the length is compared before the longer run has decayed", "cli/sweep.py",
        '"end" if lengths_of(sweep.vary) else None', "None",
        ["test_sweep.py::TestCommand::test_lengths_are_compared_at_the_end"],
    ),
    Mutation(
        "a sweep of corpora does not warn that each validates on its own text", "cli/sweep.py",
        "data.val_source or held_out", "data.val_source",
        ["test_sweep.py::TestCommand::test_variants_that_will_not_be_compared_are_told_before_training"],
    ),
    Mutation(
        "a sweep of corpora does not warn that each has its own tokenizer", "cli/sweep.py",
        "(config.data.source, config.data.hub_files) if learned else None", "None",
        ["test_sweep.py::TestCommand::test_variants_that_will_not_be_compared_are_told_before_training"],
    ),
    Mutation(
        "a sweep of tokenizers warns of nothing", "cli/sweep.py",
        "(one.eval.tokens, one.eval.tokens and _tokenizer_of(one))", "(one.eval.tokens,)",
        ["test_sweep.py::TestCommand::test_variants_that_will_not_be_compared_are_told_before_training"],
    ),
    Mutation(
        "the interval of an irreducible term is of one standard error", "lab/ladder.py",
        "critical_t(freedom, ALPHA) * math.sqrt(variance)", "math.sqrt(variance)",
        ["test_ladder.py::test_its_interval_holds_the_true_term_19_times_in_20"],
    ),
    Mutation(
        "zero has a minus in the ladder's table", "cli/ladder.py", ":+z.4f", ":+.4f",
        ["test_ladder.py::test_zero_has_no_minus"],
    ),
    Mutation(
        "the exponent of a law that rises has two signs", "cli/ladder.py",
        "FLOPs^{-law.b:.4f}", "FLOPs^-{law.b:.4f}",
        ["test_ladder.py::test_a_law_of_models_that_do_not_improve"],
    ),
    Mutation(
        "a ladder's mean is that of the seeds that survived", "lab/ladder.py",
        " and not any(map(is_broken, runs))", "",
        ["test_ladder.py::test_a_depth_with_a_broken_run_is_left_out"],
    ),
    Mutation(
        "a run that was killed is listed as running", "lab/run_list.py",
        '"running" and (held or not directory.in_use())', '"running" and held',
        ["test_run_list.py::TestListing::test_unfinished_runs_are_read_from_their_last_lines"],
    ),
    Mutation(
        "a reader of metrics dies where a resume truncates them", "runtime/records/metrics.py",
        "open_plain(path) as file:\n        while",
        "open_plain(path) as plain, mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ) as file:\n        while",
        ["test_metrics.py::test_a_file_that_is_truncated_while_it_is_read"],
    ),
    Mutation(
        "the tokens of a finished run are millions", "lab/run_record.py",
        "1e6 * millions", "millions",
        ["test_run_record.py::test_what_a_finished_run_reached_is_what_its_summary_says"],
    ),
    Mutation(
        "wildcards fit the first member of a list alone", "lab/run_list.py",
        "for one in _texts(of(run)))", "for one in _texts(of(run))[:1])",
        ["test_run_list.py::TestChoosing::test_conditions"],
    ),
    Mutation(
        "prune deletes no whole run on Windows", "lab/removals.py",
        "with suppress(PermissionError):", "with suppress():",
        ["test_run_list.py::TestPruning::test_a_folder_goes_where_no_open_file_can_be_deleted"],
    ),
    Mutation(
        "prune deletes what is in a lab", "lab/removals.py",
        "    runs = [run for run in runs if not _in_lab(run)]\n", "",
        ["test_run_list.py::TestCommand::test_a_lab_stays"],
    ),
    Mutation(
        "a lab's baseline is listed as a run", "runtime/records/run_directory.py",
        'return "config.json" in names and not _MARKS.isdisjoint(names)', 'return "config.json" in names',
        ["test_lab_folder.py::test_its_baseline_is_a_configuration_and_no_run"],
    ),
    Mutation(
        "runs on other data compete for being the best", "lab/removals.py",
        "best.setdefault((run.data_fingerprint, ", "best.setdefault((None, ",
        ["test_run_list.py::TestPruning::test_what_is_chosen"],
    ),
    Mutation(
        "runs that validate on less text compete for being the best", "lab/removals.py",
        '(run.data_fingerprint, run.fields.get("eval.tokens"))', "(run.data_fingerprint, None)",
        ["test_run_list.py::TestPruning::test_what_is_chosen"],
    ),
    Mutation(
        "prune deletes what came into a folder after it was listed", "lab/removals.py",
        "if not same or (removal.whole and now.has_checkpoint != removal.run.has_checkpoint):", "if False:",
        ["test_run_list.py::TestPruning::test_what_changed_since_it_was_listed_stays"],
    ),
    Mutation(
        "clean deletes what a process has open", "runtime/files/cache_contents.py",
        "    if is_used(path, used):", "    if False:",
        ["test_clean.py::TestCache::test_what_is_used_stays",
         "test_clean.py::TestCache::test_what_began_to_be_used_after_it_was_listed_stays"],
    ),
    Mutation(
        "clean deletes the checkpoint that is the best by loss", "lab/removals.py",
        'for number in ("val_loss", "val_bpb"):', 'for number in ("val_bpb",):',
        ["test_clean.py::TestOldCheckpoints::test_the_best_the_last_and_those_of_the_configuration_stay"],
    ),
    Mutation(
        "clean takes a copy of a checkpoint for one", "training/checkpoint/names.py",
        "CHECKPOINT_NAME.fullmatch(path.name)", "CHECKPOINT_NAME.match(path.name)",
        ["test_clean.py::TestOldCheckpoints::test_what_only_looks_like_a_checkpoint_stays"],
    ),
    Mutation(
        "clean takes a file with the name of a checkpoint for one", "lab/removals.py",
        'list_checkpoints(run.path / "checkpoints") if path.is_dir()}', 'list_checkpoints(run.path / "checkpoints")}',
        ["test_clean.py::TestOldCheckpoints::test_what_only_looks_like_a_checkpoint_stays"],
    ),
    Mutation(
        "clean deletes older checkpoints though the last is damaged", "lab/removals.py",
        'if hashlib.file_digest(file, "sha256").hexdigest() != recorded["sha256"]:', "if False:",
        ["test_clean.py::TestOldCheckpoints::test_nothing_goes_where_the_last_is_damaged_or_the_run_changed"],
    ),
]  # fmt: skip
