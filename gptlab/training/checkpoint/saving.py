"""A checkpoint from the step that asks for it until it stands, by all ranks together.

    every rank   copies its pieces, and training goes on (or waits, where it is to wait)
    every rank   writes them, in files of its own, on a thread of its own
    rank 0       once it knows that all have written: manifest, rename, retention, on that thread
    every rank   once it knows that the checkpoint stands: marks; on rank 0 the line in metrics.jsonl

What each knows of the others comes with the message at the end of every step (agreement.py), so that all take each of
these turns at the same step; where the run has to wait for a save, it is asked for. A rank that failed is known to all
in the same way, and all then stop, or go on. One process writes, renames and retains in one go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.background import BackgroundSaver
from gptlab.training.checkpoint.directory import list_checkpoints, remove_tree, settle, sweep
from gptlab.training.checkpoint.load import CheckpointError, begin_save, complete_save, save_checkpoint, write_part
from gptlab.training.checkpoint.retention import retain
from gptlab.training.checkpoint.slices import TensorSlice
from gptlab.training.horizon import Finish
from gptlab.training.state import Best, TrainState, better
from gptlab.training.summary import OffClock

# A person would not notice a shorter wait.
_NOTICEABLE_SECONDS = 0.1

# What a rank tells of its save.
AT_WORK, WRITTEN, FAILED = 0, 1, 2


class _Result(Protocol):
    """What is left of a piece of work: a Future, or `_Waited`."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Waited:
    """Work that is done when its result is asked for, since training waits for it."""

    work: Callable[[], Any]

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self.work()


@dataclass(slots=True)
class _Save:
    """One that has begun."""

    step: int
    scheduled: bool
    required: bool
    """Whether the run has failed without it, whatever `checkpoint.on_failure` says."""
    former_best: Best | None
    """What `state.best_saved` was before it, and is again where it fails."""
    start: Callable[[Callable[[], Any]], _Result]
    """Where its work is done."""
    part: _Result | None
    """This rank's part; None once all ranks are known to have written theirs."""
    complete: Callable[[], list[str]]
    """What rank 0 does then; returns what retention complains of."""
    completing: _Result | None = None
    temporary: Path | None = None


@dataclass(slots=True)
class Saves:
    """Every method is called by all ranks at the same place, unless it says otherwise."""

    config: RunConfig
    finish: Finish
    run: RunDirectory
    console: Console
    metrics: MetricsLog
    off_clock: OffClock
    group: Group = field(default_factory=Group)
    saver: BackgroundSaver | None = None
    """None: training waits for every save."""
    about_run: dict[str, Any] = field(default_factory=dict)
    """What every state.json says of the run: which it is, and what computes it. Rank 0 alone needs it."""
    unscheduled_steps: set[int] = field(default_factory=set)
    """Of checkpoints that a signal asked for, as far as known."""
    _abandoned: bool = False
    _save: _Save | None = None
    _heard: Sequence[int] = ()
    """What each rank told in the last message; empty where there was none since the save took its last turn."""

    def reserve(self, state: TrainState) -> None:
        """Take the memory for saves in the background, so that a lack of it shows before the first step. Where one rank
        lacks it, training waits for every save on all."""
        if self.saver is None or self.config.eval.only:
            return
        reason = None
        try:
            self.saver.reserve(*state.slices())
        except (RuntimeError, MemoryError) as error:
            reason = str(error).partition("\n")[0]
        lacks = self._first(self.group.gather("memory for copies", reason))
        if lacks is not None:
            self.saver.give_up()
            self.console.warn(f"no memory for a copy of the state, so training will wait for every save: {lacks}")

    def checkpoint(self, state: TrainState, *, scheduled: bool = True) -> None:
        """Save, then let go of checkpoints that nobody asked to keep: in the background, unless the run ends here.

        One that is not scheduled, but asked for by a signal, leaves no line and no mark. A former save that is still
        under way is waited for. UserError where one of the two fails, unless the run is to go on then.
        """
        self._wait_for_former(state)
        started = time.perf_counter()
        former_best = state.best_saved
        required = self._is_required(state, scheduled=scheduled)
        if scheduled:
            state.saved = state.mark()  # also where it fails: the next try is due with the next checkpoint
            if state.evaluated is not None and state.val_loss is not None and state.evaluated.step == state.step:
                state.best_saved = better(state.best_saved, Best(state.step, state.val_loss))
        saver = self.saver
        if saver is not None and (not saver.ready or required):
            saver = None
        save, problem = None, None
        try:
            save = self._begin(state, saver, former_best, scheduled=scheduled)
        except UserError as error:  # lines that the disk does not take, or no room for a checkpoint
            problem = str(error)
        if save is None:
            self._not_saved(state, problem or "", former_best, required=required)
            return
        self._save, self._heard = save, ()
        # Lines from here on come behind that of this checkpoint, which is written once it is durable.
        self.metrics.hold()
        self.off_clock.checkpoint_seconds += time.perf_counter() - started
        if saver is None:
            self.finish_save(state)

    def status(self) -> int:
        """What the other ranks are to be told: whether this rank's share of the present turn is done."""
        save = self._save
        work = None if save is None else save.part or save.completing
        if work is None or not work.done():
            return AT_WORK
        return WRITTEN if isinstance(work, _Waited) or _problem(work) is None else FAILED

    def hear(self, statuses: Sequence[int]) -> None:
        """Take in what all ranks have told, this one included."""
        self._heard = statuses

    def look_at_save(self, state: TrainState) -> None:
        """Take the next turn of a save in the background where all are ready for it; to be called before each step.
        UserError where it failed and the run is to stop."""
        save = self._save
        if save is None:
            return
        if self.group.size == 1:
            if save.completing is not None and save.completing.done():
                self.finish_save(state)
        elif save.part is not None:
            if self._heard and all(self._heard):
                self._go_on_when_all_have_written(state, save)
        elif self._heard and self._heard[0]:
            self._end(state, save)

    def finish_save(self, state: TrainState) -> None:
        """Wait for the save that is under way, if one is. UserError where it failed and the run is to stop."""
        save, started = self._save, time.perf_counter()
        if save is None:
            return
        try:
            if save.part is not None:
                self._go_on_when_all_have_written(state, save)
            if self._save is not None:
                self._end(state, save)
        finally:
            self.off_clock.checkpoint_seconds += time.perf_counter() - started

    def abandon(self, state: TrainState, *, together: bool) -> None:
        """The run has failed: a save that is under way may still come to its end, and hides nothing if it fails too.

        `together`: on all ranks, for the same reason. Otherwise the others may not come here, and a save whose parts
        are not known to be there is given up.
        """
        save, self._abandoned = self._save, True
        if save is None:
            return
        try:
            if together or self.group.size == 1:
                self.finish_save(state)
            elif save.part is None:
                self._end(state, save, alone=True)
            else:
                self._ended(save, stands=False)
                save.part.result()
        except UserError as error:
            self.console.warn(str(error))
        finally:
            if save.part is not None and save.temporary is not None and self.group.is_main:
                remove_tree(save.temporary)

    def catch_up(self, state: TrainState, checkpoint: Path) -> None:
        """What a process that was killed right behind the checkpoint that this state is of did not come to: a run that
        is at its end would not save again, and so never do it. On rank 0 alone."""
        folder = self.run.checkpoints_path
        if list_checkpoints(folder)[-1:] == [checkpoint]:  # nothing goes on account of a later one that nobody trusts
            sweep(folder)
            settle(folder)
            for problem in self._retention(state, self.unscheduled_steps)():
                self.console.warn(problem)

    def write_line(self, step: int) -> None:
        """The line of a checkpoint in metrics.jsonl; on any rank by itself."""
        self.metrics.write("checkpoint", step=step, tokens=step * self.config.batch.total_tokens)

    def _begin(
        self, state: TrainState, saver: BackgroundSaver | None, former_best: Best | None, *, scheduled: bool
    ) -> _Save | None:
        """None where rank 0 could not begin. From here on, with a saver, training may do what it likes."""
        step, group, required = state.step, self.group, self._is_required(state, scheduled=scheduled)
        start: Callable[[Callable[[], Any]], _Result] = _Waited if saver is None else saver.submit
        model, optimizer = state.slices()
        if group.size == 1:
            saved = self._state_json(state, scheduled=scheduled)
            if saver is not None:
                model, optimizer = saver.snapshot(model, optimizer)
            whole = {"model": _by_name(model), "optimizer": _by_name(optimizer)}
            write = partial(save_checkpoint, self.run.checkpoints_path, step, **whole, state=saved)
            complete = self._completion(state, write, scheduled=scheduled)
            return _Save(step, scheduled, required, former_best, start, None, complete, start(complete))
        saved, temporary, problem = {}, None, None
        if group.is_main:
            try:
                saved = self._state_json(state, scheduled=scheduled)
                needed_bytes = group.size * sum(piece.tensor.nbytes for piece in (*model, *optimizer))
                temporary = begin_save(self.run.checkpoints_path, step, needed_bytes=needed_bytes)
            except UserError as error:
                problem = error
        name = group.broadcast("checkpoint begins", temporary and temporary.name)
        if problem is not None:
            raise problem
        if name is None:
            return None
        temporary = self.run.checkpoints_path / name
        if saver is not None:
            model, optimizer = saver.snapshot(model, optimizer)
        complete = self._completion(
            state, partial(complete_save, temporary, saved, size=group.size), scheduled=scheduled
        )
        part = start(partial(write_part, temporary, model, optimizer, rank=group.rank, size=group.size))
        return _Save(step, scheduled, required, former_best, start, part, complete, None, temporary)

    def _state_json(self, state: TrainState, *, scheduled: bool) -> dict[str, Any]:
        return state.to_json() | {
            "scheduled": scheduled,
            "metrics_bytes": self.metrics.position(),
            "log_bytes": self.console.log_position(),
            "off_clock": self.off_clock.so_far(),
            **self.about_run,
        }

    def _completion(
        self, state: TrainState, write: Callable[[], object], *, scheduled: bool
    ) -> Callable[[], list[str]]:
        """`write`, and what goes before and behind it, whatever training does meanwhile."""
        let_go = self._retention(
            state, self.unscheduled_steps - {state.step} if scheduled else self.unscheduled_steps | {state.step}
        )

        def complete() -> list[str]:
            # First, as a checkpoint must not outlive the lines that it counts on.
            self.metrics.sync()
            self.console.sync_log()
            write()
            return let_go()  # told by the training thread: the console belongs to it

        return complete

    def _retention(self, state: TrainState, unscheduled_steps: Collection[int]) -> Callable[[], list[str]]:
        """Lets go of what need not be kept beside the checkpoint of this state; returns what it complains of."""
        best, good_step = state.best_saved, self._good_step(state)

        def let_go() -> list[str]:
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

        return let_go

    def _go_on_when_all_have_written(self, state: TrainState, save: _Save) -> None:
        """Waits for them. Rank 0 then completes the checkpoint; where one has failed, the save is at its end."""
        assert save.part is not None
        all_written = bool(self._heard) and all(status == WRITTEN for status in self._heard)
        problem = None if all_written else self._first(self.group.gather("checkpoint written", _problem(save.part)))
        self._heard = ()
        if problem is None:
            save.part = None
            save.completing = save.start(save.complete) if self.group.is_main else None
            return
        if self.group.is_main and save.temporary is not None:
            remove_tree(save.temporary)
        self._ended(save, stands=False)
        self._not_saved(state, problem, save.former_best, required=save.required)

    def _end(self, state: TrainState, save: _Save, *, alone: bool = False) -> None:
        """Waits until rank 0 has completed the checkpoint, or could not; `alone`: the others are not told."""
        stands = False
        try:
            problem = None
            if save.completing is not None:
                try:
                    for line in save.completing.result():
                        self.console.warn(line)
                except UserError as error:  # CheckpointError, or a log that the disk does not take
                    problem = str(error)
            stands = problem is None
            if self._heard and self._heard[0]:
                stands = self._heard[0] == WRITTEN
            elif not alone:
                stands = self.group.broadcast("checkpoint stands", stands)
        finally:
            self._ended(save, stands=stands)
        if not stands:
            self._not_saved(state, problem or "", save.former_best, required=save.required)

    def _ended(self, save: _Save, *, stands: bool) -> None:
        self._save, self._heard = None, ()
        if stands:
            (self.unscheduled_steps.discard if save.scheduled else self.unscheduled_steps.add)(save.step)
        self.metrics.release(lambda: self.write_line(save.step) if stands and save.scheduled else None)

    def _wait_for_former(self, state: TrainState) -> None:
        former, started = self._save, time.perf_counter()
        self.finish_save(state)
        waited = time.perf_counter() - started
        if former is not None and waited > _NOTICEABLE_SECONDS:
            self.console.line(
                f"checkpoint of step {state.step}: waited {waited:.1f}s for that of step {former.step}, which was not "
                "written yet"
            )

    def _is_required(self, state: TrainState, *, scheduled: bool) -> bool:
        """What a signal asked for, and the last one of a run."""
        return not scheduled or self.finish.reached(state)

    def _not_saved(self, state: TrainState, problem: str, former_best: Best | None, *, required: bool) -> None:
        if self._abandoned or required or self.config.checkpoint.on_failure == "stop":
            if not self.group.is_main and not self._abandoned:
                self.group.barrier("a failed save")  # to which rank 0 does not come: it says what is wrong
            raise CheckpointError(problem)
        state.best_saved = former_best
        self.console.warn(f"{problem}; training goes on")

    def _good_step(self, state: TrainState) -> int | None:
        """The checkpoint that must outlive this one, whose weights no loss is known of; None where a validation is."""
        proven = state.evaluated is not None and state.evaluated.step == state.step
        return None if proven and self.config.faults.spike_factor is None else state.faults.good_step

    @staticmethod
    def _first(problems: Sequence[str | None]) -> str | None:
        """The first problem of any rank, with its number where it is not rank 0."""
        told = (f"rank {rank}: {text}" if rank else text for rank, text in enumerate(problems) if text is not None)
        return next(told, None)


def _problem(work: _Result) -> str | None:
    """What a file system or a disk refused, once the work is done; anything else that went wrong is raised."""
    try:
        work.result()
    except UserError as error:
        return str(error)
    return None


def _by_name(pieces: Sequence[TensorSlice]) -> dict[str, Any]:
    """Of one process, which holds whole tensors."""
    return {piece.name: piece.tensor for piece in pieces}
