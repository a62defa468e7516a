"""Configurations that cannot be are refused at construction, by a line that names field, value, reason and way out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from gptlab.config.errors import ConfigError, UserError, nearest_name
from gptlab.config.length import Horizon
from gptlab.config.load import apply_overrides
from gptlab.config.model import ModelConfig
from gptlab.config.optim import AdamWConfig, MuonConfig, OptimConfig, ScheduleConfig
from gptlab.config.run import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    FaultsConfig,
    ParallelConfig,
    RunConfig,
    RuntimeConfig,
    SampleConfig,
    TokenizerConfig,
)

IMPOSSIBLE: list[tuple[Callable[[], object], str, str]] = [
    (lambda: DataConfig(source=("",)), "data.source", "none by an empty name"),
    (lambda: DataConfig(val_source=("a", "")), "data.source", "none by an empty name"),
    (lambda: RuntimeConfig(threads=20_000), "runtime.threads", "is more than can be started (nearest valid: 1024)"),
    (lambda: ModelConfig(n_embd=100, n_head=3), "model.n_head", "nearest valid: 2"),
    (lambda: ModelConfig(n_embd=256, n_head=8, n_kv_head=3), "model.n_kv_head", "nearest valid: 2"),
    (lambda: ModelConfig(n_embd=12, n_head=4), "model.n_head", "even head width"),
    (lambda: ModelConfig(window_pattern="SXL"), "model.window_pattern", "nearest valid: SL"),
    (lambda: ModelConfig(window_pattern=""), "model.window_pattern", "nearest valid: L"),
    (lambda: ModelConfig(window_tokens=0), "model.window_tokens", "greater than zero"),
    (lambda: ModelConfig(n_layer=0), "model.n_layer", "greater than zero"),
    (lambda: ModelConfig(n_embd=32, mlp_ratio=0.01), "model.mlp_ratio", "nearest valid: 0.03125"),
    (lambda: ModelConfig(mlp_ratio=-1.0), "model.mlp_ratio", "greater than zero"),
    (lambda: ModelConfig(mlp_ratio=math.nan), "model.mlp_ratio", "greater than zero"),
    (lambda: ModelConfig(dropout=1.0), "model.dropout", "[0, 1)"),
    (lambda: ModelConfig(norm="rmsnrm"), "model.norm", "nearest valid: rmsnorm"),  # type: ignore[arg-type]
    (lambda: TokenizerConfig(vocab_size=256), "tokenizer.vocab_size", "nearest valid: 257"),
    (lambda: TokenizerConfig(vocab_size=10**9), "tokenizer.vocab_size", "2^22 or less (nearest valid: 4194304)"),
    (lambda: TokenizerConfig(kind="bytes"), "tokenizer.kind", "nearest valid: byte"),  # type: ignore[arg-type]
    (lambda: DataConfig(source=()), "data.source", "at least one"),
    (lambda: DataConfig(val_fraction=0.0), "data.val_fraction", "between 0 and 1"),
    (lambda: DataConfig(val_fraction=1.0), "data.val_fraction", "between 0 and 1"),
    (lambda: Horizon(amount=-60.0), "horizon.amount", "positive"),
    (lambda: Horizon(amount=math.inf), "horizon.amount", "positive"),
    (lambda: Horizon(unit="hours"), "horizon.unit", "must be one of"),  # type: ignore[arg-type]
    (lambda: Horizon(until_val_loss=0.0), "horizon.until_val_loss", "greater than zero"),
    (
        lambda: RunConfig(horizon=Horizon(until_val_loss=2.0), eval=EvalConfig(at_end=True)),
        "horizon.until_val_loss",
        "give eval.every_steps too",
    ),
    (lambda: BatchConfig(micro_sequences=0), "batch.micro_sequences", "greater than zero"),
    (lambda: AdamWConfig(lr=-0.1), "optim.lr", "not be negative"),
    (lambda: AdamWConfig(lr=1e39), "optim.lr", "is more than any run uses (nearest valid: 1000000000.0)"),
    (lambda: AdamWConfig(weight_decay=1e300), "optim.weight_decay", "is more than any run uses"),
    (lambda: AdamWConfig(eps=0.0), "optim.eps", "greater than zero"),
    (lambda: AdamWConfig(eps=1e-39), "optim.eps", "may be zero in float32, and an update without a gradient 0 / 0"),
    (lambda: MuonConfig(lr=1e39), "optim.muon.lr", "is more than any run uses"),
    (lambda: MuonConfig(weight_decay=1e300), "optim.muon.weight_decay", "is more than any run uses"),
    (lambda: AdamWConfig(beta2=1.0), "optim.beta2", "[0, 1)"),
    (lambda: MuonConfig(iterations=6), "optim.muon.iterations", "nearest valid: 5"),
    (lambda: MuonConfig(momentum=1.0), "optim.muon.momentum", "[0, 1)"),
    (lambda: OptimConfig(grad_clip=0.0), "optim.grad_clip", "must be greater than zero; none is a value too"),
    (lambda: EvalConfig(every_steps=-1), "eval.every_steps", "must be greater than zero; none is a value too"),
    (lambda: SampleConfig(top_k=0), "sample.top_k", "must be greater than zero; none is a value too"),
    (lambda: MuonConfig(normuon_beta2=1.0), "optim.muon.normuon_beta2", "must be in [0, 1); none is a value too"),
    (
        lambda: FaultsConfig(max_skipped=-1),
        "faults.max_skipped",
        "must not be negative; none is a value too (nearest valid: 0)",
    ),
    (lambda: ScheduleConfig(warmup_fraction=0.6, warmdown_fraction=0.5), "schedule.warmup_fraction", "exceed"),
    (lambda: ScheduleConfig(final_lr_scale=-0.1), "schedule.final_lr_scale", "[0, 1]"),
    (lambda: EvalConfig(every_seconds=0.0), "eval.every_seconds", "greater than zero"),
    (lambda: SampleConfig(temperature=-1.0), "sample.temperature", "nearest valid: 0"),
    (lambda: CheckpointConfig(keep_last=0), "checkpoint.keep_last", "greater than zero"),
    (lambda: RuntimeConfig(device="gpu"), "runtime.device", "nearest valid: cpu"),
    (lambda: RuntimeConfig(device="cpu:1"), "runtime.device", "nearest valid: cpu"),
    (lambda: RuntimeConfig(device="cuda:x"), "runtime.device", "nearest valid: cuda"),
    (lambda: FaultsConfig(max_skipped_in_a_row=-1), "faults.max_skipped_in_a_row", "nearest valid: 0"),
    (
        lambda: FaultsConfig(spike_factor=1.0),
        "faults.spike_factor",
        "greater than 1; none is a value too (nearest valid: 2.0)",
    ),
    (lambda: FaultsConfig(spike_window=0), "faults.spike_window", "greater than zero"),
    (lambda: RunConfig(faults=FaultsConfig(spike_factor=2.0)), "faults.spike_factor", "checkpoint.every_steps"),
    (lambda: ParallelConfig(mode="shard"), "parallel.mode", "nearest valid: sharded"),  # type: ignore[arg-type]
    (
        lambda: ParallelConfig(mode="sharded", exact_any_world_size=True),
        "parallel.exact_any_world_size",
        "nearest valid: False",
    ),
    (
        lambda: ParallelConfig(reduce_each_micro_batch=True, exact_any_world_size=True),
        "parallel.exact_any_world_size",
        "reduce_each_micro_batch add in an order",
    ),
    (lambda: ParallelConfig(shard_ranks=8), "parallel.shard_ranks", 'parallel.mode = "sharded"'),
    (
        lambda: ParallelConfig(mode="sharded", shard_ranks=1),
        "parallel.shard_ranks",
        "none is a value too (nearest valid: 2)",
    ),
    (
        lambda: copies_of(4).ranks_per_copy(30),
        "parallel.shard_ranks",
        "divide the number of processes, 30 (nearest valid: 3)",
    ),
    (lambda: copies_of(9).ranks_per_copy(8), "parallel.shard_ranks", "nearest valid: 8"),
    (
        lambda: RunConfig(horizon=Horizon(unit="seconds"), parallel=ParallelConfig(exact_any_world_size=True)),
        "parallel.exact_any_world_size",
        "in steps or tokens",
    ),
    (lambda: RunConfig(seed=-1), "seed", "between 0 and"),
    (lambda: RunConfig(batch=BatchConfig(total_tokens=30_000)), "batch.total_tokens", "nearest valid: 32768"),
]


@pytest.mark.parametrize(("build", "field", "says"), IMPOSSIBLE)
def test_the_impossible_is_refused_by_name(build: Callable[[], object], field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    message = str(caught.value)
    assert message.startswith(f"{field} = ")
    assert says in message
    assert "\n" not in message
    assert isinstance(caught.value, UserError)


def copies_of(ranks: int) -> ParallelConfig:
    return ParallelConfig(mode="sharded", shard_ranks=ranks)


def test_ranks_per_copy() -> None:
    assert copies_of(4).ranks_per_copy(8) == copies_of(4).ranks_per_copy(4) == 4
    assert ParallelConfig(mode="sharded").ranks_per_copy(6) == 6


def test_configurations_are_frozen_values() -> None:
    assert RunConfig() == RunConfig()
    assert hash(RunConfig()) == hash(RunConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 2  # type: ignore[misc]


def test_the_nearest_divisor_is_valid_itself() -> None:
    for width in (96, 100, 384, 768):
        for heads in range(1, 25):
            if width % heads:
                with pytest.raises(ConfigError) as caught:
                    ModelConfig(n_embd=width, n_head=heads, position="learned")
                ModelConfig(n_embd=width, n_head=int(str(caught.value.nearest)), position="learned")


def test_nearest_name() -> None:
    assert nearest_name("trian", ["train", "plan", "data"]) == "train"
    assert nearest_name("xyz", ["train", "plan"]) is None


class TestHorizon:
    def test_steps_by_hand(self) -> None:
        size = {"tokens_per_step": 1000, "flops_per_token": 60.0, "scaling_params": 500}
        assert Horizon(amount=7, unit="steps").total_steps(**size) == 7
        assert Horizon(amount=10_999, unit="tokens").total_steps(**size) == 10
        assert Horizon(amount=60.0 * 1000 * 9.6, unit="flops").total_steps(**size) == 10
        assert Horizon(amount=20, unit="tokens_per_param").total_steps(**size) == 10
        assert Horizon(amount=5, unit="seconds").total_steps(**size) is None

    def test_less_than_one_step_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="less than one step"):
            Horizon(amount=999, unit="tokens").total_steps(tokens_per_step=1000, flops_per_token=1.0, scaling_params=1)

    def test_reads_as_a_phrase(self) -> None:
        assert str(Horizon(amount=180, unit="seconds")) == "180 seconds"
        assert str(Horizon(amount=12_345_678, unit="tokens")) == "12,345,678 tokens"
        assert str(Horizon(amount=3.5e18, unit="flops")) == "3.5e+18 flops"
        assert str(Horizon(amount=20, unit="tokens_per_param", until_val_loss=1.5)) == (
            "validation loss 1.5, at most 20 tokens per param"
        )


class TestModel:
    def test_windows_by_hand(self) -> None:
        """Half the context before the token, and the token; of two tokens that is all."""
        windows = ModelConfig(n_layer=6, seq_len=512, window_pattern="SSSL").layer_windows()
        assert windows == (257, 257, 257, None, 257, None)
        assert ModelConfig(n_layer=2, seq_len=3, window_pattern="S").layer_windows() == (2, None)
        assert ModelConfig(n_layer=2, seq_len=2, window_pattern="S").layer_windows() == (None, None)
        for window in (64, 65):
            model = ModelConfig(n_layer=2, seq_len=64, window_pattern="S", window_tokens=window)
            assert model.layer_windows() == (None, None)

    def test_value_embeddings_alternate_and_end_on_the_last_layer(self) -> None:
        assert [ModelConfig(n_layer=4).has_value_embedding(i) for i in range(4)] == [False, True, False, True]
        assert [ModelConfig(n_layer=3).has_value_embedding(i) for i in range(3)] == [True, False, True]
        assert not ModelConfig(value_embeddings=False).has_value_embedding(3)

    def test_derived_sizes(self) -> None:
        config = ModelConfig(n_embd=384, n_head=6, n_kv_head=2, vocab_size=4097, mlp_ratio=2.5)
        assert (config.head_dim, config.kv_heads, config.mlp_width, config.padded_vocab_size) == (64, 2, 960, 4160)
        with pytest.raises(ConfigError, match="tokenizer"):
            _ = ModelConfig().padded_vocab_size


def test_a_step_is_whole_micro_batches() -> None:
    config = RunConfig(batch=BatchConfig(total_tokens=32_768, micro_sequences=16), model=ModelConfig(seq_len=256))
    assert config.micro_tokens == 4096
    assert config.micro_batches == 8


@pytest.mark.parametrize(
    ("asked", "rows", "micro_batches"),
    [
        ({"batch.total_tokens": 65_536}, 16, 16),
        ({"batch.total_tokens": 6 * 256}, 2, 3),
        ({"model.seq_len": 4096}, 8, 1),
        ({"batch.total_tokens": 2048, "batch.micro_sequences": 4}, 4, 2),
    ],
)
def test_a_smaller_step_has_fewer_rows_in_a_micro_batch(asked: dict[str, int], rows: int, micro_batches: int) -> None:
    config = RunConfig(batch=BatchConfig(total_tokens=32_768, micro_sequences=16), model=ModelConfig(seq_len=256))
    smaller = apply_overrides(config, asked)
    assert (smaller.batch.micro_sequences, smaller.micro_batches) == (rows, micro_batches)
    with pytest.raises(ConfigError, match="must be a multiple"):
        apply_overrides(config, {"batch.total_tokens": 1000})
    with pytest.raises(ConfigError, match="seq_len"):
        apply_overrides(config, {"model.seq_len": 0})


def test_a_whole_number_in_a_field_of_floats_becomes_one() -> None:
    """Also where a program makes the configuration: 15 in config.json would be another run than 15.0."""
    with pytest.raises(
        ConfigError, match="must be 1e4 or less: a larger one loses logits to rounding; none is a value too"
    ):
        ModelConfig(logit_softcap=1e5)
    model = ModelConfig(logit_softcap=15)
    assert type(model.logit_softcap) is float
    assert type(dataclasses.replace(model, rope_base=10_000).rope_base) is float
