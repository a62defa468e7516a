"""The live line and the progress bar of a terminal, drawn with rich. No threads: drawing happens in the caller's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_REDRAW_SECONDS = 0.1
_LONGEST_BAR_CELLS = 30
_BETWEEN = "  "


class TerminalDisplay:
    """Ordinary lines scroll by above one line that is redrawn in place, ten times a second at most."""

    progress_seconds = _REDRAW_SECONDS

    def __init__(self, stream: TextIO) -> None:
        self._console = RichConsole(file=stream, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._text = ""
        """What the live line should show; empty while a progress bar has its place."""
        self._drawn_at = float("-inf")

    def line(self, text: str, warning: bool = False) -> None:
        self._console.print(Text(text, style="yellow" if warning else ""), soft_wrap=True)

    def live(self, text: str, parts: Callable[[], Sequence[str]]) -> None:
        self._text = (_fitting(parts(), self._console.width) or text).replace("\n", " ")
        if time.monotonic() - self._drawn_at >= _REDRAW_SECONDS:
            self._draw(_cropped(self._text))

    def progress(self, description: str, share: float | None, figures: str) -> None:
        """Draws at once: the caller minds `progress_seconds`."""
        if self._text:
            self.settle()
        row = Table.grid(padding=(0, 1))
        cells = min(_LONGEST_BAR_CELLS, self._console.width // 4)
        bar = ProgressBar(total=1.0, completed=share or 0.0, width=cells, pulse=share is None)
        row.add_row(_cropped(description), bar, _cropped(figures))
        self._draw(row)

    def settle(self) -> None:
        """Turn the live line, with its latest text, into an ordinary one; remove a bar."""
        if self._live is not None:
            self._live.stop()
            self._live, self._drawn_at = None, float("-inf")
        if self._text:
            self.line(self._text)
            self._text = ""

    def _draw(self, content: Text | Table) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(content, refresh=True)
        self._drawn_at = time.monotonic()


def _fitting(parts: Sequence[str], columns: int) -> str:
    """As many of the parts, from the first on, as there is room for."""
    text = parts[0] if parts else ""
    for part in parts[1:]:
        if len(text) + len(_BETWEEN) + len(part) > columns:
            break
        text += _BETWEEN + part
    return text


def _cropped(text: str) -> Text:
    """One line that ends in an ellipsis where the terminal is too narrow; wrapped, it could not be redrawn."""
    return Text(text, no_wrap=True, overflow="ellipsis")
