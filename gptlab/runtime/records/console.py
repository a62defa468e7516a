"""What a person sees of a run: lines, one live line on a terminal, and the same text in log.txt."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from gptlab.runtime.files.append_file import AppendFile

if TYPE_CHECKING:
    from gptlab.runtime.records.terminal import TerminalDisplay

# ECMA-48 escape sequences: CSI (colours, cursor), OSC (titles, links; ended by BEL or ST), two-character ones.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
# A model's sample may hold any character: those that move the cursor or ring the bell do not reach the terminal.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
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

    def line(self, text: str, *, warning: bool = False) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def live(self, text: str, parts: Sequence[str]) -> None:
        self._pending = text
        if time.monotonic() - self._live_at >= self.progress_seconds:
            self.settle()

    def settle(self) -> None:
        if self._pending:
            self._live_at = time.monotonic()
            text, self._pending = self._pending, ""
            self.line(text)

    def begin_progress(self, description: str) -> None:
        self.settle()

    def progress(self, description: str, share: float | None, figures: str) -> None:
        self.line(f"{description}: {figures}")

    def end_progress(self) -> None:
        pass

    def close(self) -> None:
        self.settle()


class Console:
    """Prints for a person and keeps log.txt; where the stream is closed (a pipe), logging continues.

    Escape sequences and control characters are removed from all text. Any thread may use it.
    """

    def __init__(self, log_path: Path | None = None, *, stream: TextIO | None = None, quiet: bool = False) -> None:
        """`quiet`: print warnings and results only; log.txt is the same."""
        self._quiet = quiet
        self._stream = sys.stdout if stream is None else stream
        self._display = _make_display(self._stream)
        self._log: AppendFile | None = None
        self._unlogged: list[str] = []
        self._lock = threading.RLock()
        if log_path is not None:
            self.open_log(log_path)

    def open_log(self, path: Path, *, offset: int | None = None) -> bool:
        """Log to `path` from now on; what was shown before this goes there first.

        At resume, `offset` cuts off what was logged after the checkpoint. False where the file is not the one that
        had this offset.
        """
        with self._lock:
            self._log = AppendFile(path)
            intact = offset is None or self._log.truncate(offset)
            for text in self._unlogged:
                self._log.write(text)
            self._unlogged.clear()
            return intact

    def log_position(self) -> int:
        """Bytes of log.txt so far; 0 without a log. They are durable after `sync_log`."""
        return 0 if self._log is None else self._log.position()

    def sync_log(self) -> None:
        """Make log.txt durable up to here; another thread may do this. UserError where the disk refuses."""
        if self._log is not None:
            self._log.sync()

    def line(self, text: str) -> None:
        """Print and log."""
        text = _plain(text)
        self._record(text)
        if not self._quiet:
            self._show(lambda display: display.line(self._printable(text)))

    def result(self, text: str) -> None:
        """Print and log, also in quiet mode: how a run ends."""
        text = _plain(text)
        self._record(text)
        self._show(lambda display: display.line(self._printable(text)))

    def warn(self, text: str) -> None:
        """Print and log, marked as a warning."""
        text = f"warning: {_plain(text)}"
        self._record(text)
        self._show(lambda display: display.line(self._printable(text), warning=True))

    def error(self, text: str) -> None:
        """Print on stderr, and log: what ends a run. One line."""
        self.settle()
        self._record(f"error: {_plain(text)}")
        with contextlib.suppress(OSError, ValueError):
            print(f"gptlab: error: {_plain(text)}", file=sys.stderr, flush=True)

    def live(self, text: str, parts: Sequence[str] = ()) -> None:
        """Log, and show in place of the last live text; without a terminal, print every few seconds.

        A terminal shows `parts` instead, where they are given: as many, from the first on, as fit its width.
        """
        text, parts = _plain(text), [self._printable(_plain(part)) for part in parts]
        self._record(text)
        if not self._quiet:
            self._show(lambda display: display.live(self._printable(text), parts))

    def settle(self) -> None:
        """Make the latest live text an ordinary line."""
        self._show(lambda display: display.settle())

    @contextmanager
    def busy(self, description: str) -> Iterator[None]:
        """Show that work of unknown length is under way, and for how long, until the context is left.

        A moving bar on a terminal, elsewhere a line every few seconds; neither is logged. Another thread draws, since
        the work may block inside a library.
        """
        if self._quiet:
            yield
            return
        interval_seconds = _BUSY_SECONDS
        if self._display is not None:
            interval_seconds = max(interval_seconds, self._display.progress_seconds)
        started, over = time.monotonic(), threading.Event()

        def draw() -> None:
            while not over.wait(interval_seconds):
                self._show_progress(description, None, clock_text(time.monotonic() - started))

        self._show(lambda display: display.begin_progress(self._printable(_plain(description))))
        thread = threading.Thread(target=draw, name="gptlab-busy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._show(lambda display: display.end_progress())

    @contextmanager
    def progress(self, description: str, total: float | None, unit: str) -> Iterator[Progress]:
        """Show the progress of long work: a bar on a terminal, elsewhere a line every few seconds.

        `total`: None where it is unknown. `unit`: a plural ("documents"), or "bytes". A closing line with the amount
        and the rate is printed and logged unless the work raises.
        """
        shown = None if self._quiet else self._display
        interval_seconds = float("inf") if shown is None else shown.progress_seconds
        progress = Progress(description, total, unit, show=self._show_progress, interval_seconds=interval_seconds)
        if not self._quiet:
            self._show(lambda display: display.begin_progress(self._printable(_plain(description))))
        try:
            yield progress
        finally:
            self._show(lambda display: display.end_progress())
        self.line(progress.closing_line())

    def close(self) -> None:
        """Leave the terminal as it was, and finish log.txt."""
        self._show(lambda display: display.close())
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, text: str) -> None:
        with self._lock:
            if self._log is None:
                self._unlogged.append(text)
            else:
                self._log.write(text)

    def _show_progress(self, description: str, share: float | None, figures: str) -> None:
        description = _plain(description)
        self._show(lambda display: display.progress(self._printable(description), share, self._printable(figures)))

    def _show(self, action: Callable[[PlainDisplay | TerminalDisplay], None]) -> None:
        """Do `action` on the display; nothing once the stream is closed, since a run outlives its terminal."""
        with self._lock:
            if self._display is None:
                return
            try:
                if not self._stream.closed:
                    action(self._display)
            except OSError:
                self._display = None
                # What the stream still buffers would raise again when Python flushes it at exit.
                with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), self._stream.fileno())

    def _printable(self, text: str) -> str:
        """`text` with what the stream cannot encode (Windows code pages, lone surrogates) replaced by "?"."""
        encoding = self._stream.encoding or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)


class QuietConsole(Console):
    """For the ranks other than 0: prints and logs nothing."""

    def __init__(self) -> None:
        super().__init__(stream=io.StringIO())

    def open_log(self, path: Path, *, offset: int | None = None) -> bool:
        return True

    def error(self, text: str) -> None:
        pass

    def _record(self, text: str) -> None:
        pass

    def _show(self, action: Callable[[PlainDisplay | TerminalDisplay], None]) -> None:
        pass


class Progress:
    """The progress of a piece of work. `description`, `total` and `done` may be set at any time."""

    def __init__(
        self,
        description: str,
        total: float | None,
        unit: str,
        *,
        show: Callable[[str, float | None, str], None],
        interval_seconds: float,
    ) -> None:
        self.description = description
        self.total = total
        self.done = 0.0
        self._unit = unit
        self._show = show
        self._interval_seconds = interval_seconds
        self._started = self._shown = time.monotonic()

    def advance(self, n: float = 1) -> None:
        """`n` more units are done."""
        self.done += n
        now = time.monotonic()
        if now - self._shown >= self._interval_seconds:
            self._shown = now
            share = min(1.0, self.done / self.total) if self.total else None
            self._show(self.description, share, self._figures(now - self._started))

    def closing_line(self) -> str:
        seconds = time.monotonic() - self._started
        return f"{self.description}: {self._amount(self.done)} in {seconds:.1f} s{self._rate(seconds)}"

    def _figures(self, seconds: float) -> str:
        if not self.total:
            return f"{self._amount(self.done)}{self._rate(seconds)}"
        share = f"{self._number(self.done)} of {self._amount(self.total)} ({min(1.0, self.done / self.total):.0%})"
        left = f", {clock_text(seconds * max(0.0, self.total / self.done - 1))} left" if self.done else ""
        return f"{share}{self._rate(seconds)}{left}"

    def _rate(self, seconds: float) -> str:
        return f", {self._amount(self.done / seconds)}/s" if self.done and seconds > 0 else ""

    def _amount(self, value: float) -> str:
        return f"{self._number(value)} {'MB' if self._unit == 'bytes' else self._unit}"

    def _number(self, value: float) -> str:
        return f"{value / 1e6:,.1f}" if self._unit == "bytes" else f"{value:,.0f}"


def _make_display(stream: TextIO | None) -> PlainDisplay | TerminalDisplay | None:
    """None where there is nothing to print on (pythonw has no sys.stdout)."""
    if stream is None:
        return None
    if os.environ.get("TERM") in ("dumb", "unknown") or not stream.isatty():
        return PlainDisplay(stream)
    from gptlab.runtime.records.terminal import TerminalDisplay  # rich takes 60 ms to import: only where it draws

    return TerminalDisplay(stream)


def _plain(text: str) -> str:
    return _ESCAPES.sub("", text).translate(_CONTROLS)


def clock_text(seconds: float) -> str:
    """m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
