"""What a run tells the person who started it: its facts before it starts, and commands for what can be done next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gptlab.app.run_request import HORIZONS
from gptlab.config.recipes import applied_scaling
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

    config, place, counts, flops, data = session.config, session.place, session.counts, session.flops, session.data
    model, peak, processes = config.model, place.peak.flops_per_second, session.group.size
    console.line(
        f"machine   {device_name(place.device)} ({place.device}), {f'{processes} processes, ' * (processes > 1)}"
        f"{place.threads} thread{'s' * (place.threads > 1)}, {str(place.dtype).removeprefix('torch.')}, "
        + ("peak unknown" if peak is None else f"{peak / 1e9:,.0f} GFLOP/s ({place.peak.source})")
    )
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
    roles = (f"{str(role).replace('_', ' ')} {_short(count)}" for role, count in counts.by_role.items() if count)
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
            f"          {about}{steps:,} steps, {_short(tokens)} tokens, "
            f"{tokens / counts.scaling:.3g} for each parameter of matrices and head, "
            f"{epochs:.2g} epochs, {tokens * flops.total:.2g} FLOP"
        )
    if rules := applied_scaling(config, machine):
        console.line(f"scaling   {'; '.join(rules)}")
    if machine is not None and (reason := why_quickstart_size(config, machine)):
        console.line(f"size      {reason}")
    # Random windows are drawn with replacement from small texts on purpose (nanoGPT): those have no epochs to count.
    if epochs > MANY_EPOCHS and config.data.rows != "random" and not config.eval.only:
        files = config.data.hub_files
        more = "--data PATH" if files is None else f"--data.hub-files above {files}, or --data PATH"
        console.warn(
            f"{about}{epochs:.0f} passes over the training data: beyond {MANY_EPOCHS:.0f}, repeated text "
            f"teaches less and less (arXiv:2305.16264); more data helps, {more}"
        )


def _estimated_steps(session: Session, machine: Machine | None) -> int | None:
    """Of a run of so many seconds. None where its steps were not timed before."""
    if machine is None or machine.flops_per_second is None:
        return None
    step_seconds = session.flops.total * session.config.batch.total_tokens / machine.flops_per_second
    return max(1, round(session.config.horizon.amount / step_seconds))


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
    horizon = config.horizon
    name, factor = next((name, factor) for name, (unit, factor) in HORIZONS.items() if unit == horizon.unit)
    return f"{resume_command(run)} --{name.replace('_', '-')} {2 * horizon.amount / factor:.12g}"


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
