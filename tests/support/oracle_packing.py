"""Packing as slowly and plainly as can be: lists of tokens, every item of the buffer looked at every time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

BOS = -7
"""Stands for any BOS: the oracle does not tell a document's own from one put in front of a continuation."""


def cropped_stream(documents: list[list[int]], slots: int, buffer_size: int) -> Iterator[list[int]]:
    """nanochat's rows, without end. `documents` are contents without BOS; passes over them are made of batches of 128,
    the last of a pass being what is left, and whole batches join the buffer while it holds fewer than `buffer_size`."""
    passes = (documents[first : first + 128] for _ in count() for first in range(0, len(documents), 128))
    buffer: list[list[int]] = []
    while True:
        row: list[int] = []
        while len(row) < slots:
            while len(buffer) < buffer_size:
                buffer += [[BOS, *document] for document in next(passes)]
            gap = slots - len(row)
            best = longest_that_fits(buffer, gap)
            if best is None:
                best = [len(item) for item in buffer].index(min(len(item) for item in buffer))
            row += buffer.pop(best)[:gap]
        yield row


def cut_rows(documents: list[list[int]], slots: int, buffer_size: int, smallest_cut: int | None) -> list[list[int]]:
    """Rows without loss: full rows off the long documents, best fit for the rest.

    A gap of `smallest_cut` slots or more is filled with the front of the longest item, whose rest goes back behind a
    BOS of its own, at its old place among items of equal length. None: gaps stay.
    """
    full_rows, waiting = [], []
    for number, document in enumerate(documents):
        content = list(document)
        while len(content) >= slots - 1:
            full_rows.append([BOS, *content[: slots - 1]])
            content = content[slots - 1 :]
        if content or not document:
            waiting.append((number, [BOS, *content]))
    buffer: list[tuple[int, list[int]]] = []
    rows: list[list[int]] = [[]]
    while waiting or buffer:
        while waiting and len(buffer) < buffer_size:
            buffer.append(waiting.pop(0))
            buffer.sort(key=lambda numbered: numbered[0])
        gap = slots - len(rows[-1])
        best = longest_that_fits([item for _, item in buffer], gap)
        if best is not None:
            rows[-1] += buffer.pop(best)[1]
        elif smallest_cut is not None and gap >= smallest_cut:
            longest = max(range(len(buffer)), key=lambda i: len(buffer[i][1]))
            number, item = buffer[longest]
            rows[-1] += item[:gap]
            buffer[longest] = (number, [BOS, *item[gap:]])
        else:
            rows.append([])
    return full_rows + [row for row in rows if row]


def longest_that_fits(buffer: list[list[int]], gap: int) -> int | None:
    """Place of the longest item of at most `gap` tokens, the first of equals."""
    best = None
    for i, item in enumerate(buffer):
        if len(item) <= gap and (best is None or len(item) > len(buffer[best])):
            best = i
    return best
