"""What every tokenizer shares: the bytes that each id stands for, and everything that follows from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptlab.config.errors import UserError
from gptlab.data.tokenizer import json_file

BOS = "<|bos|>"
"""Begins a document (nanochat's name). It is an id and never text: no text encodes to it, and it decodes to nothing."""


class TokenTable:
    """Ids 0..n-1 and their bytes; a BOS, where there is one, is the last id and stands for no bytes."""

    kind: str
    bos_name = BOS

    def __init__(self, tokens: Sequence[bytes], *, bos: bool, settings: str = "") -> None:
        self.bos_id = len(tokens) if bos else None
        self._tokens = (*tokens, b"") if bos else tuple(tokens)
        self.vocab_size = len(self._tokens)
        self.token_bytes = np.array([len(token) for token in self._tokens], dtype=np.int32)
        """(vocab_size,) int32: true byte lengths; half of a UTF-8 character has its bytes, BOS has none."""
        self.fingerprint = self._identify(settings)

    @property
    def bos_token(self) -> str | None:
        """BOS by name, where there is one."""
        return None if self.bos_id is None else self.bos_name

    def _identify(self, settings: str) -> str:
        digest = hashlib.sha256(f"{self.kind} {settings} bos={self.bos_id}".encode())
        for token in self._tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

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
        return b"".join(map(self._tokens.__getitem__, array.tolist()))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text for people: bytes that are no UTF-8 (a cut character) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        """This tokenizer in the form of `tokenizer.json` of Hugging Face tokenizers."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, from which `transformers` and `load_tokenizer` read."""
        json_file.write(folder, self.to_json(), bos=self.bos_token)


def utf8(text: str) -> bytes:
    """UserError for lone surrogates: halves of a UTF-16 pair are no characters and have no UTF-8 bytes."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise surrogate_error(error) from error


def surrogate_error(error: UnicodeEncodeError) -> UserError:
    code = ord(error.object[error.start])
    return UserError(
        f"text with a lone surrogate (U+{code:04X} at character {error.start}) cannot be encoded: it is not Unicode"
    )
