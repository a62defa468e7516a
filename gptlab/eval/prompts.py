"""Prompts from the validation text, for samples when the user gives none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gptlab.data.tokenizer.tokenizer import Tokenizer
from gptlab.data.tokens.shards import TokenSplit

PROMPT_CHARACTERS = 64
"""A line or two, so that most of a sample is the model's own."""
WINDOW_TOKENS = 1024
"""Tokens in which a prompt is looked for: room for the rest of a line that begins earlier."""


def validation_prompts(split: TokenSplit, tokenizer: Tokenizer, count: int) -> tuple[str, ...]:
    """Up to `count` different texts, the same ones every time: beginnings of documents, in validation's order.

    Where there are fewer documents than prompts, or the tokens are one text, they begin at lines spread over it. A
    prompt ends with a line, else with a word, else with a character. Where the text has none, BOS is the prompt.
    """
    found: dict[str, None] = {}
    for start, end, inside in _places(split, count):
        window = split.read(start, min(WINDOW_TOKENS, end - start))
        if tokenizer.bos_id is not None:
            window = window[int(len(window) > 0 and window[0] == tokenizer.bos_id) :]
            ends = np.flatnonzero(window == tokenizer.bos_id)
            window = window[: ends[0]] if len(ends) else window
        text = tokenizer.decode(window)
        if inside:  # not in the middle of a line, or at least of a character
            text = text.partition("\n")[2] or text.lstrip("\N{REPLACEMENT CHARACTER}")
        prompt = _front(text)
        if prompt and "\N{REPLACEMENT CHARACTER}" not in prompt:
            found[prompt] = None
        if len(found) == count:
            break
    return tuple(found) or (("",) if count > 0 and tokenizer.bos_id is not None else ())


def _places(split: TokenSplit, count: int) -> Iterator[tuple[int, int, bool]]:
    """(first token, end of its document, whether it is inside of it), enough of them that some may give no prompt."""
    order = np.argsort(split.content_hashes, kind="stable")[: 4 * count]
    per_document = -(-count // max(1, len(order)))
    for part in range(per_document):
        for document in order.tolist():
            start, end = int(split.document_starts[document]), int(split.document_starts[document + 1])
            yield start + (end - start) * part // per_document, end, part > 0


def _front(text: str) -> str:
    """The beginning of `text`, never more than half of it, without white space at its end or empty lines before it."""
    text = text.lstrip("\r\n")
    most = min(PROMPT_CHARACTERS, max(1, len(text) // 2))
    head = text[:most]
    for border in ("\n", " "):
        cut = head.rfind(border)
        if head[: max(0, cut)].strip():
            return head[:cut].rstrip()
    return head.rstrip()
