"""`gptlab bench --sampling`: tokens a second that a model samples, beside what memory bandwidth allows.

A token reads all weights that it is multiplied with, and the keys and values before it. So a step takes at least the
time in which memory delivers that many bytes, whatever computes it; several rows share the weights.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from gptlab.bench.plan import model_text
from gptlab.bench.training_rate import assumed_vocab_size
from gptlab.config.run import RunConfig
from gptlab.eval.continuation import Drawing, draw
from gptlab.model.decoder import Decoder
from gptlab.model.gpt import GPT, build_model
from gptlab.model.kernels import ops
from gptlab.runtime.hardware.device import device_name, synchronize
from gptlab.runtime.hardware.place import place_of

ROWS = (1, 8)
PROMPT_TOKENS = 16
MOST_TOKENS = 256
BANDWIDTH_BYTES = 2**28
"""Of one read: more than caches hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRate:
    """One type and number of rows; the median over steps of one token a row."""

    dtype: str
    rows: int
    step_seconds: float
    best_step_seconds: float
    bytes_per_step: int
    """Weights once, and the keys and values of each row at the middle of the measurement."""
    bandwidth_bytes_per_second: float

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.step_seconds

    @property
    def bound_tokens_per_second(self) -> float:
        """If memory were all that takes time."""
        return self.rows * self.bandwidth_bytes_per_second / self.bytes_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBench:
    device: str
    device_name: str
    threads: int
    recipe: str
    model: str
    one_call: bool
    """Whether the decode kernel computes a step; otherwise PyTorch's operations do."""
    rates: tuple[SamplingRate, ...]

    def to_json(self) -> dict[str, Any]:
        derived = ("tokens_per_second", "bound_tokens_per_second")
        rates = [dataclasses.asdict(rate) | {name: getattr(rate, name) for name in derived} for rate in self.rates]
        return dataclasses.asdict(self) | {"rates": rates}


def measure_sampling(config: RunConfig, *, seconds: float) -> SamplingBench:
    """Sample from the run's model with first weights, with its `sample.temperature` and `sample.top_k`: one row and
    eight, on a CPU in float32 and bfloat16, elsewhere in the run's type. Each takes its share of `seconds`, or less."""
    place = place_of(config)
    vocab_size, _ = assumed_vocab_size(config)
    config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    dtypes = [torch.float32, torch.bfloat16] if place.device.type == "cpu" else [place.dtype]
    bandwidth = _bandwidth(place.device)
    rates = []
    for dtype in dtypes:
        model = build_model(config.model, device=place.device, compute_dtype=dtype, seed=config.seed).eval()
        rates += [_rate(model, config, rows, bandwidth, seconds / len(dtypes) / len(ROWS)) for rows in ROWS]
    return SamplingBench(
        device=str(place.device),
        device_name=device_name(place.device),
        threads=place.threads,
        recipe=config.recipe,
        model=f"{model_text(config.model)}, {vocab_size:,} vocabulary entries",
        one_call=ops.decodes_by_kernel(place.device, dtypes[0]),
        rates=tuple(rates),
    )


def _rate(model: GPT, config: RunConfig, rows: int, bandwidth: float, seconds: float) -> SamplingRate:
    drawing = Drawing(temperature=config.sample.temperature, top_k=config.sample.top_k)
    generators = [torch.Generator().manual_seed(row) for row in range(rows)]
    n_prompt = min(PROMPT_TOKENS, model.config.seq_len)
    decoder, device = Decoder(model, rows), model.head.weight.device
    logits = decoder.read(range(rows), list(range(n_prompt))).expand(rows, -1)
    most, times = max(1, min(MOST_TOKENS, model.config.seq_len - n_prompt)), list[float]()
    deadline = time.perf_counter() + seconds
    while len(times) < most and (not times or time.perf_counter() < deadline):
        started = time.perf_counter()
        logits = decoder.step(draw(logits.cpu(), drawing, generators))
        synchronize(device)
        times.append(time.perf_counter() - started)
    return SamplingRate(
        dtype=str(model.compute_dtype).removeprefix("torch."),
        rows=rows,
        step_seconds=statistics.median(times),
        best_step_seconds=min(times),
        bytes_per_step=decoder.bytes_per_step(n_prompt + len(times) // 2),
        bandwidth_bytes_per_second=bandwidth,
    )


def _bandwidth(device: torch.device) -> float:
    """Bytes a second that this device reads from its memory, the best of several sums over one tensor."""
    numbers = torch.ones(BANDWIDTH_BYTES // 4, device=device)
    best = float("inf")
    for _ in range(6):
        synchronize(device)
        started = time.perf_counter()
        numbers.sum()
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return BANDWIDTH_BYTES / best
