"""A command that torchrun has started again: it goes on with the run that it began, or ends as it ended before."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gptlab.app.run_request import RunRequest
from gptlab.config.errors import UserError
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.processes.job import Ended, Job
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.early_stop import StoppedEarly

EXIT_USAGE, EXIT_PREEMPTED = 2, 75


def earlier_end(job: Job, group: Group) -> Ended | None:
    """How an earlier attempt of this torchrun job ended, where another one would not change it."""
    ended = job.ended()
    said = group.broadcast("earlier end", ended and [ended.exit_code, ended.text])
    return None if said is None else Ended(*said)


def end_again(end: Ended, request: RunRequest, job: Job, console: Console, group: Group) -> tuple[int, Path]:
    """End as an earlier attempt did: (exit code, run folder), or by its error where it had no folder."""
    folder = group.broadcast("folder", request.resume or ((path := job.folder()) and str(path)))
    if end.exit_code == EXIT_USAGE or folder is None:
        if not group.is_main:
            group.barrier("end again")  # to which rank 0 does not come: it speaks for all
        raise StoppedEarly(end.text) if end.exit_code == EXIT_PREEMPTED else UserError(end.text)
    console.line(f"not tried again by torchrun's restart, having ended with {end.exit_code}: {end.text}")
    return end.exit_code, Path(folder)


def restarted(request: RunRequest, job: Job, console: Console, group: Group) -> RunRequest:
    """`request`, or, where an earlier attempt of this torchrun job has begun its run, one that goes on with it."""
    begun = None if request.resume is not None else begun_folder(job)
    said = group.broadcast("begun before", begun and str(begun))
    if said is None:
        return request
    console.line(f"restarted by torchrun: going on with {said}, which this job has begun")
    return RunRequest(resume=said)


def begun_folder(job: Job) -> Path | None:
    """The run folder that an earlier attempt of this job has made: never one that somebody else made in its place."""
    folder = job.folder()
    if folder is None:
        return None
    with suppress(UserError):  # no run, or none whose run.json can be read
        if RunDirectory.open(folder).read_provenance().get("job") == job.id:
            return folder
    return None
