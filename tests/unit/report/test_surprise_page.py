"""The page of a text colored by its bits, as a parser of HTML reads it."""

from __future__ import annotations

import math
from html.parser import HTMLParser

import pytest

from gptlab.eval.surprise import Piece
from gptlab.report import surprise_page as page_module
from gptlab.report.surprise_page import surprise_page


class Reader(HTMLParser):
    """What a browser would make of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.shown, self.hover, self.classes = "", list[str](), list[str]()
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.inside = self.inside or tag == "main"
        if tag == "span":
            values = dict(attrs)
            self.hover.append(values["data-b"] or "")
            self.classes.append(values.get("class") or "")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "main"

    def handle_data(self, data: str) -> None:
        self.shown += data * self.inside


def read(found: list[Piece]) -> tuple[Reader, str]:
    text = "".join(surprise_page(found, title="<b>x</b>", bpb=1.25, facts={"run": "<i>y</i>"}))
    reader = Reader()
    reader.feed(text)
    return reader, text


def test_page_shows_text_as_text() -> None:
    hostile = ['<script>alert("1")</script>', '"><img src=x>', "&lt;", "a\nb\t", "\0\x1b"]
    reader, text = read([Piece(piece, 1.0) for piece in hostile])
    assert reader.shown == "".join(hostile).replace("\0", "\N{SYMBOL FOR NULL}").replace(
        "\x1b", "\N{SYMBOL FOR ESCAPE}"
    )
    assert not {"script", "img", "link"} & {*reader.tags}
    assert reader.tags.count("span") == len(hostile)
    assert "<i>y" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_page_colors_by_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Piece("a", 0.49), Piece("b", 0.5), Piece("c\n", 4.25), Piece("d", 14.1), Piece("e", math.nan)]
    reader, text = read(found)
    assert reader.classes == ["", "s1", "s5", "s8", ""]
    assert reader.hover == ["0.49 bits, 71.2%", "0.50 bits, 70.7%", "4.25 bits, 5.3%", "14.10 bits, 1 in 17,560",
                            "not predicted"]  # fmt: skip
    assert '<b class="s5">4 to 6</b>' in text
    assert "prefers-color-scheme: dark" in text
    monkeypatch.setattr(page_module, "MAX_PIECES", 2)
    reader, text = read(found)
    assert reader.shown == "ab"
    assert "first 2 pieces" in text
