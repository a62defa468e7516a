"""What checkpoints hold of an optimizer of the caller's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gptlab.config.errors import UserError
from gptlab.optim.torch_optimizer import TorchOptimizer


class CountsInGroups(torch.optim.Optimizer):
    """Keeps its number of steps where schedule-free and D-adapting optimizers do; `limit` is as of Prodigy."""

    def __init__(self, model: nn.Module, count: object = 0) -> None:
        super().__init__(model.parameters(), {"lr": 0.1, "betas": (0.9, 0.95), "limit": torch.inf, "count": count})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for weight in group["params"]:
                weight.data += group["count"]


def wrapped(count: object = 0) -> tuple[nn.Module, TorchOptimizer]:
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    return model, TorchOptimizer(CountsInGroups(model, count), model)


def step(optimizer: TorchOptimizer) -> None:
    optimizer.step(lr_scale=1.0, momentum=0.9, weight_decay_scale=1.0)


def step_with_gradients(optimizer: TorchOptimizer) -> None:
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    step(optimizer)


def test_what_groups_count_is_saved_with_the_rest() -> None:
    """It was lost without a word: a schedule-free run began again to count where it was resumed."""
    _, optimizer = wrapped()
    step(optimizer)
    saved = json.loads(json.dumps(optimizer.state_json(), allow_nan=False))
    assert saved == optimizer.state_json(), "as a checkpoint requires"
    model, resumed = wrapped()
    resumed.load_state({}, saved)
    step(resumed)
    assert model.weight.item() == 2
    assert resumed.inner.param_groups[0]["betas"] == (0.9, 0.95)


def test_a_state_from_before_a_count_takes_it_back() -> None:
    """As where a run rewinds to its first weights."""
    _, optimizer = wrapped()
    first = optimizer.state_json()
    step(optimizer)
    optimizer.load_state({}, first)
    assert optimizer.inner.param_groups[0]["count"] == 0


def test_a_list_that_grows_in_groups_is_saved() -> None:
    """It was compared with itself, and lost."""
    model = nn.Linear(1, 1)

    class Remembers(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["losses"].append(float(len(self.param_groups[0]["losses"])))

    def made() -> TorchOptimizer:
        return TorchOptimizer(Remembers([{"params": list(model.parameters()), "losses": []}], lr=0.1), model)

    optimizer = made()
    first = json.loads(json.dumps(optimizer.state_json()))
    step(optimizer), step(optimizer)
    resumed = made()
    resumed.load_state({}, json.loads(json.dumps(optimizer.state_json())))
    step(resumed)
    assert resumed.inner.param_groups[0]["losses"] == [0.0, 1.0, 2.0]
    resumed.load_state({}, first)
    step(resumed)
    resumed.load_state({}, first)
    assert resumed.inner.param_groups[0]["losses"] == []


def test_one_that_is_made_of_others_shares_its_state_with_them() -> None:
    """Muon and AdamW in one: their moments began again at zero in a resumed run, without a word."""
    model = nn.Linear(2, 2)

    class Two(torch.optim.Optimizer):
        def __init__(self, shares: bool) -> None:
            super().__init__(model.parameters(), {"lr": 0.1})
            self.inner = [torch.optim.AdamW([model.weight]), torch.optim.AdamW([model.bias])]
            for one in self.inner if shares else ():
                one.state = self.state

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for one in self.inner:
                one.step()

    with pytest.raises(UserError, match="Two holds another optimizer, AdamW, whose state would not be saved"):
        TorchOptimizer(Two(shares=False), model)
    optimizer, resumed = TorchOptimizer(Two(shares=True), model), TorchOptimizer(Two(shares=True), model)
    step_with_gradients(optimizer)
    assert {name.rpartition(".")[0] for name in optimizer.state_tensors()} == {"weight", "bias"}
    resumed.load_state(optimizer.state_tensors(), optimizer.state_json())
    assert resumed.inner.inner[0].state[model.weight]["exp_avg"].eq(0.1).all()  # type: ignore[attr-defined]


def test_one_whose_step_needs_a_closure_is_refused() -> None:
    """The run was made, and ended in its first step by a TypeError."""
    model = nn.Linear(1, 1)
    with pytest.raises(UserError, match=r"LBFGS\.step needs closure, but a training step computes gradients once"):
        TorchOptimizer(torch.optim.LBFGS(model.parameters()), model)


def test_a_key_with_a_dot_comes_back_and_one_that_is_no_text_is_refused() -> None:
    model, optimizer = wrapped()
    optimizer.inner.state[model.weight] = {"a.b": torch.ones(2)}
    step(optimizer)
    other, resumed = wrapped()
    resumed.load_state(optimizer.state_tensors(), optimizer.state_json())
    assert resumed.inner.state[other.weight]["a.b"].equal(torch.ones(2))
    optimizer.inner.state[model.weight] = {0: torch.ones(2)}
    with pytest.raises(UserError, match="CountsInGroups keeps state under 0: use strings as keys"):
        step(optimizer)


def test_a_count_that_cannot_be_saved_is_refused_at_once() -> None:
    with pytest.raises(UserError, match="CountsInGroups keeps a Tensor as 'count' in its param_groups"):
        wrapped(torch.zeros(2))
    _, optimizer = wrapped(torch.inf)
    step(optimizer)
    optimizer.inner.param_groups[0]["count"] = -torch.inf
    with pytest.raises(UserError, match="keeps a float as 'count'"):
        step(optimizer)


@pytest.mark.parametrize("value", [[torch.zeros(2)], (1, 2), {1: 2}, torch.inf])
def test_a_state_that_cannot_be_saved_is_refused_at_the_first_step(value: object) -> None:
    """The run trained to its end, and was lost when it was to be saved."""
    model, optimizer = wrapped()
    optimizer.inner.state[model.weight] = {"step": 1, "moment": torch.zeros(2), "names": ["a"]}
    step(optimizer)
    optimizer.inner.state[model.weight]["Q"] = value
    with pytest.raises(UserError, match=f"CountsInGroups keeps a {type(value).__name__} as 'Q' in its state"):
        step(optimizer)


def test_a_state_of_no_weight_is_refused_at_the_first_step() -> None:
    """Checkpoints did not contain it, and nothing said so."""
    _, optimizer = wrapped()
    optimizer.inner.state["global"] = {"k": 1}  # type: ignore[index]
    with pytest.raises(UserError, match="CountsInGroups keeps state of 'global', which is no weight"):
        step(optimizer)


def test_a_state_of_other_groups_is_refused() -> None:
    _, optimizer = wrapped()
    with pytest.raises(UserError, match="of 2 param_groups, but this CountsInGroups has 1"):
        optimizer.load_state({}, optimizer.state_json() | {"groups": [{}, {}]})


class Keeps(torch.optim.SGD):
    """Of numbers and tensors beside its state, which a resumed run does not have."""

    def __init__(self, model: nn.Module, after_step: Callable[[Any], object]) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.after_step, self.weights = after_step, list(model.parameters())
        self.t, self.best, self.mean, self.means = 0, float("nan"), torch.zeros(2), {"a": [torch.zeros(2)]}
        self.counts, self.ready = np.zeros(2), False
        self.other = torch.optim.SGD(model.parameters())
        self.other.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.after_step(self)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda one: setattr(one, "t", one.t + 1), "t"),
        (lambda one: one.counts.__iadd__(1), "counts"),
        (lambda one: one.mean.add_(1), "mean"),
        (lambda one: setattr(one, "mean", one.mean + 1), "mean"),
        (lambda one: one.means["a"][0].add_(1), "means"),
        (lambda one: setattr(one.other, "defaults", {**one.other.defaults, "k": 1}), "defaults"),
    ],
)
def test_an_attribute_that_a_step_changes_is_refused_at_once(change: Callable[[Any], object], name: str) -> None:
    """A resumed run began again to count, without a word."""
    model = nn.Linear(1, 1)
    optimizer = TorchOptimizer(Keeps(model, change), model)
    with pytest.raises(UserError, match=f"Keeps changes its attribute {name}, which checkpoints lack: keep it in its"):
        step_with_gradients(optimizer)


def test_an_attribute_that_the_first_step_makes_is_refused_where_the_second_changes_it() -> None:
    model = nn.Linear(1, 1)
    optimizer = TorchOptimizer(Keeps(model, lambda one: setattr(one, "k", getattr(one, "k", 0) + 1)), model)
    step_with_gradients(optimizer)
    with pytest.raises(UserError, match="changes its attribute k"):
        step_with_gradients(optimizer)


@pytest.mark.parametrize(
    "change",
    [
        lambda _: None,
        lambda one: setattr(one, "ready", True),  # bitsandbytes
        lambda one: one.__dict__.setdefault("room", torch.zeros(2)),
    ],
)
def test_attributes_that_stay_are_no_state(change: Callable[[Any], object]) -> None:
    """And what the first step prepares."""
    model = nn.Linear(1, 1)
    optimizer = TorchOptimizer(Keeps(model, change), model)
    step_with_gradients(optimizer), step_with_gradients(optimizer)


@pytest.mark.parametrize("options", [{}, {"fused": True, "momentum": 0.9}, {"foreach": True}])
def test_torchs_own_attributes_may_change(options: dict[str, Any]) -> None:
    model = nn.Linear(1, 1)
    optimizer = TorchOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, **options), model)
    step_with_gradients(optimizer), step_with_gradients(optimizer)


def test_a_scheduler_of_its_rates_is_refused() -> None:
    """The schedule of the run sets the rates; the message was of a missing `self`."""
    model = nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(inner, 1)
    with pytest.raises(UserError, match=r"SGD has a torch\.optim\.lr_scheduler, but the run's schedule sets its rates"):
        TorchOptimizer(inner, model)


def test_groups_without_a_rate_are_refused() -> None:
    class NoRate(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(model.parameters(), {})

    model = nn.Linear(1, 1)
    with pytest.raises(UserError, match="NoRate has a group without 'lr', which the schedule multiplies"):
        TorchOptimizer(NoRate(), model)


def test_an_array_in_groups_is_refused() -> None:
    _, optimizer = wrapped()
    optimizer.inner.param_groups[0]["sums"] = np.zeros(2)
    with pytest.raises(UserError, match="CountsInGroups keeps a ndarray as 'sums' in its param_groups"):
        step(optimizer)
