"""Sides of runs compared with the first of them, the baseline; as plain data, text, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gptlab.config.errors import printable
from gptlab.config.length import LENGTH_FIELDS
from gptlab.lab.contrast import END, Contrast, Multiplier, Row, contrasts_of, multipliers_of, sizes_of
from gptlab.lab.run_record import AXES, At, RunRecord
from gptlab.lab.sides import FieldDifference, Sides, field_differences, require_comparable, warnings_of
from gptlab.lab.statistics import MAX_SEEDS, Difference, holm
from gptlab.runtime.records.table import table

NAMES = {"steps": "steps", "tokens": "tokens", "seconds": "seconds", "flops": "FLOPs", "end": "the end"}
MAX_VALUE_CHARACTERS = 24
MAX_SIDE_CHARACTERS = 9
"""Longer names of sides are not the headings of columns, which 80 characters have to hold."""


@dataclass(frozen=True, slots=True)
class Comparison:
    sides: Mapping[str, Sequence[RunRecord]]
    """The first is the baseline."""
    at: At
    """What the verdicts are of."""
    fields: Sequence[FieldDifference]
    warnings: Sequence[str]
    contrasts: Sequence[Contrast]
    """Each candidate against the baseline; size by size where both have several."""
    multipliers: Sequence[Multiplier]


def compare_runs(sides: Sides, at: At | None = None) -> Comparison:
    """The first side is the baseline. The verdicts are of equal amounts of `at`, or of the ends; None: of what the
    horizon of all runs is counted in, or of their ends where that is none of the axes. UserError where runs cannot be
    compared."""
    require_comparable(sides)
    units = [run.fields.get("horizon.unit") for runs in sides.values() for run in runs]
    at = at or next((axis for axis in AXES if units.count(axis) == len(units)), None) or END
    baseline, *candidates = sides.items()
    contrasts = [contrast for candidate in candidates for contrast in contrasts_of(baseline, candidate, at)]
    p_values = [c.judged.difference.p_value if c.judged.difference else math.nan for c in contrasts]
    return Comparison(
        sides=sides,
        at=at,
        fields=field_differences(sides),
        warnings=[*warnings_of(sides), *_sizes_alone(sides), *_other_lengths(sides, at)],
        contrasts=[
            replace(contrast, p_adjusted=p, contrasts=len(contrasts))
            for contrast, p in zip(contrasts, holm(p_values), strict=True)
        ],
        multipliers=[one for candidate in candidates for one in multipliers_of(baseline, candidate)],
    )


def _sizes_alone(sides: Sides) -> Iterator[str]:
    """Sizes that only one side has, where sizes are compared one by one."""
    (baseline, base), *candidates = ((name, [*sizes_of(runs)]) for name, runs in sides.items())
    for name, own in candidates:
        alone = [size for size in (*base, *own) if (size in base) != (size in own)]
        if alone and len(base) + len(own) > 2:
            yield f"only one of {baseline} and {name} has {'; '.join(alone)}: sizes are compared one by one"


def _other_lengths(sides: Sides, at: At) -> Iterator[str]:
    if _lengths_differ(sides):
        meaning = "their budgets differ at the end" if at == END else "--at end compares their final values"
        yield f"the sides have different lengths: {meaning}"


def _lengths_differ(sides: Sides) -> bool:
    return any(field.name in LENGTH_FIELDS for field in field_differences(sides))


def sentence(contrast: Contrast) -> str:
    """The verdict in one sentence."""
    row, name, base = contrast.judged, contrast.candidate, contrast.baseline
    found, verdict = row.difference, contrast.verdict
    size = f"{contrast.size}: " if contrast.size else ""
    where = f"at equal {NAMES[row.at]}"
    if row.at == END:
        differ = _lengths_differ({base: contrast.baseline_runs, name: contrast.candidate_runs})
        where = f"at the end{' of runs of different lengths' * differ}"
    if row.amount == 0:
        where = "before the first step"
    if found is None:
        return f"{size}{name} against {base} is unknown {where}: {row.unknown}"
    if verdict == "broken":
        sides = (base, contrast.baseline_runs), (name, contrast.candidate_runs)
        counts = [f"{sum(str(r.path) in row.broken for r in runs)} of {len(runs)} runs of {of}" for of, runs in sides]
        return f"{size}no mean {where}, since {' and '.join(counts)} broke: {', '.join(row.broken)}"
    seeds = f"{row.seeds[0]} and {row.seeds[1]} seeds, not paired"
    if found.pairs:
        seeds = f"{found.pairs} paired seed{'s' * (found.pairs > 1)}"
    if verdict == "identical":
        return f"{size}{name} and {base} have the same bpb {where}, to the last bit ({seeds})"
    if not math.isfinite(found.half_width):
        few = "a side" if row.seeds == (1, 1) else f"of {base if row.seeds[0] == 1 else name}"
        return f"{size}one run {few} says nothing about noise: {name} - {base} is {_signed(found)} bpb {where}"
    adjusted = f" after Holm for {contrast.contrasts} comparisons" if contrast.contrasts > 1 else ""
    basis = f"bpb {where} ({seeds}, {_p_text(contrast.p_adjusted, 'p ')}{adjusted})"
    if verdict != "undecided":
        return f"{size}{name} is {verdict} than {base} by {_signed(found).lstrip('-+')} ± {_width(found)} {basis}"
    needed = contrast.seeds_needed
    about = f"about {needed:,}" if needed else f"more than {MAX_SEEDS:,}"
    return (
        f"{size}{name} is not distinguishable from {base}: {_signed(found)} ± {_width(found)} {basis}; {about} seeds"
        f"{'' if found.pairs else ' a side'} would be needed"
    )


def describe(comparison: Comparison) -> str:
    """As text of 80 columns where names allow: sides, fields, warnings, a table and a sentence for each contrast, and
    compute multipliers."""
    parts = [
        table([(name, _runs_text(runs)) for name, runs in comparison.sides.items()], "<<"),
        _fields_text(comparison),
        "\n".join(f"warning: {warning}" for warning in comparison.warnings),
        *(f"{_rows_text(contrast)}\n\n{sentence(contrast)}" for contrast in comparison.contrasts),
    ]
    if not comparison.contrasts:
        parts.append("no size is on both sides; a compute multiplier needs two sizes or more on each")
    if len(comparison.contrasts) > 1:
        parts.append("p-values of the tables are not adjusted; those of the sentences are.")
    parts.append(_multipliers_text(comparison.multipliers))
    return printable("\n\n".join(part for part in parts if part))


def _runs_text(runs: Sequence[RunRecord]) -> str:
    seeds = sorted({run.seed for run in runs})
    shown = ", ".join(map(str, seeds[:8])) + ", ..." * (len(seeds) > 8)
    others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return f"{runs[0].path}{others}, seed{'s' * (len(seeds) > 1)} {shown}"


def _fields_text(comparison: Comparison) -> str:
    if not comparison.fields:
        return "no field differs between the sides"
    rows = [
        (field.name, *(_shortened(", ".join(map(json.dumps, values))) for values in field.values.values()))
        for field in comparison.fields
    ]
    return table([("field", *comparison.sides), *rows], "<" * (1 + len(comparison.sides)))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 3]}..."


def _rows_text(contrast: Contrast) -> str:
    names = contrast.baseline, contrast.candidate
    short = max(map(len, names)) <= MAX_SIDE_CHARACTERS
    heading = ("at equal", "amount", *(names if short else ("baseline", "candidate")), "difference, 95%", "p")
    lines = [table([heading, *map(_row_text, contrast.rows)], "<>>>>>")]
    if contrast.size or not short:
        lines.insert(
            0, f"{contrast.candidate} against {contrast.baseline}{f', {contrast.size}' if contrast.size else ''}"
        )
    lines += [f"{NAMES[row.at]}: ? since {row.unknown}" for row in contrast.rows if row.unknown]
    lines += _notes(contrast, "interpolated", "values of {} are interpolated between two validations")
    lines += _notes(contrast, "before_end", "runs of {} train beyond this, so their learning rate had not decayed")
    found = contrast.judged.difference
    if found and found.pairs and (alone := sum(contrast.judged.seeds) - 2 * found.pairs):
        lines.append(f"{alone} seed{'s' * (alone > 1)} without a partner on the other side: not compared")
    return "\n".join(lines)


def _notes(contrast: Contrast, attribute: str, text: str) -> Iterator[str]:
    """A line for all rows that are alike in this attribute, a tuple of sides."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in contrast.rows:
        alike.setdefault(getattr(row, attribute), []).append(NAMES[row.at])
    yield from (f"{', '.join(axes)}: {text.format(' and '.join(sides))}" for sides, axes in alike.items() if sides)


def _row_text(row: Row) -> tuple[str, ...]:
    amount = "" if row.at == END else "?" if row.amount is None else _amount_text(row.at, row.amount)
    if row.difference is None:
        return NAMES[row.at], amount, "?", "?", "?", "?"
    means = (f"{mean:.4f}" if math.isfinite(mean) else "broken" for mean in (row.baseline_bpb, row.candidate_bpb))
    found = row.difference
    difference = f"{_signed(found)} ± {_width(found)}" if math.isfinite(found.mean) else "?"
    return NAMES[row.at], amount, *means, difference, _p_text(found.p_value)


def _amount_text(at: At, amount: float) -> str:
    return f"{amount:.4g}" if at == "flops" else f"{amount:,.1f}" if at == "seconds" else f"{amount:,.0f}"


def _multipliers_text(multipliers: Sequence[Multiplier]) -> str:
    if not multipliers:
        return ""
    rows = [("compute multiplier", "of size", "95%", "seeds")]
    for one in multipliers:
        interval = "?" if math.isnan(one.low) else f"{one.low:.3g} to {one.high:.3g}"
        value = "?" if one.unknown else f"{one.multiplier:.3g}"
        rows.append((f"{one.candidate}: {value}", one.size, interval, str(one.seeds or "?")))
    notes = [f"{one.candidate}, {one.size}: ? since {one.unknown}" for one in multipliers if one.unknown]
    meaning = (
        f"The FLOPs with which {multipliers[0].baseline} reaches the candidate's final bpb, over the candidate's FLOPs."
    )
    return "\n".join([table(rows, "<<>>"), *notes, meaning])


def _decimals(found: Difference) -> int:
    """Two digits of the half width; at least four, at most eight."""
    noise = found.half_width
    return min(8, max(4, 1 - math.floor(math.log10(noise)))) if 0 < noise < math.inf else 4


def _signed(found: Difference) -> str:
    return f"{found.mean:+.{_decimals(found)}f}"


def _width(found: Difference) -> str:
    return f"{found.half_width:.{_decimals(found)}f}" if math.isfinite(found.half_width) else "?"


def _p_text(p: float, name: str = "") -> str:
    """With two digits; `name` goes before it and its relation."""
    if math.isnan(p):
        return "?"
    if p < 0.001:
        return f"{name}< 0.001"
    return f"{name}{'= ' if name else ''}{p:.2g}"


def rows_of(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Each row of each contrast as one flat object."""
    return (_row_object(contrast, row) for contrast in comparison.contrasts for row in contrast.rows)


def _row_object(contrast: Contrast, row: Row) -> dict[str, Any]:
    """None is an unknown number, infinite that of a broken run."""
    found = row.difference
    return {
        "baseline": contrast.baseline,
        "candidate": contrast.candidate,
        "size": contrast.size,
        "at": row.at,
        "amount": row.amount,
        "baseline_bpb": _known(row.baseline_bpb),
        "candidate_bpb": _known(row.candidate_bpb),
        "difference": found and _known(found.mean),
        "half_width": found and (found.half_width if math.isfinite(found.half_width) else None),
        "p_value": found and _known(found.p_value),
        "pairs": found and found.pairs,
        "baseline_seeds": row.seeds[0],
        "candidate_seeds": row.seeds[1],
        "interpolated": " ".join(row.interpolated),
        "before_end": " ".join(row.before_end),
        "unknown": row.unknown,
    }


def figures(comparison: Comparison) -> dict[str, Any]:
    """The object that `gptlab compare --json` prints."""
    contrasts = []
    for contrast in comparison.contrasts:
        contrasts.append({
            "baseline": contrast.baseline,
            "candidate": contrast.candidate,
            "size": contrast.size,
            "verdict": contrast.verdict,
            "sentence": sentence(contrast),
            "p_adjusted": _known(contrast.p_adjusted),
            "seeds_needed": contrast.seeds_needed,
            "rows": [_row_object(contrast, row) for row in contrast.rows],
        })  # fmt: skip
    return {
        "at": comparison.at,
        "sides": {
            name: {"runs": [str(run.path) for run in runs], "seeds": [run.seed for run in runs]}
            for name, runs in comparison.sides.items()
        },
        "fields": {field.name: dict(field.values) for field in comparison.fields},
        "warnings": list(comparison.warnings),
        "contrasts": contrasts,
        "multipliers": [{key: _known(value) for key, value in asdict(one).items()} for one in comparison.multipliers],
    }


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
