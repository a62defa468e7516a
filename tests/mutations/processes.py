"""Several processes."""

from __future__ import annotations

from .mutation import Mutation

SHARES = "test_divided.py::TestGradients::test_each_gets_the_sums_of_what_it_owns"

MUTATIONS = [
    Mutation(
        "gradients leave in every backward pass", "training/parallel/zero.py",
        "self._armed = is_last or self._reduces_each", "self._armed = True",
        [SHARES],
        ["With DDP, gradients are synchronized"],
    ),
    Mutation(
        "gradients leave when the backward pass is over", "training/parallel/zero.py",
        "self._buckets[self._next].waiting == 0:", "self._buckets[self._next].waiting < 0:",
        [SHARES],
        ["With DDP, gradients are synchronized"],
    ),
    Mutation(
        "torchrun's local rank is not read", "runtime/processes/distributed.py",
        "return cls(rank, size, local_rank, local_size)", "return cls(rank, size, 0, local_size)",
        ["test_distributed.py::TestWorld::test_torchrun_tells"],
        ["`torchrun` is recognized by `RANK`", "NCCL, ranks, a device each"],
    ),
    Mutation(
        "all ranks of a machine compute on its first GPU", "runtime/hardware/device.py",
        "int(number or local_rank or 0)", "int(number or 0)",
        ["test_device.py::test_each_rank_has_the_gpu_of_its_local_rank"],
        ["NCCL, ranks, a device each"],
    ),
    Mutation(
        "tensors of GPUs go through gloo", "runtime/processes/torch_group.py",
        '"cpu:gloo,cuda:nccl" if on_cuda else "gloo"', '"gloo"',
        ["test_distributed.py::TestWorld::test_collectives_are_nccls_on_gpus_and_gloos_on_cpus"],
        ["NCCL, ranks, a device each"],
    ),
    Mutation(
        "the process group is left behind", "runtime/processes/torch_group.py",
        "dist.destroy_process_group()", "pass",
        ["test_distributed.py::TestWorld::test_the_process_group_is_destroyed_at_the_end"],
        ["The process group is destroyed"],
    ),
    Mutation(
        "a run destroys the process group of its caller", "runtime/processes/torch_group.py",
        "if dist.is_initialized() and not TorchGroup.was_left:", "if False:",
        ["test_distributed.py::TestWorld::test_a_process_group_of_somebody_else_is_refused"],
    ),
    Mutation(
        "a restarted command goes back to its step again", "app/run/attempt.py",
        "replace(request, resume_from_step=None)", "request",
        ["test_resume_step.py::test_torchrun_restarts_it_from_its_newest_checkpoint"],
    ),
    Mutation(
        "a job forgets the run that it resumed", "app/run/earlier_run.py",
        "attempt.job.will_begin(self.run.path)", "pass",
        ["test_resume_step.py::test_torchrun_restarts_it_from_its_newest_checkpoint"],
    ),
    Mutation(
        "a rank saves in the copy of the run that it was given", "app/run/earlier_run.py",
        "            record.run = record.saves.run = attempt.run  # where", "            # where",
        ["test_ranks.py::TestDamagedCheckpoints::test_all_fall_back_with_one_that_cannot_read_it"],
    ),
    Mutation(
        "every rank writes metrics", "app/run/run_session.py",
        "run.metrics_path if group.is_main else Path(os.devnull)", "run.metrics_path",
        ["test_distributed.py::TestWorldSizes::test_only_rank_0_speaks_and_writes"],
        ["Only the master process evaluates"],
    ),
    Mutation(
        "a rank evaluates its neighbour's passes", "eval/core.py",
        "itertools.islice(_passes(readers, max_pass_tokens), group.rank, None, group.size)",
        "itertools.islice(_passes(readers, max_pass_tokens), 0, None, group.size)",
        ["test_core.py::TestAgainstTheSlowWay::test_ranks_share_the_passes_and_all_have_the_answers"],
    ),
    Mutation(
        "ranks draw the same micro-batches", "data/loader.py",
        "self._micro_indices = tuple(range(self._rank, end, self._world_size))",
        "self._micro_indices = tuple(range(0, end, self._world_size))",
        ["test_loader.py::test_any_world_size_gets_the_same_steps",
         "test_distributed.py::TestWorldSizes::test_train_the_same_run"],
        ["Run as a module, or with `torchrun`"],
    ),
    Mutation(
        "a rank that died is not named", "runtime/processes/liveness.py",
        'f"rank {rank} {what} {where}"', 'f"a rank {what} {where}"',
        ["test_sharded.py::TestFaults::test_a_rank_that_dies_within_a_pass_is_named"],
        ["The process group is destroyed"],
    ),
    Mutation(
        "runs of one program take each other's folder", "runtime/processes/torch_group.py",
        "run = next(_RUNS)", "run = 1",
        ["test_ranks.py::TestJob::test_runs_of_one_program_are_counted_whoever_sets_the_clock"],
    ),
    Mutation(
        "who sets the clock kills every rank", "runtime/processes/liveness.py",
        "return process is not None and process.is_running()",
        "return process is not None and process.create_time() == psutil.Process(process.pid).create_time()",
        ["test_liveness.py::test_who_sets_the_clock_kills_no_rank"],
    ),
    Mutation(
        "a rank on another disk trains until the first save", "app/run/attempt.py",
        "None if run else platform.node()", "None",
        ["test_ranks.py::TestRunFolder::test_that_a_rank_does_not_see_is_refused"],
    ),
    Mutation(
        "a rank that sees an older run folder for a moment ends the run", "app/run/attempt.py",
        "if time.monotonic() > until:", "if True:",
        ["test_ranks.py::TestRunFolder::test_may_be_seen_a_moment_later"],
    ),
    Mutation(
        "ranks look for the run folder in their own working folders", "app/run/attempt.py",
        "str(self.run.path.absolute())", "str(self.run.path)",
        ["test_ranks.py::TestRunFolder::test_is_shared_by_its_absolute_path"],
    ),
    Mutation(
        "a process without a rank is the first", "runtime/processes/distributed.py",
        'if given["WORLD_SIZE"] == "1" else {}', "",
        ["test_distributed.py::TestWorld::test_one_of_several_without_its_number_is_refused"],
    ),
    Mutation(
        "copies train without knowing of each other", "app/run/train_run.py",
        "if (warning := apart()) is not None:", "if (warning := apart()) is None:",
        ["test_train_run.py::test_copies_that_do_not_know_of_each_other_are_warned_of"],
    ),
    Mutation(
        "copies of the weights have torch's own limit", "training/parallel/fsdp.py",
        "_set_pg_timeout(last_resort(config.runtime.process_timeout_seconds), group)", "pass",
        ["test_copies.py::test_their_collectives_may_take_as_long_as_those_of_all"],
    ),
    Mutation(
        "machines of one name are one machine", "runtime/processes/liveness.py",
        'Path("/proc/sys/kernel/random/boot_id").read_text()', '""',
        ["test_liveness.py::test_machines_of_one_name_do_not_look_for_each_others_processes"],
    ),
]  # fmt: skip
