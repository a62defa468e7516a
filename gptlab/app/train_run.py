"""A run from what was asked for to its end: configuration, data and model, run folder, training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from gptlab.app.attempt import EXIT_PREEMPTED, Attempt, Result
from gptlab.app.own_parts import NO_PARTS, OwnParts
from gptlab.app.ranks import exit_code, join
from gptlab.app.run_request import RunRequest
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.runtime.hardware.cpu import limit_spinning
from gptlab.runtime.processes.distributed import World
from gptlab.runtime.processes.job import open_job
from gptlab.runtime.records.console import Console, QuietConsole
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.signals import EarlyStop


def train_run(
    request: RunRequest,
    argv: Sequence[str],
    started: float,
    *,
    config: RunConfig | None = None,
    parts: OwnParts = NO_PARTS,
    catch: bool = True,
) -> Result:
    """Train what was asked for, or `config`; each process of a run calls this.

    `argv`: the command, for run.json. `started`: time.perf_counter() when the program began. Without `catch`, failed
    training raises TrainingFailed, and a second Ctrl-C KeyboardInterrupt: the process belongs to the caller.
    """
    limit_spinning()  # before torch is imported
    world = World.from_environment()
    console = Console(quiet=request.options.get("quiet", False)) if world.is_main else QuietConsole()
    attempt = Attempt(console, is_main=world.is_main, catch=catch, config=config)
    early = EarlyStop(attempt.end_now if catch else None, exits=catch and world.size > 1)
    with early, console:
        try:
            with join(world, partial(exit_code, interrupted=EXIT_PREEMPTED)) as group, attempt.held:
                attempt.group, attempt.job = group, open_job()
                group.when_lost(attempt.note_lost)
                result = _prepare_and_train(attempt, early, request, argv, started, parts)
                early.too_late()
                return result
        except BaseException as error:
            early.too_late()
            return attempt.ended_by(error, early.signal_name)


def _prepare_and_train(
    attempt: Attempt, early: EarlyStop, request: RunRequest, argv: Sequence[str], started: float, parts: OwnParts
) -> Result:
    from gptlab.runtime.records.provenance import begin_evidence

    taking_evidence = begin_evidence()  # before torch is imported, which takes longer
    from gptlab.app.messages import describe
    from gptlab.app.run_session import make_run_directory, run_session
    from gptlab.app.session import open_session
    from gptlab.runtime.hardware.place import place_of
    from gptlab.training.faults import TrainingFailed
    from gptlab.training.summary import OffClock

    console, group = attempt.console, attempt.group
    parts.require_alone(group.size)
    if group.size > 1 or attempt.job.id is not None:  # torchrun started this process
        restarted = attempt.restarted(request)
        if isinstance(restarted, Result):
            return restarted
        request = restarted

    # The configuration: that of a run to resume or to repeat, or one that the recipe makes of this machine.
    resumed = origin = machine = None
    if request.resume is not None:
        from gptlab.app.resume import open_resumed

        found = open_resumed(request, attempt, parts)
        if isinstance(found, Result):
            return found
        resumed = found
    elif request.from_run is not None:
        from gptlab.app.repeat import open_repeated

        origin, attempt.config = open_repeated(request, parts, console)
    _use_deterministic_kernels(attempt, request)
    if attempt.config is None:
        attempt.config, machine = _configured(attempt, request)
    if group.is_main and resumed is None and attempt.config.run_dir is not None:
        RunDirectory(Path(attempt.config.run_dir)).require_free()  # said now, not after the data is prepared

    # Data, model, optimizer.
    place = place_of(attempt.config, group.world)
    checkpoint = None if resumed is None else resumed.checkpoint
    session = open_session(attempt.config, place, console, restored=checkpoint is not None, group=group, parts=parts)
    if resumed is not None:
        resumed.require_same_start(session)
    evidence = taking_evidence.result()
    facts = session.provenance(argv, evidence.code, request.from_run)
    if group.size > 1:
        from gptlab.app.ranks import require_same_implementations, require_same_run

        require_same_run(session.config, facts, group)
        require_same_implementations(session.implementations(), place, group)
    if (recorded := origin if resumed is None else resumed.run) is not None:
        from gptlab.app.repeat import what_differs

        for line in what_differs(recorded, facts, {} if origin is None else request.overrides):
            console.warn(line)
    describe(session, console, machine)

    # The run folder, from here on this run's.
    if group.is_main and resumed is None:
        measured = {"training_flops_per_second": None if machine is None else machine.flops_per_second}
        facts |= {"job": attempt.job.id} | parts.facts() | measured
        attempt.run = make_run_directory(session, facts, evidence, attempt.job)
        attempt.held.enter_context(attempt.run.lock())
    elif group.is_main and resumed is not None:
        resumed.record(session, facts, evidence, console)
    attempt.run = run = RunDirectory(Path(group.broadcast("run folder", attempt.run and str(attempt.run.path))))
    try:
        ended, summary = run_session(
            session, run, checkpoint, console, OffClock(started), origin=origin, parts=parts,
            before_first_step=early.preparation_is_over, stop_now=attempt.stop_at_once if attempt.catch else None,
        )  # fmt: skip
    except TrainingFailed as error:
        return attempt.failed(error)
    if ended == "preempted":
        attempt.job.ends(EXIT_PREEMPTED, "a signal asked it to stop")
    return Result(0 if ended == "finished" else EXIT_PREEMPTED, run.path, summary)


def _use_deterministic_kernels(attempt: Attempt, request: RunRequest) -> None:
    """Until the attempt is over, where the same bits are wanted on any number of processes. Before steps are timed."""
    exact = request.overrides.get("parallel.exact_any_world_size", False)
    device = request.overrides.get("runtime.device", "auto")
    if attempt.config is not None:
        exact, device = attempt.config.parallel.exact_any_world_size, attempt.config.runtime.device
    if exact:
        from gptlab.runtime.hardware.device import deterministic_kernels

        attempt.held.enter_context(deterministic_kernels(device))


def _configured(attempt: Attempt, request: RunRequest) -> tuple[RunConfig, Machine | None]:
    """What the recipe makes of this machine, and the machine as it was timed; None where the recipe does not ask."""
    measured: list[Machine] = []

    def measure(config: RunConfig) -> Machine:
        from gptlab.bench.training_rate import timed_machine

        def silent(text: str) -> None:
            pass  # the run itself will warn, once, of what is wrong with a compiler

        with attempt.console.busy("timing steps, for the size to follow from them"):
            measured.append(timed_machine(config, attempt.group.world, silent, silent))
        return measured[-1]

    # All ranks use rank 0's measurements: those of each rank could give several sizes.
    group = attempt.group
    if group.is_main:
        config = request.config(measure)
        group.broadcast("machine", [asdict(machine) for machine in measured])
    else:
        measured = [Machine(**values) for values in group.broadcast("machine")]
        # A rank that was started with another recipe may ask for more; `require_same_run` then refuses it.
        replayed = iter(measured)
        config = request.config(lambda _: next(replayed, Machine(device="unknown", flops_per_second=None)))
    return config, measured[-1] if measured else None
