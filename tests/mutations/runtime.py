"""Where a run happens: device, types, memory, its folder and records."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    Mutation(
        "what a kernel made with too little memory is taken for its result", "model/kernels/library.py",
        "if functions.memory_ran_out():", "if False:",
        ["test_out_of_memory.py::test_too_little_for_a_kernel"],
    ),
    Mutation(
        "where memory ran out once, all later calls of kernels fail", "model/kernels/scratch.h",
        "return std::exchange(ran_out, false);", "return ran_out;",
        ["test_out_of_memory.py::test_too_little_for_a_kernel"],
    ),
    Mutation(
        "less than 0.05 GiB that was not there is 0.0 GiB", "runtime/hardware/memory.py",
        'f"{size / 2**20:.1f} MiB"', 'f"{size / 2**30:.1f} GiB"',
        ["test_out_of_memory.py::TestAdvice::test_bytes_are_told_in_larger_units"],
    ),
    Mutation(
        "memory that is too little for one row is explained with the rows of the recipe", "app/run/run_session.py",
        "attempt.config = session.config  # which", "pass  # which",
        ["test_micro_batch.py::test_where_one_row_is_too_much_the_advice_is_about_the_model"],
    ),
    Mutation(
        "who reads run.json on Windows ends the run", "runtime/files/plain_file.py",
        'if time.monotonic() > until', "if True",
        ["test_run_directory.py::test_who_reads_the_record_on_windows_does_not_end_the_run"],
    ),
    Mutation(
        "a TOML file with a byte-order mark is refused", "runtime/files/plain_file.py",
        'MAX_TOML_BYTES).decode("utf-8-sig")', 'MAX_TOML_BYTES).decode("utf-8")',
        ["test_config_load.py::TestToml::test_a_byte_order_mark_is_dropped"],
    ),
    Mutation(
        "a program that has just ended costs a run its threads", "runtime/hardware/cpu.py",
        "return None if now == cores else max(for_a_minute, now)", "return for_a_minute",
        ["test_machine_load.py::test_other_programs_keep_the_cores_that_they_use"],
    ),
    Mutation(
        "runs of the lab have fewer threads where something else computes", "lab/launch.py",
        'variables.setdefault("OMP_NUM_THREADS", str(usable_cores()))', "pass",
        ["test_launch.py::test_runs_that_are_compared_have_the_same_threads_whatever_else_computes"],
    ),
    Mutation(
        "a run that begins beside another program forgets its threads", "app/run/train_run.py",
        '"runtime.threads": threads}', "}",
        ["test_train_run.py::test_a_run_leaves_other_programs_their_cores_and_keeps_its_threads"],
    ),
    Mutation(
        "MFU in float32 is a share of what the slower library reaches", "runtime/hardware/peak.py",
        "return min((by_mm, by_onednn), key=seconds)", "return by_mm",
        ["test_peak.py::test_the_faster_of_a_cpus_two_libraries_counts_in_float32"],
    ),
    Mutation(
        "MFU in float16 on a CPU is a share of what slow products reach", "runtime/hardware/peak.py",
        "right = right.t()", "right = right",
        ["test_peak.py::test_a_cpus_float16_products_are_those_of_linear_layers"],
    ),
    Mutation(
        "the end of a run waits for a mirror that hangs", "runtime/records/mirrors.py",
        "self.process.wait(max(0.0, deadline - time.monotonic()))", "self.process.wait(30)",
        ["test_mirrors.py::test_one_that_hangs_is_stopped"],
    ),
    Mutation(
        "a mirror's MFU is a share, not in percent", "runtime/records/mirror_process.py",
        'found["train/mfu"] *= 100', 'found["train/mfu"] *= 1',
        ["test_mirrors.py::test_lines_arrive_by_nanochats_names"],
    ),
    Mutation(
        "a mirror gets a line before it is whole", "runtime/records/mirror_process.py",
        'if lines and not lines[-1].endswith(b"\\n"):', 'if lines and not lines[-1].endswith(b""):',
        ["test_mirrors.py::test_follows_a_file_that_grows_by_pieces"],
    ),
    Mutation(
        "auto never finds the CPU", "runtime/hardware/device.py",
        '"mps" if torch.backends.mps.is_available() else "cpu"', '"mps"',
        ["test_device.py::test_auto_falls_back_to_the_cpu"],
        ["`--device-type` cuda, cpu, mps"],
    ),
    Mutation(
        "Apple's GPU is taken where there is none", "runtime/hardware/device.py",
        'if kind == "mps" and not torch.backends.mps.is_available():', 'if kind == "mps" and number:',
        ["test_device.py::test_unknown_and_absent_devices_are_refused_in_one_line"],
        ["`--device-type` cuda, cpu, mps"],
    ),
    Mutation(
        "half a name of a device means the first GPU", "config/fields.py",
        "if colon and (kind", "if number and (kind",
        ["test_device.py::test_half_a_name_means_no_gpu"],
    ),
    Mutation(
        "bfloat16 means float16", "runtime/hardware/place.py",
        '"bfloat16": torch.bfloat16', '"bfloat16": torch.float16',
        ["test_device.py::test_named_dtypes_and_their_limits"],
    ),
    Mutation(
        "weights are stored in the type of the activations", "model/gpt.py",
        "model.to(torch.float64 if compute_dtype == torch.float64 else torch.float32)", "model.to(compute_dtype)",
        ["test_model.py::test_lower_precision_stays_near_the_oracle"],
    ),
    Mutation(
        "GPUs before Ampere compute in bfloat16", "runtime/hardware/place.py",
        "if capability >= (8, 0):", "if capability >= (7, 0):",
        ["test_device.py::test_auto_dtype_on_cuda_follows_the_tensor_cores"],
    ),
    Mutation(
        "any CPU computes in bfloat16", "runtime/hardware/place.py",
        "return any(known.get(name) for name in BFLOAT16_INSTRUCTIONS)", "return bool(known)",
        ["test_device.py::test_auto_dtype_on_a_cpu_is_the_faster_one"],
    ),
    Mutation(
        "a CPU with the instructions computes in bfloat16, even where that is slower", "runtime/hardware/place.py",
        "return fastest[torch.bfloat16] < fastest[torch.float32]", "return True",
        ["test_device.py::test_auto_dtype_on_a_cpu_is_the_faster_one"],
    ),
    Mutation(
        "a run that was trained on is repeated without a word", "app/run/repeat.py",
        "if step > 0 and (kept", "if step < 0 and (kept",
        ["test_from.py::TestWarnings::test_of_the_configuration_while_it_trained"],
    ),
    Mutation(
        "a run that is repeated warns of fields that were given", "app/run/repeat.py",
        "[*(fields.keys() - asked)]", "[*fields]",
        ["test_from.py::TestWarnings::test_of_the_configuration_while_it_trained"],
    ),
    Mutation(
        "the corpus of a lab's run has always changed", "app/run/loaded_run.py",
        " and not of_a_lab:", ":",
        ["test_cli_eval_sample.py::TestEval::test_the_training_text_of_a_lab_is_not_measured_as_if_it_validated"],
    ),
    Mutation(
        "a run that any number of processes computes alike is warned of another one", "app/run/repeat.py",
        'skipped = {"world_size"} if any_world_size else set()', "skipped: set[str] = set()",
        ["test_from.py::TestWarnings::test_another_number_of_processes_that_changes_nothing"],
    ),
    Mutation(
        "a lab's run is found to have no moments once its length is changed", "training/checkpoint/load.py",
        "    if not checkpoint.optimizer:\n", "    if False:\n",
        ["test_train_on.py::test_a_run_of_a_lab_has_nothing_to_train_on_with"],
    ),
    Mutation(
        "a run that has reached its loss is trained on to the same loss", "app/commands.py",
        "\"None\" if own else \"none\"", "f\"{0.9 * horizon.until_val_loss:.4g}\"",
        ["test_train_on.py::test_the_command_that_trains_on_a_run_with_a_loss_to_reach"],
    ),
    Mutation(
        "a signal makes a run preempted before anything of its resume is recorded", "app/run/earlier_run.py",
        "    checkpoint = _newest_checkpoint(run, console,",
        "    attempt.run = run\n    checkpoint = _newest_checkpoint(run, console,",
        ["test_train_on.py::test_a_signal_or_a_lost_rank_before_it_trains_on_leaves_it_as_it_was"],
    ),
    Mutation(
        "a finished run is its next command's before that can train", "app/run/run_session.py",
        '    elif earlier.run.recorded().get("status") != "finished":\n', "    else:\n",
        ["test_train_on.py::test_what_ends_it_while_it_gets_ready_leaves_it_as_it_was"],
    ),
    Mutation(
        "a resume is recorded before its state is there", "app/run/earlier_run.py",
        "        checkpoint = self.checkpoint\n        if checkpoint is not None:\n            with",
        "        checkpoint = self.checkpoint\n        self._record(session, attempt, record, facts, evidence)\n"
        "        if checkpoint is not None:\n            with",
        ["test_train_on.py::test_what_ends_it_while_it_gets_ready_leaves_it_as_it_was"],
    ),
    Mutation(
        "a killed run whose warm-up fails is still running", "app/run/run_session.py",
        "        attempt.run = earlier.run\n", "        pass\n",
        ["test_train_on.py::test_an_unfinished_run_whose_warm_up_fails_has_failed"],
    ),
    Mutation(
        "a resumed run forgets the rows that fit", "app/run/earlier_run.py",
        '    names |= {"batch.micro_sequences"}', "    pass",
        ["test_micro_batch.py::test_a_resumed_run_records_what_fits_once_it_trains"],
    ),
    Mutation(
        "checkpoints of a run with a new length name the old one", "app/run/earlier_run.py",
        '        about["run"] = self.run.identity(session.data.fingerprint)\n', "",
        ["test_train_on.py::test_it_is_the_longer_run_bit_for_bit_where_the_schedule_allows"],
    ),
    Mutation(
        "a run that has its new length is still a finished one for a signal", "app/run/earlier_run.py",
        "        attempt.run = self.run  # not before it has its new length, without which the same command would be "
        "refused\n        _record_resume(self.run, facts, evidence, self.checkpoint, console)\n",
        "        _record_resume(self.run, facts, evidence, self.checkpoint, console)\n        attempt.run = self.run\n",
        ["test_train_on.py::test_a_signal_once_it_has_its_new_length_is_continued_without_it"],
    ),
    Mutation(
        "a run with a new length that it was not trained to has finished", "runtime/records/run_directory.py",
        "return changed <= end", "return True",
        ["test_train_on.py::test_what_fails_right_after_it_has_its_new_length_is_continued"],
    ),
    Mutation(
        "a resumed run that does not validate is told to validate", "app/run/earlier_run.py",
        "if loss is not None and not (stored", "if False and not (stored",
        ["test_train_on.py::test_a_run_that_does_not_validate_on_the_way_has_no_loss_to_reach"],
    ),
    Mutation(
        "a checkpoint that was passed over as damaged takes the place of an intact one", "training/recorder.py",
        "if step > checkpoint.step)", "if False)",
        ["test_resume.py::test_a_damaged_checkpoint_takes_no_intact_ones_place"],
    ),
    Mutation(
        "a damaged checkpoint does not count once it is saved again", "training/checkpoint/saver.py",
        "damaged = damaged - {request.step}", "pass",
        ["test_resume.py::test_a_damaged_checkpoint_that_is_saved_again_counts_again"],
    ),
    Mutation(
        "a resumed run learns its tokenizer again", "app/run/earlier_run.py",
        "with_own_tokenizer(config, run)", "config",
        ["test_train_on.py::test_a_run_keeps_its_tokenizer_where_another_would_be_learned"],
    ),
    Mutation(
        "a run that Python trains is lost when its caller goes to another folder", "app/run/attempt.py",
        "path if self.catch else path.absolute()", "path",
        ["test_api.py::TestHooks::test_one_may_go_to_another_folder"],
    ),
    Mutation(
        "a finished run does not get back its tokenizer", "app/run/earlier_run.py",
        "        load_tokenizer(run.tokenizer_path)\n        summary", "        summary",
        ["test_train_on.py::test_a_finished_run_gets_back_its_tokenizer"],
    ),
    Mutation(
        "a run whose corpus was moved cannot be told where it is", "app/run/run_request.py",
        'free = FREE_FIELDS - {"run_dir", "init_from"} |', "free = set[str]() |",
        ["test_train_on.py::test_a_run_whose_corpus_was_moved"],
    ),
    Mutation(
        "a run whose corpus was moved does not say how to tell where it is", "app/run/train_run.py",
        'raise UserError(f"{error}; {moved}") from None', "raise",
        ["test_train_on.py::test_a_run_whose_corpus_was_moved"],
    ),
    Mutation(
        "a resumed run times its dtype again", "app/run/earlier_run.py",
        "as_recorded(self.run, config.runtime, resolve_device(config.runtime.device))", "config.runtime",
        ["test_resume.py::test_the_dtype_that_was_timed_stays",
         "test_choice.py::test_a_run_keeps_what_it_multiplies_by"],
    ),
    Mutation(
        "the products of a run are timed again when it is evaluated", "app/run/loaded_run.py",
        'found.setdefault("products", products)', "pass",
        ["test_choice.py::test_a_run_keeps_what_it_multiplies_by"],
    ),
    Mutation(
        "a run cannot be evaluated with a damaged run.json", "app/run/loaded_run.py",
        'run.directory.recorded().get("data_fingerprint")', 'run.directory.read_provenance().get("data_fingerprint")',
        ["test_cli_eval_sample.py::TestEval::test_a_damaged_run_json_ends_nothing"],
    ),
    Mutation(
        "a run cannot be exported without its run.json", "app/foreign_models.py",
        'run.directory.recorded().get("imported")', 'run.directory.read_provenance().get("imported")',
        ["test_export.py::TestCommand::test_a_lost_run_json_ends_nothing"],
    ),
    Mutation(
        "an export does not say that documents were masked", "app/foreign_models.py",
        "{MASKED_DOCUMENTS: run.config.data.mask_documents}", "{MASKED_DOCUMENTS: False}",
        ["test_export.py::TestCommand::test_a_warning_says_that_documents_were_masked"],
    ),
    Mutation(
        "an export replaces the folder that the shell is in", "runtime/files/staged_folder.py",
        'if target.samefile("."):', "if False:",
        ["test_staged_folder.py::test_the_current_folder_is_not_replaced"],
    ),
    Mutation(
        "a library that is a little faster multiplies", "model/kernels/choice.py",
        "CLEARLY = 0.90", "CLEARLY = 1.0",
        ["test_choice.py::test_the_library_is_chosen_where_it_is_clearly_faster"],
    ),
    Mutation(
        "a busy machine chooses what multiplies", "model/kernels/choice.py",
        "        for _ in range(3):\n", "        for _ in range(1):\n",
        ["test_choice.py::test_another_program_that_slows_the_kernels_down_chooses_nothing"],
    ),
    Mutation(
        "products of a large model are timed as often as those of a small one", "model/kernels/choice.py",
        "if time.perf_counter() - started > _ENOUGH_SECONDS:", "if False:",
        ["test_choice.py::test_a_large_model_is_timed_for_two_seconds"],
    ),
    Mutation(
        "float32 is multiplied by the kernels, whatever is faster", "model/kernels/choice.py",
        'if kernels == "none":', 'if dtype != torch.bfloat16 or kernels == "none":',
        ["test_choice.py::test_float32_has_a_choice_of_its_own"],
    ),
    Mutation(
        "timing products draws random numbers", "model/kernels/choice.py",
        "    with torch.random.fork_rng(devices=[]):", "    if True:",
        ["test_choice.py::test_real_times"],
    ),
    Mutation(
        "products are timed by each run", "model/kernels/choice.py",
        "if (times := _remembered(path)) is None:", "if True:",
        ["test_choice.py::test_it_is_timed_once_for_a_model"],
    ),
    Mutation(
        "the head is multiplied by the kernels, whatever was chosen", "model/head.py",
        "if (kernels := multiplication(x))",
        "if (kernels := implementation(x))",
        ["test_choice.py::test_what_the_library_multiplies"],
    ),
    Mutation(
        "an H100's peak is that of its data sheet with sparsity", "runtime/hardware/peak.py",
        '"h100": 989.5,', '"h100": 1979,',
        ["test_peak.py::test_table_agrees_with_the_chip"],
        ["MFU against 989.5 TFLOP/s"],
    ),
    Mutation(
        "peak memory is what is in use now", "runtime/hardware/device.py",
        'line.startswith("VmHWM:")', 'line.startswith("VmRSS:")',
        ["test_device.py::test_peak_memory_rises_with_an_allocation_and_stays"],
    ),
    # --- provenance
    Mutation(
        "new files are not in the patch", "runtime/records/provenance.py",
        "if new := missing():", "if new := set():",
        ["test_provenance.py::TestCode::test_commit_and_patch_give_exactly_what_ran"],
        ["The script reads its own code"],
    ),
    Mutation(
        "ignored files are not in the patch", "runtime/records/provenance.py",
        '"add", "--force", "--intent-to-add"', '"add", "--intent-to-add"',
        ["test_provenance.py::TestCode::test_what_git_passes_over_is_part_of_what_ran"],
    ),
    Mutation(
        "the code is not kept", "runtime/records/provenance.py",
        'files |= {f"code/{name}": content for name, content in code.files.items()}', "pass",
        ["test_provenance.py::TestRun::test_keeps_code_environment_and_report"],
        ["A checkpoint has step, code, weights"],
    ),
    Mutation(
        "the GPU's report is not kept", "runtime/records/provenance.py",
        'files if gpu is None else files | {"gpu.txt": gpu.encode()}', "files",
        ["test_provenance.py::TestRun::test_keeps_code_environment_and_report"],
        ["The log says the torch and CUDA versions"],
    ),
    Mutation(
        "the GPU's report names the machine", "runtime/records/provenance.py",
        'return _without(platform.node(), "HOST", output.decode(errors="replace"))',
        'return output.decode(errors="replace")',
        ["test_provenance.py::TestGpuReport::test_is_what_the_tool_prints_without_the_hosts_name"],
        ["The log says the torch and CUDA versions"],
    ),
    Mutation(
        "the CUDA version is not noted", "runtime/records/provenance.py",
        '"cuda_version": torch.version.cuda', '"cuda_version": None',
        ["test_provenance.py::TestRun::test_keeps_code_environment_and_report"],
        ["The log says the torch and CUDA versions"],
    ),
    Mutation(
        "the torch version is gptlab's", "runtime/records/provenance.py",
        '"torch_version": str(torch.__version__)', '"torch_version": platform.python_version()',
        ["test_provenance.py::TestRun::test_keeps_code_environment_and_report"],
        ["The log says the torch and CUDA versions"],
    ),
    Mutation(
        "a second run of one second goes into the first one's folder", "runtime/records/run_directory.py",
        "    while path.exists():\n", "    while False:\n",
        ["test_run_directory.py::test_default_names"],
    ),
    Mutation(
        "run.json does not tell the data", "app/run/session.py",
        '"data_fingerprint": self.data.fingerprint', '"data_fingerprint": self.data.tokenizer.fingerprint',
        ["test_train.py::TestRunFolder::test_provenance"],
    ),
    # --- metrics
    Mutation(
        "unknown figures are omitted from their line", "runtime/records/metrics.py",
        'line = to_json({"kind": kind, **fields})',
        'line = to_json({"kind": kind, **{name: value for name, value in fields.items() if value is not None}})',
        ["test_metrics.py::test_one_line_by_hand"],
    ),
    Mutation(
        "the log lacks what was shown before it was there", "runtime/records/console.py",
        "            for text in self._unlogged:\n                self._log.append(text)\n", "",
        ["test_train.py::TestClosingBlock::test_log_holds_what_the_console_showed_and_every_step",
         "test_console.py::test_what_was_shown_before_the_log_was_there_is_in_it"],
    ),
    Mutation(
        "an H100 on PCIe counts as any H100", "runtime/hardware/peak.py",
        '_VARIANTS = frozenset(("nvl", "pcie",', '_VARIANTS = frozenset(("nvl",',
        ["test_peak.py::test_every_row_is_reachable_by_a_real_name"],
        ["MFU against 989.5 TFLOP/s"],
    ),
    Mutation(
        "config.json has another seed than the run", "app/run/run_session.py",
        "config_to_json(config), record", "config_to_json(replace(config, seed=0)), record",
        ["test_train.py::TestRunFolder::test_config_reproduces_the_run",
         "test_from.py::TestRepeats::test_twice_over_it_is_the_same_run"],
        ["The script reads its own code"],
    ),
]  # fmt: skip
