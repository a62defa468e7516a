"""Plans of memory and of many ranks, copies of sharded weights, and the compiler's failures."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    Mutation(
        "the embedding that blocks share is counted twice",
        "bench/compiled_memory.py",
        "kept_by_block[0] -= stream",
        "kept_by_block[0] -= 0",
        ["test_compiled_memory.py::test_blocks_and_head_make_the_whole_model"],
    ),
    Mutation(
        "what only fused operations read is counted",
        "bench/compiled_memory.py",
        "return _REDUCTION * _bytes(node) <=",
        "return 0 <=",
        ["test_compiled_memory.py::test_peak_by_hand"],
    ),
    Mutation(
        "gradients of later blocks are forgotten",
        "bench/compiled_memory.py",
        "gradients += block.gradients",
        "gradients += 0",
        ["test_compiled_memory.py::test_gradients_of_later_blocks_are_there_while_earlier_ones_compute"],
    ),
    Mutation(
        "a second micro-batch's gradients are forgotten",
        "bench/memory.py",
        "earlier = gradients if config.micro_batches > 1 else 0",
        "earlier = 0",
        ["test_compiled_memory.py::test_memory_of_a_step_by_hand"],
    ),
    Mutation(
        "a plan forgets the logits of a validation",
        "bench/memory.py",
        "validation=max(0, validation - gradients - activations - update)",
        "validation=0",
        ["test_plan.py::test_memory_by_hand"],
    ),
    Mutation(
        "a plan of a machine that was not timed takes any machine's rate",
        "cli/plan.py",
        "return limited_machine(config) if rate is None",
        "return machine_at(config, place, World(), None) if rate is None",
        ["test_plan.py::test_where_no_step_was_timed_the_peak_sizes_the_run"],
    ),
    Mutation(
        "a model that is too large is to be trained on fewer rows",
        "cli/plan.py",
        "memory.weights + memory.gradients + memory.optimizer < there and",
        "",
        ["test_plan.py::test_what_does_not_fit_says_what_to_lower"],
    ),
    Mutation(
        "a plan of one GPU ignores the depths of the table",
        "cli/plan.py",
        '{"depths", "gpu_gb"}',
        '{"gpu_gb"}',
        ["test_plan.py::test_arguments_of_the_table_are_refused_without_it"],
    ),
    Mutation(
        "a plan forgets the update",
        "bench/memory.py",
        "update = max(0, _update_bytes(model, optimizer, config) - activations)",
        "update = 0",
        ["test_compiled_memory.py::test_a_whole_uncompiled_step"],
    ),
    Mutation(
        "uncompiled passes take what they keep",
        "bench/memory.py",
        "return max(kept, live.peak if held else live.peak - gradients)",
        "return kept",
        ["test_compiled_memory.py::test_a_whole_uncompiled_step"],
    ),
    Mutation(
        "activations of many ranks grow like the smaller pass",
        "bench/memory.py",
        "return max(twice - once",
        "return min(twice - once",
        ["test_compiled_memory.py::test_activations_of_many_ranks_grow_with_the_rows"],
    ),
    Mutation(
        "a plan counts bfloat16 for products in 8 bits",
        "bench/memory.py",
        "    if config.runtime.fp8:",
        "    if False:",
        ["test_compiled_memory.py::test_a_plan_counts_products_in_8_bits"],
    ),
    Mutation(
        "a reduced message is counted once and not for each rank",
        "bench/many_ranks.py",
        "def reduce_scatter_later(self, own: Tensor, flat: Tensor, what: str) -> Callable[[], None]:\n"
        "        self.add(what, own.nbytes * (self.size - 1))",
        "def reduce_scatter_later(self, own: Tensor, flat: Tensor, what: str) -> Callable[[], None]:\n"
        "        self.add(what, own.nbytes)",
        ["test_many_ranks.py::test_zero_sends_what_its_division_says"],
    ),
    Mutation(
        "copies exchange their gradients for nothing",
        "bench/many_ranks.py",
        "2 * args[0][0].nbytes * (copies - 1) // copies",
        "0",
        ["test_many_ranks.py::test_hsdp_by_hand"],
    ),
    Mutation(
        "what is larger than the GPU fits",
        "cli/plan_ranks.py",
        "return self.bytes <= self.gpu_bytes",
        "return True",
        ["test_many_ranks.py::test_what_does_not_fit_says_what_would"],
    ),
    Mutation(
        "every copy saves the first part",
        "training/parallel/fsdp_copies.py",
        "self.number, self.n_copies)",
        "0, self.n_copies)",
        ["test_copies.py::test_copies_save_every_element_once"],
    ),
    Mutation(
        "no memory is left for the allocator",
        "app/run/micro_batch.py",
        "FILLED = 0.95",
        "FILLED = 1.0",
        ["test_micro_batch.py::test_the_first_try_is_the_largest_that_the_plan_has_room_for"],
    ),
    Mutation(
        "memory that torch keeps for later counts as taken",
        "app/run/micro_batch.py",
        "    torch.cuda.empty_cache()  # torch keeps the memory of models whose steps were timed\n",
        "",
        ["test_micro_batch.py::test_the_first_try_is_the_largest_that_the_plan_has_room_for"],
    ),
    Mutation(
        "rows that were asked for are replaced",
        "app/run/micro_batch.py",
        'if world.size > 1 or "batch.micro_sequences" in request.overrides:',
        "if world.size > 1:",
        ["test_micro_batch.py::test_rows_are_planned_for_a_recipe_and_one_gpu"],
    ),
    Mutation(
        "gptlab bench times rows that no run begins with",
        "cli/bench.py",
        "if has_nvidia_gpu():",
        "if False:",
        ["test_micro_batch.py::test_what_is_timed_has_the_rows_of_the_run"],
    ),
    Mutation(
        "a compiler that gives gradients of zeros is trusted",
        "training/compilation.py",
        "            _require_gradients(state)",
        "            pass",
        ["test_compiled_parts.py::test_a_gpu_whose_compiler_fails_trains_without_it"],
    ),
    Mutation(
        "each copy of sharded weights compiles its own update",
        "training/parallel/fsdp_muon.py",
        "if compiled is not None and self._group.n_copies == 1:",
        "if compiled is not None:",
        ["test_sharded_muon.py::test_copies_make_the_same_update"],
    ),
]
