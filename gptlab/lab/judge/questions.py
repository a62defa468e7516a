"""The validation rows as questions, and the loss of their answers: computed here, in float64, from logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gptlab.data.packing import IGNORED
from gptlab.data.rows import RowSource
from gptlab.data.tokenizer.tokenizer import Tokenizer
from gptlab.lab.judge.rules import RuleError

CHUNK_ELEMENTS = 2**22
"""Logits held at a time: 16 MiB as they come, twice that in float64."""


@dataclass(frozen=True)
class Questions:
    """Validation text as `gptlab eval` cuts it, with what is needed to count its bits."""

    rows: RowSource
    tokenizer: Tokenizer
    seq_len: int
    data_fingerprint: str
    max_tokens: int | None
    """Target tokens at most; None: all of the validation text."""

    @property
    def count(self) -> int:
        return self.rows.rows_per_epoch

    def read(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Inputs and targets of rows, each (n, seq_len); a target without a token is IGNORED."""
        inputs, targets = self.rows.read(0, indices)
        return inputs.astype(np.int32), targets.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Loss:
    val_loss: float
    """Nats per target token, special tokens included."""
    val_bpb: float
    """Bits per byte of text, over the target tokens that stand for bytes."""
    target_tokens: int
    target_bytes: int


def loss_of(questions: Questions, nats: NDArray[np.float64]) -> Loss:
    """The loss from the nats of every position, (questions.count, seq_len); those of IGNORED targets do not count.

    bpb = sum(nats over target tokens that stand for bytes) / (ln 2 * sum(bytes of those tokens))
    """
    token_bytes = np.asarray(questions.tokenizer.token_bytes, dtype=np.int64)
    total = text = 0.0
    n_tokens = n_bytes = 0
    for first in range(0, questions.count, 1024):
        rows = np.arange(first, min(first + 1024, questions.count))
        targets = questions.read(rows)[1]
        counted = targets != IGNORED
        lengths = token_bytes[np.maximum(targets, 0)] * counted
        total += math.fsum(nats[rows][counted])
        text += math.fsum(nats[rows][lengths > 0])
        n_tokens, n_bytes = n_tokens + int(counted.sum()), n_bytes + int(lengths.sum())
    return Loss(total / n_tokens, text / (math.log(2) * n_bytes), n_tokens, n_bytes)


@dataclass(frozen=True, slots=True)
class Scores:
    """What is kept of an answer, for each position, (positions,) float64."""

    nats: NDArray[np.float64]
    """Negative log-likelihood of the target; 0 where it is IGNORED."""
    prints: NDArray[np.float64]
    """A projection of all logits, in which a change of one shows: they themselves would take gigabytes."""


def scores(
    pieces: Iterator[NDArray[np.float32]],  # each (n, entries), in the order of the positions
    targets: NDArray[np.int64],  # (positions,)
    signs: NDArray[np.float64],  # (entries,), +-1 at random, unknown to the candidate
) -> Scores:
    """RuleError (not-finite) for a logit that is no finite number."""
    nats, prints = np.zeros(len(targets)), np.zeros(len(targets))
    memory, done = torch.empty(0, len(signs), dtype=torch.float64), 0
    for piece in _read_ahead(pieces):
        if len(piece) > len(memory):
            memory = torch.empty(piece.shape, dtype=torch.float64)
        logits, end = memory[: len(piece)].copy_(torch.from_numpy(piece)), done + len(piece)
        prints[done:end] = (logits @ torch.from_numpy(signs)).numpy() / math.sqrt(len(signs))
        if not np.isfinite(prints[done:end]).all():  # as soon as one logit is not, since it is added with a sign
            raise RuleError("not-finite", "an answer has a logit that is NaN or infinite")
        counted = torch.from_numpy(targets[done:end].clip(min=0))[:, None]
        of_target, highest = logits.gather(1, counted)[:, 0], logits.amax(1, keepdim=True)
        lost = highest[:, 0] + logits.sub_(highest).exp_().sum(1).log_() - of_target
        nats[done:end] = np.where(targets[done:end] == IGNORED, 0.0, lost.numpy())
        done = end
    return Scores(nats, prints)


def _read_ahead(pieces: Iterator[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
    """The pieces, the next of which another thread waits for while one is scored."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, pieces, None)
        while (piece := coming.result()) is not None:
            coming = pool.submit(next, pieces, None)
            yield piece
