"""`gptlab tour [RUN]`: a walk through one run, from text to sample, with its own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gptlab.cli.arguments.parser import Positional, parse
from gptlab.config.errors import UserError
from gptlab.config.fields import checked_dataclass
from gptlab.lab.run_list import list_runs
from gptlab.report.run_facts import read_facts
from gptlab.report.text_curves import stdout_lacks_dots
from gptlab.report.tour import tour
from gptlab.runtime.files.plain_file import write_text_atomic
from gptlab.runtime.records.run_directory import require_outside_runs

DESCRIPTION = """\
Walk through one run: what happens between `gptlab train` and the first sample, which code does it, and what it did in \
this run. Text with numbers and pictures from the run's folder, in Markdown; docs/tour.md is an example."""


@checked_dataclass("--")
class TourArguments:
    run: Positional[str | None] = None
    """A run folder. None: the newest finished run in runs/."""
    out: Path | None = None
    """Where to write it, such as tour.md. None: print it."""


def main(argv: Sequence[str]) -> int:
    arguments = parse(TourArguments, argv, prog="gptlab tour", description=DESCRIPTION)
    if arguments.out is not None:
        require_outside_runs(arguments.out, "--out")
    facts = read_facts(arguments.run or _newest(Path("runs")))
    text = tour(facts, ascii=arguments.out is None and stdout_lacks_dots())
    if arguments.out is None:
        print(text, end="")
    else:
        write_text_atomic(arguments.out, text)
        print(f"tour: {arguments.out}")
    return 0


def _newest(folder: Path) -> Path:
    if folder.is_dir():
        for run in list_runs([folder]):
            if run.status == "finished" and run.tokens:
                return run.path
    raise UserError("there is no finished run in runs/: train one (`gptlab train`), or name one")
