"""Validation loss and bits per byte, computed here from logits: the model's own loss is never asked.

    bpb = sum(nats over target tokens that stand for bytes) / (ln 2 * sum(bytes of those tokens))

Unlike nats per token, bits per byte compares models with different tokenizers: it charges for the text, not for the
pieces that the text was cut into.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlab.config.errors import UserError
from gptlab.eval.mode import evaluation_mode
from gptlab.runtime.processes.distributed import Group

IGNORED = -1
"""The target that does not count."""

# Logits turned into losses at a time: 2^24 float32 are 64 MiB, which is what the log-softmax of a chunk allocates.
CHUNK_ELEMENTS = 2**24


class Rows(Protocol):
    """What is needed of a row source: rows by index, of one length."""

    rows_per_epoch: int

    def read(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, (n, seq_len) each; IGNORED where a target does not count."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    val_loss: float
    """Nats per target token, special tokens included."""
    val_bpb: float
    """Bits per byte of text, over the target tokens that stand for bytes."""
    target_tokens: int
    """Tokens in `val_loss`."""
    target_bytes: int
    """Bytes in `val_bpb`."""
    train_loss: float | None = None
    """Nats per target token of training text, where that was measured too."""


def evaluate(
    logits: Callable[[Tensor], Tensor],  # (B, T) int64 -> (B, T, V)
    rows: Rows,
    token_bytes: np.ndarray,  # (V,) bytes that each token encodes, 0: special
    *,
    device: torch.device | str,
    micro_sequences: int,
    module: nn.Module | None = None,
    group: Group | None = None,
) -> Evaluation:
    """One pass over all rows, `micro_sequences` at a time: this changes the speed, not the result. Of several processes
    (`group`) each computes a share, and all have the result: from the same weights the same bits as that of one, since
    the sums of the passes are added in the order of the passes.

    Every pass has the same shape (the last one is filled up with rows that do not count), so that a compiled model
    compiles once. `module` is what computes the logits (default: `logits` itself, where it is a module): it is in
    evaluation mode meanwhile. No random number is drawn. Raises UserError where there is nothing to evaluate.
    """
    if module is None and isinstance(logits, nn.Module):
        module = logits
    byte_count = torch.from_numpy(np.asarray(token_bytes, dtype=np.int64))
    group = group or Group()
    passes = -(-rows.rows_per_epoch // micro_sequences)
    # Of each pass: nats, nats of tokens that stand for bytes, tokens, bytes (counts below 2^53).
    sums = torch.zeros(passes, 4, dtype=torch.float64)
    with evaluation_mode(module) if module is not None else torch.no_grad():
        # As many passes on every rank, idle ones after the last: with fully sharded weights, a pass needs all ranks.
        for number in range(group.rank, -(-passes // group.size) * group.size, group.size):
            inputs, targets = _batch(rows, min(number, passes - 1) * micro_sequences, micro_sequences)
            losses = token_nats(logits(inputs.to(device)), targets.to(device)).cpu().double()
            counted = targets != IGNORED
            lengths = byte_count[targets.clamp(min=0)] * counted
            if number >= passes:
                continue
            sums[number, 0] = losses.sum()
            sums[number, 1] = losses[lengths > 0].sum()
            sums[number, 2] = counted.sum()
            sums[number, 3] = lengths.sum()
    nats = byte_nats = 0.0
    target_tokens = target_bytes = 0
    # Every rank adds zeros to the passes of the others, which is exact.
    for of_pass, byte_of_pass, tokens, length in group.sum(sums, "evaluation").tolist():
        nats += of_pass
        byte_nats += byte_of_pass
        target_tokens += int(tokens)
        target_bytes += int(length)
    if target_bytes == 0:
        raise UserError("the validation set has no text to predict: it needs at least two tokens; hold out more of it")
    return Evaluation(nats / target_tokens, byte_nats / (math.log(2) * target_bytes), target_tokens, target_bytes)


def token_nats(
    logits: Tensor,  # (B, T, V)
    targets: Tensor,  # (B, T) int64
) -> Tensor:  # (B, T) float32 (float64 for float64 logits)
    """Negative log-likelihood of each target in nats, 0 where it is IGNORED; a bounded number of positions at once."""
    vocab_size = logits.shape[-1]
    positions = max(1, CHUNK_ELEMENTS // vocab_size)
    pieces = zip(logits.reshape(-1, vocab_size).split(positions), targets.reshape(-1).split(positions), strict=True)
    nats = [
        F.cross_entropy(z if z.dtype == torch.float64 else z.float(), y, ignore_index=IGNORED, reduction="none")
        for z, y in pieces
    ]
    return torch.cat(nats).view(targets.shape)


def _batch(rows: Rows, start: int, micro_sequences: int) -> tuple[Tensor, Tensor]:
    """The rows from `start` on as an int64 pair (micro_sequences, seq_len); after the last one come repetitions of it
    with ignored targets."""
    wanted = np.arange(start, start + micro_sequences)
    inputs, targets = rows.read(0, np.minimum(wanted, rows.rows_per_epoch - 1))
    targets = np.where((wanted < rows.rows_per_epoch)[:, None], targets, IGNORED)
    return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets.astype(np.int64))
