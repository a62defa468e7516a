"""`gptlab bench --sampling`: every type and number of rows, and bytes that follow from the model by hand."""

from __future__ import annotations

import json

import pytest
import torch

from gptlab.bench import sampling_rate
from gptlab.bench.sampling_rate import SamplingBench, SamplingRate
from gptlab.cli.bench import describe_sampling
from gptlab.cli.main import main

ARGV = (
    "bench", "--sampling", "--model.n-layer", "2", "--model.n-embd", "32", "--model.n-head", "2",
    "--model.seq-len", "64", "--model.window-pattern", "SL", "--model.window-tokens", "20",
    "--tokenizer.vocab-size", "300", "--runtime.device", "cpu", "--runtime.threads", "1", "--runtime.compile", "off",
)  # fmt: skip


@pytest.fixture(autouse=True)
def short_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_rate, "BANDWIDTH_BYTES", 2**20)


def test_bytes_follow_from_the_model_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGV, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = {(rate["dtype"], rate["rows"]): rate for rate in found["rates"]}
    assert list(rates) == [("float32", 1), ("float32", 8), ("bfloat16", 1), ("bfloat16", 8)]
    # A layer's products have 12 * 32 * 32 weights, the head 300 * 32; layer 1's gates for values 2 rows of 32.
    weights = 2 * 12 * 32 * 32 + 300 * 32 + 2 * 32
    # 48 tokens after a prompt of 16: in the middle there are 40, of which the windowed layer sees 20; the kernel keeps
    # keys and values of 32 channels in float32, whatever the weights are.
    cached = 2 * 32 * 4 * (20 + 40)
    for (dtype, rows), rate in rates.items():
        size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        assert rate["bytes_per_step"] == weights * size + rows * cached * (1 if found["one_call"] else size / 4)
        assert rate["tokens_per_second"] == rows / rate["step_seconds"] > 0
        assert rate["best_step_seconds"] <= rate["step_seconds"]


def test_table_by_hand() -> None:
    """5 MB a step at 10 GB/s are 0.5 ms, in which eight rows get eight tokens: 16,000 a second; 2 ms are a quarter."""
    rate = SamplingRate(
        dtype="float32", rows=8, step_seconds=2e-3, best_step_seconds=1e-3, bytes_per_step=5_000_000,
        bandwidth_bytes_per_second=10e9,
    )  # fmt: skip
    bench = SamplingBench(
        device="cpu", device_name="X", threads=2, recipe="r", model="m", one_call=False, rates=(rate,)
    )
    assert describe_sampling(bench).splitlines() == [
        "device    X (cpu), 2 threads; a token of all rows by PyTorch's operations",
        "memory    10.0 GB/s read",
        "model     r: m",
        "",
        "         rows  tokens/s   best  MB a step  memory's bound  of bound",
        "float32     8     4,000  8,000        5.0          16,000     25.0%",
        "memory's bound: tokens/s if reading weights, keys and values were all; more where a cache holds them",
    ]
