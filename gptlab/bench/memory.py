"""How much memory a training step needs, counted from a model on the meta device: nothing is allocated."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

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
        activations=kept_for_backward(
            model,
            config.batch.micro_sequences,
            config.model.seq_len,
            recomputed=config.runtime.activation_checkpointing,
        ),
        snapshot=weights + moments if config.checkpoint.background and not config.eval.only else 0,
    )


def kept_for_backward(model: GPT, rows: int, seq_len: int, *, recomputed: bool = False) -> int:
    """Bytes that autograd keeps of one forward pass of (rows, seq_len) tokens, weights and tables not counted.

    `recomputed`: with activation checkpointing, which keeps what goes into each block, and all of one block at a time.
    """
    kept = _Kept()
    tokens = torch.zeros(rows, seq_len, dtype=torch.int64, device=next(model.parameters()).device)
    model.train()
    hooks = _between_blocks(model, kept) if recomputed else []
    with saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        loss = model.loss(tokens, tokens)
    del loss  # The graph is not needed, only what it held.
    for hook in hooks:
        hook.remove()
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    return kept.bytes(without=own)


@dataclass(slots=True)
class _Kept:
    """Storages, held on to so that no address is used twice."""

    always: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    by_block: list[dict[int, torch.UntypedStorage]] = field(default_factory=list)
    """What a block keeps for itself, where that is computed again."""
    in_block: bool = False

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        (self.by_block[-1] if self.in_block else self.always)[storage._cdata] = storage
        return tensor

    def bytes(self, without: set[int]) -> int:
        def count(storages: dict[int, torch.UntypedStorage], known: Container[int]) -> int:
            return sum(one.nbytes() for key, one in storages.items() if key not in without and key not in known)

        return count(self.always, ()) + max((count(block, self.always) for block in self.by_block), default=0)


def _between_blocks(model: GPT, kept: _Kept) -> list[RemovableHandle]:
    """Hooks that keep what goes into each block, and tell what is kept within it from the rest."""

    def enter(block: Module, given: tuple[object, ...]) -> None:
        for one in given:
            if isinstance(one, Tensor):
                kept.keep(one)
        kept.by_block.append({})
        kept.in_block = True

    def leave(*_: object) -> None:
        kept.in_block = False

    made = [(block.register_forward_pre_hook(enter), block.register_forward_hook(leave)) for block in model.blocks]
    return [hook for pair in made for hook in pair]
