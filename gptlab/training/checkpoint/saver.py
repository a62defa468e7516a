"""When a run saves, and what happens around it: one process, which training waits for.

    snapshot     every rank copies its slices, and training continues (here it waits: no copy)
    write        every rank writes its slices into files of its own
    commit       rank 0, after all ranks have written: manifest, rename; then retention
    log          every rank, once the checkpoint is durable: marks; rank 0 the line in metrics.jsonl

background.py has what saves in the background and saves by several ranks need besides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.format import CheckpointError, TensorSlice
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.retention import retain
from gptlab.training.checkpoint.write import save_checkpoint, settle, sweep
from gptlab.training.state import Best, Finish, OffClock, TrainState, better


@dataclass(frozen=True, slots=True)
class Request:
    """A checkpoint that a step asks for."""

    step: int
    scheduled: bool
    """False: a signal asked for it. It leaves no line in metrics.jsonl and no mark."""
    required: bool
    """Whether the run has failed without it, whatever `checkpoint.on_failure` says: the last one of a run, and one that
    a signal asked for."""
    former_best: Best | None
    """`state.best_saved` before it, restored if it fails ..."""
    former_good: int | None
    """... and `state.faults.good_step`."""


@dataclass
class RunOutput:
    """The settings of a run, and what it writes to."""

    config: RunConfig
    finish: Finish
    run: RunDirectory
    console: Console
    metrics: MetricsLog
    off_clock: OffClock
    group: Group


@dataclass
class CheckpointSaver(RunOutput):
    """Every method is called by all ranks at the same place, unless it says otherwise."""

    about_run: dict[str, Any]
    """What every state.json says of the run: its identity, and its implementations. Needed on rank 0 alone."""
    unscheduled_steps: set[int] = field(default_factory=set)
    """Steps of the checkpoints that signals asked for, as far as known."""
    damaged_steps: set[int] = field(default_factory=set)
    """Steps of the checkpoints that were passed over when the run was resumed, and were not saved again since."""

    def checkpoint(self, state: TrainState, *, scheduled: bool = True) -> None:
        """Save, then remove checkpoints that need not be kept. UserError if that fails, unless the run is configured to
        continue then."""
        started = time.perf_counter()
        required = not scheduled or self.finish.reached(state)
        request = Request(state.step, scheduled, required, state.best_saved, state.faults.good_step)
        if scheduled:
            state.saved = state.mark()  # also if it fails: the next attempt is due with the next checkpoint
            if state.is_evaluated() and state.val_loss is not None:
                state.best_saved = better(state.best_saved, Best(state.step, state.val_loss))
        try:
            self._save(state, request)
        except UserError as error:  # lines that the disk does not take, or no room for a checkpoint
            self._not_saved(state, request, str(error))
        finally:
            self.off_clock.checkpoint_seconds += time.perf_counter() - started

    @property
    def in_progress(self) -> bool:
        """Whether `poll` has something to wait for; the same on every rank."""
        return False

    def reserve(self, state: TrainState) -> None:
        """Called before the first step, to allocate memory for copies of the state."""

    def poll(self, state: TrainState) -> None:
        """Called before each step, to take the next stage of a save in progress if all ranks are ready for it.
        UserError if the save failed and the run is to stop."""

    def wait(self, state: TrainState) -> None:
        """Wait for the save in progress, if there is one. UserError if it failed and the run is to stop."""

    def abandon(self, state: TrainState, *, together: bool) -> None:
        """The run has failed: a save in progress may still complete, and if it fails too, hides nothing.

        `together`: all ranks call this, for the same reason. Otherwise the others may not, and a save is given up
        unless all ranks are known to have written their parts.
        """

    def catch_up(self, state: TrainState, checkpoint: Path) -> None:
        """Do what a process that was killed right after saving this checkpoint did not come to: a run that is at its
        end would not save again, and so never do it. On rank 0 alone."""
        folder = self.run.checkpoints_path
        if list_checkpoints(folder)[-1:] == [checkpoint]:  # nothing is removed on account of a later, damaged one
            sweep(folder)
            settle(folder)
            for problem in self._retain(self._kept(state)):
                self.console.warn(problem)

    def log_line(self, step: int) -> None:
        """The line of a checkpoint in metrics.jsonl; on any rank by itself."""
        self.metrics.write("checkpoint", step=step, tokens=step * self.config.batch.total_tokens)

    def _save(self, state: TrainState, request: Request) -> None:
        write = self._write_alone(request, self._state_json(state, request), *state.slices())
        for line in self._commit(write, self._kept(state, request)):
            self.console.warn(line)
        self._log(request)

    def _write_alone(
        self, request: Request, saved: dict[str, Any], model: Sequence[TensorSlice], optimizer: Sequence[TensorSlice]
    ) -> Callable[[], object]:
        """What writes the checkpoint of one process, whose slices are whole tensors. `saved`: the `_state_json`."""
        return partial(
            save_checkpoint, self.run.checkpoints_path, request.step, state=saved,
            model={part.name: part.tensor for part in model}, optimizer={part.name: part.tensor for part in optimizer},
        )  # fmt: skip

    def _state_json(self, state: TrainState, request: Request) -> dict[str, Any]:
        """The content of state.json. UserError while the disk does not take the lines that belong before it."""
        return state.to_json() | {
            "scheduled": request.scheduled,
            "metrics_bytes": self.metrics.position(),
            "log_bytes": self.console.log_position(),
            "off_clock": self.off_clock.so_far(),
            **self.about_run,
        }

    def _commit(self, write: Callable[[], object], kept: dict[str, Any]) -> list[str]:
        """`write`, and what belongs before and after it, unaffected by what training does meanwhile. Returns what
        retention complains of, for the training thread to report: the console belongs to it. UserError where the run
        folder is gone."""
        self.run.require_in_place()
        # First, since a checkpoint must not outlive the lines that it counts on.
        self.metrics.sync()
        self.console.sync_log()
        write()
        return self._retain(kept)

    def _kept(self, state: TrainState, request: Request | None = None) -> dict[str, Any]:
        """What `retain` is to keep, once the checkpoint of this request is saved."""
        wanted, best, unscheduled = self.config.checkpoint, state.best_saved, self.unscheduled_steps
        damaged = self.damaged_steps
        if request is not None:
            damaged = damaged - {request.step}
            unscheduled = unscheduled - {request.step} if request.scheduled else unscheduled | {request.step}
        # A validation has found a loss of the newest weights. Otherwise the last good checkpoint must outlive it.
        proven = state.is_evaluated() and self.config.faults.spike_factor is None
        return {
            "keep_last": wanted.keep_last,
            "keep_every_steps": wanted.keep_every_steps,
            "best_step": best.step if wanted.keep_best and best else None,
            "good_step": None if proven else state.faults.good_step,
            "unscheduled_steps": unscheduled,
            "damaged_steps": damaged,
        }

    def _retain(self, kept: dict[str, Any]) -> list[str]:
        problems: list[str] = []
        if len(list_checkpoints(self.run.checkpoints_path)) > self.config.checkpoint.keep_last:
            retain(self.run.checkpoints_path, **kept, on_problem=problems.append)
        return problems

    def _log(self, request: Request) -> None:
        """The checkpoint is durable."""
        self.damaged_steps.discard(request.step)
        (self.unscheduled_steps.discard if request.scheduled else self.unscheduled_steps.add)(request.step)
        if request.scheduled:
            self.log_line(request.step)

    def _not_saved(self, state: TrainState, request: Request, problem: str) -> None:
        if request.required or self.config.checkpoint.on_failure == "stop":
            # Of a folder that was moved, the problem says it already, and where.
            raise CheckpointError(problem if "--resume" in problem else f"{problem}; --resume continues the run")
        state.best_saved = request.former_best
        if state.faults.good_step == request.step:  # the steps since then proved weights that no checkpoint holds
            state.faults.good_step = request.former_good
        self.console.warn(f"{problem}; training continues")
