from __future__ import annotations

import math
import random

import pytest

from gptlab.config.optim import MuonConfig, ScheduleConfig
from gptlab.optim.schedule import lr_scale, muon_momentum, weight_decay_scale
from gptlab.training.state import Finish

STEPS = 200


def nanochat(it: int, warmup_ratio: float, warmdown_ratio: float, final: float) -> float:
    """nanochat's get_lr_multiplier."""
    warmup_iters, warmdown_iters = round(warmup_ratio * STEPS), round(warmdown_ratio * STEPS)
    if it < warmup_iters:
        return (it + 1) / warmup_iters
    if it <= STEPS - warmdown_iters:
        return 1.0
    progress = (STEPS - it) / warmdown_iters
    return progress * 1.0 + (1 - progress) * final


def autoresearch(progress: float, warmup: float, warmdown: float, final: float) -> float:
    """autoresearch's get_lr_multiplier."""
    if progress < warmup:
        return progress / warmup
    if progress < 1.0 - warmdown:
        return 1.0
    cooldown = (1.0 - progress) / warmdown
    return cooldown * 1.0 + (1 - cooldown) * final


def nanogpt(it: int, warmup_iters: int, min_lr: float) -> float:
    """nanoGPT's get_lr with a learning rate of 1 (its warm-up is not compared: it divides by warmup_iters + 1)."""
    coefficient = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (STEPS - warmup_iters)))
    return min_lr + coefficient * (1.0 - min_lr)


RATIOS = [(0.0, 0.5, 0.0), (0.05, 0.5, 0.1), (0.25, 0.75, 0.0), (0.1, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.3)]


@pytest.mark.parametrize(("warmup", "warmdown", "final"), RATIOS)
def test_trapezoid_is_that_of_autoresearch_and_nanochat(warmup: float, warmdown: float, final: float) -> None:
    schedule = ScheduleConfig(warmup_fraction=warmup, warmdown_fraction=warmdown, final_lr_scale=final)
    for it in range(STEPS):
        got = lr_scale(schedule, it / STEPS, step_fraction=1 / STEPS)
        assert got == pytest.approx(nanochat(it, warmup, warmdown, final), abs=1e-12)
        if warmdown > 0:
            got = lr_scale(schedule, it / STEPS)
            assert got == pytest.approx(autoresearch(it / STEPS, warmup, warmdown, final), abs=1e-12)


@pytest.mark.parametrize(("warmup_iters", "min_lr"), [(0, 0.1), (20, 0.0)])
def test_cosine_is_nanogpts(warmup_iters: int, min_lr: float) -> None:
    schedule = ScheduleConfig(kind="cosine", warmup_fraction=warmup_iters / STEPS, final_lr_scale=min_lr)
    for it in range(warmup_iters, STEPS + 1):
        assert lr_scale(schedule, it / STEPS) == pytest.approx(nanogpt(it, warmup_iters, min_lr), abs=1e-12)


def test_by_hand() -> None:
    schedule = ScheduleConfig(warmup_fraction=0.2, warmdown_fraction=0.4, final_lr_scale=0.1)
    points = {0.0: 0.0, 0.05: 0.25, 0.2: 1.0, 0.5: 1.0, 0.8: 0.55, 1.0: 0.1}
    for progress, expected in points.items():
        assert lr_scale(schedule, progress) == pytest.approx(expected)
    cosine = ScheduleConfig(kind="cosine", warmup_fraction=0.2, final_lr_scale=0.1)
    for progress, expected in {0.1: 0.5, 0.2: 1.0, 0.6: 0.55, 1.0: 0.1}.items():
        assert lr_scale(cosine, progress) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["trapezoid", "cosine"])
def test_first_step_is_not_wasted_and_the_clock_may_overrun(kind: str) -> None:
    schedule = ScheduleConfig(kind=kind, warmup_fraction=0.1, final_lr_scale=0.1)
    assert lr_scale(schedule, 0.0) == 0.0
    assert lr_scale(schedule, 0.0, step_fraction=0.02) == pytest.approx(0.2)
    assert lr_scale(schedule, 0.0999, step_fraction=0.02) == 1.0
    # A run on a clock may begin its last step a hair late.
    assert lr_scale(schedule, 1.01) == pytest.approx(0.1)
    assert lr_scale(ScheduleConfig(kind=kind, warmup_fraction=1.0, warmdown_fraction=0.0), 1.0) >= 0.0


@pytest.mark.parametrize("kind", ["trapezoid", "cosine"])
@pytest.mark.parametrize("first_seconds", [0.001, 0.1, 2.0])
def test_a_warm_up_on_the_clock_rises_from_the_first_step_on(kind: str, first_seconds: float) -> None:
    """docs/lineages.md: the first step has a rate above zero. Whatever the steps take, none has a lower rate than the
    one before it until the warm-up is over."""
    schedule = ScheduleConfig(kind=kind, warmup_fraction=0.3, warmdown_fraction=0.5)
    finish = Finish(steps=None, seconds=10.0)
    dice = random.Random(1)
    seconds, rates = 0.0, []
    for step in range(1000):
        if finish.progress(step, seconds) > 0.3:
            break
        rates.append(lr_scale(schedule, finish.progress(step, seconds), finish.step_fraction))
        seconds += first_seconds if step == 0 else dice.choice([0.001, 0.01, 0.1])
    assert 0 < rates[0] < 0.05
    assert rates == sorted(rates)
    assert rates[-1] > 0.9


def test_momentum_ramp_of_autoresearch_and_nanochat() -> None:
    config = MuonConfig()
    for step in range(600):
        share = min(step / 300, 1)
        assert muon_momentum(config, step) == pytest.approx((1 - share) * 0.85 + share * 0.95, abs=1e-15)
    assert muon_momentum(MuonConfig(momentum_ramp_steps=0), 0) == 0.95


def test_weight_decay_of_autoresearch_and_nanochat() -> None:
    for step in range(STEPS + 1):
        assert weight_decay_scale(ScheduleConfig(), step / STEPS) == pytest.approx(1 - step / STEPS, abs=1e-15)
    assert weight_decay_scale(ScheduleConfig(weight_decay_final=1.0), 0.3) == 1.0
    assert weight_decay_scale(ScheduleConfig(weight_decay_final=0.2), 0.5) == pytest.approx(0.6)
    assert weight_decay_scale(ScheduleConfig(), 1.5) == 0.0
