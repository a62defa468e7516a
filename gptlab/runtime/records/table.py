"""Columns of text, and short numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[str]], alignments: str) -> str:
    """Columns two spaces apart, as wide as their widest entry: `<` flush left, `>` flush right."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    layout = list(zip(alignments, widths, strict=True))
    lines = ("  ".join(f"{cell:{a}{w}}" for cell, (a, w) in zip(row, layout, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def short_number(number: float) -> str:
    """With three digits: 950, 23.5k, 1.21M, 3.28B, 1T."""
    rounded = float(f"{number:.3g}")  # which may have the next unit
    units = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
    unit, size = next((one for one in units if rounded >= one[1]), ("", 1.0))
    return f"{rounded / size:.3g}{unit}"
