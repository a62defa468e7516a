"""`--resume RUN --resume-from-step N`: back to an earlier checkpoint, with nothing of what came after it lost."""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path

from gptlab.config.errors import UserError
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.directory import candidates, step_of
from gptlab.training.checkpoint.load import select_checkpoint


def go_back_to(run: RunDirectory, step: int, console: Console) -> None:
    """Make the checkpoint of `step` the newest of the run. Those of later steps move to RUN/set-aside-1 (2, ...), with
    copies of what resuming will cut or replace. On rank 0, under the run's lock; UserError where there is no intact
    checkpoint of that step.

    The copies come first and the newest checkpoint moves first: a process killed in between leaves a run that resumes
    from the newest checkpoint that is still there.
    """
    folder = run.checkpoints_path
    select_checkpoint(folder, str(step), console.warn)
    later = [path for path in candidates(folder) if (step_of(path) or 0) > step]
    if not later:
        return
    aside = next(path for n in count(1) if not (path := run.path / f"set-aside-{n}").exists())
    try:
        (aside / folder.name).mkdir(parents=True)
        for path in (run.metrics_path, run.log_path, run.summary_path, run.provenance_path):
            if path.is_file():
                shutil.copyfile(path, aside / path.name)
        for path in reversed(later):
            os.rename(path, aside / folder.name / path.name)
    except OSError as error:
        raise UserError(f"cannot set the later checkpoints of {run.path} aside: {error.strerror or error}") from error
    steps = ", ".join(str(step_of(path)) for path in later)
    console.warn(
        f"back to step {step}: the checkpoints of later steps ({steps}), and copies of {_names(aside)}, are in {aside}"
    )


def _names(aside: Path) -> str:
    return ", ".join(sorted(path.name for path in aside.iterdir() if path.is_file()))
