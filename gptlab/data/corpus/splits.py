"""Which documents validate: chosen by their content, or by their place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from gptlab.config.data import Split
from gptlab.config.errors import UserError
from gptlab.data.corpus.documents import Corpus, CorpusSummary

Side = Literal["train", "val"]
HASH_RANGE = 1 << 64
IN_BOTH = "also in validation"


def split_documents(corpus: Corpus, split: Split, val_fraction: float) -> Iterator[tuple[Side, str]]:
    """(side, document) in the corpus's order; both sides get at least one. UserError where that cannot be.

    hash: a document validates when the hash of its content falls into the first `val_fraction` of the hash's range, so
        neither order nor sharding moves it, and identical documents are on one side.
    tail: the last `val_fraction` of the corpus's characters validate, cut where nanoGPT cuts
        (`n = int(len(text) * 0.9)`); the document across the cut goes to both sides in part.
    """
    return _split_hash(corpus, val_fraction) if split == "hash" else _split_tail(corpus, val_fraction)


class DividedCorpus:
    """The documents of a corpus, each with its side: held out by `split_documents`, or `validation` has its own."""

    def __init__(self, corpus: Corpus, validation: Corpus | None, split: Split, val_fraction: float) -> None:
        self.name = corpus.name
        self.split: Split = split
        """How documents are held out; tail where hash was asked for and the corpus is one document, which a hash would
        leave whole on one side."""
        if validation is None and split == "hash" and len(list(islice(corpus.documents(), 2))) == 1:
            self.split = "tail"
        self.how = f"{self.split} {val_fraction:g}" if validation is None else f"validated on {validation.name}"
        self._corpus = corpus
        self._validation = validation
        self._corpora = [corpus] if validation is None else [corpus, validation]
        self._val_fraction = val_fraction
        self._in_both = 0

    @property
    def last_pass(self) -> CorpusSummary:
        """What the last full pass found, documents skipped because they validate included."""
        skipped = CorpusSummary(skipped={IN_BOTH: self._in_both} if self._in_both else {})
        return sum((corpus.last_pass for corpus in self._corpora), skipped)

    def require_unchanged(self) -> None:
        """UserError where a file is not what `fingerprint` saw."""
        for corpus in self._corpora:
            corpus.require_unchanged()

    def fingerprint(self) -> dict[str, object]:
        """All that the documents and their sides depend on."""
        if self._validation is None:
            return {"corpus": self._corpus.fingerprint(), "split": self.split, "val_fraction": self._val_fraction}
        return {"corpus": self._corpus.fingerprint(), "val_corpus": self._validation.fingerprint()}

    def documents(self) -> Iterator[tuple[Side, str]]:
        """(side, document). A validation text of its own comes first, whole, and a training document that it has too
        is skipped. UserError where a side gets nothing."""
        if self._validation is None:
            yield from split_documents(self._corpus, self.split, self._val_fraction)
            return
        seen = set()
        for text in self._validation.documents():
            seen.add(content_hash(text))
            yield "val", text
        self._in_both, kept = 0, False
        for text in self._corpus.documents():
            if content_hash(text) in seen:
                self._in_both += 1
            else:
                kept = True
                yield "train", text
        if not kept:
            raise UserError(f"{self.name}: nothing is left to train on, all of it is in data.val_source too")


def content_hash(text: str) -> int:
    """64 bits of BLAKE2b of the UTF-8 bytes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _split_hash(corpus: Corpus, val_fraction: float) -> Iterator[tuple[Side, str]]:
    """Streams once both sides have a document; until then (about 1 / val_fraction documents) it holds them back."""
    limit = int(val_fraction * HASH_RANGE)
    waiting: list[tuple[int, str]] = []
    streaming = False
    for text in corpus.documents():
        key = content_hash(text)
        waiting.append((key, text))
        streaming = streaming or (key < limit) != (waiting[0][0] < limit)
        if streaming:
            yield from (("val" if key < limit else "train", text) for key, text in waiting)
            waiting.clear()
    if not streaming:
        yield from _split_small(waiting, limit, corpus.name)


def _split_small(documents: list[tuple[int, str]], limit: int, name: str) -> Iterator[tuple[Side, str]]:
    """A small corpus whose documents all fell to one side: the smallest hash validates, or the largest trains."""
    keys = {key for key, _ in documents}
    if len(keys) < 2:
        raise UserError(
            f"{name}: split=hash needs two different documents, and all {len(documents)} are the same; use --data.split"
            " tail, which validates on text that trains too"
        )
    none_validate = min(keys) >= limit
    chosen = min(keys) if none_validate else max(keys)
    for key, text in documents:
        yield ("val" if (key == chosen) == none_validate else "train"), text


def _split_tail(corpus: Corpus, val_fraction: float) -> Iterator[tuple[Side, str]]:
    total = sum(len(text) for text in corpus.documents())
    # 1 - 0.1 is 0.9 to the last bit, so this is nanoGPT's number.
    left = int(total * (1 - val_fraction))
    if not 0 < left < total:
        raise UserError(
            f"{corpus.name}: {total} characters cannot be cut at data.val_fraction = {val_fraction}: one side is empty"
        )
    for text in corpus.documents():
        if left > 0:
            yield "train", text[:left]
        if left < len(text):
            yield "val", text[max(left, 0) :]
        left -= len(text)
