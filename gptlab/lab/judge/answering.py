"""The judge's end of the pipes: every read and write has a deadline, and every byte is what the protocol says."""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import select
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import IO

import numpy as np
from numpy.typing import NDArray

from gptlab.lab.judge.protocol import COUNT, END, HEADER, LOGIT, LOGITS, READY, TENSOR, ask, draw
from gptlab.lab.judge.questions import CHUNK_ELEMENTS
from gptlab.lab.judge.rules import RuleError
from gptlab.lab.judge.supervise import Supervised

MAX_NAME_BYTES = 1000
_PIPE_BYTES = 2**20


class Answering:
    """A candidate's process that answers. Every method raises RuleError (protocol, shape, wall-clock)."""

    def __init__(self, running: Supervised, *, start_seconds: float, answer_seconds: float) -> None:
        """Wait `start_seconds` at most until its weights are loaded."""
        self._in, self._out = running.stdin, running.stdout
        self._seconds = answer_seconds
        for file in (self._in, self._out):
            os.set_blocking(file.fileno(), False)
            if sys.platform == "linux":  # a sixteenth of the reads: an answer of eight rows has tens of megabytes
                with suppress(OSError):  # a user may have used up what /proc/sys/fs/pipe-user-pages-soft allows
                    fcntl.fcntl(file.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._until = time.monotonic() + start_seconds
        if HEADER.unpack(self._read(HEADER.size)) != (READY, 0, 0, 0):
            raise RuleError("protocol", "the process does not say that it is ready")

    def logits(self, tokens: NDArray[np.int32], entries: int) -> Iterator[NDArray[np.float32]]:
        """The logits after every token of `tokens` (rows, length), in pieces of (n, entries), row after row."""
        rows, length = tokens.shape
        number = secrets.randbits(64)
        self._send(ask(number, tokens))
        self._require(HEADER.unpack(self._read(HEADER.size)), (LOGITS, number, rows, length))
        (found,) = COUNT.unpack(self._read(COUNT.size))
        if found != entries:
            raise RuleError("shape", f"an answer has {found} logits a token, the vocabulary has {entries} entries")
        left, most = rows * length, max(1, CHUNK_ELEMENTS // entries)
        while left:
            count = min(left, most)
            yield np.frombuffer(self._read(count * entries * LOGIT.itemsize), LOGIT).reshape(count, entries)
            left -= count

    def initial_weights(
        self, seed: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """The values that the candidate's code gives the weights of these shapes at first, in any order, each once."""
        number, missing = secrets.randbits(64), dict(shapes)
        self._send(draw(number, seed))
        while (header := HEADER.unpack(self._read(HEADER.size)))[0] != END:
            self._require(header[:2], (TENSOR, number))
            if header[2] > MAX_NAME_BYTES or header[3] > 8:
                raise RuleError("protocol", "a weight's name or shape is too long")
            name = self._read(header[2]).decode(errors="replace")
            shape = tuple(COUNT.unpack(self._read(COUNT.size))[0] for _ in range(header[3]))
            if missing.pop(name, None) != shape:
                raise RuleError("checkpoint", f"the code makes a weight {name} {shape}, which the checkpoint lacks")
            yield name, np.frombuffer(self._read(math.prod(shape) * LOGIT.itemsize), LOGIT).reshape(shape)
        self._require(header, (END, number, 0, 0))
        if missing:
            raise RuleError("checkpoint", f"the code does not make {next(iter(missing))}, a weight of the checkpoint")

    def end(self) -> None:
        """Close the questions. Nothing may come after the last answer."""
        self._require_silence()
        self._in.close()
        self._until = time.monotonic() + self._seconds
        if self._some(1):
            raise RuleError("protocol", "the process wrote more than its answers")

    def _send(self, question: bytes) -> None:
        """Send a question, if no answer came before it."""
        self._require_silence()
        self._until = time.monotonic() + self._seconds
        content = memoryview(question)
        while content:
            self._wait(self._in, select.POLLOUT)
            try:
                content = content[os.write(self._in.fileno(), content[:65536]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise RuleError("protocol", "the process does not read its questions") from None

    def _require_silence(self) -> None:
        if _ready(self._out, select.POLLIN, 0.0):
            what = "before it was asked" if self._some(1) else "nothing more: it ended, or closed its output"
            raise RuleError("protocol", f"the process answered {what}")

    def _require(self, found: tuple[object, ...], wanted: tuple[object, ...]) -> None:
        if found != wanted:
            raise RuleError("protocol", "an answer does not belong to its question")

    def _read(self, size: int) -> bytearray:
        content = bytearray()
        while len(content) < size:
            part = self._some(size - len(content))
            if not part:
                raise RuleError("protocol", "the process ended, or closed its output, before its answer was complete")
            content += part
        return content

    def _some(self, most: int) -> bytes:
        """What there is, once there is something; nothing at the end."""
        while True:
            self._wait(self._out, select.POLLIN)
            try:
                return os.read(self._out.fileno(), min(most, _PIPE_BYTES))
            except BlockingIOError:
                continue

    def _wait(self, file: IO[bytes], event: int) -> None:
        left = self._until - time.monotonic()
        if left <= 0 or not _ready(file, event, left):
            raise RuleError("wall-clock", "no answer came in time")


def _ready(file: IO[bytes], event: int, seconds: float) -> bool:
    """Whether it can be read or written, or was closed at the other end, within `seconds`."""
    poll = select.poll()  # unlike select, for descriptors above 1023 too
    poll.register(file.fileno(), event)
    return bool(poll.poll(1000 * seconds))
