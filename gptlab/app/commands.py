"""Commands that messages suggest, as a user would type them: resume a run, train it longer, sample it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gptlab.config.fields import flag_of
from gptlab.config.length import HORIZONS
from gptlab.config.run import RunConfig


def program() -> str:
    """How to type gptlab: by name where the shell finds it, else by the path or module that was started."""
    if "UV_RUN_RECURSION_DEPTH" in os.environ:  # uv run sets PATH for this process only
        return "uv run gptlab"
    script = Path(sys.argv[0])
    if script.name == "__main__.py" and script.parent.name == "gptlab":
        return f"{_typed(Path(sys.executable))} -m gptlab"
    return _typed(script) if script.stem == "gptlab" else "gptlab"


def resume_command(run: Path, own: Iterable[str] = (), **length: str) -> str:
    """Resumes a run, with another `length` if given: a call in Python where it has parts of its caller's `own`."""
    if parts := [f"{name}=..." for name in own]:
        return f"gptlab.train({', '.join([f'resume={str(run)!r}', *(f'{n}={x}' for n, x in length.items()), *parts])})"
    flags = "".join(f" {flag_of(name)} {value}" for name, value in length.items())
    return f"{program()} train --resume {shlex.quote(str(run))}{flags}"


def longer_command(run: Path, config: RunConfig, own: Iterable[str] = ()) -> str:
    """Trains a finished run to twice its length; see `resume_command`."""
    horizon, own = config.horizon, [*own]
    length = {name: f"{2 * horizon.amount / n:.12g}" for name, (unit, n) in HORIZONS.items() if unit == horizon.unit}
    if horizon.until_val_loss is not None:  # one that was reached would end the run before its first step
        length["until_val_loss"] = "None" if own else "none"
    return "in Python, " * bool(own) + resume_command(run, own, **length)


def next_commands(run: Path, config: RunConfig, prompts: Sequence[str], *, trained: bool) -> list[str]:
    """Lines for the end of a finished run. `prompts`: those of its samples. `trained`: whether it saved weights."""
    folder = shlex.quote(str(run))
    lines = [f"run folder: {folder}"]
    if trained:
        prompt = next((text for text in prompts if text.strip() and text.isprintable()), None)
        asked = "" if prompts else " --interactive"  # without a prompt, those of the run are continued
        asked = asked if prompt is None else f" --prompt {shlex.quote(prompt)}"
        lines.append(f"  sample it:          {program()} sample {folder}{asked}")
        lines.append(f"  train it on:        {longer_command(run, config)}")
    lines.append(f"  change and compare: {program()} train --from {folder} --seed {config.seed + 1}")
    return lines


def _typed(path: Path) -> str:
    """The command's name where the shell finds this very file by it, else the shortest path."""
    found = shutil.which(path.name)
    if found is not None and path.exists() and os.path.samefile(found, path):
        return path.name
    here = Path.cwd()
    absolute = Path(os.path.abspath(path))
    return shlex.quote(str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute))
