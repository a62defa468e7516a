"""`gptlab train`: a recipe, a TOML file and flags in; a run folder and the closing block out."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.cli.run_arguments import RunRequest, TrainArguments, read_request, recipe_list
from gptlab.config.errors import UserError
from gptlab.config.recipes import why_quickstart_size
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine

if TYPE_CHECKING:
    from gptlab.cli.session import Session
    from gptlab.runtime.console import Console
    from gptlab.runtime.run_directory import RunDirectory
    from gptlab.train.checkpoint import Checkpoint

DESCRIPTION = "Train a GPT, or go on with a run."
EXIT_TRAINING_FAILED = 3
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended."""

    exit_code: int
    run_dir: Path
    summary: dict[str, object]
    """The closing block's numbers; empty for a run that was preempted or failed."""


def main(argv: list[str]) -> int:
    started = time.perf_counter()
    request = read_request(argv, TrainArguments, prog="gptlab train", description=DESCRIPTION)
    if request.list_recipes:
        print(recipe_list())
        return 0
    return _train(request, ["train", *argv], started).exit_code


def run(
    config: RunConfig | None = None,
    *,
    resume: str | Path | None = None,
    from_run: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Result:
    """Train a configuration, go on with the run in `resume`, or train that of `from_run` anew in a folder of its own,
    with `overrides` ({dotted field: value}) put in. Errors are raised: UserError, TrainingFailed."""
    if [config, resume, from_run].count(None) != 2:
        raise UserError("give one of: a configuration to train, a run to resume, a run to train anew (from_run)")
    if overrides and from_run is None:
        raise UserError("overrides go with from_run; a configuration is changed by dataclasses.replace")
    request = RunRequest(
        resume=None if resume is None else str(resume),
        from_run=None if from_run is None else str(from_run),
        overrides=overrides or {},
    )
    return _train(request, sys.argv, time.perf_counter(), config=config, catch=False)


def _train(
    request: RunRequest, argv: Sequence[str], started: float, *, config: RunConfig | None = None, catch: bool = True
) -> Result:
    from gptlab.runtime.provenance import EvidenceTaker

    evidence_taker = EvidenceTaker()  # before torch is imported, which takes longer
    from gptlab.cli.place import machine_for, place_of
    from gptlab.cli.repeat import repeated_config, what_differs
    from gptlab.cli.session import make_run_directory, open_session, record_resume, train
    from gptlab.runtime.console import Console
    from gptlab.runtime.run_directory import RunDirectory
    from gptlab.train.recorder import OffClock, show_closing_block
    from gptlab.train.watchdog import TrainingFailed

    with Console() as console, ExitStack() as held:
        run_directory = origin = checkpoint = None
        if request.resume is not None:
            config, run_directory = _stored(request)
            held.enter_context(run_directory.lock())
            _require_trained(run_directory)
            if summary := _finished(run_directory):
                console.line(f"{run_directory.path} is finished: there is nothing left to train")
                show_closing_block(summary, console)
                return Result(0, run_directory.path, summary)
            checkpoint = _checkpoint(run_directory, console)
            config = _with_own_tokenizer(config, run_directory)
        if request.from_run is not None:
            origin = RunDirectory.open(Path(request.from_run))
            _require_trained(origin)
            config = repeated_config(request, origin)
        if config is None:
            config = request.config(functools.partial(machine_for, request))
        if run_directory is None and config.run_dir is not None:
            RunDirectory(Path(config.run_dir)).require_free()  # said now, not after the data is prepared
        session = open_session(config, place_of(config), console, restored=checkpoint is not None)
        if run_directory is not None:
            _require_same_start(run_directory, session)
        evidence = evidence_taker.result()
        facts = session.provenance(argv, evidence.code, request.from_run)
        if recorded := run_directory or origin:
            asked = {} if origin is None else request.overrides
            for line in what_differs(recorded, facts, asked):
                console.warn(line)
        describe(session, console)
        if run_directory is None:
            run_directory = make_run_directory(session, facts, evidence)
            held.enter_context(run_directory.lock())
        else:
            record_resume(run_directory, facts, evidence)
        try:
            ended, summary = train(session, run_directory, checkpoint, console, OffClock(started))
        except TrainingFailed as error:
            console.warn(f"training failed: {error}; {_what_stands(run_directory)}")
            if not catch:
                raise
            return Result(EXIT_TRAINING_FAILED, run_directory.path, {})
        return Result(0 if ended == "finished" else EXIT_PREEMPTED, run_directory.path, summary)


def _stored(request: RunRequest) -> tuple[RunConfig, RunDirectory]:
    """The configuration of the run to resume. UserError where the flags beside --resume say something else."""
    from gptlab.cli.repeat import stored_config
    from gptlab.runtime.run_directory import RunDirectory

    assert request.resume is not None
    run_directory = RunDirectory.open(Path(request.resume))
    config = stored_config(run_directory)
    if different := request.disagreements(config):
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise UserError(f"{request.resume} has another configuration: {different[0]}{more}; leave it out to resume")
    return config, run_directory


def _finished(run_directory: RunDirectory) -> dict[str, object]:
    """The closing numbers of a run that is at its end; empty for any other."""
    from gptlab.runtime.strict_json import read_json_object
    from gptlab.train.recorder import closing_numbers

    try:
        if run_directory.read_provenance().get("status") == "finished":
            return closing_numbers(read_json_object(run_directory.summary_path))
    except UserError:  # lost or damaged: training on from the last checkpoint, which ends at once, writes them again
        pass
    return {}


def _checkpoint(run_directory: RunDirectory, console: Console) -> Checkpoint | None:
    """The newest intact checkpoint; None where the run ended before its first one, and so goes on from its start."""
    from gptlab.runtime.metrics import read_metrics
    from gptlab.train.checkpoint import list_checkpoints, load_newest

    if list_checkpoints(run_directory.checkpoints_path):
        return load_newest(run_directory.checkpoints_path, console.warn)
    metrics = read_metrics(run_directory.metrics_path) if run_directory.metrics_path.exists() else []
    saved = [line["step"] for line in metrics if line["kind"] == "checkpoint"]
    if saved:
        raise UserError(
            f"no checkpoint in {run_directory.checkpoints_path}, though one of step {saved[-1]} was saved there: bring "
            "it back, or train in a new folder"
        )
    console.line(f"{run_directory.path} has no checkpoint yet: it begins anew")
    return None


def _what_stands(run_directory: RunDirectory) -> str:
    from gptlab.train.checkpoint import list_checkpoints

    saved = list_checkpoints(run_directory.checkpoints_path)
    return f"{saved[-1]} stands" if saved else "no checkpoint had been saved yet"


def _require_trained(run_directory: RunDirectory) -> None:
    if "imported" in run_directory.read_provenance():
        path = run_directory.path
        raise UserError(f"{path} was imported, not trained: to begin with its weights, --init-from {path}")


def _with_own_tokenizer(config: RunConfig, run_directory: RunDirectory) -> RunConfig:
    """With the run's copy of a tokenizer that was read from elsewhere (that of pretrained weights), since elsewhere may
    be gone."""
    if config.tokenizer.path is None or not run_directory.tokenizer_path.is_dir():
        return config
    return replace(config, tokenizer=replace(config.tokenizer, path=str(run_directory.tokenizer_path)))


def _require_same_start(run_directory: RunDirectory, session: Session) -> None:
    """The data of the first start, and its first weights where the run begins with them anew."""
    record = run_directory.read_provenance()
    if session.start is not None and record.get("init_from_fingerprint") != session.start.fingerprint:
        raise UserError(
            f"the weights of {session.config.init_from} are not those that {run_directory.path} began with "
            f"(fingerprint {session.start.fingerprint[:12]}): bring them back, or train in a new folder"
        )
    recorded = record.get("data_fingerprint")
    if recorded != session.data.fingerprint:
        raise UserError(
            f"the data is not what {run_directory.path} was trained on (fingerprint {session.data.fingerprint}, "
            f"was {recorded}): bring the corpus back to resume"
        )


def describe(session: Session, console: Console) -> None:
    """What is about to be trained, and how the size came about."""
    config, place, counts, flops = session.config, session.place, session.counts, session.flops
    model = config.model
    peak = place.peak.flops_per_second
    peak_text = "peak unknown" if peak is None else f"{peak / 1e9:,.0f} GFLOP/s ({place.peak.source})"
    dtype = str(place.dtype).removeprefix("torch.")
    threads = f"{place.threads} thread{'s' * (place.threads > 1)}"
    console.line(f"machine   {place.device}, {threads}, {dtype}, {peak_text}")
    data = session.data
    console.line(
        f"data      {', '.join(config.data.source)}: {data.train.n_tokens:,} training tokens, "
        f"{data.val.n_tokens:,} validation tokens, vocabulary {model.vocab_size:,} ({data.tokenizer.kind})"
    )
    console.line(
        f"model     {model.n_layer} layers, width {model.n_embd}, {model.n_head} heads, context {model.seq_len}: "
        f"{counts.total / 1e6:.2f}M parameters, {flops.total / 1e6:.1f} MFLOP a token"
    )
    if session.start is not None:
        console.line(f"weights   {session.start.text}")
    console.line(
        f"training  {config.horizon}, {config.batch.total_tokens:,} tokens a step "
        f"({config.micro_batches} x {config.batch.micro_sequences} rows)"
    )
    if reason := why_quickstart_size(config, Machine(device=str(place.device), matmul_flops_per_second=peak)):
        console.line(f"size      {reason}")
