"""The steps of a GPU: the host queues one while the GPU computes the one before, and neither waits for the other.

The GPU decides whether an update is made: where loss or gradients are not finite it leaves weights and moments as they
are (`queued_update`). The host learns of it a step later, from a copy that is on its way while the next step begins;
that step began from the same weights as if the host had waited. A step is queued ahead only where nothing else is to be
done before it: evaluations, samples and checkpoints see the state after the last step that was counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gptlab.config.run import RunConfig
from gptlab.data.loader import StepBatch
from gptlab.training.faults import Fault, loss_fault
from gptlab.training.state import Finish, TrainState
from gptlab.training.step import LossFunction, Rates, TrainStep, Update, gradients, rates_of_step


@dataclass(frozen=True, slots=True)
class _Queued:
    batch: StepBatch
    lr_scale: float
    figures: Tensor
    """On the host once `copied`: the loss, the norm of the gradients, then that of each."""
    copied: torch.cuda.Event | None
    """None: they are there."""


def queued_steps(
    state: TrainState, loss_sum: LossFunction, config: RunConfig, finish: Finish, due: Callable[[TrainState], bool]
) -> Iterator[TrainStep]:
    """Yield steps in order. A step is the last one if something else is `due` after it, which is called with the state
    expected then. The caller adds each to the step count and to the clock before it takes the next."""
    started, counted = time.perf_counter(), 0.0
    before = _event(state.device)
    queued: _Queued | None = _queue(state, loss_sum, config, finish)
    while queued is not None:
        seconds = state.train_seconds / max(state.step, 1)
        after = replace(state, step=state.step + 1, train_seconds=state.train_seconds + seconds)
        # It may take twice as long as the mean so far: a run with a budget in seconds begins no step beyond it.
        latest = replace(after, train_seconds=after.train_seconds + seconds)
        following = None if due(latest) else _queue(after, loss_sum, config, finish)
        figures = _figures(state, queued)
        seconds = time.perf_counter() - started - counted
        if following is not None and before is not None and queued.copied is not None:
            # The host sees that a step has ended when it has queued the next one: the first of several would take
            # twice as long, and the last one nothing. The last one takes what is left, so that the sum is the host's.
            seconds = min(seconds, before.elapsed_time(queued.copied) / 1000)
        counted, before = counted + seconds, queued.copied
        yield _step(state, queued, figures, config, seconds)
        queued = following


def queued_update(state: TrainState, config: RunConfig, loss: Tensor, rates: Rates) -> Tensor:
    """Update the weights unless the loss (0-d, nats/token) is too high or a gradient is not finite, and free the
    gradients, without waiting for any of it. Returns the norm before clipping, then that of the gradient of each of
    `strategy.updated_weights()`."""
    strategy = state.strategy
    held = [p.new_zeros(()) if p.grad is None else p.grad for p in strategy.updated_weights()]
    norm = strategy.total_norm(held)
    norms = torch.stack([norm, *(one.to(norm.dtype) for one in torch._foreach_norm(held))])
    if config.optim.grad_clip is not None:
        factor = (config.optim.grad_clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(held, factor.to(held[0].dtype))
    # NaN fails the comparison too.
    made = norm.isfinite() & (loss <= config.runtime.max_loss)
    strategy.step(*rates, made)
    strategy.zero_grad()
    return norms


def _queue(state: TrainState, loss_sum: LossFunction, config: RunConfig, finish: Finish) -> _Queued:
    batch = next(state.loader)
    rates = rates_of_step(state, config, finish)
    if state.captured is not None:
        figures = state.captured(batch, rates)
    else:
        loss = gradients(state, batch, loss_sum, config)
        norms = queued_update(state, config, loss, rates)
        figures = torch.cat([loss.reshape(1).to(norms.dtype), norms])
    if state.device.type != "cuda":
        return _Queued(batch, rates.lr_scale, figures, None)
    host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
    host.copy_(figures, non_blocking=True)
    return _Queued(batch, rates.lr_scale, host, _event(state.device))


def _event(device: torch.device) -> torch.cuda.Event | None:
    """The end of what is queued so far; None where the host waits for the device."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _figures(state: TrainState, queued: _Queued) -> list[float]:
    """Wait for them; where another process is lost meanwhile, by its name."""
    if queued.copied is not None:
        with state.strategy.in_passes():
            queued.copied.synchronize()
    return queued.figures.tolist()


def _step(state: TrainState, queued: _Queued, figures: list[float], config: RunConfig, seconds: float) -> TrainStep:
    loss, norm, *norms = figures
    result: Update | Fault | None = loss_fault(loss, state.faults, config)
    if result is None:
        result = Update(queued.lr_scale, norm) if math.isfinite(norm) else Fault("gradient", norm)
    return TrainStep(queued.batch, loss, result, seconds, [math.isfinite(one) for one in norms])
