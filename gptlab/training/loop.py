"""The training loop: evaluate, CORE, sample, checkpoint, stop?, train step, record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig
from gptlab.eval.bits_per_byte import Evaluation
from gptlab.eval.core import CoreResult, EncodedTask
from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.load import Checkpoint, load_newest
from gptlab.training.checkpoint.retention import discard_after
from gptlab.training.compilation import Passes
from gptlab.training.faults import Fault, TrainingFailed
from gptlab.training.own_buffers import has_own_buffers, step_of_own_parts
from gptlab.training.parallel.agreement import Agreement, require_equal_weights
from gptlab.training.recorder import Recorder
from gptlab.training.signals import Signals
from gptlab.training.state import Best, Finish, Mark, TrainState, better
from gptlab.training.step import LossFunction, TrainStep, collect_garbage, quiet_garbage, train_step

Ended = Literal["finished", "preempted"]


class Work(Protocol):
    """What a run is to do. None of the methods may touch the training state."""

    config: RunConfig
    finish: Finish
    group: Group
    """The processes that train together."""
    passes: Passes
    prompts: Sequence[str]
    """Texts that samples continue. Empty: no samples."""
    tasks: Sequence[EncodedTask]
    """Of CORE. Empty: this run does not measure it."""

    def evaluate(self) -> Evaluation: ...

    def sample(self, prompts: Sequence[str]) -> Sequence[str]:
        """Each prompt with its continuation."""

    def core(self) -> CoreResult: ...


def fit(state: TrainState, work: Work, record: Recorder) -> Ended:
    """Train until the horizon, or until a signal asks to stop. TrainingFailed for a loss that broke.

    Every rank runs this loop and decides alike: by what `Agreement` made the same on all.
    """
    finish, agenda = work.finish, Agenda(work.config, work.finish)
    with quiet_garbage(), record.signals.training(record.stopping):
        stop = _agreed(state, work, record)
        due = partial(_is_due, agenda, stop, record)
        stop.listen()
        while True:
            record.saves.poll(state)
            # A signal leaves what is due now to the resumed run, which does it in this same order.
            if not stop.requested and agenda.evaluation_due(state):
                evaluate(state, work, record)
                stop.listen()
            if not stop.requested and work.tasks and agenda.core_due(state):
                measure_core(state, work, record)
                stop.listen()
            if not stop.requested and work.prompts and agenda.sample_due(state):
                sample(state, work, record)
                stop.listen()
            if not stop.requested and agenda.checkpoint_due(state):
                checkpoint(state, work, record)

            if stop.requested:
                if state.step > 0:  # before the first step there is nothing to save: the run starts again
                    checkpoint(state, work, record, scheduled=False)
                return preempted(state, stop, record)
            if finish.reached(state):
                return "finished"

            for step in next_steps(state, work.passes.loss_sum, work.config, finish, due):
                seconds = stop.step(step.seconds, state.step + 1)
                if seconds < step.seconds:
                    record.paused(state, step.seconds - seconds)
                state.train_seconds += seconds
                if isinstance(step.result, Fault):
                    recover(state, step, step.result, work, record)
                    continue
                state.count_step(step.loss, work.config.faults)
                record.step(state, step.batch, step.loss, step.result, seconds)
                collect_garbage(state.step)


def next_steps(
    state: TrainState, loss_sum: LossFunction, config: RunConfig, finish: Finish, due: Callable[[TrainState], bool]
) -> Iterable[TrainStep]:
    """One step; on a GPU, as many as there are until something else is `due` (`queued_steps`)."""
    # Whether buffers keep their new values is known only after the step.
    if state.model.is_replaced and (state.model.platform != "cuda" or has_own_buffers(state.model)):
        return [step_of_own_parts(state, loss_sum, config, finish)]
    # Spikes, and overflows of float16, are found on the host, which waits for the GPU.
    if state.model.platform == "cuda" and not (config.faults.spike_factor or state.loss_scale):
        from gptlab.training.queued_steps import queued_steps

        return queued_steps(state, loss_sum, config, finish, due)
    return [train_step(state, loss_sum, config, finish)]


def _is_due(agenda: Agenda, stop: Signals | Agreement, record: Recorder, state: TrainState) -> bool:
    """Whether the loop has more to do than the next step."""
    return stop.requested or record.saves.in_progress or agenda.any_due(state)


def evaluate_only(state: TrainState, work: Work, record: Recorder) -> Ended:
    """Evaluate the weights as they are, without training (`eval.only`)."""
    with record.signals.training(record.stopping):
        stop = _agreed(state, work, record)
        stop.listen()
        if not stop.requested and work.config.eval.validates:
            evaluate(state, work, record)
            stop.listen()
        if not stop.requested and work.tasks:
            measure_core(state, work, record)
            stop.listen()
        return preempted(state, stop, record) if stop.requested else "finished"


def _agreed(state: TrainState, work: Work, record: Recorder) -> Signals | Agreement:
    """The signals to this process, or to any of several."""
    if work.group.size == 1:
        return record.signals
    work.group.at_step(state.step + 1)
    return Agreement(record.signals, work.group, record.saves)


def preempted(state: TrainState, stop: Signals | Agreement, record: Recorder) -> Ended:
    """Report the end of a run that a signal stopped."""
    record.signals.wait_for_answer()
    record.preempted(state, stop.signal_name)
    return "preempted"


def recover(state: TrainState, step: TrainStep, fault: Fault, work: Work, record: Recorder) -> None:
    """Skip the update, or rewind to before a spike. TrainingFailed over the limits."""
    broken = state.strategy.first_broken_gradient(step.finite)
    state.strategy.zero_grad()
    number = state.step + 1
    if state.faults.calls_for_rewind(fault, step.loss, work.config.faults):
        saved = last_good(state, record, work.group)
        if saved is not None:
            state.rewind(saved.model, saved.optimizer, saved.state)
            record.rewound(state, fault, number, step.batch.step)
            return
    state.faults.skip(fault, step.loss, number, work.config)
    state.step = number
    record.skipped(state, fault, step.batch.step, broken)


def last_good(state: TrainState, record: Recorder, group: Group) -> Checkpoint | None:
    """The checkpoint to rewind to, the same on every rank; later ones are removed. None where none is intact."""
    record.saves.wait(state)
    good, folder, warn = state.faults.good_step, record.run.checkpoints_path, record.console.warn
    assert good is not None
    try:
        checkpoint = load_newest(folder, warn, group, up_to=good)
    except UserError as error:
        warn(f"{error}: nothing to rewind to")
        return None
    if group.is_main:
        discard_after(folder, good, warn)
    return checkpoint


def evaluate(state: TrainState, work: Work, record: Recorder) -> None:
    """Validate and remember the best, off the clock. TrainingFailed where the weights are broken."""
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


def measure_core(state: TrainState, work: Work, record: Recorder) -> None:
    """Measure CORE and remember its value, off the clock."""
    started = time.perf_counter()
    with record.console.busy(f"step {state.step:05d} | measuring CORE"):
        result = work.core()
    state.core_measured, state.core_metric = state.mark(), result.core_metric
    record.core(state, result.accuracy, result.centered, time.perf_counter() - started)


def sample(state: TrainState, work: Work, record: Recorder) -> None:
    """Continue every prompt and record the texts, off the clock."""
    with record.console.busy(f"step {state.step:05d} | sampling"):
        texts = work.sample(work.prompts)
    for prompt, text in zip(work.prompts, texts, strict=True):
        record.sample(state, prompt, text)
    state.sampled = state.mark()


def checkpoint(state: TrainState, work: Work, record: Recorder, *, scheduled: bool = True) -> None:
    """All ranks save, each its slices. TrainingFailed, with nothing saved, where their replicated weights differ."""
    if work.group.size > 1:
        require_equal_weights(state.strategy, state.step)
    record.saves.checkpoint(state, scheduled=scheduled)


@dataclass(frozen=True, slots=True)
class Agenda:
    """What is due before the next step. Each thing is due at most once per step, and again at the end of the run."""

    config: RunConfig
    finish: Finish

    def evaluation_due(self, state: TrainState) -> bool:
        wanted = self.config.eval
        return wanted.validates and (
            (wanted.at_start and state.step == 0 and state.evaluated is None)
            or self._due(state, state.evaluated, wanted.every_steps, wanted.every_seconds)
        )

    def any_due(self, state: TrainState) -> bool:
        """Whether anything is due, or the run is at its end."""
        every = (self.evaluation_due, self.core_due, self.sample_due, self.checkpoint_due)
        return self.finish.reached(state) or any(due(state) for due in every)

    def core_due(self, state: TrainState) -> bool:
        return self._due(state, state.core_measured, self.config.eval.core_every_steps)

    def sample_due(self, state: TrainState) -> bool:
        wanted = self.config.sample
        return self._due(state, state.sampled, wanted.every_steps, wanted.every_seconds)

    def checkpoint_due(self, state: TrainState) -> bool:
        wanted = self.config.checkpoint
        best = wanted.save_best and state.is_best() and state.step > 0 and state.saved != state.mark()
        return best or self._due(state, state.saved, wanted.every_steps, wanted.every_seconds)

    def _due(
        self, state: TrainState, last: Mark | None, every_steps: int | None, every_seconds: float | None = None
    ) -> bool:
        """At each multiple of `every_steps`, at the first step boundary after each multiple of `every_seconds` on the
        clock, and at the end."""
        if last is not None and last.step == state.step:
            return False
        if self.finish.reached(state):
            return True
        if state.step == 0:
            return False
        if every_steps is not None and state.step % every_steps == 0:
            return True
        before = 0.0 if last is None else last.train_seconds
        return every_seconds is not None and state.train_seconds // every_seconds > before // every_seconds
