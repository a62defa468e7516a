from __future__ import annotations

import json
import random
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from gptlab.training.recorder import Throughput
from gptlab.training.state import Ema, Finish


def test_mean_by_hand() -> None:
    """autoresearch: s <- 0.9 s + 0.1 x; debiased by 1 - 0.9^n. Losses 4, 3, 5:
    s = 0.4, 0.66, 1.094; means 0.4/0.1 = 4, 0.66/0.19 = 3.47368..., 1.094/0.271 = 4.03690..."""
    ema = Ema()
    assert ema.value is None
    # Two roundings in float64 lie between these quotients and ours.
    for loss, mean in ((4.0, 4.0), (3.0, 0.66 / 0.19), (5.0, 1.094 / 0.271)):
        ema.update(loss)
        assert ema.value == pytest.approx(mean, rel=1e-14)


def test_mean_is_the_weighted_mean_that_it_claims_to_be() -> None:
    values = [random.Random(3).uniform(0, 10) for _ in range(50)]
    ema = Ema()
    for value in values:
        ema.update(value)
    weights = [0.9 ** (len(values) - 1 - i) for i in range(len(values))]
    oracle = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    # 50 additions in another order.
    assert ema.value == pytest.approx(oracle, rel=1e-13)


def test_the_mean_of_equal_values_is_that_value() -> None:
    ema = Ema()
    for _ in range(1000):
        ema.update(2.5)
    assert ema.value == pytest.approx(2.5, rel=1e-13)


def test_a_resumed_mean_goes_on_bit_for_bit() -> None:
    source = random.Random(7)
    values = [source.uniform(1, 11) for _ in range(40)]
    whole, first = Ema(), Ema()
    for value in values[:17]:
        whole.update(value)
        first.update(value)
    resumed = Ema(**json.loads(json.dumps(asdict(first))))
    for value in values[17:]:
        assert resumed == whole
        whole.update(value)
        resumed.update(value)
    assert resumed.value == whole.value


def test_speed_by_hand() -> None:
    """1000 tokens in 0.5 s are 2000 tokens/s; at 3e6 FLOPs each that is 6e9 FLOP/s, 30% of a peak of 2e10."""
    speed = Throughput(3e6, 2e10).speed(1000, 0.5)
    assert speed.tokens_per_second == 2000
    assert speed.mfu == pytest.approx(0.3, rel=1e-15)


def test_an_unknown_peak_gives_no_utilization() -> None:
    speed = Throughput(3e6, None).speed(1000, 0.5)
    assert speed.tokens_per_second == 2000
    assert speed.mfu is None


def test_a_clock_that_did_not_move_is_no_error() -> None:
    assert Throughput(3e6, 2e10).speed(1000, 0.0).tokens_per_second > 0


def after(step: int, train_seconds: float = 0.0) -> Any:
    """All of a TrainState that the time left depends on."""
    return SimpleNamespace(step=step, train_seconds=train_seconds)


def test_time_left_in_steps_by_hand() -> None:
    """Steps of 1 s and 2 s: the mean is (0.9 * 0.1 * 1 + 0.1 * 2) / 0.19 = 0.29 / 0.19 s."""
    throughput, finish = Throughput(1.0, None), Finish(steps=12, seconds=None)
    throughput.step_seconds.update(1.0)
    assert throughput.remaining_seconds(finish, after(2)) == pytest.approx(10.0, rel=1e-14)
    throughput.step_seconds.update(2.0)
    assert throughput.remaining_seconds(finish, after(2)) == pytest.approx(10 * 0.29 / 0.19, rel=1e-14)
    assert throughput.remaining_seconds(finish, after(12)) == 0.0


def test_time_left_in_seconds_needs_no_step() -> None:
    throughput, finish = Throughput(1.0, None), Finish(steps=None, seconds=20.0)
    assert throughput.remaining_seconds(finish, after(3, 7.5)) == 12.5
    assert throughput.remaining_seconds(finish, after(3, 20.1)) == 0.0, "the last step may end after the budget"
