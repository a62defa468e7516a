"""A run from its configuration to its end: session, first report, run folder, warm-up, training, closing block."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gptlab.app.commands import longer_command, next_commands, resume_command
from gptlab.app.run.attempt import Attempt, Result
from gptlab.app.run.ranks import require_same_implementations
from gptlab.app.run.session import Session, open_session, require_agreement
from gptlab.config.errors import EXIT_PREEMPTED, UserError
from gptlab.config.load import config_to_json
from gptlab.config.recipes import applied_scaling
from gptlab.config.recipes.quickstart import why_quickstart_size
from gptlab.config.run import RunConfig
from gptlab.config.scaling import MANY_EPOCHS, Machine
from gptlab.runtime.hardware.cpu import MachineLoad, usable_cores
from gptlab.runtime.hardware.device import deterministic_kernels, device_name
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.processes.own_python import own_python
from gptlab.runtime.records.console import Console, short_number
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.mirrors import mirrored, require_mirrors
from gptlab.runtime.records.provenance import Evidence
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.saver import CheckpointSaver, RunOutput
from gptlab.training.faults import TrainingFailed
from gptlab.training.loop import evaluate_only, fit
from gptlab.training.recorder import Recorder, Throughput, show_closing_block
from gptlab.training.state import OffClock

if TYPE_CHECKING:
    from gptlab.app.run.earlier_run import EarlierRun
    from gptlab.runtime.processes.distributed import Group


MEMORY_RUNS_OUT = ("cuda", "mps")
"""Devices on which too large a micro-batch is an error of torch. On a CPU, the system kills the process."""

LONG_RUN_SECONDS = 3600.0
"""A run of this many seconds without a checkpoint is warned of: an assumption on how much nobody wants to lose."""

_GPTLAB = "import runpy; runpy.run_module('gptlab', run_name='__main__', alter_sys=True)"


def train(
    attempt: Attempt, config: RunConfig, taking_evidence: Future[Evidence], *, machine: Machine | None = None,
    earlier: EarlierRun | None = None, from_run: str | None = None,
) -> Result:  # fmt: skip
    """Train `config`, which has been sized by `machine` or is that of an `earlier` run."""
    console, group = attempt.console, attempt.group
    if config.parallel.exact_any_world_size:
        attempt.held.enter_context(deterministic_kernels(config.runtime.device))
    if group.is_main and config.log.to:
        require_mirrors(config.log.to)

    # Data, model, optimizer.
    restored = earlier is not None and earlier.checkpoint is not None
    place = place_of(config if earlier is None else earlier.as_recorded(config), group.world)
    session = open_session(config, place, console, restored=restored, group=group, parts=attempt.parts)
    evidence = taking_evidence.result()
    facts = session.provenance(attempt.argv, evidence.code, from_run)
    if earlier is not None:
        earlier.compare(session, facts, console)
    if group.size > 1:
        require_agreement(session, facts, console)
    describe(session, console, machine)

    # The run folder, from here on this run's. A finished run, which may get another length, stays as it is until its
    # first step can begin; any other one has failed if it cannot.
    if earlier is None or earlier.stored is None:
        if group.is_main:
            make_run_directory(session, attempt, facts, evidence, machine)
        if group.size > 1:
            attempt.share_run_folder()
    elif earlier.run.recorded().get("status") != "finished":
        attempt.run = earlier.run
    try:
        return run_session(session, attempt, earlier, facts, evidence)
    except TrainingFailed as error:
        return attempt.failed(error)


def describe(session: Session, console: Console, machine: Machine | None) -> None:
    """Print a run's facts, one line each. `machine`: what the run's size follows from, where it was measured."""
    config, place, counts, flops, data = session.config, session.place, session.counts, session.flops, session.data
    model, peak, processes = config.model, place.peak.flops_per_second, session.group.size
    console.line(
        f"machine   {device_name(place.device)} ({place.device}), {f'{processes} processes, ' * (processes > 1)}"
        f"{place.threads} thread{'s' * (place.threads > 1)}, {place.dtype_name}, "
        + ("peak unknown" if peak is None else f"{peak / 1e9:,.0f} GFLOP/s ({place.peak.source})")
    )
    threads = place.threads * session.group.world.local_size
    if place.device.type == "cpu" and threads > (cores := usable_cores()):
        console.warn(f"{threads} threads share {cores} core{'s' * (cores > 1)}, which is slower than one for each")
    console.line(
        f"data      {', '.join(config.data.source)}: {data.train.n_tokens:,} training tokens, "
        f"{data.val.n_tokens:,} validation tokens, vocabulary {model.vocab_size:,} ({data.tokenizer.kind})"
    )
    if "read" in data.statistics:
        console.line(f"read      {data.statistics['read']}")
    console.line(
        f"model     {model.n_layer} layers, width {model.n_embd}, {model.n_head} heads, context {model.seq_len}: "
        f"{counts.total / 1e6:.2f}M parameters, {flops.total / 1e6:.1f} MFLOP a token"
    )
    roles = (f"{str(role).replace('_', ' ')} {short_number(count)}" for role, count in counts.by_role.items() if count)
    console.line(f"          {', '.join(roles)}")
    if session.start is not None:
        console.line(f"weights   {session.start.text}")
    console.line(
        f"training  {config.horizon}, {config.batch.total_tokens:,} tokens a step "
        f"({config.micro_batches} x {config.batch.micro_sequences} rows)"
    )
    steps = session.finish.steps
    about, steps = ("", steps) if steps is not None else ("about ", _estimated_steps(session, machine))
    tokens = config.batch.total_tokens * (steps or 0)
    epochs = tokens / (session.rows_per_epoch * model.seq_len)
    if steps is not None:
        console.line(
            f"          {about}{steps:,} steps, {short_number(tokens)} tokens, "
            f"{tokens / counts.scaling:.3g} for each parameter of matrices and head, "
            f"{epochs:.2g} epochs, {tokens * flops.total:.2g} FLOP"
        )
    if rules := applied_scaling(config, machine):
        console.line(f"scaling   {'; '.join(rules)}")
    if machine is not None and (reason := why_quickstart_size(config, machine)):
        console.line(f"size      {reason}")
    # Random windows are drawn with replacement from small texts on purpose (nanoGPT): those have no epochs to count.
    if round(epochs) > MANY_EPOCHS and config.data.rows != "random" and not config.eval.only:
        _warn_of_repeated_text(f"{about}{epochs:.0f}", config, console)
    saves = config.checkpoint
    if saves.keep_every_steps or not (saves.every_steps or saves.every_seconds or saves.save_best):
        _warn_of_few_saves(session, console)


def _warn_of_few_saves(session: Session, console: Console) -> None:
    config, saves, peak = session.config, session.config.checkpoint, session.place.peak.flops_per_second
    least_seconds = config.horizon.amount  # in other units at the peak of all processes, which no run reaches
    if session.finish.steps is not None:
        tokens = session.finish.steps * config.batch.total_tokens
        least_seconds = 0.0 if peak is None else tokens * session.flops.total / (peak * session.group.size)
    kept, saved = saves.keep_every_steps, saves.every_steps
    if kept is not None and (saved is None or (kept % saved and saved % kept)):
        console.warn(
            f"checkpoint.keep_every_steps = {kept} keeps few checkpoints: give --checkpoint.every-steps N, where N "
            f"divides {kept}"
        )
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"  # of torchrun
    ends_alone = not (saves.every_steps or saves.every_seconds or saves.save_best or config.eval.only)
    if ends_alone and (restarts or least_seconds > LONG_RUN_SECONDS):
        console.warn(
            "this run saves nothing before its end, so a crash loses all that it trains: "
            "--checkpoint.every-seconds 1800 saves every half hour"
        )


def _warn_of_repeated_text(passes: str, config: RunConfig, console: Console) -> None:
    files = config.data.hub_files
    more = "--data PATH" if files is None else f"--data.hub-files above {files}, or --data PATH"
    console.warn(
        f"{passes} passes over the training data: beyond {MANY_EPOCHS}, repeated text "
        f"teaches less and less (arXiv:2305.16264); more data helps, {more}"
    )


def _estimated_steps(session: Session, machine: Machine | None) -> int | None:
    """Of a run of so many seconds. None where its steps were not timed before."""
    if machine is None or machine.flops_per_second is None:
        return None
    step_seconds = session.flops.total * session.config.batch.total_tokens / machine.flops_per_second
    return max(1, round(session.config.horizon.amount / step_seconds))


def make_run_directory(
    session: Session, attempt: Attempt, facts: Mapping[str, object], evidence: Evidence, machine: Machine | None
) -> None:
    """Make the attempt's run folder, with everything that is known before the first step, and lock it. UserError where
    it cannot be."""
    config = session.config
    path = attempt.new_run_path(config.run_dir, config.recipe)
    attempt.job.will_begin(path)

    def contents(run: RunDirectory) -> None:
        session.data.tokenizer.save(run.tokenizer_path)
        run.write_files(evidence.files)

    own = {} if attempt.parts is None else attempt.parts.facts()
    rate = {"training_flops_per_second": None if machine is None else machine.flops_per_second}
    record = {**facts, "job": attempt.job.id, **own, **rate}
    attempt.run = RunDirectory.create(path, config_to_json(config), record, contents=contents)
    attempt.held.enter_context(attempt.run.lock())


def run_session(
    session: Session, attempt: Attempt, earlier: EarlierRun | None, facts: Mapping[str, object], evidence: Evidence
) -> Result:
    """Train the session in the run folder, from the start or from a checkpoint. `earlier`: the run that is resumed or
    repeated. With several processes only rank 0 writes."""
    resumed = None if earlier is None or earlier.stored is None else earlier
    run = attempt.run if resumed is None else resumed.run
    assert run is not None
    config, state, group, console = session.config, session.state, session.group, attempt.console
    on_line = None if attempt.parts is None else attempt.parts.on_line(state.device)
    metrics = MetricsLog(run.metrics_path if group.is_main else Path(os.devnull), on_line)
    off_clock = OffClock(attempt.started)
    output = RunOutput(config, session.finish, run, console, metrics, off_clock, group)
    with metrics, state.loader, _saver(session, output) as saves:
        record = _recorder(session, output, saves, attempt)
        try:
            compile_seconds = _warm_up(session, record, earlier)
            if resumed is None:
                console.open_log(run.log_path)
            else:
                resumed.resume(session, attempt, record, facts, evidence)
            saves.reserve(state)
            startup_seconds = time.perf_counter() - off_clock.started - compile_seconds
            off_clock.compile_seconds += compile_seconds
            off_clock.startup_seconds += startup_seconds
            compiled = f" | compiled in {compile_seconds:.1f}s" if session.passes.compiled else ""
            console.line(f"run folder {run.path} | start-up {startup_seconds:.1f}s{compiled}")
            if group.size > 1:
                group.barrier("first step")
                group.start_collectives(session.place.device, timeout_seconds=config.runtime.process_timeout_seconds)
            with _mirrored(session, run, console) if config.log.to else nullcontext():
                ended = (evaluate_only if config.eval.only else fit)(state, session, record)
            attempt.signals.too_late()
            if ended == "finished":
                summary = record.finish_run(state)
        except BaseException as error:
            attempt.config = session.config  # which the warm-up may have changed
            if attempt.run is not None:
                _record_failure(error, session, record)
            raise
        if group.is_main:
            run.set_status(ended)
    if ended == "preempted":
        return _preempted(attempt, config, run.path)
    if group.is_main and config.log.report:
        write_report(run.path, console)
    saved = bool(list_checkpoints(run.checkpoints_path))
    if attempt.parts is not None and attempt.parts.replacing:  # which commands cannot give
        console.line(f"to train it on: {longer_command(run.path, config, attempt.parts.replacing)}")
    else:
        for line in next_commands(run.path, config, session.prompts, trained=saved):
            console.line(line)
    show_closing_block(summary, console)
    return Result(0, run.path, summary)


def _preempted(attempt: Attempt, config: RunConfig, run_path: Path) -> Result:
    leave_report(run_path, config, attempt.group)
    attempt.job.ends(EXIT_PREEMPTED, "a signal asked it to stop")
    return Result(EXIT_PREEMPTED, run_path, {})


def _mirrored(session: Session, run: RunDirectory, console: Console) -> AbstractContextManager[None]:
    """Within it, metrics.jsonl is mirrored, by rank 0."""
    if not session.group.is_main:
        return nullcontext()
    return mirrored(session.config.log.to, run, run.read_config(), console)


def write_report(run: Path, console: Console) -> None:
    """Write the run's report and show its curve. Another process does it, without torch: whatever goes wrong there is
    one warning here."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    terminal = {"PYTHONIOENCODING": encoding, "COLUMNS": str(shutil.get_terminal_size().columns)}
    try:
        done = subprocess.run(
            own_python(_GPTLAB, "report", str(run)), env=_alone() | terminal, encoding=encoding, errors="replace",
            timeout=60, stdin=subprocess.DEVNULL, capture_output=True, process_group=0, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        _warn_of_no_report(error, run, console)
    else:
        console.line(done.stdout.rstrip())


def _warn_of_no_report(error: OSError | subprocess.SubprocessError, run: Path, console: Console) -> None:
    reason = str(error)
    if isinstance(error, subprocess.CalledProcessError):
        reason = error.stderr.strip().rpartition("\n")[2].removeprefix("gptlab: error: ")
    console.warn(f"no report was written ({reason}); gptlab report {shlex.quote(str(run))} tries again")


def leave_report(run: Path, config: RunConfig, group: Group) -> None:
    """Start the process that writes the report of a run that ends before its horizon, and do not wait for it: its
    launcher may wait for the exit code, or kill this process soon. Rank 0 does."""
    if not (config.log.report and group.is_main):
        return
    with suppress(OSError):
        process = subprocess.Popen(
            own_python(_GPTLAB, "report", str(run)), env=_alone(), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        threading.Thread(target=process.wait, daemon=True).start()  # a caller in Python may live on


def _alone() -> dict[str, str]:
    """The variables of a process that is no rank."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def _saver(session: Session, output: RunOutput) -> AbstractContextManager[CheckpointSaver]:
    about_run = {"run": output.run.identity(session.data.fingerprint)} if output.group.is_main else {}
    background = output.config.checkpoint.background
    if output.group.size == 1 and not background:
        return nullcontext(CheckpointSaver(**vars(output), about_run=about_run))
    from gptlab.training.checkpoint.background import concurrent_saver

    return concurrent_saver(output, about_run, session.state.device if background else None)


def _recorder(session: Session, output: RunOutput, saves: CheckpointSaver, attempt: Attempt) -> Recorder:
    group, place, load = session.group, session.place, None
    own = () if attempt.parts is None else attempt.parts.replacing
    if place.device.type == "cpu" and group.is_main:
        load = MachineLoad(place.threads, processes=group.world.local_size)
    peak = place.peak.flops_per_second
    throughput = Throughput(session.flops.total, None if peak is None else peak * group.size)
    return Recorder(
        **vars(output), throughput=throughput, saves=saves, signals=attempt.signals, load=load,
        resume_command=resume_command(output.run.path, own),
    )  # fmt: skip


def _warm_up(session: Session, record: Recorder, earlier: EarlierRun | None) -> float:
    """Compile before the clock starts, and record what will compute the run. Returns the seconds that it took."""
    console, group, started = record.console, session.group, time.perf_counter()
    if session.passes.compiled or session.place.device.type in MEMORY_RUNS_OUT:
        _compile(session, record, earlier)
    seconds = time.perf_counter() - started
    found = session.implementations()
    if group.size > 1:  # again, since a compiler may be there and fail
        found |= session.state.strategy.after_warm_up()
        require_same_implementations(found, session.place, group)
    record.saves.about_run["implementations"] = found
    if "attention" in found:
        console.line(f"attention: {found['attention']}")
    if earlier is not None:
        earlier.warn_of_implementations(found, console)
    if group.is_main and (earlier is None or earlier.stored is None):
        record.run.set_status("running", implementations=found)
    return seconds


def _compile(session: Session, record: Recorder, earlier: EarlierRun | None) -> None:
    console, compiled = record.console, session.passes.compiled
    if compiled:
        console.line("compiling: longest the first time, from the cache after that")
    with console.busy("compiling" if compiled else "warming up"):
        if session.place.device.type not in MEMORY_RUNS_OUT:
            session.warm_up(console.warn)
            return
        from gptlab.app.run.micro_batch import until_it_fits

        until_it_fits(session, record, is_resumed=earlier is not None and earlier.stored is not None)


def _record_failure(error: BaseException, session: Session, record: Recorder) -> None:
    """What ends the run as an error, in its folder."""
    # All ranks see what makes training fail; any other error may be this rank's alone.
    record.saves.abandon(session.state, together=isinstance(error, TrainingFailed))
    if isinstance(error, Exception):
        record.failed(session.state, error)
        if isinstance(error, TrainingFailed):
            leave_report(record.run.path, session.config, session.group)
    elif session.group.is_main:  # a signal before the first step, or an interrupt in a Python program
        with suppress(UserError):
            record.run.set_status("preempted" if isinstance(error, KeyboardInterrupt) else "failed")
