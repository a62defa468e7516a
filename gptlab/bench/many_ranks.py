"""What one of many ranks holds, sends and saves: a step of the real strategies on fake tensors, in torch's fake process
group. Nothing is allocated, and nothing is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  fake implementations of FSDP2's collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from gptlab.bench.live_bytes import LiveBytes
from gptlab.config.run import RunConfig
from gptlab.model.gpt import GPT
from gptlab.runtime.hardware.device import Platform
from gptlab.runtime.processes.distributed import Group, World
from gptlab.training.parallel.fsdp import Fsdp
from gptlab.training.parallel.fsdp_model import make_mesh, shard_model
from gptlab.training.parallel.strategy import Strategy, whole_optimizer
from gptlab.training.parallel.zero import Zero

StrategyName = Literal["single", "zero", "fsdp", "hsdp"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)

# So few that activations do not show: memory.py counts them.
_COUNTED_TOKENS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Of rank 0, in bytes. No rank has more, but for the few elements by which even parts differ."""

    strategy: StrategyName
    ranks: int
    weights: int
    moments: int
    working: int
    """The most that a step of one micro-batch holds beside weights, moments and activations: gradients, buckets,
    gathered weights, and what the update needs."""
    messages: Mapping[str, int]
    """Collectives of a step, by what they carry."""
    sent: Mapping[str, int]
    """Bytes that leave the rank in them, in rings: (n - 1) / n of a message that is gathered or scattered."""
    saved: int
    """Its share of a checkpoint."""

    @property
    def held(self) -> int:
        return self.weights + self.moments + self.working


def plan_rank(
    config: RunConfig, strategy: StrategyName, ranks: int, dtype: torch.dtype, platform: Platform
) -> RankPlan:
    """Count rank 0 of `ranks`; `config` knows its vocabulary. RuntimeError inside of a process group.

    "hsdp" is "fsdp" with copies of `parallel.shard_ranks`. ConfigError where that does not divide `ranks`."""
    if strategy != "hsdp":
        config = replace(config, parallel=replace(config.parallel, shard_ranks=None))
    per_copy = config.parallel.ranks_per_copy(ranks)
    traffic = _Traffic(ranks, per_copy)
    with ExitStack() as stack:
        if strategy in ("fsdp", "hsdp"):  # FSDP2 refuses the meta device
            mesh = stack.enter_context(_fake_processes(ranks, per_copy))
            stack.enter_context(FakeTensorMode())
            made: Strategy = _FakeFsdp(config, traffic, dtype, platform, mesh)
        else:
            stack.enter_context(torch.device("meta"))  # a tenth of the time that fake tensors take
            model = GPT(config.model, dtype, platform)
            made = (
                Zero(model, config, traffic)
                if strategy == "zero"
                else Strategy(model, whole_optimizer(model, config), traffic)
            )
        weights = [
            one.to_local() if isinstance(one, DTensor) else one
            for one in (*made.model.parameters(), *made.model.buffers())
        ]
        moments = list(made.optimizer.state_tensors().values())
        live = stack.enter_context(_Step(traffic, resident=[*weights, *moments]))
        _step(made, config)
        saved = [one.tensor for one in (*made.weight_slices(), *made.moment_slices())]
    return RankPlan(
        strategy=strategy,
        ranks=ranks,
        weights=_bytes(weights),
        moments=_bytes(moments),
        working=live.peak,
        messages=dict(traffic.messages),
        sent=dict(traffic.sent),
        saved=_bytes(saved),
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _step(made: Strategy, config: RunConfig) -> None:
    """As training/step.py, without what only real numbers decide."""
    tokens = torch.zeros(1, min(_COUNTED_TOKENS, config.model.seq_len), dtype=torch.int64)
    loss = made.as_forward(made.model.loss)(tokens, tokens)
    made.before_backward(True)
    loss.backward()
    made.finish_reduction(loss.detach())
    made.total_norm([parameter.grad for parameter in made.updated_weights() if parameter.grad is not None])
    made.step(1.0, config.optim.muon.momentum, 1.0)
    made.zero_grad()


class _FakeFsdp(Fsdp):
    def __init__(
        self, config: RunConfig, group: Group, dtype: torch.dtype, platform: Platform, mesh: DeviceMesh
    ) -> None:
        self._platform, self._mesh = platform, mesh
        super().__init__(config, group, device=torch.device("cpu"), compute_dtype=dtype)

    def _build(self, config: RunConfig, n_ranks: int, device: torch.device, compute_dtype: torch.dtype) -> GPT:
        model = GPT(config.model, compute_dtype, self._platform)  # torch cannot move a fake model from meta
        shard_model(model, self._mesh)
        return model

    def _initialize(self, model: GPT, config: RunConfig) -> None:
        pass


@contextmanager
def _fake_processes(ranks: int, per_copy: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        # 1,024 fake parts of every weight would take minutes, of which FSDP2 takes the first.
        with patch.object(_fsdp_param, "_chunk_with_empty", _first_chunk):
            yield make_mesh("cpu", ranks, per_copy)
    finally:
        dist.destroy_process_group()


def _first_chunk(tensor: Tensor, n_chunks: int, dim: int) -> list[Tensor]:
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // n_chunks))]


class _Traffic(Group):
    """Rank 0 of many, whose collectives are counted."""

    def __init__(self, ranks: int, per_copy: int) -> None:
        super().__init__(World(0, ranks))
        self._per_copy = per_copy
        self.messages: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def add(self, what: str, sent: int) -> None:
        if self.size > 1:
            self.messages[what] += 1
            self.sent[what] += sent

    def sum_later(self, tensor: Tensor, what: str) -> Callable[[], None]:
        self.add(what, 2 * tensor.nbytes * (self.size - 1) // self.size)
        return lambda: None

    def note(self, func: Any, args: Sequence[Any]) -> None:
        """FSDP2 gathers weights (into, from) and scatters gradients (into, from) in a copy, and sums those ([tensor])
        over copies."""
        if "allreduce" in func.__name__:
            copies = self.size // self._per_copy
            self.add("gradients", 2 * args[0][0].nbytes * (copies - 1) // copies)
        elif "reduce_scatter" in func.__name__:
            self.add("gradients", args[0].nbytes * (self._per_copy - 1))
        elif "allgather" in func.__name__:
            self.add("weights", args[1].nbytes * (self._per_copy - 1))
        else:
            raise NotImplementedError(f"{func} is not counted")

    def reduce_scatter_later(self, own: Tensor, flat: Tensor, what: str) -> Callable[[], None]:
        self.add(what, own.nbytes * (self.size - 1))
        return lambda: None

    def all_gather_later(self, flat: Tensor, own: Tensor, what: str) -> Callable[[], None]:
        self.add(what, own.nbytes * (self.size - 1))
        return lambda: None

    def all_to_all_later(self, flat: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        self.add("updates", (flat.numel() - send[0]) * flat.element_size())
        received = flat.new_empty(sum(receive))
        return lambda: received


class _Step(LiveBytes):
    """FSDP2's collectives go into the traffic."""

    def __init__(self, traffic: _Traffic, resident: Sequence[Tensor]) -> None:
        super().__init__(resident)
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its parts come here by themselves
        if func.namespace == "c10d":
            self._traffic.note(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs)
