"""Nights: search, several workers, promotion, report."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    Mutation(
        "a lab judges on Windows", "cli/lab.py",
        'if os.name == "nt" and argv', "if False and argv",
        ["test_cli_lab.py::test_windows_judges_nothing"],
    ),
    Mutation(
        "SIGTERM leaves the folders of what judged in a lab", "cli/lab.py",
        "@ended_by_signals()\n", "",
        ["test_cli_lab.py::test_sigterm_cleans_up_as_an_interrupt_does"],
    ),
    Mutation(
        "a model that is away for a few seconds ends the night", "lab/workers/night.py",
        "time.sleep(pause if", "time.sleep(0.0 if",
        ["test_trial.py::test_a_program_that_proposes_nothing_ends_the_night",
         "test_trial.py::test_a_model_that_is_away_for_minutes_does_not_end_the_night"],
    ),
    Mutation(
        "a night without a baseline asks for proposals that nobody can try", "cli/lab.py",
        "    lab.require_baseline()\n", "",
        ["test_cli_lab.py::test_a_night_without_a_baseline_asks_nobody"],
    ),
    Mutation(
        "another depth in a lab is sized to an assumed machine", "app/new_lab.py",
        "settings, measured[-1] if measured else None)", "settings)",
        ["test_new_lab.py::test_another_depth_has_its_own_rates"],
    ),
    Mutation(
        "a lab is sized to a text of unknown length", "app/sizing.py",
        "measured.append(replace(machine, training_tokens=tokens))", "measured.append(machine)",
        ["test_new_lab.py::test_its_run_is_that_of_train",
         "test_train_run.py::test_a_gpu_trains_four_epochs_of_the_text_that_was_prepared"],
    ),
    Mutation(
        "a lab begins with rows for which a GPU has no room", "app/sizing.py",
        "    if has_nvidia_gpu():", "    if False:",
        ["test_new_lab.py::test_its_run_is_that_of_train"],
    ),
    Mutation(
        "a run that was stopped looks for its data where the lab was", "lab/experiments/runs.py",
        "if _is_of_another_place(lab, path):", "if False:",
        ["test_experiment_runs.py::TestTraining::test_one_that_began_where_the_lab_was_is_trained_anew"],
    ),
    Mutation(
        "what a killed lab left undone after a verdict stays undone", "lab/experiments/trial.py",
        "return one.verdict is not None and _verdict_path(lab, one.number).exists()", "return one.verdict is not None",
        ["test_trial.py::test_a_night_completes_what_was_killed_after_its_verdict"],
    ),
    Mutation(
        "the command that proposes outlives a night that SIGTERM ends", "lab/workers/night.py",
        "@ended_by_signals()\n", "",
        ["test_trial.py::test_a_program_that_proposes_ends_with_the_night"],
    ),
    Mutation(
        "the command that proposes outlives a night that SIGKILL ends", "lab/workers/night.py",
        "_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)", "pass",
        ["test_trial.py::test_a_program_that_proposes_ends_with_the_night"],
    ),
    Mutation(
        "every step of a candidate may take as long as a compilation", "lab/experiments/equal_time.py",
        "        self._timeout = self._step_timeout\n", "",
        ["test_experiment_runs.py::TestTraining::test_a_step_that_hangs_costs_no_more_than_some_runs"],
    ),
    Mutation(
        "a start that hangs costs a quarter of an hour in every lab", "lab/experiments/runs.py",
        "if took is None or _is_compiled(lab):", "if True:",
        ["test_experiment_runs.py::TestTraining::test_a_step_that_hangs_costs_no_more_than_some_runs"],
    ),
    Mutation(
        "what a run cost is unknown to a lab that was stopped while it judged", "lab/experiments/runs.py",
        "if ended.exists() and RunDirectory(run)", "if RunDirectory(run)",
        ["test_experiment_runs.py::TestTraining::test_what_a_run_cost_outlives_the_lab_and_no_run_is_without"],
    ),
    Mutation(
        "candidates may cost what the last part of a resumed run did", "lab/experiments/trial.py",
        'if not cost["resumed"])', "if True)",
        ["test_trial.py::test_the_last_part_of_a_run_is_no_measure_for_others"],
    ),
    Mutation(
        "judged runs keep their moments", "lab/experiments/trial.py",
        "    runs.drop_moments(trained.run)\n", "",
        ["test_trial.py::test_the_baseline_and_its_noise"],
    ),
    Mutation(
        "a full disk costs what was measured", "lab/experiments/trial.py",
        "    cost = trained.finished\n", "    runs.drop_moments(trained.run)\n    cost = trained.finished\n",
        ["test_trial.py::test_what_was_measured_is_kept_where_the_moments_cannot_be_dropped"],
    ),
    Mutation(
        "a state that cannot be saved again ends the night", "lab/experiments/runs.py",
        "    with suppress(ValueError):\n", "    with suppress():\n",
        ["test_experiment_runs.py::test_a_state_that_cannot_be_saved_again_does_not_end_the_night"],
    ),
    Mutation(
        "a baseline that waits is said to hang", "app/step_timer.py",
        '_step(session)}), file=replies, flush=True)\n                faulthandler.cancel_dump_traceback_later()\n',
        '_step(session)}), file=replies, flush=True)\n',
        ["test_equal_time.py::test_what_waits_for_the_other_program_does_not_hang"],
    ),
    Mutation(
        "what a killed timing left stays for good", "lab/experiments/trial.py",
        "            runs.forget_timings(lab, number)\n", "            pass\n",
        ["test_experiment_runs.py::TestTraining::"
         "test_what_a_killed_timing_left_goes_with_the_next_look_at_its_experiment"],
    ),
    Mutation(
        "changed code keeps what it leaves among compiled code", "lab/experiments/runs.py",
        'cache = own if keep or variant.code == lab.path / "code" else work / "cache"', "cache = own",
        ["test_experiment_runs.py::TestTraining::test_what_one_process_of_changed_code_leaves_no_other_finds"],
    ),
    Mutation(
        "a run's folder stays writable for the next process", "lab/experiments/runs.py",
        '"writable": [work, cache],', '"writable": [work, work.parent, cache],',
        ["test_experiment_runs.py::TestTraining::test_it_sees_training_data_and_code_and_no_secrets"],
    ),
    Mutation(
        "a checkpoint of another step is judged", "lab/experiments/trial.py",
        "if judged.step != variant.steps:", "if False:",
        ["test_trial.py::test_a_checkpoint_of_another_step_is_invalid"],
    ),
    Mutation(
        "a change is tried before the baseline is measured", "lab/experiments/folder.py",
        "number in experiments and wanted <= experiments[number].bpb.keys()", "number in experiments",
        ["test_trial.py::test_nothing_is_tried_before_the_baseline_is_measured"],
    ),
    Mutation(
        "a depth that is tried keeps the layers of what was kept", "lab/experiments/ledger.py",
        '    if "depth" in experiment.fields:\n', "    if False:\n",
        ["test_ledger.py::test_a_depth_replaces_the_layers_that_were_kept"],
    ),
    Mutation(
        "the training text of a lab is measured as if it validated", "lab/experiments/folder.py",
        "if has_stand_in(data) and not data.val_source:", "if False:",
        ["test_cli_eval_sample.py::TestEval::test_the_training_text_of_a_lab_is_not_measured_as_if_it_validated"],
    ),
    Mutation(
        "the command for the best of a lab trains on other text", "lab/experiments/overview.py",
        "words_of({**lab.settings.corpus, **all_fields(now, experiments)})", "words_of(all_fields(now, experiments))",
        ["test_new_lab.py::test_the_command_for_the_best_trains_on_its_text_from_any_folder"],
    ),
    Mutation(
        "a command that thinks outlives the end of the night", "lab/workers/night.py",
        "min(timeout, until - time.monotonic())", "timeout",
        ["test_trial.py::test_a_command_that_thinks_ends_with_the_night"],
    ),
    Mutation(
        "a lab continues as if its TOML file had not been edited", "app/new_lab.py",
        "if given.get(name) != was.get(name)]", "if False]",
        ["test_new_lab.py::test_a_file_that_was_edited_makes_no_lab_that_is_there"],
    ),
    Mutation(
        "a space in which few points are possible counts as searched", "lab/workers/search.py",
        "MAX_DRAWS = 2_000", "MAX_DRAWS = 200",
        ["test_search.py::test_a_space_of_few_points_that_fit_together"],
    ),
    Mutation(
        "a space in which no point is possible counts as searched", "lab/workers/search.py",
        "    if not possible:\n", "    if False:\n",
        ["test_search.py::test_a_space_in_which_nothing_fits_together_is_not_searched_but_wrong"],
    ),
    Mutation(
        "a lab's run is said to train on", "app/run/earlier_run.py",
        " * (not has_stand_in(stored.data))", "",
        ["test_train_on.py::test_a_run_of_a_lab_has_nothing_to_train_on_with"],
    ),
    Mutation(
        "results.tsv judges what is in flight", "lab/experiments/overview.py",
        "[one for one in proposals(experiments) if one.verdict is not None]", "proposals(experiments)",
        ["test_trial.py::test_results_in_autoresearchs_columns"],
    ),
    Mutation(
        "the search learns means over whichever seeds were raced", "lab/experiments/overview.py",
        "return None if difference is None or before is None else before + float(difference)",
        "return mean_bpb(one)",
        ["test_search.py::test_values_are_comparable_whatever_the_seeds_and_the_baseline"],
    ),
    Mutation(
        "a search that is continued draws its first points again", "lab/workers/search.py",
        "TPESampler(seed=SEED + len(trials)", "TPESampler(seed=None",
        ["test_search.py::test_a_stopped_search_continues_as_if_it_had_not_been"],
    ),
    Mutation(
        "an improvement on a replaced baseline becomes the baseline", "lab/experiments/trial.py",
        'if ruling.verdict == "keep" and against != now:', "if False:",
        ["test_workers.py::test_an_improvement_on_a_replaced_baseline_is_proposed_again"],
    ),
    Mutation(
        "what is proposed again races with the seeds that selected it", "lab/experiments/trial.py",
        "RULES.most_pairs * earlier_races(experiments, one)", "0",
        ["test_workers.py::test_an_improvement_on_a_replaced_baseline_is_proposed_again"],
    ),
    Mutation(
        "the judge is shown the candidate's own nats as the baseline's", "lab/experiments/runs.py",
        "theirs = _nats_path(lab, against, where, seed)", "theirs = _nats_path(lab, variant.number, where, seed)",
        ["test_experiment_runs.py::test_the_judge_is_shown_where_the_baseline_stands"],
    ),
    Mutation(
        "a candidate's process gets every variable of the environment", "lab/judge/supervise.py",
        "if _PASSED_ON.fullmatch(name)}", "}",
        ["test_experiment_runs.py::TestTraining::test_it_sees_training_data_and_code_and_no_secrets"],
    ),
    Mutation(
        "one edit in 40 gets more steps by the luck of its timing", "lab/experiments/equal_time.py",
        "OUTSIDE = 0.00025", "OUTSIDE = 0.025",
        ["test_equal_time.py::test_an_edit_of_the_baselines_speed_gets_no_step_too_many"],
    ),
    Mutation(
        "a field that changes what a step does is not timed", "lab/experiments/equal_time.py",
        'name.startswith(("optim.", "schedule."))', "True",
        ["test_equal_time.py::TestSameWork::test_what_may_take_another_time"],
    ),
    Mutation(
        "two workers train one seed of the baseline", "lab/experiments/trial.py",
        "        wait()\n        lock.acquire()", "        wait()",
        ["test_workers.py::test_a_seed_of_the_baseline_is_waited_for"],
    ),
    Mutation(
        "promotion is judged on the text that chose the experiment", "lab/experiments/promote.py",
        'measure(lab, one, seed, "promotion", say)', 'measure(lab, one, seed, "validation", say)',
        ["test_promote.py::test_the_best_is_confirmed_against_the_first_baseline"],
    ),
    Mutation(
        "what a run printed is given to programs as words of the lab", "lab/experiments/overview.py",
        'if one.says == "crashed" else', 'if one.says == "never" else',
        ["test_report.py::test_output_of_runs_is_named_as_such"],
    ),
]  # fmt: skip
