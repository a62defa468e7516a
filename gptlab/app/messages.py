"""What a run tells the person who started it: its facts before it starts, and commands for what can be done next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gptlab.app.run_request import HORIZONS
from gptlab.config.horizon import Horizon
from gptlab.config.recipes.applied_scaling import applied_scaling
from gptlab.config.recipes.quickstart import why_quickstart_size
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.runtime.records.console import Console

if TYPE_CHECKING:
    from gptlab.app.session import Session

MANY_EPOCHS = 4.0
"""Up to four epochs teach almost as much as fresh text, later ones ever less (Muennighoff et al., arXiv:2305.16264)."""


def describe(session: Session, console: Console, machine: Machine | None) -> None:
    """Print a run's facts, one line each. `machine`: what the run's size follows from, where it was measured."""
    from gptlab.runtime.hardware.device import device_name  # imports torch

    config, place, counts, flops = session.config, session.place, session.counts, session.flops
    model, data, group = config.model, session.data, session.work.group
    peak = place.peak.flops_per_second
    peak_text = "peak unknown" if peak is None else f"{peak / 1e9:,.0f} GFLOP/s ({place.peak.source})"
    dtype = str(place.dtype).removeprefix("torch.")
    threads = f"{place.threads} thread{'s' * (place.threads > 1)}"
    processes = f"{group.size} processes, " if group.size > 1 else ""
    console.line(f"machine   {device_name(place.device)} ({place.device}), {processes}{threads}, {dtype}, {peak_text}")
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
    kinds = {str(role).replace("_", " "): count for role, count in counts.by_role.items() if count}
    console.line(f"          {', '.join(f'{kind} {_short(count)}' for kind, count in kinds.items())}")
    if session.start is not None:
        console.line(f"weights   {session.start.text}")
    console.line(
        f"training  {config.horizon}, {config.batch.total_tokens:,} tokens a step "
        f"({config.micro_batches} x {config.batch.micro_sequences} rows)"
    )
    length = _length(session, machine)
    if length is not None:
        console.line(f"          {length}")
    if rules := applied_scaling(config, machine):
        console.line(f"scaling   {'; '.join(rules)}")
    if machine is not None and (reason := why_quickstart_size(config, machine)):
        console.line(f"size      {reason}")
    # Random windows are drawn with replacement from small texts on purpose (nanoGPT): those have no epochs to count.
    if length is not None and length.epochs > MANY_EPOCHS and config.data.rows != "random" and not config.eval.only:
        console.warn(
            f"{length.about}{length.epochs:.0f} passes over the training data: beyond {MANY_EPOCHS:.0f}, repeated text "
            f"teaches less and less (arXiv:2305.16264); more data helps, {_more_data(session)}"
        )


@dataclass(frozen=True, slots=True)
class _Length:
    """The length of a run in every unit; for a run of so many seconds, an estimate from timed steps."""

    about: str
    steps: int
    tokens: int
    tokens_per_param: float
    epochs: float
    flops: float

    def __str__(self) -> str:
        return (
            f"{self.about}{self.steps:,} steps, {_short(self.tokens)} tokens, "
            f"{self.tokens_per_param:.3g} for each parameter of matrices and head, "
            f"{self.epochs:.2g} epochs, {self.flops:.2g} FLOP"
        )


def _length(session: Session, machine: Machine | None) -> _Length | None:
    """None where it is unknown: a run of so many seconds whose steps were not timed before."""
    config = session.config
    tokens_per_step, steps, about = config.batch.total_tokens, session.finish.steps, ""
    if steps is None:
        if machine is None or machine.flops_per_second is None:
            return None
        step_seconds = session.flops.total * tokens_per_step / machine.flops_per_second
        steps, about = max(1, round(config.horizon.amount / step_seconds)), "about "
    tokens = steps * tokens_per_step
    return _Length(
        about, steps, tokens, tokens / session.counts.scaling,
        tokens / (session.rows_per_epoch * config.model.seq_len), tokens * session.flops.total,
    )  # fmt: skip


def _more_data(session: Session) -> str:
    files = session.config.data.hub_files
    return "--data PATH" if files is None else f"--data.hub-files above {files}, or --data PATH"


def _short(count: int) -> str:
    """786k, 1.05M, 3.28B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def program() -> str:
    """How to type gptlab: by name where the shell finds it, else by the path or module that was started."""
    if "UV_RUN_RECURSION_DEPTH" in os.environ:  # uv run sets PATH for this process only
        return "uv run gptlab"
    script = Path(sys.argv[0])
    if script.name == "__main__.py" and script.parent.name == "gptlab":
        return f"{_typed(Path(sys.executable))} -m gptlab"
    return _typed(script) if script.stem == "gptlab" else "gptlab"


def resume_command(run: Path) -> str:
    return f"{program()} train --resume {shlex.quote(str(run))}"


def longer_command(run: Path, config: RunConfig) -> str:
    """Trains a finished run to twice its length."""
    return f"{resume_command(run)} {_twice(config.horizon)}"


def next_steps(run: Path, config: RunConfig, prompts: Sequence[str], *, trained: bool) -> list[str]:
    """Lines for the end of a finished run. `prompts`: those of its samples. `trained`: whether it saved weights."""
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
    """The command's name where the shell finds this very file by it, else the shortest path."""
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
