"""What a user can do with a run that has ended, as commands that work where this process was started."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gptlab.app.run_request import HORIZONS
from gptlab.config.horizon import Horizon
from gptlab.config.run import RunConfig

if TYPE_CHECKING:
    from gptlab.runtime.records.run_directory import RunDirectory


def program() -> str:
    """What to type for gptlab: the name alone where the shell finds it, else the path or module that was started."""
    if "UV_RUN_RECURSION_DEPTH" in os.environ:  # uv run puts its environment on the path of this process alone
        return "uv run gptlab"
    script = Path(sys.argv[0])
    if script.name == "__main__.py" and script.parent.name == "gptlab":
        return f"{_typed(Path(sys.executable))} -m gptlab"
    return _typed(script) if script.stem == "gptlab" else "gptlab"


def resume_command(run: Path) -> str:
    return f"{program()} train --resume {shlex.quote(str(run))}"


def longer_command(run: Path, config: RunConfig) -> str:
    """Trains a finished run on, to twice its length."""
    return f"{resume_command(run)} {_twice(config.horizon)}"


def next_steps(run: Path, config: RunConfig, prompts: Sequence[str], *, trained: bool) -> list[str]:
    """Lines for the end of a finished run. `prompts`: those of its samples. `trained`: it has weights to ask."""
    folder = shlex.quote(str(run))
    lines = [f"run folder: {folder}"]
    if trained:
        prompt = next((text for text in prompts if text.strip() and text.isprintable()), None)
        asked = "" if prompt is None else f" --prompt {shlex.quote(prompt)}"
        lines.append(f"  sample it:          {program()} sample {folder}{asked}")
        lines.append(f"  train it on:        {longer_command(run, config)}")
    lines.append(f"  change and compare: {program()} train --from {folder} --seed {config.seed + 1}")
    return lines


def _typed(path: Path) -> str:
    """The command's name where the shell finds this very file under it, else the shortest path to it."""
    found = shutil.which(path.name)
    if found is not None and path.exists() and os.path.samefile(found, path):
        return path.name
    here = Path.cwd()
    absolute = Path(os.path.abspath(path))
    return shlex.quote(str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute))


def _twice(horizon: Horizon) -> str:
    """A flag for twice as long a run."""
    name, factor = next((name, factor) for name, (unit, factor) in HORIZONS.items() if unit == horizon.unit)
    return f"--{name.replace('_', '-')} {2 * horizon.amount / factor:.12g}"


def stopped_early(signal_name: str, run: RunDirectory | None) -> str:
    if run is None:
        return f"{signal_name}: stopped while preparing, before there was a run: the same command begins again"
    return f"{signal_name}: stopped before the first step; resume with {resume_command(run.path)}"


def stopped_by_peer(signal_name: str, run: RunDirectory | None) -> str:
    """Where a signal ended another rank: before the first step, or in the middle of one, for somebody in a hurry."""
    from gptlab.training.checkpoint.load import list_checkpoints

    if run is None or not list_checkpoints(run.checkpoints_path):
        return stopped_early(signal_name, run)
    return f"{signal_name}: stopped at once; {last_checkpoint(run)}; resume with {resume_command(run.path)}"


def last_checkpoint(run_directory: RunDirectory) -> str:
    from gptlab.training.checkpoint.load import list_checkpoints

    saved = list_checkpoints(run_directory.checkpoints_path)
    return f"the last checkpoint is {saved[-1]}" if saved else "no checkpoint had been saved yet"
