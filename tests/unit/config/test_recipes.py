"""Recipes size themselves by rules that can be worked out by hand, and say how."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest

from gptlab.app.run.run_request import sized_by_measurement
from gptlab.bench.training_rate import PRODUCTS_SHARE
from gptlab.config.errors import ConfigError
from gptlab.config.length import Horizon, HorizonUnit, minutes
from gptlab.config.load import apply_overrides
from gptlab.config.recipes import RECIPES, applied_scaling, configure, quickstart, shakespeare_char
from gptlab.config.recipes.quickstart import (
    QUICKSTART_TOKENS_PER_PARAM,
    why_quickstart_size,
)
from gptlab.config.run import RunConfig
from gptlab.config.scaling import (
    Machine,
    adamw_lr_scale_for_width,
    shape_for_compute,
    shape_for_depth,
)

MACHINE = Machine(device="cpu", flops_per_second=2.35e11)
RATES = [2e9, 3e10, 1.2e11, 2.35e11, 5e11, 1.7e12, 6e13, 4e14]


QUICKSTART_SIZE = {"aspect": 32, "head_dim": 64, "vocab_size": 4096, "seq_len": 1024, "window": 128}
SHAKESPEARE_SIZE = {"aspect": 32, "head_dim": 64, "vocab_size": 128, "seq_len": 2048, "window": 64}


def machine(flops_per_second: float | None) -> Machine:
    return Machine(device="cpu", flops_per_second=flops_per_second)


def test_a_shape_by_hand() -> None:
    """96 channels raised to two heads of 64; 12 * 128^2 * 3 weights in matrices and 1000 * 128 in the head."""
    shape = shape_for_depth(3, aspect=32, head_dim=64, vocab_size=1000, seq_len=256)
    assert (shape.n_layer, shape.n_embd, shape.n_head) == (3, 128, 2)
    assert shape.scaling_params == 589_824 + 128_000
    assert shape.flops_per_token == 6 * 717_824 + 12 * 128 * 256 * 3
    with_windows = shape_for_depth(3, aspect=32, head_dim=64, vocab_size=1000, seq_len=256, window=32)
    assert with_windows.flops_per_token == 6 * 717_824 + 12 * 128 * (32 + 32 + 256)


def test_the_deepest_shape_that_the_compute_pays_for() -> None:
    for total_flops in (1e12, 4e13, 1e16, 1e19):
        shape = shape_for_compute(total_flops, tokens_per_param=2.5, **QUICKSTART_SIZE)
        deeper = shape_for_depth(shape.n_layer + 1, **QUICKSTART_SIZE)
        assert deeper.flops_per_token * 2.5 * deeper.scaling_params > total_flops
        assert shape.n_layer == 1 or shape.flops_per_token * 2.5 * shape.scaling_params <= total_flops


def test_quickstart_grows_with_the_machine_and_the_time() -> None:
    sizes = [quickstart(machine=machine(rate)).model.n_layer for rate in RATES]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]
    # Twice the time is twice the compute.
    longer, faster = (quickstart(machine=machine(rate), horizon=minutes(m)) for rate, m in ((4e11, 6), (8e11, 3)))
    assert longer.model == faster.model


@pytest.mark.parametrize("rate", RATES)
def test_a_step_has_as_many_tokens_as_their_root_allows(rate: float) -> None:
    config = quickstart(machine=machine(rate))
    shape = shape_for_depth(config.model.n_layer, **QUICKSTART_SIZE)
    tokens = rate * 180 / shape.flops_per_token
    batch = config.batch.total_tokens
    assert batch == 2 ** round(math.log2(batch))
    assert 4096 <= batch <= 2**19
    most = 4.6 * math.sqrt(tokens)
    assert batch <= most or batch == 4096
    if batch < 2**19:  # the next power of two would be more
        assert 2 * batch > most


class TestSizedByMeasurement:
    """A run is sized by the steps that this machine was seen to make, never by its products' peak."""

    @staticmethod
    def sized(rate: Callable[[RunConfig], float], *, length: float = 3, depth: int | None = None) -> RunConfig:
        """quickstart on a machine whose steps reach `rate(config)` FLOP/s; checks what it makes of it."""
        timed: list[RunConfig] = []

        def recipe(depth: int | None, machine: Machine | None) -> RunConfig:
            return quickstart(depth=depth, horizon=minutes(length), machine=machine)

        def measure(config: RunConfig) -> Machine:
            timed.append(config)
            return machine(rate(config))

        config = sized_by_measurement(recipe, depth, measure)
        assert 1 <= len(timed) <= 3
        model = config.model
        flops = shape_for_depth(model.n_layer, **QUICKSTART_SIZE).flops_per_token
        tokens = length * 60 * rate(config) / flops
        # The depth that follows from the third is not timed itself; a deeper one reaches more.
        assert config.batch.total_tokens <= max(1.3 * 4.6 * math.sqrt(tokens), 4096)
        return config

    def test_a_fast_machine_gets_as_many_steps_as_a_slow_one(self) -> None:
        """The machine of docs/LOG.md, 2026-11-22: products at 2 TFLOP/s, steps at 27,000 tokens/s of four layers. Sized
        by its peak it made 174 steps and ended at 1.21 bits per byte; 599 of 8,192 tokens ended at 0.98."""
        config = self.sized(lambda config: 27_000 * 10.02e6)
        assert (config.model.n_layer, config.batch.total_tokens, config.batch.micro_sequences) == (4, 8192, 8)

    def test_a_slower_moment_makes_no_smaller_model(self) -> None:
        """The same machine whose host is busy for one timing: 93 GFLOP/s (docs/LOG.md, 2026-11-22). Two layers are
        timed then, and are fast enough for more."""
        timed: list[int] = []

        def rate(config: RunConfig) -> float:
            timed.append(config.model.n_layer)
            return 93e9 if len(timed) == 1 else {2: 150e9, 3: 250e9, 4: 297e9}[config.model.n_layer]

        assert self.sized(rate).model.n_layer == 4
        assert timed[:3] == [4, 2, 3]

    def test_each_size_is_judged_by_its_own_rate(self) -> None:
        """Two Zen 5 cores in one minute (docs/LOG.md, 2026-11-25): 966 GFLOP/s of products promise three layers, whose
        steps reach it. Two layers reach 375, which would not be enough for three."""
        timed: list[int] = []

        def recipe(depth: int | None, machine: Machine | None) -> RunConfig:
            return quickstart(depth=depth, horizon=minutes(1), machine=machine)

        def measure(config: RunConfig) -> Machine:
            timed.append(config.model.n_layer)
            return machine({2: 375e9, 3: 523e9, 4: 530e9}[config.model.n_layer])

        limit = Machine(device="cpu", flops_per_second=None, most_flops_per_second=PRODUCTS_SHARE * 966e9)
        assert sized_by_measurement(recipe, None, measure, limit).model.n_layer == 3
        assert timed == [3]

    def test_slow_products_make_the_first_size_small(self) -> None:
        """AVX2 without bfloat16 (docs/LOG.md, 2026-11-22): products at 181 GFLOP/s, steps at 110 with depth 4, at 94
        with depth 2. In three minutes depth 2 reaches 1.42 bits per byte and depth 4 1.52: it is timed first."""
        timed: list[int] = []

        def recipe(depth: int | None, machine: Machine | None) -> RunConfig:
            return quickstart(depth=depth, machine=machine)

        def measure(config: RunConfig) -> Machine:
            timed.append(config.model.n_layer)
            return machine({2: 94e9, 4: 110e9}[config.model.n_layer])

        def limit(products: float) -> Machine:
            return Machine(device="cpu", flops_per_second=None, most_flops_per_second=PRODUCTS_SHARE * products)

        config = sized_by_measurement(recipe, None, measure, limit(181e9))
        assert (config.model.n_layer, config.batch.total_tokens, timed) == (2, 8192, [2])

    @pytest.mark.parametrize("slowdown", [0.003, 0.03, 0.3, 0.5, 1.0, 2.0, 20.0, 2000.0])
    @pytest.mark.parametrize("length", [1, 3, 10])
    def test_on_machines_whose_rate_depends_on_the_size(self, slowdown: float, length: float) -> None:
        """Deeper models and larger micro-batches reach more, as on every machine seen."""

        def rate(config: RunConfig) -> float:
            rows = config.batch.micro_sequences
            return slowdown * 5e10 * config.model.n_layer * rows / (rows + 4)

        self.sized(rate, length=length)

    def test_a_depth_that_was_given_stays(self) -> None:
        assert self.sized(lambda config: 1e12, depth=3).model.n_layer == 3

    def test_on_a_gpu_a_neighbouring_depth_is_not_worth_another_compilation(self) -> None:
        timed: list[int] = []

        def recipe(depth: int | None, machine: Machine | None) -> RunConfig:
            layers = depth or (4 if machine is None else 5)
            return quickstart(depth=layers, machine=machine)

        def measure(config: RunConfig) -> Machine:
            timed.append(config.model.n_layer)
            return Machine(device="cuda:0", flops_per_second=3e11)

        assert sized_by_measurement(recipe, None, measure).model.n_layer == 4
        assert timed == [4]


class TestQuickstartOnAGpu:
    """8,635,921 training tokens, and steps as fast as a third of what such a device is said to multiply."""

    TOKENS = 8_635_921
    DEVICES: ClassVar = {  # FLOP/s -> layers, width, tokens a step, rows; by hand from the rules of quickstart
        "Apple M2": ("mps", 1e12, (5, 192, 8192, 8)),
        "RTX 3060": ("cuda:0", 8e12, (8, 256, 16384, 16)),
        "RTX 4090": ("cuda:0", 5e13, (10, 320, 16384, 16)),
        "A100": ("cuda:0", 1.2e14, (10, 320, 16384, 16)),
        "H100": ("cuda:0", 3e14, (10, 320, 16384, 16)),
    }

    @pytest.mark.parametrize("name", DEVICES)
    def test_sizes_and_no_more_than_four_epochs(self, name: str) -> None:
        device, rate, expected = self.DEVICES[name]
        here = Machine(device=device, flops_per_second=rate, training_tokens=self.TOKENS)
        config = quickstart(machine=here)
        model, batch = config.model, config.batch
        assert (model.n_layer, model.n_embd, batch.total_tokens, batch.micro_sequences) == expected
        shape = shape_for_depth(model.n_layer, **QUICKSTART_SIZE)
        tokens = config.horizon.amount
        if config.horizon.unit == "seconds":
            assert config.horizon == minutes(3)
            tokens *= rate / shape.flops_per_token
        assert 0.5 * self.TOKENS < tokens <= 4 * self.TOKENS
        assert tokens >= QUICKSTART_TOKENS_PER_PARAM * shape.scaling_params
        assert (config.horizon.unit == "tokens") == (rate * 180 > 4 * self.TOKENS * shape.flops_per_token)
        assert ("epochs" in (why_quickstart_size(config, here) or "")) == (config.horizon.unit == "tokens")

    def test_a_larger_text_takes_the_three_minutes(self) -> None:
        here = Machine(device="cuda:0", flops_per_second=3e14, training_tokens=280_000_000)
        config = quickstart(machine=here)
        assert config.horizon == minutes(3)
        assert (config.model.n_layer, config.model.n_embd, config.batch.total_tokens) == (16, 512, 32768)
        assert config.batch.micro_sequences == 32

    def test_a_length_that_was_asked_for_stays(self) -> None:
        here = Machine(device="cuda:0", flops_per_second=3e14, training_tokens=self.TOKENS)
        assert quickstart(machine=here, horizon=minutes(3)).horizon == minutes(3)
        assert "epochs" not in (why_quickstart_size(quickstart(machine=here, horizon=minutes(3)), here) or "")

    def test_a_cpu_repeats_a_small_text(self) -> None:
        assert quickstart(machine=Machine(device="cpu", flops_per_second=2e11, training_tokens=1000)) == quickstart(
            machine=machine(2e11)
        )

    def test_the_end_is_validated_as_often_as_by_the_clock(self) -> None:
        config = quickstart(machine=Machine(device="cuda:0", flops_per_second=3e14, training_tokens=self.TOKENS))
        steps = config.horizon.total_steps(tokens_per_step=16384, flops_per_token=1.0, scaling_params=1)
        assert steps == 2108
        assert config.eval.every_steps == 528  # validates at 528, 1056, 1584 and the end

    @pytest.mark.parametrize(("device", "rate"), [("cuda:0", 3e14), ("cpu", 1e11)])
    @pytest.mark.parametrize("processes", [1, 2, 3, 4, 8, 64])
    def test_every_process_has_a_micro_batch(self, device: str, rate: float, processes: int) -> None:
        here = Machine(
            device=device, flops_per_second=rate * processes, training_tokens=self.TOKENS, processes=processes
        )
        config = quickstart(machine=here)  # which refuses rows that do not divide a step
        assert config.micro_batches >= min(processes, config.batch.total_tokens // 1024)

    def test_the_first_size_that_is_timed_is_the_last(self) -> None:
        """An H100's table peak of 989.5 TFLOP/s: the assumed share gives the depth that steps at a third confirm."""
        timed: list[RunConfig] = []

        def recipe(depth: int | None, machine: Machine | None) -> RunConfig:
            return quickstart(depth=depth, machine=machine)

        def measure(config: RunConfig) -> Machine:
            timed.append(config)
            return Machine(device="cuda:0", flops_per_second=8e13, training_tokens=self.TOKENS)

        most = Machine(
            device="cuda:0", flops_per_second=None, most_flops_per_second=PRODUCTS_SHARE * 989.5e12,
            training_tokens=8_600_000,
        )  # fmt: skip
        config = sized_by_measurement(recipe, None, measure, most)
        assert [(c.model, c.batch) for c in timed] == [(config.model, config.batch)]
        assert config.horizon == Horizon(amount=4.0 * self.TOKENS, unit="tokens")


def test_quickstart_without_a_measurement_is_that_of_two_ordinary_cores() -> None:
    assert quickstart() == quickstart(machine=machine(None)) == quickstart(machine=machine(235e9))
    assert quickstart(horizon=Horizon(amount=10, unit="steps")).model == quickstart().model


@pytest.mark.parametrize(
    ("seconds", "gflops", "layers", "width", "step_tokens"),
    [
        # What two Zen 4 cores, in float32, too, and two Zen 5 cores reach with these sizes, about.
        (10, 100, 2, 64, 1024), (60, 125, 3, 128, 2048), (60, 210, 4, 128, 2048), (180, 250, 4, 128, 2048),
        (60, 410, 4, 128, 2048), (180, 410, 4, 128, 2048),
        (180, 1e6, 4, 128, 4096),  # a GPU: the text is as short there
        (1, 1, 1, 64, 1024),
    ],
)  # fmt: skip
def test_characters_are_learned_by_what_fits_into_the_time(
    seconds: float, gflops: float, layers: int, width: int, step_tokens: int
) -> None:
    config = shakespeare_char(horizon=Horizon(amount=seconds, unit="seconds"), machine=machine(gflops * 1e9))
    assert (config.model.n_layer, config.model.n_embd) == (layers, width)
    assert (config.batch.total_tokens, config.micro_batches) == (step_tokens, 1)
    assert config.model.seq_len == min(2048, step_tokens)
    deeper = shakespeare_char(depth=6, horizon=config.horizon, machine=machine(gflops * 1e9))
    assert (deeper.model.n_layer, deeper.model.n_embd) == (6, 192)


@pytest.mark.parametrize(("depth", "gflops", "step_tokens"), [(3, 100, 1024), (3, 120, 2048), (2, 40, 1024)])
def test_wide_layers_take_rows_of_the_whole_context_where_there_is_time_for_450(
    depth: int, gflops: float, step_tokens: int
) -> None:
    horizon = Horizon(amount=60, unit="seconds")
    config = shakespeare_char(depth=depth, horizon=horizon, machine=machine(gflops * 1e9))
    assert (config.batch.total_tokens, config.model.seq_len) == (step_tokens, step_tokens)


@pytest.mark.parametrize(("recipe", "context", "window"), [(quickstart, 1024, 128), (shakespeare_char, 2048, 64)])
def test_only_the_last_layer_sees_the_whole_of_a_long_context(
    recipe: Callable[..., RunConfig], context: int, window: int
) -> None:
    """What docs/LOG.md, 2026-11-25, found best, with keys that are offset. A context that is given may be shorter."""
    config = recipe(depth=3)
    assert (config.model.seq_len, config.model.key_offset) == (context, True)
    assert config.model.layer_windows() == (window, window, None)
    assert (
        apply_overrides(config, {"model.seq_len": 32, "batch.micro_sequences": 64}).model.layer_windows() == (None,) * 3
    )


@pytest.mark.parametrize(
    ("gflops", "text_tokens", "decay"),
    [(250, None, 0.2), (410, None, 0.6), (410, 1_003_854, 0.6), (410, 5_000_000, 0.2)],
    ids=["Zen 4, four epochs", "Zen 5, nine epochs", "the same, once it is read", "a longer text"],
)
def test_many_epochs_of_characters_get_more_weight_decay(gflops: float, text_tokens: int | None, decay: float) -> None:
    here = Machine(device="cpu", flops_per_second=gflops * 1e9, training_tokens=text_tokens)
    assert shakespeare_char(machine=here).optim.muon.weight_decay == decay
    assert shakespeare_char(machine=here, horizon=Horizon(amount=2100, unit="steps")).optim.muon.weight_decay == 0.2


@pytest.mark.parametrize(
    ("recipe", "size", "parts"), [(quickstart, QUICKSTART_SIZE, 4), (shakespeare_char, SHAKESPEARE_SIZE, 6)]
)
@pytest.mark.parametrize(("unit", "amount"), [("steps", 40), ("flops", 1e14), ("tokens_per_param", 9), ("tokens", 1e6)])
def test_a_run_that_is_to_stop_at_a_loss_validates_on_the_way(
    recipe: Callable[..., RunConfig], size: dict[str, int], parts: int, unit: HorizonUnit, amount: float
) -> None:
    length, shape = Horizon(amount=amount, unit=unit, until_val_loss=2.0), shape_for_depth(2, **size)
    config = recipe(depth=2, horizon=length)
    steps = length.total_steps(
        tokens_per_step=config.batch.total_tokens,
        flops_per_token=shape.flops_per_token,
        scaling_params=shape.scaling_params,
    )
    assert steps is not None
    assert config.eval.every_steps in (math.ceil(steps / parts), steps // parts + 1)
    without = recipe(depth=2, horizon=replace(length, until_val_loss=None))
    assert config.sample.every_steps == config.eval.every_steps
    assert config == replace(without, horizon=length, eval=config.eval, sample=config.sample)
    assert (without.eval.every_steps is not None) == (recipe is quickstart and unit == "tokens")


def test_a_depth_given_is_the_depth() -> None:
    assert quickstart(depth=6, machine=machine(1e9)).model.n_layer == 6
    with pytest.raises(ConfigError, match="depth"):
        quickstart(depth=0)


def test_adamw_rates_follow_width_and_batch() -> None:
    assert adamw_lr_scale_for_width(768) == 1.0
    assert adamw_lr_scale_for_width(192) == 2.0
    # Width 128 and 2^13 tokens: nanochat's 0.3 times sqrt(768 / 128) times a half.
    assert quickstart(horizon=minutes(6)).optim.embedding.lr == pytest.approx(0.3 * math.sqrt(6) / 2)


def test_the_size_is_explained_where_the_recipe_chose_it() -> None:
    here = machine(240e9)
    reason = why_quickstart_size(quickstart(machine=here), here)
    assert reason is not None
    assert "180 s x 240 GFLOP/s (timed) = 4.3e+13 FLOP" in reason
    assert f"{QUICKSTART_TOKENS_PER_PARAM:g} tokens per parameter, at most 4.6 sqrt(tokens) a step" in reason
    assert why_quickstart_size(quickstart(depth=9, machine=here), here) is None
    assert why_quickstart_size(quickstart(horizon=Horizon(amount=10, unit="steps")), here) is None
    assert why_quickstart_size(shakespeare_char(), here) is None


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_takes_the_common_arguments(name: str) -> None:
    depth = None if "finetune" in name else 2  # whose weights have theirs
    config = configure(name, depth=depth, horizon=Horizon(amount=5, unit="steps"), machine=machine(1e12))
    assert (config.recipe, config.horizon) == (name, Horizon(amount=5, unit="steps"))
    assert depth is None or config.model.n_layer == depth
    assert configure(name) == RECIPES[name]()
    assert RECIPES[name](horizon=minutes(0.5)).horizon == Horizon(amount=30.0, unit="seconds")
    assert (RECIPES[name].__doc__ or "").strip()


class TestAppliedScaling:
    """What a run prints of its rates is what was done to them, by hand here from nanochat's rules."""

    def test_of_nanochat(self) -> None:
        config = RECIPES["nanochat-tiny"]()  # 4 layers, width 128, 8,192 tokens a step
        assert applied_scaling(config, MACHINE) == [
            "AdamW rates x 2.45 (width 128, tuned at 768)",
            "all rates x 0.125 (the recipe's batch of 8,192 tokens, tuned at 524,288)",
            "weight decay 0.2 -> 1.8 (depth 4, tuned at 12)",
        ]
        assert config.optim.embedding.lr == pytest.approx(0.3 * (768 / 128) ** 0.5 * 0.125)
        assert config.optim.muon.lr == pytest.approx(0.02 * 0.125)
        assert config.optim.muon.weight_decay == pytest.approx(0.2 * (12 / 4) ** 2)

    def test_with_arguments_of_its_own(self) -> None:
        config = configure("nanochat", depth=12, own={"total_batch_size": 2**21, "weight_decay": 0.1})
        assert applied_scaling(config, MACHINE)[1:] == [
            "all rates x 2 (the recipe's batch of 2,097,152 tokens, tuned at 524,288)",
            "weight decay 0.1 -> 0.1 (depth 12, tuned at 12)",
        ]

    def test_not_of_what_was_set_by_hand(self) -> None:
        changed = apply_overrides(RECIPES["nanochat-tiny"](), {"optim.muon.weight_decay": 0.3})
        assert applied_scaling(changed, MACHINE) == ["AdamW rates x 2.45 (width 128, tuned at 768)"]
        assert applied_scaling(RECIPES["nanogpt/shakespeare-char"](), MACHINE) == []

    @pytest.mark.parametrize("name", RECIPES)
    def test_of_every_recipe(self, name: str) -> None:
        assert all("x 1 (" not in line for line in applied_scaling(configure(name, machine=MACHINE), MACHINE))
