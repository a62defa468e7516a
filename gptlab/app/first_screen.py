"""What a run says of itself before it starts: machine, data, model, length, and how the numbers came about."""

from __future__ import annotations

from dataclasses import dataclass

from gptlab.app.session import Session
from gptlab.config.recipes import why_quickstart_size
from gptlab.config.recipes.applied_scaling import applied_scaling
from gptlab.config.scaling import Machine
from gptlab.runtime.hardware.device import device_name
from gptlab.runtime.records.console import Console

MANY_EPOCHS = 4.0
"""Up to four epochs teach almost as much as fresh text, after that ever less (Muennighoff et al., arXiv:2305.16264)."""


def describe(session: Session, console: Console, machine: Machine | None) -> None:
    """One line a fact, compactly. `machine`: what the run's size follows from, where it was measured."""
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
    """How long the run is in every unit; of a run that is measured in seconds, what timed steps let expect."""

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
    """None where nobody knows: a run in seconds whose steps were not timed beforehand."""
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
