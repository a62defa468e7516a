"""What a lab has found, in one page: the frontier, what was tried by kind, what failed, what it cost, and how well the
predictions did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from gptlab.config.errors import UserError, shortened
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import Experiment, baseline_of
from gptlab.lab.experiments.overview import (
    Experiments,
    comparable_bpb,
    difference_text,
    edit_text,
    promotion_text,
    proposals,
    shown,
    verdict_counts,
)
from gptlab.runtime.records.table import table

MAX_FAILURES = 20
"""Experiments that were not kept, in the text: those with the best differences. `gptlab lab log` has all."""
WIDTH = 80


def report(lab: Lab) -> dict[str, Any]:
    """The figures, as JSON. UserError where the baseline is not measured yet."""
    experiments = lab.ledger.experiments()
    if not experiments or (first := comparable_bpb(experiments[0], experiments)) is None:
        raise UserError(f"{lab.path} has no baseline yet: `gptlab lab new` with the same arguments finishes it")
    tried, best = proposals(experiments), baseline_of(experiments)
    costs = [cost for one in experiments.values() for cost in one.costs]
    return {
        "lab": lab.settings.name,
        "recipe": lab.settings.recipe,
        "length": lab.settings.length,
        "best": best.number,
        "best_bpb": comparable_bpb(best, experiments),
        "first_bpb": first,
        "promotions": [answer for one in experiments.values() for answer in one.promotions],
        "verdicts": verdict_counts(tried),
        "frontier": _frontier([experiments[0], *tried], experiments),
        "kinds": _by_kind(tried),
        "runs": len(costs),
        "run_seconds": sum(float(cost.get("wall_seconds") or 0.0) for cost in costs),
        "predictions": _predictions(tried),
    }


def kinds_of(one: Experiment) -> list[str]:
    """What it changes: the first parts of its fields' names, and its files below gptlab/."""
    return sorted({*(name.split(".")[0] for name in one.fields), *(name.removeprefix("gptlab/") for name in one.files)})


def _frontier(tried: Sequence[Experiment], experiments: Experiments) -> list[dict[str, Any]]:
    """Every experiment with its bits per byte, comparable whatever seeds and baseline it had, and the best so far."""
    rows, best = list[dict[str, Any]](), math.nan
    for one in tried:
        bpb, verdict = comparable_bpb(one, experiments), one.verdict or {}
        if bpb is not None and (one.is_kept or one.number == 0):
            best = bpb
        row = {
            "experiment": one.number, "verdict": one.says or None, "change": edit_text(one), "bpb": bpb,
            "difference": _measured(one), "half_width": verdict.get("half_width"), "best_bpb": best,
        }  # fmt: skip
        rows.append(row)
    return rows


def _measured(one: Experiment) -> float | None:
    difference = (one.verdict or {}).get("difference")
    return None if difference is None else float(difference)


def _by_kind(tried: Sequence[Experiment]) -> list[dict[str, Any]]:
    """One that changes two kinds counts for both. The most tried first."""
    rows = []
    for kind in {kind for one in tried for kind in kinds_of(one)}:
        judged = [one for one in tried if kind in kinds_of(one) and one.verdict is not None]
        found = [value for one in judged if (value := _measured(one)) is not None and math.isfinite(value)]
        kept = sum(one.is_kept for one in judged)
        row = {
            "kind": kind, "tried": len(judged), "kept": kept, "keep_rate": kept / len(judged) if judged else None,
            "measured": len(found), "mean_difference": sum(found) / len(found) if found else None,
        }  # fmt: skip
        rows.append(row)
    return sorted(rows, key=lambda row: (-row["tried"], row["kind"]))


def _predictions(tried: Sequence[Experiment]) -> dict[str, Any] | None:
    """`expect` beside what was measured, of the experiments that have both; None where none has."""
    pairs = [(one.expect, _measured(one)) for one in tried]
    known = [(expect, value) for expect, value in pairs if expect is not None and value is not None]
    known = [pair for pair in known if all(map(math.isfinite, pair))]
    if not known:
        return None
    return {
        "experiments": len(known),
        "right_direction": sum(expect * value > 0 for expect, value in known),
        "mean_expected": sum(expect for expect, _ in known) / len(known),
        "mean_measured": sum(value for _, value in known) / len(known),
    }


def describe(lab: Lab, figures: dict[str, Any]) -> Iterator[str]:
    """The report as lines of text."""
    experiments = lab.ledger.experiments()
    gain = figures["best_bpb"] - figures["first_bpb"]
    yield f"lab        {figures['lab']}: {figures['recipe']}, {figures['length']} of training"
    bpb = f"{figures['best_bpb']:.4f} bits per byte"
    yield f"best       experiment {figures['best']}: {bpb}, {gain:+z.4f} since experiment 0"
    for answer in figures["promotions"]:
        yield f"promoted   experiment {answer['experiment']}, {promotion_text(answer)}"
    counts = ", ".join(f"{count} {name}" for name, count in figures["verdicts"].items())
    yield f"tried      {sum(figures['verdicts'].values())}" + (f": {counts}" if counts else "")
    minutes = figures["run_seconds"] / 60
    spent = f"{minutes:.1f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"
    yield f"training   {figures['runs']:,} runs, {spent}"
    if (found := figures["predictions"]) is not None:
        yield (
            f"predicted  {found['right_direction']} of {found['experiments']} in the right direction; on average"
            f" {found['mean_expected']:+z.4f}, measured {found['mean_measured']:+z.4f}"
        )
    kept = [experiments[0], *(one for one in experiments.values() if one.is_kept)]
    yield from ("", "Kept, each on top of the one before", _table(_kept_rows(kept, experiments), "><<<"))
    if figures["kinds"]:
        yield from ("", "By what was changed", _table(_kind_rows(figures["kinds"]), "<>>>>"))
    failed = [one for one in proposals(experiments) if one.verdict is not None and not one.is_kept]
    failed.sort(key=lambda one: _order(_measured(one)))
    if failed:
        more = f" (the {MAX_FAILURES} best of {len(failed)})" if len(failed) > MAX_FAILURES else ""
        yield from ("", f"Not kept{more}", _table(_failed_rows(failed[:MAX_FAILURES]), "><<<"))


def _order(difference: float | None) -> float:
    return math.inf if difference is None or math.isnan(difference) else difference


def _table(rows: Iterator[tuple[str, ...]], alignments: str) -> str:
    """A table no wider than a terminal: its last column is cut."""
    lines = table(rows, alignments).split("\n")
    return "\n".join(shortened(line, WIDTH) for line in lines)


def _kept_rows(kept: Sequence[Experiment], experiments: Experiments) -> Iterator[tuple[str, ...]]:
    yield ("", "bpb", "difference", "change")
    for one in kept:
        change = "the first baseline" if one.number == 0 else shown(edit_text(one))
        yield (str(one.number), f"{comparable_bpb(one, experiments):.4f}", difference_text(one), change)


def _kind_rows(kinds: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield ("", "tried", "kept", "keep rate", "mean difference")
    for row in kinds:
        rate = "" if row["keep_rate"] is None else f"{row['keep_rate']:.0%}"
        mean = "" if row["mean_difference"] is None else f"{row['mean_difference']:+z.4f}"
        yield (shown(row["kind"], 36), str(row["tried"]), str(row["kept"]), rate, mean)


def _failed_rows(failed: Sequence[Experiment]) -> Iterator[tuple[str, ...]]:
    yield ("", "verdict", "difference", "change")
    for one in failed:
        yield (str(one.number), one.says, difference_text(one), shown(edit_text(one)))
