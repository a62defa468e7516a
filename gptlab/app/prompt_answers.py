"""Trained runs continue prompts, for the dashboard (`report/dashboard/model_process.py` starts the process).

Each line of the input is a question, and gets one line of JSON:

    {"run": FOLDER, "prompt": ..., "temperature": ..., "top_k": ..., "top_p": ..., "min_p": ..., "max_tokens": ...,
     "seed": ...}
        loads the run, unless it is the one before, and begins a text (top_k 0: all tokens); {"step": its checkpoint's}
    {"next": true}
        draws a token: {"text": what it adds, "name": its bytes, "probability": ..., "alternatives": [[name,
        probability], ...]}, or {"end": true} after the last one

{"error": ...} answers what cannot be done. A question with a run ends the text before it.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gptlab.app.run.loaded_run import LoadedRun, load_run
from gptlab.config.errors import UserError, one_line
from gptlab.eval.continuation import Drawing, DrawnToken, continue_text
from gptlab.runtime.files.plain_file import to_json
from gptlab.runtime.hardware.memory import memory_errors_explained, smaller_model
from gptlab.runtime.records.console import Console
from gptlab.training.checkpoint.names import list_checkpoints

ALTERNATIVES = 8


class Answers:
    """The state between two questions: the model, and the text that it writes."""

    def __init__(self) -> None:
        self._loaded: tuple[tuple[object, ...], LoadedRun] | None = None
        """With the run's folder and the identity of its newest checkpoint, which changes when the run trains on, or is
        trained again in the same folder."""
        self._tokens: Iterator[DrawnToken] = iter(())
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """UserError where a run cannot be loaded, or its prompt not be continued."""
        return self._next() if "run" not in question else self._begin(question)

    def _begin(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._tokens = iter(())
        which = str(asked["run"]), *map(_identity, list_checkpoints(Path(asked["run"], "checkpoints"))[-1:])
        if self._loaded is None or self._loaded[0] != which:
            self._loaded = None  # frees its memory before the next one takes any
            self._loaded = which, load_run(asked["run"], console=Console(stream=sys.stderr))
        run = self._loaded[1]
        drawing = Drawing(
            max_tokens=asked["max_tokens"], temperature=asked["temperature"], top_k=asked["top_k"] or None,
            top_p=asked["top_p"], min_p=asked["min_p"],
        )  # fmt: skip
        (self._tokens,) = continue_text(
            run.model, run.tokenizer, asked["prompt"], drawing, seed=asked["seed"],
            alternatives=min(ALTERNATIVES, run.tokenizer.vocab_size),
        )  # fmt: skip
        self._decoder.reset()
        return {"step": run.step}

    def _next(self) -> dict[str, Any]:
        token = next(self._tokens, None)
        if token is None:
            return {"end": True}
        return {
            "text": self._decoder.decode(token.piece),
            "name": _name(token.piece),
            "probability": token.probability,
            "alternatives": [[_name(piece), probability] for piece, probability in token.alternatives],
        }


def _identity(checkpoint: Path) -> tuple[object, ...]:
    """Differs between two checkpoints of the same name."""
    status = checkpoint.stat()
    return checkpoint.name, status.st_ino, status.st_mtime_ns


def _name(piece: bytes) -> str:
    """A token as text; bytes that are no whole characters as \\xNN."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in piece)


def main(descriptor: int) -> None:
    """Answer into the file of this descriptor, until the input ends."""
    out = os.fdopen(descriptor, "w", encoding="utf-8")
    answers = Answers()
    for line in sys.stdin:
        try:
            with memory_errors_explained(smaller_model):
                answer = answers.answer(json.loads(line))
        except UserError as error:
            answer = {"error": one_line(error)}
        out.write(to_json(answer) + "\n")
        out.flush()
