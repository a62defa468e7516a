"""The norm of the gradients, and what is not finite in them: the same on every rank, for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from ranks_in_turn import in_turn
from tiny_runs import make_config, write_corpus
from torch import Tensor

from gptlab.app.run.session import open_session
from gptlab.config.run import RunConfig
from gptlab.data.rows import RowSource
from gptlab.model.kernels import fused, ops
from gptlab.model.kernels.ops import load_kernels
from gptlab.optim.gradient_norm import clip_gradients, joint_norm
from gptlab.runtime.hardware.device import compiler_available
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console
from gptlab.training.parallel.zero import Zero
from gptlab.training.state import build_state

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rows_and_config(tmp_path_factory: pytest.TempPathFactory) -> tuple[RowSource, RunConfig]:
    folder = tmp_path_factory.mktemp("norms")
    write_corpus(folder / "corpus")
    config = make_config(folder, "never-made")
    with Console() as console:
        session = open_session(config, place_of(config), console)
    return session.state.loader.rows, session.config


def gradients(scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(shape, generator=generator) for shape in ((7, 5), (300,), (64, 33), ())]


def oracle(of: list[Tensor]) -> float:
    """In NumPy's long double, whose range is that of nobody here."""
    whole = np.concatenate([tensor.numpy().astype(np.longdouble).reshape(-1) for tensor in of])
    return float(np.sqrt((whole * whole).sum()))


def divided(group: Group, of: list[Tensor]) -> float:
    """As rank r of a group that has every r-th gradient to itself; the last of five ranks has none."""
    strategy = SimpleNamespace(group=group, _device=CPU)
    return float(Zero.total_norm(cast(Any, strategy), of[group.rank :: group.size]))


def sharded(group: Group, of: list[Tensor]) -> float:
    """The first two gradients are cut by rows among the ranks; the others all ranks have."""
    rows = [torch.tensor_split(tensor, group.size)[group.rank] for tensor in of[:2]]
    shards = {str(number): SimpleNamespace(is_cut=number < 2) for number in range(len(of))}
    from gptlab.training.parallel.fsdp import Fsdp, OneCopy  # not where the tests are only collected: it takes a second

    strategy = SimpleNamespace(group=group, _device=CPU, shards=shards, _copy=OneCopy(group, group.size))
    return float(Fsdp.total_norm(cast(Any, strategy), [*rows, *of[2:]]))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e25], ids=["usual", "tiny", "squares no float32 holds"])
@pytest.mark.parametrize("norm", [divided, sharded], ids=lambda f: f.__name__)
def test_one_precision_for_any_number_of_ranks(norm: Callable[..., float], scale: float) -> None:
    """In float64 the order of additions shows in the 15th digit; in float32 a norm of 1e27 is infinite, and the step
    would be skipped with one process and not with two."""
    of = gradients(scale)
    expected = oracle(of)
    assert float(joint_norm(of)) == pytest.approx(expected, rel=1e-14)
    for size in (2, 3, 5):
        assert in_turn(size, lambda group: norm(group, of)) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("sizes", [[0, 1, 17, 16384, 16385, 100_000], [3], [0]])
def test_by_a_kernel_or_by_pytorch(sizes: list[int], kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of many sizes, in parts and less than a vector; whatever the number of threads, with the same bits."""
    load_kernels(CPU, torch.float32)
    called: list[object] = []
    by_kernel = fused.sum_of_squares
    monkeypatch.setattr(fused, "sum_of_squares", lambda tensors: called.append(0) or by_kernel(tensors))
    if not kernels:
        monkeypatch.setattr(ops, "_fused", None)
    generator = torch.Generator().manual_seed(2)
    of = [torch.randn(n, generator=generator) * 10.0 ** (number - 3) for number, n in enumerate(sizes)]
    threads, found = torch.get_num_threads(), set()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.add(float(joint_norm(of)))
    finally:
        torch.set_num_threads(threads)
    assert len(called) == (3 if kernels and compiler_available(CPU) else 0)
    assert len(found) == 1 or not called
    assert found.pop() == pytest.approx(oracle(of), rel=1e-14 if called else 1e-12)


def test_gradients_of_other_types_and_layouts() -> None:
    """What a caller's own parts may leave: PyTorch reads them."""
    load_kernels(CPU, torch.float32)
    between = torch.full((3, 10), 9.0)
    between[:, ::2] = 2
    for one in (torch.full((3, 5), 2.0).t(), between[:, ::2], torch.full((15,), 2.0, dtype=torch.float64)):
        assert float(joint_norm([one, torch.full((1,), 2.0, dtype=one.dtype)])) == 8.0


def test_clipping_knows_no_overflow_either() -> None:
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients(1e25)]
    for parameter, gradient in zip(parameters, gradients(1e25), strict=True):
        parameter.grad = gradient
    assert clip_gradients(parameters, 1.0) == pytest.approx(oracle(gradients(1e25)))
    assert oracle([p.grad for p in parameters if p.grad is not None]) == pytest.approx(1.0)


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_all_ranks_see_what_is_not_finite_in_one_ranks_share(
    rows_and_config: tuple[RowSource, RunConfig], owner: int, value: float
) -> None:
    """One element of one parameter of one owner; the third rank, all of whose gradients are finite, is asked."""
    rows, config = rows_and_config
    broken: list[str] = []

    def ask(group: Group) -> tuple[float, str | None, float]:
        options: dict[str, Any] = {"device": CPU, "compute_dtype": torch.float16, "group": group}
        zero = build_state(config, rows, **options).strategy
        leaves = zero.updated_weights()
        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf)
        if group.rank == owner:
            key, leaf = list(zero.optimizer.parameters.items())[len(leaves) // 2]
            broken.append(key.partition("@")[0])
            cast(Tensor, leaf.grad).view(-1)[-1] = value
        norm = clip_gradients(leaves, 1.0, zero.total_norm)
        named = zero.first_broken_gradient()
        untouched = max(float((cast(Tensor, leaf.grad) - 1).abs().max()) for leaf in leaves)
        return norm, named, untouched

    norm, named, untouched = in_turn(3, ask)
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf
    assert [named] == broken
    assert untouched == 0.0, "what is not finite clips nothing"
