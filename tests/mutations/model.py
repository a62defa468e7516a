"""The network, its kernels, its counts, and weights that come from elsewhere."""

from __future__ import annotations

from pathlib import Path

from .mutation import Mutation

_CPU = Path("/proc/cpuinfo")
# Its instruction for powers of two takes any exponent, so that it does not matter there.
_AVX512 = _CPU.exists() and "avx512f" in _CPU.read_text()

ORACLE = "test_model.py::test_logits_loss_and_gradients_equal_the_oracle"

MUTATIONS = [
    Mutation(
        "squared ReLU has the slope of ReLU", "model/kernels/torch_ops.py",
        "(2 * upstream * wide.sqrt())", "(upstream * wide.sqrt())",
        ["test_torch_ops.py::test_squared_relu_keeps_its_result_alone"],
    ),
    Mutation(
        "queries and keys keep the product that they were slices of", "model/kernels/torch_ops.py",
        "ctx.save_for_backward(y, scale, cos, sin)", "ctx.save_for_backward(y, scale, cos, sin, x)",
        ["test_torch_ops.py::test_heads_that_a_gpu_prepares_do_not_keep_the_product_that_they_were_slices_of"],
    ),
    Mutation(
        "a GPU's compiler gets a graph with every slice of the logits", "model/head.py",
        'one_slice = _slice if x.device.type == "cpu" else _slice_compiled_once', "one_slice = _slice",
        ["test_head.py::test_what_is_compiled_for_gpus_has_one_region_for_all_slices"],
    ),
    Mutation(
        "a CPU's compiler gets a region that its wrapper cannot hold", "model/head.py",
        'one_slice = _slice if x.device.type == "cpu" else _slice_compiled_once', "one_slice = _slice_compiled_once",
        ["test_head.py::test_what_is_compiled_for_gpus_has_one_region_for_all_slices"],
    ),
    Mutation(
        "what a GPU compiles is kept where torch's own default is", "model/gpt.py",
        "keep_compiled()  # varlen imports the compiler", "pass",
        ["test_torch_attention.py::test_what_a_gpu_compiles_is_kept_in_the_users_cache"],
    ),
    Mutation(
        "the head's gradient forgets the softcap", "model/kernels/torch_ops.py",
        "gradient if squashed is None else gradient * (1 - squashed * squashed)", "gradient",
        ["test_head.py::test_loss_and_gradients_are_those_of_cross_entropy", ORACLE],
        ["Cross-entropy against the actual next tokens"],
    ),
    Mutation(
        "targets that do not count are counted", "model/kernels/torch_ops.py",
        "counted, is_target = (targets >= 0)[:, None],", "counted, is_target = (targets >= -1)[:, None],",
        ["test_head.py::test_loss_and_gradients_are_those_of_cross_entropy", ORACLE],
        ["Cross-entropy against the actual next tokens"],
    ),
    Mutation(
        "padding of the vocabulary gets probability", "model/kernels/torch_ops.py",
        "if vocab_size < z.shape[1]:", "if vocab_size < 0:",
        ["test_head.py::test_loss_and_gradients_are_those_of_cross_entropy",
         "test_model.py::test_padding_of_the_vocabulary_is_invisible"],
    ),
    Mutation(
        "the head takes any number of slices", "model/head.py",
        "MAX_SLICES = 16", "MAX_SLICES = 17",
        ["test_head.py::test_a_slice_holds_so_many_logits_and_there_are_sixteen_at_most"],
    ),
    Mutation(
        "the head's slices are as many as there may be", "model/head.py",
        "max(SLICE_LOGITS // len(weight), -(-len(x) // MAX_SLICES))", "max(1, -(-len(x) // MAX_SLICES))",
        ["test_head.py::test_a_slice_holds_so_many_logits_and_there_are_sixteen_at_most"],
    ),
    Mutation(
        "the head sums its loss in the type of the activations", "model/head.py",
        "        wide = torch.promote_types(x.dtype, torch.float32)\n", "        wide = x.dtype\n",
        ["test_head.py::test_the_loss_of_bfloat16_is_summed_in_float32"],
        ["bfloat16 by autocast; the final loss in float32"],
    ),
    Mutation(
        "a table's gradient has only the last row of each entry", "model/kernels/fused_kernels.cpp",
        "load_part(to + i, n) + load_part(from + i, n), n);\n            });",
        "load_part(from + i, n), n);\n            });",
        ["test_embedding.py::test_rows_and_the_gradient_of_a_table", "test_embedding.py::test_by_hand"],
    ),
    Mutation(
        "a token that is no row is read beyond the table", "model/kernels/embedding.py",
        "if least < 0 or most >= len(table):", "if least < 0:",
        ["test_embedding.py::test_a_token_that_is_no_row_is_refused"],
    ),
    Mutation(
        "tokens' rows are rounded before positions are added", "model/gpt.py",
        "Embedding(rows, width, None if learned else compute_dtype)", "Embedding(rows, width, compute_dtype)",
        ["test_embedding.py::test_where_models_look_rows_up"],
    ),
    Mutation(
        "the norm's kernel forgets what its sum is also used for", "model/kernels/fused_kernels.cpp",
        "if (dmixed) g += load_part(dmixed + at + i, n);\n                if (sums) {", "if (sums) {",
        ["test_fused_kernels.py::test_sum_and_norm", "test_fused_kernels.py::test_where_only_one_of_the_two_is_used"],
    ),
    Mutation(
        "the heads' kernel rotates gradients the way it rotates heads", "model/kernels/heads.h",
        "store_part(to + half + i, first * si + second * c, n);",
        "store_part(to + half + i, second * c - first * si, n);",
        ["test_fused_kernels.py::test_heads", "test_fused_kernels.py::test_a_model_with_them_is_the_model_without"],
    ),
    Mutation(
        "of the first input, only the last block has a gradient", "model/kernels/block_kernel.cpp",
        "is_last ? nullptr : dx0", "nullptr",
        ["test_blocks.py::test_bits_are_those_of_the_parts"],
    ),
    Mutation(
        "the first block forgets that its input is the first input, too", "model/kernels/block_kernel.cpp",
        "is_first ? nullptr : dx, dx0", "dx, dx0",
        ["test_blocks.py::test_bits_are_those_of_the_parts"],
    ),
    Mutation(
        "the gates' gradient takes the place of that of heads", "model/kernels/block_kernel.cpp",
        "g.gate, dnormed, true, threads)", "g.gate, dnormed, false, threads)",
        ["test_blocks.py::test_bits_are_those_of_the_parts"],
    ),
    Mutation(
        "blocks in one call forget the residual stream after the MLP", "model/kernels/linear_kernel.cpp",
        "residual ? rounded<real>(v) + load_part(residual + at, n) : v", "v",
        ["test_blocks.py::test_bits_are_those_of_the_parts"],
    ),
    Mutation(
        "blocks in one call add the first input's gradient before it is rounded", "model/kernels/fused_kernels.cpp",
        "sum = rounded<real>(sum) + load_part(before", "sum = sum + load_part(before",
        ["test_blocks.py::test_bits_are_those_of_the_parts"],
    ),
    Mutation(
        "blocks in one call forget hooks", "model/kernels/blocks.py",
        " and not is_hooked(part)\n", "\n",
        ["test_blocks.py::test_what_is_computed_part_by_part"],
    ),
    Mutation(
        "blocks in one call forget hooks of all modules", "model/kernels/blocks.py",
        " or all_are_hooked()", "",
        ["test_blocks.py::test_hooks_of_all_modules"],
    ),
    Mutation(
        "blocks in one call read weights that are no parameters from nowhere", "model/kernels/blocks.py",
        "is_optional = part is None or name == \"bias\"", "is_optional = True",
        ["test_blocks.py::test_what_is_computed_part_by_part"],
    ),
    Mutation(
        "blocks in one call ask the block whether a part drops out", "model/kernels/blocks.py",
        "and not dropout.training)", "and not block.training)",
        ["test_blocks.py::test_dropout_is_none_in_evaluation"],
    ),
    Mutation(
        "the second factor of two alone is not learned", "model/kernels/fused.py",
        "suits = _are_alike(x, y) and learned in ([], [(), ()])", "suits = _are_alike(x, y)",
        ["test_changed_models.py::test_of_two_factors_one_may_be_learned"],
    ),
    Mutation(
        "kernels take the weights of layers that have hooks", "model/kernels/ops.py",
        " and is_by_weight(up) and is_by_weight(out)", "",
        ["test_changed_models.py::test_hooks_are_called_for_any_number_of_tokens"],
    ),
    Mutation(
        "AdamW takes gradients as they lie in memory", "optim/adamw.py",
        "gradient if gradient.stride() == parameter.stride() else", "gradient if True else",
        ["test_changed_models.py::test_gradients_in_another_order_of_memory"],
    ),
    Mutation(
        "parameters of a changed model stay views", "model/changed.py",
        "weight.data = weight.detach().contiguous()", "pass",
        ["test_changed_models.py::test_a_parameter_that_is_a_part_of_a_table_is_trained_alone"],
    ),
    Mutation(
        "all blocks in one call have the first one's norm", "model/kernels/blocks.py",
        "given[each * layer + 1] is not None", "given[1] is not None",
        ["test_blocks.py::test_another_norm_in_a_later_block"],
    ),
    Mutation(
        "an edited part of a block has no effect on a CPU", "model/kernels/blocks.py",
        ".startswith(WRITTEN_FOR)", ".startswith('')",
        ["test_blocks.py::test_who_edits_the_text_gets_what_it_says"],
    ),
    Mutation(
        "the kernel's backward pass gives dropped values gradients", "model/kernels/attention_kernel.cpp",
        "gradient[i] = p * (load(dweights + at) * kept", "gradient[i] = p * (load(dweights + at)",
        ["test_attention_kernel.py::test_dropout_equals_brute_force"],
    ),
    Mutation(
        "all queries of the kernel draw the same dropout", "model/kernels/attention_kernel.cpp",
        "Dropout(s.dropout, s.seed, first + r)", "Dropout(s.dropout, s.seed, 0)",
        ["test_attention_kernel.py::test_dropout_draws_each_weight_alone"],
    ),
    Mutation(
        "dropout of the kernel is drawn once for all steps", "model/kernels/fused.py",
        "return int(torch.randint(2**62, ()))", "return 0",
        ["test_attention_kernel.py::test_dropout_takes_its_draws_from_torch", "test_fused_kernels.py::test_dropout"],
    ),
    Mutation(
        "gradients of activations ignore their dropout", "model/kernels/fused.py",
        "return _dropped(dy, *ctx.draws), None, None", "return dy, None, None",
        ["test_fused_kernels.py::test_dropout"],
    ),
    *([Mutation(
        "the kernel's derivative of ReLU^2 is no number where it is 0", "model/kernels/activations.h",
        "greater(all(SMALLEST), value)", "value",
        ["test_fused_kernels.py::test_mlp"],
    )] if _AVX512 else []),
    *([] if _AVX512 else [Mutation(
        "the kernel's softcap takes the exponential of any logit", "model/kernels/vectors.h",
        "select(x > most, most, x), 2 / cap", "x, 2 / cap",
        ["test_fused_kernels.py::test_logits_beyond_the_range_of_exp"],
    )]),
    Mutation(
        "the kernel's softcap exceeds the cap", "model/kernels/vectors.h",
        "return select(x > 9.0f, one, select(x < -9.0f, -one, x * p / q));", "return x * p / q;",
        ["test_fused_kernels.py::test_logits_beyond_the_range_of_exp",
         "test_fused_kernels.py::test_softcap_of_tiny_and_huge_numbers"],
    ),
    Mutation(
        "the kernel's softcap is coarse in float32, too", "model/kernels/vectors.h",
        "if constexpr (std::is_same_v<T, float>) return cap * hyperbolic", "if (false) return cap * hyperbolic",
        ["test_fused_kernels.py::test_softcap_of_tiny_and_huge_numbers"],
    ),
    Mutation(
        "the kernel of the head keeps the weights' gradient of the last rows only", "model/kernels/head_kernel.cpp",
        "of_weight, units, units, first == 0", "of_weight, units, units, true",
        ["test_fused_kernels.py::test_whole_head"],
    ),
    Mutation(
        "the kernel's logits have no softcap", "model/kernels/head_kernel.cpp",
        "s.cap > 0 ? softcapped<real>(v, s.cap) : v", "v",
        ["test_fused_kernels.py::test_capped_logits",
         "test_fused_kernels.py::test_logits_of_many_positions_are_computed_by_a_kernel"],
    ),
    Mutation(
        "the kernel's losses have no softcap", "model/kernels/head_kernel.cpp",
        "v = load_part(z + i, n), c = cap > 0 ? softcapped<real>(v, cap) : v;", "v = load_part(z + i, n), c = v;",
        ["test_fused_kernels.py::test_losses_of_few_logits_at_a_time",
         "test_fused_kernels.py::test_the_losses_of_a_model_are_those_of_its_logits"],
    ),
    Mutation(
        "the losses of a changed model are those of its own parts", "eval/bits_per_byte.py",
        "if is_called or head.bias is not None or not is_by_weight(head):", "if False:",
        ["test_fused_kernels.py::test_the_losses_of_a_model_are_those_of_its_logits"],
    ),
    Mutation(
        "exponentials of the kernel are relative to one of the last logits", "model/kernels/head_kernel.cpp",
        "top = select(counted > top, counted, top);", "top = counted;",
        ["test_fused_kernels.py::test_loss_of_one_large_logit"],
    ),
    Mutation(
        "the kernel sums a slice's outer products at once, however long it is", "model/kernels/linear_kernel.cpp",
        "of_weights, units, SUMMED_ROWS, first", "of_weights, units, units, first",
        ["test_fused_kernels.py::test_bits_do_not_depend_on_the_number_of_threads"],
    ),
    Mutation(
        "the kernel's losses count targets that do not count", "model/kernels/head_kernel.cpp",
        "return target < 0 ? 0 : (double)highest - z", "return (double)highest - z",
        ["test_fused_kernels.py::test_losses", "test_fused_kernels.py::test_losses_by_hand"],
    ),
    Mutation(
        "exponentials of what is no number are numbers", "model/kernels/vectors.h",
        "greater(all(-104.0f), x)", "greater(x, all(-104.0f))",
        ["test_fused_kernels.py::test_losses_by_hand"],
    ),
    Mutation(
        "the second number of a pair is multiplied by the first", "model/kernels/products.h",
        "pairs(rows > 0 ? load_halves(from, n) : half_vec{}, rows > 1 ? load_halves(from + stride, n) : half_vec{})",
        "pairs(rows > 1 ? load_halves(from + stride, n) : half_vec{}, rows > 0 ? load_halves(from, n) : half_vec{})",
        ["test_attention_kernel.py::test_equals_brute_force", "test_fused_kernels.py::test_whole_head"],
    ),
    Mutation(
        "the gradient of GELU is the probability alone", "model/kernels/activations.h",
        "below + x * (bell * 0.398942280f)}", "below}",
        [f"test_fused_kernels.py::{test}" for test in ("test_gelu", "test_gelu_by_hand", "test_mlp")],
    ),
    Mutation(
        "sums over rows are added by thread", "model/kernels/fused_kernels.cpp",
        "double of_x = 0, of_y = 0;", "double of_x = 1e-3 * omp_get_num_threads(), of_y = 0;",
        ["test_fused_kernels.py::test_bits_do_not_depend_on_the_number_of_threads"],
    ),
    Mutation(
        "the kernels make a number of what is none", "model/kernels/activations.h",
        "rectified = select(x < vec{}, vec{}, x);", "rectified = select(x > vec{}, x, vec{});",
        ["test_fused_kernels.py::test_what_is_no_number_reaches_the_loss"],
    ),
    Mutation(
        "the layer norm's kernel forgets that the mean moves", "model/kernels/fused_kernels.cpp",
        "load_part(weight + i, n) - shift - standard * along)", "load_part(weight + i, n) - standard * along)",
        ["test_fused_kernels.py::test_layer_norm", "test_fused_kernels.py::test_sum_and_layer_norm"],
    ),
    Mutation(
        "the kernel of the MLP keeps the weights' gradient of the last rows only", "model/kernels/linear_kernel.cpp",
        "of_weights, units, SUMMED_ROWS, first == 0", "of_weights, units, SUMMED_ROWS, true",
        ["test_fused_kernels.py::test_mlp"],
    ),
    Mutation(
        "the derivative of ReLU^2 is the root alone", "model/kernels/linear_kernel.cpp",
        "Relu2::slope_of<real>(at)", "0.5f * Relu2::slope_of<real>(at)", ["test_fused_kernels.py::test_mlp"],
    ),
    Mutation(
        "the MLP keeps no derivatives of GELU", "model/kernels/fused.py",
        'keep and activation == "gelu"', 'keep and activation == "relu2"',
        ["test_fused_kernels.py::test_the_mlp_keeps_the_derivatives_that_a_gradient_needs",
         "test_fused_kernels.py::test_mlp"],
    ),
    Mutation(
        "the kernel of the MLP gives the gradient after the activation", "model/kernels/linear_kernel.cpp",
        "v * (slope ? at : Relu2::slope_of<real>(at)), n)", "v, n)",
        ["test_fused_kernels.py::test_mlp", "test_fused_kernels.py::test_a_model_with_them_is_the_model_without"],
    ),
    Mutation(
        "products of many columns repeat the first ones", "model/kernels/panels.h",
        "panels + c * depth + k * NR,", "panels + k * NR,",
        ["test_fused_kernels.py::test_linear", "test_fused_kernels.py::test_mlp",
         "test_fused_kernels.py::test_capped_logits"],
    ),
    Mutation(
        "the kernel of linear layers multiplies only whole tiles", "model/kernels/panels.h",
        "body(row, std::min(at_once, rows - row));", "body(row, std::min(at_once, rows - row) / MR * MR);",
        ["test_fused_kernels.py::test_linear", "test_fused_kernels.py::test_mlp"],
    ),
    Mutation(
        "what AMX multiplies turned is not turned back", "model/kernels/amx.h",
        "const float* from = x_left ? turned : products[l];", "const float* from = products[l];",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "AMX leaves out a product of terms that counts", "model/kernels/amx.h",
        "right(2), add_products();", "right(2);",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "the third terms of numbers for AMX are lost", "model/kernels/terms.h",
        "first -= (vec)(low << 16), second -= (vec)high;", "first -= (vec)(low << 16), second = vec{};",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "AMX keeps the last units of a deep gradient only", "model/kernels/amx.h",
        "AMX_TILE, k > 0, products[l]", "AMX_TILE, false, products[l]",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "AMX multiplies the first of many left panels only", "model/kernels/amx.h",
        "l0 += AMX_LEFTS)", "l0 = lefts.last)",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "AMX keeps the last units of a deep product only", "model/kernels/panels.h",
        "b, NR, add || k > 0, to, c_row,", "b, NR, false, to, c_row,",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "AMX stores its sums in the wrong rows", "model/kernels/panels.h",
        "y = at.y, y_row = at.stride;", "y = at.y, y_row = at.stride - 1;",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "AMX stores whole tiles where there are fewer columns", "model/kernels/panels.h",
        "height % MR == 0 && columns % NR == 0)", "height % MR == 0)",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "AMX stores whole tiles where there are fewer rows", "model/kernels/panels.h",
        "height % MR == 0 && columns % NR == 0)", "columns % NR == 0)",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "each call of a kernel takes its memory from the system", "model/kernels/scratch.h",
        "if (blocks.size() > 1) blocks.clear()", "if (true) blocks.clear()",
        ["test_kernel_memory.py::test_the_same_memory_is_used_again"],
    ),
    Mutation(
        "the memory of kernels stays in as many blocks as their first call took", "model/kernels/scratch.h",
        "if (blocks.size() > 1) blocks.clear(), size = 0;", "",
        ["test_kernel_memory.py::test_what_a_round_needs_is_in_one_block_the_next_time"],
    ),
    Mutation(
        "the memory of kernels is in pages of 4 KiB", "model/kernels/scratch.h",
        "madvise(blocks.back().get(), bytes, MADV_HUGEPAGE);", "",
        ["test_kernel_memory.py::test_pages_are_large_where_there_are_large_ones"],
    ),
    Mutation(
        "a kernel's memory begins within a line of the cache", "model/kernels/scratch.h",
        "bytes = (bytes + LINE - 1) / LINE * LINE;", "",
        ["test_kernel_memory.py::test_pieces_begin_with_a_line_of_the_cache_and_do_not_overlap"],
    ),
    Mutation(
        "AMX takes the first units of rows again in a deep product", "model/kernels/panels.h",
        "rows + block * a_row + k * ALONG;", "rows + block * a_row;",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "AMX puts the products of all rows in the first ones", "model/kernels/panels.h",
        "at(block + r, c + i, n", "at(r, c + i, n",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "AMX forgets the depth after whole registers", "model/kernels/amx.h",
        "for (long i = 0; depth > 0 && i < AMX_TILE;", "for (long i = 0; false && i < AMX_TILE;",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "a thread multiplies by AMX before its registers have a size", "model/kernels/amx.h",
        "        AMX_SIZES(sizes);\n", "",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "AMX takes weights of attention the wrong way round", "model/kernels/attention_kernel.cpp",
        "turn(dscores_down), turn(weights_down);", "turn(dscores_down);",
        ["test_other_processors.py::test_amx_computes_the_same"],
    ),
    Mutation(
        "the kernel reads rows of attention after the last one", "model/kernels/attention_kernel.cpp",
        "return tokens == rows() && width == columns();", "return width == columns();",
        ["test_attention_kernel.py::test_equals_brute_force"],
    ),
    Mutation(
        "tasks of a call of the kernels are done in another one", "model/kernels/tasks.h",
        "begun[own].tasks[set] = 0;", "",
        ["test_fused_kernels.py::test_whole_head", "test_fused_kernels.py::test_mlp"],
    ),
    Mutation(
        "a build that was killed leaves its files for good", "model/kernels/library.py",
        'folder.glob(f".{stem}.*")', "()",
        ["test_kernel_library.py::test_a_damaged_library_is_never_loaded"],
    ),
    Mutation(
        "kernels use AMX without permission", "model/kernels/library.py",
        "and not built.functions.products_are_permitted():", "and False:",
        ["test_kernel_library.py::test_without_the_permission_to_use_amx_they_are_built_without_it"],
    ),
    Mutation(
        "a compiler that hangs is waited for again, by torch.compile", "model/kernels/library.py",
        "hangs = isinstance(error, subprocess.TimeoutExpired)", "hangs = False",
        ["test_implementations.py::TestCompilerThatFails::test_one_that_hangs_is_not_waited_for_again"],
    ),
    Mutation(
        "a compiler on Windows is given the options of g++", "model/kernels/library.py",
        'if sys.platform == "win32":', "if False:",
        ["test_kernel_library.py::test_on_windows_there_are_none_and_no_warning_says_so"],
    ),
    Mutation(
        "a compiler without OpenMP builds no kernels", "model/kernels/library.py",
        "and _OPENMP in flags:", "and False:",
        ["test_kernel_library.py::test_a_compiler_without_openmp_builds_them_for_one_thread"],
    ),
    Mutation(
        "few positions are multiplied by kernels, which pack all weights", "model/kernels/ops.py",
        "or x.shape[:-1].numel() < KERNEL_POSITIONS else", "else",
        ["test_fused_kernels.py::test_many_positions_are_multiplied_by_a_kernel"],
    ),
    Mutation(
        "a run of bfloat16 builds the kernels of float32, too", "model/kernels/fused.py",
        "library = loaded if dtype is None", 'library = kernel_library("float32") if dtype is None',
        ["test_implementations.py::test_a_run_needs_the_kernels_of_one_type"],
    ),
    Mutation(
        "kernels of float32 are begun where those of bfloat16 will be needed", "app/run/train_run.py",
        'dtype = "bfloat16" if installed.cpu_lists_bfloat16() else "float32"', 'dtype = "float32"',
        ["test_kernel_library.py::test_they_are_built_while_torch_is_imported"],
    ),
    Mutation(
        "a run folder that is taken is refused once all is prepared", "app/run/train_run.py",
        "RunDirectory(attempt.new_run_path(run_dir, request.recipe or DEFAULT_RECIPE)).require_free()", "pass",
        ["test_train_run.py::test_a_folder_that_is_taken_is_refused_before_torch_is_imported"],
    ),
    Mutation(
        "this machine is measured while kernels are built", "app/run/train_run.py",
        "building.join()", "pass",
        ["test_kernel_library.py::test_they_are_built_while_torch_is_imported"],
    ),
    Mutation(
        "an evaluation computes derivatives of activations", "model/kernels/fused.py",
        "out, activation, torch.is_grad_enabled())", "out, activation, True)",
        ["test_fused_kernels.py::test_the_mlp_keeps_the_derivatives_that_a_gradient_needs"],
    ),
    Mutation(
        "LayerNorm's kernel reads rounded weights as float32", "model/kernels/fused.py",
        "weight, bias = weight.float().contiguous(), _floats(bias)", "pass",
        ["test_fused_kernels.py::test_a_layer_norm_whose_weights_are_rounded"],
    ),
    Mutation(
        "kernels read a part's result of another type as their own", "model/kernels/fused.py",
        "return x.dtype == y.dtype and x.shape == y.shape", "return True",
        ["test_kernel_inputs.py::test_a_part_may_return_another_type"],
    ),
    Mutation(
        "the kernel of the MLP forgets a bias of its second layer alone", "model/kernels/ops.py",
        "biased = up.bias is not None or out.bias is not None", "biased = up.bias is not None",
        ["test_kernel_inputs.py::test_a_bias_of_the_second_layer_of_an_mlp_alone_is_added"],
    ),
    Mutation(
        "kernels read rotary tables of another type as float32", "model/kernels/fused.py",
        "heads.contiguous(), _floats(cos), _floats(sin)", "heads.contiguous(), cos, sin",
        ["test_kernel_inputs.py::test_weights_and_tables_may_have_another_type"],
    ),
    Mutation(
        "kernels read what has another shape", "model/kernels/shapes.py",
        "if tensor is not None and tensor.shape != shape:", "if False:",
        ["test_kernel_inputs.py::test_other_shapes_are_refused"],
    ),
    Mutation(
        "kernels divide queries by any number of keys", "model/kernels/shapes.py",
        "if rest or n_kv_head < 1 or n_head % n_kv_head:", "if rest or n_kv_head < 1:",
        ["test_kernel_inputs.py::test_other_shapes_are_refused"],
    ),
    Mutation(
        "the loss has a second derivative of nothing", "model/head.py",
        "if torch.is_grad_enabled() and not", "if False and not",
        ["test_kernel_inputs.py::test_a_second_derivative_of_the_loss_is_an_error"],
    ),
    Mutation(
        "a whole number stays one in a field of floats", "config/fields.py",
        "if leaf is float and type(value) is int:", "if False:",
        ["test_config.py::test_a_whole_number_in_a_field_of_floats_becomes_one"],
    ),
    Mutation(
        "any activation of an MLP is computed as ReLU^2", "model/kernels/ops.py",
        "if isinstance(activation, OfBoth) and kernels", "if kernels",
        ["test_fused_kernels.py::test_many_positions_are_multiplied_by_a_kernel"],
    ),
    Mutation(
        "a compiled model calls the kernels", "model/kernels/ops.py",
        " or torch.compiler.is_compiling()", "",
        ["test_fused_kernels.py::test_a_compiled_model_does_not_use_them"],
    ),
    Mutation(
        "a fresh head has unit variance", "model/init.py",
        "normal(0.001)", "normal(1.0)",
        ["test_model.py::TestInitialWeights::test_a_fresh_model_predicts_almost_uniformly",
         "test_model.py::TestInitialWeights::test_nanochat"],
        ["The loss starts near that of guessing", "The model is built on the meta device"],
    ),
    Mutation(
        "GPT-2's projections start as large as the rest", "model/init.py",
        "normal(0.02 / math.sqrt(2 * config.n_layer))", "normal(0.02)",
        ["test_model.py::TestInitialWeights::test_gpt2"],
        ["`init_from='scratch'` builds a GPT"],
    ),
    Mutation(
        "all weights draw from one generator", "model/init.py",
        "manual_seed(fold_seed(seed, zlib.crc32(name.encode())))", "manual_seed(seed)",
        ["test_model.py::TestInitialWeights::test_depends_on_the_seed_alone"],
        ["The model is built on the meta device"],
    ),
    Mutation(
        "a tied head is untied by the move to the device", "model/gpt.py",
        "    if config.tied_head:  # every module has been given a tensor of its own\n"
        "        model.head.weight = model.token_embedding.weight\n", "",
        ["test_model.py::test_a_tied_head_is_the_embedding"],
        ["AdamW at 0.0036 with betas"],
    ),
    Mutation(
        "positions of a short row are those at the end of the context", "model/gpt.py",
        "rotary = (self.cos[start:stop], self.sin[start:stop])",
        "rotary = (self.cos[start - stop :].flip(0), self.sin[start - stop :].flip(0))",
        ["test_model.py::test_rows_shorter_than_the_context"],
        ["`--max-seq-len`"],
    ),
    Mutation(
        "the residual lambdas are swapped", "model/gpt.py",
        "of_sum(x, x0, *lambdas)", "of_sum(x, x0, lambdas[1], lambdas[0])",
        [ORACLE],
    ),
    Mutation(
        "keys are not normalized", "model/kernels/torch_ops.py",
        "qk = rms_norm(qk, norm_eps)",
        "qk = torch.cat((rms_norm(qk[:, :, :n_head], norm_eps), qk[:, :, n_head:]), dim=2)",
        [ORACLE],
    ),
    Mutation(
        "the value gate is not doubled", "model/kernels/torch_ops.py",
        "(2 * torch.sigmoid(gates))", "torch.sigmoid(gates)",
        [ORACLE],
    ),
    Mutation(
        "dropout stays on while the model is evaluated", "model/gpt.py",
        "dropout = self.dropout if self.dropout > 0 and self.training else 0.0", "dropout = self.dropout",
        ["test_model.py::TestDropout::test_is_off_in_evaluation_mode"],
    ),
    # --- attention
    Mutation(
        "key-value heads are dealt out in turns instead of in runs", "model/attention.py",
        "x.repeat_interleave(n_heads // x.shape[1], dim=1)", "x.repeat(1, n_heads // x.shape[1], 1, 1)",
        ["test_attention.py::test_gradients_and_grouped_heads_equal_brute_force"],
        ["As many key and value heads as heads"],
    ),
    Mutation(
        "blocks of queries see one key too few in front of them", "model/attention.py",
        "first_key = max(0, start - reach + 1)", "first_key = max(0, start - reach + 2)",
        ["test_attention.py::test_equals_brute_force"],
        ["`--window-pattern SSSL`"],
    ),
    Mutation(
        "a window of a block sees one key too many", "model/attention.py",
        "hidden = hidden | (keys <= queries - reach)", "hidden = hidden | (keys < queries - reach)",
        ["test_attention.py::test_equals_brute_force"],
        ["`--window-pattern SSSL`"],
    ),
    Mutation(
        "while sampling, a window sees one key too many", "model/attention.py",
        "seen &= keys > queries - window", "seen &= keys >= queries - window",
        ["test_sampling.py::test_equals_full_recompute", "test_sampling.py::test_cache_in_pieces_equals_one_pass"],
        ["Samples every 2000 steps"],
    ),
    Mutation(
        "a document's first key knows the token before the document", "model/kernels/torch_attention.py",
        "None if documents is None else first_tokens(documents, *k.shape[:2])", "None",
        ["test_torch_attention.py::test_windows_and_documents_equal_brute_force"],
    ),
    Mutation(
        "a micro-batch that straddles epochs has no room for its documents", "data/document_capacity.py",
        "self.micro_sequences * int(counts.max())", "int(np.sort(counts)[-self.micro_sequences :].sum())",
        ["test_torch_attention.py::test_capacity_is_doubled_where_rows_hold_more_documents"],
    ),
    Mutation(
        "the fast channels of keys are offset", "model/attention.py",
        "% half * 2 >= half", "% half * 2 < half",
        ["test_attention.py::test_key_offset_by_hand",
         "test_model.py::test_logits_loss_and_gradients_equal_the_oracle"],
    ),
    Mutation(
        "the kernel gives the gradients of offset keys to the tokens that they stand with",
        "model/kernels/attention_kernel.cpp", "if (s.key_offset) offset_gradients(s, first, last - first, rows);", "",
        ["test_attention_kernel.py::test_equals_brute_force"],
    ),
    Mutation(
        "the kernel packs a block over one that is still seen", "model/kernels/attention_kernel.cpp",
        "return q0 % ring();", "return 0;", ["test_attention_kernel.py::test_equals_brute_force"],
    ),
    Mutation(
        "attention writes beyond its memory", "model/kernels/attention_kernel.cpp",
        " + (6 * BLOCK + 1) * columns() + ", " + ", ["test_other_processors.py::test_keeps_to_its_memory"],
    ),
    Mutation(
        "the gradients of queries are set to zero for each block of keys", "model/kernels/attention_kernel.cpp",
        "if (q0 >= begun) own.begin(", "own.begin(", ["test_attention_kernel.py::test_equals_brute_force"],
    ),
    Mutation(
        "the kernel loses the gradients of the last key of a block", "model/kernels/attention_kernel.cpp",
        "std::memcpy(dk, dk + BLOCK * columns, columns * sizeof(float));", "",
        ["test_attention_kernel.py::test_equals_brute_force"],
    ),
    Mutation(
        "the first key's own gradient is lost", "model/kernels/attention_kernel.cpp",
        "*own = (t0 + i ? 0 : *own) + ", "*own = 0 + ",
        ["test_attention_kernel.py::test_equals_brute_force"],
    ),
    Mutation(
        "a sampled token's key is not offset", "model/kernels/decode_kernel.cpp",
        "keys[(column + is_slow) * m.width + i] = placed[i];", "keys[column * m.width + i] = placed[i];",
        ["test_decoder.py::test_the_kernel_is_the_same"],
    ),
    Mutation(
        "the last token's half key is lost when the cache moves", "model/decoder.py",
        "layer[..., : kept + 1, :] = layer[..., self._column - kept : self._column + 1, :].clone()",
        "layer[..., :kept, :] = layer[..., self._column - kept : self._column, :].clone()",
        ["test_decoder.py::test_past_the_spare_columns"],
    ),
    Mutation(
        "an exported model's first key takes from the padding", "model/interop/modeling_gptlab.py",
        "torch.where(follows[:, None, :, None], before, k)", "before",
        ["test_export.py::TestComputesTheSame::test_a_batch_padded_on_the_left"],
    ),
    Mutation(
        "rotary pairs are neighbours", "model/attention.py",
        "first, second = x.chunk(2, dim=-1)", "first, second = x[..., ::2], x[..., 1::2]",
        ["test_model.py::test_rotation_by_hand"],
    ),
    # --- counts
    Mutation(
        "the head is not counted among the scaling parameters", "model/counting.py",
        "scaling=by_role[Role.MATRIX] + model.head.weight.numel()", "scaling=by_role[Role.MATRIX]",
        ["test_counting.py::test_parameters_by_hand", "test_lineage_recipes.py::TestDepth::test_nanochats_one_dial"],
        ["Parameters by kind, FLOPs a token"],
    ),
    Mutation(
        "attention's FLOPs ignore the window", "model/counting.py",
        "seq_len if layer.window is None else min(layer.window, seq_len)", "seq_len",
        ["test_counting.py::test_flops_by_hand"],
        ["Parameters by kind, FLOPs a token"],
    ),
    Mutation(
        "the backward pass is counted once", "model/counting.py",
        "matmul=6 * sum(", "matmul=4 * sum(",
        ["test_counting.py::test_flops_by_hand", "test_counting.py::test_measured_by_torch_s_own_counter"],
        ["Parameters by kind, FLOPs a token"],
    ),
    Mutation(
        "a layer that several share is counted once", "model/counting.py",
        "model.named_modules(remove_duplicate=False)", "model.named_modules()",
        ["test_counting.py::test_what_layers_share_is_computed_by_each"],
    ),
    Mutation(
        "an own attention's layer is split as if it were gptlab's", "model/counting.py",
        "for name, module in model.named_modules() if isinstance(module, Attention)}",
        "for name, module in model.named_modules() if name.endswith('attention')}",
        ["test_counting.py::test_only_matrices_of_gptlabs_attention_are_fused"],
    ),
    Mutation(
        "the head's role is a matrix", "model/counting.py",
        '"head": Role.HEAD', '"head": Role.MATRIX',
        ["test_model.py::test_roles"],
        ["The optimizer dispatches by the kind"],
    ),
    # --- weights from elsewhere
    Mutation(
        "a field that an export's record lacks has its default", "model/interop/hf_config.py",
        " or record.keys() != kinds.keys()", "",
        ["test_export.py::TestComesBack::test_a_record_that_contradicts_the_rest_or_lacks_a_field_is_not_believed"],
    ),
    Mutation(
        "GPT-2's matrices are taken without being transposed", "model/interop/hf_weights.py",
        "value = value.T if turned else value", "value = value",
        ["test_gpt2_weights.py::test_logits_and_gradients_equal_those_of_transformers"],
    ),
    Mutation(
        "nanoGPT's two norms of a block are swapped", "model/interop/hf_weights.py",
        '"attention_norm": ("h.{}.ln_1",), "mlp_norm": ("h.{}.ln_2",)',
        '"attention_norm": ("h.{}.ln_2",), "mlp_norm": ("h.{}.ln_1",)',
        ["test_import.py::test_a_nanogpt_checkpoint_gives_its_logits"],
        ["a nanoGPT checkpoint is loaded"],
    ),
    Mutation(
        "a file of torch.save is read without being looked at first", "model/interop/torch_file.py",
        "check_pickle(io.BytesIO(_pickle_of(file, file_bytes)), file_bytes)", "_pickle_of(file, file_bytes)",
        ["test_import.py::test_code_in_a_checkpoint_is_refused_and_never_runs"],
        ["a nanoGPT checkpoint is loaded"],
    ),
    Mutation(
        "a GPT-2 that transformers saved has no biases if the exported one had none", "model/interop/hf_config.py",
        "dataclasses.replace(config, bias=True)", "config",
        ["test_export.py::TestComesBack::test_after_transformers_saved_it_again"],
    ),
]  # fmt: skip
