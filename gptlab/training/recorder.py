"""What a run writes: step lines, metrics.jsonl, summary.json and the closing block in autoresearch's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gptlab.config.errors import UserError, one_line
from gptlab.data.loader import StepBatch
from gptlab.runtime.files.plain_file import write_json_atomic
from gptlab.runtime.hardware.cpu import MachineLoad
from gptlab.runtime.hardware.device import peak_memory_mb
from gptlab.runtime.records.console import Console, clock_text, short_number
from gptlab.training.checkpoint.load import Checkpoint
from gptlab.training.checkpoint.names import list_checkpoints, step_of
from gptlab.training.checkpoint.saver import CheckpointSaver, RunOutput
from gptlab.training.faults import Fault, TrainingFailed
from gptlab.training.signals import Signals
from gptlab.training.state import Ema, Finish, TrainState
from gptlab.training.step import Update

# The resolution of time.perf_counter; a coarse clock may return zero.
_SHORTEST_SECONDS = 1e-9

# What the closing block shows, in this order, and with how many decimals; the last one if the run measured it.
CLOSING_DECIMALS = {
    "val_bpb": 6, "training_seconds": 1, "total_seconds": 1, "peak_vram_mb": 1, "mfu_percent": 2, "total_tokens_M": 1,
    "num_steps": 0, "num_params_M": 1, "depth": 0, "core_metric": 4,
}  # fmt: skip


class Speed(NamedTuple):
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs utilization, 1.0 at the peak; None where the peak is unknown."""


@dataclass(slots=True)
class Throughput:
    """Speed from tokens and seconds on the training clock."""

    flops_per_token: float
    """Forward and backward."""
    peak_flops_per_second: float | None
    """Of all devices together; None where unknown."""
    step_seconds: Ema = field(default_factory=Ema)
    """Of the last steps: a beta of 0.9 forgets nine tenths in 22 steps, and so follows a machine with other users. Not
    part of the state of the run: a resumed one may have another speed."""

    def speed(self, tokens: int, seconds: float) -> Speed:
        tokens_per_second = tokens / max(seconds, _SHORTEST_SECONDS)
        peak = self.peak_flops_per_second
        return Speed(tokens_per_second, None if peak is None else self.flops_per_token * tokens_per_second / peak)

    def remaining_seconds(self, finish: Finish, state: TrainState) -> float:
        """Training seconds left of the horizon, at the smoothed duration of the last steps."""
        if finish.steps is None:
            return max(0.0, (finish.seconds or 0.0) - state.train_seconds)
        return (finish.steps - state.step) * (self.step_seconds.value or 0.0)


@dataclass(slots=True)
class Recorder(RunOutput):
    """Writes, and decides nothing."""

    throughput: Throughput
    saves: CheckpointSaver
    signals: Signals
    load: MachineLoad | None = None
    """Warns of other programs on the cores that compute. None: no warning."""
    resume_command: str = ""
    """What to type to resume the run."""

    def step(self, state: TrainState, batch: StepBatch, loss: float, updated: Update, step_seconds: float) -> None:
        tokens_per_step = self.config.batch.total_tokens
        self.throughput.step_seconds.update(step_seconds)
        if self.load is not None and (warning := self.load.step(step_seconds)) is not None:
            self.console.warn(warning)
        done = self.finish.progress(state.step, state.train_seconds)
        if state.step % self.config.runtime.log_every_steps and done < 1:
            return
        tokens, speed = state.step * tokens_per_step, self.throughput.speed(tokens_per_step, step_seconds)
        self.metrics.write(
            "train", step=state.step, tokens=tokens, total_flops=self.throughput.flops_per_token * tokens,
            epoch=batch.epoch, loss=loss, loss_ema=state.loss_ema.value, lr_scale=updated.lr_scale,
            grad_norm=updated.grad_norm, step_seconds=step_seconds, train_seconds=state.train_seconds,
            tokens_per_second=speed.tokens_per_second, mfu=speed.mfu,
        )  # fmt: skip
        mfu = "unknown" if speed.mfu is None else f"{100 * speed.mfu:.1f}%"
        left = self.throughput.remaining_seconds(self.finish, state)
        figures = (
            f"step {state.step:05d} ({100 * done:.1f}%)",
            f"loss: {state.loss_ema.value:.6f}",
            f"lrm: {updated.lr_scale:.2f}",
            f"dt: {1000 * step_seconds:.0f}ms",
            f"step_avg: {1000 * state.train_seconds / state.step:.0f}ms",
            f"tok/sec: {speed.tokens_per_second:,.0f}",
            f"mfu: {mfu}",
            f"epoch: {batch.epoch:.2f}",
            f"train_time: {state.train_seconds:.0f}s",
            f"remaining: {left:.0f}s",
        )
        self.console.live(" | ".join(figures), lambda: self._terminal_figures(state, speed, done, left))

    def _terminal_figures(self, state: TrainState, speed: Speed, done: float, left: float) -> list[str]:
        """A terminal shows as many as fit, in this order; 80 columns hold all but, in long runs, the last."""
        return [
            f"{clock_text(left)} left",
            f"{100 * done:.0f}%",
            f"step {state.step}",
            f"loss {state.loss_ema.value:.3f}",
            f"time {clock_text(state.train_seconds)}",
            f"avg {1000 * state.train_seconds / state.step:.0f}ms",
            f"{short_number(speed.tokens_per_second)} tok/s",
            *([] if speed.mfu is None else [f"mfu {100 * speed.mfu:.0f}%"]),
        ]

    def evaluation(self, state: TrainState, train_loss: float | None, seconds: float) -> None:
        self.off_clock.evaluation_seconds += seconds
        measured = {} if train_loss is None else {"train_loss": train_loss}
        self.metrics.write(
            "eval", step=state.step, val_loss=state.val_loss, val_bpb=state.val_bpb, **measured,
            train_seconds=state.train_seconds, tokens=state.step * self.config.batch.total_tokens,
        )  # fmt: skip
        best = " (best)" if state.is_best() else ""
        hint = "" if state.step else "\n(bpb: bits per byte of text not trained on; lower is better, 8 is no knowledge)"
        self.console.line(
            f"step {state.step:05d} | {'' if train_loss is None else f'train loss: {train_loss:.4f} | '}"
            f"validation loss: {state.val_loss:.4f} | bpb: {state.val_bpb:.4f}{best} | "
            f"{seconds:.1f}s off the clock{hint}"
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

    def paused(self, state: TrainState, seconds: float) -> None:
        """The process was stopped and continued within the next step."""
        self.console.warn(
            f"step {state.step + 1:05d}: the process was paused; {seconds:.1f} s are off the clock: the step counts as "
            "long as the one before"
        )

    def skipped(self, state: TrainState, fault: Fault, data_step: int, broken: str | None) -> None:
        """The step that was just done made no update. `broken`: the first parameter with a non-finite gradient."""
        self.metrics.write(
            "event", step=state.step, what="skipped", value=fault.value, reason=fault.reason, data_step=data_step
        )
        where = "" if broken is None else f"; first non-finite gradient: {broken}"
        counts = f"{state.faults.skipped_in_a_row} consecutive, {state.faults.skipped} total"
        self.console.warn(f"step {state.step:05d}: {fault}: update skipped ({counts}){where}")

    def rewound(self, state: TrainState, fault: Fault, step: int, data_step: int) -> None:
        """`step` was not made: the run went back to the present state."""
        self.metrics.write(
            "event", step=step, what="rewound", value=fault.value, reason=fault.reason, data_step=data_step,
            to_step=state.step,
        )  # fmt: skip
        self.console.warn(
            f"step {step:05d}: {fault}: rewinding to checkpoint {state.step}, "
            "and continuing with the data after this batch"
        )

    def sample(self, state: TrainState, prompt: str, text: str) -> None:
        self.metrics.write("sample", step=state.step, prompt=prompt, text=text)
        # Quoted, so that its end shows.
        shown = json.dumps(prompt, ensure_ascii=False) if prompt else "none"
        self.console.line(f"--- sample at step {state.step} | prompt: {shown}\n{text.rstrip()}\n---")

    def stopping(self, signal_name: str) -> None:
        """A signal came. May be called from another thread."""
        again = "; Ctrl-C again stops without waiting" if signal_name == "SIGINT" else ""
        self.console.line(f"{signal_name}: stopping after this step{again}")

    def preempted(self, state: TrainState, signal_name: str | None) -> None:
        self.console.settle()
        what = f"after step {state.step}, saved; resume" if state.step else "before the first step; start it again"
        self.console.result(f"{signal_name}: stopped {what} with {self.resume_command}")

    def failed(self, state: TrainState, error: Exception) -> None:
        """Record the error that ends the run, its step and its loss in run.json and metrics.jsonl."""
        step, loss = state.step, None
        if isinstance(error, TrainingFailed):
            step, loss = state.step + 1 if error.step is None else error.step, error.loss
        reason = one_line(error)
        if not isinstance(error, UserError | TrainingFailed):
            reason = f"{type(error).__name__}: {reason}"
        self.metrics.write("event", step=step, what="failed", value=loss, reason=reason)
        if self.group.is_main:
            with suppress(UserError):  # a full disk must not hide what went wrong
                self.run.set_failed(reason, step=step, loss=loss)

    def begin_again(self) -> None:
        """Empty log.txt and metrics.jsonl of a run that was stopped before its first checkpoint."""
        if self.group.is_main:
            self.metrics.truncate(0)
            self.console.reopen_log(self.run.log_path, 0)

    def cut_to(self, checkpoint: Checkpoint) -> None:
        """Cut metrics.jsonl and log.txt to what they were at a checkpoint.

        The line of a scheduled checkpoint stays, since a run that was never stopped has it too; a checkpoint that a
        signal asked for has none.
        """
        if not self.group.is_main:
            return
        saved = checkpoint.state
        if not saved["scheduled"]:
            self.saves.unscheduled_steps.add(checkpoint.step)
        found = filter(None, map(step_of, list_checkpoints(self.run.checkpoints_path)))
        self.saves.damaged_steps.update(step for step in found if step > checkpoint.step)  # they were passed over
        line_bytes = _checkpoint_line_bytes(self.run.metrics_path, saved["metrics_bytes"], checkpoint.step)
        if not self.metrics.truncate(saved["metrics_bytes"] + (line_bytes if saved["scheduled"] else 0)):
            self.console.warn(f"{self.run.metrics_path} is not the file that the checkpoint saw; appending to it")
        elif saved["scheduled"] and line_bytes == 0:
            # The process was killed between the checkpoint and its line.
            self.saves.log_line(checkpoint.step)
        if not self.console.reopen_log(self.run.log_path, saved["log_bytes"]):
            self.console.warn(f"{self.run.log_path} is not the file that the checkpoint saw; appending to it")

    def summary(self, state: TrainState) -> dict[str, Any]:
        """The final numbers, for summary.json: those of the closing block come first."""
        tokens = state.step * self.config.batch.total_tokens
        mfu = self.throughput.speed(tokens, state.train_seconds).mfu if state.step else None
        return {
            "val_bpb": state.val_bpb,
            "training_seconds": state.train_seconds,
            "total_seconds": self.off_clock.total_seconds,
            "peak_vram_mb": peak_memory_mb(state.device),
            "mfu_percent": None if mfu is None else 100 * mfu,
            "total_tokens_M": tokens / 1e6,
            "num_steps": state.step,
            "num_params_M": sum(parameter.numel() for parameter in state.model.parameters()) / 1e6,
            "depth": self.config.model.n_layer,
            **({} if state.core_metric is None else {"core_metric": state.core_metric}),
            "val_loss": state.val_loss,
            "min_val_bpb": state.min_val_bpb,
            "best_val_loss": state.best.val_loss if state.best else None,
            "best_step": state.best.step if state.best else None,
            "skipped_updates": state.faults.skipped,
            "rewinds": state.faults.rewinds,
            "total_flops": self.throughput.flops_per_token * tokens,
            **{name: seconds for name, seconds in self.off_clock.so_far().items() if name != "total_seconds"},
        }

    def finish_run(self, state: TrainState) -> dict[str, Any]:
        """Write summary.json and return it."""
        summary = self.summary(state)
        if self.config.checkpoint.save_best and state.best != state.best_saved:
            self._warn_of_unsaved_best(state)
        if self.group.is_main:
            write_json_atomic(self.run.summary_path, summary)
        self.console.settle()
        if state.min_val_bpb is not None:
            self.console.line(f"minimum val_bpb: {state.min_val_bpb:.6f}")
        return summary

    def _warn_of_unsaved_best(self, state: TrainState) -> None:
        if state.best and state.best.step > 0:
            saved = f"that of step {state.best_saved.step}" if state.best_saved else "none"
            self.console.warn(
                f"the weights with the lowest validation loss, of step {state.best.step}, could not be saved; the best "
                f"checkpoint is {saved}"
            )


def show_closing_block(summary: Mapping[str, Any], console: Console) -> None:
    """Print and log the final numbers, so that `grep "^val_bpb:"` works."""
    console.result("---")
    for key, decimals in CLOSING_DECIMALS.items():
        if key in summary:
            value = "unknown" if summary[key] is None else f"{summary[key]:.{decimals}f}"
            console.result(f"{key + ':':<18}{value}")


def _checkpoint_line_bytes(path: Path, offset: int, step: int) -> int:
    """Length of the line at `offset` if it is the complete "checkpoint" line of `step`, else 0."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            line = file.readline()
        record = json.loads(line) if line.endswith(b"\n") else {}
    except (OSError, ValueError):
        return 0
    return len(line) if record.get("kind") == "checkpoint" and record.get("step") == step else 0
