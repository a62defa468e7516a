"""report.md: the same for a terminal or a repository. Texts from runs are untrusted: they stand in code, fenced by more
backticks than they have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gptlab.config.errors import printable
from gptlab.report.curves import evenly_chosen
from gptlab.report.overlay import Overlay
from gptlab.report.run_facts import VALIDATION_COLUMNS, RunFacts, duration
from gptlab.report.text_curves import text_curve
from gptlab.report.token_fate import token_fate

MAX_VALIDATIONS = 40
_SPACE = "\n\t"


def run_text(facts: RunFacts) -> str:
    """The report of one run."""
    parts = [
        f"# {code(facts.name)}",
        prose(facts.sentence()),
        _table(("", ""), facts.figures()),
        "Bits per byte are those of the validation text: lower is better, and 8 is no knowledge at all.",
    ]
    if curve := bpb_curve(facts):
        parts += ["## Validation bits per byte", fenced(curve), _validations(facts)]
    if total := sum(seconds for _, seconds in facts.time()):
        rows = [(part, duration(seconds), f"{100 * seconds / total:.1f}%") for part, seconds in facts.time()]
        parts += ["## Where the time went", _table(("part", "time", "share"), rows)]
    for prompt, samples in facts.samples().items():
        parts += [f"## Sample at step {samples[-1].step:,}", fenced(prompt + samples[-1].text)]
    if tasks := facts.core():
        rows = [(task.name, f"{task.accuracy:.3f}", f"{task.centered:.3f}") for task in tasks]
        parts += ["## CORE by task", _table(("task", "accuracy", "corrected for guessing"), rows)]
    if tokens := token_fate(facts):
        parts += ["## Tokens", _table(("", ""), tokens)]
    if events := facts.events():
        parts += ["## Events", _table(("when", "what"), events)]
    if changes := facts.changes():
        parts += ["## What differs from the recipe", _table(("field", "here", "in the recipe"), changes)]
    parts += ["## How to repeat it", *(f"{what}:\n\n{fenced(command)}" for what, command in facts.commands())]
    return "\n\n".join(part for part in parts if part) + "\n"


def overlay_text(overlay: Overlay) -> str:
    """The report of several runs."""
    parts = [f"# {overlay.title}", prose(overlay.sentence())]
    if rows := overlay.group_rows():
        parts += ["## Configurations", _table(overlay.GROUP_COLUMNS, rows)]
    parts += ["## Runs", _table(overlay.RUN_COLUMNS, overlay.run_rows())]
    return "\n\n".join(parts) + "\n"


def bpb_curve(facts: RunFacts, *, columns: int = 72, ascii: bool = False) -> str:
    """Validation bits per byte against steps, of characters; empty for fewer than two validations."""
    validated = facts.metrics.validations
    return text_curve(
        validated["step"].tolist(), validated["val_bpb"].tolist(), columns=columns, unit="steps", ascii=ascii
    )


def code(text: str) -> str:
    """On one line, as code."""
    text = " ".join(printable(text, _SPACE).split()) or " "
    fence = "`" * (_longest_fence(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def fenced(text: str) -> str:
    """A block of code."""
    fence = "`" * max(3, _longest_fence(text) + 1)
    return f"{fence}\n{printable(text, _SPACE).rstrip()}\n{fence}"


def prose(text: str) -> str:
    """On one line, with what Markdown and HTML would read as their own escaped."""
    return re.sub(r"([\\`*\[\]<>|#&])", r"\\\1", " ".join(printable(text, _SPACE).split()))


def _longest_fence(text: str) -> int:
    return max((len(ticks) for ticks in re.findall("`+", text)), default=0)


def _validations(facts: RunFacts) -> str:
    """A table of at most MAX_VALIDATIONS of them, the first and the last among these."""
    return _table(VALIDATION_COLUMNS, evenly_chosen(facts.validation_rows(), MAX_VALIDATIONS))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, so that it can be read as it is. Empty without rows."""
    cells = [[prose(text) for text in row] for row in rows]
    if not cells:
        return ""
    widths = [max(3, *map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [columns, ["-" * width for width in widths], *cells]
    return "\n".join(
        f"| {' | '.join(f'{text:<{width}}' for text, width in zip(line, widths, strict=True))} |" for line in lines
    )
