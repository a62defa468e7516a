"""`gptlab tokenizer train | eval`: make a tokenizer, and see how well it does on a text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from gptlab.cli.arguments.parser import Positional, parse, run_subcommand
from gptlab.config.errors import UserError, cannot
from gptlab.config.fields import Positive, checked_dataclass
from gptlab.config.run import DataConfig, TokenizerConfig, TokenizerKind
from gptlab.data.corpus.documents import Corpus, open_corpus
from gptlab.data.tokenizer.base import FILE
from gptlab.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, spread_share, train_tokenizer
from gptlab.runtime.files.plain_file import listed_sources
from gptlab.runtime.records.console import Console

PROG = "gptlab tokenizer"
HELP = """\
usage: gptlab tokenizer {train,eval} [ARGUMENTS]

  train   make a tokenizer from text and keep it as tokenizer.json, which transformers loads too
  eval    bytes per token, vocabulary use, speed and exactness of a tokenizer on text

`gptlab tokenizer train --help` and `gptlab tokenizer eval --help` have the arguments with units and defaults."""

EVAL_BATCH_DOCUMENTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArguments:
    data: tuple[str, ...] = ("stdlib",)
    """Text to read: stdlib, files (.txt .md .py .jsonl .parquet and the like), folders, globs, corpora by name."""
    hub_files: int | None = None
    """Files of a corpus by name to use, at most. None: as many as `gptlab data list` says."""
    text_column: str = "text"
    """Column (Parquet) or key (JSONL) that holds the text."""

    def corpus(self) -> Corpus:
        source = listed_sources(self.data)
        data = DataConfig(source=source, text_column=self.text_column, hub_files=self.hub_files, split="tail")
        corpus = open_corpus(data)
        corpus.probe()
        return corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainArguments(TextArguments):
    out: str
    """Folder for tokenizer.json."""
    kind: TokenizerKind = "bpe"
    """bpe (byte-level, trained) | gpt2 (GPT-2's 50,257 entries) | char (the characters that occur) | byte (the 256
    bytes)."""
    vocab_size: int = 4096
    """bpe: entries, the special token included."""
    max_digits: int = 2
    """bpe: the most digits in one token."""
    train_bytes: int = 100_000_000
    """bpe: bytes of text (UTF-8) to train on, at most: spread over text files, the first ones of other files."""
    bos: bool = True
    """char: an entry for the begin-of-document token, which packed rows need."""
    overwrite: bool = False
    """Replace a tokenizer that is in the folder already."""


@checked_dataclass("--")
class EvalArguments(TextArguments):
    folder: Positional[str]
    """Folder that holds tokenizer.json."""
    max_bytes: Positive[int] = 100_000_000
    """Bytes of text (UTF-8) to encode; the document that reaches it is the last."""


def main(argv: list[str]) -> int:
    return run_subcommand(argv, {"train": _train, "eval": _evaluate}, prog=PROG, usage=HELP)


def _train(argv: list[str]) -> int:
    arguments = parse(TrainArguments, argv, prog=f"{PROG} train", description="Make a tokenizer from text.")
    out = Path(arguments.out)
    config = TokenizerConfig(
        kind=arguments.kind,
        vocab_size=arguments.vocab_size,
        max_digits=arguments.max_digits,
        train_bytes=arguments.train_bytes,
    )
    if (out / FILE).exists() and not arguments.overwrite:
        raise UserError(f"{out} has a tokenizer already; choose another --out, or add --overwrite")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder")
    corpus = arguments.corpus()
    nearest = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    with cannot(f"write the tokenizer to {out}"), TemporaryDirectory(dir=nearest):
        pass  # better now than after the training
    started = time.perf_counter()
    with Console() as console:
        share = spread_share(config, corpus.texts(), corpus.most_bytes())
        tokenizer = train_tokenizer(config, corpus.texts(), bos=arguments.bos, share=share, console=console)
        seconds = time.perf_counter() - started
        tokenizer.save(out)
        console.line(f"{_described(tokenizer)}: made in {seconds:.1f} s, kept in {out}")
    return 0


def _evaluate(argv: list[str]) -> int:
    arguments = parse(EvalArguments, argv, prog=f"{PROG} eval", description="Measure a tokenizer on text.")
    tokenizer = load_tokenizer(arguments.folder)
    corpus = arguments.corpus()
    counts: Counter[str] = Counter()
    uses = np.zeros(tokenizer.vocab_size, dtype=np.int64)  # how often each token occurred
    seconds = 0.0
    with Console() as console:
        with console.progress("encoding", None, "bytes") as progress:
            for texts in _batches(corpus.texts(), arguments.max_bytes):
                started = time.perf_counter()
                encoded = tokenizer.encode_batch(texts)
                seconds += time.perf_counter() - started
                for text, ids in zip(texts, encoded, strict=True):
                    data = text.encode()
                    exact = tokenizer.decode_bytes(ids) == data and int(tokenizer.token_bytes[ids].sum()) == len(data)
                    counts.update(
                        documents=1, characters=len(text), bytes=len(data), tokens=len(ids), inexact=not exact
                    )
                    uses += np.bincount(ids, minlength=len(uses))
                    progress.advance(len(data))
        for label, value in _report(tokenizer, corpus.name, counts, uses, seconds):
            console.line(f"{label:<12}{value}")
    return 1 if counts["inexact"] else 0


def _batches(documents: Iterator[str], max_bytes: int) -> Iterator[list[str]]:
    left = max_bytes
    while left > 0 and (batch := list(islice(documents, EVAL_BATCH_DOCUMENTS))):
        before = [0, *accumulate(len(text.encode()) for text in batch)]
        yield [text for text, n_bytes in zip(batch, before, strict=False) if n_bytes < left]
        left -= before[-1]


def _report(
    tokenizer: Tokenizer, corpus: str, counts: Mapping[str, int], uses: np.ndarray, seconds: float
) -> Iterator[tuple[str, str]]:
    documents, characters, n_bytes, tokens = (counts[key] for key in ("documents", "characters", "bytes", "tokens"))
    ordinary = tokenizer.vocab_size - (tokenizer.bos_id is not None)
    used = int((uses > 0).sum())
    inexact = f"NOT EXACT in {counts['inexact']:,} of {documents:,} documents"
    per_token = f"{n_bytes / tokens:.3f} bytes, {characters / tokens:.3f} characters each"
    yield "tokenizer", f"{_described(tokenizer)}, {tokenizer.fingerprint[:16]}"
    yield "text", f"{corpus}: {documents:,} documents, {n_bytes:,} bytes, {characters:,} characters"
    yield "tokens", f"{tokens:,}: {per_token}; {tokens / documents:,.0f} a document"
    yield "vocabulary", f"{used:,} of {ordinary:,} entries used ({used / ordinary:.1%})"
    yield "round trip", inexact if counts["inexact"] else "exact: every document comes back byte for byte"
    yield "encoding", f"{n_bytes / 1e6 / seconds:.1f} MB/s, {tokens / 1e6 / seconds:.2f} M tokens/s"


def _described(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.kind} tokenizer of {tokenizer.vocab_size:,} entries"
