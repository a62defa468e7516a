"""`gptlab lab ...`: experiments against a baseline, judged."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gptlab.app.run.run_request import RunArguments, RunRequest
from gptlab.cli.arguments.help import HELP_FLAGS
from gptlab.cli.arguments.parser import Positional, parse, read_request, run_subcommand
from gptlab.config.errors import UserError
from gptlab.config.fields import Positive, checked_dataclass, flag_of, require_positive
from gptlab.runtime.files.plain_file import to_json
from gptlab.runtime.processes.ending_signals import ended_by_signals
from gptlab.runtime.records.table import table

At = Literal["time", "steps", "tokens", "flops"]

if TYPE_CHECKING:
    from gptlab.lab.experiments.folder import Lab
    from gptlab.lab.experiments.ledger import Experiment

EXIT_CODES = {
    "keep": 0, "discard": 10, "inconclusive": 11, "no-op": 12, "invalid": 13, "crashed": 14, "timed-out": 15,
}  # fmt: skip
"""Of `try`, by verdict."""
_EXIT_CODES_TEXT = ", ".join(f"{code} {verdict}" for verdict, code in EXIT_CODES.items())

NOT_CONFIRMED = 10
"""The exit code of `promote`."""

USAGE = f"""\
usage: gptlab lab COMMAND NAME [ARGUMENTS]

Experiments against a baseline: trained with the same seeds for the same time, and judged from outside.

commands:
  new NAME RECIPE [--FIELD VALUE ...] --minutes 3 --seeds 3
                        train the baseline and measure its noise; the same command again continues
  try NAME [--FIELD VALUE ...] [--tree PATH] --why "..." [--expect -0.01]
                        judge one change of fields or code; the exit code is the verdict
  run NAME --agent 'COMMAND' [--experiments 100] [--until 8h]
                        a night: a command proposes, the lab judges
  run NAME --search SPACE.toml [--experiments 100] [--until 8h]
                        the same, and Optuna proposes values of fields
  run NAME              finish what an interrupt left in flight
  status NAME           the baseline and how many were tried
  log NAME              every experiment in a line
  report NAME [--plot FILE.png]
                        the frontier, what was tried by kind, what failed, what it cost
  show NAME N           one experiment
  best NAME             how to train the best so far
  promote NAME [N] [--seeds 5] [--depth D]
                        confirm the best, or experiment N, with fresh seeds on unread text, at a second size
  search NAME WORDS     was this tried before, and with which result?

NAME is a folder below labs/, or a path. Every command but new and run takes --json.

exit codes of try:  {_EXIT_CODES_TEXT}
exit codes of promote: 0 confirmed, {NOT_CONFIRMED} not confirmed
"""


@ended_by_signals()
def main(argv: Sequence[str]) -> int:
    judging = {"new": _new, "try": _try, "run": _run, "promote": _promote}
    reading = {"status": _status, "log": _log, "show": _show, "best": _best, "search": _search, "report": _report}
    if os.name == "nt" and argv and argv[0] in judging and not {*HELP_FLAGS} & set(argv):
        raise UserError(f"gptlab lab {argv[0]} does not work on Windows, which cannot limit what is judged: use WSL")
    return run_subcommand(argv, judging | reading, prog="gptlab lab", usage=USAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewArguments(RunArguments):
    seeds: Positive[int] = 3
    """Seeds with which the noise is measured."""
    at: At = "time"
    """What candidate and baseline have in common."""


@dataclass(frozen=True, kw_only=True)
class TryOptions:
    name: Positional[str]
    """The lab."""
    tree: str | None = None
    """A folder with a changed copy of the package, TREE/gptlab. None: the baseline's code."""
    why: str = ""
    """The hypothesis, in a sentence."""
    expect: float | None = None
    """The predicted difference in bits per byte; negative is better."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True)
class TryArguments(RunArguments, TryOptions):
    name: str = ""


TRY_DESCRIPTION = f"""\
Judge one change against the baseline: fields of `gptlab train --help-all`, given as --FIELD VALUE, or changed code, or
both. The exit code is the verdict: {_EXIT_CODES_TEXT}."""


def _new(argv: list[str]) -> int:
    name, rest = _named(argv, "new")
    request = read_request(
        rest, NewArguments, prog="gptlab lab new NAME", description="Train a baseline, and measure its noise.",
        refuses=["run_dir", "seed", "until_val_loss", "flops", "tokens_per_param", "init_from"],
    )  # fmt: skip
    require_positive("--seeds", request.options.get("seeds", 1))
    from gptlab.app.new_lab import new_lab
    from gptlab.lab.experiments.overview import status_lines
    from gptlab.lab.experiments.trial import measure_baseline
    from gptlab.runtime.records.console import Console

    with Console() as console:
        lab = new_lab(_path(name), request, rest, console)
        measure_baseline(lab, console.line)
    print("\n".join(status_lines(lab)))
    return 0


def _try(argv: list[str]) -> int:
    if {*HELP_FLAGS} & set(argv):
        parse(TryOptions, ["--help"], prog="gptlab lab try", description=TRY_DESCRIPTION)
    name, rest = _named(argv, "try")
    request = read_request(rest, TryArguments, prog="gptlab lab try NAME", description="")
    from gptlab.lab.experiments.folder import Lab
    from gptlab.lab.experiments.overview import as_json
    from gptlab.lab.experiments.proposal import Proposal, submit
    from gptlab.lab.experiments.trial import finish

    lab, options = Lab.open_to_judge(_path(name)), request.options
    tree = options.get("tree")
    proposal = Proposal(
        _fields(request), None if tree is None else Path(tree), options.get("why", ""), options.get("expect"),
        by=os.environ.get("USER", ""),
    )  # fmt: skip
    if not proposal.fields and tree is None:
        raise UserError("nothing is changed: give --FIELD VALUE, or --tree PATH with a changed copy of the package")
    number = submit(lab, proposal)
    try:
        one = finish(lab, number, _on_stderr)
    except (KeyboardInterrupt, SystemExit):
        _on_stderr(f"experiment {number} is in flight: gptlab lab run {shlex.quote(name)} finishes it")
        raise
    print(to_json(as_json(one, lab.ledger.experiments()), indent=2) if options.get("json") else answer(one))
    return EXIT_CODES[one.says]


def answer(one: Experiment) -> str:
    """A verdict in a line."""
    from gptlab.lab.experiments.overview import MAX_SHOWN, difference_text, edit_text, shown

    verdict = one.verdict or {}
    rule = f" [{verdict['rule']}]" if verdict.get("rule") else ""
    measured = f" {difference_text(one)} bpb," if difference_text(one) else ""
    change = shown(edit_text(one), MAX_SHOWN)
    return f"{one.number:04} {one.says}{rule}:{measured} {verdict.get('reason', '')} ({change})"


@checked_dataclass("--")
class RunNightArguments:
    name: Positional[str]
    """The lab."""
    agent: str | None = None
    """The command that proposes; see docs/lab.md. Without it and --search, what is in flight is finished."""
    search: Path | None = None
    """A TOML file of fields with ranges or choices, from which Optuna proposes; see docs/lab.md."""
    experiments: Positive[int] | None = None
    """Stop when the lab has so many experiments, those of earlier nights included."""
    until: str | None = None
    """Stop after this time: 8h, 30m or 90s. What proposes is ended; an experiment that has begun is finished."""
    agent_minutes: Positive[float] = 30.0
    """The longest that the command may think about one proposal."""
    launcher: Literal["here", "slurm"] = "here"
    """slurm: submit workers as jobs that do this on the same folder, and end."""
    workers: Positive[int] = 1
    """Jobs that --launcher slurm submits."""
    slurm: tuple[str, ...] = ()
    """Options of each job as NAME=VALUE: partition=gpu gpus_per_node=1 timeout_min=480."""


def _run(argv: list[str]) -> int:
    given = parse(RunNightArguments, argv, prog="gptlab lab run", description="A night of experiments.")
    from gptlab.lab.experiments.folder import Lab
    from gptlab.lab.experiments.trial import in_flight
    from gptlab.lab.workers.night import agent, nobody, run_night

    lab = Lab.open_to_judge(_path(given.name))
    lab.require_baseline()
    proposers = [one for one in (given.agent, given.search) if one is not None]
    if len(proposers) == 2 or not (proposers or in_flight(lab)):
        raise UserError("with no experiment in flight, give one of --agent 'COMMAND' and --search SPACE.toml, not both")
    if given.launcher == "slurm":
        return _submit(lab, given)
    until = None if given.until is None else time.monotonic() + _seconds(given.until)
    propose = nobody if given.agent is None else agent(given.agent, 60.0 * given.agent_minutes, until)
    if given.search is not None:
        from gptlab.lab.workers.search import read_space, search

        propose = search(read_space(given.search), _on_stderr)
    run_night(
        lab, propose, at_once=given.search is not None, experiments=given.experiments, say=_on_stderr,
        until=until, judged=lambda one: print(answer(one), flush=True),
    )  # fmt: skip
    return 0


def _submit(lab: Lab, given: RunNightArguments) -> int:
    """Submit jobs that run the same command without --launcher."""
    from gptlab.lab.workers import slurm

    if given.search is not None:
        from gptlab.lab.workers.search import read_space

        read_space(given.search)  # A wrong one is refused now, not in the queue.
    command = [sys.executable, "-m", "gptlab", "lab", "run", str(lab.path)]
    for name in ("agent", "search", "experiments", "until", "agent_minutes"):
        if (value := getattr(given, name)) is not None:
            command += [flag_of(name), str(value)]
    logs = lab.path / "work" / "jobs"
    jobs = slurm.submit_workers(command, given.workers, logs=logs, options=slurm.read_options(given.slurm))
    print("\n".join(f"job {job.job_id}" for job in jobs))
    print(f"their output is in {logs}; gptlab lab status {given.name} shows how far they are")
    return 0


@checked_dataclass("--")
class LabArguments:
    name: Positional[str]
    """The lab."""
    json: bool = False
    """Print JSON, numbers unrounded."""


@checked_dataclass("--")
class ShowArguments(LabArguments):
    number: Positional[int]
    """The experiment."""


@checked_dataclass("--")
class SearchArguments(LabArguments):
    words: Positional[tuple[str, ...]]
    """All of them must occur."""


def _status(argv: list[str]) -> int:
    given = parse(LabArguments, argv, prog="gptlab lab status", description="The baseline, and how many were tried.")
    from gptlab.lab.experiments.overview import state, status_lines

    lab = _opened(given)
    print(to_json(state(lab), indent=2) if given.json else "\n".join(status_lines(lab)))
    return 0


def _log(argv: list[str]) -> int:
    given = parse(LabArguments, argv, prog="gptlab lab log", description="Every experiment in a line.")
    from gptlab.lab.experiments.overview import proposals

    _print_experiments(given, proposals)
    return 0


def _search(argv: list[str]) -> int:
    given = parse(SearchArguments, argv, prog="gptlab lab search", description="Experiments that mention all words.")
    from gptlab.lab.experiments.overview import mentioning

    _print_experiments(given, lambda experiments: mentioning(experiments, given.words))
    return 0


def _print_experiments(given: LabArguments, chosen: Callable[[Mapping[int, Experiment]], list[Experiment]]) -> None:
    from gptlab.lab.experiments import overview

    found = chosen(experiments := _opened(given).ledger.experiments())
    if given.json:
        print(to_json([overview.as_json(one, experiments) for one in found], indent=2))
    elif found:
        print(table(overview.log_rows(found), ">><><<"))
    else:
        print("no experiment")


def _show(argv: list[str]) -> int:
    given = parse(ShowArguments, argv, prog="gptlab lab show", description="One experiment.")
    from gptlab.lab.experiments.overview import as_json, details

    lab = _opened(given)
    experiments = lab.ledger.experiments()
    if (one := experiments.get(given.number)) is None:
        raise UserError(f"there is no experiment {given.number} in {lab.path}")
    print(to_json(as_json(one, experiments), indent=2) if given.json else "\n".join(details(lab, one)))
    return 0


def _best(argv: list[str]) -> int:
    given = parse(LabArguments, argv, prog="gptlab lab best", description="How to train the best so far.")
    from gptlab.lab.experiments.overview import best

    found, of = best(_opened(given)), ", of the judge's half of the validation text"
    text = "\n".join(f"{key:<11} {value}{of * (key == 'bpb')}" for key, value in found.items())
    print(to_json(found, indent=2) if given.json else text)
    return 0


@checked_dataclass("--")
class ReportArguments(LabArguments):
    plot: Path | None = None
    """Draw the frontier into this file (.png or .svg). Needs matplotlib."""


def _report(argv: list[str]) -> int:
    given = parse(ReportArguments, argv, prog="gptlab lab report", description="What the lab has found, in one page.")
    from gptlab.lab.experiments.report import describe, report

    lab = _opened(given)
    figures = report(lab)
    if given.plot is not None:
        from gptlab.lab.plot import plot_frontier

        plot_frontier(figures, given.plot)
    print(to_json(figures, indent=2) if given.json else "\n".join(describe(lab, figures)))
    return 0


@checked_dataclass("--")
class PromoteArguments(LabArguments):
    number: Positional[int | None] = None
    """The experiment. None: the baseline as it is now."""
    seeds: Positive[int] = 5
    """Pairs of runs, at most. More may be added later: the evidence is valid whenever it is looked at."""
    depth: Positive[int] | None = None
    """Confirm it with this depth, too."""


def _promote(argv: list[str]) -> int:
    given = parse(
        PromoteArguments, argv, prog="gptlab lab promote",
        description="Confirm an experiment against experiment 0: fresh seeds, and text that nothing else reads.",
    )  # fmt: skip
    from gptlab.lab.experiments.folder import Lab
    from gptlab.lab.experiments.promote import promote, sentence

    lab = Lab.open_to_judge(_path(given.name))
    answers = promote(lab, given.number, seeds=given.seeds, depth=given.depth, say=_on_stderr)
    confirmed = all(answer["confirmed"] for answer in answers)
    result = {"confirmed": confirmed, "answers": answers, "sentence": sentence(answers)}
    print(to_json(result, indent=2) if given.json else sentence(answers))
    return 0 if confirmed else NOT_CONFIRMED


def _opened(given: LabArguments) -> Lab:
    from gptlab.lab.experiments.folder import Lab

    return Lab.open(_path(given.name))


def _named(argv: list[str], command: str) -> tuple[str, list[str]]:
    """The name of the lab, which comes first, and the other words."""
    if {*HELP_FLAGS} & set(argv):
        return "NAME", argv
    if not argv or argv[0].startswith("-"):
        raise UserError(f"gptlab lab {command} needs NAME first, the name of a lab (see gptlab lab --help)")
    return argv[0], argv[1:]


def _path(name: str) -> Path:
    """A name is a folder below labs/; anything with a separator is a path."""
    return Path(name) if os.sep in name or Path(name, "lab.json").is_file() else Path("labs", name)


def _fields(request: RunRequest) -> dict[str, object]:
    """The fields that are proposed. UserError for arguments that say what to train, or for how long."""
    if request.recipe is not None or request.gives_length or request.recipe_arguments:
        raise UserError("the lab decides recipe and length: propose fields, such as --optim.muon.lr 0.03")
    return ({} if request.depth is None else {"depth": request.depth}) | dict(request.overrides)


def _seconds(text: str) -> float:
    """8h, 30m, 90s."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    with suppress(KeyError, ValueError):
        if 0 < (seconds := float(text[:-1]) * units[text[-1:]]) < math.inf:
            return seconds
    raise UserError(f"--until {text}: give a time with its unit, such as 8h, 30m or 90s")


def _on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
