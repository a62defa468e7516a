"""What a run leaves behind while it goes on: step lines, metric lines, checkpoints, and the closing block."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig
from gptlab.data.loader import StepBatch
from gptlab.runtime.console import Console
from gptlab.runtime.device import peak_memory_mb
from gptlab.runtime.metrics import MetricsLog
from gptlab.runtime.run_directory import RunDirectory
from gptlab.runtime.strict_json import write_json_atomic
from gptlab.train.background_save import BackgroundSaver
from gptlab.train.checkpoint import Checkpoint, save_checkpoint
from gptlab.train.closing_block import show_closing_block
from gptlab.train.faults import Fault
from gptlab.train.horizon import Finish
from gptlab.train.retention import retain
from gptlab.train.state import Best, TrainState, better
from gptlab.train.step import Update
from gptlab.train.throughput import Throughput


@dataclass(slots=True)
class OffClock:
    """Seconds that training did not take, over all processes of a run; logged, and part of no budget."""

    started: float = field(default_factory=time.perf_counter)
    """time.perf_counter() when this process began."""
    earlier_seconds: float = 0.0
    """What the processes before this one took in all, up to the checkpoint from which this one went on."""
    startup_seconds: float = 0.0
    """From the start of a process to its first step, without compilation."""
    compile_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    """That training stood still for checkpoints. What a save takes in the background is not in it."""

    @property
    def total_seconds(self) -> float:
        """Training included."""
        return self.earlier_seconds + time.perf_counter() - self.started

    def so_far(self) -> dict[str, float]:
        """What summary.json says, and what a resumed run adds to."""
        parts = ("startup_seconds", "compile_seconds", "evaluation_seconds", "checkpoint_seconds")
        return {"total_seconds": self.total_seconds} | {name: getattr(self, name) for name in parts}

    def add_earlier(self, saved: Mapping[str, float]) -> None:
        """Take over what an earlier process counted with `so_far`."""
        for name, seconds in saved.items():
            own = "earlier_seconds" if name == "total_seconds" else name
            setattr(self, own, getattr(self, own) + seconds)


# A person would not notice a shorter wait.
_NOTICEABLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _Save:
    """One that has begun. `finish` waits until the checkpoint is durable, and returns what retention complains of."""

    step: int
    scheduled: bool
    former_best: Best | None
    """What `state.best_saved` was before it, and is again where it fails."""
    done: Callable[[], bool]
    finish: Callable[[], list[str]]


@dataclass(slots=True)
class Recorder:
    """Writes; decides nothing."""

    config: RunConfig
    finish: Finish
    run: RunDirectory
    console: Console
    metrics: MetricsLog
    throughput: Throughput
    n_params: int
    off_clock: OffClock
    saver: BackgroundSaver | None = None
    """None: training waits for every save."""
    writes: bool = True
    """Not on ranks other than 0, which only remember that it did: what is due next must be the same for all."""
    unscheduled_steps: set[int] = field(default_factory=set)
    """Of checkpoints that a signal asked for, as far as this process knows."""
    _save: _Save | None = None

    def step(self, state: TrainState, batch: StepBatch, loss: float, updated: Update, step_seconds: float) -> None:
        tokens_per_step = self.config.batch.total_tokens
        reading = self.throughput.step(tokens_per_step, step_seconds)
        if state.step % self.config.runtime.log_every_steps:
            return
        self.metrics.write(
            "train", step=state.step, tokens=state.step * tokens_per_step, epoch=batch.epoch, loss=loss,
            loss_ema=state.loss_ema.value, lr_scale=updated.lr_scale, grad_norm=updated.grad_norm,
            step_seconds=step_seconds, train_seconds=state.train_seconds,
            tokens_per_second=reading.tokens_per_second, mfu=reading.mfu,
        )  # fmt: skip
        done = self.finish.progress(state.step, state.train_seconds)
        mfu = "unknown" if reading.mfu is None else f"{100 * reading.mfu:.1f}%"
        left = self.throughput.remaining_seconds(
            steps=None if self.finish.steps is None else self.finish.steps - state.step,
            seconds=None if self.finish.seconds is None else self.finish.seconds - state.train_seconds,
        )
        figures = (
            f"step {state.step:05d} ({100 * done:.1f}%)",
            f"loss: {state.loss_ema.value:.6f}",
            f"lrm: {updated.lr_scale:.2f}",
            f"dt: {1000 * step_seconds:.0f}ms",
            f"tok/sec: {reading.tokens_per_second:,.0f}",
            f"mfu: {mfu}",
            f"epoch: {batch.epoch:.2f}",
            f"remaining: {left or 0.0:.0f}s",
        )
        self.console.live(" | ".join(figures))

    def evaluation(self, state: TrainState, train_loss: float | None, seconds: float) -> None:
        self.off_clock.evaluation_seconds += seconds
        measured = {} if train_loss is None else {"train_loss": train_loss}
        self.metrics.write(
            "eval", step=state.step, val_loss=state.val_loss, val_bpb=state.val_bpb, **measured,
            train_seconds=state.train_seconds, tokens=state.step * self.config.batch.total_tokens,
        )  # fmt: skip
        best = " (best)" if state.is_best() else ""
        self.console.line(
            f"step {state.step:05d} | {'' if train_loss is None else f'train loss: {train_loss:.4f} | '}"
            f"validation loss: {state.val_loss:.4f} | bpb: {state.val_bpb:.4f}{best} | {seconds:.1f}s off the clock"
        )

    def core(
        self, state: TrainState, accuracy: Mapping[str, float], centered: Mapping[str, float], seconds: float
    ) -> None:
        self.off_clock.evaluation_seconds += seconds
        self.metrics.write(
            "core", step=state.step, core_metric=state.core_metric, tasks=dict(accuracy), centered=dict(centered),
            train_seconds=state.train_seconds, core_seconds=seconds,
        )  # fmt: skip
        self.console.line(
            f"step {state.step:05d} | CORE metric: {state.core_metric:.4f} | {seconds:.1f}s off the clock"
        )

    def skipped(self, state: TrainState, fault: Fault, data_step: int, broken: str | None) -> None:
        """The step that was just done made no update. `broken`: the first parameter with a broken gradient."""
        self.metrics.write(
            "event", step=state.step, what="skipped", value=fault.value, reason=fault.reason, data_step=data_step
        )
        where = "" if broken is None else f"; the first gradient that is not finite is that of {broken}"
        self.console.warn(
            f"step {state.step:05d}: {fault}: its update is left out, {state.faults.skipped_in_a_row} in a row, "
            f"{state.faults.skipped} in all{where}"
        )

    def rewound(self, state: TrainState, fault: Fault, step: int, data_step: int) -> None:
        """Instead of doing `step`, the run has gone back to the present state."""
        self.metrics.write(
            "event", step=step, what="rewound", value=fault.value, reason=fault.reason, data_step=data_step,
            to_step=state.step,
        )  # fmt: skip
        self.console.warn(
            f"step {step:05d}: {fault}: back to the checkpoint of step {state.step}, and on with the data behind it"
        )

    def sample(self, state: TrainState, prompt: str, text: str) -> None:
        self.metrics.write("sample", step=state.step, prompt=prompt, text=text)
        self.console.line(f"--- sample at step {state.step}\n{text.rstrip()}\n---")

    def reserve(self, state: TrainState) -> None:
        """Take the memory for saves in the background, so that a lack of it shows before the first step."""
        if self.saver is None or self.config.eval.only:
            return
        try:
            self.saver.reserve(state.model_tensors(), state.other_tensors())
        except (RuntimeError, MemoryError) as error:
            reason = str(error).partition("\n")[0]
            self.console.warn(f"no memory for a copy of the state, so training will wait for every save: {reason}")

    def checkpoint(self, state: TrainState, *, scheduled: bool = True) -> None:
        """Save, then let go of checkpoints that nobody asked to keep: in the background, unless the run ends here.

        One that is not scheduled, but asked for by a signal, leaves no line and no mark. A former save that is still
        under way is waited for. UserError where one of the two fails, unless the run is to go on then.
        """
        self._wait_for_former(state)
        started = time.perf_counter()
        former_best = state.best_saved
        if scheduled:
            state.saved = state.mark()  # also where it fails: the next try is due with the next checkpoint
            if state.evaluated is not None and state.val_loss is not None and state.evaluated.step == state.step:
                state.best_saved = better(state.best_saved, Best(state.step, state.val_loss))
        if not self.writes:
            return
        saver = self.saver
        if saver is not None and (not saver.ready or not scheduled or self.finish.reached(state)):
            saver = None
        try:
            work = self._save_work(state, saver, scheduled=scheduled)
        except UserError as error:  # lines that the disk does not take
            self._not_saved(state, error, former_best, scheduled=scheduled)
            return
        if saver is None:
            self._save = _Save(state.step, scheduled, former_best, lambda: True, work)
        else:
            writing = saver.submit(work)
            self._save = _Save(state.step, scheduled, former_best, writing.done, writing.result)
        # Lines from here on come behind that of this checkpoint, which is written once it is durable.
        self.metrics.hold()
        self.off_clock.checkpoint_seconds += time.perf_counter() - started
        if saver is None:
            self.finish_save(state)

    def _save_work(
        self, state: TrainState, saver: BackgroundSaver | None, *, scheduled: bool
    ) -> Callable[[], list[str]]:
        """What is left to do for a checkpoint of this step: with a saver, whatever training does meanwhile."""
        model, optimizer = state.model_tensors(), state.other_tensors()
        if saver is not None:
            model, optimizer = saver.snapshot(model, optimizer)
        step, best, good_step = state.step, state.best_saved, self._good_step(state)
        unscheduled_steps = self.unscheduled_steps - {step} if scheduled else self.unscheduled_steps | {step}
        saved = state.to_json() | {
            "scheduled": scheduled,
            "metrics_bytes": self.metrics.position(),
            "log_bytes": self.console.log_position(),
            "off_clock": self.off_clock.so_far(),
        }

        def work() -> list[str]:
            problems: list[str] = []
            # First, as a checkpoint must not outlive the lines that it counts on.
            self.metrics.sync()
            self.console.sync_log()
            save_checkpoint(self.run.checkpoints_path, step, model=model, optimizer=optimizer, state=saved)
            retain(
                self.run.checkpoints_path,
                keep_last=self.config.checkpoint.keep_last,
                keep_every_steps=self.config.checkpoint.keep_every_steps,
                best_step=best.step if self.config.checkpoint.keep_best and best else None,
                good_step=good_step,
                unscheduled_steps=unscheduled_steps,
                on_problem=problems.append,  # told by the training thread: the console belongs to it
            )
            return problems

        return work

    def look_at_save(self, state: TrainState) -> None:
        """Finish a save in the background that is at its end; to be called before each step. UserError where it failed
        and the run is to stop."""
        if self._save is not None and self._save.done():
            self.finish_save(state)

    def finish_save(self, state: TrainState) -> None:
        """Wait for the save that is under way, if one is. UserError where it failed and the run is to stop."""
        save, self._save = self._save, None
        if save is None:
            return
        durable = False
        started = time.perf_counter()
        try:
            for problem in save.finish():
                self.console.warn(problem)
            durable = True
            (self.unscheduled_steps.discard if save.scheduled else self.unscheduled_steps.add)(save.step)
        except UserError as error:  # CheckpointError, or a log that the disk does not take
            self._not_saved(state, error, save.former_best, scheduled=save.scheduled)
        finally:
            self.off_clock.checkpoint_seconds += time.perf_counter() - started
            self.metrics.release(lambda: self._checkpoint_line(save.step) if durable and save.scheduled else None)

    def abandon(self, state: TrainState) -> None:
        """The run has failed: a save that is under way may still come to its end, and hides nothing if it fails too."""
        try:
            self.finish_save(state)
        except UserError as error:
            self.console.warn(str(error))

    def _wait_for_former(self, state: TrainState) -> None:
        former, started = self._save, time.perf_counter()
        self.finish_save(state)
        waited = time.perf_counter() - started
        if former is not None and waited > _NOTICEABLE_SECONDS:
            self.console.line(
                f"checkpoint of step {state.step}: waited {waited:.1f}s for that of step {former.step}, which was not "
                "written yet"
            )

    def _not_saved(self, state: TrainState, error: UserError, former_best: Best | None, *, scheduled: bool) -> None:
        if self.config.checkpoint.on_failure == "stop" or not scheduled:
            raise error
        state.best_saved = former_best
        self.console.warn(f"{error}; training goes on")

    def _checkpoint_line(self, step: int) -> None:
        self.metrics.write("checkpoint", step=step, tokens=step * self.config.batch.total_tokens)

    def _good_step(self, state: TrainState) -> int | None:
        """The checkpoint that must outlive this one, whose weights no loss has been seen of; None where a validation
        has just proven them."""
        proven = state.evaluated is not None and state.evaluated.step == state.step
        return None if proven and self.config.faults.spike_factor is None else state.faults.good_step

    def preempted(self, state: TrainState, signal_name: str | None) -> None:
        self.console.line(
            f"{signal_name}: stopped after step {state.step}, saved; go on with gptlab train --resume {self.run.path}"
        )

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        """Cut metrics.jsonl and log.txt to what they were at a checkpoint (None: at the start), its own line included
        if it was scheduled: a run that was never stopped has that line, and none for one that a signal asked for."""
        if not self.writes:
            return
        if checkpoint is None:
            self.metrics.truncate(0)
            self.console.open_log(self.run.log_path, offset=0)
            return
        saved = checkpoint.state
        if not saved["scheduled"]:
            self.unscheduled_steps.add(checkpoint.step)
        line_bytes = _checkpoint_line_bytes(self.run.metrics_path, saved["metrics_bytes"], checkpoint.step)
        if not self.metrics.truncate(saved["metrics_bytes"] + (line_bytes if saved["scheduled"] else 0)):
            self.console.warn(f"{self.run.metrics_path} is not the file that the checkpoint saw; appending to it")
        elif saved["scheduled"] and line_bytes == 0:
            # Killed between the checkpoint and its line.
            self._checkpoint_line(checkpoint.step)
        self.console.open_log(self.run.log_path, offset=saved["log_bytes"])

    def summary(self, state: TrainState) -> dict[str, Any]:
        """The final numbers, in the order of the closing block."""
        tokens = state.step * self.config.batch.total_tokens
        mfu = self.throughput.reading(tokens, state.train_seconds).mfu if state.step else None
        return {
            "val_bpb": state.val_bpb,
            "training_seconds": state.train_seconds,
            "total_seconds": self.off_clock.total_seconds,
            "peak_vram_mb": peak_memory_mb(state.device),
            "mfu_percent": None if mfu is None else 100 * mfu,
            "total_tokens_M": tokens / 1e6,
            "num_steps": state.step,
            "num_params_M": self.n_params / 1e6,
            "depth": self.config.model.n_layer,
            **({} if state.core_metric is None else {"core_metric": state.core_metric}),
        }

    def finish_run(self, state: TrainState) -> dict[str, Any]:
        """Write summary.json and the closing block."""
        summary = self.summary(state)
        if self.writes:
            write_json_atomic(self.run.summary_path, summary | self.details(state))
        show_closing_block(summary, self.console)
        return summary

    def details(self, state: TrainState) -> dict[str, Any]:
        """What summary.json holds besides: losses, FLOPs, and where the time off the clock went."""
        return {
            "val_loss": state.val_loss,
            "best_val_loss": state.best.val_loss if state.best else None,
            "best_step": state.best.step if state.best else None,
            "skipped_updates": state.faults.skipped,
            "rewinds": state.faults.rewinds,
            "total_flops": self.throughput.flops(state.step * self.config.batch.total_tokens),
            **{name: seconds for name, seconds in self.off_clock.so_far().items() if name != "total_seconds"},
        }


def _checkpoint_line_bytes(path: Path, offset: int, step: int) -> int:
    """Length of the line at `offset` if it is the whole "checkpoint" line of `step`, else 0."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            line = file.readline()
        record = json.loads(line) if line.endswith(b"\n") else {}
    except (OSError, ValueError):
        return 0
    return len(line) if record.get("kind") == "checkpoint" and record.get("step") == step else 0
