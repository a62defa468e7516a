"""`gptlab bench`: how fast this machine trains a run, against its peak and part by part. Reads no text."""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gptlab.app.run_request import RunArguments, RunRequest
from gptlab.cli.arguments.run_arguments import read_request
from gptlab.cli.bench_report import Bench, Compiled, describe, noise
from gptlab.config.errors import UserError, require_positive

if TYPE_CHECKING:
    from gptlab.app.place import Place
    from gptlab.config.run import RunConfig
    from gptlab.runtime.records.console import Console
    from gptlab.training.compilation import Kernels
    from gptlab.training.state import TrainState

DESCRIPTION = (
    "Measure this machine at training a run: peak FLOP/s, tokens/s, MFU, milliseconds of each part of a step. "
    "Tokens are made up: no text is read."
)
MAX_STEPS = 20
MAX_SECONDS = 20.0
ALONE_STEPS = 10
ALONE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchArguments(RunArguments):
    bench_steps: int = MAX_STEPS
    """Optimizer steps to time as a whole, and as many again part by part."""
    bench_seconds: float = MAX_SECONDS
    """Stop timing steps after so many seconds."""
    gemm: bool = False
    """Time the matrix products of the linear layers too, shape by shape."""
    json: bool = False
    """Print JSON: seconds, FLOP/s, and shares of 1."""


def main(argv: list[str]) -> int:
    """The figures go to stdout, everything else to stderr."""
    request = read_request(argv, BenchArguments, prog="gptlab bench", description=DESCRIPTION)
    steps = request.options.get("bench_steps", MAX_STEPS)
    seconds = request.options.get("bench_seconds", MAX_SECONDS)
    require_positive("--bench-steps", steps)
    require_positive("--bench-seconds", seconds)

    from gptlab.runtime.records.console import Console
    from gptlab.training.watchdog import TrainingFailed

    started = time.perf_counter()
    with Console(stream=sys.stderr) as console:
        try:
            bench = measure(request, console, steps=steps, seconds=seconds, products=request.options.get("gemm", False))
        except TrainingFailed as error:
            raise UserError(f"these steps cannot be timed: {error}") from None
        console.live(f"measured in {time.perf_counter() - started:.1f} s")
        if (warning := noise(bench)) is not None:
            console.warn(warning)
    print(json.dumps(bench.to_json(), indent=2) if request.options.get("json") else describe(bench))
    return 0


def measure(request: RunRequest, console: Console, *, steps: int, seconds: float, products: bool) -> Bench:
    """Build the run as `train` does, on made-up tokens, and time it. Half of the steps come before a look at the peak
    and half behind it."""
    from gptlab.app.training_rate import timed_machine
    from gptlab.runtime.hardware.out_of_memory import memory_told, what_to_lower
    from gptlab.runtime.processes.distributed import World

    # What is wrong with a compiler `_measure` says, once.
    config = request.config(functools.partial(timed_machine, world=World(), warn=lambda text: None, show=console.live))
    with memory_told(lambda error: what_to_lower(error, config, None)):
        return _measure(config, console, steps=steps, seconds=seconds, products=products)


def _measure(config: RunConfig, console: Console, *, steps: int, seconds: float, products: bool) -> Bench:
    from gptlab.app.place import place_of
    from gptlab.app.training_rate import assumed_vocab_size, remember_rate, seen_rate
    from gptlab.bench.products import time_products
    from gptlab.bench.timing import StepTimes, loader_tokens_per_second, made_up_rows, time_optimizer, time_steps
    from gptlab.cli.plan import model_text, step_text
    from gptlab.model.counting import flops_per_token, parameter_counts
    from gptlab.runtime.hardware.device import device_name
    from gptlab.runtime.hardware.rng import seed_everything
    from gptlab.training.compilation import make_kernels
    from gptlab.training.state import build_state

    vocab_size, _ = assumed_vocab_size(config)
    config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    place = place_of(config)
    seed_everything(config.seed, place.device)
    state = build_state(config, made_up_rows(config), device=place.device, compute_dtype=place.dtype)
    kernels = make_kernels(state, config, console.warn)

    def timed_steps() -> StepTimes:
        return time_steps(state, kernels.loss_sum, config, max_steps=-(-steps // 2), max_seconds=seconds / 2)

    with state.loader:
        console.live("compiling" if kernels.compiled else "warming up")
        compiled, compile_seconds = _warm_up(state, kernels, config, console)
        console.live("timing steps")
        looks = [_look_at(place)]
        first = timed_steps()
        looks.append(_look_at(place))
        second = timed_steps()
        looks.append(_look_at(place))
        console.live("timing parts alone")
        times, flops = first + second, flops_per_token(state.model)
        step_seconds = statistics.median(times.whole_seconds)
        remember_rate(config, place, seen_rate(config.batch.total_tokens / step_seconds, state.model))
        return Bench(
            device=str(place.device),
            device_name=device_name(place.device),
            threads=place.threads,
            dtype=str(place.dtype).removeprefix("torch."),
            recipe=config.recipe,
            model=f"{model_text(config.model)}, {vocab_size:,} vocabulary entries",
            parameters=parameter_counts(state.model).total,
            shape=step_text(config),
            tokens_per_step=config.batch.total_tokens,
            flops_per_token=flops,
            # A third, and the two products of the head's gradient (model/head.py).
            forward_flops_per_token=flops.total / 3 + 4 * state.model.head.weight.numel(),
            vendor_peak_flops_per_second=place.peak.flops_per_second if place.peak.source == "table" else None,
            measured_peaks_flops_per_second=tuple(look[0] for look in looks if look is not None),
            sustained_shares=tuple(look[1] for look in looks if look is not None),
            compiled=compiled,
            compile_seconds=compile_seconds,
            steps=len(times.whole_seconds),
            step_seconds=step_seconds,
            best_step_seconds=min(times.whole_seconds),
            part_seconds={name: statistics.median(values) for name, values in times.part_seconds.items()},
            optimizer_seconds=statistics.median(time_optimizer(state, kernels.loss_sum, config, steps=ALONE_STEPS)),
            loader_tokens_per_second=loader_tokens_per_second(state.loader, place.device, seconds=ALONE_SECONDS),
            products=tuple(time_products(state.model, config.micro_tokens, place.device)) if products else (),
        )


def _warm_up(state: TrainState, kernels: Kernels, config: RunConfig, console: Console) -> tuple[Compiled, float]:
    """As before training. What is new in the cache's folder afterwards was not there to be taken from it."""
    from gptlab.training.compilation import keep_compiled, warm_up

    folder = keep_compiled()
    before = _files(folder)
    eval_sequences = config.eval.micro_sequences or config.batch.micro_sequences
    seconds = warm_up(state, kernels, config, eval_sequences, console.warn)
    if not kernels.compiled:
        return "off", seconds
    return ("cached" if _files(folder) == before else "cold"), seconds


def _files(folder: Path) -> set[str]:
    return {os.path.join(path, name) for path, _, names in os.walk(folder) for name in names}


def _look_at(place: Place) -> tuple[float, float] | None:
    """FLOP/s of matrix products at best, and the share of it that they keep up; None where the device has none."""
    from gptlab.runtime.hardware.peak import measure_matmul_flops, sustained_share

    try:
        return measure_matmul_flops(place.device, place.dtype), sustained_share(place.device, place.dtype)
    except RuntimeError:  # As in peak_flops_per_second: no memory, or no such products on this device.
        return None
