"""A run from its request to its end: found or made, prepared, trained, ended in one of the four ways."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gptlab.app.next_steps import last_checkpoint, longer_command, resume_command, stopped_by_peer, stopped_early
from gptlab.app.own_parts import NO_PARTS, OwnParts
from gptlab.app.run_request import RunRequest
from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig
from gptlab.runtime.hardware.spinning import limit_spinning

if TYPE_CHECKING:
    from gptlab.config.scaling import Machine
    from gptlab.runtime.processes.distributed import Group
    from gptlab.runtime.processes.job import Job
    from gptlab.runtime.processes.liveness import Failure
    from gptlab.runtime.records.console import Console
    from gptlab.runtime.records.run_directory import RunDirectory, Status
    from gptlab.training.early_stop import EarlyStop

EXIT_USAGE = 2
EXIT_TRAINING_FAILED = 3
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended."""

    exit_code: int
    run_dir: Path
    summary: dict[str, object]
    """What summary.json holds; empty for a run that was preempted or failed."""


@dataclass(slots=True)
class _Start:
    """How far a start has come, for whoever must end it."""

    config: RunConfig | None = None
    run: RunDirectory | None = None
    is_main: bool = True
    """Whether this process writes to the run folder and the console."""
    job: Job | None = None
    """None: not yet known."""

    def set_status(self, status: Status) -> None:
        if self.is_main and self.run is not None:
            with suppress(UserError):
                self.run.set_status(status)

    def set_failed(self, reason: str) -> None:
        if self.is_main and self.run is not None:
            with suppress(UserError):
                self.run.set_failed(reason)

    def ends(self, exit_code: int, text: str) -> None:
        """Have torchrun's next attempt end alike, at once, where it would only come to this again."""
        if self.job is not None:
            self.job.ends(exit_code, text)


def train_run(
    request: RunRequest,
    argv: Sequence[str],
    started: float,
    *,
    config: RunConfig | None = None,
    parts: OwnParts = NO_PARTS,
    catch: bool = True,
) -> Result:
    """Train what was asked for, or `config`. Without `catch` errors are raised, TrainingFailed among them."""
    limit_spinning()  # before torch is imported
    from gptlab.app.ranks import exit_code
    from gptlab.runtime.hardware.out_of_memory import ran_out_of_memory, what_to_lower
    from gptlab.runtime.processes.distributed import World, join
    from gptlab.runtime.processes.job import open_job
    from gptlab.runtime.processes.liveness import PeerFailed
    from gptlab.runtime.records.console import Console, QuietConsole
    from gptlab.training.early_stop import EarlyStop, StoppedEarly, behind_signal

    world = World.from_environment()
    start = _Start(config, is_main=world.is_main)
    # A process that only trains may be ended from outside of its main thread; somebody's Python program may not.
    with (
        EarlyStop(partial(_end_now, start) if catch else None, exits=catch and world.size > 1) as early,
        Console(quiet=request.options.get("quiet", False)) if world.is_main else QuietConsole() as console,
    ):
        try:
            with join(world, partial(exit_code, interrupted=EXIT_PREEMPTED)) as group, ExitStack() as held:
                start.job = open_job()
                group.when_lost(partial(_note_lost, start))
                result = _prepare_and_train(
                    request, argv, started, start, console, held, early, group, parts, catch=catch
                )
                early.too_late()
                return result
        except BaseException as last:
            early.too_late()
            error = behind_signal(last)
            if isinstance(error, PeerFailed):
                failure = error.failure
                _note_lost(start, failure)
                if failure.exit_code == EXIT_PREEMPTED:
                    console.result(stopped_by_peer(_signal_of(failure), start.run))
                if not failure.said_by_itself and start.run is not None:
                    console.error(f"training failed: {error}; {last_checkpoint(start.run)}")
                raise error from None
            # Whatever a library made of the exception that the signal raised.
            if error is last and early.signal_name is not None:
                start.ends(EXIT_PREEMPTED, early.signal_name)
                if start.run is None:
                    raise StoppedEarly(early.signal_name) from None
                start.set_status("preempted")
                console.result(stopped_early(early.signal_name, start.run))
                return Result(EXIT_PREEMPTED, start.run.path, {})
            if ran_out_of_memory(error) and start.config is not None:
                run_path = None if start.run is None else start.run.path
                too_little = UserError(what_to_lower(error, start.config, run_path))
                start.ends(EXIT_USAGE, str(too_little))
                raise too_little from error
            if isinstance(error, UserError):
                start.ends(EXIT_USAGE, str(error))
            raise error from error.__cause__


def _prepare_and_train(
    request: RunRequest,
    argv: Sequence[str],
    started: float,
    start: _Start,
    console: Console,
    held: ExitStack,
    early: EarlyStop,
    group: Group,
    parts: OwnParts,
    *,
    catch: bool,
) -> Result:
    from gptlab.runtime.records.provenance import EvidenceTaker

    evidence_taker = EvidenceTaker()  # before torch is imported, which takes longer
    from gptlab.app.computed_by import require_same_implementations
    from gptlab.app.first_screen import describe
    from gptlab.app.place import kernels_for, place_of
    from gptlab.app.repeat import repeated_config, stored_config, what_differs
    from gptlab.app.restart import earlier_end, end_again, restarted
    from gptlab.app.resume import newest_checkpoint, record_resume, require_same_start, restore_tokenizer
    from gptlab.app.resume_step import go_back_to
    from gptlab.app.same_run import require_same_run, sized_together
    from gptlab.app.session import make_run_directory, open_session, train
    from gptlab.app.train_on import require_longer, train_on
    from gptlab.runtime.records.run_directory import RunDirectory
    from gptlab.training.closing_block import closing_numbers, show_closing_block
    from gptlab.training.off_clock import OffClock
    from gptlab.training.watchdog import TrainingFailed

    assert start.job is not None
    parts.require_alone(group.size)
    if (end := earlier_end(start.job, group)) is not None:
        return Result(*end_again(end, request, start.job, console, group), {})
    request = restarted(request, start.job, console, group)
    origin = checkpoint = machine = was = None
    if request.resume is not None:
        start.config, run = _stored(request)
        if group.is_main:
            held.enter_context(run.lock())
        _require_trained(run)
        was = stored_config(run)
        trains_on = start.config.horizon != was.horizon
        goes_on = trains_on or request.resume_from_step is not None
        finished = _finished(start.config, run, console) if group.is_main and not goes_on else None
        if summary := group.broadcast("finished", finished):
            console.line(f"{run.path} is finished; to train it on: {longer_command(run.path, was)}")
            show_closing_block(closing_numbers(summary), console)
            return Result(0, run.path, summary)
        _same_parts(parts, run, "resume", console)
        start.run = run
        if request.resume_from_step is not None and group.is_main:
            go_back_to(run, request.resume_from_step, console)
        checkpoint = newest_checkpoint(run, console, group)
        start.config = _with_own_tokenizer(start.config, run)
    if request.from_run is not None:
        origin = RunDirectory.open(Path(request.from_run))
        _require_trained(origin)
        _same_parts(parts, origin, "repeat", console)
        start.config = repeated_config(request, origin)
    held.enter_context(kernels_for(start.config, request))
    if start.config is None:
        from gptlab.app.training_rate import timed_machine

        def silent(text: str) -> None:
            pass  # what is wrong with a compiler the run itself says, once

        def measure(config: RunConfig) -> Machine:
            with console.busy("timing steps, for the size to follow from them"):
                return timed_machine(config, group.world, silent, silent)

        start.config, machine = sized_together(request.config, measure, group)
    if group.is_main and start.run is None and start.config.run_dir is not None:
        RunDirectory(Path(start.config.run_dir)).require_free()  # said now, not after the data is prepared
    place = place_of(start.config, group.world)
    session = open_session(start.config, place, console, restored=checkpoint is not None, group=group, parts=parts)
    if start.run is not None:
        require_same_start(start.run, session, checkpoint)
    if was is not None and was.horizon != session.config.horizon and checkpoint is not None:
        require_longer(session, checkpoint)
    evidence = evidence_taker.result()
    facts = session.provenance(argv, evidence.code, request.from_run)
    require_same_run(session.config, facts, group)
    require_same_implementations(session.state.model, session.kernels, group)
    if recorded := start.run or origin:
        asked = {} if origin is None else request.overrides
        for line in what_differs(recorded, facts, asked):
            console.warn(line)
    describe(session, console, machine)
    if group.is_main and start.run is None:
        begun = facts | {"job": start.job.id} | parts.facts() | _sized_by(machine)
        start.run = make_run_directory(session, begun, evidence, start.job)
        held.enter_context(start.run.lock())
    elif group.is_main and start.run is not None:
        restore_tokenizer(start.run, session.data.tokenizer, console)
        if was is not None and was.horizon != session.config.horizon and checkpoint is not None:
            train_on(start.run, session, checkpoint, was, console)
        record_resume(start.run, facts, evidence, checkpoint, console)
    start.run = RunDirectory(Path(group.broadcast("run folder", start.run and str(start.run.path))))
    try:
        ended, summary = train(
            session, start.run, checkpoint, console, OffClock(started),
            origin=origin, parts=parts,
            before_first_step=early.preparation_is_over,
            stop_now=partial(_stop_at_once, start, group) if catch else None,
        )  # fmt: skip
    except TrainingFailed as error:
        start.ends(EXIT_TRAINING_FAILED, str(error))
        console.error(f"training failed: {error}; {last_checkpoint(start.run)}")
        if not catch:
            raise
        return Result(EXIT_TRAINING_FAILED, start.run.path, {})
    if ended == "preempted":
        start.ends(EXIT_PREEMPTED, "a signal asked it to stop")
    return Result(0 if ended == "finished" else EXIT_PREEMPTED, start.run.path, summary)


def _end_now(start: _Start, signal_name: str) -> None:
    """End the process from another thread, its main thread being deep inside a library. Whatever is half-made in the
    cache is never trusted, and removed by the next process."""
    _exit_preempted(start, signal_name, stopped_early(signal_name, start.run))


def _stop_at_once(start: _Start, group: Group, signal_name: str) -> None:
    """End the process, from another thread, for somebody who will not wait for the step in hand. It is what a kill
    would do, but for the status and the exit code, of this process and of the others."""
    from gptlab.training.early_stop import StoppedEarly

    assert start.run is not None
    group.leave(StoppedEarly(signal_name), EXIT_PREEMPTED)
    text = f"{signal_name} again: stopped at once; {last_checkpoint(start.run)}; resume with "
    _exit_preempted(start, signal_name, text + resume_command(start.run.path))


def _exit_preempted(start: _Start, signal_name: str, text: str) -> None:
    start.set_status("preempted")
    start.ends(EXIT_PREEMPTED, signal_name)
    if start.is_main:
        clear_line = "\r\x1b[2K\x1b[?25h" * sys.stdout.isatty()  # of the live line, which also hides the cursor
        with suppress(OSError):
            os.write(sys.stdout.fileno(), f"{clear_line}{text}\n".encode())
    os._exit(EXIT_PREEMPTED)


def _note_lost(start: _Start, failure: Failure) -> None:
    """Before a process ends, maybe from another thread, since one of the others is lost."""
    if failure.exit_code == EXIT_PREEMPTED:
        start.set_status("preempted")
    else:
        start.set_failed(failure.text)
    if failure.said_by_itself and failure.exit_code in (EXIT_USAGE, EXIT_PREEMPTED):
        start.ends(failure.exit_code, failure.text)


def _signal_of(failure: Failure) -> str:
    """Of a rank that a signal ended before the first step: "SIGTERM (rank 1)"."""
    return f"{failure.text.rpartition(' ')[2]} (rank {failure.rank})"


def _stored(request: RunRequest) -> tuple[RunConfig, RunDirectory]:
    """The configuration of the run to resume. UserError where the flags beside --resume say something else."""
    from gptlab.app.repeat import stored_config
    from gptlab.app.train_on import lengthened
    from gptlab.runtime.records.run_directory import RunDirectory

    assert request.resume is not None
    run_directory = RunDirectory.open(Path(request.resume))
    config = request.resumed(stored_config(run_directory))
    if (longer := lengthened(request, config, run_directory)) is not None:
        return longer, run_directory
    if different := request.disagreements(config):
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise UserError(
            f"{request.resume} has another configuration: {different[0]}{more}; leave it out to resume (a finished run "
            "may be given another length, to train on)"
        )
    return config, run_directory


def _finished(config: RunConfig, run_directory: RunDirectory, console: Console) -> dict[str, object]:
    """summary.json of a run that is at its end and whose final weights are intact; empty for any other."""
    from gptlab.runtime.files.strict_json import read_json_object
    from gptlab.training.checkpoint.load import select_checkpoint
    from gptlab.training.closing_block import closing_numbers

    try:
        if run_directory.read_provenance().get("status") != "finished":
            return {}
        summary = read_json_object(run_directory.summary_path)
    except UserError:  # lost or damaged: training on from the last checkpoint, which ends at once, writes them again
        return {}
    if not closing_numbers(summary):
        return {}
    if not config.eval.only:  # a run that only validates saves nothing
        try:
            select_checkpoint(run_directory.checkpoints_path, str(summary["num_steps"]), console.warn)
        except UserError as error:
            console.warn(f"{run_directory.path} is marked as finished, but its final weights are not intact: {error}")
            return {}
    return summary


def _require_trained(run_directory: RunDirectory) -> None:
    from gptlab.app.repeat import recorded_facts

    if "imported" in recorded_facts(run_directory):
        path = run_directory.path
        raise UserError(f"{path} was imported, not trained: to begin with its weights, --init-from {path}")


def _same_parts(parts: OwnParts, run: RunDirectory, verb: str, console: Console) -> None:
    from gptlab.app.repeat import recorded_facts

    for warning in parts.require_those_of(run.path, recorded_facts(run), verb):
        console.warn(warning)


def _with_own_tokenizer(config: RunConfig, run_directory: RunDirectory) -> RunConfig:
    """With the run's copy of a tokenizer that was read from elsewhere (that of pretrained weights), since elsewhere may
    be gone."""
    if config.tokenizer.path is None or not run_directory.tokenizer_path.is_dir():
        return config
    return replace(config, tokenizer=replace(config.tokenizer, path=str(run_directory.tokenizer_path)))


def _sized_by(machine: Machine | None) -> dict[str, object]:
    """For run.json: the measurement that a recipe's size follows from."""
    return {"training_flops_per_second": None if machine is None else machine.flops_per_second}
