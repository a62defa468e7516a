"""What the judge asks and a candidate answers, as bytes through two pipes, little-endian:

    READY                                                   candidate, once the weights are loaded
    ASK   number u64, rows u32, length u32;                 judge; then rows * length int32 tokens
    LOGITS number u64, rows u32, length u32, entries u32;   candidate; then rows * length * entries float32
    DRAW  number u64, seed u64                              judge: the initial weights of a seed
    TENSOR number u64, name bytes u32, dimensions u32;      candidate, for each weight; then its name, its sizes as u32,
                                                            its elements as float32
    END   number u64                                        candidate, after the last weight

The number of an answer is that of its question, 64 random bits, so that no answer can be written ahead. The candidate
ends when its input ends.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import IO

import numpy as np
from numpy.typing import NDArray

READY, ASK, LOGITS, DRAW, TENSOR, END = b"RDY1", b"ASK1", b"LGT1", b"DRW1", b"TNS1", b"END1"
HEADER = struct.Struct("<4sQII")
"""The kind of a message, its number, and two sizes; of DRAW, the two halves of the seed."""
COUNT = struct.Struct("<I")
TOKEN, LOGIT = np.dtype("<i4"), np.dtype("<f4")

Answer = Callable[[NDArray[np.int32]], NDArray[np.float32]]
"""(rows, length) tokens -> (rows, length, entries) logits."""
Draw = Callable[[int], Iterable[tuple[str, NDArray[np.float32]]]]
"""seed -> (name, initial values) of every weight."""


def ask(number: int, tokens: NDArray[np.int32]) -> bytes:
    return HEADER.pack(ASK, number, *tokens.shape) + tokens.astype(TOKEN).tobytes()


def draw(number: int, seed: int) -> bytes:
    return HEADER.pack(DRAW, number, seed & 0xFFFFFFFF, seed >> 32)


def serve(questions: IO[bytes], answers: IO[bytes], answer: Answer, initial: Draw) -> None:
    """The candidate's side: answer until there are no more questions. ValueError for bytes that are no question."""
    answers.write(HEADER.pack(READY, 0, 0, 0))
    answers.flush()
    while header := _exactly(questions, HEADER.size):
        kind, number, first, second = HEADER.unpack(header)
        if kind == ASK:
            tokens = np.frombuffer(_exactly(questions, first * second * 4), TOKEN).reshape(first, second)
            logits = np.ascontiguousarray(answer(tokens), LOGIT)
            answers.write(HEADER.pack(LOGITS, number, first, second) + COUNT.pack(logits.shape[-1]))
            answers.write(logits.data)
        elif kind == DRAW:
            for name, values in initial(first | second << 32):
                words = name.encode()
                sizes = b"".join(map(COUNT.pack, values.shape))
                answers.write(HEADER.pack(TENSOR, number, len(words), values.ndim) + words + sizes)
                answers.write(np.ascontiguousarray(values, LOGIT).data)
            answers.write(HEADER.pack(END, number, 0, 0))
        else:
            raise ValueError(f"{kind!r} is no question")
        answers.flush()


def _exactly(file: IO[bytes], size: int) -> bytes:
    """`size` bytes, or nothing at the end. ValueError in the middle."""
    content = file.read(size)
    if content and len(content) != size:
        raise ValueError("the judge's question is incomplete")
    return content
