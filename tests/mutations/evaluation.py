"""What judges a model: bits per byte, CORE, samples."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    Mutation(
        "bits per byte charges for special tokens", "eval/bits_per_byte.py",
        "losses[lengths > 0].sum()", "losses.sum()",
        ["test_bits_per_byte.py::test_case_by_hand",
         "test_bits_per_byte.py::test_equals_the_definition_for_every_batch_size"],
        ["At the end evaluation mode and bits per byte"],
    ),
    Mutation(
        "bits per byte is in nats", "eval/bits_per_byte.py",
        "byte_nats / (math.log(2) * target_bytes)", "byte_nats / target_bytes",
        ["test_bits_per_byte.py::test_case_by_hand",
         "test_bits_per_byte.py::test_equals_the_definition_for_every_batch_size"],
        ["At the end evaluation mode and bits per byte"],
    ),
    Mutation(
        "the rows that fill the last pass up count", "eval/bits_per_byte.py",
        "    targets = np.where((wanted < rows.rows_per_epoch)[:, None], targets, IGNORED)\n", "",
        ["test_bits_per_byte.py::test_equals_the_definition_for_every_batch_size",
         "test_train.py::TestLoss::test_validation_does_not_depend_on_its_batch"],
        ["`estimate_loss` in evaluation mode"],
    ),
    Mutation(
        "a CPU evaluates as many rows at once as it trains", "eval/bits_per_byte.py",
        "return max(config.eval_sequences, positions // config.model.seq_len)", "return config.eval_sequences",
        ["test_bits_per_byte.py::test_a_cpu_evaluates_more_rows_at_once_than_it_trains",
         "test_train.py::TestLoss::test_a_cpu_validates_more_rows_at_once_than_it_trains"],
    ),
    Mutation(
        "a compiled model evaluates another shape than it was compiled for", "eval/bits_per_byte.py",
        "is not None or compiled or device", "is not None or device",
        ["test_bits_per_byte.py::test_a_cpu_evaluates_more_rows_at_once_than_it_trains"],
    ),
    Mutation(
        "losses are taken in the type of the logits", "eval/bits_per_byte.py",
        "((z.to(wide), y) for z, y in pieces)", "pieces",
        ["test_bits_per_byte.py::test_low_precision_logits_are_summed_in_float32"],
        ["bfloat16 by autocast; the final loss", "Autocast to bfloat16, but not in validation"],
    ),
    Mutation(
        "ranks do not add up what they evaluated", "eval/bits_per_byte.py",
        'sum(group.sum(sums, "evaluation"),', "sum(sums,",
        ["test_bits_per_byte.py::test_ranks_share_the_passes_and_have_the_bits_of_one",
         "test_distributed.py::TestWorldSizes::test_evaluation_and_core_are_those_of_one_process"],
        ["The validation loss is averaged over ranks"],
    ),
    Mutation(
        "dropout stays on in an evaluation", "eval/bits_per_byte.py",
        "part.training = False\n", "pass\n",
        ["test_bits_per_byte.py::test_leaves_modes_gradients_and_random_state_as_they_were",
         "test_core.py::test_leaves_modes_gradients_and_random_state_as_they_were"],
        ["`estimate_loss` in evaluation mode"],
    ),
    Mutation(
        "after an evaluation everything trains", "eval/bits_per_byte.py",
        "part.training = training", "part.training = True",
        ["test_bits_per_byte.py::test_leaves_modes_gradients_and_random_state_as_they_were",
         "test_sampling.py::test_training_notices_nothing"],
    ),
    # --- CORE
    Mutation(
        "CORE is the mean of the accuracies", "eval/core.py",
        "(accuracy[t.label] - t.random_accuracy) / (1 - t.random_accuracy)", "accuracy[t.label]",
        ["test_core.py::TestByHand::test_core_is_the_mean_of_the_centered", "test_core.py::TestWithinARun::test_lines"],
        ["CORE every 2000 steps after the first"],
    ),
    Mutation(
        "an option is judged by the sum of its losses", "eval/core.py",
        "float(n.mean())", "float(n.sum())",
        ["test_core.py::TestByHand::test_multiple_choice"],
    ),
    Mutation(
        "an option of which nothing is scored is never the answer", "eval/core.py",
        "-math.inf if option == 0 else math.inf", "math.inf",
        ["test_core.py::TestByHand::test_an_option_that_begins_all_others_is_chosen_in_the_first_place_only",
         "test_core.py::TestAgainstTheSlowWay::test_every_answer_for_every_batching"],
        ["The option with the lowest mean loss"],
    ),
    Mutation(
        "every example of a task is a question", "eval/core_tasks.py",
        "n_scored = min(len(lines), max_examples or len(lines))", "n_scored = len(lines)",
        ["test_core.py::TestBundle::test_order_and_number"],
        ["CORE every 2000 steps after the first"],
    ),
    Mutation(
        "an example is a worked example of itself", "eval/core_tasks.py",
        "self.examples[other + (other >= index)]", "self.examples[other]",
        ["test_core.py::TestPrompts::test_worked_examples_are_those_of_a_slow_draw"],
    ),
    Mutation(
        "padding stands in front of what is scored", "eval/core.py",
        "tokens[row, : len(given)] = given", "tokens[row, width - len(given) :] = given",
        ["test_core.py::TestAgainstTheSlowWay::test_every_answer_for_every_batching"],
        ["The model is compiled for one shape"],
    ),
    # --- samples
    Mutation(
        "BOS follows the prompt", "eval/sampling.py",
        "tokens.insert(0, tokenizer.bos_id)", "tokens.append(tokenizer.bos_id)",
        ["test_sampling.py::test_prompts_start_with_bos_where_there_is_one"],
        ["Samples every 2000 steps"],
    ),
    Mutation(
        "a temperature multiplies the logits", "eval/sampling.py",
        "((values - highest) / temperature)", "((values - highest) * temperature)",
        ["test_sampling.py::TestDraws::test_temperature_by_hand",
         "test_sampling.py::TestDraws::test_a_tiny_temperature_is_greedy"],
        ["Samples every 2000 steps"],
    ),
    Mutation(
        "all prompts share their draws", "eval/sampling.py",
        "return fold_seed(seed, zlib.crc32(prompt.encode()))", "return seed",
        ["test_sampling.py::test_prompts_draw_apart_and_each_the_same_again"],
    ),
    Mutation(
        "windows over a long text overlap by a token less than half", "eval/surprise.py",
        "max(1, seq_len // 2)", "max(1, seq_len // 2 + 1)",
        ["test_surprise.py::test_every_token_is_a_target_once_with_half_a_context",
         "test_surprise.py::test_each_token_is_predicted_from_its_window"],
    ),
    Mutation(
        "later windows of a text begin without BOS", "eval/surprise.py",
        "if bos_id is not None and seq_len > 1:", "if bos_id is None and seq_len > 1:",
        ["test_surprise.py::test_each_token_is_predicted_from_its_window"],
    ),
    Mutation(
        "lm-eval has no model but gptlab's", "app/lm_eval_model.py",
        "        import lm_eval.models  # noqa: F401 lm-eval does so itself only while no model is registered\n", "",
        ["test_lm_eval_model.py::test_an_error_of_the_user_is_one_line_after_lm_evals_models_are_known"],
    ),
    Mutation(
        "lm-eval's prompts are healed", "app/lm_eval_model.py",
        "heal=False", "heal=True",
        ["test_lm_eval_model.py::test_generation_settings_mean_what_they_mean_in_lm_eval"],
    ),
    Mutation(
        "lm-eval's pair may begin with nothing", "app/lm_eval_model.py",
        "whole[:shared] or [self.eot_token_id],", "whole[:shared],",
        ["test_lm_eval_model.py::test_nothing_before_a_continuation_and_no_bos"],
    ),
    Mutation(
        "a context that is cut loses its BOS", "app/lm_eval_model.py",
        "starts = [bos_id] if bos_id is not None", "starts = [] if bos_id is not None",
        ["test_lm_eval_model.py::test_a_long_context_loses_its_beginning_but_not_bos"],
    ),
    Mutation(
        "lm-eval's default device is taken without CUDA", "app/lm_eval_model.py",
        'others["device"] = None', "pass",
        ["test_lm_eval_model.py::test_the_device_that_lm_eval_gives_is_taken_where_it_exists"],
    ),
    Mutation(
        "lm-eval's own arguments win over model_args", "app/lm_eval_model.py",
        "{**others, **arg_dict}", "{**arg_dict, **others}",
        ["test_lm_eval_model.py::test_model_args_win_over_what_lm_eval_gives"],
    ),
    Mutation(
        "a token that covers the border of context and continuation belongs to the context", "app/lm_eval_model.py",
        "takewhile(lambda pair: pair[0] == pair[1], pairs)", "pairs",
        ["test_lm_eval_model.py::test_a_continuation_begins_where_encodings_part"],
    ),
    Mutation(
        "lm-eval samples only where do_sample is set", "app/lm_eval_model.py",
        'float(given.get("temperature", 0.0)) > 0', "False",
        ["test_lm_eval_model.py::test_generation_settings_mean_what_they_mean_in_lm_eval"],
    ),
    Mutation(
        "a colored text is not escaped", "report/surprise_page.py",
        "escape(_visible(piece.text))", "_visible(piece.text)",
        ["test_surprise_page.py::test_page_shows_text_as_text"],
    ),
    Mutation(
        "a cover has the probability of its last token alone", "eval/healing.py",
        "weights = weight + log_probabilities[ends]", "weights = log_probabilities[ends]",
        ["test_healing.py::test_all_covers_with_their_probabilities"],
    ),
    Mutation(
        "covers are tokens that end with the removed bytes only", "eval/healing.py",
        "return self._sorted_ids[first:last]", "return self._sorted_ids[first : first + 1]",
        ["test_healing.py::test_all_covers_with_their_probabilities"],
    ),
    Mutation(
        "a sample sees what is before a BOS that was drawn, where documents are masked", "eval/sampling.py",
        "return [token] if begins_document else [*tokens, token]", "return [*tokens, token]",
        ["test_continuation.py::test_nothing_before_a_bos_that_was_drawn_is_seen_where_documents_are_masked"],
    ),
    Mutation(
        "a decoder keeps what is before a BOS that was drawn", "eval/continuation.py",
        " or len(self._texts[row]) == 1", "",
        ["test_continuation.py::test_nothing_before_a_bos_that_was_drawn_is_seen_where_documents_are_masked"],
    ),
    Mutation(
        "top-p drops the token that reaches it", "eval/continuation.py",
        "dropped[..., 1:] |= probabilities.cumsum(-1)[..., :-1]", "dropped |= probabilities.cumsum(-1)",
        ["test_continuation.py::TestTruncation::test_by_hand"],
    ),
    Mutation(
        "what a replaced part caches while it samples cannot train", "eval/continuation.py",
        "torch.inference_mode(not self._is_changed)", "torch.inference_mode()",
        ["test_continuation.py::test_a_replaced_part_that_caches_can_train_after_it_sampled"],
    ),
    Mutation(
        "top-p without top-k counts tokens in the vocabulary's order", "eval/continuation.py",
        "(None if drawing.top_p == 1 else logits.shape[-1])", "None",
        ["test_continuation.py::TestTruncation::test_top_p_takes_the_likeliest_wherever_they_stand"],
    ),
]  # fmt: skip
