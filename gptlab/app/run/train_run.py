"""A run from what was asked for to its configuration, and what its end is to whoever started it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from gptlab.app.run.attempt import Attempt, Result
from gptlab.app.run.own_parts import OwnParts
from gptlab.app.run.run_request import DEFAULT_RECIPE, RunRequest
from gptlab.config.errors import EXIT_PREEMPTED, UserError
from gptlab.config.recipes import configure
from gptlab.config.run import RunConfig, RuntimeConfig
from gptlab.config.scaling import Machine
from gptlab.data.corpus.documents import require_known
from gptlab.runtime.hardware import installed
from gptlab.runtime.hardware.cpu import prepare_torch, threads_beside_others, usable_cores
from gptlab.runtime.processes.distributed import Group, World, apart
from gptlab.runtime.records.console import Console, QuietConsole
from gptlab.runtime.records.provenance import Evidence, begin_evidence
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.signals import Signals


def train_run(
    request: RunRequest, argv: Sequence[str], started: float, *, config: RunConfig | None = None,
    parts: OwnParts | None = None, catch: bool = True,
) -> Result:  # fmt: skip
    """Train what was asked for, or `config`; each process of a run calls this.

    `argv`: the command, for run.json. `started`: time.perf_counter() when the program began. Without `catch`, failed
    training raises TrainingFailed, and a second Ctrl-C KeyboardInterrupt: the process belongs to the caller.
    """
    prepare_torch()  # before torch is imported
    world = World.from_environment()
    console = Console(quiet=request.options.get("quiet", False)) if world.is_main else QuietConsole()
    attempt = Attempt(console, argv, started, parts, catch=catch, config=config, group=Group(world))
    attempt.resumes = request.resume
    if catch:
        attempt.signals = Signals(attempt.end_now, attempt.stop_at_once)
    with attempt.signals, console:
        try:
            with attempt.held:
                if (warning := apart()) is not None:
                    console.warn(warning)
                joins = world.size > 1 or "TORCHELASTIC_USE_AGENT_STORE" in os.environ
                result = (_join_and_train if joins else _prepare_and_train)(attempt, request)
                attempt.signals.too_late()
                return result
        except BaseException as error:
            attempt.signals.too_late()
            return attempt.ended_by(error)


def _prepare_and_train(attempt: Attempt, request: RunRequest) -> Result:
    if attempt.group.is_main and request.resume is None:  # before torch is imported, which takes seconds
        run_dir = request.overrides.get("run_dir") if attempt.config is None else attempt.config.run_dir
        RunDirectory(attempt.new_run_path(run_dir, request.recipe or DEFAULT_RECIPE)).require_free()
        for source in request.overrides.get("data.source", ()):
            if not os.path.exists(os.path.expanduser(source)):
                require_known(source)
    evidence = begin_evidence()  # before torch is imported, which takes longer
    begun_before = request.resume is not None or request.from_run is not None
    # Before kernels are built, on cores that then look taken.
    if not begun_before and attempt.config is None and attempt.group.size == 1 and not installed.has_nvidia_gpu():
        request = _beside_other_programs(attempt.console, request)
    _import_torch(attempt, request)
    if not attempt.catch:
        _stand_apart(attempt)
    if begun_before:
        return _train_earlier(attempt, request, evidence)
    if installed.has_nvidia_gpu():
        _warn_of_unused_gpu(attempt, request)
    machine = None
    if attempt.config is None:
        attempt.config, machine = _configured(attempt, request)
    from gptlab.app.run.run_session import train

    return train(attempt, attempt.config, evidence, machine=machine)


def _import_torch(attempt: Attempt, request: RunRequest) -> None:
    """Import torch, and meanwhile build the C++ kernels for the type that the run will most likely compute in. If it
    turns out to be another, or torch was imported before, they are built while data is prepared."""
    if "torch" in sys.modules or sys.platform != "linux" or installed.has_nvidia_gpu():
        return
    dtype: Any = request.overrides.get("runtime.dtype")
    if dtype is None:
        dtype = (attempt.config or configure(request.recipe or DEFAULT_RECIPE)).runtime.dtype
    if dtype == "auto":
        dtype = "bfloat16" if installed.cpu_lists_bfloat16() else "float32"
    if dtype in ("float32", "bfloat16"):
        from gptlab.model.kernels.library import begin_kernels

        building = begin_kernels(dtype)
        import torch  # noqa: F401

        if building.is_alive():  # the first time on this machine
            with attempt.console.busy("building the C++ kernels"):
                building.join()  # what follows measures how fast this machine is


def _stand_apart(attempt: Attempt) -> None:
    """Until the end of the attempt, have gradients whatever the Python program that called it has turned off; then put
    its threads and random generators back: a search that draws a rate before each run would otherwise draw the same one
    again."""
    import torch

    from gptlab.runtime.hardware.rng import capture_rng, restore_rng

    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    attempt.held.callback(restore_rng, capture_rng(device), device)
    attempt.held.callback(torch.set_num_threads, torch.get_num_threads())
    if (place := torch.get_default_device()).type != "cpu":  # of what is made without a device, such as random numbers
        attempt.held.callback(torch.set_default_device, place)
        torch.set_default_device(None)
    attempt.held.enter_context(torch.inference_mode(False))  # which turns gradients on, too


def _beside_other_programs(console: Console, request: RunRequest) -> RunRequest:
    """The request with fewer threads, where other programs use cores and it does not say how many."""
    if request.overrides.get("runtime.threads") is not None or (threads := threads_beside_others()) is None:
        return request
    all_of_them = usable_cores()
    console.warn(
        f"other programs use cores of this machine: training on {threads} of {all_of_them}, which is faster beside "
        f"them; --runtime.threads {all_of_them} uses all"
    )
    return replace(request, overrides={**request.overrides, "runtime.threads": threads})


def _train_earlier(attempt: Attempt, request: RunRequest, evidence: Future[Evidence]) -> Result:
    """Resume a run, or repeat it. The Result of a run that is finished."""
    from gptlab.app.run.earlier_run import open_repeated, open_resumed
    from gptlab.app.run.run_session import train
    from gptlab.data.corpus.documents import NoCorpusError

    earlier = open_repeated(request, attempt) if request.resume is None else open_resumed(request, attempt)
    if isinstance(earlier, Result):
        return earlier
    assert attempt.config is not None
    _warn_of_unused_gpu(attempt, request)
    try:
        return train(attempt, attempt.config, evidence, earlier=earlier, from_run=request.from_run)
    except NoCorpusError as error:
        moved = "if the run's corpus was moved, --data or --data.val-source says where it is"
        raise UserError(f"{error}; {moved}") from None


def _join_and_train(attempt: Attempt, request: RunRequest) -> Result:
    """Join the other processes, and torchrun's job where it started this one, and train; the context `attempt.held`
    leaves them. The Result of an earlier attempt that would only be repeated."""
    from gptlab.app.run.ranks import exit_code, join
    from gptlab.runtime.processes.torch_group import torchrun_job

    as_preempted = partial(exit_code, interrupted=EXIT_PREEMPTED)
    attempt.group = attempt.held.enter_context(join(attempt.group.world, as_preempted))
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        attempt.job = torchrun_job()
    attempt.group.when_lost(attempt.note_lost)
    if attempt.parts is not None:
        attempt.parts.require_alone(attempt.group.size)
    restarted = attempt.restarted(request)
    return restarted if isinstance(restarted, Result) else _prepare_and_train(attempt, restarted)


def _warn_of_unused_gpu(attempt: Attempt, request: RunRequest) -> None:
    from gptlab.runtime.hardware.device import unused_gpu

    runtime = RuntimeConfig() if attempt.config is None else attempt.config.runtime
    device, allocator = (request.overrides.get(f"runtime.{n}", getattr(runtime, n)) for n in ("device", "allocator"))
    if (unused := unused_gpu(device, allocator, attempt.group.world.local_rank)) is not None:
        attempt.console.warn(unused)


def _configured(attempt: Attempt, request: RunRequest) -> tuple[RunConfig, Machine | None]:
    """What the recipe makes of this machine, and the machine as it was timed; None where the recipe does not ask."""
    if not attempt.group.is_main:
        return _configured_as_on_rank_0(attempt, request)
    from gptlab.app.sizing import sized

    # Without a warning of what is wrong with a compiler: the run itself will warn, once.
    config, measured = sized(request, attempt.group.world, attempt.console, lambda text: None)
    if attempt.group.size > 1:
        attempt.group.broadcast("machine", [asdict(machine) for machine in measured])
    return config, measured[-1] if measured else None


def _configured_as_on_rank_0(attempt: Attempt, request: RunRequest) -> tuple[RunConfig, Machine | None]:
    """By rank 0's measurements: those of each rank could give several sizes."""
    measured = [Machine(**values) for values in attempt.group.broadcast("machine")]
    # A rank that was started with another recipe may ask for more; `require_same_run` then refuses it.
    replayed = iter(measured)
    unknown = Machine(device="unknown", flops_per_second=None)
    config = request.config(lambda _: next(replayed, unknown), lambda _: next(replayed, unknown))
    return config, measured[-1] if measured else None
