"""Columns of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[str]], alignments: str) -> str:
    """Columns two spaces apart, as wide as their widest entry: `<` flush left, `>` flush right."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    layout = list(zip(alignments, widths, strict=True))
    lines = ("  ".join(f"{cell:{a}{w}}" for cell, (a, w) in zip(row, layout, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)
