"""Corpora of files, as a run reads them that takes its validation text from their end."""

from __future__ import annotations

from collections.abc import Iterable

from gptlab.config.run import DataConfig
from gptlab.data.corpus.documents import Corpus, open_corpus


def corpus_of(sources: Iterable[object], text_column: str = "text", hub_files: int | None = None) -> Corpus:
    source = tuple(str(one) for one in sources)
    return open_corpus(DataConfig(source=source, text_column=text_column, hub_files=hub_files, split="tail"))
