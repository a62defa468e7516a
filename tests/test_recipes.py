"""Recipes size themselves by rules that can be worked out by hand, and say how."""

from __future__ import annotations

import math

import pytest

from gptlab.config.errors import ConfigError
from gptlab.config.horizon import Horizon
from gptlab.config.recipes import RECIPES, quickstart, shakespeare_char, why_quickstart_size
from gptlab.config.recipes.quickstart import QUICKSTART_STEPS, QUICKSTART_TOKENS_PER_PARAM
from gptlab.config.scaling import (
    EXPECTED_MFU,
    Machine,
    adamw_lr_scale_for_width,
    shape_for_compute,
    shape_for_depth,
)

RATES = [3e9, 5e10, 2e11, 4.25e11, 8.5e11, 3e12, 1e14, 7e14]


def machine(flops_per_second: float | None) -> Machine:
    return Machine(device="cpu", matmul_flops_per_second=flops_per_second)


def test_a_shape_by_hand() -> None:
    """96 channels raised to two heads of 64; 12 * 128^2 * 3 weights in matrices and 1000 * 128 in the head."""
    shape = shape_for_depth(3, aspect=32, head_dim=64, vocab_size=1000, seq_len=256)
    assert (shape.n_layer, shape.n_embd, shape.n_head) == (3, 128, 2)
    assert shape.scaling_params == 589_824 + 128_000
    assert shape.flops_per_token == 6 * 717_824 + 12 * 128 * 256 * 3


def test_the_deepest_shape_that_the_compute_pays_for() -> None:
    size = {"aspect": 32, "head_dim": 64, "vocab_size": 4096, "seq_len": 512}
    for total_flops in (1e12, 4e13, 1e16, 1e19):
        shape = shape_for_compute(total_flops, tokens_per_param=2.5, **size)
        deeper = shape_for_depth(shape.n_layer + 1, **size)
        assert deeper.flops_per_token * 2.5 * deeper.scaling_params > total_flops
        assert shape.n_layer == 1 or shape.flops_per_token * 2.5 * shape.scaling_params <= total_flops


def test_quickstart_grows_with_the_machine_and_the_time() -> None:
    sizes = [quickstart(machine=machine(rate)).model.n_layer for rate in RATES]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]
    # Twice the time is twice the compute.
    assert quickstart(machine=machine(4e11), minutes=6).model == quickstart(machine=machine(8e11), minutes=3).model


@pytest.mark.parametrize("rate", RATES)
def test_quickstart_makes_about_as_many_steps_as_it_says(rate: float) -> None:
    config = quickstart(machine=machine(rate))
    shape = shape_for_depth(config.model.n_layer, aspect=32, head_dim=64, vocab_size=4096, seq_len=512)
    tokens = EXPECTED_MFU * rate * 180 / shape.flops_per_token
    batch = config.batch.total_tokens
    assert batch == 2 ** round(math.log2(batch))
    assert 2**13 <= batch <= 2**19
    if 2**13 < batch < 2**19:  # rounded to a power of two: within a factor of the square root of two
        assert 1 / 1.42 < tokens / batch / QUICKSTART_STEPS < 1.42


def test_quickstart_without_a_measurement_is_that_of_two_ordinary_cores() -> None:
    assert quickstart() == quickstart(machine=machine(None)) == quickstart(machine=machine(425e9))
    assert quickstart(horizon=Horizon(amount=10, unit="steps")).model == quickstart().model


def test_a_depth_given_is_the_depth() -> None:
    assert quickstart(depth=6, machine=machine(1e9)).model.n_layer == 6
    with pytest.raises(ConfigError, match="depth"):
        quickstart(depth=0)


def test_adamw_rates_follow_width_and_batch() -> None:
    assert adamw_lr_scale_for_width(768) == 1.0
    assert adamw_lr_scale_for_width(192) == 2.0
    # Width 128 and 2^13 tokens: seed 4's 0.3 times sqrt(768 / 128) times a half.
    assert quickstart().optim.embedding.lr == pytest.approx(0.3 * math.sqrt(6) / 2)


def test_the_size_is_explained_where_the_recipe_chose_it() -> None:
    here = machine(436e9)
    reason = why_quickstart_size(quickstart(machine=here), here)
    assert reason is not None
    assert f"180 s x 436 GFLOP/s measured x {EXPECTED_MFU} = 4.3e+13 FLOP" in reason
    assert f"{QUICKSTART_TOKENS_PER_PARAM:g} tokens a parameter" in reason
    assert why_quickstart_size(quickstart(depth=9, machine=here), here) is None
    assert why_quickstart_size(quickstart(horizon=Horizon(amount=10, unit="steps")), here) is None
    assert why_quickstart_size(shakespeare_char(), here) is None


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_takes_the_common_arguments(name: str) -> None:
    recipe = RECIPES[name]
    depth = None if "finetune" in name else 2  # whose weights have theirs
    config = recipe(depth=depth, horizon=Horizon(amount=5, unit="steps"), machine=machine(1e12))
    assert (config.recipe, config.horizon) == (name, Horizon(amount=5, unit="steps"))
    assert depth is None or config.model.n_layer == depth
    assert recipe(minutes=0.5).horizon == Horizon(amount=30.0, unit="seconds")
    assert (recipe.__doc__ or "").strip()
    with pytest.raises(ConfigError, match="minutes"):
        recipe(minutes=-1)
