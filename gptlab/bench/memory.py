"""How much memory a training step needs, counted from a model on the meta device: nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gptlab.config.run import RunConfig
from gptlab.model.gpt import GPT
from gptlab.training.parallel.deterministic import held_sums
from gptlab.training.parallel.strategy import whole_optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the training device, and of the copy in host memory from which checkpoints are written."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What autograd keeps of one micro-batch for its backward pass, uncompiled. torch.compile and the CPU kernels keep
    less."""
    snapshot: int
    """Weights and moments once more, in host memory, for checkpoint.background."""

    @property
    def device_total(self) -> int:
        """On a device with its own memory."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def total(self) -> int:
        """Where device and host share their memory."""
        return self.device_total + self.snapshot


def count_memory(model: GPT, config: RunConfig) -> Memory:
    """Bytes of a training process's tensors, counted from a model on the meta device."""
    optimizer = whole_optimizer(model, config)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    moments = sum(moment.nbytes for moment in optimizer.state_tensors().values())
    return Memory(
        weights=weights,
        gradients=weights * (held_sums(config.micro_batches) if config.parallel.exact_any_world_size else 1),
        optimizer=moments,
        activations=kept_for_backward(model, config.batch.micro_sequences, config.model.seq_len),
        snapshot=weights + moments if config.checkpoint.background and not config.eval.only else 0,
    )


def kept_for_backward(model: GPT, rows: int, seq_len: int) -> int:
    """Bytes that autograd keeps of one forward pass of (rows, seq_len) tokens, weights and tables not counted."""
    kept: dict[int, torch.UntypedStorage] = {}  # Held on to, so that no address is used twice.

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    tokens = torch.zeros(rows, seq_len, dtype=torch.int64, device=next(model.parameters()).device)
    model.train()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.loss(tokens, tokens)
    del loss  # The graph is not needed, only what it held.
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    return sum(storage.nbytes() for key, storage in kept.items() if key not in own)
