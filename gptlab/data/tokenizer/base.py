"""What every tokenizer is: ids and the exact bytes that each stands for. And the two without merges: one token a byte,
one token a character.

On disk a tokenizer is tokenizer.json in the form of Hugging Face `tokenizers`: one file that transformers, gptlab and
people read. All kinds are BPE models there: `bpe` and `gpt2` with merges, `byte` and `char` without any. BOS is in the
model's vocabulary, where no merge leads to it, and not among the added tokens, which that library looks for in every
text: so the file alone never turns the characters "<|bos|>" into the special token. transformers still adds it to them
when it loads (`bos_token`); `split_special_tokens` in tokenizer_config.json makes it leave texts alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptlab.config.errors import UserError, cannot
from gptlab.runtime.files.plain_file import write_text_atomic

BOS = "<|bos|>"
"""Begins a document (nanochat's name). It is an id and never text: no text encodes to it, and it decodes to nothing."""
FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
_MAX_IN_LINES = 10_000
"""Entries of a vocabulary that tokenizer.json has a line for each of: Python writes the lines of GPT-2's in 0.3 s."""
SLICE_CHARACTERS = 1 << 18
"""Characters that are encoded at a time: each takes 12 bytes meanwhile."""
MODEL: dict[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
"""What all models of tokenizer.json have in common."""
DOCUMENT: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": None,
}
"""tokenizer.json, with its keys in that library's order."""


class Tokenizer:
    """Ids are 0..vocab_size-1; BOS, where there is one, is the last and stands for no bytes. `encode` is exact:
    decode_bytes(encode(text)) == text.encode()."""

    kind: str
    bos_name = BOS

    def __init__(self, tokens: Sequence[bytes], *, bos: bool, settings: str = "") -> None:
        self.bos_id = len(tokens) if bos else None
        self.tokens = (*tokens, b"") if bos else tuple(tokens)
        """The bytes that each id stands for; b"" for BOS."""
        self.vocab_size = len(self.tokens)
        self.token_bytes = np.array([len(token) for token in self.tokens], dtype=np.int32)
        """(vocab_size,) int32: true byte lengths; half of a UTF-8 character has its bytes, BOS has none."""
        digest = hashlib.sha256(f"{self.kind} {settings} bos={self.bos_id}".encode())
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        self.fingerprint = digest.hexdigest()
        """Changes with anything that changes an id."""

    @property
    def bos_token(self) -> str | None:
        """The name of BOS, where there is one: <|bos|>, or <|endoftext|> of GPT-2."""
        return None if self.bos_id is None else self.bos_name

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) int32, without BOS; special tokens in the text are text. UserError for what cannot be encoded."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One array for each text."""
        return [self.encode(text) for text in texts]

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Exactly the bytes that the ids stand for; token_bytes[ids].sum() of them. ValueError for an id out of
        range."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and not 0 <= array.min() <= array.max() < self.vocab_size:
            raise ValueError(f"ids are between 0 and {self.vocab_size - 1}, not {array.min()}..{array.max()}")
        return b"".join(map(self.tokens.__getitem__, array.tolist()))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text for people: bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        """This tokenizer in the form of `tokenizer.json` of Hugging Face tokenizers."""
        raise NotImplementedError

    def save(self, folder: Path, *, post_processor: dict[str, Any] | None = None, **more_config: Any) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `transformers` and `load_tokenizer` read, each put in
        place at once. UserError where the disk refuses."""
        content = self.to_json() | {"post_processor": post_processor}
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if self.bos_token is not None:
            # One token separates documents: it begins one and ends the one before.
            config |= {"bos_token": self.bos_token, "eos_token": self.bos_token, "split_special_tokens": True}
        indent = 1 if self.vocab_size < _MAX_IN_LINES else None
        with cannot(f"write the tokenizer to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, values in ((FILE, content), (CONFIG_FILE, config | more_config)):
            write_text_atomic(folder / name, json.dumps(values, indent=indent, ensure_ascii=False) + "\n")


class ByteTokenizer(Tokenizer):
    """The 256 bytes, each its own id, and BOS (256)."""

    kind = "byte"

    def __init__(self) -> None:
        super().__init__([bytes([value]) for value in range(256)], bos=True)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.int32)

    def to_json(self) -> dict[str, Any]:
        level = byte_level()
        vocab = [*byte_characters(), BOS]
        return document(vocab, merges=[], pre_tokenizer=level, decoder=level)


class CharTokenizer(Tokenizer):
    """The characters of a text, sorted by code point (nanoGPT's shakespeare_char) unless they come as a table, and BOS
    where rows need one.

    `transformers` drops characters that are not in the vocabulary without a word; here they are a UserError.
    """

    kind = "char"

    def __init__(self, characters: Iterable[str], bos: bool, *, in_order: bool = False) -> None:
        """`in_order`: id i is character i as given; each must be there once."""
        self.characters = "".join(characters if in_order else sorted(set(characters)))
        if not self.characters:
            raise UserError("a char tokenizer needs a text with at least one character")
        super().__init__([utf8(character) for character in self.characters], bos=bos)
        codes = np.array([ord(character) for character in self.characters])
        # One entry more than the largest code point: -1, for all beyond it.
        self._id_of_code = np.full(codes.max() + 2, -1, dtype=np.int32)
        self._id_of_code[codes] = np.arange(len(codes), dtype=np.int32)

    def encode(self, text: str) -> np.ndarray:
        ids = np.empty(len(text), dtype=np.int32)
        for start in range(0, len(text), SLICE_CHARACTERS):
            part = slice(start, start + SLICE_CHARACTERS)
            codes = np.frombuffer(text[part].encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
            np.take(self._id_of_code, codes, mode="clip", out=ids[part])
        if ids.size and ids.min() < 0:
            utf8(text)  # raises UserError for a lone surrogate
            character = text[int(np.argmin(ids))]
            raise UserError(
                f"character {character!r} (U+{ord(character):04X}) is not among the {len(self.characters)} of this "
                "char tokenizer; train it on text that has it, or use tokenizer kind bpe or byte"
            )
        return ids

    def to_json(self) -> dict[str, Any]:
        vocab = [*self.characters] + ([] if self.bos_id is None else [BOS])
        return document(vocab, merges=[], pre_tokenizer=None, decoder={"type": "Fuse"})

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> CharTokenizer:
        """ValueError or TypeError where the vocabulary holds anything but characters and BOS."""
        entries = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
        characters = [entry for entry in entries if entry != BOS]
        if any(len(character) != 1 for character in characters):
            raise ValueError("a char vocabulary holds single characters")
        return cls(characters, bos=BOS in entries, in_order=True)


def utf8(text: str) -> bytes:
    """UserError for lone surrogates: halves of a UTF-16 pair are not characters and have no UTF-8 bytes."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise UserError(
            f"text with a lone surrogate (U+{code:04X} at character {error.start}) cannot be encoded: it is not Unicode"
        ) from error


def byte_characters() -> list[str]:
    """For each byte the printable character that stands for it in byte-level vocabularies (GPT-2's table).

    Printable Latin-1 stands for itself; the others take the code points from 256 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_level(*, use_regex: bool = False) -> dict[str, Any]:
    """Pre-tokenizer and decoder that put characters for bytes, and bytes for characters."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def document(
    vocab: list[str], *, merges: list[list[str]], pre_tokenizer: dict[str, Any] | None, decoder: dict[str, Any]
) -> dict[str, Any]:
    """The whole of tokenizer.json for a BPE model; ids follow the order of `vocab`."""
    model = {**MODEL, "vocab": {token: index for index, token in enumerate(vocab)}, "merges": merges}
    return DOCUMENT | {"pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model}
