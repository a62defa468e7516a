"""One optimizer step: gradients of the mean loss over all tokens of the step, then the update."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gptlab.config.run import RunConfig
from gptlab.data.loader import StepBatch
from gptlab.optim.gradient_norm import clip_gradients
from gptlab.optim.schedule import lr_scale, muon_momentum, weight_decay_scale
from gptlab.runtime.hardware.device import synchronize
from gptlab.runtime.hardware.rng import fold_seed, seed_torch
from gptlab.training.faults import Fault, loss_fault
from gptlab.training.state import Finish, TrainState

# nanochat: an automatic collection takes about 500 ms and frees little. autoresearch and nanochat collect every 5000
# steps.
_COLLECT_EVERY_STEPS = 5000

LossFunction = Callable[..., Tensor]
"""(tokens (B, T), targets (B, T)) -> summed loss; `model.loss`, or what torch.compile made of it. With float16, `scale`
is a third argument."""


@dataclass(frozen=True, slots=True)
class Update:
    """What the update of a step was."""

    lr_scale: float
    grad_norm: float
    """Before clipping. Not finite where float16 overflowed and the update was skipped."""


@dataclass(frozen=True, slots=True)
class TrainStep:
    """What one step did."""

    batch: StepBatch
    loss: float
    """Mean over the targets of the step, before the update; nats/token."""
    result: Update | Fault
    seconds: float
    finite: list[bool] | None = None
    """Whether the gradient of each of `strategy.updated_weights()` was, where they are freed already."""


class Rates(NamedTuple):
    """What an update depends on beside the gradients: the arguments of `Strategy.step`."""

    lr_scale: float
    momentum: float
    weight_decay_scale: float


def rates_of_step(state: TrainState, config: RunConfig, finish: Finish) -> Rates:
    """The rates of the next step."""
    progress = finish.progress(state.step, state.train_seconds)
    return Rates(
        lr_scale(config.schedule, progress, finish.step_fraction),
        muon_momentum(config.optim.muon, state.step),
        weight_decay_scale(config.schedule, progress),
    )


def train_step(state: TrainState, loss_sum: LossFunction, config: RunConfig, finish: Finish) -> TrainStep:
    """Train on the next batch. The caller counts the step. A Fault leaves weights and moments unchanged, and the
    gradients in place."""
    started = time.perf_counter()
    batch = next(state.loader)
    loss = float(gradients(state, batch, loss_sum, config))
    result = loss_fault(loss, state.faults, config) or update(state, config, rates_of_step(state, config, finish))
    synchronize(state.device)
    return TrainStep(batch, loss, result, time.perf_counter() - started)


def gradients(
    state: TrainState, batch: StepBatch, loss_sum: LossFunction, config: RunConfig, *, reduce: bool = True
) -> Tensor:
    """Sum the gradients of all micro-batches over all ranks; returns the mean loss over every counted target of the
    step.

    Sums are divided by the global count, so the loss and its gradient do not depend on how the step is cut. The mean
    over no target is NaN, as in PyTorch, and so a fault. `reduce`: False for this process's micro-batches alone.
    """
    if not state.model.training:  # the walk through its modules takes 0.2 ms
        state.model.train()
    strategy = state.strategy
    # Apple's GPUs have no float64.
    total = torch.zeros((), dtype=torch.float32 if state.device.type == "mps" else torch.float64, device=state.device)
    # The mean's gradient for each sum, part of its graph instead of a division to follow. (For the same as an argument
    # of `backward`, torch imports sympy: 0.9 s of every start.) float16 needs it before a gradient is rounded.
    dtype = torch.promote_types(state.model.compute_dtype, torch.float32)
    factor = state.loss_scale.scale if state.loss_scale else 1.0
    share = torch.full((), factor / max(batch.target_tokens, 1), dtype=dtype, device=state.device)
    scale = (share,) if state.loss_scale else ()
    positions = strategy.order(batch.micro_indices)
    with strategy.in_passes():
        for position in positions:
            index = batch.micro_indices[position]
            if config.model.dropout > 0:
                seed_torch(fold_seed(config.seed, batch.step, index), state.device)
            loss = loss_sum(batch.inputs[position], batch.targets[position], *scale)
            if reduce:
                strategy.before_backward(position == positions[-1])
            (loss if scale else loss * share).backward()
            total = total + loss.detach()
            if reduce:
                total = strategy.after_micro_batch(index, total)
    if reduce:
        total = strategy.finish_reduction(total)
    if config.model.dropout > 0:
        # After the step the generator is where it would be with any number of ranks, and so is its saved state.
        seed_torch(fold_seed(config.seed, batch.step, config.micro_batches), state.device)
    return total / batch.target_tokens


def update(state: TrainState, config: RunConfig, rates: Rates) -> Update | Fault:
    """Update the weights from the gradients and free these.

    A Fault, with weights, moments and gradients unchanged, where a gradient is not finite. With float16 that is an
    overflow as long as the loss scale is above 1: the update is skipped and the scale halved, which is no fault.
    """
    strategy, loss_scale = state.strategy, state.loss_scale
    weights = strategy.updated_weights()
    if loss_scale:
        torch._foreach_div_([p.grad for p in weights if p.grad is not None], loss_scale.scale)
    norm = clip_gradients(weights, config.optim.grad_clip, strategy.total_norm)
    is_finite = math.isfinite(norm)  # the same on all ranks
    if not is_finite and (loss_scale is None or loss_scale.scale <= 1.0):
        return Fault("gradient", norm)
    if is_finite:
        strategy.step(*rates)
    if loss_scale:
        loss_scale.update(is_finite)
    strategy.zero_grad()
    return Update(rates.lr_scale, norm)


@contextmanager
def quiet_garbage() -> Iterator[None]:
    """Within the context, only `collect_garbage` collects garbage. That of set-up is collected at entry; objects alive
    then are never scanned again (`gc.freeze`)."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect_garbage(step: int) -> None:
    """Called after each step with the number of steps done: collects rarely."""
    if step % _COLLECT_EVERY_STEPS == 0:
        gc.collect()
