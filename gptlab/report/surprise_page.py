"""A text as one HTML page, each piece colored by the bits with which it surprised a model. No scripts, no network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # It imports torch, which nothing else of this package needs.
    from gptlab.eval.surprise import Piece

LEVELS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Bits at which the color changes. Below the first there is none; 8 bits are a byte of which nothing is known."""

MAX_PIECES = 200_000
"""A browser lays out so many in about a second."""

_STYLE = """
:root { color-scheme: light dark; --paper: #fdfcfa; --ink: #1d1d1f; --dim: #6b6b70; --line: #e3e0da; --hot: 214 69 24 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #151517; --ink: #e9e7e3; --dim: #9a98a0; --line: #303036; --hot: 255 122 61 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
header, main, footer { max-width: 56rem; margin: 0 auto; padding: 0 1.25rem }
h1 { font-size: 1.3rem; margin: 2rem 0 .25rem; overflow-wrap: anywhere }
p { margin: .25rem 0; color: var(--dim) }
.figure { font-size: 2.6rem; font-weight: 650; line-height: 1.15; color: var(--ink); letter-spacing: -.02em }
.figure small { font-size: 1rem; font-weight: 400; color: var(--dim); letter-spacing: 0;
  display: inline-block; line-height: 1.4 }
.legend { display: flex; flex-wrap: wrap; margin: 1.25rem 0 1rem; font-size: .8rem; color: var(--dim) }
.legend b { min-width: 3.3rem; padding: .15rem .4rem; font-weight: 400; color: var(--ink); text-align: center }
.legend i { font-style: normal; padding: .15rem .6rem .15rem 0; align-self: center }
main { white-space: pre-wrap; overflow-wrap: anywhere; border-top: 1px solid var(--line); padding-top: 1rem;
  padding-bottom: 5rem; font: 14px/1.75 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  tab-size: 4 }
main span:hover { outline: 1.5px solid var(--ink); border-radius: 2px }
main span:hover::after { content: attr(data-b); position: fixed; left: 50%; bottom: 1rem; transform: translateX(-50%);
  background: var(--ink); color: var(--paper); padding: .4rem .9rem; border-radius: 1rem; white-space: pre;
  font: 14px/1.4 system-ui, sans-serif }
main i::before { content: "\\21B5"; font-style: normal; color: var(--dim) }
"""


def surprise_page(found: Iterable[Piece], *, title: str, bpb: float, facts: Mapping[str, str]) -> Iterator[str]:
    """Parts of the HTML, to be joined. `facts`: {what: value}, shown below the bits per byte. All text is escaped."""
    yield (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}: {bpb:.4f} bits per byte</title>\n<style>{_STYLE}{_levels()}</style></head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1>\n<p class="figure">{bpb:.4f} <small>bits per byte: '
        "lower is better, 8 is no knowledge</small></p>\n"
        f"<p>{' · '.join(f'{escape(what)} {escape(value)}' for what, value in facts.items())}</p>\n"
        f'<div class="legend"><i>bits</i>{_legend()}</div></header>\n<main>'
    )
    for number, piece in enumerate(found):
        if number == MAX_PIECES:
            yield f"</main>\n<footer><p>Only the first {MAX_PIECES:,} pieces are shown.</p></footer></body></html>\n"
            return
        yield _span(piece)
    yield "</main></body></html>\n"


def _span(piece: Piece) -> str:
    level = sum(piece.bits >= bits for bits in LEVELS)
    attribute = f' class="s{level}"' if level else ""
    text = escape(_visible(piece.text)).replace("\n", "<i></i>\n")  # shown as an arrow, which is not copied
    return f'<span{attribute} data-b="{_about(piece.bits)}">{text}</span>'


def _about(bits: float) -> str:
    """`4.25 bits, 5.3%`, `14.10 bits, 1 in 17,560`."""
    if math.isnan(bits):
        return "not predicted"
    if math.isinf(bits):
        return "infinite bits"
    chance = f"{100 * 2**-bits:.1f}%" if bits < 10 else f"1 in {2**bits:,.0f}" if bits < 40 else f"1 in {2**bits:.1e}"
    return f"{bits:.2f} bits, {chance}"


def _visible(text: str) -> str:
    """Control characters as their pictures (U+2400 and following): HTML has no NUL, and others do not show."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)


def _opacity(level: int) -> float:
    return 0.75 * level / len(LEVELS)


def _levels() -> str:
    return "".join(
        f".s{level} {{ background: rgb(var(--hot) / {_opacity(level):.3f}) }}\n" for level in range(1, len(LEVELS) + 1)
    )


def _legend() -> str:
    edges = [0.0, *LEVELS]
    inner = [f'<b class="s{level}">{low:g} to {high:g}</b>' for level, (low, high) in enumerate(pairwise(edges))]
    return "".join([*inner, f'<b class="s{len(LEVELS)}">{edges[-1]:g} or more</b>'])
