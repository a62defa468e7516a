"""What a person sees of a run: lines, one live line on a terminal, and the same text in log.txt."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from gptlab.runtime.records.metrics import AppendFile

if TYPE_CHECKING:
    from gptlab.runtime.records.terminal import TerminalDisplay

# ECMA-48 escape sequences: CSI (colours, cursor), OSC (titles, links; ended by BEL or ST), two-character ones.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
# A model's sample may hold any character: those that move the cursor or ring the bell do not reach the terminal.
CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
# Often enough to be seen moving, rarely enough to cost nothing beside a compiler.
_BUSY_SECONDS = 0.25


class PlainDisplay:
    """For pipes, files and dumb terminals: lines only, and a live line printed every few seconds."""

    progress_seconds = 5.0
    """The least time between two calls of `progress`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live_at = float("-inf")
        self._pending = ""
        """The latest live text, where it was too soon to print it."""

    def line(self, text: str, warning: bool = False) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def live(self, text: str, parts: Callable[[], Sequence[str]]) -> None:
        self._pending = text
        if time.monotonic() - self._live_at >= self.progress_seconds:
            self.settle()

    def settle(self) -> None:
        if self._pending:
            self._live_at = time.monotonic()
            text, self._pending = self._pending, ""
            self.line(text)

    def progress(self, description: str, share: float | None, figures: str) -> None:
        if figures:
            self.line(f"{description}: {figures}")


class NotebookDisplay(PlainDisplay):
    """For the output of a notebook cell, which keeps every line but obeys a carriage return: one live line, and where
    another line comes, it takes the live one's place."""

    progress_seconds = 0.5
    _drawn_characters = 0
    """Of the live line that is shown."""

    def line(self, text: str, warning: bool = False) -> None:
        self._draw(text)
        self._drawn_characters = 0
        super().line("")

    def live(self, text: str, parts: Callable[[], Sequence[str]]) -> None:
        self._pending = "  ".join(parts()) or text
        if time.monotonic() - self._live_at >= self.progress_seconds:
            self._live_at = time.monotonic()
            self._draw(self._pending)

    def progress(self, description: str, share: float | None, figures: str) -> None:
        self._draw(f"{description}: {figures}")

    def _draw(self, text: str) -> None:
        start = "\r" * bool(self._drawn_characters)
        self._stream.write(f"{start}{text:<{self._drawn_characters}}")
        self._stream.flush()
        self._drawn_characters = len(text)


class Console(AbstractContextManager["Console"]):
    """Prints for a person and keeps log.txt; where the stream is closed (a pipe), logging continues.

    Escape sequences and control characters are removed from all text. Any thread may use it.
    """

    def __init__(self, *, stream: TextIO | None = None, quiet: bool = False) -> None:
        """`quiet`: print warnings and results only; log.txt is the same."""
        self._quiet = quiet
        self._stream = stream or sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - pythonw has no sys.stdout
        self._display: PlainDisplay | TerminalDisplay = PlainDisplay(self._stream)
        if self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
            self._display = _terminal_display(self._stream)
        elif type(self._stream).__module__.startswith("ipykernel."):
            self._display = NotebookDisplay(self._stream)
        self._lost = False
        """The stream refused a text: a pipe without a reader, a terminal that is gone."""
        self._log: AppendFile | None = None
        self._unlogged: list[str] = []
        self._lock = threading.RLock()

    def open_log(self, path: Path) -> None:
        """Log to `path` from now on; what was shown before this goes there first."""
        with self._lock:
            self._log = AppendFile(path)
            for text in self._unlogged:
                self._log.append(text)
            self._unlogged.clear()

    def reopen_log(self, path: Path, offset: int) -> bool:
        """The same at resume: `offset` cuts off what was logged after the checkpoint. False where the file is not the
        one that had this offset."""
        with closing(AppendFile(path)) as log:
            intact = log.truncate(offset)
        self.open_log(path)
        return intact

    def log_position(self) -> int:
        """Bytes of log.txt so far; 0 without a log. They are durable after `sync_log`."""
        with self._lock:  # a position writes out what another thread may be appending
            return 0 if self._log is None else self._log.position()

    def sync_log(self) -> None:
        """Make log.txt durable up to here; another thread may do this. UserError where the disk refuses."""
        if self._log is not None:
            self._log.sync()

    def line(self, text: str) -> None:
        """Print and log."""
        self._say(text, shown=not self._quiet)

    def result(self, text: str) -> None:
        """Print and log, also in quiet mode: how a run ends."""
        self._say(text)

    def warn(self, text: str) -> None:
        """Print and log, marked as a warning."""
        self._say(f"warning: {text}", warning=True)

    def error(self, text: str) -> None:
        """Print on stderr, and log: what ends a run. One line."""
        self.settle()
        self._record(f"error: {_plain(text)}")
        with suppress(OSError, ValueError):
            print(f"gptlab: error: {_plain(text)}", file=sys.stderr, flush=True)

    def live(self, text: str, parts: Callable[[], Sequence[str]] = tuple) -> None:
        """Log, and show in place of the last live text; without a terminal, print every few seconds.

        A terminal shows instead what `parts` returns, if anything: as many, from the first on, as fit its width.
        """
        self._record(_plain(text))
        if not self._quiet:
            self._show(self._display.live, self._printable(text), lambda: [self._printable(part) for part in parts()])

    def settle(self) -> None:
        """Make the latest live text an ordinary line, and remove a bar."""
        self._show(self._display.settle)

    @contextmanager
    def busy(self, description: str) -> Iterator[None]:
        """Show that work of unknown length is under way, and for how long, until the context is left.

        A moving bar on a terminal, elsewhere a line every few seconds; neither is logged. Another thread draws, since
        the work may block inside a library.
        """
        started, over = time.monotonic(), threading.Event()

        def draw() -> None:
            while not over.wait(max(_BUSY_SECONDS, self._display.progress_seconds)):
                self._bar(description, None, clock_text(time.monotonic() - started))

        thread = threading.Thread(target=draw, name="gptlab-busy", daemon=True)
        self.settle()
        self._bar(description, None, "")
        with suppress(RuntimeError):  # the system has no thread to give
            thread.start()
        try:
            yield
        finally:
            over.set()
            if thread.ident is not None:
                thread.join()
            self.settle()

    @contextmanager
    def progress(self, description: str, total: float | None, unit: str) -> Iterator[Progress]:
        """Show the progress of long work: a bar on a terminal, elsewhere a line every few seconds.

        `total`: None where it is unknown. `unit`: a plural ("documents"), or "bytes". A closing line with the amount
        and the rate is printed and logged unless the work raises.
        """
        seconds = self._display.progress_seconds
        progress = Progress(description, total, unit, show=self._bar, interval_seconds=seconds)
        self.settle()
        self._bar(description, None, "")
        try:
            yield progress
        finally:
            self.settle()
        self.line(progress.closing_line())

    def close(self) -> None:
        """Leave the terminal as it was, and finish log.txt."""
        self.settle()
        if self._log is not None:
            self._log.close()
            self._log = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def _say(self, text: str, *, shown: bool = True, warning: bool = False) -> None:
        self._record(_plain(text))
        if shown:
            self._show(self._display.line, self._printable(text), warning)

    def _record(self, text: str) -> None:
        with self._lock:
            (self._unlogged.append if self._log is None else self._log.append)(text)

    def _bar(self, description: str, share: float | None, figures: str) -> None:
        if not self._quiet:
            self._show(self._display.progress, self._printable(description), share, figures)

    def _show(self, draw: Callable[..., None], *arguments: object) -> None:
        """Draw on the display; nothing once the stream is closed, since a run outlives its terminal."""
        with self._lock:
            if self._lost or self._stream.closed:
                return
            try:
                draw(*arguments)
            except OSError:
                self._lose_stream()

    def _lose_stream(self) -> None:
        self._lost = True
        # What the stream still buffers would raise again when Python flushes it at exit.
        with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())

    def _printable(self, text: str) -> str:
        """`_plain`, with "?" for what the stream cannot encode (Windows code pages, lone surrogates)."""
        encoding = self._stream.encoding or "utf-8"
        return _plain(text).encode(encoding, "replace").decode(encoding)


def _terminal_display(stream: TextIO) -> TerminalDisplay:
    from gptlab.runtime.records.terminal import TerminalDisplay  # rich takes 60 ms to import

    return TerminalDisplay(stream)


class QuietConsole(Console):
    """For the ranks other than 0: prints and logs nothing."""

    def __init__(self) -> None:
        super().__init__(stream=io.StringIO())

    def open_log(self, path: Path) -> None:
        pass

    def error(self, text: str) -> None:
        pass

    def _record(self, text: str) -> None:
        pass

    def _show(self, draw: Callable[..., None], *arguments: object) -> None:
        pass


@dataclass(slots=True)
class Progress:
    """The progress of a piece of work."""

    description: str
    total: float | None
    unit: str
    show: Callable[[str, float | None, str], None]
    interval_seconds: float
    done: float = 0.0
    _started: float = field(init=False)
    _shown: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self._shown = time.monotonic()

    def advance(self, n: float = 1) -> None:
        """`n` more units are done."""
        self.done += n
        now = time.monotonic()
        if now - self._shown >= self.interval_seconds:
            self._shown = now
            self._draw(now - self._started)

    def closing_line(self) -> str:
        seconds = time.monotonic() - self._started
        return f"{self.description}: {self._amount(self.done)} in {seconds:.1f} s{self._rate(seconds)}"

    def _draw(self, seconds: float) -> None:
        done, rate = self._amount(self.done), self._rate(seconds)
        if not self.total:
            self.show(self.description, None, f"{done}{rate}")
            return
        share = min(1.0, self.done / self.total)
        left = f", {clock_text(seconds * max(0.0, self.total / self.done - 1))} left" if self.done else ""
        figures = f"{done.partition(' ')[0]} of {self._amount(self.total)} ({share:.0%}){rate}{left}"
        self.show(self.description, share, figures)

    def _rate(self, seconds: float) -> str:
        return f", {self._amount(self.done / seconds)}/s" if self.done and seconds > 0 else ""

    def _amount(self, value: float) -> str:
        return f"{value / 1e6:,.1f} MB" if self.unit == "bytes" else f"{value:,.0f} {self.unit}"


def _plain(text: str) -> str:
    return _ESCAPES.sub("", text).translate(CONTROLS)


def clock_text(seconds: float) -> str:
    """m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short_number(number: float) -> str:
    """With three digits: 950, 23.5k, 1.21M, 3.28B, 1T."""
    rounded = float(f"{number:.3g}")  # which may have the next unit
    units = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
    unit, size = next((one for one in units if rounded >= one[1]), ("", 1.0))
    return f"{rounded / size:.3g}{unit}"
