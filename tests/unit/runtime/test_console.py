"""The console: plain lines in pipes, one live line on a terminal, the same words in log.txt, and no way to fail."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from gptlab.runtime.records import console as console_module
from gptlab.runtime.records.console import Console, Progress, clock_text
from gptlab.runtime.records.metrics import AppendFile


class FakeTerminal(io.StringIO):
    """A stream that says it is a terminal, and keeps what was drawn."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return FakeTerminal()


def logged(folder: Path, *, stream: TextIO | None = None) -> Console:
    """A console that logs to FOLDER/log.txt."""
    console = Console(stream=stream)
    folder.mkdir(exist_ok=True)
    console.open_log(folder / "log.txt")
    return console


def visible(drawn: str, columns: int = 40) -> list[str]:
    """What a terminal shows at the end, by a small emulation: CR, LF, erase line, cursor up, colours ignored."""
    rows, row, column, i = [""], 0, 0, 0
    while i < len(drawn):
        if drawn.startswith("\x1b[", i):
            end = i + 2
            while not drawn[end].isalpha():
                end += 1
            if drawn[end] == "K":
                rows[row] = ""
            elif drawn[end] == "A":
                row -= int(drawn[i + 2 : end])
            i = end
        elif drawn[i] == "\r":
            column = 0
        elif drawn[i] == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        else:
            if column == columns:  # wraps
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            rows[row] = rows[row][:column].ljust(column) + drawn[i] + rows[row][column + 1 :]
            column += 1
        i += 1
    return [text.rstrip() for text in rows]


def test_a_pipe_gets_plain_lines_and_the_log_the_same(tmp_path: Path) -> None:
    stream = io.StringIO()
    with logged(tmp_path, stream=stream) as console:
        console.line("one [bold]two[/bold]")
        console.live("step 1")
        console.warn("careful")
    expected = "one [bold]two[/bold]\nstep 1\nwarning: careful\n"
    assert stream.getvalue() == expected
    assert (tmp_path / "log.txt").read_text() == expected


def test_a_pipe_gets_a_live_line_every_few_seconds_and_the_log_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: without a terminal a line every few seconds, and the last one before whatever ends the run."""
    clock = _Clock(monkeypatch)
    stream = io.StringIO()
    with logged(tmp_path, stream=stream) as console:
        for step in range(13):
            console.live(f"step {step}", lambda: pytest.fail("made for a terminal"))
            clock.now += 1.0
        console.settle()
        console.settle()
        console.line("the end")
    assert stream.getvalue().splitlines() == ["step 0", "step 5", "step 10", "step 12", "the end"]
    assert (tmp_path / "log.txt").read_text().splitlines() == [*(f"step {i}" for i in range(13)), "the end"]


def test_a_terminal_shows_as_many_parts_as_it_has_room_for(terminal: FakeTerminal, tmp_path: Path) -> None:
    with logged(tmp_path, stream=terminal) as console:
        console.live("step 9 | all of it", lambda: ["0:07 left", "x" * 27, "3", "45"])
        assert visible(terminal.getvalue()) == ["0:07 left  " + "x" * 27]  # and "3" after two spaces makes 41
        console.live("step 10 | all of it", lambda: ["y" * 50, "3"])
    assert [row for row in visible(terminal.getvalue()) if row] == ["y" * 40, "y" * 10]
    assert (tmp_path / "log.txt").read_text() == "step 9 | all of it\nstep 10 | all of it\n"


def test_a_settled_live_line_is_before_what_follows(terminal: FakeTerminal) -> None:
    with Console(stream=terminal) as console:
        console.live("step 9")
        console.settle()
        console.line("---")
    assert [row for row in visible(terminal.getvalue()) if row] == ["step 9", "---"]


def test_work_of_unknown_length_moves_on_a_terminal(terminal: FakeTerminal, tmp_path: Path) -> None:
    """Contract: compiling and validating show movement, whatever the main thread is deep in, and leave nothing."""
    console = logged(tmp_path, stream=terminal)
    console.live("step 9")
    with console.busy("compiling"):
        assert wait_until(lambda: terminal.getvalue().count("compiling") >= 4)
        rows = [row for row in visible(terminal.getvalue()) if row]
        assert rows[0] == "step 9"
        assert rows[1].startswith("compiling")
        assert len(rows) == 2
    console.line("compiled")
    console.close()
    assert [row for row in visible(terminal.getvalue()) if row] == ["step 9", "compiled"]
    assert (tmp_path / "log.txt").read_text() == "step 9\ncompiled\n"


def test_and_in_a_pipe_says_how_long_it_has_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module.PlainDisplay, "progress_seconds", 0.02)
    monkeypatch.setattr(console_module, "_BUSY_SECONDS", 0.02)
    stream = io.StringIO()
    with logged(tmp_path, stream=stream) as console:
        with console.busy("compiling"):
            assert wait_until(lambda: stream.getvalue().count("compiling: 0:00\n") >= 2)
        with pytest.raises(ZeroDivisionError), console.busy("validating"):
            raise ZeroDivisionError
        written = stream.getvalue()
        time.sleep(0.1)
        assert stream.getvalue() == written, "it has ended with the work"
    assert (tmp_path / "log.txt").read_text() == ""


def test_an_error_goes_to_stderr_and_into_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: fatal errors are errors, on stderr."""
    with logged(tmp_path) as console:
        console.error("training failed: \x1b[2Jnan")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "gptlab: error: training failed: nan\n")
    assert (tmp_path / "log.txt").read_text() == "error: training failed: nan\n"


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_terminal_shows_one_live_line_below_the_others(
    terminal: FakeTerminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)  # on a busy machine these lines take longer than a drawing
    console = logged(tmp_path, stream=terminal)
    console.line("start [bold]")
    for step in range(500):
        console.live(f"step {step}")
    console.line("eval")
    assert visible(terminal.getvalue())[:3] == ["start [bold]", "eval", "step 0"]  # a line redraws what is below
    console.live("step 500")
    console.close()
    rows = [row for row in visible(terminal.getvalue()) if row]
    assert rows == ["start [bold]", "eval", "step 500"]  # the last text stays, though the throttle had skipped it
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert log == ["start [bold]", *(f"step {i}" for i in range(500)), "eval", "step 500"]
    # Ten drawings a second at most: 501 calls within no time are a handful (each drawing erases the line before).
    assert terminal.getvalue().count("\x1b[2K") < 30
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h")  # the cursor is back


def test_a_live_line_too_long_is_cropped_while_live(terminal: FakeTerminal) -> None:
    console = Console(stream=terminal)
    text = "step 1 " + "figures " * 10
    console.live(text)
    rows = visible(terminal.getvalue())
    assert rows == [text[:39] + "…"]
    console.close()
    shown = "".join(row.ljust(40) for row in visible(terminal.getvalue())).rstrip()
    assert shown == text.rstrip()  # as an ordinary line it is whole, and wraps


def test_the_live_line_costs_little(terminal: FakeTerminal) -> None:
    with Console(stream=terminal) as console:
        console.live("first")  # imports and starts the display
        start = time.thread_time()
        for step in range(2000):
            console.live(f"step {step} loss 3.25 tokens/s 45,000")
        # Of this thread's processor time, measured 5 to 8 microseconds a call; 0.2 ms is what a step can spare.
        assert (time.thread_time() - start) / 2000 < 0.0002


def test_no_colour_where_the_user_wants_none(terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn() -> str:
        terminal.truncate(0)
        with Console(stream=terminal) as console:
            console.warn("careful")
        return terminal.getvalue()

    assert "\x1b[33m" in warn()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in warn()


def test_a_dumb_terminal_gets_plain_lines(terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Console(stream=terminal) as console:
        console.live("step 1")
        console.live("step 2")
    assert terminal.getvalue() == "step 1\nstep 2\n"


def test_text_that_a_model_sampled_cannot_steer_the_terminal(terminal: FakeTerminal, tmp_path: Path) -> None:
    nasty = "\x1b[2Ja\x1b[31mb\x1b[0m\x07\x1b]0;title\x07c\x9bd\r\x08\x00e\tf\ng\x1b"
    for stream in (terminal, io.StringIO()):
        stream.truncate(0)
        with logged(tmp_path, stream=stream) as console:
            console.line(nasty)
        assert "\x1b[2J" not in stream.getvalue()
        assert "title" not in stream.getvalue()
        assert "\x07" not in stream.getvalue()
    assert (tmp_path / "log.txt").read_text() == "abcde\tf\ng\n" * 2


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_what_a_code_page_lacks_becomes_a_question_mark(encoding: str, tmp_path: Path) -> None:
    raw = io.BytesIO()
    with logged(tmp_path, stream=io.TextIOWrapper(raw, encoding=encoding)) as console:
        console.line("tokens → 語 \ud800 ok")
        console.live("é")
    shown = raw.getvalue().decode(encoding).split()
    assert shown[0] == "tokens"
    assert shown[-2] == "ok"
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "tokens → 語 ? ok\né\n"


def test_a_closed_stream_stops_printing_and_goes_on_logging(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = logged(tmp_path, stream=stream)
    stream.close()
    console.line("one")
    console.live("two")
    with console.progress("three", 2, "documents") as progress:
        progress.advance(2)
    console.close()
    assert (tmp_path / "log.txt").read_text().startswith("one\ntwo\nthree: 2 documents in ")


def test_a_broken_pipe_ends_the_printing_not_the_run(tmp_path: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from gptlab.runtime.records.console import Console
        with Console() as console:
            console.open_log(Path({str(tmp_path / "log.txt")!r}))
            for step in range(20_000):
                console.live(f"step {{step}}")
        sys.exit(7)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().strip() == b"step 0"
        process.stdout.close()  # as `| head -1` does
        assert process.stderr.read() == b""
        assert process.wait() == 7
    assert (tmp_path / "log.txt").read_text().splitlines()[-1] == "step 19999"


def test_a_terminal_that_is_gone_ends_the_printing_whatever_it_showed(terminal: FakeTerminal, tmp_path: Path) -> None:
    class HungUp(FakeTerminal):
        left = 0

        def write(self, text: str) -> int:
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    for writes in range(1, 40):
        stream = HungUp()
        stream.left = writes
        with logged(tmp_path / str(writes), stream=stream) as console:
            console.live("step 1", lambda: ["step 1"])
            with console.busy("validating"):
                console.line("between")
            with console.progress("encoding", 2, "documents") as progress:
                progress.interval_seconds = 0.0
                progress.advance(2)
            console.live("step 2")
        assert (tmp_path / str(writes) / "log.txt").read_text().splitlines()[-1] == "step 2"


def test_no_stdout_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # pythonw.exe
    with logged(tmp_path) as console:
        console.line("logged")
        with console.progress("work", None, "documents"):
            pass
    assert (tmp_path / "log.txt").read_text().startswith("logged\nwork: 0 documents in ")


def test_what_was_shown_before_the_log_was_there_is_in_it(tmp_path: Path) -> None:
    console = Console(stream=io.StringIO())
    console.line("sizing")
    assert console.log_position() == 0
    console.open_log(tmp_path / "log.txt")
    console.line("training")
    assert console.log_position() == len("sizing\ntraining\n")
    console.close()
    assert (tmp_path / "log.txt").read_text() == "sizing\ntraining\n"


def test_the_log_is_cut_at_resume(tmp_path: Path) -> None:
    with logged(tmp_path, stream=io.StringIO()) as console:
        console.line("step 1")
        offset = console.log_position()
        console.line("step 2, lost")
    console = Console(stream=io.StringIO())
    console.line("resuming")
    assert console.reopen_log(tmp_path / "log.txt", offset)
    console.line("step 2")
    console.close()
    assert (tmp_path / "log.txt").read_text() == "step 1\nresuming\nstep 2\n"
    assert not Console(stream=io.StringIO()).reopen_log(tmp_path / "log.txt", 10**6)


def test_its_position_is_read_while_nothing_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that another thread appended meanwhile was written twice, or not at all."""
    others: list[threading.Thread] = []
    position = AppendFile.position

    def slow(log: AppendFile) -> int:
        others.append(threading.Thread(target=console.line, args=("from another thread",)))
        others[-1].start()
        others[-1].join(0.1)
        assert others[-1].is_alive()
        return position(log)

    with logged(tmp_path, stream=io.StringIO()) as console:
        console.line("step 1")
        with monkeypatch.context() as patch:
            patch.setattr(AppendFile, "position", slow)
            assert console.log_position() == len("step 1\n")
        others[0].join()
    assert (tmp_path / "log.txt").read_text() == "step 1\nfrom another thread\n"


class _Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(console_module.time, "monotonic", lambda: self.now)


def test_progress_in_a_pipe_is_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = _Clock(monkeypatch)
    stream = io.StringIO()
    console = logged(tmp_path, stream=stream)
    with console.progress("encoding", 4_000, "documents") as progress:
        for _ in range(1200):
            clock.now += 0.01
            progress.advance()
    console.close()
    # 100 documents a second; lines at 5 s and 10 s; (4000 - 500) / 100 = 35 s, (4000 - 1000) / 100 = 30 s left.
    assert stream.getvalue().splitlines() == [
        "encoding: 500 of 4,000 documents (12%), 100 documents/s, 0:35 left",
        "encoding: 1,000 of 4,000 documents (25%), 100 documents/s, 0:30 left",
        "encoding: 1,200 documents in 12.0 s, 100 documents/s",
    ]
    assert (tmp_path / "log.txt").read_text().splitlines() == stream.getvalue().splitlines()[-1:]


def test_progress_in_bytes_and_without_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    shown: list[tuple[str, float | None, str]] = []
    for total in (None, 10_000_000):
        progress = Progress("reading", total, "bytes", show=lambda *args: shown.append(args), interval_seconds=1.0)
        clock.now += 2.0
        progress.advance(5_000_000)
    progress.advance(20_000_000)  # within the second: not shown
    clock.now += 1.0
    progress.advance(0)
    assert shown == [
        ("reading", None, "5.0 MB, 2.5 MB/s"),
        ("reading", 0.5, "5.0 of 10.0 MB (50%), 2.5 MB/s, 0:02 left"),
        ("reading", 1.0, "25.0 of 10.0 MB (100%), 8.3 MB/s, 0:00 left"),  # a total that was a guess
    ]


def test_progress_that_fails_says_nothing_of_success(terminal: FakeTerminal, tmp_path: Path) -> None:
    console = logged(tmp_path, stream=terminal)
    with pytest.raises(ZeroDivisionError), console.progress("work", 10, "documents") as progress:
        progress.advance(1 / 0)
    console.line("next")
    console.close()
    assert [row for row in visible(terminal.getvalue()) if row] == ["next"]
    assert (tmp_path / "log.txt").read_text() == "next\n"


def test_progress_on_a_terminal_is_a_bar_that_makes_room(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    console = Console(stream=terminal)
    console.live("step 9")
    with console.progress("encoding", 200, "documents") as progress:
        for _ in range(100):
            progress.advance()
        time.sleep(0.11)
        progress.advance()
        rows = [row for row in visible(terminal.getvalue(), 100) if row]
        assert rows[0] == "step 9"
        assert rows[1].startswith("encoding ━━")
        assert "101 of 200 documents (50%)" in rows[1]
        assert len(rows) == 2
    console.live("step 10")
    console.close()
    rows = [row for row in visible(terminal.getvalue(), 100) if row]
    assert (rows[0], rows[2]) == ("step 9", "step 10")
    assert rows[1].startswith("encoding: 101 documents in ")


def test_clock_by_hand() -> None:
    assert [clock_text(s) for s in (0, 59.6, 61, 3599, 3600, 36_061)] == [
        "0:00", "1:00", "1:01", "59:59", "1:00:00", "10:01:01",
    ]  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals are POSIX")
def test_a_real_terminal_that_hangs_up_does_not_end_the_run(tmp_path: Path) -> None:
    import pty

    parent, child = pty.openpty()
    with os.fdopen(child, "w", encoding="utf-8") as stream:
        console = logged(tmp_path, stream=stream)
        console.live("step 1")
        os.close(parent)  # the connection is lost
        console.line("eval")
        console.live("step 2")
        console.close()
    assert (tmp_path / "log.txt").read_text() == "step 1\neval\nstep 2\n"


def test_a_notebook_has_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    console = Console(stream=notebook)
    for step in range(100):
        clock.now += 0.1
        console.live(f"step {step} in full", lambda step=step: [f"step {step}", "loss 2"])
    console.line("validated")
    console.live("step 100 in full", lambda: ["step 100"])
    console.settle()
    written = notebook.getvalue()
    assert written.count("\r") <= 100 * 0.1 / 0.5 + 3, "drawn twice a second"
    shown = [line.rpartition("\r")[2].rstrip() for line in written.split("\n")]
    assert shown == ["validated", "step 100", ""]
    assert "step 0  loss 2\r" in written
