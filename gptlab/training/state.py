"""Everything that changes while a run goes on. What is not in here cannot matter to a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.config.roles import Role
from gptlab.config.run import FaultsConfig, RunConfig
from gptlab.data.loader import Loader
from gptlab.data.rows import RowSource
from gptlab.model.gpt import GPT, build_model
from gptlab.model.roles import fused_rows, parameter_roles
from gptlab.optim.clip import joint_norm
from gptlab.optim.combined import CombinedOptimizer
from gptlab.optim.groups import build_optimizer
from gptlab.runtime.hardware.rng import capture_rng, fold_seed, restore_rng, seed_everything
from gptlab.training.checkpoint.slices import TensorSlice, even_slices, whole_slices
from gptlab.training.faults import FaultRecord, first_broken_gradient
from gptlab.training.state_values import require_values
from gptlab.training.throughput import LossEma

# Prefix of the random generators' states among a checkpoint's optimizer tensors.
_RNG = "rng."

P = ParamSpec("P")
R = TypeVar("R")


# Of the others nobody asks when they were done: they are due by steps alone, and no clock of them is saved.
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


Compile = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
"""A function -> the same, compiled."""


@dataclass(slots=True)
class TrainState:
    """Owned by the loop; `model_pieces` and `other_pieces` of all ranks and `to_json` are what a checkpoint holds. Here
    every rank has all weights and does all of an update; a `DividedState` does a share of it, a `ShardedState` has a
    share of the weights."""

    model: GPT
    optimizer: CombinedOptimizer
    loader: Loader
    """Its state is the step after the last batch that was consumed: ahead of `step` once the run has gone back."""
    scaler: torch.amp.GradScaler
    """Loss scale of float16 runs; disabled, and stateless, for other types."""
    device: torch.device
    rank: int = 0
    world_size: int = 1
    step: int = 0
    """Steps done, those whose update was left out included."""
    train_seconds: float = 0.0
    """The run's clock: real training steps and nothing else."""
    loss_ema: LossEma = field(default_factory=LossEma)
    faults: FaultRecord = field(default_factory=FaultRecord)
    evaluated: Mark | None = None
    core_measured: Mark | None = None
    sampled: Mark | None = None
    saved: Mark | None = None
    """Of checkpoints that the schedule asked for: one that a signal asked for leaves no trace in the run."""
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
        """Whether the present weights are evaluated, and none were better."""
        return self.best is not None and self.best.step == self.step

    def passed(self, loss: float, config: FaultsConfig) -> None:
        """Take in the loss of the present weights, which is no fault: they are good, and a checkpoint of them too."""
        if self.saved is not None and self.saved.step == self.step:
            self.faults.good_step = self.step
        self.faults.passed(loss, config)

    def rewind(self, model: Mapping[str, Tensor], other: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
        """Become the run that was saved, but for what was spent since: data, seconds, and patience."""
        spent, data, seconds = self.faults, self.loader.state_dict(), self.train_seconds
        self.restore(model, other, saved)
        self.loader.load_state_dict(data)
        self.train_seconds = seconds
        self.faults.skipped, self.faults.rewinds = spent.skipped, spent.rewinds + 1

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds only a share of the weights."""
        return False

    def weights_here(self) -> list[Parameter]:
        """The weights whose gradients this rank has after a backward pass, and that its optimizer moves."""
        return self.optimizer.updated

    def weights_alike(self) -> list[Parameter]:
        """Those that all ranks hold, with the same bits on each."""
        return list(self.model.parameters())

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """The joint norm of the gradients of `weights_here`, of all ranks together; 0-d."""
        return joint_norm(gradients)

    def first_broken_gradient(self) -> str | None:
        """The name of the first weight, in the model's order, whose gradient is not finite on any rank."""
        return first_broken_gradient(self.model)

    def compiled_blocks(self, compiled: Compile) -> Sequence[Callable[..., Tensor]]:
        """The model's blocks, compiled one by one."""
        return [compiled(block) for block in self.model.blocks]

    def as_forward(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, made of parts of the model, as something to be called in the place of the model."""
        return function

    def whole_weights(self) -> AbstractContextManager[None]:
        """Within the context this rank can run the model by itself. All ranks enter it."""
        return nullcontext()

    def in_passes(self) -> AbstractContextManager[None]:
        """Around forward and backward passes."""
        return nullcontext()

    def agree_on_overflow(self) -> None:
        """Let the loss scaler see on every rank what is not finite on any of them."""

    def moved(self, what: str | None) -> None:
        """To be told by the optimizer what has its new weights."""

    def finish_move(self) -> None:
        """Wait until this rank has all new weights."""

    def model_tensors(self) -> dict[str, Tensor]:
        """Weights by name; a shared table stands once."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def model_pieces(self) -> list[TensorSlice]:
        """The weights that this rank is to write: live, and together with those of the other ranks all of them."""
        return even_slices(self.model_tensors(), self.rank, self.world_size)

    def other_pieces(self) -> list[TensorSlice]:
        """Of moments and generators what this rank is to write. The generators' states are rank 0's."""
        rng = {_RNG + name: state for name, state in capture_rng(self.device).items()}
        return self.moment_pieces() + (whole_slices(rng) if self.rank == 0 else [])

    def moment_pieces(self) -> list[TensorSlice]:
        return even_slices(self.optimizer.state_tensors(), self.rank, self.world_size)

    def other_tensors(self) -> dict[str, Tensor]:
        """The optimizer's moments and every random generator."""
        rng = {_RNG + name: state for name, state in capture_rng(self.device).items()}
        return self.optimizer.state_tensors() | rng

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "train_seconds": self.train_seconds,
            "loss_ema": self.loss_ema.state_dict(),
            "faults": self.faults.to_json(),
            "loader": self.loader.state_dict(),
            "optimizer": self.optimizer.state_json(),
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
        """Become the run that was saved, from whole tensors by name, of which each rank keeps what it holds. UserError
        where the checkpoint is of another configuration, ValueError for values that no run has."""
        require_values(saved)
        self.load_weights(model)
        rng = {name.removeprefix(_RNG): state for name, state in other.items() if name.startswith(_RNG)}
        moments = {name: state for name, state in other.items() if not name.startswith(_RNG)}
        self.load_moments(moments, saved["optimizer"])
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
        self.min_val_bpb = saved.get("min_val_bpb", saved["val_bpb"])  # later than the first version, too
        self.core_metric = saved.get("core_metric")  # checkpoints of the first version have none, and no mark for it
        self.best, self.best_saved = (saved[name] and Best(**saved[name]) for name in ("best", "best_saved"))
        restore_rng(rng, self.device)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over whole weights by name, of which each rank keeps what it holds. Errors as `load_weights`."""
        load_weights(self.model, tensors)

    def load_moments(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        """The same of the optimizer's state. Errors as `CombinedOptimizer.load_state`."""
        self.optimizer.load_state(tensors, json)

    def _marks(self) -> dict[str, Mark | None]:
        return {name: getattr(self, name) for name in ("evaluated", "core_measured", "sampled", "saved")}


def build_state(
    config: RunConfig,
    rows: RowSource,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    rank: int = 0,
    world_size: int = 1,
    change_model: Callable[[GPT], None] | None = None,
    make_optimizer: Callable[[GPT, RunConfig], CombinedOptimizer] | None = None,
) -> TrainState:
    """A run that has not begun: weights as initialised, moments at zero, the loader at the rank's first rows.
    `change_model` may replace parts of the model; `make_optimizer`: None for one that updates everything."""
    model = build_model(config.model, device=device, compute_dtype=compute_dtype, seed=config.seed)
    if change_model is not None:
        _change(model, change_model, config.seed, device)
    optimizer = (make_optimizer or whole_optimizer)(model, config)
    loader = Loader(
        rows, micro_sequences=config.batch.micro_sequences, micro_batches=config.micro_batches, device=device,
        rank=rank, world_size=world_size,
    )  # fmt: skip
    scaler = torch.amp.GradScaler(device.type, enabled=compute_dtype == torch.float16)
    return TrainState(model, optimizer, loader, scaler, device, rank, world_size)


def _change(model: GPT, change: Callable[[GPT], None], seed: int, device: torch.device) -> None:
    """Let `change` draw from generators that depend on the run's seed alone, and that nothing else draws from."""
    generators = capture_rng(device)
    seed_everything(fold_seed(seed, 1), device)
    change(model)
    restore_rng(generators, device)
    model.to(device)


def whole_optimizer(model: GPT, config: RunConfig) -> CombinedOptimizer:
    """One that updates every weight of the model."""
    return build_optimizer(
        named_roles(model), config.optim, compute_dtype=model.compute_dtype, row_splits=fused_rows(model)
    )


def named_roles(model: GPT) -> list[tuple[str, Parameter, Role]]:
    """(name, parameter, role) of each weight: what optimizers are built of."""
    roles = parameter_roles(model)
    return [(name, parameter, roles[name]) for name, parameter in model.named_parameters()]


def require_weights_of(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """UserError unless these are the weights of such a model: asked before one is built, for a configuration that comes
    as a file may have any size."""
    if len(tensors) < config.n_layer:
        raise UserError(
            f"the checkpoint is of another model: it has {len(tensors):,} tensors for {config.n_layer:,} layers"
        )
    with torch.device("meta"):
        require_same_shapes(dict(GPT(config).named_parameters()), tensors)


@torch.no_grad()
def load_weights(model: GPT, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights by name; UserError, with nothing changed, unless names and shapes are exactly the model's."""
    own = dict(model.named_parameters())
    require_same_shapes(own, tensors)
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


def require_same_shapes(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """UserError unless names and shapes of a checkpoint's `tensors` are exactly the model's."""
    different = sorted(own.keys() ^ tensors.keys())
    if different:
        raise UserError(f"the checkpoint is of another model: {different[0]} is in only one of the two")
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(
                f"the checkpoint is of another model: {name} is {tuple(tensors[name].shape)} there, "
                f"{tuple(parameter.shape)} here"
            )
