"""Byte-level BPE as in the textbook: split, then merge the earliest-learned pair until none is left. Slow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import regex


def bpe_ids(text: str, pattern: str, merges: Sequence[tuple[bytes, bytes]]) -> list[int]:
    order = {pair: index for index, pair in enumerate(merges)}
    ids: list[int] = []
    for piece in regex.findall(pattern, text):
        tokens = [bytes([value]) for value in piece.encode()]
        while True:
            pairs = list(itertools.pairwise(tokens))
            known = [(order[pair], at) for at, pair in enumerate(pairs) if pair in order]
            if not known:
                break
            _, at = min(known)
            tokens[at : at + 2] = [tokens[at] + tokens[at + 1]]
        ids += [token[0] if len(token) == 1 else 256 + _made(merges).index(token) for token in tokens]
    return ids


def _made(merges: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    return [left + right for left, right in merges]
