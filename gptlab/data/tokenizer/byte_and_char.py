"""Tokenizers without merges: one token a byte, one token a character."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gptlab.config.errors import UserError
from gptlab.data.tokenizer import json_file
from gptlab.data.tokenizer.base import BOS, TokenTable, surrogate_error, utf8


class ByteTokenizer(TokenTable):
    """The 256 bytes, each its own id, and BOS (256)."""

    kind = "byte"

    def __init__(self) -> None:
        super().__init__([bytes([value]) for value in range(256)], bos=True)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.int32)

    def to_json(self) -> dict[str, Any]:
        level = json_file.byte_level()
        vocab = [*json_file.byte_characters(), BOS]
        return json_file.document(vocab, merges=[], pre_tokenizer=level, decoder=level)


class CharTokenizer(TokenTable):
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
        try:
            codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        except UnicodeEncodeError as error:
            raise surrogate_error(error) from error
        ids = self._id_of_code[np.minimum(codes, len(self._id_of_code) - 1)]
        if ids.size and ids.min() < 0:
            character = text[int(np.argmin(ids))]
            raise UserError(
                f"character {character!r} (U+{ord(character):04X}) is not among the {len(self.characters)} of this "
                "char tokenizer; train it on text that has it, or use tokenizer kind bpe or byte"
            )
        return ids

    def to_json(self) -> dict[str, Any]:
        vocab = [*self.characters] + ([] if self.bos_id is None else [BOS])
        return json_file.document(vocab, merges=[], pre_tokenizer=None, decoder={"type": "Fuse"})

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> CharTokenizer:
        """ValueError or TypeError where the vocabulary holds anything but characters and BOS."""
        entries = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
        characters = [entry for entry in entries if entry != BOS]
        if any(len(character) != 1 for character in characters):
            raise ValueError("a char vocabulary holds single characters")
        return cls(characters, bos=BOS in entries, in_order=True)
