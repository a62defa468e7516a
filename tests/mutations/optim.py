"""Schedules, Muon, AdamW, and both as one."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    # --- schedules
    Mutation(
        "the first step of a warm-up is wasted", "optim/schedule.py",
        "min((progress + step_fraction) / schedule.warmup_fraction, 1.0)", "progress / schedule.warmup_fraction",
        ["test_schedule.py::test_first_step_is_not_wasted_and_the_clock_may_overrun",
         "test_schedule.py::test_trapezoid_is_that_of_autoresearch_and_nanochat"],
        ["Warm-up starts at (it + 1)", "250 steps of warm-up"],
    ),
    Mutation(
        "the first step of a warm-up on the clock is wasted", "training/state.py",
        "return CLOCK_STEP_FRACTION if", "return 0.0 if",
        ["test_schedule.py::test_a_warm_up_on_the_clock_rises_from_the_first_step_on"],
        ["Learning rate: warm-up, full"],
    ),
    Mutation(
        "the cosine begins one step late", "optim/schedule.py",
        "max(schedule.warmup_fraction - step_fraction, 0.0)", "schedule.warmup_fraction",
        ["test_lineage_recipes.py::TestLearningRates::test_the_cosine_begins_at_the_first_step_with_the_full_rate",
         "test_lineage_recipes.py::TestLearningRates::test_of_nanogpt"],
        ["Cosine with warm-up"],
    ),
    Mutation(
        "the cosine ends at zero, whatever the final rate", "optim/schedule.py",
        "return _between(schedule.final_lr_scale, 1.0, _cosine(progress, start))", "return _cosine(progress, start)",
        ["test_schedule.py::test_cosine_is_nanogpts", "test_lineage_recipes.py::TestLearningRates::test_of_nanogpt"],
        ["Cosine with warm-up", "The learning rate is worked out"],
    ),
    Mutation(
        "the warm-down begins at the wrong end", "optim/schedule.py",
        "remaining = 1.0 - progress", "remaining = progress",
        ["test_schedule.py::test_trapezoid_is_that_of_autoresearch_and_nanochat",
         "test_lineage_recipes.py::TestLearningRates::test_of_the_speedrun",
         "test_lineage_recipes.py::TestLearningRates::test_of_the_speedrun_by_hand"],
        ["6200 iterations, no warm-up", "250 steps of warm-up"],
    ),
    Mutation(
        "a run on the clock that ends late has a negative rate", "optim/schedule.py",
        "progress = min(max(progress, 0.0), 1.0)", "progress = max(progress, 0.0)",
        ["test_schedule.py::test_first_step_is_not_wasted_and_the_clock_may_overrun"],
        ["Five minutes of training; progress"],
    ),
    Mutation(
        "weight decay rises instead of falling", "optim/schedule.py",
        "return _between(1.0, schedule.weight_decay_final,", "return _between(schedule.weight_decay_final, 1.0,",
        ["test_schedule.py::test_weight_decay_of_autoresearch_and_nanochat",
         "test_lineage_recipes.py::TestLearningRates::test_momentum_and_decay_of_autoresearch",
         "test_lineage_recipes.py::TestLearningRates::test_of_nanochat_by_hand"],
        ["Weight decay falls from 0.2 to 0", "Momentum from 0.85 to 0.95 in 300 steps; decay"],
    ),
    Mutation(
        "momentum starts at its last value", "optim/schedule.py",
        "return _between(config.momentum_start, config.momentum, step / config.momentum_ramp_steps)",
        "return config.momentum",
        ["test_schedule.py::test_momentum_ramp_of_autoresearch_and_nanochat",
         "test_lineage_recipes.py::TestLearningRates::test_momentum_and_decay_of_autoresearch",
         "test_lineage_recipes.py::TestLearningRates::test_of_nanochat_by_hand"],
        ["Muon's momentum rises from 0.85", "Momentum from 0.85 to 0.95 in 300 steps; decay"],
    ),
    # --- orthogonalization
    Mutation(
        "the exact factor gets made-up directions for a singular matrix", "optim/orthogonalize.py",
        "(u * (s > tolerance).unsqueeze(-2)) @ vh", "u @ vh",
        ["test_orthogonalize.py::test_svd_of_a_singular_matrix_adds_no_directions"],
        ["Orthogonalization by SVD"],
    ),
    Mutation(
        "the exact factor keeps the singular values", "optim/orthogonalize.py",
        "(u * (s > tolerance).unsqueeze(-2)) @ vh", "(u * s.unsqueeze(-2)) @ vh",
        ["test_orthogonalize.py::test_svd_is_the_polar_factor"],
        ["Orthogonalization by SVD"],
    ),
    Mutation(
        "the mean is held back as the speedrun holds back the sum", "optim/orthogonalize.py",
        "_NEWTON_SCHULZ_NORM = (1.0, 5e-9)", "_NEWTON_SCHULZ_NORM = (1.0, 1e-7)",
        ["test_muon.py::test_a_gradient_that_is_almost_zero_moves_as_little_as_in_the_speedrun",
         "test_muon.py::test_against_modded_nanogpt"],
        ["... or by the quintic Newton-Schulz iteration"],
    ),
    Mutation(
        "Newton-Schulz makes one step less", "optim/orthogonalize.py",
        "(NEWTON_SCHULZ,) * iterations", "(NEWTON_SCHULZ,) * (iterations - 1)",
        ["test_orthogonalize.py::test_where_five_steps_leave_the_singular_values",
         "test_orthogonalize.py::test_one_newton_schulz_step_by_hand", "test_muon.py::test_modded_nanogpt_by_hand"],
        ["It leaves singular values of about 0.5"],
    ),
    Mutation(
        "Newton-Schulz with the coefficients of the cubic iteration", "optim/orthogonalize.py",
        "(3.4445, -4.7750, 2.0315)", "(1.5, -0.5, 0.0)",
        ["test_orthogonalize.py::test_where_five_steps_leave_the_singular_values",
         "test_orthogonalize.py::test_one_newton_schulz_step_by_hand"],
        ["It leaves singular values of about 0.5"],
    ),
    Mutation(
        "every product of the iteration is rounded to bfloat16 by itself", "optim/orthogonalize.py",
        "        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)\n"
        "        x = torch.baddbmm(x, x, polynomial, beta=a) if tall else torch.baddbmm(x, polynomial, x, beta=a)\n",
        "        polynomial = b * gram + c * torch.bmm(gram, gram)\n"
        "        x = a * x + (torch.bmm(x, polynomial) if tall else torch.bmm(polynomial, x))\n",
        ["test_muon.py::test_bfloat16_is_nearer_to_the_rule_than_modded_nanogpts_own"],
        ["It runs stably in bfloat16"],
    ),
    Mutation(
        "Polar Express without its safety factor", "optim/orthogonalize.py",
        "_POLAR_EXPRESS_NORM = (1.02, 1e-6)", "_POLAR_EXPRESS_NORM = (1.0, 1e-6)",
        ["test_orthogonalize.py::test_polar_express_by_hand"],
        ["Muon at 0.04 on all matrices"],
    ),
    Mutation(
        "Polar Express takes its polynomials from the last one on", "optim/orthogonalize.py",
        "POLAR_EXPRESS[:iterations]", "POLAR_EXPRESS[::-1][:iterations]",
        ["test_orthogonalize.py::test_polar_express_by_hand",
         "test_orthogonalize.py::test_polar_express_against_the_exact_factor"],
        ["Muon at 0.04 on all matrices"],
    ),
    # --- Muon
    Mutation(
        "Muon's rate ignores the schedule", "optim/muon.py",
        "lr, weight_decay = config.lr * lr_scale,", "lr, weight_decay = config.lr,",
        ["test_combined_optimizer.py::test_against_the_rules_of_autoresearch_and_nanochat",
         "test_muon.py::test_against_modded_nanogpt"],
    ),
    Mutation(
        "the update is not scaled by its longer side", "optim/muon.py",
        "return math.sqrt(max(rows, cols))  # a mean square of 1", "return math.sqrt(min(rows, cols))",
        ["test_muon.py::test_update_scales", "test_muon.py::test_against_modded_nanogpt"],
        ["The update is scaled by sqrt(max(rows, cols))"],
    ),
    Mutation(
        "NorMuon averages over the wrong dimension", "optim/muon.py",
        "return -1 if rows >= cols else -2", "return -2 if rows >= cols else -1",
        ["test_muon.py::test_normuon_by_hand",
         "test_combined_optimizer.py::test_against_the_rules_of_autoresearch_and_nanochat"],
        ["Its form evens out neurons"],
    ),
    Mutation(
        "NorMuon changes the size of the update", "optim/muon.py",
        "return scale * (before / after.clamp_min(1e-10))", "return scale",
        ["test_muon.py::test_normuon_by_hand", "test_combined_optimizer.py::test_two_steps_by_hand"],
        ["Its form evens out neurons"],
    ),
    Mutation(
        "cautious decay takes the weights that move away from zero", "optim/muon.py",
        "(update * weight).ge_(0.0)", "(update * weight).le_(0.0)",
        ["test_muon.py::test_cautious_mask", "test_muon.py::test_cautious_step_by_hand",
         "test_combined_optimizer.py::test_two_steps_by_hand",
         "test_combined_optimizer.py::test_against_the_rules_of_autoresearch_and_nanochat"],
        ["`--weight-decay` 0.2: cautious", "Its form evens out neurons"],
    ),
    Mutation(
        "decay never grows with sqrt(rows / cols)", "optim/muon.py",
        "if config.scaled_decay else 1.0", "if False else 1.0",
        ["test_muon.py::test_scaled_decay_by_hand",
         "test_combined_optimizer.py::test_against_the_rules_of_autoresearch_and_nanochat"],
        ["Its form evens out neurons"],
    ),
    # --- AdamW
    Mutation(
        "AdamW's rate ignores the schedule", "optim/adamw.py",
        "lr=config.lr * lr_scale", "lr=config.lr",
        ["test_combined_optimizer.py::test_every_role_moves_at_its_own_rate",
         "test_combined_optimizer.py::test_against_the_rules_of_autoresearch_and_nanochat"],
        ["The learning rate is worked out"],
    ),
    Mutation(
        "AdamW's betas are swapped", "optim/adamw.py",
        "beta1=config.beta1, beta2=config.beta2,",
        "beta1=config.beta2, beta2=config.beta1,",
        ["test_combined_optimizer.py::test_adamw_against_the_hand_written_loop",
         "test_combined_optimizer.py::test_against_the_rules_of_autoresearch_and_nanochat"],
        ["AdamW: embeddings and value embeddings 0.6", "AdamW at 0.0036 with betas"],
    ),
    Mutation(
        "AdamW's decay ignores the role", "optim/adamw.py",
        "weight_decay=config.weight_decay,", "weight_decay=0.0,",
        ["test_combined_optimizer.py::test_adamw_against_the_hand_written_loop",
         "test_gpt2_weights.py::test_fifty_steps_of_adamw_equal_a_plain_loop"],
        ["AdamW with a decayed and an undecayed group"],
    ),
    # --- both, and what stands before them
    Mutation(
        "the head moves at the embedding's rate", "optim/combined.py",
        "if role is Role.POSITION_EMBEDDING else", "if role in (Role.POSITION_EMBEDDING, Role.HEAD) else",
        ["test_combined_optimizer.py::test_every_role_moves_at_its_own_rate"],
        ["`--embedding-lr` 0.3"],
    ),
    Mutation(
        "the position table is updated as a vector", "optim/combined.py",
        "getattr(config, Role.EMBEDDING if", "getattr(config, Role.VECTOR if",
        ["test_combined_optimizer.py::test_every_role_moves_at_its_own_rate"],
    ),
    Mutation(
        "the head is given to Muon too", "optim/combined.py",
        "matrices = by_role.pop(Role.MATRIX, {}) if",
        "matrices = by_role.pop(Role.MATRIX, {}) | by_role.pop(Role.HEAD, {}) if",
        ["test_combined_optimizer.py::test_muon_and_adamw_divide_the_parameters"],
        ["The optimizer dispatches by the kind"],
    ),
    Mutation(
        "AdamW is left out of a step", "optim/combined.py",
        "        if self.adamw is not None:\n            self.adamw.step(lr_scale, made)\n",
        "        if self.muon is None and self.adamw is not None:\n            self.adamw.step(lr_scale, made)\n",
        ["test_combined_optimizer.py::test_against_the_rules_of_autoresearch_and_nanochat",
         "test_combined_optimizer.py::test_two_steps_by_hand"],
        ["Muon and AdamW as one optimizer"],
    ),
    Mutation(
        "AdamW's moments are not saved", "optim/combined.py",
        "for part in (self.muon, self.adamw) if", "for part in (self.muon or self.adamw,) if",
        ["test_combined_optimizer.py::test_resume_is_bitwise",
         "test_combined_optimizer.py::test_state_is_complete_before_the_first_step"],
        ["A checkpoint has step, code, weights", "Muon and AdamW as one optimizer"],
    ),
    Mutation(
        "a state of another shape is taken", "optim/combined.py",
        "f\"{tuple(t.shape)} {str(t.dtype)", "f\"{str(t.dtype)",
        ["test_combined_optimizer.py::test_a_wrong_state_is_refused_and_nothing_changes"],
        ["Weights are loaded strictly"],
    ),
    Mutation(
        "gradients are zeroed instead of freed", "optim/combined.py",
        "            p.grad = None", "            p.grad = None if p.grad is None else p.grad.zero_()",
        ["test_combined_optimizer.py::test_a_missing_gradient_is_an_error"],
        ["Gradients are set to None"],
    ),
    Mutation(
        "the norm's kernel forgets what is less than a vector", "model/kernels/fused_kernels.cpp",
        "load_part(part.elements + at, n), wide_vec)", "load_part(part.elements + at, n / W * W), wide_vec)",
        ["test_gradient_norm.py::test_by_a_kernel_or_by_pytorch"],
    ),
    Mutation(
        "the norm's kernel takes gradients for contiguous", "model/kernels/ops.py",
        "x.dtype == torch.float32 and x.is_contiguous() and impl", "x.dtype == torch.float32 and impl",
        ["test_gradient_norm.py::test_gradients_of_other_types_and_layouts",
         "test_muon_kernel.py::test_kernels_take_what_they_are_made_for"],
    ),
    Mutation(
        "gradients are clipped one by one", "optim/gradient_norm.py",
        "torch._foreach_mul_(gradients, factor)",
        "[g.mul_(min(1.0, max_norm / (float(g.norm()) + 1e-6))) for g in gradients]",
        ["test_combined_optimizer.py::test_clipping"],
        ["Gradients are clipped by their global norm"],
    ),
    Mutation(
        "gradients are clipped where no limit is set", "optim/gradient_norm.py",
        "    if max_norm is not None and math.isfinite(norm):\n        factor = max_norm / (norm + 1e-6)",
        "    if math.isfinite(norm):\n        factor = (max_norm or 1.0) / (norm + 1e-6)",
        ["test_combined_optimizer.py::test_clipping"],
        ["Gradients are clipped by their global norm"],
    ),
    Mutation(
        "small gradients are stretched to the limit", "optim/gradient_norm.py",
        "if factor < 1:", "if factor > 0:",
        ["test_combined_optimizer.py::test_clipping"],
    ),
    Mutation(
        "a matrix is divided by its largest entry instead of its norm", "optim/orthogonalize.py",
        "torch.linalg.matrix_norm(stack, keepdim=True)", "stack.abs().amax((-2, -1), keepdim=True)",
        ["test_orthogonalize.py::test_hard_spectra_stay_bounded"],
        ["It runs stably in bfloat16"],
    ),
    Mutation(
        "two digits of Polar Express are swapped", "optim/orthogonalize.py",
        "3.285753657755655", "3.258753657755655",
        ["test_orthogonalize.py::test_polar_express_coefficients"],
        ["Muon at 0.04 on all matrices"],
    ),
    Mutation(
        "the kernel's Nesterov direction is the mean", "model/kernels/muon_kernel.cpp",
        "nesterov ? now + (g - now) * share : now", "now",
        ["test_muon_kernel.py::test_steps_are_those_of_float64"],
    ),
    Mutation(
        "the kernel's decay takes all weights", "model/kernels/muon_kernel.cpp",
        "cautious ? select(u * w >= 0.0f, w, vec{}) : w", "w",
        ["test_muon_kernel.py::test_steps_are_those_of_float64"],
    ),
    Mutation(
        "NorMuon's kernel evens out the columns of square matrices", "model/kernels/muon_kernel.cpp",
        "by_row = rows >= columns", "by_row = rows > columns",
        ["test_muon_kernel.py::test_steps_are_those_of_float64"],
    ),
    Mutation(
        "NorMuon's kernel changes the size of the update", "model/kernels/muon_kernel.cpp",
        "scale * std::sqrt(before) / std::max(std::sqrt(after), 1e-10)", "scale",
        ["test_muon_kernel.py::test_steps_are_those_of_float64"],
    ),
    Mutation(
        "the kernel divides by the norm without the factor of Polar Express", "model/kernels/muon_kernel.cpp",
        "(float)std::sqrt(squares) * factor + addend", "(float)std::sqrt(squares) + addend",
        ["test_muon_kernel.py::test_orthogonalize", "test_muon_kernel.py::test_a_column_by_hand"],
    ),
    Mutation(
        "an update that must not be made is made by the kernels", "optim/muon.py",
        "return made is None or bool(made)", "return True",
        ["test_muon_kernel.py::test_an_update_that_is_not_made_changes_nothing"],
    ),
    Mutation(
        "the iteration's kernel leaves out half of a matrix", "model/kernels/muon_kernel.cpp",
        "pack<NR>(x, k, n, k, all_units, units_of(n), panels);",
        "pack<NR>(x, k, n / 2, k, all_units, units_of(n), panels);",
        ["test_muon_kernel.py::test_orthogonalize"],
    ),
    Mutation(
        "matrices whose rows are shared are dealt out without regard to their cost", "training/parallel/fsdp_muon.py",
        "busy[owner] += _cost(split, matrix)", "busy[owner] += 1",
        ["test_sharded_muon.py::test_owners_share_by_cost_and_not_by_number"],
    ),
    Mutation(
        "matrices that are left over are dealt out without regard to their cost", "training/parallel/division.py",
        "busy[owner] += multiplications(*_shape(matrix))", "busy[owner] += 1",
        ["test_divided.py::test_left_over_matrices_are_balanced_by_cost"],
    ),
    # --- one of torch's
    Mutation(
        "what an own optimizer counts in its groups is lost", "optim/torch_optimizer.py",
        "group |= deepcopy(made) | changed", "pass",
        ["test_torch_optimizer.py::test_what_groups_count_is_saved_with_the_rest",
         "test_torch_optimizer.py::test_a_state_from_before_a_count_takes_it_back"],
    ),
    Mutation(
        "a list that grows in an own optimizer's groups is lost", "optim/torch_optimizer.py",
        "deepcopy(_beside_weights(group))", "_beside_weights(group)",
        ["test_torch_optimizer.py::test_a_list_that_grows_in_groups_is_saved"],
    ),
    Mutation(
        "the state of an optimizer within an own one is lost", "optim/torch_optimizer.py",
        "if one.state is not inner.state:", "if False:",
        ["test_torch_optimizer.py::test_one_that_is_made_of_others_shares_its_state_with_them"],
    ),
    Mutation(
        "an own optimizer whose step needs a closure fails in its first step", "optim/torch_optimizer.py",
        "return by_position and parameter.default is parameter.empty", "return False",
        ["test_torch_optimizer.py::test_one_whose_step_needs_a_closure_is_refused"],
    ),
    Mutation(
        "a rewound optimizer keeps its later counts", "optim/torch_optimizer.py",
        "group |= deepcopy(made) | changed", "group |= changed",
        ["test_torch_optimizer.py::test_a_state_from_before_a_count_takes_it_back"],
    ),
    Mutation(
        "a state that cannot be saved is noticed by the first save", "optim/torch_optimizer.py",
        "        self._require_savable_state()\n", "",
        ["test_torch_optimizer.py::test_a_state_that_cannot_be_saved_is_refused_at_the_first_step"],
    ),
    Mutation(
        "a state of no weight is lost", "optim/torch_optimizer.py",
        "            if not isinstance(of, Tensor):\n", "            if False:\n",
        ["test_torch_optimizer.py::test_a_state_of_no_weight_is_refused_at_the_first_step"],
    ),
    Mutation(
        "what an own optimizer counts in an attribute is lost", "optim/torch_optimizer.py",
        "if then.get(name) is not None and now[name] != then[name]:", "if False:",
        ["test_torch_optimizer.py::test_an_attribute_that_a_step_changes_is_refused_at_once"],
    ),
    Mutation(
        "what an own optimizer prepares in its first step is taken for a count", "optim/torch_optimizer.py",
        "if then.get(name) is not None and now[name] != then[name]:", "if now[name] != then.get(name):",
        ["test_torch_optimizer.py::test_attributes_that_stay_are_no_state"],
    ),
    Mutation(
        "a tensor that changes in place in an own optimizer is lost", "optim/torch_optimizer.py",
        "return id(value), value._version", "return id(value)",
        ["test_torch_optimizer.py::test_an_attribute_that_a_step_changes_is_refused_at_once"],
    ),
    Mutation(
        "torch's own SGD changes an attribute", "optim/torch_optimizer.py",
        '"param_groups", "_need_device_dtype_check_for_fused"}', '"param_groups"}',
        ["test_torch_optimizer.py::test_torchs_own_attributes_may_change"],
    ),
    Mutation(
        "a scheduler of an own optimizer's rates is taken, and never steps", "optim/torch_optimizer.py",
        'if hasattr(inner.step, "_wrapped_by_lr_sched"):', "if False:",
        ["test_torch_optimizer.py::test_a_scheduler_of_its_rates_is_refused"],
    ),
    Mutation(
        "an array in an own optimizer's groups ends the step with a traceback", "optim/torch_optimizer.py",
        "except (RuntimeError, ValueError):", "except RuntimeError:",
        ["test_torch_optimizer.py::test_an_array_in_groups_is_refused"],
    ),
    Mutation(
        "a count that cannot be saved is noticed by the first save", "optim/torch_optimizer.py",
        "        self.inner.step()\n        self._counted()", "        self.inner.step()\n        pass",
        ["test_torch_optimizer.py::test_a_count_that_cannot_be_saved_is_refused_at_once"],
    ),
    Mutation(
        "an own optimizer has no place for a Muon", "optim/torch_optimizer.py",
        "        super().__init__(None, None)\n", "",
        ["test_compiled_parts.py::test_an_own_optimizer_on_a_gpu_whose_compiler_fails"],
    ),
    Mutation(
        "the warm-up steps an own optimizer", "training/compilation.py",
        "        if not isinstance(state.optimizer, TorchOptimizer):", "        if state.optimizer is not None:",
        ["test_compiled_parts.py::test_an_own_optimizer_on_a_gpu_whose_compiler_fails"],
    ),
]  # fmt: skip
