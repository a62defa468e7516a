"""`gptlab bench`: how fast this machine trains a run, against its peak and part by part, or samples. Reads no text."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptlab.app.run.run_request import RunArguments
from gptlab.cli.arguments.parser import read_request
from gptlab.config.errors import UserError
from gptlab.config.fields import require_positive
from gptlab.runtime.records.table import table

if TYPE_CHECKING:
    from gptlab.bench.measure import Bench
    from gptlab.bench.sampling_rate import SamplingBench

DESCRIPTION = (
    "Measure this machine at training a run: peak FLOP/s, tokens/s, MFU, milliseconds of each part of a step. "
    "Tokens are made up: no text is read."
)
MAX_STEPS = 20
MAX_SECONDS = 20.0
QUIET_SPREAD = 0.15
"""Peaks measured seconds apart differ by less than this share on a machine of one's own: by 2% on two quiet cores."""
QUIET_SUSTAINED_SHARE = 0.75
"""Beside somebody else, small products keep up less than this share of their best rate (see `sustained_share`)."""

_BOUND = "memory's bound: tokens/s if reading weights, keys and values were all; more where a cache holds them"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchArguments(RunArguments):
    bench_steps: int = MAX_STEPS
    """Optimizer steps to time as a whole, and as many again part by part."""
    bench_seconds: float = MAX_SECONDS
    """Stop timing steps after so many seconds."""
    sampling: bool = False
    """Measure sampling instead of training: tokens/s of one row and of eight, and what memory bandwidth allows.
    --bench-steps has no effect."""
    json: bool = False
    """Print JSON: seconds, FLOP/s, and shares of 1."""


def main(argv: list[str]) -> int:
    """The figures go to stdout, everything else to stderr."""
    request = read_request(argv, BenchArguments, prog="gptlab bench", description=DESCRIPTION)
    steps = request.options.get("bench_steps", MAX_STEPS)
    seconds = request.options.get("bench_seconds", MAX_SECONDS)
    require_positive("--bench-steps", steps)
    require_positive("--bench-seconds", seconds)
    as_json = request.options.get("json")

    from gptlab.bench.measure import measure
    from gptlab.bench.training_rate import limited_machine, timed_machine
    from gptlab.runtime.hardware.device import unused_gpu
    from gptlab.runtime.hardware.installed import has_nvidia_gpu
    from gptlab.runtime.hardware.memory import memory_errors_explained, smaller_model, what_to_lower
    from gptlab.runtime.processes.distributed import ALONE
    from gptlab.runtime.records.console import Console
    from gptlab.training.faults import TrainingFailed

    started = time.perf_counter()
    with Console(stream=sys.stderr) as console:
        # `measure` warns, once, of what is wrong with a compiler.
        silent = functools.partial(timed_machine, world=ALONE, warn=lambda text: None, show=console.live)
        asked = (request.overrides.get("runtime.device", "auto"), request.overrides.get("runtime.allocator"))
        if (unused := unused_gpu(*asked)) is not None:
            console.warn(unused)
        config = request.config(silent, limited_machine)
        if request.options.get("sampling"):
            from gptlab.bench.sampling_rate import measure_sampling

            console.live("sampling")
            with memory_errors_explained(smaller_model):
                sampled = measure_sampling(config, seconds=seconds)
            print(json.dumps(sampled.to_json(), indent=2) if as_json else describe_sampling(sampled))
            return 0
        if has_nvidia_gpu():
            from gptlab.app.run.micro_batch import with_rows_that_fit

            config = with_rows_that_fit(config, request, console, ALONE)
        try:
            with memory_errors_explained(lambda error: what_to_lower(error, config, None)):
                bench = measure(config, console, steps=steps, seconds=seconds)
        except TrainingFailed as error:
            raise UserError(f"these steps cannot be timed: {error}") from None
        console.live(f"measured in {time.perf_counter() - started:.1f} s")
        if (warning := noise(bench)) is not None:
            console.warn(warning)
    print(json.dumps(bench.to_json(), indent=2) if as_json else describe(bench))
    return 0


def describe(bench: Bench) -> str:
    """The figures as text; units named."""
    return "\n\n".join([_facts(_setting(bench)), _parts(bench), _facts(_speed(bench))])


def describe_sampling(bench: SamplingBench) -> str:
    """The figures as text; units named."""
    threads = f"{bench.threads} thread{'s' * (bench.threads > 1)}"
    how = "a token of all rows in one C++ call" if bench.one_call else "a token of all rows by PyTorch's operations"
    bandwidth = bench.rates[0].bandwidth_bytes_per_second
    facts = (
        ("device", f"{bench.device_name} ({bench.device}), {threads}; {how}"),
        ("memory", f"{bandwidth / 1e9:.1f} GB/s read"),
        ("model", f"{bench.recipe}: {bench.model}"),
    )
    rows: list[tuple[str, ...]] = [("", "rows", "tokens/s", "best", "MB a step", "memory's bound", "of bound")]
    for rate in bench.rates:
        bound = rate.bound_tokens_per_second
        speeds = (f"{tokens:,.0f}" for tokens in (rate.tokens_per_second, rate.rows / rate.best_step_seconds))
        share = _percent(rate.tokens_per_second / bound)
        rows.append((rate.dtype, str(rate.rows), *speeds, f"{rate.bytes_per_step / 1e6:,.1f}", f"{bound:,.0f}", share))
    return f"{_facts(iter(facts))}\n\n{table(rows, '<>>>>>>')}\n{_BOUND}"


def noise(bench: Bench) -> str | None:
    """A warning where the machine was not this process's own; else None."""
    peaks, shares = bench.measured_peaks_flops_per_second, bench.sustained_shares
    if min(shares, default=1.0) < QUIET_SUSTAINED_SHARE:
        seen = f"small matrix products kept up {_percent(min(shares))} of their best rate"
    elif bench.peak_spread > QUIET_SPREAD:
        seen = f"the peak was {_giga(min(peaks))} GFLOP/s at one time and {_giga(max(peaks))} at another"
    else:
        return None
    return f"{seen}: another process seems to be running; figures are low"


def _setting(bench: Bench) -> Iterator[tuple[str, str]]:
    threads = f"{bench.threads} thread{'s' * (bench.threads > 1)}"
    yield "device", f"{bench.device_name} ({bench.device}), {threads}, {bench.dtype}"
    yield "peak", _peak(bench)
    yield "model", f"{bench.recipe}: {bench.model}"
    yield "", f"{bench.parameters:,} parameters, {bench.flops_per_token.total:,} FLOP a token"
    yield "step", bench.shape
    if (times := bench.product_times) is not None:
        yield (
            "products",
            (
                f"{times.chosen}: kernels {_ms(times.kernels)} ms, library {_ms(times.library)} ms "
                "(of one thread, for the MLPs and the head with 512 tokens; forward and backward)"
            ),
        )
    where = {"off": "no", "cold": "in {:.1f} s (new to its cache)", "cached": "in {:.1f} s (from its cache)"}
    yield "compiled", where[bench.compiled].format(bench.compile_seconds)
    if bench.graphs:
        yield "graphs", "whole steps are CUDA graphs; their parts are launched one by one, which takes longer"


def _peak(bench: Bench) -> str:
    if bench.peak_flops_per_second is None:
        return "unknown"
    times = " ".join(_giga(peak) for peak in bench.measured_peaks_flops_per_second)
    measured = f"before, between and after the steps: {times}" if times else "not measured"
    if bench.vendor_peak_flops_per_second is not None:
        return f"{_giga(bench.vendor_peak_flops_per_second)} GFLOP/s by the data sheet ({measured})"
    return f"{_giga(bench.peak_flops_per_second)} GFLOP/s in {bench.dtype} matrix products ({measured})"


def _parts(bench: Bench) -> str:
    rows = [("", "ms", "share", "GFLOP/s", "of peak")]
    total = bench.flops_per_token.total * bench.tokens_per_step
    forward = bench.forward_flops_per_token * bench.tokens_per_step
    work = {"forward": forward, "backward": total - forward}
    named = {**bench.part_seconds, "rest": bench.rest_seconds, "step": bench.step_seconds}
    for name, seconds in named.items():
        flops = (total if name == "step" else work.get(name, 0.0)) / seconds if seconds > 0 else 0.0
        rate = (_giga(flops), _percent(bench._share_of_peak(flops))) if flops else ("", "")
        rows.append((name, _ms(seconds), _percent(seconds / bench.step_seconds), *rate))
    return f"{table(rows, '<>>>>')}\nforward includes the head's gradient, which is taken together with its loss"


def _speed(bench: Bench) -> Iterator[tuple[str, str]]:
    best = bench.best_step_seconds
    yield "step", f"{_ms(bench.step_seconds)} ms, the median of {bench.steps} (best {_ms(best)} ms)"
    yield "tokens/s", f"{bench.tokens_per_second:,.0f} (best {bench.tokens_per_step / best:,.0f})"
    yield "MFU", f"{_percent(bench.mfu)} with attention counted over the whole context (PaLM, nanochat; as in training)"
    causal = f"{bench.causal_flops_per_token:,.0f} FLOP a token"
    yield "", f"{_percent(bench.causal_mfu)} with attention counted causally ({causal})"
    rate = bench.forward_backward_flops_per_second
    yield "passes", f"forward and backward at {_giga(rate)} GFLOP/s, {_percent(bench._share_of_peak(rate))} of the peak"


def _facts(rows: Iterator[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<10}{text}" for name, text in rows)


def _giga(value: float) -> str:
    """Digits enough for slow machines: 851, 12.3."""
    return f"{value / 1e9:,.0f}" if value >= 1e11 else f"{value / 1e9:,.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"
