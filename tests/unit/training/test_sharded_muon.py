"""Muon over rows that are shared among ranks, against Muon over whole matrices. Ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.config.optim import MuonConfig
from gptlab.model.kernels import ops
from gptlab.optim.muon import Compile, Muon
from gptlab.runtime.hardware.device import compiler_available
from gptlab.runtime.processes.distributed import Group, World
from gptlab.training.parallel.fsdp_copies import OneCopy
from gptlab.training.parallel.fsdp_muon import ShardedMatrix, ShardedMuon

SHAPES = {
    **{f"{layer}.qkv": (16, 8) for layer in range(3)},  # grouped queries: 8 rows, then 4, then 4
    **{f"{layer}.out": (8, 8) for layer in range(3)},
    **{f"{layer}.up": (21, 8) for layer in range(3)},  # by 2 and by 4 ranks: the last one has fewer
    "gate": (2, 8),  # by 4 ranks: two have none
}
SPLITS = {name: (8, 4, 4) for name in SHAPES if name.endswith("qkv")}


class Post:
    """What threads that stand for ranks send each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: dict[tuple[int, int, int], Tensor] = {}
        self.met = threading.Barrier(size, timeout=30)
        self.begun: list[tuple[int, str]] = []


class Desk(Group):
    """A rank's end of it. Nothing arrives before somebody waits for it."""

    def __init__(self, post: Post, rank: int) -> None:
        super().__init__(World(rank, post.size))
        self.post = post
        self.number = 0

    def all_to_all_later(self, flat: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        number, self.number = self.number, self.number + 1
        assert sum(send) == flat.numel()
        for to, piece in enumerate(flat.split(list(send))):
            self.post.sent[number, self.rank, to] = piece.clone()
        if self.rank == 0:
            self.post.begun.append((number, "begun"))

        def wait() -> Tensor:
            self.post.met.wait()
            if self.rank == 0:
                self.post.begun.append((number, "waited"))
            pieces = [self.post.sent[number, sender, self.rank] for sender in range(self.size)]
            assert [piece.numel() for piece in pieces] == list(receive)
            return torch.cat(pieces)

        return wait


def values(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def rows_on(rank: int, size: int, rows: int) -> slice:
    """torch.chunk's rule, which is FSDP2's."""
    most = -(-rows // size)
    return slice(min(rank * most, rows), min((rank + 1) * most, rows))


def matrices(rank: int, size: int, dtype: torch.dtype = torch.float64) -> list[ShardedMatrix]:
    found = []
    for name, weight in values(0, dtype).items():
        here = [rows_on(r, size, len(weight)) for r in range(size)]
        rows = tuple(s.stop - s.start for s in here)
        found.append(ShardedMatrix(name, Parameter(weight[here[rank]].clone()), rows))
    return found


def train_shards(
    size: int, steps: int, config: MuonConfig, *, copies: int = 1, broken_last: bool = False,
    compiled: Compile | None = None, dtype: torch.dtype = torch.float64,
) -> tuple[list[ShardedMuon], Post]:  # fmt: skip
    """`size`: ranks that hold a copy. `broken_last`: then a step without finite gradients, whose update is not made."""
    post = Post(copies * size)

    def train(number: int) -> ShardedMuon:
        group = OneCopy(Desk(post, number), size)
        rank = group.rank
        own = matrices(rank, size, dtype)
        muon = ShardedMuon(own, config, compute_dtype=dtype, row_splits=SPLITS, group=group)
        muon.compile(compiled)
        for step in range(steps):
            for name, gradient in values(1 + step, dtype).items():
                muon.parameters[name].grad = gradient[rows_on(rank, size, len(gradient))].clone()
            muon.step(1.0 - step / 10, 0.9 + step / 100, 1.0, torch.tensor(True) if step == 1 else None)
        if broken_last:
            for parameter in muon.parameters.values():
                parameter.grad = torch.full_like(parameter, torch.nan)
            muon.step(1.0, 0.9, 1.0, torch.tensor(False))
        return muon

    with ThreadPoolExecutor(post.size) as threads:
        return list(threads.map(train, range(post.size))), post


def train_whole(steps: int, config: MuonConfig, dtype: torch.dtype = torch.float64) -> Muon:
    weights = {name: Parameter(value) for name, value in values(0, dtype).items()}
    muon = Muon(weights, config, compute_dtype=dtype, row_splits=SPLITS)
    for step in range(steps):
        for name, gradient in values(1 + step, dtype).items():
            weights[name].grad = gradient
        muon.step(1.0 - step / 10, 0.9 + step / 100, 1.0)
    return muon


SETTINGS: list[dict[str, Any]] = [
    {},
    {"scaled_decay": True, "update_scale": "max_side"},
    {"normuon_beta2": None, "cautious_decay": False, "nesterov": False, "orthogonalizer": "newton_schulz"},
    {"split_qkv": False, "weight_decay": 0.0, "orthogonalizer": "svd"},
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("settings", SETTINGS, ids=["normuon", "scaled", "plain", "whole"])
def test_weights_and_state_are_those_of_whole_matrices(size: int, settings: dict[str, Any]) -> None:
    """The same operations on the same numbers; stacks of other heights may be multiplied in another order, which
    float64 rounds at 1e-16 and five polynomials magnify a little."""
    config = MuonConfig(**{"lr": 0.1, **settings})
    whole = train_whole(3, config)
    shards, _ = train_shards(size, 3, config, broken_last=True)
    for name, weight in whole.parameters.items():
        together = torch.cat([shard.parameters[name].detach() for shard in shards])
        torch.testing.assert_close(together, weight.detach(), rtol=1e-10, atol=1e-12)
        assert not torch.equal(together, values(0)[name])
    expected = whole.state_tensors()
    states = [shard.state_tensors() for shard in shards]
    assert {key for state in states for key in state} == set(expected)
    for key, tensor in expected.items():
        pieces = [state[key] for state in states if key in state]
        if key.endswith("second_moment"):
            assert len(pieces) == 1, "one owner"
        torch.testing.assert_close(torch.cat(pieces), tensor, rtol=1e-10, atol=1e-12)
    assert all(shard.row_splits == whole.row_splits for shard in shards)


@pytest.mark.skipif(not compiler_available(torch.device("cpu")), reason="no C++ compiler here")
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("settings", SETTINGS[:3], ids=["normuon", "scaled", "plain"])
def test_kernels_give_the_bits_of_whole_matrices(size: int, settings: dict[str, Any]) -> None:
    config = MuonConfig(**{"lr": 0.1, **settings})
    with ops.implementations_kept():
        ops.load_kernels(torch.device("cpu"), torch.float32)
        whole = train_whole(3, config, torch.float32)
        shards, _ = train_shards(size, 3, config, dtype=torch.float32, broken_last=True)
    for name, weight in whole.parameters.items():
        assert torch.equal(torch.cat([shard.parameters[name].detach() for shard in shards]), weight.detach()), name
    for key, tensor in whole.state_tensors().items():
        pieces = [state[key] for state in (shard.state_tensors() for shard in shards) if key in state]
        assert torch.equal(torch.cat(pieces), tensor), key


def test_what_owners_compute_is_compiled_once_whatever_the_rates() -> None:
    """For each shape, however many parts and parameters have it."""
    torch.compiler.reset()
    shapes = []

    def counted(graph: Any, inputs: Sequence[Tensor]) -> Any:
        shapes.append(tuple(inputs[0].shape))
        return graph

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=counted, dynamic=False, fullgraph=True)

    (plain,), _ = train_shards(1, 3, MuonConfig(), broken_last=True)
    (ours,), _ = train_shards(1, 3, MuonConfig(), broken_last=True, compiled=compiled)
    assert sorted(shapes) == [(1, 2, 8), (3, 4, 8), (3, 8, 8), (3, 21, 8)]
    expected, found = ({**one.parameters, **one.state_tensors()} for one in (plain, ours))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_copies_make_the_same_update() -> None:
    """Uncompiled, since a compiler that times what it makes may give each copy other bits."""
    alone, _ = train_shards(2, 2, MuonConfig())
    shards, _ = train_shards(2, 2, MuonConfig(), copies=3, compiled=pytest.fail)
    for rank, shard in enumerate(shards):
        ours, theirs = ({**one.parameters, **one.state_tensors()} for one in (shard, alone[rank % 2]))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_owners_share_the_work() -> None:
    """Three matrices of each large shape and two ranks: five of nine at most, and the second moments show whose."""
    shards, _ = train_shards(2, 1, MuonConfig())
    owned = [{key for key in shard.state_tensors() if key.endswith("second_moment")} for shard in shards]
    assert sorted(map(len, owned)) in ([4, 6], [5, 5])
    assert not owned[0] & owned[1]


def test_owners_share_by_cost_and_not_by_number() -> None:
    """One large matrix costs more than the three others together: its owner has none of them."""
    shapes = {"small": (4, 4), "tall": (8, 4), "large": (16, 16), "middle": (8, 8)}
    owned = []
    for rank in range(2):
        halves = [
            ShardedMatrix(name, Parameter(torch.zeros(rows // 2, cols)), (rows // 2, rows // 2))
            for name, (rows, cols) in shapes.items()
        ]
        options: dict[str, Any] = {"compute_dtype": torch.float64, "row_splits": {}}
        muon = ShardedMuon(halves, MuonConfig(), **options, group=OneCopy(Desk(Post(2), rank), 2))
        owned.append({key.split(".")[0] for key in muon.state_tensors() if key.endswith("second_moment")})
    assert sorted(owned, key=len) == [{"large"}, {"small", "tall", "middle"}]


def test_rows_travel_while_owners_work() -> None:
    """The next round's rows leave before those of this one are waited for, and updates are waited for last."""
    _, post = train_shards(2, 1, MuonConfig())
    order = [f"{number} {what}" for number, what in post.begun]
    rounds = 4
    # Exchanges of 4 rounds: gathers 0, 1, 3, 5 and scatters 2, 4, 6, 7.
    assert order[:4] == ["0 begun", "1 begun", "0 waited", "2 begun"]
    assert order[-4:] == ["2 waited", "4 waited", "6 waited", "7 waited"]
    assert len(order) == 2 * 2 * rounds
