"""One attempt of this process at a run: how far it has come, how it ends, and how torchrun's next attempt begins."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from gptlab.app.commands import resume_command
from gptlab.app.run.own_parts import OwnParts, own_parts_of
from gptlab.app.run.run_request import RunRequest
from gptlab.config.errors import EXIT_PREEMPTED, EXIT_TRAINING_FAILED, EXIT_USAGE, UserError
from gptlab.config.run import RunConfig
from gptlab.runtime.processes.distributed import Group, Job
from gptlab.runtime.processes.liveness import Failure, PeerFailed
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.run_directory import RunDirectory, default_run_path
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.signals import Signals, StoppedEarly, behind_signal

# A network file system may show a machine for so long what a folder held before (NFS: acdirmax).
SEEN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended."""

    exit_code: int
    run_dir: Path
    summary: dict[str, object]
    """The contents of summary.json; empty for a run that was preempted or failed."""

    def _repr_html_(self) -> str | None:
        """What a notebook shows: the final numbers and the curve of validation bits per byte."""
        from gptlab.report.page import notebook_html

        try:
            return notebook_html(self.run_dir)
        except UserError:  # of a folder that is gone or damaged; the notebook then shows the text form
            return None


@dataclass(slots=True)
class Attempt:
    """The means of this process, and how far it has come. Signals and lost ranks end it from other threads."""

    console: Console
    argv: Sequence[str]
    """The command, for run.json."""
    started: float
    """time.perf_counter() when the program began."""
    parts: OwnParts | None = None
    """What a Python caller gives to the run beside its configuration."""
    catch: bool = True
    """Whether the process belongs to gptlab: failed training is then an exit code and not an exception."""
    config: RunConfig | None = None
    run: RunDirectory | None = None
    """None: there is no run folder yet, or that of a finished run, where nothing is recorded of this command yet."""
    resumes: str | None = None
    """The folder of the run that was asked to be resumed."""
    group: Group = field(default_factory=Group)
    signals: Signals = field(default_factory=Signals)
    job: Job = field(default_factory=Job)
    """What torchrun keeps for the next attempt."""
    held: ExitStack = field(default_factory=ExitStack)
    """Locks and settings, until the attempt is over."""

    def new_run_path(self, run_dir: str | None, recipe: str) -> Path:
        """Where a new run goes: to `run_dir`, if that is given."""
        path = Path(run_dir or self.job.folder() or default_run_path(recipe, datetime.now()))
        return path if self.catch else path.absolute()  # whoever has called may go to another folder meanwhile

    def share_run_folder(self) -> None:
        """Give every rank the run folder that rank 0 made or opened. UserError on rank 0 where another rank does not
        see there what rank 0 has written; the other ranks end with rank 0."""
        from gptlab.app.run.ranks import rank_0_reports

        # Absolute, since the processes may have different working folders; as given, since a machine may mount them at
        # another place.
        mine = self.run and {"paths": [str(self.run.path.absolute()), str(self.run.path)], "run": self.run.recorded()}
        said = self.group.broadcast("run folder", mine)
        run = self.run if self.group.is_main else _seen(said["paths"], said["run"])
        hosts = self.group.gather("run folder seen", None if run else platform.node())
        self.run = run or RunDirectory(Path(said["paths"][0]))
        if (other := next((rank for rank, host in enumerate(hosts) if host is not None), None)) is None:
            return
        with rank_0_reports(self.group, "run folder not seen"):
            text = (
                f"rank {other} (on {hosts[other]}) does not see the run folder {said['paths'][0]} of rank 0: give all "
                "processes one on a disk that their machines share"
            )
            if self.group.is_main:
                self.run.set_failed(text)
            raise UserError(text)

    def restarted(self, request: RunRequest) -> RunRequest | Result:
        """`request`, or, where an earlier attempt of this torchrun job began or resumed a run, the request to resume it
        from its newest checkpoint. The Result where the earlier attempt ended in a way that another attempt would only
        repeat."""
        ended = self.job.ended()
        noted = self.group.gather("earlier end", ended and [ended.exit_code, ended.text])
        if (said := next(filter(None, noted), None)) is not None:
            return self._end_again(request, *said)
        begun = begun_folder(self.job) if request.resume is None else self.job.folder()
        folder = self.group.broadcast("begun before", begun and str(begun))
        if folder is None:
            return request
        self.console.line(f"restarted by torchrun: resuming {folder}, which this job was training")
        self.run = RunDirectory.open(Path(folder))
        return RunRequest(resume=folder) if request.resume is None else replace(request, resume_from_step=None)

    def _end_again(self, request: RunRequest, exit_code: int, text: str) -> Result:
        folder = self.group.broadcast("folder", request.resume or ((path := self.job.folder()) and str(path)))
        if exit_code == EXIT_USAGE or folder is None:
            if not self.group.is_main:
                self.group.barrier("end again")  # rank 0 never comes: it reports for all
            raise StoppedEarly(text) if exit_code == EXIT_PREEMPTED else UserError(text)
        self.console.line(f"not tried again after torchrun's restart, since it ended with {exit_code}: {text}")
        return Result(exit_code, Path(folder), {})

    def ended_by(self, last: BaseException) -> Result:
        """The Result of an attempt that a signal ended after there was a run folder; else raises the error that ended
        the attempt."""
        from gptlab.runtime.hardware.memory import ran_out_of_memory, what_to_lower

        error = behind_signal(last)
        if isinstance(error, PeerFailed):
            failure = error.failure
            self.note_lost(failure)
            if failure.exit_code == EXIT_PREEMPTED:
                self.console.result(stopped_by_peer(failure, self.run, self.resumes))
            if not failure.said_by_itself and self.run is not None:
                self.console.error(f"training failed: {error}; {last_checkpoint(self.run)}")
                error.is_reported = self.group.is_main  # the consoles of other ranks print nothing
            raise error from None
        # Whatever a library made of the exception that the signal raised.
        if error is last and (signal_name := self.signals.stopped_early) is not None:
            self.job.ends(EXIT_PREEMPTED, signal_name)
            if self.run is None:
                raise StoppedEarly(signal_name) from None
            self._set_preempted()
            self.console.result(stopped_early(signal_name, self.run, self.resumes))
            return Result(EXIT_PREEMPTED, self.run.path, {})
        if self.config is not None and ran_out_of_memory(error):
            folder = self.resumes if self.run is None else str(self.run.path)
            too_little = UserError(what_to_lower(error, self.config, None if folder is None else Path(folder)))
            self.job.ends(EXIT_USAGE, str(too_little))
            raise too_little from error
        if isinstance(error, UserError):
            self.job.ends(EXIT_USAGE, str(error))
        raise error from error.__cause__

    def failed(self, error: Exception) -> Result:
        """The Result of a run whose training failed. Raises `error` where the caller handles failures."""
        assert self.run is not None
        self.job.ends(EXIT_TRAINING_FAILED, str(error))
        self.console.error(f"training failed: {error}; {last_checkpoint(self.run)}")
        if not self.catch:
            raise error
        return Result(EXIT_TRAINING_FAILED, self.run.path, {})

    def note_lost(self, failure: Failure) -> None:
        """Record that another process is lost, before this one ends. May be called from another thread."""
        if failure.exit_code == EXIT_PREEMPTED:
            self._set_preempted()
        # Rank 1, where rank 0 cannot: left as "running", a run whose rank 0 always runs out of memory would be queued
        # again and again by a job script (docs/cluster.md).
        elif self.run is not None and self.group.rank in ((0,) if failure.rank or failure.said_by_itself else (0, 1)):
            with suppress(UserError):
                self.run.set_failed(failure.text)
        if failure.said_by_itself and failure.exit_code in (EXIT_USAGE, EXIT_PREEMPTED):
            self.job.ends(failure.exit_code, failure.text)

    def end_now(self, signal_name: str) -> None:
        """End the process from another thread while a library blocks the main thread. What is half-built in the cache
        is never trusted; the next process removes it."""
        self._exit_preempted(signal_name, stopped_early(signal_name, self.run, self.resumes))

    def stop_at_once(self, signal_name: str) -> None:
        """End the process from another thread at the second Ctrl-C, in the middle of a step. As after a kill, but with
        the status recorded, and the exit code the same for all processes."""
        assert self.run is not None
        self.group.leave(StoppedEarly(signal_name), EXIT_PREEMPTED)
        text = f"{signal_name} again: stopped at once; {last_checkpoint(self.run)}; {how_to_continue(self.run)}"
        self._exit_preempted(signal_name, text)

    def _exit_preempted(self, signal_name: str, text: str) -> None:
        self._set_preempted()
        self.job.ends(EXIT_PREEMPTED, signal_name)
        if self.group.is_main:
            clear_line = "\r\x1b[2K\x1b[?25h" * sys.stdout.isatty()  # of the live line, which also hides the cursor
            with suppress(OSError):
                os.write(sys.stdout.fileno(), f"{clear_line}{text}\n".encode())
        os._exit(EXIT_PREEMPTED)

    def _set_preempted(self) -> None:
        if self.group.is_main and self.run is not None:
            with suppress(UserError):
                self.run.set_status("preempted")


def begun_folder(job: Job) -> Path | None:
    """The run folder that an earlier attempt of this job made; None where another program made one in its place."""
    folder = job.folder()
    if folder is None:
        return None
    with suppress(UserError):  # not a run, or a damaged run.json
        if RunDirectory.open(folder).read_provenance().get("job") == job.id:
            return folder
    return None


def _seen(paths: Sequence[str], record: object) -> RunDirectory | None:
    """The first of these run folders whose run.json holds `record`. Not by the run's id, which copies on the disks of
    several machines have in common."""
    until = time.monotonic() + SEEN_SECONDS
    while True:
        for path in paths:
            if (run := RunDirectory(Path(path))).recorded() == record:
                return run
        if time.monotonic() > until:
            return None
        time.sleep(0.1)


def stopped_early(signal_name: str, run: RunDirectory | None, resumes: str | None) -> str:
    """The message for a signal that ended this process before the first step."""
    if run is None and resumes is not None:
        return f"{signal_name}: stopped while preparing; {resumes} is unchanged: the same command continues it"
    if run is None:
        return f"{signal_name}: stopped while preparing, before there was a run: the same command begins again"
    return f"{signal_name}: stopped before the first step; {how_to_continue(run)}"


def stopped_by_peer(failure: Failure, run: RunDirectory | None, resumes: str | None) -> str:
    """For a signal that ended another rank before the first step, or in the middle of a step (a second Ctrl-C)."""
    signal_name = f"{failure.text.rpartition(' ')[2]} (rank {failure.rank})"
    if run is None or not list_checkpoints(run.checkpoints_path):
        return stopped_early(signal_name, run, resumes)
    return f"{signal_name}: stopped at once; {last_checkpoint(run)}; {how_to_continue(run)}"


def how_to_continue(run: RunDirectory) -> str:
    """The command that continues a run; where nothing has been saved yet, it starts the run again."""
    what = "resume" if list_checkpoints(run.checkpoints_path) else "start it again"
    return f"{what} with {resume_command(run.path, own_parts_of(run.recorded()))}"


def last_checkpoint(run: RunDirectory) -> str:
    """Which checkpoint is the last one, for a message."""
    saved = list_checkpoints(run.checkpoints_path)
    return f"the last checkpoint is {saved[-1]}" if saved else "no checkpoint had been saved yet"
