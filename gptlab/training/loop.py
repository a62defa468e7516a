"""The training loop: evaluate, CORE, sample, checkpoint, stop?, gradients, update, log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig
from gptlab.runtime.hardware.device import synchronize
from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.load import Checkpoint
from gptlab.training.checkpoint.retention import discard_after
from gptlab.training.faults import Fault, loss_fault
from gptlab.training.horizon import Finish, due
from gptlab.training.parallel.agreement import Agreement, require_equal_weights, same_checkpoint
from gptlab.training.recorder import Recorder
from gptlab.training.state import Best, TrainState, better
from gptlab.training.step import GradientSums, LossFunction, gradients, update
from gptlab.training.watchdog import Preemption, QuietGarbageCollector, TrainingFailed


class Evaluated(Protocol):
    """A validation: `eval.bits_per_byte.Evaluation`."""

    @property
    def val_loss(self) -> float: ...
    @property
    def val_bpb(self) -> float: ...
    @property
    def train_loss(self) -> float | None: ...


class CoreMeasured(Protocol):
    """CORE: `eval.core.CoreResult`."""

    @property
    def core_metric(self) -> float: ...
    @property
    def accuracy(self) -> Mapping[str, float]: ...
    @property
    def centered(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class Work:
    """What the loop does besides training. None of it may touch the training state."""

    loss_sum: LossFunction
    evaluate: Callable[[], Evaluated]
    sample: Callable[[Sequence[str]], Sequence[str]]
    """Prompts -> each with its continuation."""
    core: Callable[[], CoreMeasured] | None = None
    """None: this run does not measure CORE."""
    group: Group = field(default_factory=Group)
    """The processes that train together."""
    sums: GradientSums | None = None
    """None: one process, whose gradients are the step's as they add up."""
    prompts: Sequence[str] = ()
    """Texts that samples continue. Empty: no samples."""


def fit(
    config: RunConfig, finish: Finish, state: TrainState, work: Work, record: Recorder
) -> Literal["finished", "preempted"]:
    """Train `state` until `finish`, or until a signal asks to stop. TrainingFailed for a loss that broke.

    Every rank runs this same loop, and decides alike, since it decides by what `Agreement` made the same on all.
    """
    with QuietGarbageCollector() as garbage, Preemption(record.stopping, record.stop_now) as preemption:
        agreed = Agreement(work.group, preemption, state.step, record.saves)
        while True:
            record.saves.look_at_save(state)
            # A signal leaves what is due now to the resumed run, which does it in this same order.
            now = state.mark()
            if config.eval.validates and not agreed.stop and due(
                now, state.evaluated, every_steps=config.eval.every_steps, every_seconds=config.eval.every_seconds,
                at_start=config.eval.at_start, at_end=finish.reached(state) or config.eval.only,
            ):  # fmt: skip
                evaluate(state, work, record)
                agreed.listen()
            ended = finish.reached(state)

            if work.core is not None and not agreed.stop and due(
                now, state.core_measured, every_steps=config.eval.core_every_steps, every_seconds=None,
                at_start=False, at_end=ended or config.eval.only,
            ):  # fmt: skip
                measure_core(state, work.core, record)
                agreed.listen()

            if work.prompts and not agreed.stop and due(
                now, state.sampled, every_steps=config.sample.every_steps, every_seconds=None,
                at_start=False, at_end=ended,
            ):  # fmt: skip
                sample(state, work, record)
                agreed.listen()

            best = config.checkpoint.save_best and state.is_best() and state.step > 0 and state.saved != now
            if not config.eval.only and not agreed.stop and (best or due(
                now, state.saved, every_steps=config.checkpoint.every_steps,
                every_seconds=config.checkpoint.every_seconds, at_start=False, at_end=ended,
            )):  # fmt: skip
                checkpoint(state, work, record)

            if agreed.stop:
                if state.step > 0:  # before the first step there is nothing to save: the run begins again
                    checkpoint(state, work, record, scheduled=False)
                preemption.wait_for_answer()
                record.preempted(state, agreed.signal_name)
                return "preempted"
            if ended or config.eval.only:
                return "finished"

            started = time.perf_counter()
            progress = finish.progress(state.step, state.train_seconds)
            batch = next(state.loader)
            loss = float(gradients(state, batch, work.loss_sum, config, work.sums))
            updated = loss_fault(loss, state.faults, config) or update(state, config, progress, finish.step_fraction)
            synchronize(state.device)
            step_seconds = agreed.step(time.perf_counter() - started, state.step + 1)

            state.train_seconds += step_seconds
            if isinstance(updated, Fault):
                recover(state, replace(updated, loss=loss), batch.step, config, record, work.group)
                continue
            state.passed(loss, config.faults)
            state.step += 1
            state.loss_ema.update(loss)
            record.step(state, batch, loss, updated, step_seconds)
            garbage.step(state.step)


def recover(state: TrainState, fault: Fault, data_step: int, config: RunConfig, record: Recorder, group: Group) -> None:
    """Leave the update out, or go back to before a spike. TrainingFailed over the limits."""
    broken = state.first_broken_gradient()
    state.optimizer.zero_grad()
    step = state.step + 1
    checkpoint = None
    if state.faults.calls_for_rewind(fault, config.faults):
        checkpoint = last_good(state, record, group)
    if checkpoint is not None:
        state.rewind(checkpoint.model, checkpoint.optimizer, checkpoint.state)
        record.rewound(state, fault, step, data_step)
        return
    state.faults.skip(fault, step, config)
    state.step = step
    record.skipped(state, fault, data_step, broken)


def last_good(state: TrainState, record: Recorder, group: Group) -> Checkpoint | None:
    """The checkpoint to go back to, the same on every rank, those after it being removed; None where none is intact."""
    record.saves.finish_save(state)
    good, folder, warn = state.faults.good_step, record.run.checkpoints_path, record.console.warn
    assert good is not None
    try:
        checkpoint = same_checkpoint(folder, group, warn, up_to=good)
    except UserError as error:
        warn(f"{error}: nothing to go back to")
        return None
    if group.is_main:
        discard_after(folder, good, warn)
    return checkpoint


def evaluate(state: TrainState, work: Work, record: Recorder) -> None:
    """Validate, and remember the best. Off the clock. TrainingFailed where the weights are broken."""
    started = time.perf_counter()
    with record.console.busy(f"step {state.step:05d} | validating"):
        result = work.evaluate()
    if not math.isfinite(result.val_loss):
        reason = f"the validation loss at step {state.step} is {result.val_loss}"
        raise TrainingFailed(reason, step=state.step, loss=result.val_loss)
    state.evaluated = state.mark()
    state.val_loss, state.val_bpb = result.val_loss, result.val_bpb
    state.min_val_bpb = min(result.val_bpb, result.val_bpb if state.min_val_bpb is None else state.min_val_bpb)
    state.best = better(state.best, Best(state.step, result.val_loss))
    record.evaluation(state, result.train_loss, time.perf_counter() - started)


def measure_core(state: TrainState, core: Callable[[], CoreMeasured], record: Recorder) -> None:
    """Off the clock."""
    started = time.perf_counter()
    with record.console.busy(f"step {state.step:05d} | measuring CORE"):
        result = core()
    state.core_measured, state.core_metric = state.mark(), result.core_metric
    record.core(state, result.accuracy, result.centered, time.perf_counter() - started)


def sample(state: TrainState, work: Work, record: Recorder) -> None:
    """Off the clock."""
    with record.console.busy(f"step {state.step:05d} | sampling"):
        texts = work.sample(work.prompts)
    for prompt, text in zip(work.prompts, texts, strict=True):
        record.sample(state, prompt, text)
    state.sampled = state.mark()


def checkpoint(state: TrainState, work: Work, record: Recorder, *, scheduled: bool = True) -> None:
    """All ranks save, each its pieces. TrainingFailed, with nothing saved, where they hold different weights."""
    require_equal_weights(state.weights_alike(), work.group, state.step)
    record.saves.checkpoint(state, scheduled=scheduled)
