"""float16 needs a loss scale: training with it, and an overflow, on the CPU. test_resume.py kills and resumes it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import pytest
import torch
from tiny_runs import lines_of, make_config, open_tiny, train, weights_of
from torch import Tensor

from gptlab.app.run.session import open_session
from gptlab.model.head import HeadLoss
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.records.console import Console
from gptlab.training.checkpoint.load import load_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.faults import Fault
from gptlab.training.state import LossScale
from gptlab.training.step import Rates, gradients, update

HALF = {"runtime__dtype": "float16", "model__dropout": 0.0}
RATES = Rates(lr_scale=1.0, momentum=0.9, weight_decay_scale=1.0)


@pytest.fixture(scope="module")
def half(folder: Path) -> Path:
    return train(folder, "half", **HALF)


def test_losses_and_norms_are_those_of_float32(folder: Path, half: Path) -> None:
    """float16 keeps 11 bits, 5e-4, of each activation. The first gradient is of the same weights: a scale that were not
    taken out again would make it 65536 times as long. Then steps of the size of a sign lead apart: 0.4% were measured.
    """
    full = train(folder, "full", runtime__dtype="float32", model__dropout=0.0)
    pairs = list(zip(lines_of(half, "train"), lines_of(full, "train"), strict=True))
    assert len(pairs) == 12
    for one, other in pairs:
        assert one["loss"] == pytest.approx(other["loss"], rel=0.01)
    assert pairs[0][0]["grad_norm"] == pytest.approx(pairs[0][1]["grad_norm"], rel=1e-3)
    assert [one["loss"] for one, _ in pairs] != [other["loss"] for _, other in pairs]  # float16 it was
    assert pairs[-1][0]["loss"] < pairs[0][0]["loss"] - 0.5
    saved = load_checkpoint(list_checkpoints(half / "checkpoints")[-1])
    assert saved.state["scaler"]["scale"] == 65536.0
    assert {value.dtype for value in saved.model.values()} == {torch.float32}


def test_an_overflow_leaves_the_update_out_and_halves_the_scale(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(folder, "never-made", **HALF)
    with Console() as console:
        state = open_session(config, place_of(config), console).state
    # 2^34 over 256 targets: gradients of 2^26, and float16 ends at 65504.
    state.loss_scale = LossScale(2.0**34)
    monkeypatch.setattr("gptlab.training.state._GOOD_STEPS", 2)
    before = {name: value.clone() for name, value in weights_of(state).items()}
    with state.loader:
        batch = next(state.loader)
        gradients(state, batch, state.model.loss, config)
        assert not math.isfinite(update(state, config, RATES).grad_norm)
        assert all(torch.equal(value, before[name]) for name, value in weights_of(state).items())
        assert state.loss_scale.scale == 2.0**33
        norms = []
        while len(norms) < 40 and state.loss_scale.scale > 2.0**15:
            gradients(state, batch, state.model.loss, config)
            norms.append(update(state, config, RATES).grad_norm)
    changed = [name for name, value in weights_of(state).items() if not torch.equal(value, before[name])]
    assert math.isfinite(norms[-1]), "the scale never came down to one that fits"
    assert changed


def test_the_scale_is_that_of_torchs_gradscaler() -> None:
    """Two overflows, two growths and a half, an overflow one step before the next growth."""
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu")
    settings = theirs.get_growth_factor(), theirs.get_backoff_factor(), theirs.get_growth_interval()
    scale, count = torch.tensor(theirs.get_scale()), torch.tensor(0, dtype=torch.int32)
    assert ours.scale == scale
    for good_steps in (0, 0, 5000, 1999, 2000):
        for is_finite in [True] * good_steps + [False]:
            torch._amp_update_scale_(scale, count, torch.tensor(float(not is_finite)), *settings)
            ours.update(is_finite)
            assert (ours.scale, ours.good_steps) == (scale, count)


def test_a_fault_leaves_the_scale_as_it_was(folder: Path) -> None:
    """It was halved, and its count of good steps set to 0, though the step is as if it had never been computed."""
    opened = open_tiny(folder, **HALF)
    state = opened.state
    state.loss_scale = LossScale(1.0, good_steps=7)
    with state.loader:
        gradients(state, next(state.loader), state.model.loss, opened.config)
    cast(Tensor, state.model.head.weight.grad).view(-1)[3] = math.inf
    assert isinstance(update(state, opened.config, RATES), Fault)
    assert state.loss_scale == LossScale(1.0, good_steps=7)


def test_small_probabilities_have_gradients() -> None:
    """The gradient of an entry is its probability, here 1e-8 to 3e-8, which float16 rounds to 0; times the loss scale
    it is a number that float16 has. By hand, of logits z = x w with x = 1: softmax(z) of what is no target."""
    x = torch.ones(1, 1, dtype=torch.float16)
    weight = torch.tensor([[18.0], [0.0], [0.5]], dtype=torch.float16, requires_grad=True)
    loss = HeadLoss.apply(x, weight, torch.tensor([0]), 3, None, torch.tensor(2.0**16))
    loss.backward()
    expected = torch.softmax(weight.detach().double().flatten(), 0)[1:]
    assert 1e-8 < float(expected[0]) < float(expected[1]) < 3e-8
    assert weight.grad is not None
    # float16 keeps 11 bits of the gradient.
    torch.testing.assert_close(weight.grad.double().flatten()[1:] / 2**16, expected, rtol=1e-3, atol=0)
    assert float(loss.detach()) < 1e-6, "the loss is not scaled"
