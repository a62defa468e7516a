"""A plan counts what is really there: memory by hand and against a real pass, lengths and times by arithmetic."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gptlab.bench import training_rate
from gptlab.bench.live_bytes import LiveBytes
from gptlab.bench.memory import count_memory, kept_for_backward, model_on_meta
from gptlab.bench.plan import figures, make_plan
from gptlab.bench.training_rate import Rate, assumed_vocab_size
from gptlab.cli import main as cli
from gptlab.cli.plan import describe
from gptlab.config.errors import ConfigError
from gptlab.config.length import Horizon, HorizonUnit
from gptlab.config.load import apply_overrides
from gptlab.config.model import ModelConfig
from gptlab.config.recipes import configure
from gptlab.config.run import RunConfig, TokenizerConfig
from gptlab.config.scaling import Machine
from gptlab.model.gpt import GPT, build_model
from gptlab.model.kernels import ops
from gptlab.runtime.hardware.peak import Peak
from gptlab.runtime.hardware.place import Place, place_of

GPU_PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
PLACE = Place(torch.device("cpu"), torch.float32, 1, Peak(flops_per_second=1e11, source="measured"))
RATE = Rate(tokens_per_second=6400.0, flops_per_second=5e9, tokens_per_step=64, date="2026-11-22")


def tiny(unit: HorizonUnit = "steps", amount: float = 10, **overrides: object) -> RunConfig:
    fields = {"n_layer": 2, "n_embd": 32, "n_head": 2, "seq_len": 16, "window_pattern": "SL"}
    values = {f"model.{name}": value for name, value in fields.items()}
    values |= {"batch.micro_sequences": 4, "batch.total_tokens": 128, "tokenizer.vocab_size": 300}
    config = apply_overrides(RunConfig(horizon=Horizon(amount=amount, unit=unit)), values)
    return apply_overrides(config, {name.replace("__", "."): value for name, value in overrides.items()})


def on_meta(config: RunConfig, dtype: torch.dtype = torch.float32) -> GPT:
    with torch.device("meta"):
        return GPT(apply_overrides(config, {"model.vocab_size": 300}).model, dtype)


class Squares(nn.Module):
    """loss = sum((x W)^2): keeps the input x for W's gradient, and x W for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3)
        self.weight = nn.Parameter(torch.ones(3, 5))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return (self.table(tokens) @ self.weight).square().sum()


def test_kept_by_hand() -> None:
    """8 tokens of 8 bytes, which the table's gradient needs; their 8 * 3 inputs and 8 * 5 products of 4 bytes."""
    assert kept_for_backward(Squares(), rows=2, seq_len=4) == 8 * 8 + 8 * 3 * 4 + 8 * 5 * 4  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_meta_device_counts_what_a_real_pass_keeps(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    model = build_model(on_meta(config).config, device=torch.device("cpu"), compute_dtype=dtype, seed=1)
    by_kernel, counted = kept_for_backward(model, 4, 16), kept_for_backward(on_meta(config, dtype), 4, 16)
    monkeypatch.setattr(ops, "_fused", None)
    real = kept_for_backward(model, 4, 16)
    # CPU attention keeps its log-sum-exp in other strides and paddings than its meta version: a few percent.
    assert counted == pytest.approx(real, rel=0.1)
    assert by_kernel <= 1.1 * counted


def test_counts_the_gradients_of_a_large_head_beside_those_of_earlier_micro_batches() -> None:
    """Beside a real second pass, within the few percent that the CPU's attention differs by."""
    config = tiny(model__vocab_size=5_000)
    model = build_model(config.model, device=torch.device("cpu"), compute_dtype=torch.float32, seed=1)
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    model.loss(tokens, tokens).backward()
    held = [weight.grad for weight in model.parameters() if weight.grad is not None]
    with LiveBytes([*model.parameters(), *model.buffers(), *held]) as live:
        loss = model.loss(tokens, tokens)
        live.peak = live.bytes
        loss.backward()
    meta = model_on_meta(config, torch.float32, "cpu")
    counted = count_memory(meta, config).activations
    assert live.peak == pytest.approx(counted, rel=0.1)
    one = apply_overrides(config, {"batch.total_tokens": 64})
    assert count_memory(meta, one).activations == counted - model.head.weight.nbytes


def test_activations_grow_with_the_micro_batch() -> None:
    model = on_meta(tiny())
    kept = [kept_for_backward(model, rows, 16) for rows in (2, 3, 4)]
    assert kept[2] - kept[1] == kept[1] - kept[0] > 0


def test_memory_by_hand() -> None:
    """AdamW everywhere: 4 bytes a weight and a gradient, 8 of moments, and a 4-byte step count a tensor."""
    config = tiny(optim__matrix_optimizer="adamw")
    model = on_meta(config)
    weights = sum(p.numel() for p in model.parameters())
    memory = count_memory(model, config)
    assert memory.weights == memory.gradients == 4 * weights
    assert memory.optimizer == 8 * weights + 4 * len(list(model.parameters()))
    assert memory.snapshot == memory.weights + memory.optimizer
    # 512 rows of 16 logits of 320 entries, for which gradients and activations are freed.
    assert memory.device_total == memory.weights + memory.optimizer + 512 * 16 * 320 * 4
    small = count_memory(model, tiny(optim__matrix_optimizer="adamw", eval__micro_sequences=1))
    assert small.device_total == memory.weights + memory.gradients + memory.optimizer + memory.activations
    assert count_memory(model, tiny(eval__at_end=False)).validation == 0
    assert memory.total == memory.device_total + memory.snapshot
    for changes in ({"checkpoint__background": False}, {"eval__only": True}):
        assert count_memory(model, tiny(**changes)).snapshot == 0
    assert count_memory(model, tiny()).optimizer < memory.optimizer  # Muon keeps one moment a weight, not two.
    exact = tiny("steps", 10, parallel__exact_any_world_size=True)
    assert count_memory(model, exact).gradients == exact.micro_batches.bit_length() * memory.gradients


class TestLength:
    def test_a_horizon_in_steps(self) -> None:
        plan = make_plan(tiny("steps", 10), PLACE, RATE)
        assert plan.steps == 10
        assert plan.seconds == pytest.approx(10 * 128 / 6400)

    def test_a_horizon_in_seconds(self) -> None:
        plan = make_plan(tiny("seconds", 60), PLACE, RATE)
        assert plan.seconds == 60
        assert plan.steps == 60 * 6400 // 128

    def test_tokens_per_parameter(self) -> None:
        plan = make_plan(tiny("tokens_per_param", 20), PLACE)
        assert plan.steps == 20 * plan.parameters.scaling // 128

    def test_the_step_that_was_timed_is_named(self) -> None:
        """The update is paid once a step: one of 512 tokens takes more time a token than one of 65,536."""
        plan = make_plan(tiny("steps", 10), PLACE, RATE)
        assert "at 6,400 tokens/s, timed on 2026-11-22 with 64 tokens a step;" in describe(plan)
        assert figures(plan, device_memory=None)["timed_tokens_per_step"] == 64
        assert figures(make_plan(tiny("steps", 10), PLACE), device_memory=None)["timed_tokens_per_step"] is None

    def test_no_speed_is_claimed_that_was_never_timed(self) -> None:
        plan = make_plan(tiny("seconds", 60), PLACE)
        assert plan.steps is None
        assert "unknown until steps are timed" in describe(plan)
        plan = make_plan(tiny("steps", 100_000), PLACE)
        assert (plan.steps, plan.seconds) == (100_000, None)
        seconds = 100_000 * 128 * plan.flops.total / 1e11
        assert f"more than {seconds / 3600:.3g} hours ({seconds:,.0f} seconds), at the peak" in describe(plan)
        unknown = replace(PLACE, peak=Peak(flops_per_second=None, source="unknown"))
        plan = make_plan(tiny("steps", 10), unknown)
        assert "unknown; `gptlab bench custom`" in describe(plan)

    def test_less_than_a_step_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="less than one step"):
            make_plan(tiny("tokens", 127), PLACE)


def test_vocabulary_before_the_text_is_read() -> None:
    def size(**fields: object) -> int:
        return assumed_vocab_size(RunConfig(tokenizer=TokenizerConfig(**fields)))[0]  # type: ignore[arg-type]

    assert size(kind="bpe", vocab_size=5000) == 5000
    assert size(kind="byte") == 257
    assert size(kind="char") == 128
    assert assumed_vocab_size(RunConfig(model=ModelConfig(vocab_size=65))) == (65, "model.vocab_size")


def test_describe_names_every_figure_with_its_unit() -> None:
    plan = make_plan(tiny(), replace(PLACE, dtype=torch.bfloat16), RATE)
    text = describe(plan, device_memory=2**30)
    for part in (
        "depth 2, width 32, heads 2, context 16 tokens", "300 entries",
        "128 tokens: 2 micro-batches of 4 rows of 16 tokens", "of 1.07 GB", "0.1 TFLOP/s (measured)",
        "at 6,400 tokens/s, timed on 2026-11-22", "in bfloat16", "10 steps", "hours",
    ):  # fmt: skip
        assert part in text


def test_what_does_not_fit_says_what_to_lower() -> None:
    plan = make_plan(tiny(), PLACE)
    kept = plan.memory.weights + plan.memory.gradients + plan.memory.optimizer
    model = f"of {kept / 1e6:.1f} MB: too little; lower the depth or width of the model"
    assert model in describe(plan, device_memory=kept)
    assert "too little; lower batch.micro_sequences" in describe(plan, device_memory=kept + 1)
    of_one_row = make_plan(tiny(batch__micro_sequences=1), PLACE)
    assert model in describe(of_one_row, device_memory=kept + 1)


def test_command_reads_no_data_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [
        "plan",
        "--depth",
        "2",
        "--steps",
        "7",
        "--data",
        "missing.txt",
        "--device",
        "cpu",
        "--runtime.threads",
        "1",
    ]
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert "7 steps" in text
    assert "depth 2," in text
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["plan", "--minutes", "-1"]) == 2
    assert cli.main(["plan", "--device", "cuda:99"]) == 2


@pytest.mark.parametrize("words", [["--depths", "2,8"], ["--gpu-gb", "80"], ["--ranks", "--depths", "2"]])
def test_arguments_of_the_table_are_refused_without_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "nanochat-tiny", *words]) == 2
    assert capsys.readouterr() == (
        "",
        "gptlab: error: --depths and --gpu-gb belong to the table of --ranks: give --ranks 8,64 too\n",
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--depth", "3", "--depths", "4"], "--depth and --depths both say how deep: give one of them"),
        (["--gpu-gb", "0"], "--gpu-gb = 0.0: must be greater than zero"),
        (["--gpu-gb", "-1"], "--gpu-gb = -1.0: must be greater than zero"),
    ],
)
def test_a_table_that_cannot_be_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "nanochat-tiny", "--ranks", "8", *words]) == 2
    assert capsys.readouterr() == ("", f"gptlab: error: {says}\n")


def test_where_no_step_was_timed_the_peak_sizes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `train`, which times this size first. By hand: 180 s of 88 GFLOP/s are 5.2 million tokens of two layers, of
    3.05 MFLOP each; three layers would see 1.6 tokens a parameter."""
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path))
    here = Machine(device="cpu", flops_per_second=None, most_flops_per_second=88e9)
    monkeypatch.setattr(training_rate, "limited_machine", lambda *_: here)
    quickstart = ["plan", "--minutes", "3", "--device", "cpu", "--dtype", "float32"]
    assert cli.main(quickstart) == 0
    text = capsys.readouterr().out
    assert "depth 2, width 64" in text
    assert "180 s x 88 GFLOP/s (assumed)" in text
    config = configure("quickstart", depth=2, horizon=Horizon(amount=180, unit="seconds"), machine=here)
    config = apply_overrides(config, {"runtime.device": "cpu", "runtime.dtype": "float32"})
    training_rate.remember_rate(config, place_of(config), replace(RATE, flops_per_second=90e9))
    assert cli.main(quickstart) == 0
    assert "180 s x 90 GFLOP/s (timed)" in capsys.readouterr().out


def test_the_table_of_the_docs_is_what_the_command_plans() -> None:
    """One of its numbers."""
    found = re.search(
        r"^\| `--depth 12` \| [^|]* \| ([\d.]+) GB \|", GPU_PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found is not None
    place = Place(torch.device("cuda", 0), torch.bfloat16, 1, Peak(None, "unknown"))
    config = apply_overrides(configure("nanochat", depth=12), {"batch.micro_sequences": 16})
    assert make_plan(config, place).memory_bytes / 1e9 == pytest.approx(float(found[1]), rel=0.01)
