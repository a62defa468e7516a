"""`gptlab data list | prepare | inspect`: which text there is, getting it and making tokens of it, looking."""

from __future__ import annotations

import dataclasses
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, get_args

import numpy as np

from gptlab.cli.arguments.help import fitted
from gptlab.cli.arguments.parser import Positional, parse, run_subcommand
from gptlab.config.errors import UserError, nearest_name
from gptlab.config.fields import Limit, NotNegative, Positive, checked_dataclass
from gptlab.config.run import DataConfig, LongDocuments, Rows, Split, TokenizerConfig, TokenizerKind
from gptlab.data.corpus.known_corpora import CORE, CORE_BUNDLE, CORPORA, named_source, size_text, state
from gptlab.data.prepare import PreparedData, prepare
from gptlab.data.rows import RowSource, make_rows
from gptlab.data.token_fate import token_fate
from gptlab.data.tokenizer.tokenizer import Tokenizer
from gptlab.data.tokens.shards import TokenSplit
from gptlab.eval.core_bundle import prepare_core
from gptlab.eval.core_tasks import core_folder
from gptlab.runtime.files.cache import cache_root, damage, read_info
from gptlab.runtime.files.plain_file import listed_sources, to_json
from gptlab.runtime.records.console import CONTROLS, Console
from gptlab.runtime.records.table import table

USAGE = """\
usage: gptlab data list | prepare | inspect [ARGUMENTS]

  list      corpora known by name, formats that are read, and what is prepared
  prepare   download a corpus that has a name, and turn it into tokens, once;
            training does the second by itself when it has not been done, and
            never downloads. `prepare core` downloads the CORE tasks
  inspect   prepare, then show counts, bytes, tokens, lengths, what rows are
            made, and one row as text

`gptlab data COMMAND --help` has every argument with its unit and default."""

SOURCES = (
    ("stdlib", "the sources of this Python's standard library: one file, one document; nothing to download"),
    ("FILE", "text (.txt .md .py ...): one document; .jsonl: one a line (these also .gz, .zst); .parquet: one a row"),
    ("FOLDER", "its files of these formats, recursively, in the order of their names"),
    ("'GLOB'", "the files that match, such as 'notes/**/*.md'"),
    ("TOKENS", "a nanoGPT folder (train.bin, val.bin, meta.pkl), or llm.c shards: a .bin file, a folder, a glob"),
    ("hub:OWNER/NAME", "a data set on the Hugging Face hub; also hub:OWNER/NAME@REVISION/GLOB"),
    ("NAME", "one of the following; `gptlab data prepare NAME` downloads it (--hub-files N: fewer files, or more)"),
)
SHOWN_CHARACTERS = 2000
QUANTILES = {"shortest": 0.0, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "longest": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListArguments:
    cache_dir: str | None = None
    """Where prepared tokens are kept. None: $GPTLAB_CACHE, or the user's cache folder."""
    json: bool = False
    """Print one JSON object: the corpora with a name, and what is prepared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareArguments:
    corpora: Positional[tuple[str, ...]] = ()
    """The same as --data."""
    data: tuple[str, ...] = ("stdlib",)
    """Corpora, read one after the other (A B or A,B): `stdlib`, a file (.txt .jsonl .parquet), a folder, a glob, a name
    of `gptlab data list`, hub:OWNER/NAME[@REVISION][/GLOB]. Or tokens: a nanoGPT folder (train.bin, val.bin), llm.c
    shards (.bin)."""
    val_source: tuple[str, ...] = ()
    """Corpora (or token shards) to validate on (A B or A,B). None given: the files that the lineage of a corpus by name
    fixes (NAME:val); where there are none, `split` holds out a part."""
    hub_files: int | None = None
    """Training files of a corpus by name to use, at most, in the order of their names. None: as many as the list says;
    of hub:OWNER/NAME all."""
    text_column: str = "text"
    """The column (Parquet) or key (JSONL) that holds the text."""
    tokenizer: str = "bpe"
    """bpe (trained on the corpus) | gpt2 | char | byte, or a folder with a tokenizer.json of gptlab or GPT-2."""
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

    def sources(self) -> tuple[str, ...]:
        if self.corpora and self.data != ("stdlib",):
            raise UserError("name corpora after `prepare` or after --data, not both")
        return listed_sources(self.corpora or self.data)

    def configs(self) -> tuple[DataConfig, TokenizerConfig]:
        data = DataConfig(
            source=self.sources(), val_source=listed_sources(self.val_source), hub_files=self.hub_files,
            text_column=self.text_column, split=self.split, val_fraction=self.val_fraction, rows=self.rows,
            cache_dir=self.cache_dir,
        )  # fmt: skip
        kinds = get_args(TokenizerKind)
        if self.tokenizer in kinds:
            return data, TokenizerConfig(kind=self.tokenizer, vocab_size=self.vocab_size)  # type: ignore[arg-type]
        if not Path(self.tokenizer).exists():
            hint = f"; did you mean {near}?" if (near := nearest_name(self.tokenizer, kinds)) else ""
            raise UserError(
                f"--tokenizer {self.tokenizer}: neither {', '.join(kinds)} nor a folder that is there{hint}"
            )
        return data, TokenizerConfig(path=self.tokenizer)


@checked_dataclass("--")
class InspectArguments(PrepareArguments):
    seq_len: Positive[int] = 1024
    """Tokens in a row; 1024 are those of a quickstart on a CPU."""
    long_documents: LongDocuments = DataConfig().long_documents
    """packed rows: cut long documents into pieces, every token is trained on | crop: throw the overhang away."""
    row: NotNegative[int] = 0
    """The row of the first epoch that is shown as text."""
    seed: Annotated[int, Limit(lambda seed: 0 <= seed < 2**63, "must be between 0 and 2^63 - 1")] = 1337
    """Seeds the order of rows."""


def main(argv: Sequence[str]) -> int:
    """Exit code 0; raises UserError for wrong usage and for data that cannot be used."""
    commands = {"list": _list, "prepare": _prepare, "inspect": _inspect}
    return run_subcommand(argv, commands, prog="gptlab data", usage=USAGE)


def _list(argv: list[str]) -> None:
    arguments = parse(ListArguments, argv, prog="gptlab data list", description="Corpora, formats, prepared tokens.")
    root = cache_root(arguments.cache_dir)
    listed = _listed(root)
    if arguments.json:
        print(to_json(listed, indent=2))
        return
    width = get_terminal_size().columns
    print("corpora for --data, and several of them one after the other:")
    _print_table(SOURCES, "<<", width)
    print("\nby name:")
    header = ["name", "here", "files of all", "size", "license"]
    core = [CORE, "yes" if listed["core"] else "no", "1", "0.2 GB", "each task its own"]
    _print_table([header, *map(_corpus_row, listed["corpora"]), core], "<<>><", width)
    print()
    about = [(corpus.name, corpus.what, corpus.lineage, corpus.place.address) for corpus in CORPORA]
    about += [(CORE, "22 tasks for `gptlab eval RUN --core` (DCLM, arXiv 2406.11794)", "nanochat", CORE_BUNDLE.address)]
    for name, what, lineage, address in about:
        print(fitted(f"  {name}\n    {what}\n    {lineage}", width) + f"\n    {address}")
    print(f"\nprepared in {root}:")
    header = ["fingerprint", "corpus", "split", "tokenizer", "tokens", "MB"]
    if listed["prepared"]:
        _print_table([header, *map(_prepared_row, listed["prepared"])], "<<<<>>")
    else:
        print("  nothing yet")


def _listed(root: Path) -> dict[str, Any]:
    """What `--json` prints."""
    corpora = [
        {
            "name": corpus.name, "here": state(corpus, root), "default_files": corpus.default_files,
            "all_files": corpus.all_files, "file_bytes": corpus.file_bytes, "license": corpus.license,
            "address": corpus.place.address, "what": corpus.what, "lineage": corpus.lineage,
        }
        for corpus in CORPORA
    ]  # fmt: skip
    prepared = [_prepared(folder) for folder in sorted((root / "tokens").glob("[!.]*"))]
    return {"cache": str(root), "corpora": corpora, "core": core_folder(root).is_dir(), "prepared": prepared}


def _corpus_row(corpus: Mapping[str, Any]) -> list[str]:
    n_files, all_files = corpus["default_files"], corpus["all_files"]
    files = f"{n_files:,}" if n_files == all_files else f"{n_files:,} of {all_files:,}"
    size = size_text(n_files * corpus["file_bytes"])
    return [corpus["name"], corpus["here"], files, size, corpus["license"]]


def _prepared(folder: Path) -> dict[str, Any]:
    """One set of prepared tokens; `damage` says why it cannot be used, and is null where it can."""
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    entry: dict[str, Any] = {"fingerprint": folder.name, "bytes": n_bytes, "damage": damage(folder)}
    if entry["damage"] is None:
        info = read_info(folder)
        entry |= {"corpus": info["corpus"], "split": info["split"], "tokenizer": info["tokenizer"]["kind"],
                  "vocab_size": info["tokenizer"]["vocab_size"],
                  "tokens": info["train"]["tokens"] + info["val"]["tokens"]}  # fmt: skip
    return entry


def _prepared_row(entry: Mapping[str, Any]) -> list[str]:
    megabytes = f"{entry['bytes'] / 1e6:,.1f}"
    if entry["damage"] is not None:
        return [entry["fingerprint"], f"damaged ({entry['damage']}): made again when needed", "", "", "", megabytes]
    tokenizer = f"{entry['tokenizer']} {entry['vocab_size']:,}"
    return [entry["fingerprint"], entry["corpus"], entry["split"], tokenizer, f"{entry['tokens']:,}", megabytes]


def _prepare(argv: list[str]) -> None:
    arguments = parse(
        PrepareArguments, argv, prog="gptlab data prepare", description="Turn a corpus into tokens, once."
    )
    began = time.perf_counter()
    if CORE in arguments.sources() and not Path(CORE).exists():
        _prepare_core(arguments)
        return
    data, tokenizer = arguments.configs()
    with Console() as console:
        sources = (*data.source, *data.val_source)
        if any(named_source(source) is not None for source in sources):
            from gptlab.data.corpus.hub import download_sources

            download_sources(sources, data.hub_files, cache_root(data.cache_dir), console)
        prepared = prepare(data, tokenizer, console=console)
    if "read" in prepared.statistics:
        print(f"read: {prepared.statistics['read']}")
    for name, split in (("train", prepared.train), ("validation", prepared.val)):
        print(f"{name}: {split.n_documents:,} documents, {split.n_bytes:,} bytes, {split.n_tokens:,} tokens")
    print(f"ready in {time.perf_counter() - began:.1f} s: {prepared.folder}")


def _prepare_core(arguments: PrepareArguments) -> None:
    if len(arguments.sources()) > 1:
        raise UserError("core is what `gptlab eval RUN --core` asks, not text to train on: prepare it alone")
    with Console() as console:
        folder = prepare_core(cache_root(arguments.cache_dir), console)
    print(f"the CORE tasks are in {folder}")


def _inspect(argv: list[str]) -> None:
    arguments = parse(
        InspectArguments, argv, prog="gptlab data inspect", description="Show a corpus as training sees it."
    )
    data, tokenizer = arguments.configs()
    data = dataclasses.replace(data, long_documents=arguments.long_documents)
    with Console() as console:
        prepared = prepare(data, tokenizer, console=console)
    bos_id = prepared.tokenizer.bos_id
    rows = make_rows(prepared.train, data, arguments.seq_len, bos_id, arguments.seed, prepared.folder)
    if arguments.row >= rows.rows_per_epoch:
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
            ["split", statistics["split"]],
            *([["read", statistics["read"]]] if "read" in statistics else [["skipped", skipped or "nothing"]]),
            ["tokenizer", f"{tokenizer.kind}, {tokenizer.vocab_size:,} entries"],
            ["cache", str(prepared.folder)],
        ],
        "<<",
    )
    names = [
        "documents",
        "bytes",
        "tokens",
        "bytes per token",
        "tokens a document: mean",
        *(f"    {name}" for name in QUANTILES),
    ]
    columns = [_split_column(split) for split in (prepared.train, prepared.val)]
    print()
    _print_table([("", "train", "validation"), *zip(names, *columns, strict=True)], "<>>")


def _split_column(split: TokenSplit) -> list[str]:
    lengths = np.diff(split.document_starts)
    quantiles = np.quantile(lengths, list(QUANTILES.values()), method="nearest")
    counts = [f"{count:,}" for count in (split.n_documents, split.n_bytes, split.n_tokens)]
    ratios = [f"{split.n_bytes / split.n_tokens:.2f}", f"{split.n_tokens / split.n_documents:,.0f}"]
    return [*counts, *ratios, *(f"{int(quantile):,}" for quantile in quantiles)]


def _print_rows(rows: RowSource, data: DataConfig) -> None:
    in_words = {"packed": f"packed, long documents {data.long_documents}", "random": "random, drawn with replacement"}
    how = in_words.get(data.rows, data.rows)
    print(f"\nrows of {rows.seq_len:,} tokens ({how}): {rows.rows_per_epoch:,} an epoch")
    fate = token_fate(rows)
    unused = "in no row" if data.rows == "random" else "cropped"
    counts = {"trained on": fate.trained, "only ever context": fate.context, unused: fate.cropped}
    table = [[name, f"{count:,}", f"{count / fate.total:.2%} of tokens"] for name, count in counts.items()]
    slots = rows.rows_per_epoch * rows.seq_len
    counts = {"BOS added as target": fate.added, "padded": fate.padded}
    if fate.repeated:
        counts |= {"trained on again": fate.repeated}
    table += [[name, f"{count:,}", f"{count / slots:.2%} of targets"] for name, count in counts.items()]
    _print_table(table, "<>>")


def _print_row(rows: RowSource, index: int, tokenizer: Tokenizer) -> None:
    """The row's tokens as text, BOS as a mark of its own."""
    inputs, targets = rows.read(0, np.array([index]))
    counted = targets[0][targets[0] >= 0]
    tokens = np.concatenate([inputs[0][:1], counted])
    borders = np.flatnonzero(tokens == tokenizer.bos_id) if tokenizer.bos_id is not None else np.empty(0, np.int64)
    pieces = [tokenizer.decode(piece) for piece in np.split(tokens, borders)]
    text = "<BOS>".join(pieces).translate(CONTROLS)
    print(f"\nrow {index:,} of the first epoch, {len(tokens):,} tokens:")
    for line in text[:SHOWN_CHARACTERS].splitlines():
        print(f"  | {line}".rstrip())
    if len(text) > SHOWN_CHARACTERS:
        print(f"  ... and {len(text) - SHOWN_CHARACTERS:,} characters more")


def _print_table(rows: Iterable[Sequence[str]], alignments: str, width: int | None = None) -> None:
    """Cells without control characters: names of files and corpora may be of an untrusted source. `width`: break longer
    lines within the last column."""
    shown = [[cell.translate(CONTROLS) for cell in row] for row in rows]
    text = textwrap.indent(table(shown, alignments), "  ")
    print(text if width is None else fitted(text, width))
