"""When a run saves, and what happens around it. A checkpoint is made in these stages:

    snapshot     every rank copies its slices, and training continues (in the foreground it waits: no copy)
    write        every rank writes its slices into files of its own
    commit       rank 0, after all ranks have written: manifest, rename; then retention
    log          every rank, once the checkpoint is durable: marks; rank 0 the line in metrics.jsonl

In one process and in the foreground, `checkpoint` does all of it in one call. background.py has what saves in the
background and saves by several ranks need besides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.folder import retain, settle, sweep
from gptlab.training.checkpoint.format import CheckpointError, list_checkpoints
from gptlab.training.checkpoint.slices import TensorSlice
from gptlab.training.checkpoint.write import begin_save, complete_save, save_checkpoint, write_part
from gptlab.training.horizon import Finish
from gptlab.training.state import Best, TrainState, better
from gptlab.training.summary import OffClock

if TYPE_CHECKING:
    import torch

    from gptlab.training.checkpoint.background import BackgroundSaver, PendingSave

# A person would not notice a shorter wait.
_NOTICEABLE_SECONDS = 0.1


def open_background(config: RunConfig, device: torch.device) -> AbstractContextManager[BackgroundSaver | None]:
    """What writes checkpoints while training continues; None if training waits for every save."""
    if not config.checkpoint.background:
        return nullcontext()
    from gptlab.training.checkpoint.background import BackgroundSaver

    return BackgroundSaver(device)


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
    """`state.best_saved` before it, restored if it fails."""


@dataclass(slots=True)
class CheckpointSaver:
    """Every method is called by all ranks at the same place, unless it says otherwise."""

    config: RunConfig
    finish: Finish
    run: RunDirectory
    console: Console
    metrics: MetricsLog
    off_clock: OffClock
    group: Group = field(default_factory=Group)
    background: BackgroundSaver | None = None
    """None: training waits for every save."""
    about_run: dict[str, Any] = field(default_factory=dict)
    """What every state.json says of the run: its identity, and its implementations. Needed on rank 0 alone."""
    unscheduled_steps: set[int] = field(default_factory=set)
    """Steps of the checkpoints that signals asked for, as far as known."""
    pending: PendingSave | None = None
    """The save in progress."""
    _request: Request | None = None
    """Of the last save that began."""
    _abandoned: bool = False

    def checkpoint(self, state: TrainState, *, scheduled: bool = True) -> None:
        """Save, then remove checkpoints that need not be kept: in the background, unless the save is required.

        Waits for an earlier save that is still in progress. UserError if one of the two fails, unless the run is
        configured to continue then.
        """
        if self.pending is not None:
            self._wait_for_earlier(state)
        started = time.perf_counter()
        request = Request(state.step, scheduled, not scheduled or self.finish.reached(state), state.best_saved)
        if scheduled:
            state.saved = state.mark()  # also if it fails: the next attempt is due with the next checkpoint
            if state.evaluated is not None and state.val_loss is not None and state.evaluated.step == state.step:
                state.best_saved = better(state.best_saved, Best(state.step, state.val_loss))
        self._request, background = request, None if request.required else self.background
        try:
            if self.group.size == 1 and background is None:
                saved = self._state_json(state, request)
                write = self._write_alone(request, saved, *state.slices())
                self._ended(durable=True, complaints=self._commit(state, request, write)())
            else:
                self.pending = self._begin(state, request, background)
                # Lines from here on come after that of this checkpoint, which is written once it is durable.
                self.metrics.hold()
        except UserError as error:  # lines that the disk does not take, or no room for a checkpoint
            self._not_saved(state, request, str(error))
        finally:
            self.off_clock.checkpoint_seconds += time.perf_counter() - started
        if background is None:
            self.wait(state)

    def poll(self, state: TrainState) -> None:
        """Take the next stage of a save in progress if all ranks are ready for it; called before each step. UserError
        if the save failed and the run is to stop."""
        if self.pending is not None and self.pending.ready():
            self._advance(state, self.pending)

    def wait(self, state: TrainState) -> None:
        """Wait for the save in progress, if there is one. UserError if it failed and the run is to stop."""
        while self.pending is not None:
            self._advance(state, self.pending)

    def status(self) -> int:
        """What this rank reports of its save at the end of each step."""
        return 0 if self.pending is None else self.pending.status()

    def receive(self, statuses: Sequence[int]) -> None:
        """Take in the `status` of all ranks."""
        if self.pending is not None:
            self.pending.statuses = statuses

    def reserve(self, state: TrainState) -> None:
        """Allocate the memory for snapshots, so that a lack of it shows before the first step. If one rank lacks it,
        training waits for every save on all ranks."""
        if self.background is None or self.config.eval.only:
            return
        from gptlab.training.checkpoint.background import first_problem

        reason = None
        try:
            self.background.reserve(*state.slices())
        except (RuntimeError, MemoryError) as error:
            reason = str(error).partition("\n")[0]
        lacking = first_problem(self.group.gather("memory for copies", reason))
        if lacking is not None:
            self.background.release()
            self.background = None
            self.console.warn(f"no memory for a copy of the state, so training will wait for every save: {lacking}")

    def abandon(self, state: TrainState, *, together: bool) -> None:
        """The run has failed: a save in progress may still complete, and if it fails too, hides nothing.

        `together`: all ranks call this, for the same reason. Otherwise the others may not, and a save is given up
        unless all ranks are known to have written their parts.
        """
        self._abandoned = True
        if self.pending is None:
            return
        save = self.pending
        try:
            if together or self.group.size == 1:
                self.wait(state)
            elif save.writing is None:
                self._advance(state, save, alone=True)
            else:
                self._ended(durable=False)
                save.writing.result()
        except UserError as error:
            self.console.warn(str(error))
        finally:
            if save.writing is not None:
                save.remove()

    def catch_up(self, state: TrainState, checkpoint: Path) -> None:
        """Do what a process that was killed right after saving this checkpoint did not come to: a run that is at its
        end would not save again, and so never do it. On rank 0 alone."""
        folder = self.run.checkpoints_path
        if list_checkpoints(folder)[-1:] == [checkpoint]:  # nothing is removed on account of a later, damaged one
            sweep(folder)
            settle(folder)
            for problem in self._retain(state.best_saved, self._good_step(state), self.unscheduled_steps):
                self.console.warn(problem)

    def log_line(self, step: int) -> None:
        """The line of a checkpoint in metrics.jsonl; on any rank by itself."""
        self.metrics.write("checkpoint", step=step, tokens=step * self.config.batch.total_tokens)

    def _begin(self, state: TrainState, request: Request, background: BackgroundSaver | None) -> PendingSave:
        """Start a save by several ranks, or with `background`, after which training may change the state. UserError on
        all ranks if it cannot begin, with the reason on rank 0."""
        from gptlab.training.checkpoint.background import PendingSave, run_now

        group, folder = self.group, self.run.checkpoints_path
        submit = run_now if background is None else background.submit
        model, optimizer = state.slices()
        saved, temporary, problem = {}, None, None
        if group.is_main:
            try:
                saved = self._state_json(state, request)
                if group.size > 1:
                    needed_bytes = group.size * sum(part.tensor.nbytes for part in (*model, *optimizer))
                    temporary = begin_save(folder, request.step, needed_bytes=needed_bytes)
            except UserError as error:
                problem = error
        name = group.broadcast("checkpoint begins", temporary and temporary.name)
        if problem is not None or (group.size > 1 and name is None):
            raise problem or CheckpointError("")
        if background is not None:
            model, optimizer = background.snapshot(model, optimizer)
        if name is None:
            commit = self._commit(state, request, self._write_alone(request, saved, model, optimizer))
            return PendingSave(group, submit, commit, committing=submit(commit))
        temporary = folder / name
        commit = self._commit(state, request, partial(complete_save, temporary, saved, size=group.size))
        writing = submit(partial(write_part, temporary, model, optimizer, rank=group.rank, size=group.size))
        return PendingSave(group, submit, commit, writing, temporary=temporary)

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

    def _commit(self, state: TrainState, request: Request, write: Callable[[], object]) -> Callable[[], list[str]]:
        """`write`, and what belongs before and after it, unaffected by what training does meanwhile. Returns what
        retention complains of, for the training thread to report: the console belongs to it."""
        steps = self.unscheduled_steps
        steps = steps - {request.step} if request.scheduled else steps | {request.step}
        best, good_step = state.best_saved, self._good_step(state)

        def commit() -> list[str]:
            # First, since a checkpoint must not outlive the lines that it counts on.
            self.metrics.sync()
            self.console.sync_log()
            write()
            return self._retain(best, good_step, steps)

        return commit

    def _retain(self, best: Best | None, good_step: int | None, unscheduled_steps: Collection[int]) -> list[str]:
        problems: list[str] = []
        retain(
            self.run.checkpoints_path,
            keep_last=self.config.checkpoint.keep_last,
            keep_every_steps=self.config.checkpoint.keep_every_steps,
            best_step=best.step if self.config.checkpoint.keep_best and best else None,
            good_step=good_step,
            unscheduled_steps=unscheduled_steps,
            on_problem=problems.append,
        )
        return problems

    def _good_step(self, state: TrainState) -> int | None:
        """The checkpoint that must outlive this one, since no loss of this one's weights is known; None if a validation
        has found one."""
        proven = state.evaluated is not None and state.evaluated.step == state.step
        return None if proven and self.config.faults.spike_factor is None else state.faults.good_step

    def _advance(self, state: TrainState, save: PendingSave, *, alone: bool = False) -> None:
        """Take the next stage of a pending save, after a wait if need be. `alone`: without the other ranks."""
        started = time.perf_counter()
        try:
            outcome = save.advance(alone=alone)
        except BaseException:
            if save.writing is None:  # otherwise `abandon` waits for the thread and removes what was written
                self._ended(durable=False)
            raise
        finally:
            self.off_clock.checkpoint_seconds += time.perf_counter() - started
        if outcome is None:
            return
        self._ended(durable=outcome.durable, complaints=outcome.complaints)
        if not outcome.durable:
            assert self._request is not None
            self._not_saved(state, self._request, outcome.problem)

    def _ended(self, *, durable: bool, complaints: Sequence[str] = ()) -> None:
        self.pending, request = None, self._request
        assert request is not None
        for line in complaints:
            self.console.warn(line)
        if durable:
            (self.unscheduled_steps.discard if request.scheduled else self.unscheduled_steps.add)(request.step)
        self.metrics.release(lambda: self.log_line(request.step) if durable and request.scheduled else None)

    def _not_saved(self, state: TrainState, request: Request, problem: str) -> None:
        if self._abandoned or request.required or self.config.checkpoint.on_failure == "stop":
            if not self.group.is_main and not self._abandoned:
                self.group.barrier("a failed save")  # to which rank 0 does not come: it says what is wrong
            raise CheckpointError(problem)
        state.best_saved = request.former_best
        self.console.warn(f"{problem}; training goes on")

    def _wait_for_earlier(self, state: TrainState) -> None:
        assert self._request is not None
        earlier, started = self._request.step, time.perf_counter()
        self.wait(state)
        waited = time.perf_counter() - started
        if waited > _NOTICEABLE_SECONDS:
            self.console.line(
                f"checkpoint of step {state.step}: waited {waited:.1f}s for that of step {earlier}, which was not "
                "written yet"
            )
