"""The step of a small model as CUDA graphs: the host launches two of them instead of hundreds of kernels.

A GPU computes such a step sooner than the host launches its kernels one by one. The graphs hold the addresses of
everything that they read and write, so that a replay is the step that was captured, on other tokens and at other rates.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor

from gptlab.config.run import RunConfig
from gptlab.data.loader import StepBatch
from gptlab.model.counting import flops_per_token
from gptlab.model.gpt import GPT
from gptlab.optim.combined import CombinedOptimizer
from gptlab.runtime.hardware.rng import fold_seed, seed_torch
from gptlab.training.parallel.strategy import Strategy
from gptlab.training.queued_steps import queued_update
from gptlab.training.state import TrainState
from gptlab.training.step import LossFunction, Rates

MOST_FLOPS = 2e13
"""Of a micro-batch, forward and backward: 45 ms at 45% of an H100's peak. A host launches the kernels of twelve layers
in 10 to 30 ms: those of GPT-2's 1e13 FLOP took 31, where the GPU computes for 25 (docs/LOG.md, 2026-11-28). Graphs keep
the memory that they compute in, which evaluations could otherwise use."""


def is_small(model: GPT, config: RunConfig) -> bool:
    """Whether the host could launch a micro-batch for longer than the GPU computes it. With activation checkpointing,
    which restores generators in the backward pass, no graph can be captured."""
    flops = flops_per_token(model).total * config.micro_tokens
    return flops <= MOST_FLOPS and not config.runtime.activation_checkpointing


def capture(
    state: TrainState, loss_sum: LossFunction, config: RunConfig, validate: Callable[[], None],
    warn: Callable[[str], None],
) -> CapturedStep | None:  # fmt: skip
    """The step of `state`, once everything that it calls has run; None where it is large, or where the host has a part
    in it: several processes, a caller's layers or optimizer, masks of ever more documents, steps that it waits for.

    `validate`: a validation pass, which must have room beside the memory of the graphs. `warn` is called where it has
    none, or a capture fails.
    """
    is_plain = type(state.strategy) is Strategy and type(state.optimizer) is CombinedOptimizer
    is_own = is_plain and not state.model.is_replaced and torch.version.hip is None
    is_queued = state.loss_scale is None and not config.faults.spike_factor and not config.eval.only
    if not (is_small(state.model, config) and is_own and is_queued) or config.data.mask_documents:
        return None
    try:
        captured = CapturedStep(state, loss_sum, config)
        validate()
        return captured
    except RuntimeError as error:
        warn(f"training without CUDA graphs, which is slower: {str(error).splitlines()[0]}")
        state.strategy.zero_grad()
        return None


class CapturedStep:
    """Gradients and update of one step."""

    def __init__(self, state: TrainState, loss_sum: LossFunction, config: RunConfig) -> None:
        self._config, self._device = config, state.device
        shape = (2, config.batch.micro_sequences, config.model.seq_len)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=state.device)
        """Inputs and targets of a micro-batch."""
        self._count, self._total = torch.ones((2,), dtype=torch.float64, device=state.device).unbind()
        """Targets of the step; the sum of their losses."""
        self._rates = torch.ones(len(Rates._fields), device=state.device).unbind()

        def passes() -> None:
            loss = loss_sum(*self._tokens)
            (loss * self._count.clamp(min=1).reciprocal().to(loss.dtype)).backward()
            self._total.add_(loss.detach())

        def update() -> None:
            rates = Rates(*cast(Any, self._rates))  # tensors, which a replay reads again
            loss = self._total / self._count
            norms = queued_update(state, config, loss, rates)
            self.figures = torch.cat([loss.reshape(1).to(norms.dtype), norms])

        state.model.train()
        state.strategy.zero_grad()
        pool = torch.cuda.graph_pool_handle()
        # The first one makes the gradients, in memory that stays theirs; another one adds to them.
        self._passes = [_captured(passes, pool) for _ in range(min(2, config.micro_batches))]
        self._update = _captured(update, pool)

    def __call__(self, batch: StepBatch, rates: Rates) -> Tensor:
        """Queue the step. Returns the mean loss, the norm before clipping and that of each gradient, which the next
        call overwrites."""
        dropout = self._config.model.dropout > 0
        self._count.fill_(batch.target_tokens)
        self._total.zero_()
        for rate, value in zip(self._rates, rates, strict=True):
            rate.fill_(value)
        for position, index in enumerate(batch.micro_indices):
            self._tokens[0].copy_(batch.inputs[position])
            self._tokens[1].copy_(batch.targets[position])
            if dropout:
                seed_torch(fold_seed(self._config.seed, batch.step, index), self._device)
            self._passes[min(position, 1)].replay()
        if dropout:
            seed_torch(fold_seed(self._config.seed, batch.step, self._config.micro_batches), self._device)
        self._update.replay()
        return self.figures


def _captured(function: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # Other threads pin batches meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            function()
    except RuntimeError:
        _leave_capture(stream, pool)
        raise
    return graph


def _leave_capture(stream: torch.cuda.Stream, pool: Any) -> None:
    """Put back what torch leaves of a capture that fails: its stream, a generator that counts for a graph, and, before
    2.13, an allocator that waits for its end and so keeps every batch."""
    device = stream.device_index
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError, AttributeError):  # private names
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
