"""How much a model is surprised by each token of a text: bits, and bits per byte of the whole."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.data.packing import IGNORED
from gptlab.data.tokenizer.base import Tokenizer
from gptlab.eval.bits_per_byte import evaluation_mode, token_nats
from gptlab.runtime.processes.distributed import Group


@dataclass(frozen=True, slots=True)
class Surprise:
    """The tokens of a text, each with its negative log-likelihood given those before it. All arrays: (tokens,)."""

    ids: NDArray[np.int64]
    nats: NDArray[np.float64]
    lengths: NDArray[np.int64]
    """Bytes of each token."""
    first: int
    """The first token that was predicted: 0, or 1 where the tokenizer has no BOS to begin with. NaN before it."""

    @property
    def target_tokens(self) -> int:
        return len(self.ids) - self.first

    @property
    def target_bytes(self) -> int:
        return int(self.lengths[self.first :].sum())

    @property
    def loss(self) -> float:
        """Nats per target token."""
        return float(self.nats[self.first :].sum()) / self.target_tokens

    @property
    def bpb(self) -> float:
        """Bits per byte of the target tokens."""
        return float(self.nats[self.first :].sum()) / (math.log(2) * self.target_bytes)


@dataclass(frozen=True, slots=True)
class Piece:
    """The least run of tokens that ends where a character ends."""

    text: str
    bits: float
    """The sum over its tokens; NaN where one was not predicted."""


def measure_text(
    logits: Callable[[Tensor], Tensor],  # (B, T) int64 -> (B, T, V)
    tokenizer: Tokenizer,
    text: str,
    *,
    seq_len: int,
    device: torch.device | str,
    micro_sequences: int,
    max_tokens: int | None = None,
    group: Group | None = None,
) -> Surprise:
    """Every token of `text`, or the first `max_tokens`, predicted from those before it.

    A text that is longer than the context is read in windows that overlap by half: each token is predicted once, from
    at least `seq_len // 2` tokens (fewer only where the text begins), and each window begins with BOS, where there is
    one. So a text counts less surprise than in validation rows, which do not overlap. Several processes share the
    passes. Raises UserError if there is nothing to predict.
    """
    ids = tokenizer.encode(text)[:max_tokens].astype(np.int64)
    bos, group = tokenizer.bos_id, group or Group()
    sequence = ids if bos is None else np.concatenate([[bos], ids])
    if len(sequence) < 2:
        raise UserError("the text is too short: there is no token to predict")
    inputs, targets, places = windows(sequence, seq_len, bos)
    found = torch.zeros(len(sequence), dtype=torch.float64)
    with evaluation_mode(logits):
        for start in range(group.rank * micro_sequences, len(inputs), group.size * micro_sequences):
            rows = slice(start, start + micro_sequences)
            wanted = torch.from_numpy(targets[rows])
            losses = token_nats(logits(torch.from_numpy(inputs[rows]).to(device)), wanted.to(device)).cpu().double()
            counted = wanted != IGNORED
            found[torch.from_numpy(places[rows])[counted]] = losses[counted]
    nats = group.sum(found, "surprise").numpy()  # of each token one rank's, and zeros of the others
    nats[0] = math.nan
    first = int(bos is None)
    lengths = np.asarray(tokenizer.token_bytes, dtype=np.int64)[ids]
    return Surprise(ids, nats if first else nats[1:], lengths, first)


def windows(
    sequence: NDArray[np.int64], seq_len: int, bos_id: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Inputs, targets (`IGNORED`: does not count), and the place in `sequence` of each target: (windows, seq_len)
    each. Every token but the first is the target of exactly one window."""
    last, half = len(sequence) - 1, max(1, seq_len // 2)
    first = min(seq_len, last)
    ends = np.minimum(first + half * np.arange(1 + -(-(last - first) // half)), last)[:, None]
    begins = np.concatenate([[[0]], ends[:-1]])
    places = np.maximum(ends - seq_len, 0) + np.arange(1, seq_len + 1)
    inputs = sequence[np.minimum(places - 1, last)]  # after the text, copies of its end, which no prediction sees
    if bos_id is not None and seq_len > 1:
        inputs[1:, 0] = bos_id
    counted = (begins < places) & (places <= ends)
    places = np.minimum(places, last)
    return inputs, np.where(counted, sequence[places], IGNORED), places


def pieces(surprise: Surprise, tokenizer: Tokenizer) -> Iterator[Piece]:
    """The text with its surprise, piece by piece: a character whose bytes are spread over several tokens is one piece.
    Bytes at the end that are no character become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text, nats = "", 0.0
    for token, own in zip(surprise.ids.tolist(), surprise.nats.tolist(), strict=True):
        text += decoder.decode(tokenizer.decode_bytes([token]))
        nats += own
        if text and not decoder.getstate()[0]:
            yield Piece(text, nats / math.log(2))
            text, nats = "", 0.0
    if text := text + decoder.decode(b"", final=True):
        yield Piece(text, nats / math.log(2))
