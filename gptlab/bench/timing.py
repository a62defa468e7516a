"""Where the time of an optimizer step goes: the training functions themselves, timed one by one."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from gptlab.config.run import RunConfig
from gptlab.data.document_capacity import DocumentCapacity
from gptlab.data.rows import RowSource, make_rows
from gptlab.data.tokens.shards import TokenSplit, shard_kind
from gptlab.model.kernels.choice import faster_products
from gptlab.model.kernels.ops import multiply_by
from gptlab.runtime.hardware.device import synchronize
from gptlab.runtime.hardware.place import Place
from gptlab.runtime.hardware.rng import seed_everything
from gptlab.training.compilation import Passes, make_passes
from gptlab.training.faults import Fault, TrainingFailed
from gptlab.training.loop import next_steps
from gptlab.training.state import Finish, TrainState, build_state
from gptlab.training.step import LossFunction, gradients, quiet_garbage, rates_of_step, update

R = TypeVar("R")

PARTS = ("data", "forward", "backward", "norm, clip", "muon", "adamw")
"""In the order of a step. `data`: the wait for the prefetched batch. `backward`: the gradients, less the forward pass.
`norm, clip`: the update, less Muon and AdamW; it also reads the norm and frees the gradients."""

# Of made-up text: more than a CPU's caches hold.
MADE_UP_TOKENS = 4_000_000
# So many steps in a row that differ by so little are those of a machine that does nothing else. Beside other programs,
# steps of quickstart differ by half and more (docs/LOG.md, 2026-11-22), and are timed for as long as was asked.
ALIKE_STEPS = 5
ALIKE_RATIO = 1.1
# Where in its schedule a step is timed: full learning rate and weight decay, the usual work.
_MIDDLE = 0.5
# On a GPU, where steps are queued ahead, so many are timed together, as training makes them.
_QUEUED_STEPS = 5


@dataclass(frozen=True, slots=True)
class StepTimes:
    whole_seconds: list[float]
    """Of whole steps, as in training."""
    part_seconds: Mapping[str, list[float]]
    """By name in PARTS, of other steps, which synchronize with the device after each part."""

    def __add__(self, other: StepTimes) -> StepTimes:
        parts = {name: [*self.part_seconds.get(name, ()), *seconds] for name, seconds in other.part_seconds.items()}
        return StepTimes(self.whole_seconds + other.whole_seconds, parts)


class Stopwatch:
    """Adds up seconds by name. The device is idle when it starts and done when it stops."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device

    def timed(self, name: str, function: Callable[..., R]) -> Callable[..., R]:
        def call(*args: Any, **kwargs: Any) -> R:
            synchronize(self._device)
            started = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize(self._device)
            self.seconds[name] += time.perf_counter() - started
            return result

        return call

    @contextlib.contextmanager
    def timed_steps(self, name: str, optimizer: Any | None) -> Iterator[None]:
        """Within the context, every call of `optimizer.step` is timed."""
        if optimizer is None:
            yield
            return
        optimizer.step = self.timed(name, optimizer.step)  # hides the class's method until it is deleted
        try:
            yield
        finally:
            del optimizer.step


def made_up_rows(config: RunConfig) -> RowSource:
    """Rows as `config` makes them, of random tokens in documents of 1,700 tokens (the median of the `stdlib` corpus).
    BOS, where rows begin with one, is the last entry, as in every tokenizer here."""
    vocab_size, seq_len = config.model.vocab_size, config.model.seq_len
    assert vocab_size is not None
    random = np.random.default_rng(config.seed)
    wanted = max(MADE_UP_TOKENS, 4 * config.batch.total_tokens, seq_len + 1)
    # The mean is above the median, so there are at least as many tokens as are wanted.
    lengths = 1 + random.lognormal(math.log(1700), 1.2, size=1 + wanted // 1700).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = random.integers(vocab_size - 1, size=starts[-1], dtype=shard_kind(vocab_size).dtype.newbyteorder("="))
    tokens[starts[:-1]] = vocab_size - 1
    split = TokenSplit([tokens], starts, np.arange(len(lengths), dtype=np.uint64), int(starts[-1]))
    return make_rows(split, config.data, seq_len, vocab_size - 1, config.seed, None)


def made_up_run(config: RunConfig, place: Place, warn: Callable[[str], None]) -> tuple[TrainState, Passes]:
    """The run as `train` builds it, but on random tokens, and before its warm-up."""
    seed_everything(config.seed, place.device)
    state = build_state(config, made_up_rows(config), device=place.device, compute_dtype=place.dtype)
    if place.device.type == "cpu":
        asked = place.products
        multiply_by(faster_products(state.model.config, place.dtype) if asked == "auto" else asked)
    if config.data.mask_documents:
        bos_id = state.model.vocab_size - 1
        capacity = DocumentCapacity(bos_id, config.batch.micro_sequences, config.model.seq_len)
        state.loader.rows = capacity.counted(state.loader.rows)
        state.model.mask_documents(bos_id, capacity)
    return state, make_passes(state, config, warn)


def time_steps(
    state: TrainState,
    loss_sum: LossFunction,
    config: RunConfig,
    *,
    max_steps: int,
    max_seconds: float,
    min_steps: int = 1,
    by_parts: bool = True,
    until_alike: bool = False,
) -> StepTimes:
    """Train, and time whole steps, and in turn with them steps by parts: `max_steps` of each, or as many as fit into
    `max_seconds` in total, at least `min_steps`. With `until_alike`, no more once the last whole ones are alike."""
    whole: list[float] = []
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    with quiet_garbage():
        whole_steps(state, loss_sum, config, 1)  # Untimed: caches are filled, batches made ahead.
        deadline = time.perf_counter() + max_seconds
        while len(whole) < min_steps or (len(whole) < max_steps and time.perf_counter() < deadline):
            if until_alike and _alike(whole[-ALIKE_STEPS:]):
                break
            whole += whole_steps(state, loss_sum, config, max_steps - len(whole))
            for name, seconds in step_by_parts(state, loss_sum, config).items() if by_parts else ():
                parts[name].append(seconds)
    return StepTimes(whole, parts)


def _alike(seconds: list[float]) -> bool:
    """Whether these are enough steps, and nothing else slowed some of them down."""
    return len(seconds) == ALIKE_STEPS and max(seconds) < ALIKE_RATIO * min(seconds)


class _AlwaysInTheMiddle(Finish):
    def progress(self, step: int, train_seconds: float) -> float:
        return _MIDDLE


def whole_steps(state: TrainState, loss_sum: LossFunction, config: RunConfig, at_most: int) -> list[float]:
    """Seconds of the next step as in training, or of the next few on a GPU. TrainingFailed for a broken loss or
    gradient."""
    end, seconds = state.step + min(at_most, _QUEUED_STEPS), list[float]()
    for step in next_steps(state, loss_sum, config, _AlwaysInTheMiddle(None, None), lambda after: after.step >= end):
        if isinstance(step.result, Fault):
            raise TrainingFailed(str(step.result))
        state.step += 1
        seconds.append(step.seconds)
    return seconds


def step_by_parts(state: TrainState, loss_sum: LossFunction, config: RunConfig) -> dict[str, float]:
    """Seconds of each of PARTS in one step. On a GPU, the synchronization between them prevents overlap."""
    watch = Stopwatch(state.device)
    with watch.timed_steps("muon", state.optimizer.muon), watch.timed_steps("adamw", state.optimizer.adamw):
        batch = watch.timed("data", next)(state.loader)
        watch.timed("gradients", gradients)(state, batch, watch.timed("forward", loss_sum), config)
        watch.timed("update", update)(state, config, rates_of_step(state, config, _AlwaysInTheMiddle(None, None)))
    state.step += 1
    seconds = watch.seconds
    seconds["backward"] = seconds["gradients"] - seconds["forward"]
    seconds["norm, clip"] = seconds["update"] - seconds["muon"] - seconds["adamw"]
    return {name: seconds[name] for name in PARTS}
