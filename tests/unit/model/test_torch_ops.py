"""What PyTorch computes and keeps between matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gptlab.model.kernels import torch_ops


def kept_by(function: Callable[[], Any]) -> tuple[Any, set[int]]:
    """Its result, and the addresses of what it keeps for the backward pass."""
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        return function(), kept


def test_squared_relu_keeps_its_result_alone() -> None:
    """By hand: the slope of x^2 is 2 x, and 0 where x is not positive."""
    x = torch.tensor([-3.0, -0.0, 0.0, 0.5, 2.0, 1e-20], dtype=torch.float64, requires_grad=True)
    y, kept = kept_by(lambda: torch_ops.relu2(x))
    assert kept == {y.untyped_storage().data_ptr()}
    (slope,) = torch.autograd.grad(y, x, torch.tensor([1.0, 1, 1, 1, 10, 1], dtype=torch.float64))
    assert torch.equal(y, torch.tensor([0.0, 0, 0, 0.25, 4, 1e-40], dtype=torch.float64))
    torch.testing.assert_close(slope, torch.tensor([0.0, 0, 0, 1, 40, 2e-20], dtype=torch.float64), rtol=1e-15, atol=0)


def test_heads_that_a_gpu_prepares_do_not_keep_the_product_that_they_were_slices_of() -> None:
    """They keep queries and keys, as attention does. Half of nanochat's layers add to the values, so that these are no
    slices either."""
    product = torch.randn(2, 5, 4, 6, requires_grad=True).clone()  # two heads, one of keys and one of values
    gates, value = torch.randn(2, 5, 1), torch.randn(2, 5, 6)
    rotary = torch.randn(5, 3), torch.randn(5, 3)
    (q, k, _), kept = kept_by(lambda: torch_ops.prepare_heads_apart(product, 2, gates, value, rotary, 1e-6))
    assert product.untyped_storage().data_ptr() not in kept
    assert {one.untyped_storage().data_ptr() for one in (q, k)} <= kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gradients_are_those_of_the_operations(dtype: torch.dtype) -> None:
    """torch 2.11 compiled other ones for queries and keys in float32, whose last cast is none."""

    def loss(heads: Tensor) -> Tensor:
        q, k, v = torch_ops.prepare_heads_apart(heads, 2, None, None, rotary, 1e-6)
        return torch_ops.relu2(torch.cat((q, k, v), dim=2).float() * ramp).sum()

    rotary, ramp = (torch.randn(5, 3), torch.randn(5, 3)), torch.arange(6.0)
    compiled = torch.compile(loss, dynamic=False, backend="aot_eager")
    given = torch.randn(2, 5, 4, 6).to(dtype)
    mine, theirs = (
        torch.autograd.grad(function(one), one)[0]
        for function, one in ((loss, given.clone().requires_grad_()), (compiled, given.clone().requires_grad_()))
    )
    torch.testing.assert_close(theirs, mine)
