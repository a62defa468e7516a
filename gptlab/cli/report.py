"""`gptlab report RUN ...`: what runs did, as a page to look at (report.html) and as text (report.md)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from gptlab.cli.arguments.parser import Positional, parse
from gptlab.config.errors import UserError, printable
from gptlab.config.fields import checked_dataclass
from gptlab.lab.sides import find_runs
from gptlab.report.markdown import bpb_curve, overlay_text, run_text
from gptlab.report.overlay import Overlay
from gptlab.report.page import overlay_page, run_page
from gptlab.report.run_facts import RunFacts, read_facts
from gptlab.report.text_curves import stdout_lacks_dots
from gptlab.runtime.files.plain_file import to_json, write_text_atomic
from gptlab.runtime.records.run_directory import require_outside_runs

DESCRIPTION = """\
Write report.html, one file with curves, samples, configuration and provenance that needs no network, and report.md. \
One run is reported in its own folder; several are drawn over each other, seeds of one configuration as a band."""

_PAGE = "report.html"
_CURVE_COLUMNS = 72


@checked_dataclass("--")
class ReportArguments:
    runs: Positional[tuple[str, ...]] = ()
    """Run folders, folders of runs, or quoted patterns ('runs/new-*')."""
    out: Path | None = None
    """Where to write the page; the text goes beside it, as .md. None: report.html in the folder of the run, or, for
    several runs, in the current folder."""
    json: bool = False
    """Print one JSON object: the files that were written."""


def main(argv: Sequence[str]) -> int:
    """Print the curve of one run, and which files were written."""
    arguments = parse(ReportArguments, argv, prog="gptlab report", description=DESCRIPTION)
    if not arguments.runs:
        raise UserError("name a run, or several: gptlab report runs/NAME")
    runs = [read_facts(record.path) for record in find_runs(arguments.runs)]
    html = arguments.out or Path(runs[0].record.path if len(runs) == 1 else ".", _PAGE)
    if html.suffix == ".md":
        raise UserError(f"--out {html} names the page, such as {html.with_suffix('.html')}; the text goes beside it")
    if arguments.out is not None and html.name != _PAGE:
        require_outside_runs(html, "--out")
    page, text = (run_page(runs[0]), run_text(runs[0])) if len(runs) == 1 else _overlay(runs)
    write_text_atomic(html, page)
    write_text_atomic(html.with_suffix(".md"), text)
    if arguments.json:
        written = {"html": str(html), "markdown": str(html.with_suffix(".md"))}
        print(to_json({"runs": [str(run.record.path) for run in runs], **written}, indent=2))
    else:
        curve = terminal_curve(runs[0]) if len(runs) == 1 else ""
        print(printable(f"{curve}report: {html}"))
    return 0


def _overlay(runs: Sequence[RunFacts]) -> tuple[str, str]:
    overlay = Overlay(runs)
    return overlay_page(overlay), overlay_text(overlay)


def terminal_curve(facts: RunFacts) -> str:
    """Validation bits per byte, with a title, as wide as the terminal up to 72 columns; empty where there is none."""
    columns = min(_CURVE_COLUMNS, shutil.get_terminal_size().columns)
    curve = bpb_curve(facts, columns=columns, ascii=stdout_lacks_dots())
    return f"validation bits per byte\n{curve}\n" if curve else ""
