"""Curves made of characters, and one of SVG: for a terminal, Markdown, and a notebook."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from gptlab.report.curves import evenly_chosen

BLOCKS = "▁▂▃▄▅▆▇█"
_BRAILLE = 0x2800
_LARGEST = 1e100
"""Differences of larger numbers are not finite; no loss is as large."""
# The bit of each dot of a Braille character, by row (from the top) and column.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])


def stdout_lacks_dots() -> bool:
    """Whether standard output cannot show the characters of a curve."""
    return not (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def sparkline(values: Sequence[float], width: int = 10) -> str:
    """The values, resampled to at most `width` characters, from ▁ for the lowest to █ for the highest. A value that is
    not finite is a blank; empty without a finite value."""
    values = evenly_chosen(values, width)
    known = [value for value in values if abs(value) < _LARGEST]
    if not known:
        return ""
    low, high = min(known), max(known)

    def level(value: float) -> str:
        if not abs(value) < _LARGEST:
            return " "
        return BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1)) if high > low else 0]

    return "".join(map(level, values))


def text_curve(
    xs: Sequence[float], ys: Sequence[float], *, columns: int = 72, rows: int = 8, unit: str = "", ascii: bool = False
) -> str:
    """A line through the points, drawn with Braille dots (`*` where `ascii`), with its lowest and highest value on the
    left and its first and last place below, as whole numbers. `columns`: the width of all. Empty for fewer than two
    finite points."""
    points = _drawable(xs, ys)
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [_label(high, high - low), _label(low, high - low)]
    margin = max(map(len, labels))
    cells = max(10, columns - margin - 2)
    across, down = (1, 1) if ascii else (2, 4)
    dots = _dots(points, across * cells, down * rows, low, high)
    lines = []
    for row in range(rows):
        label = labels[0] if row == 0 else labels[1] if row == rows - 1 else ""
        part = dots[down * row : down * (row + 1)]
        lines.append(f"{label:>{margin}} {'|' if ascii else '│'}{_characters(part, ascii)}".rstrip())
    first, last = _place(points[0][0]), f"{_place(points[-1][0])} {unit}".rstrip()
    lines.append(f"{'':{margin}} {'+' if ascii else '└'}{('-' if ascii else '─') * cells}")
    lines.append(f"{'':{margin}}  {first}{last.rjust(max(cells - len(first), len(last) + 1))}")
    return "\n".join(lines)


def _label(value: float, difference: float) -> str:
    """With four digits, or more where two of the difference between highest and lowest would not be seen."""
    known = value != 0 and difference > 0
    digits = math.floor(math.log10(abs(value))) - math.floor(math.log10(difference)) + 2 if known else 0
    return f"{value:.{min(15, max(4, digits))}g}"


def _place(x: float) -> str:
    return f"{x:,.0f}" if abs(x) < 1e15 else f"{x:.6g}"


def _drawable(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """The points that are finite, in the order of x; none where that is fewer than two places."""
    points = sorted((x, y) for x, y in zip(xs, ys, strict=True) if abs(x) < _LARGEST and abs(y) < _LARGEST)
    return points if points and points[0][0] < points[-1][0] else []


def _dots(points: Sequence[tuple[float, float]], width: int, height: int, low: float, high: float) -> NDArray[np.bool_]:
    """Shape (height, width), the top row first: True on the line."""
    drawn = np.zeros((height, width), dtype=np.bool_)
    start, end = points[0][0], points[-1][0]
    places = [(x - start) / (end - start) * (width - 1) for x, _ in points]
    heights = [(high - y) / ((high - low) or 1.0) * (height - 1) for _, y in points]
    for a, b, top, bottom in zip(places, places[1:], heights, heights[1:], strict=False):
        # A dot in every row and column that the line crosses.
        for share in np.linspace(0, 1, 2 + int(abs(b - a) + abs(bottom - top))):
            drawn[round(top + share * (bottom - top)), round(a + share * (b - a))] = True
    return drawn


def _characters(dots: NDArray[np.bool_], ascii: bool) -> str:
    if ascii:
        return "".join("*" if dot else " " for dot in dots[0])
    codes = (dots.reshape(4, -1, 2) * _DOTS[:, None, :]).sum(axis=(0, 2))
    return "".join(chr(_BRAILLE + code) if code else " " for code in codes.tolist())


def svg_curve(xs: Sequence[float], ys: Sequence[float], *, title: str) -> str:
    """The same as an SVG element, in the color of the text around it. Empty for fewer than two finite points."""
    points = _drawable(xs, ys)
    if not points:
        return ""
    width, height = 480, 150
    left, top, right, bottom = 52, 10, width - 12, height - 22
    start, end = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> str:
        across = left + (x - start) / (end - start) * (right - left)
        return f"{across:.1f},{top + (high - y) / ((high - low) or 1.0) * (bottom - top):.1f}"

    text = '<text x="{}" y="{}" text-anchor="{}" fill="currentColor" font-size="12">{}</text>'
    return (
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="system-ui, sans-serif"><path d="M{left} {top}V{bottom}H{right}" fill="none"'
        f' stroke="currentColor" stroke-opacity=".3"/>'
        + text.format(left - 6, top + 9, "end", _label(high, high - low))
        + text.format(left - 6, bottom, "end", _label(low, high - low))
        + text.format(left, height - 5, "start", _place(start))
        + text.format(right, height - 5, "end", escape(f"{_place(end)} {title}"))
        + f'<polyline points="{" ".join(place(x, y) for x, y in points)}" fill="none" stroke="#3b7dd8"'
        f' stroke-width="2" stroke-linejoin="round"/></svg>'
    )
