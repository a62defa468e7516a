"""Saves that training does not wait for, and saves by several ranks together.

A background save begins with a snapshot in host memory; one thread writes it. One thread, so one save at a time, and
one set of copies, which the next snapshot overwrites: whoever takes one has waited until the save before has ended.

What the ranks know of one another's saves comes with the reduction at the end of every step (agreement.py), so that all
take each stage at the same step, or is gathered where the run has to wait. A failure on one rank is known to all in the
same way, and all then stop, or continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.runtime.hardware.device import synchronize
from gptlab.runtime.processes.one_thread import OneThread, run_now
from gptlab.training.checkpoint.format import CheckpointError, TensorSlice
from gptlab.training.checkpoint.saver import CheckpointSaver, Request, RunOutput
from gptlab.training.checkpoint.write import begin_save, complete_save, remove_tree, write_part
from gptlab.training.state import TrainState

T = TypeVar("T")

# A person would not notice a shorter wait.
_NOTICEABLE_SECONDS = 0.1

# What a rank reports of its save.
AT_WORK, WRITTEN, FAILED = 0, 1, 2


class BackgroundSaver:
    """The thread that writes snapshots, and host memory for them that is allocated once and used for every one."""

    def __init__(self, device: torch.device, thread: OneThread) -> None:
        """`device`: where most of the tensors are. Copies from a CUDA device go to pinned memory, all at once without
        a wait in between; its allocator rounds each tensor up to a power of two."""
        self._device, self._thread = device, thread
        self._copies: dict[tuple[int, str], Tensor] = {}
        """By place in the arguments, since weights and moments may have the same names, and key."""

    def reserve(self, *kinds: Sequence[TensorSlice]) -> None:
        """Allocate the memory for snapshots of these now, and touch it: the kernel maps a page at its first use, which
        costs as much as the copy. RuntimeError or MemoryError if there is not enough."""
        for number, slices in enumerate(kinds):
            for part in slices:
                _bytes(self._copy_of(number, part)).fill(0)

    def snapshot(self, *kinds: Sequence[TensorSlice]) -> list[list[TensorSlice]]:
        """The values as they are now, contiguous on the CPU, until the next snapshot: the save before must have ended.

        A key means the same tensor every time; if its shape or dtype has changed (the states of random generators do),
        its memory is allocated again.
        """
        taken = [[replace(part, tensor=self._copy_of(n, part)) for part in kind] for n, kind in enumerate(kinds)]
        for part, copy in zip(chain(*kinds), chain(*taken), strict=True):
            if part.tensor.device.type == "cpu" and part.tensor.is_contiguous():
                # On one thread: memory bandwidth leaves several threads little to gain, and torch's copy waits for the
                # slowest of them. On a busy machine it took 0.8 s for 1.2 GB, this 0.1 to 0.2 s.
                np.copyto(_bytes(copy.tensor), _bytes(part.tensor.detach()))
            else:
                copy.tensor.copy_(part.tensor.detach(), non_blocking=True)
        synchronize(self._device)
        return taken

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` on the thread, after what was submitted before."""
        return self._thread.submit(work)

    def _copy_of(self, number: int, part: TensorSlice) -> Tensor:
        copy, tensor = self._copies.get((number, part.key)), part.tensor
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
            self._copies[number, part.key] = copy
        return copy


def _bytes(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor: uint8, one dimension."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


@dataclass(slots=True)
class PendingSave:
    """A save in progress: each rank writes its slices, then rank 0 commits."""

    request: Request
    submit: Callable[[Callable[[], Any]], Future[Any]]
    commit: Callable[[], list[str]]
    """For rank 0, after all ranks have written. Returns retention's complaints."""
    writing: Future[None] | None = None
    """None once all ranks are known to have written their slices."""
    committing: Future[list[str]] | None = None
    temporary: Path | None = None
    statuses: Sequence[int] = ()
    """What each rank reported at the end of the last step; empty if no step has ended since the last stage."""


def first_problem(problems: Sequence[str | None]) -> str | None:
    """The first problem of any rank, with the rank's number unless it is rank 0."""
    reported = (f"rank {rank}: {text}" if rank else text for rank, text in enumerate(problems) if text is not None)
    return next(reported, None)


def _problem(work: Future[Any]) -> str | None:
    """What the file system refused, once the work is done; any other error is raised."""
    try:
        work.result()
    except UserError as error:
        return str(error)
    return None


@contextmanager
def concurrent_saver(
    output: RunOutput, about_run: dict[str, Any], device: torch.device | None
) -> Iterator[ConcurrentSaver]:
    """`device`: where the state is; None if training waits for every save."""
    with OneThread("gptlab-save") as thread:  # its end is waited for
        yield ConcurrentSaver(
            **vars(output), about_run=about_run, background=None if device is None else BackgroundSaver(device, thread)
        )


@dataclass
class ConcurrentSaver(CheckpointSaver):
    """Saves in the background, unless a save is required, and by several ranks together."""

    background: BackgroundSaver | None = None
    """None if training waits for every save."""
    pending: PendingSave | None = None
    """The save in progress."""
    _abandoned: bool = False

    @property
    def in_progress(self) -> bool:
        return self.pending is not None

    def checkpoint(self, state: TrainState, *, scheduled: bool = True) -> None:
        """Waits for an earlier save that is still in progress. UserError also if that one fails."""
        if self.pending is not None:
            self._wait_for_earlier(state, self.pending.request.step)
        super().checkpoint(state, scheduled=scheduled)
        if self.pending is not None and (self.pending.request.required or self.background is None):
            self.wait(state)

    def poll(self, state: TrainState) -> None:
        save = self.pending
        if save is None:
            return
        if self.group.size == 1:
            ready = save.committing is not None and save.committing.done()
        else:  # of the commit, only rank 0 knows
            reported = save.statuses[:1] if save.writing is None else save.statuses
            ready = bool(reported) and AT_WORK not in reported
        if ready:
            self._advance(state, save)

    def wait(self, state: TrainState) -> None:
        while self.pending is not None:
            self._advance(state, self.pending)

    def status(self) -> int:
        """What this rank reports at the end of each step: whether its part of the present stage is done."""
        work = None if self.pending is None else self.pending.writing or self.pending.committing
        if work is None or not work.done():
            return AT_WORK
        return WRITTEN if _problem(work) is None else FAILED

    def receive(self, statuses: Sequence[int]) -> None:
        """Take in the `status` of all ranks."""
        if self.pending is not None:
            self.pending.statuses = statuses

    def reserve(self, state: TrainState) -> None:
        """Allocate the memory for snapshots, so that a lack of it shows before the first step. If one rank lacks it,
        training waits for every save on all ranks."""
        if self.background is None or self.config.eval.only:
            return
        reason = None
        try:
            self.background.reserve(*state.slices())
        except (RuntimeError, MemoryError) as error:
            reason = str(error).partition("\n")[0]
        lacking = first_problem(self.group.gather("memory for copies", reason))
        if lacking is not None:
            self.background = None
            self.console.warn(f"no memory for a copy of the state, so training will wait for every save: {lacking}")

    def abandon(self, state: TrainState, *, together: bool) -> None:
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
                self._end(save, durable=False)
                save.writing.result()
        except UserError as error:
            self.console.warn(str(error))
        finally:
            if save.writing is not None:
                self._remove(save)

    def _save(self, state: TrainState, request: Request) -> None:
        background = None if request.required else self.background
        if self.group.size == 1 and background is None:
            super()._save(state, request)
            return
        self.pending = self._begin(state, request, background)
        # Lines from here on come after that of this checkpoint, which is written once it is durable.
        self.metrics.hold()

    def _begin(self, state: TrainState, request: Request, background: BackgroundSaver | None) -> PendingSave:
        """Start a save by several ranks, or with `background`, after which training may change the state. UserError on
        all ranks if it cannot begin, with the reason on rank 0."""
        group, folder = self.group, self.run.checkpoints_path
        submit = run_now if background is None else background.submit
        model, optimizer = state.slices()
        saved, temporary, problem = {}, None, None
        if group.is_main:
            try:
                saved = self._state_json(state, request)
                if group.size > 1:
                    self.run.require_in_place()
                    needed_bytes = group.size * sum(part.tensor.nbytes for part in (*model, *optimizer))
                    temporary = begin_save(folder, request.step, needed_bytes=needed_bytes)
            except UserError as error:
                problem = error
        name = group.broadcast("checkpoint begins", temporary and temporary.name)
        if problem is not None or (group.size > 1 and name is None):
            raise problem or CheckpointError("")
        kept = self._kept(state, request)  # now: training changes the state meanwhile
        if background is not None:
            model, optimizer = background.snapshot(model, optimizer)
        if name is None:
            commit = partial(self._commit, self._write_alone(request, saved, model, optimizer), kept)
            return PendingSave(request, submit, commit, committing=submit(commit))
        temporary = folder / name
        commit = partial(self._commit, partial(complete_save, temporary, saved, size=group.size), kept)
        writing = submit(partial(write_part, temporary, model, optimizer, rank=group.rank, size=group.size))
        return PendingSave(request, submit, commit, writing, temporary=temporary)

    def _advance(self, state: TrainState, save: PendingSave, *, alone: bool = False) -> None:
        """End the present stage of a pending save, after a wait if need be, and start the next one. `alone`: other
        ranks are not asked or told."""
        started = time.perf_counter()
        statuses, save.statuses = save.statuses, ()
        complaints: Sequence[str] = ()
        try:
            if save.writing is not None:
                durable, problem = False, None
                if not statuses or any(status != WRITTEN for status in statuses):
                    problem = first_problem(self.group.gather("checkpoint written", _problem(save.writing)))
                if problem is None:
                    save.writing = None
                    save.committing = save.submit(save.commit) if self.group.is_main else None
                    return
                self._remove(save)
            else:
                problem = None if save.committing is None else _problem(save.committing)
                if save.committing is not None and problem is None:
                    complaints = save.committing.result()
                durable = problem is None
                if statuses and statuses[0] != AT_WORK:
                    durable = statuses[0] == WRITTEN
                elif not alone:
                    durable = self.group.broadcast("checkpoint durable", durable)
        except BaseException:
            if save.writing is None:  # otherwise `abandon` waits for the thread and removes what was written
                self._end(save, durable=False)
            raise
        finally:
            self.off_clock.checkpoint_seconds += time.perf_counter() - started
        self._end(save, durable=durable, complaints=complaints)
        if not durable:  # why a commit failed is known on rank 0 alone
            self._not_saved(state, save.request, problem or "")

    def _remove(self, save: PendingSave) -> None:
        """Remove what the ranks have written, on rank 0."""
        if save.temporary is not None and self.group.is_main:
            remove_tree(save.temporary)

    def _end(self, save: PendingSave, *, durable: bool, complaints: Sequence[str] = ()) -> None:
        self.pending = None
        for line in complaints:
            self.console.warn(line)
        self.metrics.release(lambda: self._log(save.request) if durable else None)

    def _not_saved(self, state: TrainState, request: Request, problem: str) -> None:
        if self._abandoned:
            raise CheckpointError(problem)
        try:
            super()._not_saved(state, request, problem)
        except CheckpointError:
            if not self.group.is_main:
                self.group.barrier("a failed save")  # to which rank 0 does not come: it says what is wrong
            raise

    def _wait_for_earlier(self, state: TrainState, earlier: int) -> None:
        started = time.perf_counter()
        self.wait(state)
        waited = time.perf_counter() - started
        if waited > _NOTICEABLE_SECONDS:
            self.console.line(
                f"checkpoint of step {state.step}: waited {waited:.1f}s for that of step {earlier}, which was not "
                "written yet"
            )
