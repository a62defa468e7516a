"""`gptlab compare RUN RUN ...`: which runs are better, by how much, and whether that may be noise."""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gptlab.cli.arguments.parser import Positional, parse
from gptlab.config.errors import UserError, cannot, printable
from gptlab.config.fields import checked_dataclass
from gptlab.lab.run_record import At, RunRecord
from gptlab.lab.sides import find_runs
from gptlab.runtime.files.plain_file import to_json
from gptlab.runtime.records.run_directory import require_outside_runs

DESCRIPTION = """\
Compare runs by validation bits per byte: at equal steps, tokens, seconds and FLOPs, with 95% intervals and p-values \
over seeds. Runs that differ by seed alone are one side, and the first side is the baseline."""


@checked_dataclass("--")
class CompareArguments:
    runs: Positional[tuple[str, ...]] = ()
    """Run folders, folders of runs, or quoted patterns ('runs/new-*'), to be grouped by their fields."""
    a: tuple[str, ...] = ()
    """The baseline's runs, whatever their fields are. Needs --b."""
    b: tuple[str, ...] = ()
    """The candidate's runs."""
    at: At | None = None
    """The sentence and the plot are of equal steps, tokens, seconds or FLOPs, or the sentence is of the final values
    (end). None: what the runs' length is counted in."""
    json: bool = False
    """Print one JSON object, numbers unrounded."""
    csv: Path | None = None
    """Write the rows of the tables to this file."""
    plot: Path | None = None
    """Draw the curves, and their difference, into this file (.png or .svg). Needs matplotlib."""


def main(argv: Sequence[str]) -> int:
    """Print the comparison on stdout."""
    arguments = parse(CompareArguments, argv, prog="gptlab compare", description=DESCRIPTION)
    if bool(arguments.runs) == bool(arguments.a or arguments.b) or bool(arguments.a) != bool(arguments.b):
        raise UserError("name runs (gptlab compare RUN RUN ...), or two sides with --a and --b")
    # Imported here: scipy takes a second, which --help and wrong usage need not wait for.
    from gptlab.lab.compare import compare_runs, describe, figures, rows_of
    from gptlab.lab.plot import plot_comparison, require_plot
    from gptlab.lab.sides import group_by_seed

    if arguments.csv is not None:
        require_outside_runs(arguments.csv, "--csv")
    if arguments.plot is not None:
        require_plot(arguments.plot)
    if arguments.runs:
        sides = group_by_seed(_runs_of(arguments.runs))
    else:
        sides = {"A": _runs_of(arguments.a), "B": _runs_of(arguments.b)}
    comparison = compare_runs(sides, arguments.at)
    if arguments.csv is not None:
        rows = [*rows_of(comparison)]
        write_csv(arguments.csv, [*rows[0]] if rows else [], rows)
    if arguments.plot is not None:
        plot_comparison(comparison, arguments.plot)
    print(to_json(figures(comparison), indent=2) if arguments.json else describe(comparison))
    return 0


def _runs_of(words: Sequence[str]) -> list[RunRecord]:
    """The runs that `words` name. Of folders and patterns, a warning names those without a result, and they are left
    out: a folder may hold imported models, and runs that have just begun."""
    found, named = find_runs(words), {Path(word).resolve() for word in words}
    left_out = [run.path for run in found if not run.has_result and run.path.resolve() not in named]
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        print(printable(f"warning: left out, without a validation to compare: {left_out[0]}{more}"), file=sys.stderr)
    return [run for run in found if run.path not in left_out]


def write_csv(path: Path, columns: Collection[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """The names of the columns as the first line; an unknown number is an empty cell."""
    with cannot(f"write {path}"), path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
