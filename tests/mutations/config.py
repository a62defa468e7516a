"""What a run is: recipes, rules of scaling, horizons, shapes."""

from __future__ import annotations

from .mutation import Mutation

DOCUMENTS = "test_lineage_recipes.py::TestNumbers::test_are_the_documents"
OWN_ARGUMENTS = "test_own_arguments.py::test_what_follows_is_what_base_train_computes"

MUTATIONS = [
    # --- a request
    Mutation(
        "the recipe refuses what the request replaces", "config/recipes/__init__.py",
        "with each_field_alone():", "if True:",
        ["test_own_arguments.py::test_the_fields_of_a_request_are_checked_together"],
    ),
    Mutation(
        "a group without a replaced field is not checked as a whole", "config/load.py",
        "if dataclasses.is_dataclass(group := getattr(value, field.name)):",
        "if dataclasses.is_dataclass(group := getattr(value, field.name)) "
        'and any(name.startswith(f"{field.name}.") for name in overrides):',
        ["test_own_arguments.py::test_refusals_are_one_line"],
    ),
    Mutation(
        "a step that is smaller than the recipe's micro-batch is refused", "config/load.py",
        'math.gcd(config.batch.micro_sequences, tokens // seq_len)', 'config.batch.micro_sequences',
        ["test_config.py::test_a_smaller_step_has_fewer_rows_in_a_micro_batch"],
    ),
    Mutation(
        "a rate that float32 cannot hold is taken", "config/optim.py",
        "value <= 1e9,", "True,",
        ["test_config.py::test_the_impossible_is_refused_by_name"],
    ),
    Mutation(
        "an eps that is zero in float32 is taken", "config/optim.py",
        "value >= 2.0**-126,", "True,",
        ["test_config.py::test_the_impossible_is_refused_by_name"],
    ),
    Mutation(
        "a limit does not say that none is a value", "config/fields.py",
        '"; none is a value too" if optional else ""', '""',
        ["test_config.py::test_the_impossible_is_refused_by_name"],
    ),
    # --- nanoGPT
    Mutation(
        "a run of another length stretches what its recipe counts in steps", "config/recipes/__init__.py",
        "if own[n] == value and", "if False and",
        ["test_train_on.py::test_a_phase_that_its_recipe_counts_in_steps_keeps_their_number",
         "test_train_on.py::test_the_schedule_of_the_new_length_is_recorded"],
    ),
    Mutation(
        "a run of another length loses the schedule that it was given", "config/recipes/__init__.py",
        "if own[n] == value and", "if",
        ["test_train_on.py::test_a_phase_that_its_recipe_counts_in_steps_keeps_their_number"],
    ),
    Mutation(
        "nanoGPT decays its norms too", "config/recipes/nanogpt.py",
        "vector = replace(matrix, weight_decay=0.0)", "vector = matrix",
        [DOCUMENTS],
        ["AdamW with a decayed and an undecayed group"],
    ),
    Mutation(
        "nanoGPT starts from nanochat's weights", "config/model.py",
        'init="gpt2"', 'init="nanochat"',
        [DOCUMENTS],
        ["`init_from='scratch'` builds a GPT"],
    ),
    Mutation(
        "the cosine's warm-up is one step shorter than nanoGPT's", "config/recipes/nanogpt.py",
        "share_of_run(warmup_iters + 1, horizon, of_steps)", "share_of_run(warmup_iters, horizon, of_steps)",
        [DOCUMENTS, "test_lineage_recipes.py::TestLearningRates::test_of_nanogpt"],
        ["The learning rate is worked out"],
    ),
    Mutation(
        "GPT-2 XL has 25 heads of another width", "config/model.py",
        '"gpt2-xl": replace(_GPT2, n_layer=48', '"gpt2-xl": replace(_GPT2, n_layer=36',
        ["test_init_from.py::TestNames::test_shapes_are_known_without_the_weights"],
        ["Sizes d12, d24, d36, d48"],
    ),
    # --- the speedrun
    Mutation(
        "the speedrun's head decays", "config/recipes/speedrun.py",
        "AdamWConfig(lr=LR, beta1=0.9, beta2=0.95, eps=1e-8)",
        "AdamWConfig(lr=LR, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)",
        [DOCUMENTS],
        ["AdamW at 0.0036 with betas"],
    ),
    Mutation(
        "the speedrun's Muon has AdamW's rate", "config/recipes/speedrun.py",
        "lr=0.1 * LR", "lr=LR",
        [DOCUMENTS, "test_lineage_recipes.py::TestLearningRates::test_of_the_speedrun_by_hand"],
        ["Muon at a tenth of that", "Settings: learning rate, momentum"],
    ),
    Mutation(
        "the speedrun's Muon without Nesterov", "config/recipes/speedrun.py",
        "nesterov=True", "nesterov=False",
        [DOCUMENTS, "test_muon.py::test_against_modded_nanogpt"],
        ["Settings: learning rate, momentum"],
    ),
    Mutation(
        "the speedrun has 6 heads", "config/recipes/speedrun.py",
        "n_embd=768, n_head=12, seq_len=1024", "n_embd=768, n_head=6, seq_len=1024",
        [DOCUMENTS],
        ["12 layers, 12 heads, width 768"],
    ),
    Mutation(
        "the speedrun's step has 256 sequences", "config/recipes/speedrun.py",
        "total_tokens=512 * 1024", "total_tokens=256 * 1024",
        [DOCUMENTS],
        ["512 sequences of 1024 tokens a step"],
    ),
    Mutation(
        "the speedrun warms down for 1450 steps, as an earlier record", "config/recipes/speedrun.py",
        "WARMDOWN_STEPS = 1800", "WARMDOWN_STEPS = 1450",
        [DOCUMENTS, "test_lineage_recipes.py::TestLearningRates::test_of_the_speedrun",
         "test_lineage_recipes.py::TestLearningRates::test_of_the_speedrun_by_hand"],
        ["6200 iterations, no warm-up"],
    ),
    Mutation(
        "the speedrun validates every 128 steps", "config/recipes/speedrun.py",
        "every_steps=125", "every_steps=128",
        [DOCUMENTS],
        ["Validation every 125 steps"],
    ),
    Mutation(
        "a phase counted in steps is a share of the recipe's own length", "config/length.py",
        'total = int(horizon.amount) if horizon.unit == "steps" else 0', "total = 0",
        ["test_lineage_recipes.py::TestHorizon::test_phases_counted_in_steps_stay_so_where_they_fit"],
        ["6200 iterations, no warm-up", "250 steps of warm-up"],
    ),
    # --- autoresearch
    Mutation(
        "autoresearch's step is a single micro-batch", "config/recipes/autoresearch.py",
        "total_tokens=2**19, micro_sequences=128", "total_tokens=2**19, micro_sequences=256",
        [DOCUMENTS],
        ["2^19 tokens a step from micro-batches"],
    ),
    Mutation(
        "autoresearch's head moves at the embedding's rate", "config/recipes/autoresearch.py",
        "head_lr=0.004", "head_lr=0.6",
        [DOCUMENTS],
        ["AdamW: embeddings and value embeddings 0.6"],
    ),
    Mutation(
        "autoresearch's Muon at nanochat's rate", "config/recipes/autoresearch.py",
        "matrix_lr=0.04", "matrix_lr=0.02",
        [DOCUMENTS],
        ["Muon at 0.04 on all matrices"],
    ),
    Mutation(
        "autoresearch has a vocabulary of 32768", "config/recipes/autoresearch.py",
        "VOCAB_SIZE = 8192", "VOCAB_SIZE = 32768",
        [DOCUMENTS, "test_lineage_recipes.py::TestNumbers::test_parameters_of_the_publications"],
        ["50.3M parameters at depth 8"],
    ),
    Mutation(
        "lambdas follow the width", "config/scaling.py",
        "x0_lambda=AdamWConfig(lr=scalar_lr * adamw_scale, beta1=0.96)",
        "x0_lambda=AdamWConfig(lr=scalar_lr * scale, beta1=0.96)",
        [DOCUMENTS],
        ["AdamW: embeddings and value embeddings 0.6"],
    ),
    # --- nanochat
    Mutation(
        "nanochat's head and embedding have each other's rate", "config/recipes/nanochat.py",
        "        embedding_lr=own.embedding_lr,\n        head_lr=own.unembedding_lr,",
        "        embedding_lr=own.unembedding_lr,\n        head_lr=own.embedding_lr,",
        [DOCUMENTS, OWN_ARGUMENTS],
        ["`--embedding-lr` 0.3"],
    ),
    Mutation(
        "nanochat's rates do not follow its batch", "config/scaling.py",
        "return (total_tokens / REFERENCE_BATCH_TOKENS) ** 0.5", "return 1.0",
        ["test_lineage_recipes.py::TestDepth::test_rules_by_hand",
         "test_lineage_recipes.py::TestTinyForms::test_nanochats_by_hand", OWN_ARGUMENTS],
        ["Learning rates grow with the root of the batch"],
    ),
    Mutation(
        "nanochat's aspect ratio is always 64", "config/recipes/nanochat.py",
        'shape = {"aspect": own.aspect_ratio, "head_dim"', 'shape = {"aspect": 64, "head_dim"',
        [OWN_ARGUMENTS],
        ["`--aspect-ratio`, `--head-dim`"],
    ),
    Mutation(
        "weight decay does not follow the depth", "config/scaling.py",
        "return weight_decay * (REFERENCE_DEPTH / depth) ** 2", "return weight_decay",
        ["test_lineage_recipes.py::TestDepth::test_rules_by_hand",
         "test_lineage_recipes.py::TestDepth::test_nanochats_one_dial"],
        ["Weight decay falls with (12 / depth)^2"],
    ),
    Mutation(
        "the width is rounded down to a multiple of the head", "config/scaling.py",
        "width = math.ceil(depth * aspect / head_dim) * head_dim", "width = depth * aspect // head_dim * head_dim",
        ["test_lineage_recipes.py::TestDepth::test_nanochats_one_dial", "test_recipes.py::test_a_shape_by_hand"],
        ["`--depth`: width = depth x 64"],
    ),
    Mutation(
        "autoresearch's width does not follow the depth", "config/scaling.py",
        "n_head=width // head_dim", "n_head=4",
        ["test_lineage_recipes.py::TestDepth::test_autoresearchs_width_follows",
         "test_lineage_recipes.py::TestDepth::test_nanochats_one_dial"],
        ["`--depth`: width = depth x 64", "50.3M parameters at depth 8"],
    ),
    Mutation(
        "nanochat's tiny form does not validate at the start", "config/recipes/nanochat.py",
        "eval=EvalConfig(every_steps=100, at_end=False, tokens=tiny.EVAL_TOKENS),",
        "eval=EvalConfig(every_steps=100, at_end=False, tokens=tiny.EVAL_TOKENS, at_start=False),",
        ["test_lineage_recipes.py::TestTinyForms::test_differ_in_size_only"],
        ["On a CPU, a command line of eight flags"],
    ),
    Mutation(
        "nanochat validates on a tenth of the tokens", "config/recipes/nanochat.py",
        "tokens=20 * 2**19", "tokens=2 * 2**19",
        [DOCUMENTS],
        ["Bits per byte every 250 steps"],
    ),
    Mutation(
        "nanochat samples with a temperature", "config/recipes/nanochat.py",
        "temperature=0.0", "temperature=0.8",
        [DOCUMENTS],
        ["Samples every 2000 steps"],
    ),
    # --- rules of any run
    Mutation(
        "a vocabulary may have more entries than memory has room for", "config/run.py",
        "n <= 2**22", "True",
        ["test_config.py::test_the_impossible_is_refused_by_name"],
    ),
    Mutation(
        "a horizon of less than a step becomes one", "config/length.py",
        "if steps < 1:", "steps = max(steps, 1)\n        if steps < 1:",
        ["test_config.py::TestHorizon::test_less_than_one_step_is_refused"],
        ["No horizon at all is an error"],
    ),
    Mutation(
        "FLOPs are rounded down to steps", "config/length.py",
        '"flops": round(self.amount / (flops_per_token * tokens_per_step))',
        '"flops": int(self.amount / (flops_per_token * tokens_per_step))',
        ["test_config.py::TestHorizon::test_steps_by_hand"],
    ),
    Mutation(
        "a step that is no whole number of micro-batches is taken", "config/run.py",
        "if self.batch.total_tokens % self.micro_tokens:", "if self.batch.total_tokens < self.micro_tokens:",
        ["test_config.py::test_the_impossible_is_refused_by_name"],
        ["The batch must divide into device batches", "`--device-batch-size`, `--total-batch-size`",
         "2^19 tokens a step from micro-batches"],
    ),
    Mutation(
        "a step has one micro-batch too few", "config/run.py",
        "return self.batch.total_tokens // self.micro_tokens",
        "return self.batch.total_tokens // self.micro_tokens - 1",
        ["test_config.py::test_a_step_is_whole_micro_batches"],
        ["The batch must divide into device batches", "`--device-batch-size`, `--total-batch-size`",
         "2^19 tokens a step from micro-batches"],
    ),
    Mutation(
        "FLOPs of a size count all of the context in every layer", "config/scaling.py",
        "(window or seq_len) * (depth - 1)", "seq_len * (depth - 1)", ["test_recipes.py::test_a_shape_by_hand"],
    ),
    Mutation(
        "all layers of quickstart see the whole context", "config/recipes/quickstart.py",
        'window_pattern="S", ', "",
        ["test_recipes.py::test_only_the_last_layer_sees_the_whole_of_a_long_context"],
    ),
    Mutation(
        "rows of shakespeare-char are short where there is time for whole ones", "config/recipes/shakespeare.py",
        "CONTEXT if takes_whole_rows else 2**10", "2**10",
        ["test_recipes.py::test_wide_layers_take_rows_of_the_whole_context_where_there_is_time_for_450"],
    ),
    Mutation(
        "narrow layers of shakespeare-char take whole rows, too", "config/recipes/shakespeare.py",
        "shape.n_embd >= WIDE and ", "",
        ["test_recipes.py::test_wide_layers_take_rows_of_the_whole_context_where_there_is_time_for_450"],
    ),
    Mutation(
        "keys of shakespeare-char are not offset", "config/recipes/shakespeare.py",
        ", key_offset=True", "", ["test_recipes.py::test_only_the_last_layer_sees_the_whole_of_a_long_context"],
    ),
    Mutation(
        "windows start with the pattern's second letter", "config/model.py",
        "self.window_pattern[i % len(self.window_pattern)]", "self.window_pattern[(i + 1) % len(self.window_pattern)]",
        ["test_config.py::TestModel::test_windows_by_hand"],
        ["`--window-pattern SSSL`"],
    ),
    Mutation(
        "a window is half the context, the token included", "config/model.py",
        "return self.seq_len // 2 + 1 if", "return self.seq_len // 2 if",
        ["test_config.py::TestModel::test_windows_by_hand",
         "test_lineage_recipes.py::TestNumbers::test_a_window_is_half_the_context_to_the_left_and_the_token"],
        ["`--window-pattern SSSL`"],
    ),
    Mutation(
        "RMSNorm's eps is not PyTorch's", "config/model.py",
        "(0, 1)\")] = 2**-23", "(0, 1)\")] = 1e-6",
        ["test_model.py::test_rmsnorm_is_pytorchs_where_eps_is_left_to_it",
         "test_lineage_recipes.py::TestNumbers::test_are_the_documents"],
    ),
    Mutation(
        "the last layer has a window", "config/model.py",
        '        letters[-1] = "L"\n', "",
        ["test_config.py::TestModel::test_windows_by_hand"],
        ["`--window-pattern SSSL`"],
    ),
    Mutation(
        "as many key-value heads as one", "config/model.py",
        "return self.n_head if self.n_kv_head is None else self.n_kv_head", "return self.n_kv_head or 1",
        ["test_counting.py::test_gpt2_small"],
    ),
    Mutation(
        "value embeddings start at the first layer instead of ending at the last", "config/model.py",
        "layer % 2 == (self.n_layer - 1) % 2", "layer % 2 == 0",
        ["test_config.py::TestModel::test_value_embeddings_alternate_and_end_on_the_last_layer"],
    ),
    Mutation(
        "the speedrun's attention is scaled for 12 layers, whatever the depth", "config/recipes/speedrun.py",
        "1 / math.sqrt(2 * n_layer)", "1 / math.sqrt(24)",
        ["test_lineage_recipes.py::TestDepth::test_is_a_number_of_layers_for_nanogpt_and_the_speedrun"],
        ["Sizes d12, d24, d36, d48"],
    ),
    Mutation(
        "a rate of nanochat's is refused as another one of gptlab's", "config/recipes/nanochat.py",
        "scalar_lr: Rate", "scalar_lr: float",
        ["test_own_arguments.py::test_refusals_are_one_line"],
    ),
    # --- quickstart's size
    Mutation(
        "a length is none where its fields stand beside it", "config/length.py",
        "if len(named) > 1 and not LENGTH_FIELDS.issuperset(named):", "if len({*named} - LENGTH_FIELDS) > 1:",
        ["test_cli_arguments.py::TestToml::test_mistakes_are_one_line"],
    ),
    Mutation(
        "a model is not sized for a length that is given by its fields", "app/run/run_request.py",
        "        horizon = self.horizon(name)\n", "        horizon = None\n",
        ["test_own_arguments.py::TestLength::test_the_horizons_fields_are_the_length_that_the_recipe_is_for"],
    ),
    Mutation(
        "a loss to reach cannot be taken away by its short form", "app/run/run_request.py",
        "(given[name] is not None or bare(fields[field_name])[1])", "given[name] is not None",
        ["test_cli_arguments.py::TestRunRequest::test_none_is_the_value_of_a_short_form_whose_field_may_be_none"],
    ),
    Mutation(
        "a run of so many steps is never asked whether it has reached its loss", "config/recipes/quickstart.py",
        "return horizon.until_val_loss is not None and horizon.unit !=", "return False and horizon.unit !=",
        ["test_recipes.py::test_a_run_that_is_to_stop_at_a_loss_validates_on_the_way"],
    ),
    Mutation(
        "a run that validates only at its ends may have a loss to reach", "config/run.py",
        "not (self.eval.every_steps or self.eval.every_seconds):", "not self.eval.validates:",
        ["test_config.py::test_the_impossible_is_refused_by_name"],
    ),
    Mutation(
        "a run of less than a step has its data prepared first", "app/run/run_request.py",
        'if config.horizon.unit == "tokens":', "if False:",
        ["test_own_arguments.py::TestLength::test_less_than_a_step_is_refused_before_data_is_read"],
    ),
    Mutation(
        "of a name in two spellings the last one counts", "config/load.py",
        "            if twice in leaves:", "            if twice in ():",
        ["test_cli_arguments.py::TestToml::test_mistakes_are_one_line"],
    ),
    Mutation(
        "nanoGPT's --compile=False is no choice", "config/load.py",
        '"false": "off"}', '"false": "false"}',
        ["test_cli_arguments.py::TestRunRequest::test_short_forms_by_hand"],
    ),
    Mutation(
        "an amount that is given does not keep the unit of the file", "config/length.py",
        "return by_field if LENGTH_FIELDS.issuperset(named) else by_field | LENGTH_FIELDS",
        "return by_field | LENGTH_FIELDS",
        ["test_own_arguments.py::TestLength::test_a_length_that_is_given_beats_the_files"],
    ),
    Mutation(
        "a slow moment halves the model", "app/run/run_request.py",
        "(layers / 2, layers + 1) if compiles else (layers, layers)", "(layers / 2, layers + 1)",
        ["test_recipes.py::TestSizedByMeasurement::test_a_slower_moment_makes_no_smaller_model"],
    ),
    Mutation(
        "the first size that is timed is that of two ordinary cores", "config/recipes/quickstart.py",
        "return machine.most_flops_per_second or ASSUMED_FLOPS_PER_SECOND",
        "return min(ASSUMED_FLOPS_PER_SECOND, machine.most_flops_per_second or math.inf)",
        ["test_recipes.py::TestSizedByMeasurement::test_each_size_is_judged_by_its_own_rate"],
    ),
]  # fmt: skip
