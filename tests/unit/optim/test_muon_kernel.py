"""Muon by its C++ kernels on CPUs: against PyTorch's operations in float64, which other tests compare with the
originals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.config.optim import MuonConfig, Orthogonalizer
from gptlab.model.kernels import fused, muon_kernel, ops
from gptlab.optim.muon import Muon
from gptlab.optim.orthogonalize import orthogonalize
from gptlab.runtime.hardware.device import compiler_available

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not compiler_available(CPU), reason="no C++ compiler here")

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = {"gate": (2, 32), "qkv": (50, 16), "out": (16, 16), "up": (70, 16), "down": (16, 70), "odd": (7, 33)}
"""Of `qkv`, three parts. Less and more than a tile and a vector, and odd depths."""
SPLITS = {"qkv": (16, 17, 17)}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"scaled_decay": True, "update_scale": "max_side", "nesterov": False},
    {"normuon_beta2": None, "cautious_decay": False, "orthogonalizer": "newton_schulz"},
    {"weight_decay": 0.0, "iterations": 3},
]
IDS = ["default", "scaled", "plain", "no-decay"]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with ops.implementations_kept():
        for dtype in reversed(DTYPES):
            ops.load_kernels(CPU, dtype)
        yield


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def trained(settings: dict[str, Any], compute: torch.dtype, *, master: torch.dtype = torch.float32) -> Muon:
    """After three steps, with other rates in each."""
    weights = {name: Parameter(random(*shape, seed=i).to(master)) for i, (name, shape) in enumerate(SHAPES.items())}
    muon = Muon(weights, MuonConfig(**{"lr": 0.1, **settings}), compute_dtype=compute, row_splits=SPLITS)
    for step in range(3):
        for i, (name, shape) in enumerate(SHAPES.items()):
            weights[name].grad = random(*shape, seed=100 + 10 * step + i).to(master)
        muon.step(1.0 - step / 10, 0.85 + step / 20, 1.0 - step / 10)
    return muon


def tensors(muon: Muon) -> dict[str, Tensor]:
    return {**{name: p.detach() for name, p in muon.parameters.items()}, **muon.state_tensors()}


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 3), (2, 31, 64), (2, 33, 32), (1, 200, 12), (2, 130, 131)])
@pytest.mark.parametrize("backend", ["polar_express", "newton_schulz"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_orthogonalize(
    shape: tuple[int, ...], backend: Orthogonalizer, dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The polynomials magnify rounding errors: the distance to float64 is limited by that of PyTorch's operations in
    the same type."""
    stack = random(*shape, seed=1)
    assert ops.orthogonalization(stack, dtype) is muon_kernel
    ours = orthogonalize(stack, backend, dtype=dtype)
    exact = orthogonalize(stack.double(), backend, dtype=torch.float64)
    monkeypatch.setattr(ops, "_products", "library")
    assert ops.orthogonalization(stack, dtype) is None
    theirs = orthogonalize(stack, backend, dtype=dtype)
    off, usual = ((x - exact).norm() / exact.norm() for x in (ours, theirs))
    assert off < error
    assert off < 1.5 * usual + 1e-6


def test_a_column_by_hand() -> None:
    """As in test_orthogonalize: five steps take 5 / (5 * 1.02 + 1e-6) to 0.903568. Zero stays zero."""
    stack = torch.tensor([[[3.0], [0.0], [4.0]], [[0.0], [0.0], [0.0]]])
    found = orthogonalize(stack, "polar_express", dtype=torch.float32)
    torch.testing.assert_close(found[0], 0.903568 * torch.tensor([[0.6], [0.0], [0.8]]), rtol=1e-5, atol=0)
    assert torch.equal(found[1], torch.zeros(3, 1))


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_steps_are_those_of_float64(settings: dict[str, Any]) -> None:
    """But for decay where an update is almost zero, whose sign decides."""
    ours, exact = trained(settings, torch.float32), trained(settings, torch.float64, master=torch.float64)
    for name, tensor in tensors(exact).items():
        off = (tensors(ours)[name] - tensor).abs()
        differ = off > 1e-4 * tensor.abs() + 1e-5
        # A step decays a weight of up to 4 by lr * weight_decay * scale * 4; the scale of `max_side` is up to sqrt(70).
        is_weight = name in exact.parameters
        assert differ.double().mean() < (0.005 if is_weight else 1e-9), name
        assert off.max() < 0.1 * MuonConfig().weight_decay * math.sqrt(70) * 4, name


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_steps_in_bfloat16(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only products are rounded, and updates are as far from those of float32 as PyTorch's."""
    exact, ours = trained(settings, torch.float32), trained(settings, torch.bfloat16)
    monkeypatch.setattr(ops, "_products", "library")
    theirs = trained(settings, torch.bfloat16)
    for name, weight in exact.parameters.items():
        off, usual = ((one.parameters[name] - weight).norm() for one in (ours, theirs))
        assert 0 < off < 1.5 * usual, name
        assert torch.equal(ours.state_tensors()[f"{name}.momentum"], exact.state_tensors()[f"{name}.momentum"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_neither_on_threads_nor_on_other_matrices(dtype: torch.dtype) -> None:
    """Large enough for several threads."""
    stack = random(6, 64, 160, seed=1)
    moments, means = torch.rand(6, 1, 160), random(6, 64, 160, seed=2)

    def computed(chosen: slice) -> list[Tensor]:
        update = orthogonalize(stack[chosen], "polar_express", dtype=dtype)
        moved, weights, mean = moments[chosen].clone(), stack[chosen].clone(), means[chosen].clone()
        muon_kernel.even_out(update, moved, 0.9, 1.5)
        directions = muon_kernel.directions(mean.unbind(), stack[chosen].unbind(), 0.95, True)
        muon_kernel.step(weights.unbind(), update.unbind(), 0.1, 0.2, True)
        return [update, moved, weights, mean, directions]

    expected = computed(slice(None))
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, computed(slice(None)), expected))
    assert all(torch.equal(one, of_all[2:3]) for one, of_all in zip(computed(slice(2, 3)), expected, strict=True))


def test_a_matrix_that_is_not_finite_spoils_no_other() -> None:
    """In one thread, which clears the padding that the one before left."""
    torch.set_num_threads(1)
    stack = random(2, 5, 33, seed=1)
    alone = orthogonalize(stack[1:], "polar_express", dtype=torch.bfloat16)
    stack[0] = torch.nan
    assert torch.equal(orthogonalize(stack, "polar_express", dtype=torch.bfloat16)[1:], alone)


def test_torchs_default_type_does_not_matter() -> None:
    expected = tensors(trained({}, torch.float32))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = tensors(trained({}, torch.float32))
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_update_that_is_not_made_changes_nothing() -> None:
    muon, same = trained({}, torch.float32), trained({}, torch.float32)
    for parameter in same.parameters.values():
        cast(Tensor, parameter.grad).fill_(torch.nan)
    same.step(1.0, 0.9, 1.0, torch.tensor(False))
    assert all(map(torch.equal, tensors(same).values(), tensors(muon).values()))
    for one, made in ((muon, None), (same, torch.tensor(True))):
        for i, (name, shape) in enumerate(SHAPES.items()):
            one.parameters[name].grad = random(*shape, seed=i)
        one.step(1.0, 0.9, 1.0, made)
    assert all(map(torch.equal, tensors(same).values(), tensors(muon).values()))


def test_tensors_in_another_order() -> None:
    """A gradient in the order of columns is read as it is; PyTorch updates such a weight."""
    given = random(4, 6, seed=1)
    rows, columns = Parameter(given.clone()), Parameter(given.t().contiguous().t())
    assert not columns.is_contiguous()
    expected = Muon({"w": rows}, MuonConfig(), compute_dtype=torch.float32, row_splits={})
    ours = Muon({"w": columns}, MuonConfig(), compute_dtype=torch.float32, row_splits={})
    rows.grad = random(6, 4, seed=2).t()
    columns.grad = rows.grad
    expected.step(1.0, 0.95, 1.0)
    ours.step(1.0, 0.95, 1.0)
    torch.testing.assert_close(columns.detach(), rows.detach(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(rows.detach(), given)


def test_kernels_take_what_they_are_made_for() -> None:
    x = torch.zeros(2, 3, 4)
    assert ops.muon_kernels(x) is muon_kernel
    assert ops.muon_kernels(x, x.mT) is ops.muon_kernels(x.double()) is ops.muon_kernels(x.to("meta")) is None
    assert ops.orthogonalization(x, torch.float64) is ops.orthogonalization(x.double(), torch.float32) is None
    assert ops.orthogonalization(x[0], torch.float32) is ops.orthogonalization(x[None], torch.float32) is None


def test_gradients_of_another_type_and_another_default_device() -> None:
    """Addresses were put on the default device, and gradients in bfloat16 read as float32."""
    ops.load_kernels(CPU, torch.float32)
    gradient = torch.randn(16, 8, generator=torch.Generator().manual_seed(5)).bfloat16()
    means = [torch.zeros(16, 8) for _ in range(2)]
    torch.set_default_device("meta")
    try:
        found = muon_kernel.directions(means[:1], [gradient], 0.9, True)
        squares = fused.sum_of_squares([gradient.float()])
    finally:
        torch.set_default_device(None)
    expected = muon_kernel.directions(means[1:], [gradient.float()], 0.9, True)
    assert torch.equal(found, expected)
    assert torch.equal(*means)
    assert float(squares) == pytest.approx(float(gradient.double().square().sum()), rel=1e-12)


def test_autograd_notices_that_weights_moved() -> None:
    """A backward pass after the step must fail, instead of taking the new weights for those of its forward pass."""
    weight, x = Parameter(random(16, 16, seed=1)), torch.ones(16, 16, requires_grad=True)
    loss = (x @ weight).sum()
    weight.grad = random(16, 16, seed=2)
    Muon({"w": weight}, MuonConfig(), compute_dtype=torch.float32, row_splits={}).step(1.0, 0.9, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
