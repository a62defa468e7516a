from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import oracle_optim
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.config.optim import AdamWConfig, MuonConfig, OptimConfig, Role
from gptlab.config.recipes import autoresearch
from gptlab.optim.combined import CombinedOptimizer, build_optimizer, role_config
from gptlab.optim.gradient_norm import clip_gradients

SHAPES: dict[str, tuple[tuple[int, ...], Role]] = {
    "embedding.weight": ((10, 8), Role.EMBEDDING),
    "position.weight": ((6, 8), Role.POSITION_EMBEDDING),
    "value_embedding.weight": ((10, 8), Role.VALUE_EMBEDDING),
    "h.0.qkv.weight": ((24, 8), Role.MATRIX),
    "h.0.proj.weight": ((8, 8), Role.MATRIX),
    "h.0.fc.weight": ((32, 8), Role.MATRIX),
    "h.0.out.weight": ((8, 32), Role.MATRIX),
    "h.1.proj.weight": ((8, 8), Role.MATRIX),
    "residual_lambdas": ((2,), Role.RESIDUAL_LAMBDA),
    "x0_lambdas": ((2,), Role.X0_LAMBDA),
    "norm.weight": ((8,), Role.VECTOR),
    "head.weight": ((10, 8), Role.HEAD),
}

Weights = dict[str, torch.nn.Parameter]


def make_weights(dtype: torch.dtype = torch.float32) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for n, (s, _) in SHAPES.items()}


def make(weights: Weights, config: OptimConfig | None = None, **arguments: Any) -> CombinedOptimizer:
    arguments.setdefault("compute_dtype", torch.float32)
    if "h.0.qkv.weight" in weights:
        arguments.setdefault("row_splits", {"h.0.qkv.weight": (8, 8, 8)})
    triples = [(name, p, SHAPES[name][1]) for name, p in weights.items()]
    return build_optimizer(triples, config or OptimConfig(), **arguments)


def set_gradients(weights: Weights, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in weights.values():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def train(optimizer: CombinedOptimizer, weights: Weights, steps: range) -> None:
    for step in steps:
        set_gradients(weights, step)
        optimizer.step(lr_scale=1.0 - step / 10, momentum=0.85 + step / 100, weight_decay_scale=1.0 - step / 10)
        optimizer.zero_grad()


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


MUONS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain": {"normuon_beta2": None, "weight_decay": 0.0},
    "heavy-ball": {"nesterov": False, "cautious_decay": False},
    "newton-schulz": {"orthogonalizer": "newton_schulz", "update_scale": "rms"},
    "svd-whole": {"orthogonalizer": "svd", "update_scale": "max_side", "split_qkv": False},
}


@pytest.mark.parametrize("saved_at", [0, 1, 3])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*MUONS, "adamw"])
def test_resume_is_bitwise(kind: str, compute_dtype: torch.dtype, saved_at: int, tmp_path: Path) -> None:
    """Saved before the first step, after it, and later, in a checkpoint's formats; compared three steps after it."""
    muon = MuonConfig(**MUONS.get(kind, {}))
    config = OptimConfig(matrix_optimizer="adamw" if kind == "adamw" else "muon", muon=muon)
    weights = make_weights()
    optimizer = make(weights, config, compute_dtype=compute_dtype)
    train(optimizer, weights, range(saved_at))
    save_file(optimizer.state_tensors(), tmp_path / "optimizer.safetensors")
    (tmp_path / "state.json").write_text(json.dumps(optimizer.state_json()))
    resumed_weights = {name: torch.nn.Parameter(t) for name, t in copies(weights).items()}
    train(optimizer, weights, range(saved_at, saved_at + 3))

    resumed = make(resumed_weights, config, compute_dtype=compute_dtype)
    resumed.load_state(load_file(tmp_path / "optimizer.safetensors"), json.loads((tmp_path / "state.json").read_text()))
    train(resumed, resumed_weights, range(saved_at, saved_at + 3))
    for name in weights:
        assert torch.equal(weights[name], resumed_weights[name]), name
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, resumed.state_tensors()[name]), name


@pytest.mark.parametrize("moment", ["momentum", "second_moment", "exp_avg", "exp_avg_sq", "step"])
def test_every_saved_part_is_needed(moment: str) -> None:
    weights = make_weights()
    optimizer = make(weights)
    train(optimizer, weights, range(3))
    state = copies(optimizer.state_tensors())
    resumed_weights = {name: torch.nn.Parameter(t) for name, t in copies(weights).items()}
    train(optimizer, weights, range(3, 4))

    resumed = make(resumed_weights)
    without = {name: torch.zeros_like(t) if name.endswith(f".{moment}") else t for name, t in state.items()}
    resumed.load_state(without, resumed.state_json())
    train(resumed, resumed_weights, range(3, 4))
    affected = [name for name in weights if f"{name}.{moment}" in state]
    assert affected
    for name in weights:
        assert torch.equal(weights[name], resumed_weights[name]) == (name not in affected), name


def test_state_is_complete_before_the_first_step() -> None:
    weights = make_weights()
    optimizer = make(weights)
    before = optimizer.state_tensors()
    kinds = {name: {key.removeprefix(f"{name}.") for key in before if key.startswith(f"{name}.")} for name in weights}
    for name, (_, role) in SHAPES.items():
        muon = {"momentum", "second_moment"}
        assert kinds[name] == (muon if role is Role.MATRIX else {"step", "exp_avg", "exp_avg_sq"}), name
    shapes = {name: (t.shape, t.dtype, t.device) for name, t in before.items()}
    train(optimizer, weights, range(2))
    assert {name: (t.shape, t.dtype, t.device) for name, t in optimizer.state_tensors().items()} == shapes
    assert all(t.is_contiguous() and not t.requires_grad for t in optimizer.state_tensors().values())


def test_state_does_not_depend_on_the_order_of_parameters() -> None:
    weights = make_weights(torch.float64)
    optimizer = make(weights, compute_dtype=torch.float64)
    train(optimizer, weights, range(2))
    turned = {name: torch.nn.Parameter(t) for name, t in reversed(copies(weights).items())}
    other = make(turned, compute_dtype=torch.float64)
    other.load_state(copies(optimizer.state_tensors()), optimizer.state_json())
    set_gradients(weights, 9)
    for name, p in turned.items():
        p.grad = weights[name].grad.clone()
    optimizer.step(1.0, 0.9, 1.0)
    other.step(1.0, 0.9, 1.0)
    for name in weights:
        torch.testing.assert_close(weights[name], turned[name])


def test_a_wrong_state_is_refused_and_nothing_changes() -> None:
    weights = make_weights()
    optimizer = make(weights)
    train(optimizer, weights, range(2))
    good, own = copies(optimizer.state_tensors()), optimizer.state_json()
    zeros = {name: torch.zeros_like(t) for name, t in good.items()}
    key = "h.0.proj.weight.momentum"
    unsplit = own | {"row_splits": own["row_splits"] | {"h.0.qkv.weight": [24]}}
    cases: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
        ({n: t for n, t in zeros.items() if n != key}, own, f"{key} is missing"),
        ({}, own, "momentum is missing"),
        (zeros | {"other.momentum": torch.zeros(1)}, own, r"other.momentum is \(1,\) float32, but .* asks for none"),
        (zeros | {key: torch.zeros(8, 4)}, own, r"\(8, 4\) float32, but .* asks for \(8, 8\) float32"),
        (zeros | {key: torch.zeros(8, 8, dtype=torch.bfloat16)}, own, r"\(8, 8\) bfloat16"),
        (zeros, own | {"version": 99}, "version is 99, but .* asks for 1"),
        (zeros, unsplit, r"row_splits.h.0.qkv.weight is \[24\], but .* asks for \[8, 8, 8\]"),
        (zeros, {}, "version is missing"),
        (zeros, own | {"rows": 3}, "rows is 3, but .* asks for none"),
    ]
    for tensors, state, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            optimizer.load_state(tensors, state)
        assert "\n" not in str(caught.value)
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, good[name])


def test_every_role_moves_at_its_own_rate() -> None:
    """AdamW's first step without decay is lr * sign(gradient), so that the distance tells the learning rate."""
    rates = {role: 0.001 * (i + 1) for i, role in enumerate(Role)}
    rates[Role.POSITION_EMBEDDING] = rates[Role.EMBEDDING]
    settings = {role.value: AdamWConfig(lr=lr) for role, lr in rates.items() if role is not Role.POSITION_EMBEDDING}
    config = OptimConfig(matrix_optimizer="adamw", **settings)  # type: ignore[arg-type]
    weights = make_weights()
    before = copies(weights)
    optimizer = make(weights, config)
    set_gradients(weights, 0)
    optimizer.step(0.5, 0.9, 1.0)
    for name, (_, role) in SHAPES.items():
        moved = (before[name] - weights[name].detach()) * weights[name].grad.sign()
        torch.testing.assert_close(moved, torch.full_like(moved, 0.5 * rates[role]), rtol=1e-3, atol=1e-6)


def test_role_config_knows_every_role() -> None:
    config = OptimConfig()
    for role in Role:
        assert isinstance(role_config(config, role), AdamWConfig)


def test_adamw_against_the_hand_written_loop() -> None:
    config = AdamWConfig(lr=0.05, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.3)
    optim = OptimConfig(embedding=config, head=dataclasses.replace(config, lr=0.01, weight_decay=0.0))
    weights = {name: p for name, p in make_weights(torch.float64).items() if "embedding" in name or "head" in name}
    optimizer = make(weights, optim)
    oracles = {}
    for name, p in weights.items():
        c = role_config(optim, SHAPES[name][1])
        oracles[name] = oracle_optim.HandAdamW(p.detach(), c.lr, c.beta1, c.beta2, c.eps, c.weight_decay)
    for step in range(5):
        set_gradients(weights, step)
        for name, p in weights.items():
            oracles[name].step(p.grad, lr_scale=1.0 - step / 5)
        optimizer.step(1.0 - step / 5, 0.9, 0.0)
    for name, p in weights.items():
        expected = torch.tensor(oracles[name].weight, dtype=torch.float64).view_as(p)
        torch.testing.assert_close(p.detach(), expected)


def test_against_the_rules_of_autoresearch_and_nanochat() -> None:
    """autoresearch's settings on every role at once, as in its run: momentum rises, rate and decay fall.

    AdamW entry by entry; Muon matrix by matrix with Polar Express, NorMuon and cautious decay.
    """
    config = autoresearch().optim
    weights = make_weights(torch.float64)
    optimizer = make(weights, config, compute_dtype=torch.float64)
    matrices: dict[str, list[oracle_optim.CautiousNorMuon]] = {}
    others: dict[str, oracle_optim.HandAdamW] = {}
    assert config.muon.normuon_beta2 is not None
    for name, p in weights.items():
        if SHAPES[name][1] is Role.MATRIX:
            settings = config.muon.lr, config.muon.normuon_beta2, config.muon.weight_decay
            parts = p.detach().split(8) if "qkv" in name else [p.detach()]
            matrices[name] = [oracle_optim.CautiousNorMuon(part, *settings) for part in parts]
        else:
            c = role_config(config, SHAPES[name][1])
            others[name] = oracle_optim.HandAdamW(p.detach(), c.lr, c.beta1, c.beta2, c.eps, c.weight_decay)
    for step in range(6):
        set_gradients(weights, step)
        rate, momentum, decay = 1.0 - step / 10, 0.85 + step / 100, 1.0 - step / 6
        for name, blocks in matrices.items():
            for block, gradient in zip(blocks, weights[name].grad.split(len(blocks[0].weight)), strict=True):
                block.step(gradient, rate, momentum, decay)
        for name, oracle in others.items():
            oracle.step(weights[name].grad, rate)
        optimizer.step(rate, momentum, decay)
    for name, p in weights.items():
        if name in matrices:
            expected = torch.cat([block.weight for block in matrices[name]])
        else:
            expected = torch.tensor(others[name].weight, dtype=torch.float64).view_as(p)
        # float64: rounding only, which the first polynomials magnify by the slope of up to 8.2 a step.
        torch.testing.assert_close(p.detach(), expected, rtol=1e-8, atol=1e-10)


def test_two_steps_by_hand() -> None:
    """A matrix of one column, exactly orthogonalized, and a table beside it."""
    column, table = torch.nn.Parameter(torch.tensor([[2.0], [-1.0]])), torch.nn.Parameter(torch.tensor([[1.0, -1.0]]))
    muon = MuonConfig(orthogonalizer="svd", lr=0.1, normuon_beta2=0.5, weight_decay=0.5)
    config = OptimConfig(muon=muon, embedding=AdamWConfig(lr=0.3))
    triples = [("matrix", column, Role.MATRIX), ("table", table, Role.EMBEDDING)]
    optimizer = build_optimizer(triples, config, compute_dtype=torch.float32)
    column.grad, table.grad = torch.tensor([[3.0], [4.0]]), torch.tensor([[5.0, -0.01]])
    optimizer.step(lr_scale=1.0, momentum=0.5, weight_decay_scale=1.0)
    # Momentum (1.5, 2); direction (2.25, 3), over its norm (0.6, 0.8). NorMuon: each row over its own root mean square
    # is the same number, and the norm stays 1: (0.7071, 0.7071). Times sqrt(2 rows / 1 column): (1, 1). The weight 2
    # moves towards zero and decays by 0.1 * 0.5 of it; -1 moves away and does not.
    assert column.flatten().tolist() == pytest.approx([2 - 0.1 - 0.1, -1 - 0.1], rel=1e-6)
    # AdamW's first step: the rate times the sign.
    assert table.flatten().tolist() == pytest.approx([1 - 0.3, -1 + 0.3], rel=1e-6)
    column.grad, table.grad = torch.tensor([[29.0 / 6.0], [10.0 / 3.0]]), torch.tensor([[5.0, -0.01]])
    optimizer.step(lr_scale=0.5, momentum=0.5, weight_decay_scale=0.4)
    # Direction 0.75 G + 0.25 (1.5, 2) = (4, 3), over its norm (0.8, 0.6). Second moments 0.25 (0.36, 0.64) + 0.5 (0.64,
    # 0.36) = (0.41, 0.34); rows over their roots (1.24939, 1.02899), whose norm is 1.61858; over that, times sqrt(2):
    # (1.09164, 0.89907). The rate is 0.05, the decay 0.05 * 0.2 of 1.8.
    assert column.flatten().tolist() == pytest.approx([1.8 - 0.054582 - 0.018, -1.1 - 0.0449535], rel=1e-6)
    # The same gradient again: the bias-corrected moments are still its own.
    assert table.flatten().tolist() == pytest.approx([0.7 - 0.15, -0.7 + 0.15], rel=1e-6)


def test_muon_and_adamw_divide_the_parameters() -> None:
    optimizer = make(make_weights())
    assert optimizer.muon is not None
    assert set(optimizer.muon.parameters) == {n for n, (_, role) in SHAPES.items() if role is Role.MATRIX}
    assert set(optimizer.parameters) == set(SHAPES)
    only_adamw = make(make_weights(), OptimConfig(matrix_optimizer="adamw"))
    assert only_adamw.muon is None
    assert set(only_adamw.parameters) == set(SHAPES)
    matrices = {name: p for name, p in make_weights().items() if SHAPES[name][1] is Role.MATRIX}
    assert make(matrices).adamw is None


def test_a_missing_gradient_is_an_error() -> None:
    weights = make_weights()
    optimizer = make(weights)
    set_gradients(weights, 0)
    weights["x0_lambdas"].grad = None
    with pytest.raises(UserError, match="x0_lambdas has no gradient"):
        optimizer.step(1.0, 0.9, 1.0)
    assert all(torch.equal(p, before) for p, before in zip(weights.values(), make_weights().values(), strict=True))
    optimizer.zero_grad()
    assert all(p.grad is None for p in weights.values())


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
def test_clipping(max_norm: float | None) -> None:
    weights, reference = make_weights(), make_weights()
    set_gradients(weights, 0)
    set_gradients(reference, 0)
    norm = clip_gradients(weights.values(), max_norm)
    squares = sum(float((p.grad.double() ** 2).sum()) for p in reference.values())
    assert norm == pytest.approx(squares**0.5, rel=1e-6)
    torch.nn.utils.clip_grad_norm_(reference.values(), float("inf") if max_norm is None else max_norm)
    for name in weights:
        torch.testing.assert_close(weights[name].grad, reference[name].grad, rtol=1e-6, atol=0)
    if max_norm == 0.5:
        assert clip_gradients(weights.values(), None) == pytest.approx(0.5, rel=1e-5)
    for parameter in weights.values():
        parameter.grad = None
    assert clip_gradients(weights.values(), max_norm) == 0
