"""`gptlab bench`: how fast this machine trains a run, against its peak and part by part. Reads no text."""

from __future__ import annotations

import functools
import json
import sys
import time
from dataclasses import dataclass

from gptlab.app.run_request import RunArguments
from gptlab.cli.arguments.run_arguments import read_request
from gptlab.config.errors import UserError, require_positive

DESCRIPTION = (
    "Measure this machine at training a run: peak FLOP/s, tokens/s, MFU, milliseconds of each part of a step. "
    "Tokens are made up: no text is read."
)
MAX_STEPS = 20
MAX_SECONDS = 20.0


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

    from gptlab.bench.measure import measure
    from gptlab.bench.training_rate import timed_machine
    from gptlab.cli.bench_report import describe, noise
    from gptlab.runtime.hardware.memory import memory_errors_explained, what_to_lower
    from gptlab.runtime.processes.distributed import World
    from gptlab.runtime.records.console import Console
    from gptlab.training.faults import TrainingFailed

    started = time.perf_counter()
    with Console(stream=sys.stderr) as console:
        # `measure` warns, once, of what is wrong with a compiler.
        silent = functools.partial(timed_machine, world=World(), warn=lambda text: None, show=console.live)
        config = request.config(silent)
        try:
            with memory_errors_explained(lambda error: what_to_lower(error, config, None)):
                bench = measure(
                    config, console, steps=steps, seconds=seconds, products=request.options.get("gemm", False)
                )
        except TrainingFailed as error:
            raise UserError(f"these steps cannot be timed: {error}") from None
        console.live(f"measured in {time.perf_counter() - started:.1f} s")
        if (warning := noise(bench)) is not None:
            console.warn(warning)
    print(json.dumps(bench.to_json(), indent=2) if request.options.get("json") else describe(bench))
    return 0
