"""Everything that changes during a run, how it begins, and when it is at its end. What is not in TrainState cannot
matter to a resumed run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptlab.config.run import FaultsConfig, RunConfig, RuntimeConfig
from gptlab.data.loader import Loader
from gptlab.data.rows import RowSource
from gptlab.model.gpt import GPT, build_model
from gptlab.optim.combined import CombinedOptimizer
from gptlab.runtime.hardware.rng import capture_rng, restore_rng
from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.format import TensorSlice, whole_slices
from gptlab.training.checkpoint.load import require_values
from gptlab.training.faults import FaultRecord
from gptlab.training.parallel.strategy import Strategy, whole_optimizer

# Prefix of the random generators' states among a checkpoint's optimizer tensors.
_RNG = "rng."

# CORE is due by steps alone, and no clock of it is saved.
_DUE_BY_CLOCK = ("evaluated", "sampled", "saved")

# autoresearch and nanochat smooth the logged loss with 0.9, nanoGPT its MFU.
_BETA = 0.9

# autoresearch's five minutes on an H100 hold 953 steps (its program.md).
CLOCK_STEP_FRACTION = 1e-3


@dataclass(slots=True)
class Ema:
    """Debiased exponential mean, as in autoresearch and nanochat: sum <- 0.9 sum + 0.1 x; mean = sum / (1 - 0.9^n).

    The division removes the pull of the initial zero: the first mean is the first value.
    """

    sum: float = 0.0
    count: int = 0

    @property
    def value(self) -> float | None:
        """The mean so far; None before the first value."""
        return self.sum / (1 - _BETA**self.count) if self.count else None

    def update(self, value: float) -> None:
        self.sum = _BETA * self.sum + (1 - _BETA) * value
        self.count += 1


# torch.amp.GradScaler's, as are the first scale, the factors 2 and 1/2, and the names in state.json.
_GOOD_STEPS = 2000


@dataclass(slots=True)
class LossScale:
    """What float16's gradients are multiplied by before they are rounded: doubled after 2000 good steps, halved after
    an overflow. Always a power of two, so that dividing by it changes no bit."""

    scale: float = 2.0**16
    good_steps: int = 0
    """Since the scale last changed."""

    def update(self, is_finite: bool) -> None:
        """Count a step. `is_finite`: whether its gradients were."""
        self.good_steps += 1
        if not is_finite:
            self.scale, self.good_steps = self.scale / 2, 0
        elif self.good_steps >= _GOOD_STEPS:
            self.scale, self.good_steps = self.scale * 2, 0


@dataclass(slots=True)
class OffClock:
    """Seconds that were not training, over all processes of a run; logged, and part of no budget."""

    started: float = field(default_factory=time.perf_counter)
    """time.perf_counter() when this process began."""
    earlier_seconds: float = 0.0
    """All seconds of earlier processes, up to the checkpoint that this one resumed from."""
    startup_seconds: float = 0.0
    """From the start of a process to its first step, without compilation."""
    compile_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    """While training waited for checkpoints. What a save takes in the background is not in it."""

    @property
    def total_seconds(self) -> float:
        """Including training."""
        return self.earlier_seconds + time.perf_counter() - self.started

    def so_far(self) -> dict[str, float]:
        """For summary.json, and for a resumed run to add to."""
        parts = ("startup_seconds", "compile_seconds", "evaluation_seconds", "checkpoint_seconds")
        return {"total_seconds": self.total_seconds} | {name: getattr(self, name) for name in parts}

    def add_earlier(self, saved: Mapping[str, float]) -> None:
        """Add what an earlier process counted with `so_far`."""
        for name, seconds in saved.items():
            own = "earlier_seconds" if name == "total_seconds" else name
            setattr(self, own, getattr(self, own) + seconds)


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
    device: torch.device
    loss_scale: LossScale | None = None
    """Of float16 runs."""
    captured: Callable[..., Tensor] | None = None
    """Of small models on a GPU: the step as CUDA graphs (`captured_steps`)."""
    step: int = 0
    """Steps done, skipped updates included."""
    train_seconds: float = 0.0
    """The run's clock: real training steps and nothing else."""
    loss_ema: Ema = field(default_factory=Ema)
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

    def is_evaluated(self) -> bool:
        """Whether the last evaluation is that of the current weights."""
        return self.evaluated is not None and self.evaluated.step == self.step

    def is_best(self) -> bool:
        """Whether the current weights were evaluated and are the best so far."""
        return self.best is not None and self.best.step == self.step

    def count_step(self, loss: float, config: FaultsConfig) -> None:
        """Count a step whose loss is no fault: the weights that it began from are good, and so is their checkpoint."""
        if self.saved is not None and self.saved.step == self.step:
            self.faults.good_step = self.step
        self.faults.add_loss(loss, config)
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
            "loss_ema": asdict(self.loss_ema),
            "faults": asdict(self.faults),
            "loader": self.loader.state_dict(),
            "optimizer": self.strategy.moments_json(),
            "scaler": {"scale": scale.scale, "_growth_tracker": scale.good_steps} if (scale := self.loss_scale) else {},
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
        self.loss_ema = Ema(**saved["loss_ema"])
        self.faults = FaultRecord(**saved["faults"])
        self.loader.load_state_dict(saved["loader"])
        if self.loss_scale and saved["scaler"]:
            self.loss_scale = LossScale(float(saved["scaler"]["scale"]), int(saved["scaler"]["_growth_tracker"]))
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


@dataclass(frozen=True, slots=True)
class Finish:
    """The horizon of a run with its unit resolved: a number of steps, or a number of seconds on the clock."""

    steps: int | None
    seconds: float | None
    until_val_loss: float | None = None

    @classmethod
    def of(cls, config: RunConfig, *, flops_per_token: float, scaling_params: int) -> Finish:
        horizon, tokens = config.horizon, config.batch.total_tokens
        steps = horizon.total_steps(
            tokens_per_step=tokens, flops_per_token=flops_per_token, scaling_params=scaling_params
        )
        return cls(steps, horizon.amount if steps is None else None, horizon.until_val_loss)

    def progress(self, step: int, train_seconds: float) -> float:
        """The fraction of the run that is done, in [0, 1]."""
        if self.steps is not None:
            return min(step / self.steps, 1.0)
        assert self.seconds is not None
        return min(train_seconds / self.seconds, 1.0)

    @property
    def step_fraction(self) -> float:
        """The fraction of the run that one step takes, for `lr_scale`. Constant under a clock: no step has been timed
        before the first one, and after a slow step a mean falls, and the warm-up would fall too."""
        return CLOCK_STEP_FRACTION if self.steps is None else 1.0 / self.steps

    def reached(self, state: TrainState) -> bool:
        if self.progress(state.step, state.train_seconds) >= 1.0:
            return True
        return (
            self.until_val_loss is not None
            and state.is_evaluated()  # the last evaluation counts only while it is that of the current weights
            and state.val_loss is not None
            and state.val_loss <= self.until_val_loss
        )


def build_state(
    config: RunConfig, rows: RowSource, *, device: torch.device, compute_dtype: torch.dtype, group: Group | None = None,
    change_model: Callable[[GPT], None] | None = None,
    make_optimizer: Callable[[GPT, RunConfig], CombinedOptimizer] | None = None,
) -> TrainState:  # fmt: skip
    """A run before its first step: initial weights, zero moments, the loader at the rank's first rows. `change_model`
    may replace parts of the model, `make_optimizer` builds an optimizer in place of the configuration's: both need a
    strategy in which every rank holds everything."""
    group = group or Group()
    if config.parallel.mode == "sharded" and group.size > 1:
        strategy = _fully_sharded(config, group, device, compute_dtype)
    else:
        model = build_model(config.model, device=device, compute_dtype=compute_dtype, seed=config.seed)
        if change_model is not None:
            from gptlab.model.changed import apply_change

            apply_change(model, change_model, config.seed, device)
        make = make_optimizer or whole_optimizer
        if group.size > 1 or config.parallel.exact_any_world_size:
            strategy = _of_several(model, config, group, make)
        else:
            strategy = Strategy(model, make(model, config), group)
    if config.runtime.fp8 or config.runtime.activation_checkpointing:
        _replace_passes(strategy.model, config.runtime)
    loader = Loader(
        rows, micro_sequences=config.batch.micro_sequences, micro_batches=config.micro_batches, device=device,
        rank=group.rank, world_size=group.size, fill=strategy.is_sharded or config.parallel.reduce_each_micro_batch,
    )  # fmt: skip
    loss_scale = LossScale() if compute_dtype == torch.float16 else None
    return TrainState(strategy.model, strategy.optimizer, strategy, loader, device, loss_scale)


def _replace_passes(model: GPT, runtime: RuntimeConfig) -> None:
    """Have the model multiply in fp8, and its backward pass compute the blocks again, as the configuration asks."""
    if runtime.fp8:
        from gptlab.model.kernels.fp8 import use_fp8

        use_fp8(model)
    if runtime.activation_checkpointing:
        from torch.utils.checkpoint import checkpoint

        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _of_several(
    model: GPT, config: RunConfig, group: Group, make_optimizer: Callable[[GPT, RunConfig], CombinedOptimizer]
) -> Strategy:
    """The strategy with whole weights on each rank. Where the optimizer is divided among ranks, it is the
    configuration's."""
    if config.parallel.exact_any_world_size:
        from gptlab.training.parallel.deterministic import Deterministic

        return Deterministic(model, make_optimizer(model, config), group, micro_batches=config.micro_batches)
    from gptlab.training.parallel.zero import Zero

    return Zero(model, config, group)


def _fully_sharded(config: RunConfig, group: Group, device: torch.device, compute_dtype: torch.dtype) -> Strategy:
    from gptlab.training.parallel.fsdp import Fsdp  # 0.7 s of imports

    group.start_collectives(device, timeout_seconds=config.runtime.process_timeout_seconds)
    return Fsdp(config, group, device=device, compute_dtype=compute_dtype)
