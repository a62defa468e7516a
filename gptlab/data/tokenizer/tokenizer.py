"""Text to ids and back: what a tokenizer is, how one is made from text, and how one is read from disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gptlab.config.data import TokenizerConfig
from gptlab.config.errors import UserError
from gptlab.data.tokenizer import gpt2, json_file
from gptlab.data.tokenizer.base import BOS, utf8
from gptlab.data.tokenizer.bpe import BpeTokenizer
from gptlab.data.tokenizer.bpe_training import train_bpe
from gptlab.data.tokenizer.byte_and_char import ByteTokenizer, CharTokenizer
from gptlab.data.tokenizer.gpt2 import Gpt2Tokenizer, gpt2_tokenizer

if TYPE_CHECKING:
    from gptlab.runtime.records.console import Console

__all__ = [
    "BOS",
    "BpeTokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "Gpt2Tokenizer",
    "Tokenizer",
    "gpt2_tokenizer",
    "load_tokenizer",
    "train_tokenizer",
]


class Tokenizer(Protocol):
    """Ids are 0..vocab_size-1. `encode` is exact: decode_bytes(encode(text)) == text.encode()."""

    kind: str
    vocab_size: int
    bos_id: int | None

    @property
    def bos_token(self) -> str | None:
        """The name of BOS, where there is one: <|bos|>, or <|endoftext|> of GPT-2."""
        ...

    token_bytes: np.ndarray
    """(vocab_size,) int32: bytes that each id stands for; 0 for BOS."""
    fingerprint: str
    """Changes with anything that changes an id."""

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) int32, without BOS; special tokens in the text are text. UserError for what cannot be encoded."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...
    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes: ...
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Bytes that are no UTF-8 (a cut character) become U+FFFD; BOS becomes nothing."""
        ...

    def save(self, folder: Path) -> None: ...


def train_tokenizer(
    config: TokenizerConfig, texts: Iterable[str], *, bos: bool, progress: Console | None = None
) -> Tokenizer:
    """A tokenizer of `config.kind` for `texts`; progress is shown on the console given.

    `bos`: whether a char tokenizer gets a BOS (the others always have one). UserError for no text, a vocabulary larger
    than the text can give (it names what the text gives), and text that is no Unicode. byte and gpt2 read no text.
    """
    if config.kind == "byte":
        return ByteTokenizer()
    if config.kind == "gpt2":
        return gpt2_tokenizer()
    if config.kind == "bpe":
        return train_bpe(config, texts, progress)
    characters: set[str] = set()
    for text in texts:
        utf8(text)
        characters.update(text)
    return CharTokenizer(characters, bos)


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer that `save` put into `folder`, or GPT-2's as `transformers` or OpenAI did. UserError where it is
    missing, damaged, or another one.

    The kind shows in the pre-tokenizer. The parts that cannot be derived are read, the rest is rebuilt from them and
    must be what the file says: so no file loads that transformers would encode otherwise.
    """
    folder = Path(folder)
    if json_file.adds_prefix_space(folder):
        json_file.refuse(folder / json_file.CONFIG_FILE, "add_prefix_space changes every text")
    if not (folder / json_file.FILE).exists() and (folder / gpt2.VOCAB_FILE).exists():
        return gpt2.load_vocabulary_files(folder)
    content = json_file.read(folder)
    try:
        content = json_file.canonical(content)
        tokenizer = _rebuild(content)
        flaw = json_file.difference(content, tokenizer.to_json(), bos=tokenizer.bos_token)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, UserError) as error:
        flaw = f"{type(error).__name__}: {error}"
    if flaw is not None:
        json_file.refuse(folder / json_file.FILE, f"its parts do not fit together ({flaw})")
    return tokenizer


def _rebuild(content: dict[str, Any]) -> ByteTokenizer | CharTokenizer | BpeTokenizer | Gpt2Tokenizer:
    splitter = content["pre_tokenizer"]
    if splitter is None:
        return CharTokenizer.from_json(content)
    if splitter["type"] != "ByteLevel":
        return BpeTokenizer.from_json(content)
    return gpt2_tokenizer() if splitter["use_regex"] else ByteTokenizer()
