"""The judge of experiments: answers, audits, rules."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    Mutation(
        "an audit does not see the last position before the cut", "lab/judge/audits.py",
        "apart = apart[: one.same]", "apart = apart[: one.same - 1]",
        ["test_red_team.py::test_a_model_that_cheats",
         "test_questions.py::test_who_looks_ahead_in_few_places_is_asked_there"],
    ),
    Mutation(
        "all rows are said to differ where one does", "lab/judge/audits.py",
        "sum(apart > tolerance for apart, _, _ in found)", "len(found)",
        ["test_questions.py::test_how_many_rows_differ_by_hand"],
    ),
    Mutation(
        "cuts are drawn without regard to what was gained", "lab/judge/audits.py",
        "0.5 * uniform + 0.5 * weights / total", "uniform",
        ["test_questions.py::test_half_of_the_cuts_are_where_the_candidate_gains"],
    ),
    Mutation(
        "a value of another type crashes the program", "lab/experiments/trial.py",
        "        check_values(all_fields(", "        str((",
        ["test_trial.py::test_a_value_that_cannot_be_is_invalid"],
    ),
    Mutation(
        "a value that cannot be takes an experiment's runs", "lab/judge/tree_rules.py",
        "            apply_overrides(config, checked)\n", "            pass\n",
        ["test_trial.py::test_a_value_that_cannot_be_is_invalid"],
    ),
    Mutation(
        "code that was changed may not take other values", "lab/experiments/trial.py",
        'if variant_of(lab, one, experiments).code == lab.path / "code":', "if True:",
        ["test_trial.py::TestCode::test_changed_code_may_take_other_values"],
    ),
    Mutation(
        "the diff that is kept lacks empty files", "lab/judge/tree_rules.py",
        "    if not (old or new):", "    if False:",
        ["test_tree_rules.py::test_the_diff_leads_from_one_to_the_other"],
    ),
    Mutation(
        "nothing is kept of code that is invalid", "lab/experiments/trial.py",
        '    (lab.experiment(number) / "changes.patch").write_text(', '    check_change(change), str(',
        ["test_trial.py::TestCode::test_the_judge_cannot_be_changed"],
    ),
    Mutation(
        "a candidate may read the text that the corpus was made of", "lab/experiments/runs.py",
        "*texts_in_cache(), *lab.texts()[0]]", "*texts_in_cache()]",
        ["test_experiment_runs.py::TestTraining::test_it_sees_training_data_and_code_and_no_secrets"],
    ),
    Mutation(
        "a timing may look for the validation text", "lab/experiments/runs.py",
        "if opened := running.finish().opened:", "if opened := ():",
        ["test_experiment_runs.py::TestTraining::test_a_timing_that_failed_for_an_empty_decoy_broke_a_rule"],
    ),
    Mutation(
        "files that are linked in a corpus can be read", "lab/experiments/folder.py",
        "for place in filter(os.path.isdir, [*places]):", "for place in ():",
        ["test_lab_folder.py::test_where_the_validation_text_comes_from"],
    ),
    Mutation(
        "children that nobody waited for cost nothing", "lab/judge/guard.py",
        "max(_reaped_seconds() + self._alive_seconds(alive), sum(self._cpu.values()))",
        "_reaped_seconds() + self._alive_seconds(alive)",
        ["test_red_team.py::test_training_off_the_clock"],
    ),
    Mutation(
        "a changed package judges itself", "lab/experiments/folder.py",
        "if code_fingerprint(running) != lab.settings.code_fingerprint:", "if False:",
        ["test_cli_lab.py::test_another_gptlab_than_the_labs_own_does_not_judge"],
    ),
    Mutation(
        "answers are computed with PyTorch where training had kernels", "lab/judge/judging.py",
        "copy_compiled(cache, own)", "own.mkdir()",
        ["test_judging.py::test_each_answering_process_has_a_copy_of_compiled_code_to_itself"],
    ),
    Mutation(
        "each answering process builds kernels that training did not have", "app/answers.py",
        "compute_dtype=dtype", "compute_dtype=torch.float32",
        ["test_judging.py::test_drawing_first_weights_changes_nothing_of_what_computes_answers"],
    ),
    Mutation(
        "after a draw of first weights, answers are computed by gptlab's products", "app/answers.py",
        "with implementations_kept():", "if True:",
        ["test_judging.py::test_drawing_first_weights_changes_nothing_of_what_computes_answers"],
    ),
    Mutation(
        "answers are computed by gptlab's products where training had the library's", "lab/judge/judging.py",
        'computed["implementations"] = {"products": products}', "pass",
        ["test_judging.py::test_answers_are_computed_by_what_multiplied_in_training"],
    ),
    Mutation(
        "the copy of compiled code of a judge at work is deleted as a killed one's", "lab/judge/judging.py",
        'own = Path(folder) / "cache"', "own = Path(folder)",
        ["test_judging.py::test_the_copy_of_a_judge_at_work_is_kept_and_private"],
    ),
    Mutation(
        "answers find what a candidate left among compiled code", "lab/experiments/runs.py",
        'cache=lab.experiment(0) / "cache"', 'cache=lab.experiment(variant.number) / "cache"',
        ["test_experiment_runs.py::test_the_judge_is_shown_where_the_baseline_stands"],
    ),
    Mutation(
        "a process reads in its log what an earlier one printed", "lab/judge/supervise.py",
        "yield printed\n", "yield kept\n",
        ["test_red_team.py::test_two_answering_processes_share_nothing",
         "test_supervise.py::test_a_process_cannot_read_what_an_earlier_one_printed"],
    ),
    Mutation(
        "what a candidate prints has no limit", "lab/judge/guard.py",
        "os.fstat(2).st_size - log_before", "0",
        ["test_supervise.py::test_a_limit_ends_it"],
    ),
    Mutation(
        "what a candidate printed is read into memory whole", "lab/experiments/equal_time.py",
        "os.pread(printed.fileno(), LAST_BYTES, first)", "os.pread(printed.fileno(), first + LAST_BYTES, 0)",
        ["test_experiment_runs.py::TestTraining::test_of_what_a_candidate_printed_the_end_alone_is_read"],
    ),
    Mutation(
        "after the last answer anything may come", "lab/judge/answering.py",
        "self._seconds\n        if self._some(1):", "self._seconds\n        if False:",
        ["test_red_team.py::test_a_program_that_cheats"],
    ),
    Mutation(
        "a stall of the machine makes an honest edit invalid", "lab/experiments/trial.py",
        'if error.rule != "wall-clock":', "if True:",
        ["test_trial.py::test_only_what_is_slow_twice_trained_off_the_clock"],
    ),
    Mutation(
        "what trains off the clock and is slow is asked for its time alone", "lab/experiments/runs.py",
        "if not same_weights(run, same_as):", "if False:",
        ["test_experiment_runs.py::TestTraining::test_what_trains_again_for_its_time_must_end_with_its_weights"],
    ),
    Mutation(
        "what trains again for its time need not finish", "lab/experiments/runs.py",
        "if not is_finished or step_of(", "if False and step_of(",
        ["test_experiment_runs.py::TestTraining::test_what_trains_again_for_its_time_must_finish"],
    ),
    Mutation(
        "BOS counts among the bytes' bits", "lab/judge/questions.py",
        "text += math.fsum(nats[rows][lengths > 0])", "text += math.fsum(nats[rows][counted])",
        ["test_questions.py::test_the_loss_by_hand"],
    ),
    Mutation(
        "a candidate's link leads the lab to another run", "lab/experiments/runs.py",
        "                _make_own(trained)\n", "                pass\n",
        ["test_experiment_runs.py::TestTraining::test_a_link_leads_to_no_other_run"],
    ),
    Mutation(
        "a candidate closes a folder of its run to the lab", "lab/experiments/runs.py",
        "        path.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)\n", "",
        ["test_experiment_runs.py::TestTraining::test_the_lab_may_write_in_every_folder_of_a_run"],
    ),
]  # fmt: skip
