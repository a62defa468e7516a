"""Which text, how it becomes tokens, and how tokens become rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gptlab.config.errors import Positive, check_fields, require

TokenizerKind = Literal["bpe", "gpt2", "char", "byte"]
Split = Literal["hash", "tail"]
Rows = Literal["packed", "sequential", "random"]
LongDocuments = Literal["cut", "crop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    kind: TokenizerKind = "bpe"
    """bpe (byte-level, trained on the corpus) | gpt2 (GPT-2's 50,257 entries) | char (the characters of the corpus) |
    byte (the 256 bytes)."""
    vocab_size: int = 4096
    """Entries of a bpe tokenizer, special tokens included."""
    max_digits: Positive[int] = 2
    """Maximum digits in one token."""
    train_bytes: Positive[int] = 100_000_000
    """Maximum bytes of training text (UTF-8) that a bpe tokenizer is trained on."""
    path: str | None = None
    """A folder with a tokenizer.json to use instead of training one."""

    def __post_init__(self) -> None:
        check_fields(self, "tokenizer.")
        # 256 bytes and one special token are the least a byte-level tokenizer can have.
        enough = self.vocab_size >= 257
        require(enough, "tokenizer.vocab_size", self.vocab_size, "byte-level BPE needs 257 or more", 257)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    source: tuple[str, ...] = ("stdlib",)
    """Corpora, read in this order: `stdlib`, a file (.txt .jsonl .parquet), a folder, a glob, a named corpus (`gptlab
    data list`) or hub:OWNER/NAME. Or tokens: a nanoGPT folder (train.bin, val.bin), llm.c shards (.bin)."""
    val_source: tuple[str, ...] = ()
    """Corpora (or token shards) to validate on. Empty: the validation files that belong to a named corpus (NAME:val);
    where there are none, `split` holds out a part of `source`."""
    hub_files: Positive[int] | None = None
    """Maximum files of a corpus from the hub to use, in the order of their names. None: as many as its entry says."""
    text_column: str = "text"
    """The column (Parquet) or key (JSONL) that holds the text."""
    split: Split = "hash"
    """hash: a validation document is chosen by a hash of its content | tail: the end of the text (nanoGPT)."""
    val_fraction: float = 0.05
    """Share of the corpus held out: of documents (hash) or of characters (tail)."""
    rows: Rows = "packed"
    """packed: rows start with BOS and hold documents, packed best-fit | sequential: contiguous chunks | random: uniform
    windows."""
    long_documents: LongDocuments = "cut"
    """For packed rows. cut: long documents are cut into pieces, and every token is trained on | crop: the overhang is
    dropped, as in nanochat's and autoresearch's rows, in their order whatever the seed."""
    pack_buffer_documents: Positive[int] = 1000
    """For packed rows: documents among which the best fit is chosen (nanochat, autoresearch: 1000)."""
    cache_dir: str | None = None
    """Folder of prepared tokens. None: $GPTLAB_CACHE, or the user's cache folder."""

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        require(len(self.source) > 0, "data.source", self.source, "name at least one corpus", "stdlib")
        require(0.0 < self.val_fraction < 1.0, "data.val_fraction", self.val_fraction, "must be between 0 and 1", 0.05)
