"""From a corpus to tokens on disk, once: what is in the cache and intact is used, anything else is made.

    corpus -> split -> tokenizer (loaded, or trained on the training split)  CACHE/tokenizers/FINGERPRINT/
                    -> tokens   (shards, document index, statistics)         CACHE/tokens/FINGERPRINT/

Tokens that others made (`tokens/foreign_files.py`) stay where they are; CACHE/tokens/ keeps their document index and
statistics.

A fingerprint is a hash of everything that the contents depend on: the corpus's own fingerprint, the split and the
tokenizer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from gptlab.config.errors import ConfigError, UserError
from gptlab.config.run import DataConfig, Split, TokenizerConfig
from gptlab.data.corpus.documents import Corpus, Side, content_hash, is_text_file, open_corpus
from gptlab.data.corpus.known_corpora import fixed_validation
from gptlab.data.tokenizer.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    gpt2_tokenizer,
    load_tokenizer,
    spread_share,
    train_tokenizer,
)
from gptlab.data.tokens.foreign_files import TokenFiles, find_token_files, open_split, scan
from gptlab.data.tokens.shards import COUNTS, SplitWriter, TokenSplit
from gptlab.runtime.files.cache import cache_root, cached_folder
from gptlab.runtime.files.plain_file import json_sha256
from gptlab.runtime.records.console import Console, QuietConsole

SIDES: tuple[Side, Side] = ("train", "val")
TOKENS_VERSION = 1  # raise it when the same inputs give other files
TOKENIZER_VERSION = 2  # the same, for trained tokenizers
BATCH_CHARACTERS = 8_000_000  # work for all cores for a while, and two batches of it in memory are little
FINGERPRINT_DIGITS = 24  # 96 bits: no two caches of anybody collide
TAIL_INSTEAD = "--data.split tail (gptlab data: --split tail) holds out the end of the text instead"


@dataclass(frozen=True, slots=True)
class PreparedData:
    folder: Path
    """Holds the shards, unless others made them, and what is derived from them."""
    tokenizer: Tokenizer
    train: TokenSplit
    val: TokenSplit
    fingerprint: str
    split: Split
    """`data.split`, but tail for a single document, which hash cannot divide."""
    statistics: dict[str, Any]
    """corpus, split (how it is divided), skipped (reason -> documents), read (in words: documents, files, what was
    skipped; not of tokens that others made), tokenizer (kind, vocab_size, fingerprint), and for train and val: tokens,
    documents, bytes, shards."""


def prepare(data: DataConfig, tokenizer: TokenizerConfig, *, console: Console | None = None) -> PreparedData:
    """The tokens of `data.source`, made or found in the cache. UserError for a corpus, tokenizer or cache that cannot
    be used."""
    root, console = cache_root(data.cache_dir), console or QuietConsole()
    if not all(map(is_text_file, (*data.source, *data.val_source))):
        data = replace(data, val_source=data.val_source or fixed_validation(data.source))
        token_files = find_token_files(data.source, data.val_source, data.hub_files, root)
        if token_files is not None:
            return _prepare_tokens(token_files, data, tokenizer, root, console)
    corpus = open_corpus(data)
    if corpus.split != data.split:
        console.line(_divided_document(corpus.name, data.val_fraction))
    source = corpus.fingerprint()
    encoder = _ready_tokenizer(tokenizer) or _trained_tokenizer(corpus, data, tokenizer, source, root, console)
    fingerprint = _fingerprint({**source, "tokenizer": encoder.fingerprint, "version": TOKENS_VERSION})
    build = partial(_write_tokens, corpus=corpus, tokenizer=encoder, console=console)
    folder = root / "tokens" / fingerprint
    if not folder.exists():
        corpus.probe()
    statistics = cached_folder(folder, build, what=f"tokens of {corpus.name}", console=console)
    # Those in the cache may be of another corpus with the same content.
    statistics |= {"corpus": corpus.name, "split": corpus.how}
    if "read" in statistics:
        statistics["read"] += corpus.left_out
    counts = _counts(folder, statistics)
    train, val = (
        TokenSplit.open(folder, side, n_shards=counts[side]["shards"], n_bytes=counts[side]["bytes"]) for side in SIDES
    )
    if corpus.how.startswith("hash "):
        _warn_if_uneven(corpus.name, data.val_fraction, train.n_bytes, val.n_bytes, console)
    return PreparedData(folder, encoder, train, val, fingerprint, corpus.split, statistics)


def _warn_if_uneven(name: str, val_fraction: float, train_bytes: int, val_bytes: int, console: Console) -> None:
    """Warn where a corpus divided by hash validates on far less or more than `val_fraction` of it. A quarter is not
    much for a few documents; `val_fraction` itself may be large."""
    total = train_bytes + val_bytes
    most = max(0.25, min(5 * val_fraction, (1 + val_fraction) / 2))
    if not val_fraction / 10 <= val_bytes / total <= most:
        console.warn(
            f"{val_bytes:,} of the {total:,} bytes of {name} validate, where data.val_fraction is {val_fraction:g}: "
            f"hash holds out whole documents, and these are few; {TAIL_INSTEAD}"
        )


def _divided_document(name: str, val_fraction: float) -> str:
    return f"split     tail: {name} is one document, so its last {val_fraction:.0%} validate (hash needs two documents)"


def _prepare_tokens(
    files: TokenFiles, data: DataConfig, config: TokenizerConfig, root: Path, console: Console
) -> PreparedData:
    """Tokens that others made, in place; the folder in the cache keeps what a pass over them found."""
    encoder = files.tokenizer(config)
    bos_id = encoder.bos_id if data.rows == "packed" else None
    parts = {
        "tokens": files.fingerprint(root), "documents_at": bos_id,
        "tokenizer": encoder.fingerprint, "version": TOKENS_VERSION,
    }  # fmt: skip
    fingerprint = _fingerprint(parts)
    of_side = {"train": files.train, "val": files.val}

    def build(folder: Path) -> dict[str, Any]:
        with console.progress(f"checking {files.name}", None, "bytes") as progress:
            totals = {side: scan(of_side[side], encoder, bos_id, side, folder, progress) for side in SIDES}
        return _statistics(files.name, "by file", {}, encoder, totals)

    # A file that was written again is checked again, even with the same content.
    folder = root / "tokens" / _fingerprint({**parts, "stamps": files.stamps()})
    statistics = cached_folder(folder, build, what=f"index of {files.name}", console=console)
    statistics |= {"corpus": files.name}
    counts = _counts(folder, statistics)
    train, val = (open_split(of_side[side], side, folder, counts[side]) for side in SIDES)
    files.require_unchanged()
    return PreparedData(folder, encoder, train, val, fingerprint, data.split, statistics)


def _ready_tokenizer(config: TokenizerConfig) -> Tokenizer | None:
    """That of `config.path`, or one that comes with gptlab; None where it must be trained."""
    if config.path is not None:
        return load_tokenizer(Path(config.path))
    if config.kind == "gpt2":
        return gpt2_tokenizer()
    return ByteTokenizer() if config.kind == "byte" else None


def _trained_tokenizer(
    corpus: Corpus,
    data: DataConfig,
    config: TokenizerConfig,
    source: dict[str, object],
    root: Path,
    console: Console,
) -> Tokenizer:
    """One trained on the training split, kept under its fingerprint."""
    # Packed rows begin with BOS. A character tokenizer otherwise has only characters, as nanoGPT's.
    bos = config.kind != "char" or data.rows == "packed"
    fingerprint = _fingerprint({**source, "bos": bos, "tokenizer": asdict(config), "version": TOKENIZER_VERSION})

    def build(folder: Path) -> dict[str, Any]:
        # A character that only validation has needs a token too: nanoGPT's vocabulary is the whole text's.
        def texts() -> Iterator[str]:
            return (text for side, text in corpus.documents() if side == "train" or config.kind == "char")

        try:
            share = spread_share(config, texts(), corpus.most_bytes())
            train_tokenizer(config, texts(), bos=bos, share=share, console=console).save(folder)
        except ConfigError as error:
            sizes = Counter[str]()
            for side, text in corpus.documents():
                sizes[side] += len(text)
            if not corpus.how.startswith("hash ") or sizes["val"] <= sizes["train"]:
                raise
            reason = f"{error.reason}; more text validates than trains: {TAIL_INSTEAD}"
            raise ConfigError(error.field, error.value, reason, error.nearest) from None
        corpus.require_unchanged()  # of a large corpus it reads a part
        return {"corpus": corpus.name, "kind": config.kind}

    folder = root / "tokenizers" / fingerprint
    if not folder.exists():
        corpus.probe()
    cached_folder(folder, build, what=f"tokenizer of {corpus.name}", console=console)
    return load_tokenizer(folder)


def _write_tokens(folder: Path, corpus: Corpus, tokenizer: Tokenizer, console: Console) -> dict[str, Any]:
    writers = {side: SplitWriter(folder, side, tokenizer.vocab_size, tokenizer.bos_id) for side in SIDES}
    with console.progress(f"encoding {corpus.name}", None, "bytes") as progress:
        for side, text, tokens in _encoded_ahead(tokenizer, corpus.documents()):
            n_bytes = len(text.encode())
            writers[side].add(tokens, n_bytes=n_bytes, content_hash=content_hash(text))
            progress.advance(n_bytes)
    totals = {side: writers[side].close() for side in SIDES}
    found = corpus.last_pass
    return _statistics(corpus.name, corpus.how, dict(found.skipped), tokenizer, totals) | {"read": str(found)}


def _statistics(
    name: str, how: str, skipped: dict[str, int], tokenizer: Tokenizer, totals: Mapping[Side, dict[str, int]]
) -> dict[str, Any]:
    described = {key: getattr(tokenizer, key) for key in ("kind", "vocab_size", "fingerprint")}
    return {"corpus": name, "split": how, "skipped": skipped, "tokenizer": described} | dict(totals)


def _counts(folder: Path, statistics: Mapping[str, Any]) -> dict[Side, Any]:
    """Those of `_statistics`. UserError where the cache's manifest has others."""
    counts: dict[Side, Any] = {side: statistics.get(side) for side in SIDES}
    for one in counts.values():
        if not isinstance(one, dict) or set(one) != set(COUNTS) or any(type(n) is not int for n in one.values()):
            raise UserError(f"{folder} is damaged: its manifest does not count its tokens; delete the folder")
    return counts


def _encoded_ahead(
    tokenizer: Tokenizer, documents: Iterator[tuple[Side, str]]
) -> Iterator[tuple[Side, str, np.ndarray]]:
    """Documents with their tokens. While a batch of them is encoded (by threads on every core, without the
    interpreter's lock), the next is read and the last is written."""
    with ThreadPoolExecutor(1) as pool:
        under_way: deque[tuple[list[tuple[Side, str]], Future[list[np.ndarray]]]] = deque()
        for batch in chain(_batches(documents), [[]]):
            under_way.append((batch, pool.submit(tokenizer.encode_batch, [text for _, text in batch])))
            if len(under_way) > 1:
                before, encoded = under_way.popleft()
                for (side, text), tokens in zip(before, encoded.result(), strict=True):
                    yield side, text, tokens


def _batches(documents: Iterator[tuple[Side, str]]) -> Iterator[list[tuple[Side, str]]]:
    batch: list[tuple[Side, str]] = []
    characters = 0
    for side, text in documents:
        batch.append((side, text))
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def _fingerprint(parts: dict[str, Any]) -> str:
    return json_sha256(parts)[:FINGERPRINT_DIGITS]
