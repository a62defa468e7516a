"""Everything that changes during a run. What is not in here cannot matter to a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gptlab.config.run import FaultsConfig, RunConfig
from gptlab.data.loader import Loader
from gptlab.data.rows import RowSource
from gptlab.model.gpt import GPT
from gptlab.optim.combined import CombinedOptimizer
from gptlab.runtime.hardware.rng import capture_rng, restore_rng
from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.slices import TensorSlice, whole_slices
from gptlab.training.faults import FaultRecord
from gptlab.training.parallel.build import build_strategy
from gptlab.training.parallel.strategy import Strategy
from gptlab.training.state_values import require_values
from gptlab.training.throughput import LossEma

# Prefix of the random generators' states among a checkpoint's optimizer tensors.
_RNG = "rng."

# Evaluation and checkpoints may be due by the clock. The others are due by steps alone, and no clock of them is saved.
_DUE_BY_CLOCK = ("evaluated", "saved")


@dataclass(frozen=True, slots=True)
class Mark:
    """When something was last done: evaluated, core_measured, sampled, saved."""

    step: int
    train_seconds: float


@dataclass(frozen=True, slots=True)
class Best:
    """The lowest validation loss, and where it was seen."""

    step: int
    val_loss: float
    """nats/token"""


def better(one: Best | None, other: Best) -> Best:
    """The lower of two, the earlier of two that are equal."""
    return other if one is None or other.val_loss < one.val_loss else one


@dataclass(slots=True)
class TrainState:
    """Plain data, owned by the loop. The tensor slices of all ranks and `to_json` are what a checkpoint holds."""

    model: GPT
    optimizer: CombinedOptimizer
    """This rank's share of it."""
    strategy: Strategy
    """Which parts of weights, gradients and moments are on which rank."""
    loader: Loader
    """Its state is the step after the last batch that was consumed: ahead of `step` after a rewind."""
    scaler: torch.amp.GradScaler
    """Loss scale of float16 runs; disabled, and stateless, for other types."""
    device: torch.device
    step: int = 0
    """Steps done, skipped updates included."""
    train_seconds: float = 0.0
    """The run's clock: real training steps and nothing else."""
    loss_ema: LossEma = field(default_factory=LossEma)
    faults: FaultRecord = field(default_factory=FaultRecord)
    evaluated: Mark | None = None
    core_measured: Mark | None = None
    sampled: Mark | None = None
    saved: Mark | None = None
    """Only scheduled checkpoints: one that a signal asked for leaves no trace in the run."""
    val_loss: float | None = None
    """Of the last evaluation, nats/token."""
    val_bpb: float | None = None
    min_val_bpb: float | None = None
    """The lowest of all evaluations; not always that of the lowest loss, which counts special tokens too."""
    core_metric: float | None = None
    """Of the last measurement of CORE."""
    best: Best | None = None
    """Of all evaluations."""
    best_saved: Best | None = None
    """Of those whose weights a checkpoint holds."""

    def mark(self) -> Mark:
        return Mark(self.step, self.train_seconds)

    def is_best(self) -> bool:
        """Whether the current weights were evaluated and are the best so far."""
        return self.best is not None and self.best.step == self.step

    def passed(self, loss: float, config: FaultsConfig) -> None:
        """Count a step whose loss is no fault: the weights that it began from are good, and so is their checkpoint."""
        if self.saved is not None and self.saved.step == self.step:
            self.faults.good_step = self.step
        self.faults.passed(loss, config)
        self.step += 1
        self.loss_ema.update(loss)

    def rewind(self, model: Mapping[str, Tensor], other: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
        """Restore a checkpoint, except for what was spent since: data, seconds, and the budget of faults."""
        spent, data, seconds = self.faults, self.loader.state_dict(), self.train_seconds
        self.restore(model, other, saved)
        self.loader.load_state_dict(data)
        self.train_seconds = seconds
        self.faults.skipped, self.faults.rewinds = spent.skipped, spent.rewinds + 1

    def slices(self) -> tuple[list[TensorSlice], list[TensorSlice]]:
        """What this rank saves: weights; moments and random generators. Generators are saved by rank 0."""
        rng = {_RNG + name: state for name, state in capture_rng(self.device).items()}
        own_rng = whole_slices(rng) if self.strategy.group.is_main else []
        return self.strategy.weight_slices(), self.strategy.moment_slices() + own_rng

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "train_seconds": self.train_seconds,
            "loss_ema": self.loss_ema.state_dict(),
            "faults": self.faults.to_json(),
            "loader": self.loader.state_dict(),
            "optimizer": self.strategy.moments_json(),
            "scaler": self.scaler.state_dict(),
            "marks": {
                name: mark and (asdict(mark) if name in _DUE_BY_CLOCK else {"step": mark.step})
                for name, mark in self._marks().items()
            },
            "val_loss": self.val_loss,
            "val_bpb": self.val_bpb,
            "min_val_bpb": self.min_val_bpb,
            "core_metric": self.core_metric,
            "best": self.best and asdict(self.best),
            "best_saved": self.best_saved and asdict(self.best_saved),
        }

    def restore(self, model: Mapping[str, Tensor], other: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
        """Restore a checkpoint from whole tensors by name, of which each rank keeps what it holds. UserError where the
        checkpoint is of another configuration, ValueError for values that no run has."""
        require_values(saved)
        self.strategy.load_weights(model)
        rng = {name.removeprefix(_RNG): state for name, state in other.items() if name.startswith(_RNG)}
        moments = {name: state for name, state in other.items() if not name.startswith(_RNG)}
        self.strategy.load_moments(moments, saved["optimizer"])
        self.step, self.train_seconds = saved["step"], saved["train_seconds"]
        self.loss_ema.load_state_dict(saved["loss_ema"])
        self.faults = FaultRecord.from_json(saved["faults"])
        self.loader.load_state_dict(saved["loader"])
        if saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])
        for name in self._marks().keys() & saved["marks"].keys():
            mark = saved["marks"][name]
            setattr(self, name, mark and Mark(mark["step"], mark.get("train_seconds", 0.0)))
        self.val_loss, self.val_bpb = saved["val_loss"], saved["val_bpb"]
        # Not in checkpoints of the first version: these two.
        self.min_val_bpb, self.core_metric = saved.get("min_val_bpb", saved["val_bpb"]), saved.get("core_metric")
        self.best, self.best_saved = (saved[name] and Best(**saved[name]) for name in ("best", "best_saved"))
        restore_rng(rng, self.device)

    def _marks(self) -> dict[str, Mark | None]:
        return {name: getattr(self, name) for name in ("evaluated", "core_measured", "sampled", "saved")}


def build_state(
    config: RunConfig,
    rows: RowSource,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    group: Group | None = None,
    change_model: Callable[[GPT], None] | None = None,
    make_optimizer: Callable[[GPT, RunConfig], CombinedOptimizer] | None = None,
) -> TrainState:
    """A run before its first step: initial weights, zero moments, the loader at the rank's first rows.

    `group`: the processes that train together. `change_model` may replace parts of the model, `make_optimizer` builds
    an optimizer in place of the configuration's; both need a strategy in which every rank holds everything.
    """
    group = group or Group()
    strategy = build_strategy(
        config, group, device=device, compute_dtype=compute_dtype,
        change_model=change_model, make_optimizer=make_optimizer,
    )  # fmt: skip
    loader = Loader(
        rows, micro_sequences=config.batch.micro_sequences, micro_batches=config.micro_batches, device=device,
        rank=group.rank, world_size=group.size, fill=strategy.is_sharded,
    )  # fmt: skip
    scaler = torch.amp.GradScaler(device.type, enabled=compute_dtype == torch.float16)
    return TrainState(strategy.model, strategy.optimizer, strategy, loader, scaler, device)
