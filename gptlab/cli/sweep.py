"""`gptlab sweep RECIPE --vary FIELD=A,B`: every combination of values, with several seeds, compared at the end.

Also what `gptlab ladder` shares with it."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.app.commands import program
from gptlab.app.run.repeat import repeated_config
from gptlab.app.run.run_request import DEFAULT_RECIPE, RunArguments, RunRequest, argument_types, request_from_values
from gptlab.cli.arguments.parser import read_request
from gptlab.config.errors import EXIT_PREEMPTED, EXIT_TRAINING_FAILED, EXIT_USAGE, UserError
from gptlab.config.fields import require_positive
from gptlab.config.length import lengths_of, replaced_lengths
from gptlab.config.load import unknown_field, value_from_text
from gptlab.config.recipes import OWN_TYPES
from gptlab.config.recipes.quickstart import ASSUMED_FLOPS_PER_SECOND
from gptlab.config.run import DataConfig, RunConfig
from gptlab.config.scaling import Machine
from gptlab.lab.launch import Stop
from gptlab.lab.sweep import (
    Kind,
    Status,
    Sweep,
    SweepRun,
    Values,
    begin_sweep,
    locked,
    read_sweep,
    sides_of,
    train_sweep,
    variants_of,
    why_failed,
)
from gptlab.runtime.files.plain_file import to_json
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.runtime.records.table import table

if TYPE_CHECKING:
    from gptlab.lab.run_record import RunRecord

DESCRIPTION = """\
Train every combination of the varied values with several seeds, and compare them. Runs alternate between the \
variants, and the same command continues where it was stopped."""

_NOT_VARIED = {
    "seed": "give the first one with --seed and their number with --seeds",
    "recipe": "make a sweep of each recipe, and compare the two folders with gptlab compare",
    "run_dir": "the folders are those of the sweep (--name)",
}
_SEEDS = 3
_UNFINISHED = ("stopped", "waiting")
ROOTS: Mapping[Kind, str] = {"sweep": "sweeps", "ladder": "ladders"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyRunsArguments(RunArguments):
    seeds: int = _SEEDS
    """Seeds of each variant: 3, of a ladder 1. The first is --seed."""
    name: str | None = None
    """Folder below sweeps/ or ladders/. None: from recipe and fields."""
    from_run: str | None = None
    """Vary this run in place of a recipe. Fields given beside it replace its own."""
    resume: str | None = None
    """Continue what is in this folder. Only --retry-failed, --dry-run and --json may be given beside it."""
    retry_failed: bool = False
    """Train failed runs again."""
    dry_run: bool = False
    """List the commands, train nothing."""
    json: bool = False
    """Print one JSON object, numbers unrounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepArguments(ManyRunsArguments):
    vary: tuple[str, ...] = ()
    """A field and its values: FIELD=A,B. FIELD may also be depth, minutes and so on; several as FIELD=A,B FIELD=C,D or
    repeated. The same FIELD again adds one value each time, which may have commas."""


def main(argv: Sequence[str]) -> int:
    request = read_request(argv, SweepArguments, prog="gptlab sweep", description=DESCRIPTION, refuses=["run_dir"])
    vary = read_vary(request.options.get("vary", ()))
    sweep = asked_sweep(request, "sweep", vary, request.options.get("seeds", _SEEDS))
    for difference, remedy in _other_validations(sweep):
        said = f"the variants differ in {difference}, so that their bits per byte will not be compared"
        print(f"warning: {said}: stop, and train them with {remedy}", file=sys.stderr)
    return train_and_show(sweep, request.options, _comparison)


def read_vary(texts: Sequence[str]) -> dict[str, Sequence[Any]]:
    """{argument: values}, checked one by one."""
    kinds, given = argument_types(RunArguments) | OWN_TYPES, dict[str, list[str]]()
    for text in texts:
        field, equals, values = text.partition("=")
        if not equals:
            raise UserError(f"--vary {text}: it takes FIELD=VALUE,VALUE,... and the recipe comes before it")
        name = field.removeprefix("--").replace("-", "_")
        if name in _NOT_VARIED:
            raise UserError(f"--vary {text}: {name} cannot be varied; {_NOT_VARIED[name]}")
        if name not in kinds:
            raise unknown_field(name, values, also=kinds)
        given.setdefault(name, []).append(values)
    split = {name: texts if len(texts) > 1 else texts[0].split(",") for name, texts in given.items()}
    return {name: [value_from_text(kinds[name], text, name) for text in texts] for name, texts in split.items()}


def asked_sweep(request: RunRequest, kind: Kind, vary: Mapping[str, Sequence[Any]], seeds: int) -> Sweep:
    """What was asked for, or what --resume names. UserError for a variant that no run can have."""
    if request.resume is not None:
        if len(base_values(request)) > 1 or not {*request.options} <= {"resume", "retry_failed", "dry_run", "json"}:
            raise UserError(f"--resume {request.resume} trains what was asked for then: give no other argument")
        sweep = read_sweep(Path(request.resume))
        if sweep.kind != kind:
            raise UserError(f"{request.resume} is a {sweep.kind}: gptlab {sweep.kind} --resume {request.resume}")
        require_different(sweep)
        return sweep
    require_positive("--seeds", seeds)
    if "run_dir" in request.overrides:
        raise UserError(f"--run-dir: {_NOT_VARIED['run_dir']}")
    replaced = replaced_lengths({name: values[0] for name, values in vary.items()})  # of a TOML file
    replaced |= {"model.n_layer"} if "depth" in vary else set()
    base = {name: value for name, value in base_values(request).items() if name not in replaced}
    variants = [*variants_of(vary).values()]  # the base alone may be no valid configuration
    first = base.pop("seed") if "seed" in base else config_of({**base, **variants[0]}).seed
    fields = "-".join(field.rpartition(".")[2] for field in vary) if kind == "sweep" else ""
    source = Path(request.from_run).name if request.from_run is not None else base["recipe"]
    own_name = re.sub(r"[^A-Za-z0-9._]+", "-", f"{source}-{fields}").strip("-.")
    folder = Path(ROOTS[kind]) / (request.options.get("name") or own_name)
    sweep = Sweep(folder, kind, base, vary, list(range(first, first + seeds)))
    require_different(sweep)
    return sweep


def base_values(request: RunRequest) -> dict[str, Any]:
    """The arguments of a request, without those of its command."""
    start = {"recipe": request.recipe or DEFAULT_RECIPE} if request.from_run is None else {"from": request.from_run}
    return start | {name: value for name, value in request.given.items() if name not in request.options}


def config_of(values: Values) -> RunConfig:
    """The configuration of these arguments on a machine of usual speed: timing this one would take a minute. UserError
    where no run can have it."""
    others = {name: value for name, value in values.items() if name != "recipe"}
    request = request_from_values(values.get("recipe"), others)
    if request.from_run is not None:
        return repeated_config(request, RunDirectory.open(Path(request.from_run)))
    return request.config(lambda _: Machine(device="cpu", flops_per_second=ASSUMED_FLOPS_PER_SECOND))


def require_different(sweep: Sweep) -> None:
    """UserError where a variant cannot be trained, or is another one."""
    seen: dict[str, str] = {}
    for name, changes in variants_of(sweep.vary).items():
        other = seen.setdefault(repr(config_of({**sweep.base, **changes, "seed": sweep.seeds[0]})), name)
        if other != name:
            raise UserError(f"the variants {other} and {name} are the same configuration")


def _other_validations(sweep: Sweep) -> Iterator[tuple[str, str]]:
    """In what the variants differ that decides what they validate on, and the arguments that make it the same."""
    configs = [config_of({**sweep.base, **changes}) for changes in variants_of(sweep.vary).values()]
    if any(_text_of(one.data) != _text_of(configs[0].data) for one in configs):
        yield "the text that validates", "one --data.val-source"
    counted = [(one.eval.tokens, one.eval.tokens and _tokenizer_of(one)) for one in configs]
    if counted.count(counted[0]) < len(counted):
        yield "eval.tokens, or in the tokenizer that counts them", "--eval.tokens none"


def _text_of(data: DataConfig) -> tuple[Any, ...]:
    held_out = data.source, data.hub_files, data.split, data.val_fraction
    return data.val_source or held_out, data.text_column


def _tokenizer_of(config: RunConfig) -> tuple[Any, ...]:
    learned = config.tokenizer.path is None and config.tokenizer.kind in ("bpe", "char")
    return config.tokenizer, (config.data.source, config.data.hub_files) if learned else None


def train_and_show(sweep: Sweep, options: Mapping[str, Any], result: Any) -> int:
    """Train, and print what `result` makes of the runs: (its text, its part of the JSON object)."""
    as_json = options.get("json", False)
    if options.get("dry_run", False):
        if sweep.file.exists():
            begin_sweep(sweep)  # finds that it is the same
        print(to_json(_ledger(sweep), indent=2) if as_json else "\n".join(_commands(sweep)))
        return 0
    console = sys.stderr if as_json else sys.stdout
    begin_sweep(sweep)
    with locked(sweep), Stop() as stop:
        _train(sweep, stop, options.get("retry_failed", False), console)
    text, figures = result(sweep, sides_of(sweep))
    print(to_json({**_ledger(sweep), **figures}, indent=2) if as_json else f"\n{text}")
    return _exit_code(sweep)


def _train(sweep: Sweep, stop: Stop, retry_failed: bool, console: Any) -> None:
    """Train, and show the progress."""
    variants, number = variants_of(sweep.vary), {run.name: n for n, run in enumerate(sweep.runs, start=1)}
    done = list(sweep.statuses().values()).count("finished")
    finished = f", {done} finished already" if done else ""
    counts = f"{_count(len(variants), 'variant')} x {_count(len(sweep.seeds), 'seed')} = {len(sweep.runs)} runs"
    print(f"{sweep.folder}: {counts}{finished}", file=console, flush=True)
    seconds, width, began = list[float](), max(map(len, number)), 0.0
    for run, code in train_sweep(sweep, stop, retry_failed=retry_failed):
        if code is None:
            began = time.monotonic()
            print(f"[{number[run.name]}/{len(number)}] {run.name:<{width}}  ", end="", file=console, flush=True)
            continue
        seconds.append(time.monotonic() - began)
        statuses = sweep.statuses()
        waiting = sum(status in _UNFINISHED for status in statuses.values())
        left = f", {_duration(waiting * sum(seconds) / len(seconds))} left" if waiting else ""
        print(f"{_ended(run, statuses[run.name], code)} ({_duration(seconds[-1])}{left})", file=console, flush=True)


def _ended(run: SweepRun, status: Status, code: int) -> str:
    if status == "finished":
        return f"val_bpb {_bpb(run)}"
    return f"failed with {code}: {why_failed(run)}" if status == "failed" else "stopped"


def _bpb(run: SweepRun) -> str:
    value = _figures(run)["val_bpb"]
    return f"{value:.4f}" if isinstance(value, float) else "unknown"


def _figures(run: SweepRun) -> dict[str, Any]:
    from gptlab.lab.run_record import read_run

    summary = read_run(run.path).summary if run.finished else {}
    return {"val_bpb": summary.get("val_bpb"), "training_seconds": summary.get("training_seconds")}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _ledger(sweep: Sweep) -> dict[str, Any]:
    """The runs of a sweep for --json."""
    failures, statuses = sweep.failures(), sweep.statuses()
    runs = [
        {
            "name": run.name, "path": str(run.path), "variant": run.variant, "seed": run.seed,
            "status": statuses[run.name], "exit_code": 0 if run.finished else failures.get(run.name), **_figures(run),
        }
        for run in sweep.runs
    ]  # fmt: skip
    return {"folder": str(sweep.folder), "vary": dict(sweep.vary), "seeds": list(sweep.seeds), "runs": runs}


def _commands(sweep: Sweep) -> Iterator[str]:
    """What --dry-run shows."""
    first, statuses = sweep.first_started or sweep.runs[0], sweep.statuses()
    for run in sweep.runs:
        words = ["--resume", str(run.path)]
        if not run.started:
            words = [*sweep.arguments(run, None if run is first else first), "--run-dir", str(run.path)]
        yield f"{statuses[run.name]:<8}  {program()} train {shlex.join(words)}"


def _exit_code(sweep: Sweep) -> int:
    """A run whose training failed is a result; one that could not be trained is an error."""
    statuses = sweep.statuses()
    ended = sum(status not in _UNFINISHED for status in statuses.values())
    again = f"{program()} {sweep.kind} --resume {shlex.quote(str(sweep.folder))}"
    if ended < len(statuses):
        print(f"stopped: {ended} of {len(statuses)} runs have ended; continue with {again}", file=sys.stderr)
        return EXIT_PREEMPTED
    codes = {name: code for name, code in sweep.failures().items() if statuses[name] == "failed"}
    errors = {name: code for name, code in codes.items() if code != EXIT_TRAINING_FAILED}
    for name, code in errors.items():
        retry = again if code == EXIT_USAGE else f"{again} --retry-failed"
        said = f"{name} ended with {code}: see {sweep.folder / name}.log, and try again with {retry}"
        print(f"gptlab: error: {said}", file=sys.stderr)
    return EXIT_USAGE if errors else 0


def _comparison(sweep: Sweep, sides: Mapping[str, Sequence[RunRecord]]) -> tuple[str, dict[str, Any]]:
    """compare's text and figures; each run's bits per byte where there is nothing to compare."""
    from gptlab.lab.compare import compare_runs, describe, figures

    notes = [f"{name}: {status}" for name, status in sweep.statuses().items() if status != "finished"]
    try:
        # Where the shorter of two lengths ends, the learning rate of the longer has not decayed.
        comparison = compare_runs(sides, "end" if lengths_of(sweep.vary) else None)
    except UserError as error:
        rows = [(run.name, _bpb(run)) for run in sweep.runs if run.finished]
        shown = [table([("run", "val_bpb"), *rows], "<>")] if rows else []
        reason = [f"not compared: {error}"] if len(sides) > 1 else []
        return "\n".join([*shown, *notes, *reason]), {"comparison": None, "not_compared": str(error)}
    text = "\n".join([describe(comparison), *([""] if notes else []), *notes])
    return text, {"comparison": figures(comparison), "not_compared": None}
