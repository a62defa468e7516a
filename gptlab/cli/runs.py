"""`gptlab runs`: a table of run folders; `gptlab runs prune` deletes some, or their checkpoints."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gptlab.cli.arguments.help import default_text
from gptlab.cli.arguments.parser import Positional, parse
from gptlab.config.errors import UserError, printable
from gptlab.config.fields import NotNegative, checked_dataclass
from gptlab.lab.removals import Removal, removals, remove
from gptlab.lab.run_list import ListedRun, list_runs, select_runs, sort_runs
from gptlab.runtime.files.cache_contents import Item
from gptlab.runtime.files.plain_file import to_json
from gptlab.runtime.records.console import short_number
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.runtime.records.table import table

LIST = """\
List the runs in and below folders (runs/), newest first: how each ended, validation bits per byte, tokens, seconds of \
training, disk space, and what differs from its recipe. `gptlab runs prune` deletes some of them."""
PRUNE = """\
Delete runs, or their checkpoints, to free disk space. Shows what it would delete, and asks. Runs that can be resumed, \
imported models and folders with other files are kept."""

Removable = TypeVar("Removable", Removal, Item)

_NOT_SHOWN = ("runtime.", "checkpoint.", "sample.", "eval.", "faults.", "log.", "data.cache_dir")
_MAX_VALUE_CHARACTERS = 40
_MAX_ABOUT_CHARACTERS = 160
_CURVE = 10
"""Characters of the curve of bits per byte."""


@checked_dataclass("--")
class RunsArguments:
    folders: Positional[tuple[str, ...]] = ()
    """Folders that hold runs, at any depth. None: runs."""
    sort: str | None = None
    """A column: run, status, val_bpb, tokens, seconds, disk, recipe, depth, start. None: newest first."""
    reverse: bool = False
    """Sort in descending order."""
    where: tuple[str, ...] = ()
    """FIELD=VALUE, of a column, a field of the configuration or a length: status=finished, seed=7, steps=500.
    VALUE may have wildcards (recipe='nanochat*'). Of several, all must hold."""
    json: bool = False
    """Print one JSON object, numbers unrounded."""


@checked_dataclass("--")
class PruneArguments:
    folders: Positional[tuple[str, ...]] = ()
    """Folders that hold runs, at any depth. None: runs."""
    checkpoints: bool = False
    """Delete the checkpoints of finished runs, but of the best, and keep their records."""
    keep_best: NotNegative[int] | None = None
    """How many finished runs are the best: those with the lowest val_bpb on the same data with the same
    eval.tokens. With --checkpoints 1 where it is not given; without it, the folders of the others are deleted."""
    failed: bool = False
    """Delete the folders of runs that failed, were stopped or were killed before their first checkpoint."""
    where: tuple[str, ...] = ()
    """Only these runs: FIELD=VALUE, as in `gptlab runs`."""
    yes: bool = False
    """Do not ask."""


def main(argv: Sequence[str]) -> int:
    if [*argv[:1]] == ["prune"]:
        return prune(argv[1:])
    arguments = parse(RunsArguments, argv, prog="gptlab runs", description=LIST)
    runs = select_runs(list_runs(_folders(arguments.folders)), arguments.where)
    if arguments.sort is not None:
        runs = sort_runs(runs, arguments.sort, reverse=arguments.reverse)
    elif arguments.reverse:
        runs.reverse()
    if arguments.json:
        print(to_json({"runs": [_figures(run) for run in runs]}, indent=2))
    else:
        from gptlab.report.text_curves import stdout_lacks_dots

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
        print(printable("\n".join(_lines(runs, width, curves=not stdout_lacks_dots())) or "no runs"))
    return 0


def prune(argv: Sequence[str]) -> int:
    """Exit code 0 also where nothing is deleted since the answer was no."""
    arguments = parse(PruneArguments, argv, prog="gptlab runs prune", description=PRUNE)
    if not (arguments.checkpoints or arguments.failed or arguments.keep_best is not None):
        raise UserError(
            "say what to delete: --checkpoints (of all finished runs but the best), --failed (runs that ended before "
            "their first checkpoint), or --keep-best N (the folders of all other finished runs)"
        )
    runs = select_runs(list_runs(_folders(arguments.folders)), arguments.where)
    chosen = removals(runs, keep_best=arguments.keep_best, failed=arguments.failed, checkpoints=arguments.checkpoints)
    if not chosen:
        print("nothing to delete")
        return 0
    rows = [
        (_cell(one.run.path), "all" if one.whole else "checkpoints", disk_text(one.bytes), one.reason) for one in chosen
    ]
    print(printable(table([("run", "delete", "disk", "why"), *rows], "<<><")))
    total = f"{disk_text(sum(one.bytes for one in chosen))} of {len(chosen)} run{'s' * (len(chosen) != 1)}"
    if not (arguments.yes or confirmed(f"delete {total}? [y/N] ")):
        print("nothing was deleted")
        return 0
    freed, kept = deleted(chosen, remove)
    print(f"deleted {disk_text(freed)}")
    for problem in kept:
        print(printable(f"gptlab: error: {problem}"), file=sys.stderr)
    return 2 if kept else 0


def confirmed(question: str) -> bool:
    """Ask at the terminal. UserError where there is none."""
    if not sys.stdin.isatty():
        raise UserError("nothing was deleted: there is no terminal to ask; --yes deletes without asking")
    print(question, end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def deleted(chosen: Sequence[Removable], delete: Callable[[Removable], None]) -> tuple[int, list[str]]:
    """Bytes that were deleted, and why others were not."""
    freed, kept = 0, []
    for one in chosen:
        size = one.bytes
        try:
            delete(one)
            freed += size
        except UserError as error:
            kept.append(str(error))
    return freed, kept


def _folders(given: Sequence[str]) -> list[Path]:
    return [Path(folder) for folder in given or ("runs",)]


def _lines(runs: Sequence[ListedRun], width: int, *, curves: bool = False) -> Iterator[str]:
    """A table; where it is wider than the terminal, what a run is has a line of its own, and then its name too.
    `curves`: with one of bits per byte before it."""
    if not runs:
        return
    rows = [("run", "status", "val_bpb", "tokens", "seconds", "disk")]
    rows += [
        (
            _cell(run.path),
            _cell(run.status),
            "" if run.val_bpb is None else f"{run.val_bpb:.4f}",
            "" if run.tokens is None else short_number(run.tokens),
            "" if run.training_seconds is None else f"{run.training_seconds:,.0f}",
            disk_text(run.disk_bytes),
        )
        for run in runs
    ]
    lines, above = table(rows, "<<>>>>").split("\n"), [""] * len(rows)
    if max(map(len, lines)) > width:
        above[1:] = [f"{name}\n" for name, *_ in rows[1:]]
        lines = table([rows[0], *(("", *figures) for _, *figures in rows[1:])], "<<>>>>").split("\n")
    common = set.intersection(*(set(_changes(run)) for run in runs))
    about = ["recipe, and what differs from it", *(_cut(_about(run, common), _MAX_ABOUT_CHARACTERS) for run in runs)]
    if curves:
        from gptlab.report.curves import bpb_history
        from gptlab.report.text_curves import sparkline

        shown = ["curve", *(sparkline(bpb_history(RunDirectory(run.path).metrics_path), _CURVE) for run in runs)]
        about = [f"{curve:<{_CURVE}}  {text}" for curve, text in zip(shown, about, strict=True)]
    longest = max(map(len, lines))
    on_one_line = longest + 2 + max(map(len, about)) <= width
    for number, (name, line, text) in enumerate(zip(above, lines, about, strict=True)):
        if on_one_line:
            yield f"{name}{line:<{longest}}  {text}"
        else:
            yield f"{name}{line}\n    {_cut(text, max(width - 4, 40))}" if number else line


def _about(run: ListedRun, common: Collection[str]) -> str:
    """Recipe, depth, length, and the changes that decide what is trained: last those that all listed runs have."""
    if run.problem is not None:
        return _cell(run.problem)
    if run.recipe == "imported":  # what its other fields say was never trained
        return f"imported depth={_cell(run.fields.get('model.n_layer'))}"
    length = f"{run.fields.get('horizon.unit')}={_value(run.fields.get('horizon.amount'))}"
    words = [f"{run.recipe} depth={run.fields.get('model.n_layer')} {length}"]
    if run.changes is None:
        words.append("(an unknown recipe)")
    return _cell(" ".join([*words, *sorted(_changes(run), key=lambda change: change in common)]))


def _changes(run: ListedRun) -> list[str]:
    """FIELD=VALUE, without what decides only how a run is watched, saved and computed; --json has all."""
    changes = run.changes or {}
    return [f"{name}={_value(value)}" for name, value in changes.items() if not name.startswith(_NOT_SHOWN)]


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 3]}..."


def _value(value: Any) -> str:
    text = default_text(tuple(value) if isinstance(value, list) else value) or ("none" if value is None else "()")
    return _cut(text, _MAX_VALUE_CHARACTERS)


def disk_text(count: int) -> str:
    units = ((1e9, "GB"), (1e6, "MB"))
    return next((f"{count / size:.1f} {unit}" for size, unit in units if count >= size), f"{count / 1e3:.0f} kB")


def _cell(value: object) -> str:
    """On one line of a table."""
    return printable(str(value), keep="")


def _figures(run: ListedRun) -> Mapping[str, Any]:
    return {
        "path": str(run.path), "status": run.status, "problem": run.problem, "start": run.start or None,
        "recipe": run.recipe, "depth": run.fields.get("model.n_layer"),
        "horizon": {name: run.fields.get(f"horizon.{name}") for name in ("amount", "unit")},
        "changes": json.loads(to_json(run.changes)), "val_bpb": run.val_bpb, "tokens": run.tokens,
        "training_seconds": run.training_seconds, "disk_bytes": run.disk_bytes,
        "checkpoint_bytes": run.checkpoint_bytes,
    }  # fmt: skip
