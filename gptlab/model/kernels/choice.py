"""What multiplies matrices on a CPU, in linear layers, the head and Muon: gptlab's C++ kernels, or torch's library,
which may know a processor better. Layers and the head are timed, once for a machine and a model, and remembered.

The kernel always computes attention: the library's takes seven to nine times as long on two Zen 5 cores, and writes its
scores to memory (docs/LOG.md, 2026-11-25).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.config.run import Products
from gptlab.model.gpt import MLP
from gptlab.model.head import HeadLoss
from gptlab.model.kernels import ops
from gptlab.runtime.files.cache import cache_root, keep_json
from gptlab.runtime.files.plain_file import json_sha256, read_json_object
from gptlab.runtime.hardware.cpu import cpu_model

# The library is chosen where it takes less than this share of the kernels' time, so that noise does not decide. On
# two Zen 5 cores it takes 1.0 to 1.4 times as long in bfloat16 and twice as long in float32, with AMX 1.1 to 1.3 times
# as long in float32 (2026-11-30). With kernels, blocks are one call, which is not timed here. Where the library is at
# 0.82 to 0.87 of the kernels' time, whole steps take 0.90 to 0.93 of their time with it; where at 0.94 to 0.97, 1.10
# (docs/LOG.md, 2026-11-29).
CLEARLY = 0.90
_ROUNDS = 5
# After which no further round begins: one of GPT-2's takes a second, and the difference is then no noise.
_ENOUGH_SECONDS = 2.0
# Positions that they are timed with: few, since the time grows with the vocabulary too.
_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """CPU seconds that the MLPs of all layers and the head take of one thread, for some positions, forward and
    backward."""

    kernels: float
    library: float

    @property
    def chosen(self) -> Products:
        return "library" if self.library < CLEARLY * self.kernels else "kernels"


def faster_products(model: ModelConfig, dtype: torch.dtype) -> Products:
    times = product_times(model, dtype)
    return "kernels" if times is None else times.chosen


def product_times(model: ModelConfig, dtype: torch.dtype) -> ProductTimes | None:
    """As they were timed on this machine; timed now, in a fraction of a second for small models, where they never were.
    None where there is nothing to choose. `ops.load_kernels` must have been called."""
    kernels = ops.implementations(torch.device("cpu"), dtype)["kernels"]
    if kernels == "none":
        return None
    facts = [
        cpu_model(), torch.get_num_threads(), torch.__version__, kernels, model.n_layer, model.n_embd, model.mlp_width,
        model.activation, model.padded_vocab_size,
    ]  # fmt: skip
    path = cache_root(None) / "products" / f"{json_sha256(facts)[:16]}.json"
    if (times := _remembered(path)) is None:
        times = _timed(model, dtype)
        keep_json(path, asdict(times))
    return times


def _remembered(path: Path) -> ProductTimes | None:
    try:
        found = read_json_object(path)
    except UserError:
        return None
    match found:
        case {"kernels": float(kernels), "library": float(library)} if min(kernels, library) > 0:
            return ProductTimes(kernels, library)
    return None


def _timed(model: ModelConfig, dtype: torch.dtype) -> ProductTimes:
    """The fastest of a few rounds of both in turn, and where the library would be chosen, of as many again, twice: six
    runs that start at once on two cores slow down whatever they meet (docs/LOG.md, 2026-11-25)."""
    generator, before = torch.Generator().manual_seed(0), ops.products()
    x = torch.randn(_POSITIONS, model.n_embd, generator=generator).to(dtype)
    with torch.random.fork_rng(devices=[]):  # of which its weights are drawn
        mlp = MLP(model)
    weight = torch.randn(model.padded_vocab_size, model.n_embd, generator=generator)
    targets = torch.zeros(_POSITIONS, dtype=torch.int64)
    vocab_size, cap = model.vocab_size or model.padded_vocab_size, model.logit_softcap

    def head() -> None:
        HeadLoss.apply(x.detach().requires_grad_(), weight.requires_grad_(), targets, vocab_size, cap).backward()

    def layer() -> None:
        mlp(x.detach().requires_grad_()).sum().backward()

    parts = (layer, head)
    kernels, library = [math.inf] * len(parts), [math.inf] * len(parts)
    ways: tuple[tuple[Products, list[float]], ...] = (("kernels", kernels), ("library", library))
    try:
        for _ in range(3):
            for by, _ in ways:
                ops.multiply_by(by)
                for part in parts:
                    part()  # warms up
            started = time.perf_counter()
            for _ in range(_ROUNDS):
                for by, fastest in ways:
                    ops.multiply_by(by)
                    fastest[:] = [min(found, _seconds(part)) for found, part in zip(fastest, parts, strict=True)]
                if time.perf_counter() - started > _ENOUGH_SECONDS:
                    break
            times = ProductTimes(*(model.n_layer * of_layer + of_head for of_layer, of_head in (kernels, library)))
            if times.chosen == "kernels":
                break
    finally:
        ops.multiply_by(before)
    return times


def _seconds(function: Callable[[], None]) -> float:
    """Of this thread, which does its share of every product, without those that another program takes. The clock of the
    process is no help: it learns of other threads' milliseconds when the kernel's next tick tells."""
    started = time.thread_time()
    function()
    return time.thread_time() - started
