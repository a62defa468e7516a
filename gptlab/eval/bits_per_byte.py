"""Validation loss and bits per byte, computed here from logits. The model's own loss is never used.

    bpb = sum(nats over target tokens that stand for bytes) / (ln 2 * sum(bytes of those tokens))

Unlike nats per token, bits per byte compares models with different tokenizers: it measures the text, not the pieces
that the text was cut into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig
from gptlab.data.packing import IGNORED
from gptlab.data.rows import RowSource
from gptlab.model.gpt import GPT
from gptlab.model.hooks import is_by_weight, is_hooked
from gptlab.model.kernels.ops import implementation, multiplication_of_many
from gptlab.runtime.processes.distributed import Group

# Logits turned into losses at a time: 2^24 float32 are 64 MiB, which PyTorch's log-softmax of a chunk allocates.
CHUNK_ELEMENTS = 2**24
# Positions and logits (128 MiB) of a pass on a CPU. Some of its work does not depend on them: an evaluation of
# nanogpt/shakespeare-char-cpu takes 0.8 times as long as with the 12 rows of 64 that it trains, one of quickstart 0.95
# times as long as with four of 1,024 (Zen 3; docs/LOG.md, 2026-11-26).
CPU_PASS_POSITIONS, CPU_PASS_LOGITS = 2**13, 2**25

TokenNats = Callable[[Tensor, Tensor], Tensor]
"""Tokens and targets, (B, T) int64 -> the loss of each target in nats, (B, T), 0 where it is IGNORED."""


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
    """Nats per target token of training text, if that was measured too."""


def rows_of_pass(config: RunConfig, device: torch.device, *, compiled: bool = False) -> int:
    """Rows of one evaluation pass: `eval.micro_sequences`, or as many as in training, since a compiled model has that
    shape and a GPU the memory. An uncompiled model on a CPU takes more at once where they are few or short."""
    if config.eval.micro_sequences is not None or compiled or device.type != "cpu":
        return config.eval_sequences
    positions = min(CPU_PASS_POSITIONS, CPU_PASS_LOGITS // config.model.padded_vocab_size)
    return max(config.eval_sequences, positions // config.model.seq_len)


def evaluate(
    nats: TokenNats,
    rows: RowSource,
    token_bytes: np.ndarray,  # (V,) bytes that each token stands for, 0: special
    *,
    device: torch.device | str,
    micro_sequences: int,
    module: nn.Module | None = None,
    group: Group | None = None,
) -> Evaluation:
    """One pass over all rows, `micro_sequences` at a time, which changes the speed and, but for rounding, not the
    result: other kernels may multiply fewer positions. The processes of a `group` share the work, and all get the bits
    of one process with the same weights: sums are added in the order of the passes (and zeros of the ranks that did not
    compute them, which is exact).

    Every pass has the same shape (the last one is filled up with rows that do not count), so that a compiled model
    compiles once. `module`, the model, is in evaluation mode meanwhile. No random number is drawn. Raises UserError if
    there is nothing to evaluate.
    """
    byte_count = torch.from_numpy(np.asarray(token_bytes, dtype=np.int64))
    group = group or Group()
    passes = -(-rows.rows_per_epoch // micro_sequences)
    # For each pass: nats, nats of tokens that stand for bytes, tokens, bytes (counts below 2^53).
    sums = torch.zeros(passes, 4, dtype=torch.float64)
    with evaluation_mode(module):
        # As many on every rank; those after the last are discarded. With sharded weights, a pass takes all ranks.
        for number in range(group.rank, -(-passes // group.size) * group.size, group.size):
            inputs, targets = _batch(rows, min(number, passes - 1) * micro_sequences, micro_sequences)
            losses = nats(inputs.to(device), targets.to(device)).cpu().double()
            counted = targets != IGNORED
            lengths = byte_count[targets.clamp(min=0)] * counted
            if number < passes:
                parts = [losses.sum(), losses[lengths > 0].sum(), counted.sum(), lengths.sum()]
                sums[number] = torch.tensor(parts, dtype=torch.float64)
    totals = sum(group.sum(sums, "evaluation"), torch.zeros(4, dtype=torch.float64))
    all_nats, byte_nats, target_tokens, target_bytes = totals.tolist()
    if target_bytes == 0:
        raise UserError("the validation set has no text to predict: it needs at least two tokens; hold out more of it")
    val_bpb = byte_nats / (math.log(2) * target_bytes)
    return Evaluation(all_nats / target_tokens, val_bpb, int(target_tokens), int(target_bytes))


@contextmanager
def evaluation_mode(module: object) -> Iterator[None]:
    """Turn gradients off, and dropout if it is a module; afterwards, every submodule is in the mode it was in.

    `no_grad`, not `inference_mode`: tensors that a module caches meanwhile must stay usable in training.
    """
    modes = [(part, part.training) for part in (module.modules() if isinstance(module, nn.Module) else ())]
    try:
        for part, _ in modes:
            part.training = False
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def nats_of(model: GPT) -> TokenNats:
    """Losses by the logits of `model`, without a gradient. The CPU kernel has a few rows of them at a time, which stay
    in the cache: an evaluation of quickstart takes 0.74 to 0.94 of the time (docs/LOG.md, 2026-11-27)."""

    def nats(tokens: Tensor, targets: Tensor) -> Tensor:
        head, is_called = model.head, model.is_replaced or is_hooked(model)  # hooks gather weights that are sharded
        if is_called or head.bias is not None or not is_by_weight(head):
            return token_nats(model(tokens), targets)
        hidden = model.hidden(tokens)
        if (kernels := multiplication_of_many(hidden)) is None:
            return token_nats(model.logits(hidden), targets)
        x, cap = model.final_norm(hidden), model.config.logit_softcap
        return kernels.head_nats(x, head.weight, targets, model.vocab_size, cap)

    return nats


def nats_by(logits: Callable[[Tensor], Tensor]) -> TokenNats:
    """Losses by logits (B, T, V) of tokens (B, T)."""
    return lambda tokens, targets: token_nats(logits(tokens), targets)


def token_nats(
    logits: Tensor,  # (B, T, V)
    targets: Tensor,  # (B, T) int64
) -> Tensor:  # (B, T) float32 (float64 for float64 logits)
    """Negative log-likelihood of each target in nats, 0 where it is IGNORED. Bounds the positions computed at once."""
    vocab_size = logits.shape[-1]
    logits = logits.reshape(-1, vocab_size)
    wide = torch.promote_types(logits.dtype, torch.float32)
    positions = max(1, CHUNK_ELEMENTS // vocab_size)
    pieces = zip(logits.split(positions), targets.reshape(-1).split(positions), strict=True)
    nats = [implementation(z).losses(z, y) for z, y in ((z.to(wide), y) for z, y in pieces)]
    return torch.cat(nats).view(targets.shape)


def _batch(rows: RowSource, start: int, micro_sequences: int) -> tuple[Tensor, Tensor]:
    """The rows from `start` on, as an int64 pair (micro_sequences, seq_len). After the last row come copies of it with
    ignored targets."""
    wanted = np.arange(start, start + micro_sequences)
    inputs, targets = rows.read(0, np.minimum(wanted, rows.rows_per_epoch - 1))
    targets = np.where((wanted < rows.rows_per_epoch)[:, None], targets, IGNORED)
    return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets.astype(np.int64))
