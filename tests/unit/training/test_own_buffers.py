"""Buffers of a caller's parts: as if a skipped step had not been, and such that a checkpoint can be loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import make_config
from torch import Tensor

from gptlab.app.run.own_parts import OwnParts
from gptlab.app.run.session import Session, open_session
from gptlab.config.errors import UserError
from gptlab.model.gpt import GPT, MLP
from gptlab.runtime.hardware.device import Platform
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.records.console import QuietConsole
from gptlab.training.compilation import run_once
from gptlab.training.faults import Fault
from gptlab.training.loop import next_steps
from gptlab.training.step import LossFunction, TrainStep, Update


class Centered(MLP):
    """Subtracts a running mean, which is one tensor, and counts in others."""

    mean: Tensor
    passes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
                self.passes = self.passes + 1
        return super().forward(x - self.mean)


def centered(model: GPT) -> None:
    for block in model.blocks:
        block.mlp.__class__ = Centered
        block.mlp.register_buffer("mean", torch.zeros(model.config.n_embd))
        block.mlp.register_buffer("passes", torch.zeros(()), persistent=False)


def opened(folder: Path, change: Callable[[GPT], None]) -> Session:
    config = make_config(folder, "never-made", runtime__dtype="float32", model__n_layer=1)
    return open_session(config, place_of(config), QuietConsole(), parts=OwnParts(change_model=change))


def step(session: Session, loss_sum: LossFunction | None = None) -> TrainStep:
    state = session.state
    (done,) = next_steps(state, loss_sum or session.passes.loss_sum, session.config, session.finish, lambda _: True)
    state.step += 1
    return done


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_skipped_step_leaves_them_as_they_were(folder: Path, platform: Platform) -> None:
    """A NaN in the data of one step stayed in a running mean, and so in every later loss."""
    session = opened(folder, centered)
    model, loss_sum = session.state.model, session.passes.loss_sum
    model.platform = platform
    part: Any = model.blocks[0].mlp
    assert isinstance(step(session).result, Update)
    mean, passes = part.mean, part.passes
    assert passes > 0 < mean.norm()
    before = mean.clone()

    def broken(*args: Tensor) -> Tensor:
        loss = loss_sum(*args) * math.nan
        part.mean.fill_(math.nan)
        return loss

    result = step(session, broken).result
    assert isinstance(result, Fault)
    assert (part.mean is mean, part.passes is passes) == (True, True)
    assert torch.equal(mean, before)
    session.state.strategy.zero_grad()
    assert isinstance(step(session).result, Update)
    assert not torch.equal(mean, before)


class Growing(MLP):
    """Keeps one more number in each pass."""

    is_there, persistent = True, True

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "history"):
            self.register_buffer("history", torch.zeros(0), persistent=self.persistent)
        self.history = torch.cat([self.history, x.detach().float().mean().view(1)])
        return super().forward(x)


def growing(model: GPT, *, is_there: bool, persistent: bool = True) -> None:
    part: Any = model.blocks[0].mlp
    part.__class__, part.persistent = Growing, persistent
    if is_there:
        part.register_buffer("history", torch.zeros(0), persistent=persistent)


@pytest.mark.parametrize(("is_there", "before"), [(True, r"\(0,\)"), (False, "not there")])
def test_what_no_checkpoint_could_be_loaded_with_ends_the_run(folder: Path, is_there: bool, before: str) -> None:
    """It was saved, and `--resume` and `load_run` refused each checkpoint."""
    session = opened(folder, partial(growing, is_there=is_there))
    said = rf"change_model: blocks\.0\.mlp\.history was {before} at first and is \(2,\) after a step"
    with pytest.raises(UserError, match=said):
        step(session)


class Remembering(MLP):
    """Keeps the first mean that it sees."""

    seen: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = x.detach().float().mean()
        return super().forward(x)


def remembering(model: GPT) -> None:
    for block in model.blocks:
        block.mlp.__class__ = Remembering
        block.mlp.register_buffer("seen", None, persistent=False)


def test_one_that_a_skipped_step_or_a_warm_up_made_is_not_there_after_it(folder: Path) -> None:
    """It kept the mean of the warm-up's tokens, or the NaN of a broken batch."""
    session = opened(folder, remembering)
    state, loss_sum = session.state, session.passes.loss_sum
    part: Any = state.model.blocks[0].mlp
    assert isinstance(step(session, lambda *args: loss_sum(*args) * math.nan).result, Fault)
    assert part.seen is None
    state.strategy.zero_grad()
    run_once(state, session.passes, session.config, session.eval_sequences)
    assert part.seen is None
    assert isinstance(step(session).result, Update)
    assert part.seen is not None


def test_what_no_checkpoint_holds_may_grow(folder: Path) -> None:
    session = opened(folder, partial(growing, is_there=True, persistent=False))
    for _ in range(2):
        assert isinstance(step(session).result, Update)
