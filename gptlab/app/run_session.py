"""A session trained in its run folder: warm-up, checkpoint, training, and how it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gptlab.app.messages import next_steps, resume_command
from gptlab.app.own_parts import NO_PARTS, OwnParts
from gptlab.app.ranks import require_same_implementations
from gptlab.app.session import Session
from gptlab.config.errors import UserError
from gptlab.config.load import config_to_json
from gptlab.runtime.hardware.cpu import MachineLoad
from gptlab.runtime.processes.job import Job
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.provenance import Evidence
from gptlab.runtime.records.run_directory import (
    RunDirectory,
    Status,
    config_sha256,
    default_run_path,
    identity_of,
    new_run_id,
)
from gptlab.training.checkpoint.format import list_checkpoints
from gptlab.training.checkpoint.load import Checkpoint
from gptlab.training.checkpoint.saver import CheckpointSaver, open_background
from gptlab.training.compilation import warm_up
from gptlab.training.faults import TrainingFailed
from gptlab.training.loop import evaluate_only, fit
from gptlab.training.recorder import Recorder
from gptlab.training.summary import OffClock
from gptlab.training.throughput import Throughput

if TYPE_CHECKING:
    from gptlab.training.checkpoint.background import BackgroundSaver


def make_run_directory(session: Session, facts: Mapping[str, object], evidence: Evidence, job: Job) -> RunDirectory:
    """The folder of a new run, with everything that is known before its first step. UserError where it cannot be."""
    config = session.config
    path = Path(config.run_dir) if config.run_dir else job.folder() or default_run_path(config.recipe, datetime.now())
    job.will_begin(path)

    def contents(run: RunDirectory) -> None:
        session.data.tokenizer.save(run.tokenizer_path)
        run.write_files(evidence.files())

    values = config_to_json(config)
    identity = {"run_id": new_run_id(), "config_sha256": config_sha256(values)}
    return RunDirectory.create(path, values, {**facts, **identity}, contents=contents)


def run_session(
    session: Session,
    run: RunDirectory,
    checkpoint: Checkpoint | None,
    console: Console,
    off_clock: OffClock,
    *,
    origin: RunDirectory | None = None,
    parts: OwnParts = NO_PARTS,
    before_first_step: Callable[[], None] = lambda: None,
    stop_now: Callable[[str], None] | None = None,
) -> tuple[Literal["finished", "preempted"], dict[str, object]]:
    """Train the session in its folder, whose lock the caller holds, from the start or from a checkpoint. `origin`: the
    run that it repeats. Returns how it ended, and its summary. With several processes only rank 0 writes."""
    config, state, group = session.config, session.state, session.work.group
    metrics_path = run.metrics_path if group.is_main else Path(os.devnull)
    log = MetricsLog(metrics_path, parts.on_line(state.device))
    with log as metrics, state.loader, open_background(config, state.device) as background:
        record = _recorder(session, run, console, metrics, background, off_clock, stop_now)
        saves = record.saves

        def set_status(status: Status) -> None:
            if group.is_main:
                run.set_status(status)

        try:
            set_status("running")
            _warm_up(session, console, off_clock)
            found = session.implementations()
            if group.size > 1:  # again, since a compiler may be there and fail
                require_same_implementations(found, session.place, group)
            _record_implementations(found, session, run, checkpoint, origin, console)
            saves.about_run["implementations"] = found
            _begin(session, checkpoint, record)
            saves.reserve(state)
            off_clock.startup_seconds = time.perf_counter() - off_clock.started - off_clock.compile_seconds
            console.line(
                f"run folder {run.path} | start-up {off_clock.startup_seconds:.1f}s"
                f" | {'compiled' if session.passes.compiled else 'warmed up'} in {off_clock.compile_seconds:.1f}s"
            )
            if checkpoint is not None:
                with _state_of(checkpoint):
                    off_clock.add_earlier(checkpoint.state["off_clock"])
            group.barrier("first step")
            before_first_step()
            group.start_collectives(session.place.device, timeout_seconds=config.runtime.process_timeout_seconds)
            ended = (evaluate_only if config.eval.only else fit)(state, session.work, record)
            summary = {}
            if ended == "finished":
                saved = bool(list_checkpoints(run.checkpoints_path))
                summary = record.finish_run(state, next_steps(run.path, config, session.work.prompts, trained=saved))
        except BaseException as error:
            # All ranks see what makes training fail; any other error may be this rank's alone.
            saves.abandon(state, together=isinstance(error, TrainingFailed))
            if isinstance(error, Exception):
                record.failed(state, error)
            else:  # a signal before the first step, or an interrupt in a Python program
                with suppress(UserError):
                    set_status("preempted" if isinstance(error, KeyboardInterrupt) else "failed")
            raise
        set_status(ended)
        return ended, summary


def _recorder(
    session: Session,
    run: RunDirectory,
    console: Console,
    metrics: MetricsLog,
    background: BackgroundSaver | None,
    off_clock: OffClock,
    stop_now: Callable[[str], None] | None,
) -> Recorder:
    config, group, peak = session.config, session.work.group, session.place.peak.flops_per_second
    about_run = {"run": identity_of(run, session.data.fingerprint).to_json()} if group.is_main else {}
    saves = CheckpointSaver(config, session.finish, run, console, metrics, off_clock, group, background, about_run)
    load = None
    if session.place.device.type == "cpu" and group.is_main:
        load = MachineLoad(session.place.threads, processes=group.world.local_size)
    return Recorder(
        config, session.finish, run, console, metrics,
        Throughput(session.flops.total, None if peak is None else peak * group.size), session.counts.total,
        off_clock, saves, load, stop_now, resume_command(run.path),
    )  # fmt: skip


def _warm_up(session: Session, console: Console, off_clock: OffClock) -> None:
    """Compile before the clock starts."""
    if session.passes.compiled:
        console.line("compiling: longest the first time, from the cache after that")
    with console.busy("compiling" if session.passes.compiled else "warming up"):
        off_clock.compile_seconds = warm_up(
            session.state, session.passes, session.config, session.eval_sequences, console.warn,
        )  # fmt: skip
    session.work = replace(session.work, loss_sum=session.passes.loss_sum)


def _record_implementations(
    found: Mapping[str, str],
    session: Session,
    run: RunDirectory,
    checkpoint: Checkpoint | None,
    origin: RunDirectory | None,
    console: Console,
) -> None:
    """Record in run.json what computes the run; warn where something else computed the checkpoint, or `origin`."""
    if session.work.group.is_main:
        resumes = run.recorded().get("resumes")
        if isinstance(resumes, list) and resumes:
            run.set_status("running", resumes=[*resumes[:-1], resumes[-1] | {"implementations": found}])
        else:
            run.set_status("running", implementations=found)
    if checkpoint is None and origin is None:
        return
    from gptlab.app.repeat import implementations_changed

    if checkpoint is not None:
        before, of = checkpoint.state.get("implementations"), "the checkpoint"
    else:
        assert origin is not None
        before, of = origin.recorded().get("implementations"), str(origin.path)
    if what := implementations_changed(before, found):
        console.warn(f"not computed as {of} was ({what}): close to, not bit for bit")


def _begin(session: Session, checkpoint: Checkpoint | None, record: Recorder) -> None:
    """Put the state and the files of the run where the checkpoint left them; None: where a run begins."""
    if checkpoint is None:
        record.rewind(None)
        return
    with _state_of(checkpoint):
        session.state.restore(checkpoint.model, checkpoint.optimizer, checkpoint.state)
        record.rewind(checkpoint)
    if session.work.group.is_main:
        record.saves.catch_up(session.state, checkpoint.path)


@contextmanager
def _state_of(checkpoint: Checkpoint) -> Iterator[None]:
    """Within, an intact checkpoint (of untrusted origin) whose state gptlab did not write is a UserError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(
            f"cannot resume from {checkpoint.path}: its state was not written by gptlab "
            f"({type(error).__name__}: {error})"
        ) from error
