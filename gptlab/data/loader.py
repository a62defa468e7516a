"""Steps of rows as tensors on the device, made ahead by a thread.

    rows -> (thread) index arithmetic, reads, pinned tensors -> (caller) asynchronous copy

Which rows step N holds is arithmetic: global row N * rows_per_step + i, whose epoch and index follow from
`rows_per_epoch`. So the state of a loader is one number, the next step of the *consumer*; steps made ahead are made
again after a resume.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gptlab.data.packing import IGNORED
from gptlab.data.rows import RowSource
from gptlab.runtime.processes.one_thread import OneThread

PREFETCHED_STEPS = 3
# Small steps are made further ahead, so that the thread wakes once for several: at each step it cost training 0.5 ms of
# the 40 that nanogpt/shakespeare-char-cpu takes, on two busy cores.
MAX_PREFETCHED_STEPS = 16
PREFETCHED_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step's share of this rank."""

    step: int
    epoch: float
    """Rows consumed over rows an epoch has, all ranks, this step included."""
    inputs: Tensor
    """(local_micro_batches, micro_sequences, seq_len) int64, on the device."""
    targets: Tensor
    """Same shape; -1 where a target does not count."""
    micro_indices: tuple[int, ...]
    """Place in the step, over all ranks, of each local micro-batch."""
    target_tokens: int
    """Targets that count in the whole step, over all ranks: the denominator of the mean loss."""


def steps_ahead(batch: StepBatch) -> int:
    """How many steps like this one are made ahead of their use."""
    step_bytes = batch.inputs.nbytes + batch.targets.nbytes
    return min(max(PREFETCHED_STEPS, PREFETCHED_BYTES // max(1, step_bytes)), MAX_PREFETCHED_STEPS)


class Loader(AbstractContextManager["Loader"]):
    """Endless iterator of StepBatch. Rank r of W gets micro-batches r, r + W, ... of each step.

    `fill`: every rank gets as many micro-batches as rank 0. Those beyond the step's are repetitions of its last one in
    which no target counts, so that their loss and their gradient are zero.

    An error while a step is made is raised by the `next` that would have returned the step. Usable as a context
    manager; `close` ends the thread.
    """

    def __init__(
        self, rows: RowSource, *, micro_sequences: int, micro_batches: int, device: torch.device | str,
        rank: int = 0, world_size: int = 1, fill: bool = False,
    ) -> None:  # fmt: skip
        self.rows = rows
        self._device = torch.device(device)
        self._rank, self._world_size, self._fill = rank, world_size, fill
        self._next_step = 0
        self._thread: OneThread | None = None
        self._ahead: deque[Future[StepBatch]] = deque()  # steps from the next one on
        self._limit = PREFETCHED_STEPS
        self._copies: torch.cuda.Stream | None = None
        self.cut(micro_sequences, micro_batches)

    def cut(self, micro_sequences: int, micro_batches: int) -> None:
        """Divide each step, from the next one on, into so many micro-batches of so many rows."""
        self.close()
        self.micro_sequences, self._micro_batches = micro_sequences, micro_batches
        end = -(-micro_batches // self._world_size) * self._world_size if self._fill else micro_batches
        self._micro_indices = tuple(range(self._rank, end, self._world_size))

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        if not self._ahead:
            self._make_ahead()
        try:
            batch = self._ahead[0].result()
        except Exception:
            self.close()
            raise
        self._ahead.popleft()
        self._next_step = batch.step + 1
        self._limit = steps_ahead(batch)
        # Not at every step: waking the thread costs the one that trains, whose cores are all busy.
        if len(self._ahead) <= self._limit // 2:
            self._make_ahead()
        return batch if self._device.type == "cpu" else self._on_device(batch)

    def _on_device(self, batch: StepBatch) -> StepBatch:
        if self._device.type != "cuda":
            return replace(batch, inputs=batch.inputs.to(self._device), targets=batch.targets.to(self._device))
        # On a stream of their own and from pinned memory, the copies do not wait for the kernels in flight.
        self._copies = self._copies or torch.cuda.Stream(self._device)
        training = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copies):
            inputs, targets = (t.to(self._device, non_blocking=True) for t in (batch.inputs, batch.targets))
        training.wait_stream(self._copies)
        for tensor in (inputs, targets):
            tensor.record_stream(training)  # its memory is used again only once training has read it
        return replace(batch, inputs=inputs, targets=targets)

    def state_dict(self) -> dict[str, int]:
        """The step after the last one consumed, whatever has been made ahead."""
        return {"next_step": self._next_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.close()
        self._next_step = state["next_step"]

    def close(self) -> None:
        """End the thread. A later `next` starts again at the next step."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
            self._ahead.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def make(self, step: int) -> StepBatch:
        """Step `step` in host memory, pinned where the device is a GPU."""
        per_step = self._micro_batches * self.micro_sequences
        everywhere = step * per_step + np.arange(per_step).reshape(self._micro_batches, self.micro_sequences)
        mine = np.array(self._micro_indices, dtype=np.int64)
        epochs, indices = np.divmod(everywhere[np.minimum(mine, self._micro_batches - 1)], self.rows.rows_per_epoch)
        # int64 for numpy to widen to: a torch operation in this thread would start a second pool of OpenMP threads.
        inputs, targets = np.empty((2, *epochs.shape, self.rows.seq_len), dtype=np.int64)
        for epoch in np.unique(epochs):  # a step may straddle epochs
            here = epochs == epoch
            inputs[here], targets[here] = self.rows.read(int(epoch), indices[here])
        targets[mine >= self._micro_batches] = IGNORED
        all_here = self._micro_indices == tuple(range(self._micro_batches))
        return StepBatch(
            step=step,
            epoch=(step + 1) * per_step / self.rows.rows_per_epoch,
            inputs=self._tensor(inputs),
            targets=self._tensor(targets),
            micro_indices=self._micro_indices,
            target_tokens=int((targets != IGNORED).sum()) if all_here else self._target_tokens(everywhere),
        )

    def _make_ahead(self) -> None:
        """Have the thread make steps until `_limit` are made or under way."""
        if self._thread is None:
            self._thread = OneThread("gptlab-loader")
        for step in range(self._next_step + len(self._ahead), self._next_step + self._limit):
            self._ahead.append(self._thread.submit(self.make, step))

    def _target_tokens(self, everywhere: np.ndarray) -> int:
        """Of a whole step, from its global rows."""
        epochs, indices = np.divmod(everywhere, self.rows.rows_per_epoch)
        counts = (self.rows.target_counts(int(epoch), indices[epochs == epoch]) for epoch in np.unique(epochs))
        return sum(int(count.sum()) for count in counts)

    def _tensor(self, rows: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(rows)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor
