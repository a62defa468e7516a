"""The work of an update, divided: everything is done, by one rank, and it is what one process would have done."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_checkpoint import same_bits
from tiny_runs import make_config, write_corpus
from torch import Tensor

from gptlab.app.run.session import open_session
from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.config.optim import AdamWConfig, MuonConfig, OptimConfig
from gptlab.config.run import ParallelConfig, RunConfig
from gptlab.data.rows import RowSource
from gptlab.model.counting import fused_rows
from gptlab.model.gpt import build_model
from gptlab.optim import muon as muon_module
from gptlab.optim.combined import CombinedOptimizer, build_optimizer
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.processes.distributed import Group, World
from gptlab.runtime.records.console import Console
from gptlab.training.checkpoint.format import TensorSlice
from gptlab.training.checkpoint.load import load_checkpoint
from gptlab.training.checkpoint.write import begin_save, complete_save, write_part
from gptlab.training.parallel.division import Bucket, Division, Wire, divide
from gptlab.training.parallel.strategy import named_roles
from gptlab.training.parallel.zero import Zero, divide_model
from gptlab.training.state import build_state

CPU = torch.device("cpu")
GROUPED: dict[str, Any] = {"n_layer": 3, "n_head": 4, "n_kv_head": 2}  # tall, wide and square matrices
EVEN: dict[str, Any] = {"n_layer": 4, "n_head": 2, "value_embeddings": False}  # which have a small matrix, too
MODELS: dict[str, dict[str, Any]] = {
    "even": EVEN, "usual": {"n_layer": 4, "n_head": 2}, "grouped": GROUPED, "one layer": {"n_layer": 1, "n_head": 2},
    "odd": {"n_layer": 3, "n_head": 2, "value_embeddings": False},
}  # fmt: skip


def model_of(name: str, n_embd: int = 32) -> Any:
    config = ModelConfig(vocab_size=64, vocab_multiple=32, n_embd=n_embd, seq_len=16, **MODELS[name])
    return build_model(config, device=CPU, compute_dtype=torch.float64, seed=1)


def division_of(model: Any, n_ranks: int, config: OptimConfig | None = None, **options: Any) -> Division:
    options.setdefault("bucket_bytes", 20_000)  # several buckets
    return divide_model(model, RunConfig(optim=config or OptimConfig()), n_ranks, **options)


class Alone(Group):
    """A rank of several that hears nothing of the others: of what is gathered it has its own part."""

    def all_gather_later(self, flat: Tensor, own: Tensor, what: str) -> Callable[[], None]:
        flat.view(self.size, -1).copy_(own)
        return lambda: None


def strategies_of(models: Sequence[Any], config: OptimConfig) -> list[Zero]:
    """One for each rank, on a model of its own, with the gradients of the model."""
    run = RunConfig(optim=config)
    return [Zero(model, run, Alone(World(rank, len(models))), wire=Wire(20_000)) for rank, model in enumerate(models)]


# --- who owns what ----------------------------------------------------------------------------------------------------


def owners(buckets: Sequence[Bucket], model: Any) -> dict[str, Tensor]:
    """For each element of each parameter the rank that owns it, by a walk over all slices."""
    owner = {name: torch.full((p.numel(),), -1) for name, p in model.named_parameters()}
    for bucket in buckets:
        for rank, slices in enumerate(bucket.slices):
            for one in slices:
                part = owner[one.name][one.start : one.start + one.count]
                assert len(part) == one.count
                assert (part == -1).all(), "owned twice"
                part.fill_(rank)
    return owner


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 8, 60])
@pytest.mark.parametrize("name", MODELS)
def test_every_element_has_one_owner(name: str, n_ranks: int) -> None:
    """Also where there are more ranks than matrices; and gradients go to who sends the weights."""
    model = model_of(name)
    division = division_of(model, n_ranks)
    by_gradient = owners(division.gradients, model)
    by_weight = owners([*division.stacks.values(), *division.rest], model)
    for parameter in by_gradient:
        assert (by_gradient[parameter] >= 0).all()
        assert torch.equal(by_gradient[parameter], by_weight[parameter])
    splits = fused_rows(model)
    for parameter, p, role in named_roles(model):
        if role.value == "matrix":
            for rows in by_gradient[parameter].view_as(p).split(splits.get(parameter, (len(p),))):
                assert len(rows.unique()) == 1, "a matrix is whole"


@pytest.mark.parametrize(("name", "n_ranks"), [("even", 2), ("even", 4), ("odd", 3)])
def test_ranks_have_as_much_to_do(name: str, n_ranks: int) -> None:
    """Where the ranks divide the layers, all of it is equal, and hardly anything is padded."""
    model = model_of(name)
    division = division_of(model, n_ranks)
    for stack in division.stacks.values():
        assert len({len(owned) for owned in stack.slices}) == 1
    elements = [sum(one.count for one in division.share(rank)) for rank in range(n_ranks)]
    assert max(elements) - min(elements) <= len(division.rest)
    sent = sum(bucket.chunk for bucket in division.gradients)
    assert sent <= max(elements) + len(division.rest) + len(division.gradients)


def test_left_over_matrices_are_balanced_by_cost() -> None:
    """One of each shape, so that all are left over. The large one costs 16^3 multiplications, to a factor, the other
    three together 8^3 + 8 * 4^2 + 4^3 = 704: whoever has it gets nothing else, where a balance of numbers is two each.
    """
    shapes = {"small": (4, 4), "tall": (8, 4), "large": (16, 16), "middle": (8, 8)}
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    division = divide(weights, [TensorSlice(n, shapes[n], 0, w) for n, w in weights.items()], [], 2)
    owned = [{one.name for one in division.share(rank)} for rank in range(2)]
    assert sorted(owned, key=len) == [{"large"}, {"small", "tall", "middle"}]


def test_left_over_matrices_are_balanced_in_number_where_they_cost_the_same() -> None:
    """3 layers on 2 ranks: 12 of the size of a head, 3 up and 3 down of four times that. The odd one of each kind is
    left over."""
    division = division_of(model_of("odd"), 2)
    assert [sorted(len(owned) for owned in stack.slices) for stack in division.stacks.values()] == [
        [6, 6], [1, 2], [1, 2],
    ]  # fmt: skip
    totals = [sum(len(stack.slices[rank]) for stack in division.stacks.values()) for rank in range(2)]
    assert totals == [9, 9]


def test_buckets_come_in_the_order_of_a_backward_pass() -> None:
    model = model_of("usual")
    names = [name for name, _ in model.named_parameters()]
    division = division_of(model, 2)
    assert len(division.gradients) > 5
    complete = [min(names.index(name) for name in bucket.names) for bucket in division.gradients]
    assert complete == sorted(complete, reverse=True)


# --- what they do -----------------------------------------------------------------------------------------------------

CONFIGS = {
    "default": OptimConfig(),
    "plain": OptimConfig(muon=MuonConfig(normuon_beta2=None, split_qkv=False, orthogonalizer="svd")),
    "adamw": OptimConfig(matrix_optimizer="adamw", matrix=AdamWConfig(lr=0.01, weight_decay=0.1)),
}


def set_gradients(models: Sequence[Any], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, p in models[0].named_parameters():
        gradient = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for model in models:
            dict(model.named_parameters())[name].grad = gradient.clone()


@pytest.mark.parametrize("n_ranks", [3, 12])
@pytest.mark.parametrize("kind", CONFIGS)
def test_together_they_do_what_one_does(kind: str, n_ranks: int) -> None:
    """In float64: stacks of other heights round otherwise in the last bit."""
    config = CONFIGS[kind]
    one, models = model_of("grouped").double(), [model_of("grouped").double() for _ in range(n_ranks)]
    whole = build_optimizer(named_roles(one), config, compute_dtype=torch.float64, row_splits=fused_rows(one))
    shares = strategies_of(models, config)
    owner = owners(division_of(one, n_ranks, config).gradients, one)
    for step in range(2):
        set_gradients([one, *models], step)
        whole.step(1.0, 0.9, 1.0)
        for rank, zero in enumerate(shares):
            before = {name: p.detach().clone() for name, p in models[rank].named_parameters()}
            zero.use_local_gradients()
            zero.optimizer.step(1.0, 0.9, 1.0)
            zero.zero_grad()
            for name, p in models[rank].named_parameters():
                others = owner[name].view_as(p) != rank
                assert torch.equal(p[others], before[name][others]), "what others own is theirs"
        for name, p in one.named_parameters():  # what an all-gather would do
            for rank in range(n_ranks):
                mine = owner[name].view_as(p) == rank
                torch.testing.assert_close(
                    dict(models[rank].named_parameters())[name][mine], p[mine], rtol=1e-10, atol=1e-12
                )
            for model in models:
                dict(model.named_parameters())[name].data.copy_(p.data)


def test_each_matrix_is_orthogonalized_once_in_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Counter[tuple[int, ...]]] = []
    orthogonalize = muon_module.orthogonalize

    def counting(stack: Tensor, *args: Any, **options: Any) -> Tensor:
        counted[-1][tuple(stack.shape[1:])] += len(stack)
        return orthogonalize(stack, *args, **options)

    monkeypatch.setattr(muon_module, "orthogonalize", counting)
    everything = Counter({(32, 32): 16, (128, 32): 4, (32, 128): 4})
    for n_ranks in (1, 2, 3, 5, 25):
        counted.clear()
        models = [model_of("even") for _ in range(n_ranks)]
        set_gradients(models, 0)
        for zero in strategies_of(models, OptimConfig()):
            counted.append(Counter())
            zero.use_local_gradients()
            zero.step(1.0, 0.9, 1.0)
        assert sum(counted, Counter()) == everything
        if n_ranks in (2, 25):
            assert max(one.total() for one in counted) == -(-24 // n_ranks)


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_moments_take_their_share_of_memory(n_ranks: int) -> None:
    def moment_bytes(optimizer: CombinedOptimizer) -> int:
        return sum(moment.nbytes for moment in optimizer.state_tensors().values())

    model = model_of("usual", n_embd=64)
    whole = build_optimizer(named_roles(model), OptimConfig(), compute_dtype=torch.float64)
    each = [moment_bytes(one.optimizer) for one in strategies_of([model] * n_ranks, OptimConfig())]
    assert max(each) < 1.02 * moment_bytes(whole) / n_ranks
    # Each element once, but for the count of steps of a parameter that two ranks share.
    assert moment_bytes(whole) <= sum(each) <= moment_bytes(whole) + 4 * len(named_roles(model)) * n_ranks


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows_and_config(tmp_path_factory: pytest.TempPathFactory) -> tuple[RowSource, RunConfig]:
    folder = tmp_path_factory.mktemp("divided")
    write_corpus(folder / "corpus")
    config = make_config(folder, "never-made")
    with Console() as console:
        session = open_session(config, place_of(config), console)
    return session.state.loader.rows, session.config


def states_of(rows: RowSource, config: RunConfig, n_ranks: int) -> list[Any]:
    options: dict[str, Any] = {"device": CPU, "compute_dtype": torch.float32}
    return [build_state(config, rows, group=Group(World(rank, n_ranks)), **options) for rank in range(n_ranks)]


def saved_by(states: Sequence[Any], folder: Path, step: int) -> Path:
    temporary = begin_save(folder, step, needed_bytes=1)
    for rank, state in enumerate(states):
        write_part(temporary, *state.slices(), rank=rank, size=len(states))
    return complete_save(temporary, states[0].to_json() | {"step": step}, size=len(states))


def test_saved_at_any_world_size_loaded_at_any_other(
    rows_and_config: tuple[RowSource, RunConfig], tmp_path: Path
) -> None:
    """From few ranks to more, to fewer, and to many: weights and moments, put together again, are the same bits."""
    rows, config = rows_and_config
    first = states_of(rows, config, 1)
    generator = torch.Generator().manual_seed(3)
    for tensor in first[0].optimizer.state_tensors().values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    original = load_checkpoint(saved_by(first, tmp_path / "first", 1))
    assert original.optimizer.keys() > first[0].optimizer.state_tensors().keys()
    pairs = [(1, 3), (2, 1), (2, 4), (3, 2), (3, 20), (4, 3), (20, 2)]
    for step, (size, next_size) in enumerate(pairs):
        saved = original
        for n_ranks in (size, next_size):
            states = states_of(rows, config, n_ranks)
            for state in states:
                state.restore(saved.model, saved.optimizer, saved.state)
            saved = load_checkpoint(saved_by(states, tmp_path / f"{step}-{n_ranks}", step))
        assert same_bits(saved.model, original.model)
        assert same_bits(saved.optimizer, original.optimizer)


# --- gradients on their way -------------------------------------------------------------------------------------------


class Echo(Group):
    """A group of two in which the other rank has the same numbers; notes what is sent, and when."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(World(rank, 2))
        self.sent: list[int] = []
        self.on_their_way = self.most_at_a_time = 0

    def sum_later(self, tensor: Tensor, what: str) -> Callable[[], None]:
        tensor.mul_(2)
        return super().sum_later(tensor, what)

    def reduce_scatter_later(self, own: Tensor, flat: Tensor, what: str) -> Callable[[], None]:
        self.sent.append(flat.numel())
        self.on_their_way += 1
        self.most_at_a_time = max(self.most_at_a_time, self.on_their_way)
        own.copy_(2 * flat.view(2, -1)[self.rank])
        return self.arrived

    def arrived(self) -> None:
        self.on_their_way -= 1


class TestGradients:
    def setup_method(self) -> None:
        self.model = model_of("usual").double()
        self.tokens = torch.arange(32).view(2, 16) % 64

    def zero(self, rank: int, **parallel: bool) -> tuple[Zero, Echo]:
        group = Echo(rank)
        config = RunConfig(parallel=ParallelConfig(**parallel))
        return Zero(self.model, config, group, wire=Wire(20_000)), group

    def backward(self) -> None:
        self.model.loss(self.tokens, self.tokens).backward()

    @pytest.mark.parametrize("rank", [0, 1])
    def test_each_gets_the_sums_of_what_it_owns(self, rank: int) -> None:
        self.backward()
        expected = {name: 3 * 2 * p.grad.clone() for name, p in self.model.named_parameters()}
        self.model.zero_grad()
        zero, group = self.zero(rank)
        for micro_batch in range(3):
            zero.before_backward(micro_batch == 2)
            assert group.sent == []
            self.backward()
        before = len(group.sent)
        assert before >= 5, "they leave during the backward pass"
        zero.finish_reduction(torch.zeros(()))
        assert len(group.sent) == before, "all of them"
        assert all(p.grad is None for p in self.model.parameters())
        for key, leaf in zero.optimizer.parameters.items():
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad, zero.owned[key].of(expected[zero.owned[key].name]))

    def test_they_leave_after_each_micro_batch_where_that_is_wanted(self) -> None:
        """Then no rank keeps a whole gradient, and what is sent for one micro-batch is sent for each."""
        self.backward()
        expected = {name: 3 * 2 * p.grad.clone() for name, p in self.model.named_parameters()}
        self.model.zero_grad()
        zero, group = self.zero(1, reduce_each_micro_batch=True)
        sent = []
        for micro_batch in range(3):
            zero.before_backward(micro_batch == 2)
            assert all(p.grad is None for p in self.model.parameters())
            self.backward()
            sent.append(sum(group.sent))
        zero.finish_reduction(torch.zeros(()))
        once = sum(2 * bucket.chunk for bucket in zero.division.gradients)
        assert 0 < sent[0] <= once < sent[1] <= 2 * once < sent[2]
        assert sum(group.sent) == 3 * once
        assert group.most_at_a_time == 2
        for key, leaf in zero.optimizer.parameters.items():
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad, zero.owned[key].of(expected[zero.owned[key].name]))

    def test_in_the_measured_order_no_bucket_waits_for_another(self) -> None:
        """Whatever the order, each leaves with the last of its gradients."""
        names = [name for name, _ in self.model.named_parameters()]
        order = [names[place] for place in torch.randperm(len(names), generator=torch.Generator().manual_seed(5))]
        group = Echo()
        zero = Zero(self.model, RunConfig(), group, wire=Wire(20_000, measured_order=True))
        parameters = dict(self.model.named_parameters())
        for name in order:
            zero._complete(name, parameters[name])
        zero.after_warm_up()
        zero.before_backward(True)
        for number, name in enumerate(order):
            parameters[name].grad = torch.ones_like(parameters[name])
            zero._complete(name, parameters[name])
            complete = [bucket for bucket in zero.division.gradients if bucket.names <= set(order[: number + 1])]
            assert len(group.sent) == len(complete)
        assert len(group.sent) == len(zero.division.gradients) >= 5

    def test_a_rank_without_micro_batches_adds_zeros(self) -> None:
        zero, _ = self.zero(1)
        zero.finish_reduction(torch.zeros(()))
        assert all(leaf.grad is not None and not leaf.grad.any() for leaf in zero.updated_weights())

    def test_a_parameter_without_gradient_is_named(self) -> None:
        zero, _ = self.zero(0)
        zero.before_backward(True)
        self.model.head_loss(torch.zeros(2, 16, 32), self.tokens).backward()
        with pytest.raises(UserError, match="has no gradient"):
            zero.finish_reduction(torch.zeros(()))


def test_updated_weights_lie_in_the_model(rows_and_config: tuple[RowSource, RunConfig]) -> None:
    rows, config = rows_and_config
    for state in states_of(rows, config, 3):
        assert isinstance(state.strategy, Zero)
        weights = dict(state.model.named_parameters())
        for key, leaf in state.optimizer.parameters.items():
            one = state.strategy.owned[key]
            assert leaf.data_ptr() == weights[one.name].data_ptr() + 4 * one.start


def test_ranks_start_without_sympy(
    rows_and_config: tuple[RowSource, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.zeros_like of a meta tensor imports it: 0.7 s of CPU time for each rank (torch 2.13)."""
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    states_of(*rows_and_config, 2)
