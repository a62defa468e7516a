"""The loop, one step, the clock, what a run remembers and records."""

from __future__ import annotations

from .mutation import Mutation

CLOCK = "test_train.py::TestClock::test_training_and_nothing_else"

MUTATIONS = [
    Mutation(
        "a run takes SIGUSR1 from the program that has a use for it", "training/signals.py",
        'return number.name != "SIGUSR1" or self.end_now is not None', "return True",
        ["test_signals.py::TestSignals::test_the_one_that_slurm_is_often_told_to_send_before_its_time_is_over"],
    ),
    Mutation(
        "SIGUSR1 kills a run", "training/signals.py",
        '"SIGHUP", "SIGUSR1")', '"SIGHUP")',
        ["test_signals.py::TestSignals::test_the_one_that_slurm_is_often_told_to_send_before_its_time_is_over"],
    ),
    Mutation(
        "a second Ctrl-C decides the exit code of a run that was saved", "training/signals.py",
        "signal.SIG_IGN if self.end_now and self._settled else former", "former",
        ["test_signals.py::TestSignals::test_nor_the_exit_code_of_a_process_that_is_about_to_exit"],
    ),
    Mutation(
        "a run ignores signals in the program that called it", "training/signals.py",
        "signal.SIG_IGN if self.end_now and self._settled else former", "signal.SIG_IGN if self._settled else former",
        ["test_signals.py::TestSignals::test_nor_the_exit_code_of_a_process_that_is_about_to_exit"],
    ),
    Mutation(
        "a SIGCONT without a pause shortens a step", "training/signals.py",
        "step_seconds > self._step_seconds + _PAUSE_SECONDS", "step_seconds > self._step_seconds",
        ["test_signals.py::TestInThisProcess::test_a_pause_is_off_the_clock"],
    ),
    Mutation(
        "a paused process spends its time", "training/signals.py",
        "            return self._step_seconds\n", "            return step_seconds\n",
        ["test_signals.py::TestInThisProcess::test_a_pause_is_off_the_clock"],
    ),
    Mutation(
        "a signal after the last step is a preemption", "app/run/run_session.py",
        "            attempt.signals.too_late()\n", "",
        ["test_signals.py::TestInThisProcess::test_after_the_last_step_a_run_ends_as_it_would"],
    ),
    Mutation(
        "a run that goes on is told to resume", "training/checkpoint/write.py",
        ": {remedy}\"", ": {remedy}, then use --resume\"",
        ["test_bad_input.py::TestFullDisk::test_that_a_run_is_told_to_bear"],
    ),
    Mutation(
        "a checkpoint that was not saved stays the last good one", "training/checkpoint/saver.py",
        "state.faults.good_step = request.former_good", "pass",
        ["test_background_save.py::TestFailure::test_one_that_was_not_saved_is_not_the_last_good_one"],
    ),
    # --- one step
    Mutation(
        "the gradient is that of the sum", "training/step.py",
        "factor / max(batch.target_tokens, 1)", "factor",
        ["test_train.py::TestLoss::test_accumulated_gradients_are_those_of_one_batch"],
    ),
    Mutation(
        "only the first micro-batch's gradient counts", "training/step.py",
        "            (loss if scale else loss * share).backward()\n",
        "            if position == positions[0]:\n                (loss if scale else loss * share).backward()\n",
        ["test_train.py::TestLoss::test_accumulated_gradients_are_those_of_one_batch",
         "test_train.py::TestLoss::test_the_cut_into_micro_batches_does_not_matter_to_a_run"],
        ["`--device-batch-size`, `--total-batch-size`"],
    ),
    Mutation(
        "the loss of a step is the sum of its means", "training/step.py",
        "return total / batch.target_tokens", "return total / batch.target_tokens * len(batch.micro_indices)",
        ["test_train.py::TestLoss::test_first_loss_is_the_mean_over_all_micro_batches",
         "test_train.py::TestLoss::test_accumulated_gradients_are_those_of_one_batch"],
    ),
    Mutation(
        "dropout of all micro-batches is the same", "training/step.py",
        "seed_torch(fold_seed(config.seed, batch.step, index), state.device)",
        "seed_torch(fold_seed(config.seed, batch.step, 0), state.device)",
        ["test_train.py::TestLoss::test_dropout_is_keyed_by_seed_step_and_micro_batch"],
    ),
    Mutation(
        "the loss of float16 is not scaled", "training/step.py",
        "state.loss_scale.scale if state.loss_scale else 1.0", "1.0",
        ["test_float16.py::test_losses_and_norms_are_those_of_float32"],
        ["The loss is scaled for float16"],
    ),
    Mutation(
        "the loss of float16 is scaled after its gradient is rounded", "model/head.py",
        "loss_and_gradient(wide, targets", "loss_and_gradient(logits, targets",
        ["test_float16.py::test_small_probabilities_have_gradients"],
    ),
    Mutation(
        "gradients of float16 are clipped before they are unscaled", "training/step.py",
        "        torch._foreach_div_([p.grad for p in weights if p.grad is not None], loss_scale.scale)\n",
        "        pass\n",
        ["test_float16.py::test_losses_and_norms_are_those_of_float32"],
        ["The loss is scaled for float16"],
    ),
    Mutation(
        "the loss scale is never updated", "training/step.py",
        "loss_scale.update(is_finite)", "pass",
        ["test_float16.py::test_an_overflow_leaves_the_update_out_and_halves_the_scale"],
        ["The loss is scaled for float16"],
    ),
    Mutation(
        "an overflow of float16 is an update", "training/step.py",
        "    if is_finite:\n        strategy.step", "    if True:\n        strategy.step",
        ["test_float16.py::test_an_overflow_leaves_the_update_out_and_halves_the_scale"],
        ["The loss is scaled for float16"],
    ),
    Mutation(
        "the loss scale grows in spite of overflows", "training/state.py",
        "self.scale, self.good_steps = self.scale / 2, 0", "self.scale = self.scale / 2",
        ["test_float16.py::test_the_scale_is_that_of_torchs_gradscaler"],
        ["The loss is scaled for float16"],
    ),
    Mutation(
        "a fault halves the loss scale", "training/step.py",
        '        return Fault("gradient", norm)',
        '        return (loss_scale and loss_scale.update(False)) or Fault("gradient", norm)',
        ["test_float16.py::test_a_fault_leaves_the_scale_as_it_was"],
    ),
    Mutation(
        "a rank sees an overflow in its own share alone", "training/parallel/zero.py",
        'self.group.sum(sum_of_squares(gradients, self._device), "gradient norm")',
        "sum_of_squares(gradients, self._device)",
        ["test_gradient_norm.py::test_all_ranks_see_what_is_not_finite_in_one_ranks_share"],
    ),
    Mutation(
        "a rank sees an overflow in its own rows alone", "training/parallel/fsdp.py",
        'self.group.sum(sum_of_squares(counted, self._device), "gradient norm")',
        "sum_of_squares(counted, self._device)",
        ["test_gradient_norm.py::test_one_precision_for_any_number_of_ranks"],
    ),
    Mutation(
        "the loss scale is not saved", "training/state.py",
        'if self.loss_scale and saved["scaler"]:', "if False:",
        ["test_resume.py::TestSavedPartsCount::test_loss_scale"],
        ["The loss is scaled for float16"],
    ),
    Mutation(
        "a step keeps its gradients", "training/step.py",
        "    strategy.zero_grad()\n", "",
        ["test_train.py::TestLoss::test_an_update_frees_the_gradients"],
        ["Gradients are set to None"],
    ),
    # --- the loop
    Mutation(
        "the loop is longer than a screen", "training/loop.py",
        "        while True:\n", "        while True:\n" + "\n" * 40,
        ["test_train.py::test_loop_fits_on_a_screen"],
        ["The loop fits on a screen"],
    ),
    Mutation(
        "a run that only evaluates trains", "app/run/run_session.py",
        "(evaluate_only if config.eval.only else fit)(", "fit(",
        ["test_train.py::TestEnd::test_evaluation_only",
         "test_init_from.py::test_eval_only_measures_the_weights_and_trains_nothing"],
        ["`eval_only` ends after"],
    ),
    Mutation(
        "the clock of samples begins again with a resumed run", "training/state.py",
        '_DUE_BY_CLOCK = ("evaluated", "sampled", "saved")', '_DUE_BY_CLOCK = ("evaluated", "saved")',
        ["test_resume.py::test_killed_with_everything_due_by_the_clock"],
    ),
    Mutation(
        "no validation at the end unless it is due", "training/loop.py",
        "or self._due(state, state.evaluated, wanted.every_steps, wanted.every_seconds)",
        "or (not self.finish.reached(state)\n"
        "                and self._due(state, state.evaluated, wanted.every_steps, wanted.every_seconds))",
        ["test_lineage_recipes.py::TestRuns::test_each_trains_and_ends"],
        ["0 means only at the end"],
    ),
    Mutation(
        "no checkpoint at the end unless it is due", "training/loop.py",
        "return best or self._due(", "return best or not self.finish.reached(state) and self._due(",
        ["test_lineage_recipes.py::TestRuns::test_each_trains_and_ends"],
        ["0 means only at the end", "A checkpoint at the end and every `--save-every`",
         "Run as a module, or with `torchrun`", "On a CPU, a command line of eight flags"],
    ),
    Mutation(
        "CORE is not measured at the end", "training/loop.py",
        "return self._due(state, state.core_measured,",
        "return not self.finish.reached(state) and self._due(state, state.core_measured,",
        ["test_core.py::TestWithinARun::test_the_end_is_measured_whenever_it_was_due"],
        ["CORE every 2000 steps after the first"],
    ),
    Mutation(
        "something due is done twice at one step", "training/loop.py",
        "        if last is not None and last.step == state.step:\n            return False\n", "",
        ["test_train.py::TestPreemption::test_preempted_again_and_again"],
        ["A checkpoint at the end and every `--save-every`"],
    ),
    Mutation(
        "validation is not at the start", "training/loop.py",
        "(wanted.at_start and state.step == 0 and state.evaluated is None)", "False",
        ["test_train.py::TestMetrics::test_other_lines"],
        ["Bits per byte every 250 steps"],
    ),
    Mutation(
        "schedules do not follow the clock", "training/step.py",
        "finish.progress(state.step, state.train_seconds)", "0.0",
        ["test_train.py::TestClock::test_a_budget_in_seconds", "test_train.py::TestMetrics::test_train_lines"],
        ["Five minutes of training; progress"],
    ),
    Mutation(
        "validation is on the clock", "training/loop.py",
        "    result = work.evaluate()\n",
        "    result = work.evaluate()\n    state.train_seconds += time.perf_counter() - started\n",
        [CLOCK],
        ["The clock stops for validation and saving"],
    ),
    Mutation(
        "CORE is on the clock", "training/loop.py",
        "    result = work.core()\n",
        "    result = work.core()\n    state.train_seconds += time.perf_counter() - started\n",
        ["test_core.py::TestWithinARun::test_seconds_are_off_the_clock"],
        ["The clock stops for validation and saving"],
    ),
    Mutation(
        "saving is on the clock", "training/loop.py",
        "    record.saves.checkpoint(state, scheduled=scheduled)",
        "    started = time.perf_counter()\n    record.saves.checkpoint(state, scheduled=scheduled)\n"
        "    state.train_seconds += time.perf_counter() - started",
        [CLOCK],
        ["The clock stops for validation and saving"],
    ),
    Mutation(
        "a step's time ends before the device has done its work", "training/step.py",
        "    synchronize(state.device)\n", "",
        ["test_train.py::TestClock::test_the_device_is_waited_for_within_the_step"],
        ["The step's time lies between"],
    ),
    Mutation(
        "a GPU makes updates from gradients that are not finite", "training/queued_steps.py",
        "strategy.step(*rates, made)", "strategy.step(*rates)",
        ["test_queued_steps.py::TestTheSameRun::test_skips_the_same_updates_and_names_the_same_weight"],
    ),
    Mutation(
        "a GPU's norms leave out weights without gradient", "training/queued_steps.py",
        "[p.new_zeros(()) if p.grad is None else p.grad for p in strategy.updated_weights()]",
        "[p.grad for p in strategy.updated_weights() if p.grad is not None]",
        ["test_queued_steps.py::test_norms_are_of_every_weight_also_of_one_without_gradient"],
    ),
    Mutation(
        "a GPU evaluates while a step is under way", "training/queued_steps.py",
        "None if due(latest) else", "None if due(state) else",
        ["test_queued_steps.py::test_one_step_ahead_until_something_is_due"],
    ),
    Mutation(
        "a GPU begins a step beyond the budget in seconds", "training/queued_steps.py",
        "train_seconds=after.train_seconds + seconds", "train_seconds=state.train_seconds",
        ["test_queued_steps.py::test_a_budget_in_seconds"],
    ),
    Mutation(
        "a GPU's steps take as long as the host waits for each", "training/queued_steps.py",
        "seconds = min(seconds, before.elapsed_time(queued.copied) / 1000)", "pass",
        ["test_queued_steps.py::test_the_gpu_tells_how_long_each_step_took"],
    ),
    Mutation(
        "a captured step keeps the rates of the first one", "training/captured_steps.py",
        "rate.fill_(value)", "pass",
        ["test_queued_steps.py::test_a_captured_step_trains_as_any_other"],
    ),
    Mutation(
        "a captured step draws the dropout of the step before", "training/captured_steps.py",
        "seed_torch(fold_seed(self._config.seed, batch.step, index), self._device)", "pass",
        ["test_queued_steps.py::test_a_captured_step_trains_as_any_other"],
    ),
    Mutation(
        "a captured step without targets is trained on", "training/captured_steps.py",
        "self._count.fill_(batch.target_tokens)", "self._count.fill_(max(batch.target_tokens, 1))",
        ["test_queued_steps.py::test_a_captured_step_refuses_a_broken_update"],
    ),
    Mutation(
        "graphs are kept for steps that the host waits for", "training/captured_steps.py",
        "is_own and is_queued", "is_own",
        ["test_queued_steps.py::test_no_step_in_which_the_host_has_a_part"],
    ),
    Mutation(
        "steps that restore generators are captured", "training/captured_steps.py",
        " and not config.runtime.activation_checkpointing", "",
        ["test_queued_steps.py::test_no_step_in_which_the_host_has_a_part"],
    ),
    Mutation(
        "a GPU times steps whatever the text is", "app/sizing.py",
        "last.flops_per_second is None and text_ends_first(last, config)", "False",
        ["test_train_run.py::test_a_gpu_trains_four_epochs_of_the_text_that_was_prepared"],
    ),
    Mutation(
        "the best is whatever was validated last", "training/state.py",
        "return other if one is None or other.val_loss < one.val_loss else one", "return other",
        ["test_train.py::test_best_checkpoint_is_kept"],
        ["A checkpoint whenever the validation loss improves", "The lowest so far is kept"],
    ),
    Mutation(
        "a best validation is no reason to save", "training/loop.py",
        "best = wanted.save_best and", "best = False and",
        ["test_train.py::test_best_checkpoint_is_kept"],
        ["A checkpoint whenever the validation loss improves"],
    ),
    Mutation(
        "the best checkpoint goes with the others", "training/checkpoint/saver.py",
        '"best_step": best.step if wanted.keep_best and best else None', '"best_step": None',
        ["test_train.py::test_best_checkpoint_is_kept"],
        ["The lowest so far is kept"],
    ),
    # --- the console, the end of a run, fields of GPU runs
    Mutation(
        "coordinate descent tuning is not passed on", "training/compilation.py",
        'options["coordinate_descent_tuning"] = True', "pass",
        ["test_compiled_run.py::test_settings_of_the_compiler_and_the_gpu_allocator_are_passed_on"],
        ["Inductor's coordinate descent tuning"],
    ),
    Mutation(
        "the GPU allocator is not told", "runtime/hardware/place.py",
        "set_gpu_allocator(runtime.allocator)", "pass",
        ["test_compiled_run.py::test_settings_of_the_compiler_and_the_gpu_allocator_are_passed_on"],
        ["Expandable segments in the CUDA allocator"],
    ),
    Mutation(
        "a run that is never to validate does", "training/loop.py",
        "return wanted.validates and (", "return (",
        ["test_train.py::TestEnd::test_without_any_validation"],
        ["Bits per byte every 250 steps"],
    ),
    Mutation(
        "nanochat validates at the end whatever its interval", "config/recipes/nanochat.py",
        "EvalConfig(every_steps=100, at_end=False,", "EvalConfig(every_steps=100,",
        ["test_train.py::TestEnd::test_the_recipes_of_nanochat_turn_it_off_as_nanochat_does"],
        ["Bits per byte every 250 steps"],
    ),
    Mutation(
        "the lowest bits per byte are the last", "training/loop.py",
        "state.min_val_bpb = min(result.val_bpb, result.val_bpb if state.min_val_bpb is None else state.min_val_bpb)",
        "state.min_val_bpb = result.val_bpb",
        ["test_train.py::test_the_lowest_bits_per_byte_are_kept_and_resumed"],
        ["The lowest so far is kept"],
    ),
    Mutation(
        "the lowest bits per byte are not saved", "training/state.py",
        '            "min_val_bpb": self.min_val_bpb,\n', "",
        ["test_train.py::test_the_lowest_bits_per_byte_are_kept_and_resumed"],
        ["The lowest so far is kept"],
    ),
    # --- compilation
    Mutation(
        "warming up leaves weights moved", "training/compilation.py",
        "                tensor.copy_(copy)\n", "                pass\n",
        ["test_compiled_run.py::test_warm_up_leaves_no_trace"],
        ["The training loader is reset"],
    ),
    Mutation(
        "nothing is compiled", "training/compilation.py",
        "return cast(F, torch.compile(function, dynamic=False, options=options))", "return function",
        ["test_compiled_run.py::test_what_is_compiled_and_for_one_shape"],
        ["The model is compiled"],
    ),
    Mutation(
        "the model is compiled for any shape", "training/compilation.py",
        "dynamic=False", "dynamic=True",
        ["test_compiled_run.py::test_what_is_compiled_and_for_one_shape"],
        ["The model is compiled for one shape"],
    ),
    Mutation(
        "validation runs uncompiled blocks", "training/compilation.py",
        "hidden = model.hidden(tokens, blocks, embed, look_up).detach()", "hidden = model.hidden(tokens).detach()",
        ["test_compiled_run.py::test_what_is_compiled_and_for_one_shape"],
        ["Autocast to bfloat16, but not in validation"],
    ),
    # --- what a run remembers
    Mutation(
        "a resumed run has fresh moments", "training/state.py",
        '        self.strategy.load_moments(moments, saved["optimizer"])\n', "",
        ["test_resume.py::test_killed_whatever_is_trained",
         "test_resume.py::TestSavedPartsCount::test_nothing_forgotten"],
        ["`init_from='resume'` restores"],
    ),
    Mutation(
        "a resumed run begins its data again", "training/state.py",
        'self.loader.load_state_dict(saved["loader"])', "pass",
        ["test_resume.py::test_killed_whatever_is_trained"],
        ["`init_from='resume'` restores", "It holds configuration, loop state"],
    ),
    Mutation(
        "the clock of a resumed run begins at zero", "training/state.py",
        'self.step, self.train_seconds = saved["step"], saved["train_seconds"]', 'self.step = saved["step"]',
        ["test_resume.py::test_killed_whatever_is_trained"],
        ["It holds configuration, loop state"],
    ),
    Mutation(
        "weights of other shapes are let through", "training/checkpoint/load.py",
        "if parameter.shape != tensors[name].shape:", "if parameter.ndim != tensors[name].ndim:",
        ["test_cli_eval_sample.py::TestRefusals::test_another_model"],
        ["Weights are loaded strictly"],
    ),
    # --- watching over it
    Mutation(
        "a loss above the limit goes on", "training/faults.py",
        "    if loss > config.runtime.max_loss:", "    if loss > config.runtime.max_loss and not math.isfinite(loss):",
        ["test_train.py::TestBrokenTraining::test_exploding_loss",
         "test_watchdog.py::test_a_broken_loss_ends_training_with_one_line"],
    ),
    Mutation(
        "garbage is collected every 500 steps", "training/step.py",
        "_COLLECT_EVERY_STEPS = 5000", "_COLLECT_EVERY_STEPS = 500",
        ["test_watchdog.py::test_no_collection_but_every_5000_steps"],
    ),
    Mutation(
        "what set-up left is looked at in every collection", "training/step.py",
        "    gc.freeze()\n", "",
        ["test_watchdog.py::test_no_collection_but_every_5000_steps"],
    ),
    # --- figures
    Mutation(
        "the mean loss is not debiased", "training/state.py",
        "return self.sum / (1 - _BETA**self.count) if self.count else None", "return self.sum if self.count else None",
        ["test_throughput.py::test_mean_by_hand", "test_train.py::TestMetrics::test_train_lines",
         "test_throughput.py::test_mean_is_the_weighted_mean_that_it_claims_to_be"],
        ["The loss shown is a mean", "The loss is a debiased mean"],
    ),
    Mutation(
        "the mean loss forgets more slowly", "training/state.py",
        "_BETA = 0.9", "_BETA = 0.99",
        ["test_throughput.py::test_mean_by_hand", "test_train.py::TestMetrics::test_train_lines"],
        ["The loss shown is a mean", "The loss is a debiased mean"],
    ),
    Mutation(
        "a resumed mean is debiased again", "training/state.py",
        '    count: int = 0\n', '    count: int = field(default=0, init=False)\n',
        ["test_throughput.py::test_a_resumed_mean_goes_on_bit_for_bit"],
        ["The loss shown is a mean"],
    ),
    Mutation(
        "MFU is in tokens", "training/recorder.py",
        "self.flops_per_token * tokens_per_second / peak", "tokens_per_second / peak",
        ["test_throughput.py::test_speed_by_hand", "test_train.py::TestMetrics::test_train_lines"],
        ["Parameters by kind, FLOPs a token",
         "One line a step: step, percent"],
    ),
    Mutation(
        "the time left is that of one step less", "training/recorder.py",
        "(finish.steps - state.step) *", "(finish.steps - state.step - 1) *",
        ["test_throughput.py::test_time_left_in_steps_by_hand"],
    ),
    Mutation(
        "the step line has its time in seconds", "training/recorder.py",
        'f"dt: {1000 * step_seconds:.0f}ms"', 'f"dt: {step_seconds:.0f}ms"',
        ["test_train.py::TestMetrics::test_step_lines_show_the_figures_of_metrics"],
        ["One line a step: step, percent"],
    ),
    Mutation(
        "the step line shows the loss of the step, not the mean", "training/recorder.py",
        'f"loss: {state.loss_ema.value:.6f}"', 'f"loss: {loss:.6f}"',
        ["test_train.py::TestMetrics::test_step_lines_show_the_figures_of_metrics"],
        ["One line a step: step, percent", "The loss shown is a mean"],
    ),
    Mutation(
        "the step line shows the rate instead of its factor", "training/recorder.py",
        'f"lrm: {updated.lr_scale:.2f}"', 'f"lrm: {updated.lr_scale * self.config.optim.muon.lr:.2f}"',
        ["test_train.py::TestMetrics::test_step_lines_show_the_figures_of_metrics"],
        ["One line a step: step, percent"],
    ),
    Mutation(
        "the step line has its percent as a share", "training/recorder.py",
        "({100 * done:.1f}%)", "({done:.1f}%)",
        ["test_train.py::TestMetrics::test_step_lines_show_the_figures_of_metrics"],
        ["One line a step: step, percent", "The loss is a debiased mean"],
    ),
    Mutation(
        "step lines are one step late", "training/recorder.py",
        "if state.step % self.config.runtime.log_every_steps and",
        "if (state.step - 1) % self.config.runtime.log_every_steps and",
        ["test_train.py::TestMetrics::test_only_every_so_many_steps_and_at_the_last"],
        ["Every `log_interval` iterations"],
    ),
    Mutation(
        "the last step has a line only where it is one of every so many", "training/recorder.py",
        "log_every_steps and done < 1:", "log_every_steps:",
        ["test_train.py::TestMetrics::test_only_every_so_many_steps_and_at_the_last"],
    ),
    Mutation(
        "validation lines have no tokens", "training/recorder.py",
        "train_seconds=state.train_seconds, tokens=state.step * self.config.batch.total_tokens,",
        "train_seconds=state.train_seconds,",
        ["test_train.py::TestMetrics::test_other_lines"],
        ["Bits per byte every 250 steps"],
    ),
    Mutation(
        "the CORE line has another number of decimals", "training/recorder.py",
        "CORE metric: {state.core_metric:.4f}", "CORE metric: {state.core_metric:.1f}",
        ["test_core.py::TestWithinARun::test_console_and_summary"],
    ),
    Mutation(
        "the centered results are the accuracies", "training/recorder.py",
        "centered=dict(centered)", "centered=dict(accuracy)",
        ["test_core.py::TestWithinARun::test_lines"],
        ["CORE every 2000 steps after the first"],
    ),
    Mutation(
        "the closing block has its keys in another order", "training/recorder.py",
        '"val_bpb": 6, "training_seconds": 1, "total_seconds": 1,',
        '"training_seconds": 1, "val_bpb": 6, "total_seconds": 1,',
        ["test_docs.py::TestContracts::test_closing_block"],
    ),
    Mutation(
        "a line of the closing block is indented", "training/recorder.py",
        "f\"{key + ':':<18}", "f\" {key + ':':<18}",
        ["test_train.py::TestClosingBlock::test_on_the_console_and_last_in_the_log",
         "test_docs.py::TestContracts::test_closing_block"],
        ["The closing block: val_bpb"],
    ),
    Mutation(
        "training_seconds are those of the whole process", "training/recorder.py",
        '"training_seconds": state.train_seconds', '"training_seconds": self.off_clock.total_seconds',
        ["test_train.py::TestClosingBlock::test_numbers_are_those_of_summary_json"],
        ["The closing block: val_bpb"],
    ),
    Mutation(
        "total_tokens_M counts steps", "training/recorder.py",
        '"total_tokens_M": tokens / 1e6', '"total_tokens_M": state.step / 1e6',
        ["test_train.py::TestClosingBlock::test_numbers_are_those_of_summary_json"],
        ["The closing block: val_bpb"],
    ),
    Mutation(
        "total FLOPs are those of the forward pass", "training/recorder.py",
        "total_flops=self.throughput.flops_per_token * tokens",
        "total_flops=self.throughput.flops_per_token * tokens / 3",
        ["test_train.py::TestMetrics::test_train_lines"],
        ["Parameters by kind, FLOPs a token"],
    ),
    Mutation(
        "the time left is negative after the end", "training/recorder.py",
        "return max(0.0, (finish.seconds or 0.0) - state.train_seconds)",
        "return (finish.seconds or 0.0) - state.train_seconds",
        ["test_throughput.py::test_time_left_in_seconds_needs_no_step"],
        ["One line a step: step, percent"],
    ),
    Mutation(
        "the step line has another form than the README shows", "training/recorder.py",
        'f"tok/sec: {speed', 'f"tokens/sec: {speed',
        ["test_docs.py::TestQuickstartOutput::test_has_step_lines_as_the_recorder_writes_them",
         "test_train.py::TestMetrics::test_step_lines_show_the_figures_of_metrics"],
        ["Every `log_interval` iterations", "One line a step: step, percent"],
    ),
    Mutation(
        "CORE's centered results are not logged", "training/recorder.py",
        "tasks=dict(accuracy), centered=dict(centered),", "tasks=dict(accuracy),",
        ["test_docs.py::TestContracts::test_metrics", "test_core.py::TestWithinARun::test_lines"],
    ),
    Mutation(
        "what is due every so many steps is due one step before", "training/loop.py",
        "state.step % every_steps == 0", "(state.step + 1) % every_steps == 0",
        ["test_train.py::TestMetrics::test_other_lines"],
        ["A checkpoint at the end and every `--save-every`", "Bits per byte every 250 steps"],
    ),
    Mutation(
        "more graphs than torch permits by itself run uncompiled", "training/compilation.py",
        "    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT\n", "",
        ["test_compiled_parts.py::test_more_graphs_of_a_function_than_torch_permits_by_itself"],
    ),
    Mutation(
        "blocks with activation checkpointing are not compiled", "training/parallel/strategy.py",
        'block.forward if "forward" in vars(block) and not has_hooks(block) else block', "block",
        ["test_activation_checkpointing.py::test_blocks_that_are_compiled_one_by_one_are_compiled"],
    ),
    Mutation(
        "a validation of other rows keeps what a backward pass needs", "training/compilation.py",
        "torch.set_grad_enabled(len(tokens) == state.loader.micro_sequences)", "torch.enable_grad()",
        ["test_compiled_parts.py::test_a_validation_of_other_rows_keeps_nothing_for_a_backward_pass"],
    ),
    Mutation(
        "hooks of compiled blocks that are computed again are not called", "training/parallel/strategy.py",
        'if "forward" in vars(block) and not has_hooks(block) else', 'if "forward" in vars(block) else',
        ["test_activation_checkpointing.py::test_hooks_of_blocks_are_called_whether_these_are_compiled_or_not"],
    ),
    Mutation(
        "torch 2.11 keeps what it should compute again", "training/parallel/strategy.py",
        "if COMPILES_CHECKPOINTS or not isinstance(forward, partial):", "if True:",
        ["test_activation_checkpointing.py::test_blocks_that_are_compiled_one_by_one_are_compiled"],
    ),
    Mutation(
        "a GPU embeds tokens uncompiled", "training/compilation.py",
        "embed = compiled(model.embed) if is_gpu else None", "embed = None",
        ["test_compiled_parts.py::test_what_is_compiled"],
    ),
    Mutation(
        "a GPU looks value embeddings up uncompiled", "training/compilation.py",
        "look_up = compiled(model.look_up) if is_gpu and not state.strategy.is_sharded else None", "look_up = None",
        ["test_compiled_parts.py::test_what_is_compiled"],
    ),
    Mutation(
        "a plan forgets the workspaces of CUDA graphs", "bench/memory.py",
        "WORKSPACE * (2 if is_small(model, config) else 1)", "WORKSPACE",
        ["test_compiled_memory.py::test_memory_of_a_step_by_hand"],
    ),
    Mutation(
        "a GPU that is named by its number is not the current one", "runtime/hardware/device.py",
        "    torch.cuda.set_device(index)  # events", "    # events",
        ["test_device.py::test_the_gpu_that_is_named_becomes_the_current_one"],
    ),
    Mutation(
        "validation is compiled on the clock", "training/compilation.py",
        "        passes.token_nats(zeros, zeros)\n",
        "        pass\n",
        ["test_compiled_run.py::test_compiled_run"],
        ["The model is compiled", "The model is compiled for one shape"],
    ),
    Mutation(
        "peak memory is not reported", "training/recorder.py",
        '"peak_vram_mb": peak_memory_mb(state.device)', '"peak_vram_mb": 0.0',
        ["test_train.py::TestClosingBlock::test_numbers_are_those_of_summary_json"],
    ),
    # --- going back
    Mutation(
        "any checkpoint before a step without a fault is good, whatever the step began from", "training/state.py",
        "if self.saved is not None and self.saved.step == self.step:", "if self.saved is not None:",
        ["test_broken_steps.py::TestSpikes::test_a_good_one_is_known_by_the_first_step_from_it"],
    ),
    Mutation(
        "a validation is as good as a step to know a good checkpoint by", "training/checkpoint/saver.py",
        "proven = state.is_evaluated() and self.config.faults.spike_factor is None", "proven = state.is_evaluated()",
        ["test_broken_steps.py::TestSpikes::test_the_one_to_go_back_to_outlives_newer_ones"],
    ),
    # --- checkpoints
    Mutation(
        "a file that has grown passes for whole", "training/checkpoint/load.py",
        "if sizes[name] != record.size_bytes:", "if sizes[name] < record.size_bytes:",
        ["test_checkpoint.py::test_a_file_that_grew_is_damage_before_anything_of_it_is_read"],
    ),
    Mutation(
        "a file that grows after the look at its size is read up to it", "runtime/files/tensor_file.py",
        "    if size_bytes != expected.size_bytes:\n        raise DamagedFileError(f\"has {size_bytes:,} bytes, its",
        "    if size_bytes < expected.size_bytes:\n        raise DamagedFileError(f\"has {size_bytes:,} bytes, its",
        ["test_checkpoint.py::test_a_file_that_grows_after_its_size_was_checked"],
    ),
    # --- ends, and the figures there
    Mutation(
        "the loss that was asked for is not low enough", "training/state.py",
        "and state.val_loss <= self.until_val_loss", "and state.val_loss < self.until_val_loss",
        ["test_train.py::TestEnd::test_at_the_very_loss_that_was_asked_for"],
    ),
    Mutation(
        "mfu_percent is a share", "training/recorder.py",
        '"mfu_percent": None if mfu is None else 100 * mfu', '"mfu_percent": mfu',
        ["test_train.py::TestClock::test_figures_that_are_made_of_the_clock"],
        ["The closing block: val_bpb"],
    ),
    Mutation(
        "num_params_M counts matrices and head", "training/recorder.py",
        "in state.model.parameters()) / 1e6", "in state.model.blocks.parameters()) / 1e6",
        ["test_train.py::TestClock::test_figures_that_are_made_of_the_clock"],
        ["The closing block: val_bpb"],
    ),
    Mutation(
        "the step line has the time of the whole run left", "training/recorder.py",
        "return (finish.steps - state.step) *", "return finish.steps *",
        ["test_train.py::TestClock::test_figures_that_are_made_of_the_clock"],
        ["One line a step: step, percent"],
    ),
    Mutation(
        "samples are made after a signal within the validation", "training/loop.py",
        "if not stop.requested and work.prompts", "if work.prompts",
        ["test_train.py::TestPreemption::test_in_the_middle_of_a_validation"],
    ),
    Mutation(
        "a run that is resumed from its best checkpoint saves it again", "training/loop.py",
        "state.is_best() and state.step > 0 and state.saved != state.mark()", "state.is_best() and state.step > 0",
        ["test_train.py::test_a_best_checkpoint_is_not_saved_again_by_the_run_that_resumes_from_it"],
    ),
]  # fmt: skip
