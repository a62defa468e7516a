"""How much memory a training step needs, counted from a model on the meta device: nothing is allocated."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from gptlab.bench.live_bytes import LiveBytes
from gptlab.config.run import RunConfig
from gptlab.eval.bits_per_byte import rows_of_pass
from gptlab.model.gpt import GPT
from gptlab.optim.combined import CombinedOptimizer
from gptlab.runtime.hardware.device import Platform
from gptlab.training.parallel.deterministic import held_sums
from gptlab.training.parallel.strategy import whole_optimizer

if TYPE_CHECKING:
    from gptlab.bench.compiled_memory import PassMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the training device, and of the copy in host memory from which checkpoints are written."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """On CUDA, what a micro-batch's passes take at their peak beside weights, gradients and moments. Elsewhere, and of
    uncompiled code with activation checkpointing, what autograd keeps of one for its backward pass, and the head's
    gradient if a step has several micro-batches; the CPU kernels and torch.compile keep less. Freed memory that the C
    library keeps is not counted."""
    update: int
    """What the update of the weights takes more than the activations, which are freed before it."""
    validation: int
    """What the logits of a validation take more than gradients, activations and update, which are freed before it. Of
    compiled code, it is part of the activations."""
    snapshot: int
    """Weights and moments once more, in host memory, for checkpoint.background."""
    compiled: bool = False
    """Whether the graphs of torch.compile were counted."""

    @property
    def device_total(self) -> int:
        """On a device with its own memory."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.update + self.validation

    @property
    def total(self) -> int:
        """Where device and host share their memory."""
        return self.device_total + self.snapshot


def count_memory(model: GPT, config: RunConfig, *, compiled: bool = False) -> Memory:
    """Bytes of a training process's tensors, counted from a model on the meta device.

    `compiled`: by torch.compile, for the model's platform, "cuda". Where that cannot be counted, as uncompiled code.
    """
    optimizer = whole_optimizer(model, config)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    moments = sum(moment.nbytes for moment in optimizer.state_tensors().values())
    gradients = weights * (held_sums(config.micro_batches) if config.parallel.exact_any_world_size else 1)
    activations = _compiled_activations(model, config, gradients) if compiled else None
    of_compiled_code = activations is not None
    if activations is None:
        activations = _uncompiled_activations(model, config, gradients)
    update = max(0, _update_bytes(model, optimizer, config) - activations)
    validation = _logits_bytes(model, config) if config.eval.validates and not of_compiled_code else 0
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=moments,
        activations=activations,
        update=update,
        validation=max(0, validation - gradients - activations - update),
        snapshot=weights + moments if config.checkpoint.background and not config.eval.only else 0,
        compiled=of_compiled_code,
    )


def model_on_meta(config: RunConfig, dtype: torch.dtype, platform: Platform) -> GPT:
    """The model that a run would train, without data. ConfigError where its runtime.fp8 is not possible."""
    with torch.device("meta"):
        model = GPT(config.model, dtype, platform)
    if dtype == torch.float64:
        model = model.double()
    if config.runtime.fp8:
        from gptlab.model.kernels.fp8 import use_fp8

        use_fp8(model)
    return model


def activations_of_rows(model: GPT, config: RunConfig) -> int:
    """What a micro-batch takes for its rows on one of many GPUs, without what each micro-batch takes: weights in the
    compute type, gradients. `model`: for the platform "cuda". Compiled, if the run is and it can be counted."""

    def taken(rows: int) -> tuple[int, ...]:
        passes = None if config.runtime.compile == "off" else _compiled_passes(model, config, rows)
        if passes is not None:
            return passes.forward_peak, passes.backward_peak
        recomputed = config.runtime.activation_checkpointing
        return (kept_for_backward(model, rows, config.model.seq_len, recomputed=recomputed),)

    rows = config.batch.micro_sequences
    return max(twice - once for once, twice in zip(taken(rows), taken(2 * rows), strict=True))


def _compiled_activations(model: GPT, config: RunConfig, gradients: int) -> int | None:
    """What a micro-batch's passes, or those of validation, take beside gradients that are kept anyway. None where they
    cannot be counted."""
    passes = _compiled_passes(model, config, config.batch.micro_sequences)
    if passes is None:
        return None
    from gptlab.bench.compiled_memory import WORKSPACE
    from gptlab.training.captured_steps import is_small

    first = max(passes.forward_peak, passes.first_backward_peak)
    later = gradients + max(passes.forward_peak, passes.backward_peak) if config.micro_batches > 1 else 0
    # In validation the gradients are freed. CUDA graphs have workspaces of their own.
    workspaces = WORKSPACE * (2 if is_small(model, config) else 1)
    return max(first, later, _logits_bytes(model, config, compiled=True)) - gradients + workspaces


def _uncompiled_activations(model: GPT, config: RunConfig, gradients: int) -> int:
    rows, seq_len = config.batch.micro_sequences, config.model.seq_len
    recomputed = config.runtime.activation_checkpointing
    kept = kept_for_backward(model, rows, seq_len, recomputed=recomputed)
    if recomputed:
        return kept
    if model.platform != "cuda":
        # The head's forward pass keeps the gradient of its weight; the backward pass makes a scaled copy of it while
        # everything else is still kept. From the second micro-batch on, the summed gradients exist too.
        return kept + (model.head.weight.nbytes if config.micro_batches > 1 else 0)
    for weight in model.parameters() if config.micro_batches > 1 else ():
        weight.grad = torch.empty_like(weight)
    held = [weight.grad for weight in model.parameters() if weight.grad is not None]
    tokens = torch.zeros(rows, seq_len, dtype=torch.int64, device="meta")
    with LiveBytes([*model.parameters(), *model.buffers(), *held]) as live:
        model.loss(tokens, tokens).backward()
    model.zero_grad()
    return max(kept, live.peak if held else live.peak - gradients)


def _logits_bytes(model: GPT, config: RunConfig, *, compiled: bool = False) -> int:
    """Those of a pass of validation: in float32, and before that in the compute type, but by the CPU kernels."""
    rows = rows_of_pass(replace(config, model=model.config), torch.device(model.platform), compiled=compiled)
    of_each = 4 + (0 if model.platform == "cpu" else model.compute_dtype.itemsize)
    return rows * model.config.seq_len * model.config.padded_vocab_size * of_each


def _update_bytes(model: GPT, optimizer: CombinedOptimizer, config: RunConfig) -> int:
    """What an update takes beside weights, gradients and moments, uncompiled."""
    for weight in model.parameters():
        weight.grad = torch.empty_like(weight)
    moments = optimizer.state_tensors().values()
    held = [weight.grad for weight in model.parameters() if weight.grad is not None]
    with torch.device("meta"), LiveBytes([*model.parameters(), *held, *moments]) as live:
        # On a GPU, whether it is made is known to the GPU alone.
        made = torch.ones((), dtype=torch.bool) if model.platform == "cuda" else None
        optimizer.step(1.0, config.optim.muon.momentum, 1.0, made)
    model.zero_grad()
    return live.peak


def _compiled_passes(model: GPT, config: RunConfig, rows: int) -> PassMemory | None:
    """None where this torch, or this model's attention, cannot be asked."""
    try:
        from gptlab.bench.compiled_memory import pass_memory
    except ImportError:  # they are private names of torch
        return None
    return pass_memory(model, rows, recomputed=config.runtime.activation_checkpointing)


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
