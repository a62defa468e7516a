"""What run.json says of the functions that a Python caller gives."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from gptlab.app.run.own_parts import OwnParts


def plain(model: nn.Module) -> None:
    pass


def rescaled(model: nn.Module, x: float = 1.0, *, y: Any = None) -> None:
    pass


def around(x: object) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        rescaled(model, y=x)

    return change


def with_default(x: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module, x: float = x) -> None:
        rescaled(model, y=x)

    return change


class Change:
    def __init__(self, x: float) -> None:
        self.x = x

    def __call__(self, model: nn.Module) -> None:
        rescaled(model, self.x)

    def bound(self, model: nn.Module) -> None:
        rescaled(model, self.x)


def identity(part: Callable[..., Any]) -> Any:
    return OwnParts(change_model=part).facts()["own_parts"]["change_model"]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (around, "around.<locals>.change"),
        (lambda x: around({"rates": [x, (1, "a")]}), "around.<locals>.change"),
        (lambda x: around(around(x)), "around.<locals>.change"),
        (lambda x: around(torch.sin if x == 1 else torch.cos), "around.<locals>.change"),
        (with_default, "with_default.<locals>.change"),
        (lambda x: partial(rescaled, x=x), "rescaled"),
        (lambda x: partial(rescaled, y=around(x)), "rescaled"),
        (Change, "Change"),
        (lambda x: Change(x).bound, "Change.bound"),
    ],
)
def test_functions_of_one_source_differ_by_what_they_hold(make: Callable[[float], Any], name: str) -> None:
    one, again, other = identity(make(1.0)), identity(make(1.0)), identity(make(0.01))
    assert one["name"] == other["name"] == f"test_own_parts.{name}"
    assert one["sha256"] == again["sha256"] is not None
    assert one["sha256"] != other["sha256"]


def test_what_holds_nothing_is_its_source() -> None:
    """As in runs of earlier versions."""
    assert identity(plain)["sha256"] == hashlib.sha256(inspect.getsource(plain).encode()).hexdigest()


def test_what_has_no_text_is_named_by_its_type() -> None:
    """So that the source is still told: two tensors of other numbers are alike."""
    assert identity(around(torch.ones(2))) == identity(around(torch.zeros(3))) != identity(around(1.0))


def test_a_function_that_has_no_source() -> None:
    assert identity(eval("lambda model: None"))["sha256"] is None

    def itself(model: nn.Module) -> None:
        itself(model)

    assert identity(itself)["sha256"] is None
