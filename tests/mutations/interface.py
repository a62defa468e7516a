"""Commands: what they read, print and refuse."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    Mutation(
        "a tokenizer is trained before its folder is found to be impossible", "cli/tokenizer.py",
        'with cannot(f"write the tokenizer to {out}"), TemporaryDirectory(dir=nearest):', "if nearest:",
        ["test_cli_tokenizer.py::test_a_folder_that_cannot_be_made_is_refused_before_the_training"],
    ),
    Mutation(
        "a list of corpora to validate on is one name", "app/run/run_request.py",
        'SOURCES = ("data", "data.source", "data.val_source")', 'SOURCES = ("data", "data.source")',
        ["test_cli_arguments.py::TestToml::test_elements_of_a_list_and_names_that_are_there_keep_their_commas"],
    ),
    Mutation(
        "a list that is none holds the word", "cli/arguments/parser.py",
        'if _is_tuple(annotation) and "." in field and [text.lower() for text in texts] == ["none"]:', "if False:",
        ["test_cli_arguments.py::TestRunRequest::test_none_is_an_empty_list"],
    ),
    Mutation(
        "of several unknown fields the first is said", "cli/arguments/parser.py",
        "raise refused[0] if len(refused) == 1 else", "raise refused[0] if refused else",
        ["test_cli_arguments.py::TestRunRequest::test_mistakes_are_one_line"],
    ),
    Mutation(
        "a list that is none in a file is refused", "config/load.py",
        'if get_origin(leaf) is tuple and value == "none":', "if False:",
        ["test_cli_arguments.py::TestRunRequest::test_none_is_an_empty_list"],
    ),
    Mutation(
        "hooks of a loaded model are left out of its samples", "model/gpt.py",
        "return self.is_replaced or patched or all_are_hooked() or _described(self) != as_made",
        "return self.is_replaced",
        ["test_api.py::TestParts::test_hooks_and_changes_that_mix_positions_are_sampled"],
    ),
    Mutation(
        "a changed model is sampled with the cache", "eval/sampling.py",
        "fresh = tokens if cache is None else [token]", "fresh = [token]",
        ["test_api.py::TestParts::test_hooks_and_changes_that_mix_positions_are_sampled"],
    ),
    Mutation(
        "checkpoints lack the buffers of own parts", "model/gpt.py",
        "for name, buffer in buffers.items() if name in persistent}", "for name, buffer in ()}",
        ["test_api.py::TestParts::test_each_takes_its_place_and_resumes"],
    ),
    Mutation(
        "checkpoints hold buffers that are not persistent", "model/gpt.py",
        "for name, buffer in buffers.items() if name in persistent}", "for name, buffer in buffers.items()}",
        ["test_api.py::TestParts::test_each_takes_its_place_and_resumes"],
    ),
    Mutation(
        "a warm-up counts in the buffers of own parts", "training/compilation.py",
        "        buffers.put_back()\n", "",
        ["test_compiled_run.py::test_warm_up_leaves_no_trace"],
    ),
    Mutation(
        "a buffer that a part has put in another's place stays", "training/own_buffers.py",
        "            part._buffers.clear()\n            part._buffers.update(buffers)\n", "",
        ["test_compiled_run.py::test_warm_up_leaves_no_trace"],
    ),
    Mutation(
        "a skipped step stays in the buffers of own parts", "training/own_buffers.py",
        "    if isinstance(step.result, Fault):\n", "    if False:\n",
        ["test_own_buffers.py::test_a_skipped_step_leaves_them_as_they_were"],
    ),
    Mutation(
        "a buffer that changes its shape is noticed by the first load", "training/own_buffers.py",
        "    require_saved_shapes(state.model)", "    pass",
        ["test_own_buffers.py::test_what_no_checkpoint_could_be_loaded_with_ends_the_run"],
    ),
    Mutation(
        "a part's own forward is not called, without a word", "model/changed.py",
        ' or "forward" in vars(part)', "",
        ["test_api.py::TestParts::test_a_change_that_training_would_not_follow_is_refused"],
    ),
    Mutation(
        "a run leaves its threads to the caller", "app/run/train_run.py",
        "    attempt.held.callback(torch.set_num_threads, torch.get_num_threads())\n", "",
        ["test_api.py::TestDiscovery::test_the_callers_threads_stay"],
    ),
    Mutation(
        "a run leaves the caller's generators seeded", "app/run/train_run.py",
        "    attempt.held.callback(restore_rng, capture_rng(device), device)\n", "",
        ["test_api.py::TestDiscovery::test_the_callers_random_numbers_go_on"],
    ),
    Mutation(
        "a program that turned gradients off cannot train", "app/run/train_run.py",
        "    attempt.held.enter_context(torch.inference_mode(False))", "    torch.inference_mode(False)",
        ["test_api.py::TestDiscovery::test_a_program_that_turned_gradients_off"],
    ),
    Mutation(
        "runs with parts of a caller's own are pooled", "lab/sides.py",
        '{"own_parts": _recorded(run, "own_parts"), ', "{",
        ["test_sides.py::test_runs_that_differ_by_seed_alone_are_a_side"],
    ),
    Mutation(
        "a run multiplies on as a model that its hook has loaded", "app/run/own_parts.py",
        "with implementations_kept(), torch", "with torch",
        ["test_own_parts.py::test_models_that_it_loads_change_nothing_for_the_run"],
    ),
    Mutation(
        "a run trains on with the threads of another one that its hook has loaded", "model/kernels/ops.py",
        "            torch.set_num_threads(threads)\n", "            pass\n",
        ["test_own_parts.py::test_models_that_it_loads_change_nothing_for_the_run"],
    ),
    Mutation(
        "a hook turns off the gradients of the run", "app/run/own_parts.py",
        "torch.set_grad_enabled(torch.is_grad_enabled()):", "implementations_kept():",
        ["test_own_parts.py::test_a_hook_may_turn_gradients_off"],
    ),
    Mutation(
        "a run without prompts ends with a command that has none to continue", "app/commands.py",
        '"" if prompts else " --interactive"', '""',
        ["test_train_run.py::test_the_command_that_samples_has_a_prompt"],
    ),
    Mutation(
        "own rows are looked at once", "app/run/own_parts.py",
        "        return checked\n", "        return rows\n",
        ["test_api.py::TestParts::test_a_later_row_that_cannot_be_trained_on_ends_the_run"],
    ),
    Mutation(
        "own rows may be fractions", "app/run/own_parts.py",
        'tokens.dtype.kind in "iu" and ', "",
        ["test_api.py::TestParts::test_rows_that_cannot_be_trained_on_are_refused"],
    ),
    Mutation(
        "closures of one function are one part", "app/run/own_parts.py",
        "[cell.cell_contents for cell in cells],", "[],",
        ["test_own_parts.py::test_functions_of_one_source_differ_by_what_they_hold"],
    ),
    Mutation(
        "runs with closures of one function are pooled", "lab/sides.py",
        " {part.get('sha256') or ''}", "",
        ["test_sides.py::test_runs_that_differ_by_seed_alone_are_a_side"],
    ),
    Mutation(
        "a run on a busy machine is a side of its own", "lab/run_record.py",
        ', "log.report", "runtime.threads"})', ', "log.report"})',
        ["test_sides.py::test_runs_that_differ_by_seed_alone_are_a_side"],
    ),
    Mutation(
        "a run whose rank 0 was killed stays running", "app/run/attempt.py",
        "(0,) if failure.rank or failure.said_by_itself else (0, 1)", "(0,)",
        ["test_train_run.py::test_a_lost_process_is_recorded_by_rank_0_and_of_rank_0_by_rank_1"],
    ),
    Mutation(
        "a variable that is no UTF-8 ends the run", "runtime/records/provenance.py",
        '(errors="backslashreplace")', "()",
        ["test_provenance.py::TestEnvironment::test_a_variable_that_is_no_utf_8"],
    ),
    Mutation(
        "the threads of other processes are not counted", "app/run/run_session.py",
        "place.threads * session.group.world.local_size", "place.threads",
        ["test_train_run.py::test_more_threads_than_cores_are_warned_of"],
    ),
    Mutation(
        "parts of the program itself have another name when they are imported", "app/run/own_parts.py",
        'if name in ("__main__", "__mp_main__") else None', "if not name else None",
        ["test_own_parts.py::test_a_part_has_one_name_in_the_program_and_for_programs_that_import_it"],
    ),
    Mutation(
        "more threads than cores are not warned of", "app/run/run_session.py",
        "threads > (cores := usable_cores())", "threads > 1000 * (cores := usable_cores())",
        ["test_train_run.py::test_more_threads_than_cores_are_warned_of"],
    ),
    Mutation(
        "threads without a core have a peak", "runtime/hardware/peak.py",
        "min(torch.get_num_threads(), usable_cores())", "torch.get_num_threads()",
        ["test_peak.py::test_a_busy_machine_counts_as_so_many_times_one_thread"],
    ),
    Mutation(
        "OMP_NUM_THREADS=0 takes cores from other programs", "runtime/hardware/cpu.py",
        "if not ours or _threads_of_environment() or", 'if not ours or "OMP_NUM_THREADS" in os.environ or',
        ["test_machine_load.py::test_other_programs_keep_the_cores_that_they_use"],
    ),
    Mutation(
        "a machine with more threads than cores is busy by itself", "runtime/hardware/cpu.py",
        "needed = min(self.threads * self.processes, self.cores)", "needed = self.threads * self.processes",
        ["test_machine_load.py::TestWarning::test_more_threads_than_cores_do_not_make_it_busy"],
    ),
    Mutation(
        "any small tokenizer fits any small model", "model/interop/pretrained.py",
        " or rows - entries >= max(64, entries // 8)", "",
        ["test_import.py::test_a_table_of_many_more_rows_has_another_tokenizer"],
    ),
    Mutation(
        "a prompt beside --interactive is not read", "cli/sample.py",
        " or arguments.prompt:", ":",
        ["test_sample_talk.py::TestInteractive::test_a_prompt_on_the_command_line_is_refused"],
    ),
    Mutation(
        "a plan's heads are its width", "bench/plan.py",
        "heads {model.n_head}", "heads {model.n_embd}",
        ["test_plan.py::test_describe_names_every_figure_with_its_unit"],
    ),
    Mutation(
        "a plan's step has one micro-batch", "bench/plan.py",
        "count = config.micro_batches", "count = 1",
        ["test_plan.py::test_describe_names_every_figure_with_its_unit"],
    ),
    Mutation(
        "tokens are bytes, says gptlab data prepare", "cli/data.py",
        '{split.n_bytes:,} bytes, {split.n_tokens:,} tokens")', '{split.n_bytes:,} bytes, {split.n_bytes:,} tokens")',
        ["test_token_files.py::test_data_commands_show_tokens"],
        ["Tokens and shards of both loaders"],
    ),
    Mutation(
        "gptlab train shows the training tokens for both sides", "app/run/run_session.py",
        "{data.val.n_tokens:,} validation tokens", "{data.train.n_tokens:,} validation tokens",
        ["test_token_files.py::test_data_commands_show_tokens"],
        ["Tokens and shards of both loaders"],
    ),
    Mutation(
        "further words of a command are not completed", "cli/completion.py",
        "for command in further:", "for command in further[:1]:",
        ["test_completion.py::test_words_and_files_that_fit"],
    ),
    Mutation(
        "values are offered after no flag", "cli/completion.py",
        "found.fields.items()}\n    return words | {place: choices for place, choices in values.items() if choices}",
        "found.fields.items()}\n    return words",
        ["test_completion.py::test_words_and_files_that_fit"],
    ),
    Mutation(
        "True and False with capitals are no values of a flag", "cli/arguments/parser.py",
        "given[0].lower() not in TRUTH_WORDS", "given[0] not in TRUTH_WORDS",
        ["test_cli_arguments.py::TestParse::test_more_than_tyro_takes"],
    ),
    Mutation(
        "a run of which nothing is saved is said to be resumed", "app/run/attempt.py",
        'what = "resume" if list_checkpoints(run.checkpoints_path) else "start it again"', 'what = "resume"',
        ["test_signals.py::TestBeforeTheFirstStep::test_the_run_goes_on_as_if_nothing_had_been"],
    ),
]  # fmt: skip
