"""The head's loss in one pass against cross-entropy by autograd, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import gptlab.model.head
from gptlab.config.run import Products
from gptlab.model.head import SLICES_IN_TURN, HeadLoss
from gptlab.model.kernels import ops, torch_ops

POSITIONS, WIDTH, ENTRIES, PADDED = 37, 8, 11, 16


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(POSITIONS, WIDTH, generator=generator, dtype=torch.float64)
    weight = 3 * torch.randn(PADDED, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(ENTRIES, (POSITIONS,), generator=generator)
    targets[::5] = -1
    return x.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("cap", [None, 15.0, 2.0])
@pytest.mark.parametrize(("slice_logits", "max_slices"), [(2**21, 16), (1, 3), (5 * PADDED, 1000), (1, 1000)])
def test_loss_and_gradients_are_those_of_cross_entropy(
    cap: float | None, slice_logits: int, max_slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one slice, in three of 13, 13 and 11 positions, in slices of 5 with a rest of 2, and one by one."""
    monkeypatch.setattr(gptlab.model.head, "SLICE_LOGITS", slice_logits)
    monkeypatch.setattr(gptlab.model.head, "MAX_SLICES", max_slices)
    x, weight, targets = inputs()
    loss = HeadLoss.apply(x, weight, targets, ENTRIES, cap)
    (loss / 7).backward()
    ours = (loss.detach(), x.grad, weight.grad)

    x, weight, targets = inputs()
    logits = x @ weight[:ENTRIES].t()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    (expected / 7).backward()
    for mine, theirs in zip(ours, (expected.detach(), x.grad, weight.grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cap", [2.0, 15.0, torch_ops.HIGHEST_CAP])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bounded_logits_of_a_gpu_have_the_same_loss_and_gradient(cap: float, dtype: torch.dtype) -> None:
    """Up to 20 times the cap, with padding and targets that do not count; also a row that is flat at either end."""
    logits = 5 * cap * torch.randn(POSITIONS, PADDED, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits[0], logits[1], logits[2, 3] = -20 * cap, 20 * cap, 1e6
    targets = inputs()[2]
    nats, gradient = torch_ops.loss_and_gradient(logits, targets, ENTRIES, cap)
    found = torch_ops._loss_and_gradient_of_bounded(logits.to(dtype), targets, ENTRIES, cap)
    error = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, (nats.to(dtype), gradient.to(dtype)), rtol=error, atol=error)


def test_logits_of_a_gpu_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "_loss_and_gradient_of_bounded", lambda *inputs: inputs)
    logits, targets = torch.zeros(2, 8, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    assert len(torch_ops.loss_and_gradient(logits, targets, 8, torch_ops.HIGHEST_CAP)) == 4
    assert len(torch_ops.loss_and_gradient(logits, targets, 8, torch_ops.HIGHEST_CAP + 1)) == 2
    assert len(torch_ops.loss_and_gradient(logits, targets, 8, None)) == 2


@pytest.mark.parametrize("products", ["kernels", "library"])
def test_the_loss_of_bfloat16_is_summed_in_float32(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 losses add up to about 2300: bfloat16 keeps 8 bits, and its sums stop growing where a term is less than half
    of their last one. From the same logits, which the library rounds, float32 differs from float64 by a few 1e-7; the
    kernels' exponentials by up to 4e-6."""
    monkeypatch.setattr(ops, "_products", products)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, WIDTH, generator=generator).bfloat16()
    weight = (3 * torch.randn(PADDED, WIDTH, generator=generator)).bfloat16()
    targets = torch.randint(ENTRIES, (300,), generator=generator)
    loss = HeadLoss.apply(x, weight, targets, ENTRIES, 15.0)
    weight = weight[:ENTRIES]
    rounded = ops.multiplication(x) is torch_ops
    logits = (x @ weight.t()).double() if rounded else x.double() @ weight.double().t()
    logits = 15 * torch.tanh(logits / 15)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(F.cross_entropy(logits, targets, reduction="sum").item(), rel=1e-5)


@pytest.mark.parametrize(
    ("slice_logits", "sizes"),
    [
        (2**21, [37]),
        (5 * PADDED, [5] * 7 + [2]),
        (1, [17] * 16),  # 272 positions: one by one would be 272 slices
    ],
)
def test_a_slice_holds_so_many_logits_and_there_are_sixteen_at_most(
    slice_logits: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More at a time would not stay in the cache, and a compiled graph holds each slice."""
    found = []
    whole = torch_ops.loss_and_gradient

    def counted(z: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(len(z))
        return whole(z, *rest)

    monkeypatch.setattr(torch_ops, "loss_and_gradient", counted)
    monkeypatch.setattr(gptlab.model.head, "SLICE_LOGITS", slice_logits)
    x, weight, targets = inputs()
    HeadLoss.apply(x.repeat(8, 1)[: sum(sizes)], weight, targets.repeat(8)[: sum(sizes)], ENTRIES, None)
    assert found == sizes


def test_one_case_by_hand() -> None:
    """Two entries with logits 0 and ln 3: probabilities 1/4 and 3/4, loss ln 4 for the first, gradient (-3/4, 3/4)."""
    x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3.0)]], dtype=torch.float64, requires_grad=True)
    loss = HeadLoss.apply(x, weight, torch.tensor([0]), 2, None)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(4.0), abs=1e-14)
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([-0.75, 0.75], abs=1e-14)


def test_logits_beyond_the_range_of_exp_are_capped() -> None:
    x = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = HeadLoss.apply(x, weight, torch.tensor([1, 1]), 2, 15.0)
    loss.backward()
    # Capped logits are (15, -15) and (-15, 15): losses of 30 and of 1e-13, and no slope left in either.
    assert loss.item() == pytest.approx(30.0, abs=1e-5)
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize(("device", "regions"), [("cpu", 0), ("meta", 3 * SLICES_IN_TURN)])
def test_what_is_compiled_for_gpus_has_one_region_for_all_slices(
    device: str, regions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, whose wrapper cannot hold a region, slices are parts of the graph. A meta tensor stands for a GPU's."""
    monkeypatch.setattr(gptlab.model.head, "SLICE_LOGITS", 1)
    monkeypatch.setattr(gptlab.model.head, "MAX_SLICES", 3)
    called: list[str] = []

    def backend(whole: fx.GraphModule, _: Sequence[torch.Tensor]) -> Callable[..., Any]:
        graphs = [module.graph for module in whole.modules() if isinstance(module, fx.GraphModule)]
        nodes = (node for graph in graphs for node in graph.nodes if str(node.target) == "invoke_subgraph")
        called.extend(str(node.args[1]) for node in nodes)
        return whole.forward

    x, weight = torch.zeros(6, 8, device=device), torch.zeros(16, 8, device=device)
    targets = torch.zeros(6, dtype=torch.int64, device=device)
    torch.compile(HeadLoss.apply, backend=backend)(x.requires_grad_(), weight.requires_grad_(), targets, 16, None)
    assert (len(called), len({*called})) == (regions, min(regions, 1))
