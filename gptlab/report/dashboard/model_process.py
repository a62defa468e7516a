"""The process that answers prompts: one model at a time, started by the first prompt, ended when nobody asks.

A model needs torch and gigabytes, and a damaged run may take a process down: neither shall happen to the server. It
gets one line of JSON for each line that it is sent (`gptlab.app.prompt_answers`), so that a prompt that nobody waits
for any more costs nothing: the next token is not asked for.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from gptlab.config.errors import UserError, one_line
from gptlab.runtime.files.plain_file import to_json
from gptlab.runtime.processes.own_python import own_python

_ANSWERS = (
    "import os; answers = os.dup(1); os.dup2(2, 1); "  # what imports and models print is no answer
    "from gptlab.app.prompt_answers import main; main(answers)"
)
IDLE_SECONDS = 300.0
LOAD_SECONDS, TOKEN_SECONDS = 300.0, 60.0
"""After which the process counts as hanging, and is killed."""
EXIT_SECONDS = 2.0
"""How long a process that closed its output may take to end by itself, with the exit code that says why."""
BUSY_SECONDS = 5.0
"""How long a prompt waits for the one before: a page that starts another one has just ended its own."""
MAX_ANSWER_BYTES = 1 << 20

_LIMITS: Mapping[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, 100.0),
    "top_k": (int, 0, 1_000_000),
    "top_p": (float, 0.01, 1.0),
    "min_p": (float, 0.0, 0.99),
    "max_tokens": (int, 1, 4_096),
    "seed": (int, 0, 2**53),
}
"""{setting: its type, least and greatest value}."""


def checked_settings(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt and settings of a request. UserError where one is missing, of the wrong type or out of range."""
    settings: dict[str, Any] = {"prompt": asked.get("prompt")}
    if not isinstance(settings["prompt"], str):
        raise UserError("prompt must be a text")
    for name, (kind, least, most) in _LIMITS.items():
        value: Any = asked.get(name)
        is_number = type(value) is int or (type(value) is float and kind is float)
        if not is_number or not least <= value <= most:
            raise UserError(f"{name} must be a number from {least:g} to {most:g}")
        settings[name] = kind(value)
    return settings


class ModelProcess:
    """Answers prompts, one after the other. Threads may share it."""

    def __init__(self, command: Sequence[str] = own_python(_ANSWERS), *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._command = command
        self._idle_seconds = idle_seconds
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None
        self._idle: threading.Timer | None = None

    @property
    def is_running(self) -> bool:
        process = self._process
        return process is not None and process.poll() is None

    def answer(self, run: Path, settings: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """What the run's newest weights make of a prompt, as JSON objects: first `{"step": ...}` once the model is
        loaded, then one for each token, with its text, its probability, and the likeliest ones.

        UserError where the run cannot be loaded, the process ended, or another prompt is being answered. Closing the
        iterator ends the answer.
        """
        if not self._turn.acquire(timeout=BUSY_SECONDS):
            raise UserError("the model is answering another prompt: stop that one first")
        try:
            self._cancel_idle()
            if not self.is_running:
                self._start()
            yield self._ask({"run": str(run), **settings}, LOAD_SECONDS)
            while "end" not in (token := self._ask({"next": True}, TOKEN_SECONDS)):
                yield token
        finally:
            self._end_when_idle()
            self._turn.release()

    def close(self) -> None:
        """End the process, whatever it computes."""
        self._cancel_idle()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, self._printed):
                with suppress(OSError):
                    stream.close()  # type: ignore[union-attr]

    def _start(self) -> None:
        self.close()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed
        )

    def _ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process
        if process is None:
            raise UserError("the dashboard is ending")
        assert process.stdin is not None
        assert process.stdout is not None
        timed_out = threading.Event()

        def end() -> None:
            timed_out.set()
            process.kill()

        watchdog = threading.Timer(seconds, end)
        watchdog.daemon = True
        watchdog.start()
        try:
            process.stdin.write(to_json(question).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline(MAX_ANSWER_BYTES))
        except (OSError, ValueError):
            raise UserError(self._why_it_ended(process, seconds, timed_out=timed_out.is_set())) from None
        finally:
            watchdog.cancel()
        if "error" in answer:
            raise UserError(str(answer["error"]))
        return answer

    def _why_it_ended(self, process: subprocess.Popen[bytes], seconds: float, *, timed_out: bool) -> str:
        with suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_SECONDS)
        process.kill()
        code, lines = process.wait(), list[bytes]()
        if timed_out:
            return f"the model gave no answer within {seconds:g} seconds, and was ended"
        with suppress(OSError, ValueError):
            assert self._printed is not None
            self._printed.seek(0)
            lines = self._printed.read().split(b"\n")
        last = next((line for line in reversed(lines) if line.strip()), b"").decode("utf-8", "replace")
        return one_line(UserError(f"the model's process ended with exit code {code}: {last or 'it gave no reason'}"))

    def _end_when_idle(self) -> None:
        self._cancel_idle()
        self._idle = threading.Timer(self._idle_seconds, self._end_unless_busy)
        self._idle.daemon = True
        self._idle.start()

    def _end_unless_busy(self) -> None:
        if self._turn.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._turn.release()

    def _cancel_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
