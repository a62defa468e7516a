"""A comparison as a picture: the curves, and below them their differences. The only module that imports matplotlib."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gptlab.config.errors import UserError, cannot
from gptlab.lab.compare import NAMES, Comparison, sentence
from gptlab.lab.contrast import END, Runs, bpb_at, first_amount, row_at
from gptlab.lab.run_record import Axis, is_broken
from gptlab.runtime.records.run_directory import require_outside_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
SUFFIXES = (".png", ".svg")
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Distinct for color-blind readers too (Okabe and Ito 2008, "Color Universal Design")."""
STYLES = ("-", "--", ":", "-.")
"""Of the sizes."""
MAX_LEGEND = 12
"""Curves that a legend names; it would cover more."""
FAILED = ("crashed", "timed-out", "invalid")
STEEP = 0.2
"""The first share of a run, in which the loss falls so far that nothing later could be seen at its scale. The panels
are scaled by what comes after it."""


def require_plot(path: Path) -> None:
    """UserError unless a picture can be drawn into a file of this name."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"--plot {path}: name a file that ends with {' or '.join(SUFFIXES)}")
    require_outside_runs(path, "--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'gptlab[plot]'") from None


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Mean curves with the range of their runs that are not broken, and the difference of each candidate from the
    baseline with its 95% interval, over what the verdicts are of (over steps, where that is the end)."""
    require_plot(path)
    if not comparison.contrasts:
        raise UserError(f"--plot {path}: no size is on both sides, so there is no difference to draw")
    from matplotlib.figure import Figure

    axis: Axis = "steps" if comparison.at == END else comparison.at
    colors = {name: COLORS[place % len(COLORS)] for place, name in enumerate(comparison.sides)}
    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    heights: dict[Axes, list[Array]] = {above: [], below: [np.zeros(1)]}
    curves: dict[tuple[str, str | None], Runs] = {}
    sizes = dict.fromkeys(contrast.size for contrast in comparison.contrasts)
    styles = dict(zip(sizes, itertools.cycle(STYLES), strict=False))
    for contrast in comparison.contrasts:
        names = contrast.baseline, contrast.candidate
        sides = (names[0], contrast.baseline_runs), (names[1], contrast.candidate_runs)
        curves |= {(name, contrast.size): runs for name, runs in sides}
        amounts = _amounts((*sides[0][1], *sides[1][1]), axis)
        found = [row_at(axis, amount, *sides).difference for amount in amounts]
        middle, width = np.array([(one.mean, one.half_width) for one in found if one]).reshape(-1, 2).T
        label = _label(f"{names[1]} - {names[0]}", contrast.size)
        with np.errstate(invalid="ignore"):  # broken runs are infinite
            band = np.stack([middle - width, middle, middle + width])
        heights[below].append(_draw(below, amounts, band, colors[names[1]], styles[contrast.size], label))
    for (name, size), runs in curves.items():
        sound = [run for run in runs if not is_broken(run)]
        amounts = _amounts(runs, axis)
        values = np.array([[bpb_at(run, axis, amount) for amount in amounts] for run in sound or runs])
        broken = f"{len(runs) - len(sound)} broken{', not drawn' * bool(sound)}" if len(sound) < len(runs) else None
        label = _label(name, size, f"{len(runs)} run{'s' * (len(runs) > 1)}", broken)
        band = np.stack([values.min(axis=0), values.mean(axis=0), values.max(axis=0)])
        heights[above].append(_draw(above, amounts, band, colors[name], styles[size], label))
    below.axhline(0, color="black", linewidth=0.8)
    title, is_named = "Mean and range of the runs", len(curves) <= MAX_LEGEND
    if not is_named:
        title += f" of {len(comparison.sides)} sides: gptlab report names each"
    above.set(ylabel="validation bits per byte", title=title)
    said = [sentence(comparison.contrasts[0])] if len(comparison.contrasts) == 1 else []
    below.set(xlabel=NAMES[axis], ylabel="difference in bits per byte")
    lines = [line for part in ("Difference and its 95% interval", *said) for line in textwrap.wrap(part, 90)]
    below.set_title(_label("\n".join(lines)), fontsize="medium")
    for panel, parts in heights.items():
        if is_named:
            panel.legend()
        panel.grid(alpha=0.3)
        if (shown := np.concatenate([*parts, np.empty(0)])).size:
            margin = 0.05 * np.ptp(shown) or 0.01
            panel.set_ylim(shown.min() - margin, shown.max() + margin)
    with cannot(f"write {path}"):
        figure.savefig(path, dpi=150)


def _label(*parts: str | None) -> str:
    """Dollars would enclose mathematics."""
    return ", ".join(part for part in parts if part).replace("$", r"\$")


def plot_frontier(figures: Mapping[str, Any], path: Path) -> None:
    """The best bits per byte over experiments, as a stair, with every experiment that was measured; `figures`: those of
    `gptlab lab report`. The scale is that of what was kept: what is far worse is drawn at the upper edge."""
    require_plot(path)
    from matplotlib.figure import Figure

    rows = figures["frontier"]
    numbers = np.array([row["experiment"] for row in rows])
    best = np.array([row["best_bpb"] for row in rows], dtype=np.float64)
    bpb = np.array([math.nan if row["bpb"] is None else row["bpb"] for row in rows], dtype=np.float64)
    half = np.array([row["half_width"] or 0.0 for row in rows], dtype=np.float64)
    kept = np.array([row["verdict"] == "keep" or row["experiment"] == 0 for row in rows])
    fall = float(best.max() - best.min()) or 0.01
    top, bottom = best.max() + 0.75 * fall, best.min() - 0.25 * fall
    figure = Figure(figsize=(9, 5), layout="constrained")
    panel = figure.subplots()
    panel.step(numbers, best, where="post", color=COLORS[0], label="best so far")
    for chosen, color, name in ((~kept, "#999999", "not kept"), (kept, COLORS[0], "kept")):
        inside = chosen & (bpb <= top)
        panel.errorbar(
            numbers[inside], bpb[inside], half[inside], fmt="o", color=color, markersize=5, elinewidth=0.8, label=name
        )  # fmt: skip
    above = ~kept & (bpb > top)
    if above.any():
        height = np.full(above.sum(), top)
        label = f"worse than {top:.3f}"
        panel.plot(numbers[above], height, "^", color="#999999", markersize=6, label=label, clip_on=False)
    failed = np.isnan(bpb) & np.array([row["verdict"] in FAILED for row in rows])
    if failed.any():
        label = "crashed, timed out or invalid"
        panel.plot(numbers[failed], np.full(failed.sum(), bottom), "x", color=COLORS[1], label=label, clip_on=False)
    for row in rows:
        if row["verdict"] == "keep":
            # Nothing is below the stair on its left, where there is room for a text.
            side, align = (-5, "right") if row["experiment"] > 0.3 * numbers[-1] else (5, "left")
            panel.annotate(
                textwrap.shorten(row["change"], 40, placeholder=" ..."), (row["experiment"], row["best_bpb"]),
                (side, -5), textcoords="offset points", fontsize=7, va="top", ha=align, parse_math=False,
            )  # fmt: skip
    panel.set(xlabel="experiment", ylabel="validation bits per byte", ylim=(bottom, top))
    gain = figures["best_bpb"] - figures["first_bpb"]
    tried, number_kept = len(rows) - 1, int(kept.sum()) - 1
    said = f"{tried} experiments, {number_kept} kept, {gain:+z.4f} bits per byte"
    panel.set_title(f"{figures['lab']}: {said}", parse_math=False)
    panel.grid(alpha=0.3)
    panel.legend(loc="upper right")
    with cannot(f"write {path}"):
        figure.savefig(path, dpi=150)


def _amounts(runs: Runs, axis: Axis) -> Array:
    """Where any of the runs validated, as far as all of them did that are not broken; empty where none did."""
    runs = [run for run in runs if len(run.curve)]
    if not runs:
        return np.empty(0)
    sound = [run for run in runs if not is_broken(run)] or runs[:1]
    first, last = max(first_amount(run, axis) for run in sound), min(run.curve.at[axis][-1] for run in sound)
    amounts = np.unique(np.concatenate([run.curve.at[axis] for run in runs]))
    return amounts[(amounts >= first) & (amounts <= last)]


def _draw(panel: Axes, amounts: Array, band: Array, color: str, style: str, label: str) -> Array:
    """A line and the band around it, nothing where they are not finite. `band`: low, middle and high, of the shape
    (3, amounts). Returns the heights for which the panel should be scaled."""
    low, middle, high = np.where(np.isfinite(band), band, np.nan)
    panel.plot(amounts, middle, style, color=color, label=label, marker="." if len(amounts) < 50 else None)
    panel.fill_between(amounts, low, high, color=color, alpha=0.2, linewidth=0)
    late = band[:, amounts >= STEEP * amounts.max(initial=0)]
    return late[np.isfinite(late)]
