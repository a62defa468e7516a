"""`gptlab data list | prepare | inspect`: which text there is, making tokens of it, and looking at them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from gptlab.cli.arguments import parse
from gptlab.config.data import DataConfig, LongDocuments, Rows, Split, TokenizerConfig, TokenizerKind
from gptlab.config.errors import UserError, nearest_name
from gptlab.data.cache import cache_root, damage, read_info
from gptlab.data.prepare import PreparedData, prepare
from gptlab.data.rows import RowSource, make_rows
from gptlab.data.shards import TokenSplit
from gptlab.data.tokenizer import Tokenizer
from gptlab.runtime.console import Console

USAGE = """\
usage: gptlab data list | prepare | inspect [ARGUMENTS]

  list      corpora known by name, formats that are read, and what is already prepared
  prepare   turn a corpus into tokens, once; training does it by itself when it has not been done
  inspect   prepare, then show counts, bytes, tokens, lengths, what rows are made, and one row as text

`gptlab data COMMAND --help` has every argument with its unit and default.
"""

SHOWN_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ListArguments:
    cache_dir: str | None = None
    """Where prepared tokens are kept. None: $GPTLAB_CACHE, or the user's cache folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareArguments:
    data: tuple[str, ...] = ("stdlib",)
    """Corpora, read one after the other: `stdlib`, a file (.txt .jsonl .parquet), a folder, or a glob."""
    text_column: str = "text"
    """The column (Parquet) or key (JSONL) that holds the text."""
    tokenizer: str = "bpe"
    """bpe (trained on the corpus) | char | byte, or a folder with a tokenizer.json."""
    vocab_size: int = TokenizerConfig().vocab_size
    """Entries of a bpe tokenizer, special tokens included."""
    split: Split = DataConfig().split
    """hash: a validation document is chosen by a hash of its content | tail: the end of the text (nanoGPT)."""
    val_fraction: float = DataConfig().val_fraction
    """Share of the corpus held out: of documents (hash) or of characters (tail)."""
    rows: Rows = DataConfig().rows
    """packed | sequential | random. Only packed rows give a char tokenizer a BOS."""
    cache_dir: str | None = None
    """Where prepared tokens are kept. None: $GPTLAB_CACHE, or the user's cache folder."""

    def configs(self) -> tuple[DataConfig, TokenizerConfig]:
        data = DataConfig(
            source=self.data,
            text_column=self.text_column,
            split=self.split,
            val_fraction=self.val_fraction,
            rows=self.rows,
            cache_dir=self.cache_dir,
        )
        kinds = get_args(TokenizerKind)
        if self.tokenizer in kinds:
            return data, TokenizerConfig(kind=self.tokenizer, vocab_size=self.vocab_size)  # type: ignore[arg-type]
        if not Path(self.tokenizer).is_dir():
            hint = f"; did you mean {near}?" if (near := nearest_name(self.tokenizer, kinds)) else ""
            raise UserError(
                f"--tokenizer {self.tokenizer}: neither {', '.join(kinds)} nor a folder that is there{hint}"
            )
        return data, TokenizerConfig(path=self.tokenizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectArguments(PrepareArguments):
    seq_len: int = 512
    """Tokens in a row."""
    long_documents: LongDocuments = DataConfig().long_documents
    """packed rows: cut long documents into pieces, every token is trained on | crop: throw the overhang away."""
    row: int = 0
    """The row of the first epoch that is shown as text."""
    seed: int = 1337
    """Seeds the order of rows."""


def main(argv: Sequence[str]) -> int:
    """Exit code 0; raises UserError for wrong usage and for data that cannot be used."""
    words = list(argv)
    command = words.pop(0) if words else "--help"
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    commands = {"list": _list, "prepare": _prepare, "inspect": _inspect}
    if command not in commands:
        raise UserError(f"gptlab data {command}: there is list, prepare and inspect")
    commands[command](words)
    return 0


def _list(argv: list[str]) -> None:
    arguments = parse(ListArguments, argv, prog="gptlab data list", description="Corpora, formats, prepared tokens.")
    root = cache_root(arguments.cache_dir)
    print("corpora for --data, and several of them one after the other:")
    known = [
        ("stdlib", "the sources of this Python's standard library: one file, one document; nothing to download"),
        ("FILE", "text (.txt .md .py ...): one document; .jsonl: one a line; .parquet: one a row"),
        ("FOLDER", "its files of these formats, recursively, in the order of their names"),
        ("'GLOB'", "the files that match, such as 'notes/**/*.md'"),
    ]
    _print_table(known, "<<")
    print(f"\nprepared in {root}:")
    entries = [
        [entry.name, *_entry(entry)] for entry in sorted((root / "tokens").glob("*")) if not entry.name.startswith(".")
    ]
    if entries:
        _print_table([["fingerprint", "corpus", "split", "tokenizer", "tokens", "MB"], *entries], "<<<<>>")
    else:
        print("  nothing yet")


def _entry(folder: Path) -> list[str]:
    """Corpus, split, tokenizer, tokens and megabytes of one set of prepared tokens."""
    megabytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    reason = damage(folder)
    if reason is not None:
        return [f"damaged ({reason}): made again when needed", "", "", "", f"{megabytes:,.1f}"]
    info = read_info(folder)
    tokenizer = f"{info['tokenizer']['kind']} {info['tokenizer']['vocab_size']:,}"
    tokens = info["train"]["tokens"] + info["val"]["tokens"]
    return [info["corpus"], f"{info['split']} {info['val_fraction']:g}", tokenizer, f"{tokens:,}", f"{megabytes:,.1f}"]


def _prepare(argv: list[str]) -> None:
    arguments = parse(
        PrepareArguments, argv, prog="gptlab data prepare", description="Turn a corpus into tokens, once."
    )
    data, tokenizer = arguments.configs()
    began = time.perf_counter()
    with Console() as console:
        prepared = prepare(data, tokenizer, console=console)
    for name, split in (("train", prepared.train), ("validation", prepared.val)):
        print(f"{name}: {split.n_documents:,} documents, {split.n_bytes:,} bytes, {split.n_tokens:,} tokens")
    print(f"ready in {time.perf_counter() - began:.1f} s: {prepared.folder}")


def _inspect(argv: list[str]) -> None:
    arguments = parse(
        InspectArguments, argv, prog="gptlab data inspect", description="Show a corpus as training sees it."
    )
    data, tokenizer = arguments.configs()
    data = dataclasses.replace(data, long_documents=arguments.long_documents)
    with Console() as console:
        prepared = prepare(data, tokenizer, console=console)
    rows = make_rows(
        prepared.train, data, arguments.seq_len, prepared.tokenizer.bos_id, arguments.seed, prepared.folder
    )
    if not 0 <= arguments.row < rows.rows_per_epoch:
        raise UserError(f"--row {arguments.row}: there are rows 0 to {rows.rows_per_epoch - 1} in an epoch")
    _print_corpus(prepared)
    _print_rows(rows, data)
    _print_row(rows, arguments.row, prepared.tokenizer)


def _print_corpus(prepared: PreparedData) -> None:
    statistics, tokenizer = prepared.statistics, prepared.tokenizer
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(statistics["skipped"].items()))
    _print_table(
        [
            ["corpus", statistics["corpus"]],
            ["split", f"{statistics['split']} {statistics['val_fraction']:g}"],
            ["skipped", skipped or "nothing"],
            ["tokenizer", f"{tokenizer.kind}, {tokenizer.vocab_size:,} entries"],
            ["cache", str(prepared.folder)],
        ],
        "<<",
    )
    columns = [_split_column(split) for split in (prepared.train, prepared.val)]
    names = ["", "documents", "bytes", "tokens", "bytes per token", "tokens a document: mean", *_QUANTILES]
    print()
    _print_table(zip(names, ["train", *columns[0]], ["validation", *columns[1]], strict=True), "<>>")


_QUANTILES = {
    "    shortest": 0.0,
    "    25%": 0.25,
    "    median": 0.5,
    "    75%": 0.75,
    "    95%": 0.95,
    "    longest": 1.0,
}


def _split_column(split: TokenSplit) -> list[str]:
    lengths = np.diff(split.document_starts)
    quantiles = np.quantile(lengths, list(_QUANTILES.values()), method="nearest")
    counts = [f"{count:,}" for count in (split.n_documents, split.n_bytes, split.n_tokens)]
    ratios = [f"{split.n_bytes / split.n_tokens:.2f}", f"{split.n_tokens / split.n_documents:,.0f}"]
    return [*counts, *ratios, *(f"{int(quantile):,}" for quantile in quantiles)]


def _print_rows(rows: RowSource, data: DataConfig) -> None:
    how = f"packed, long documents {data.long_documents}" if data.rows == "packed" else data.rows
    print(f"\nrows of {rows.seq_len:,} tokens ({how}): {rows.rows_per_epoch:,} an epoch")
    fate = rows.fate
    slots = rows.rows_per_epoch * rows.seq_len
    _print_table(
        [
            ["trained on", f"{fate.trained:,}", f"{fate.trained / fate.total:.2%} of tokens"],
            ["only ever context", f"{fate.context:,}", f"{fate.context / fate.total:.2%} of tokens"],
            ["cropped", f"{fate.cropped:,}", f"{fate.cropped / fate.total:.2%} of tokens"],
            ["BOS added as target", f"{fate.added:,}", f"{fate.added / slots:.2%} of targets"],
            ["padded", f"{fate.padded:,}", f"{fate.padded / slots:.2%} of targets"],
        ],
        "<>>",
    )


def _print_row(rows: RowSource, index: int, tokenizer: Tokenizer) -> None:
    """The row's tokens as text, BOS as a mark of its own."""
    inputs, targets = rows.read(0, np.array([index]))
    counted = targets[0][targets[0] >= 0]
    tokens = np.concatenate([inputs[0][:1], counted])
    borders = np.flatnonzero(tokens == tokenizer.bos_id) if tokenizer.bos_id is not None else np.empty(0, np.int64)
    pieces = [tokenizer.decode(piece) for piece in np.split(tokens, borders)]
    text = "<BOS>".join(pieces)
    print(f"\nrow {index:,} of the first epoch, {len(tokens):,} tokens:")
    for line in text[:SHOWN_CHARACTERS].splitlines():
        print(f"  | {line}".rstrip())
    if len(text) > SHOWN_CHARACTERS:
        print(f"  ... and {len(text) - SHOWN_CHARACTERS:,} characters more")


def _print_table(rows: Iterable[Sequence[str]], alignments: str) -> None:
    """Columns as wide as their widest entry, `<` flush left and `>` flush right."""
    table = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(alignments))]
    for row in table:
        cells = (f"{cell:{align}{width}}" for cell, align, width in zip(row, alignments, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())
