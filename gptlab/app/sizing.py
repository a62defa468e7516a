"""A new run's configuration, sized by the speed of this machine, its text, and the memory of its GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from gptlab.app.run.run_request import RunRequest
from gptlab.app.run.session import prepared
from gptlab.bench.training_rate import limited_machine, timed_machine
from gptlab.config.recipes.quickstart import text_ends_first
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.runtime.hardware.device import deterministic_kernels
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.processes.distributed import World
from gptlab.runtime.records.console import Console


def sized(
    request: RunRequest, world: World, console: Console, warn: Callable[[str], None]
) -> tuple[RunConfig, list[Machine]]:
    """What the recipe makes of this machine, and the machine as it was measured each time; none where the recipe does
    not ask. `warn`: of what is wrong with a compiler. UserError where the data or the configuration cannot be used."""
    measured: list[Machine] = []
    config = request.config(partial(_timed, measured, world, console, warn), partial(_limited, measured, world))
    from gptlab.runtime.hardware.installed import has_nvidia_gpu

    if has_nvidia_gpu():
        from gptlab.app.run.micro_batch import with_rows_that_fit

        config = with_rows_that_fit(config, request, console, world)
    return config, measured


def _limited(measured: list[Machine], world: World, config: RunConfig) -> Machine:
    """This machine with what its steps can reach at most; also appended to `measured`."""
    measured.append(limited_machine(config, world))
    return measured[-1]


def _timed(
    measured: list[Machine], world: World, console: Console, warn: Callable[[str], None], config: RunConfig
) -> Machine:
    """This machine, timed on the steps of `config`; also appended to `measured`. Data is prepared before, which gives
    another thread the time to build the C++ kernels."""
    last = measured[-1]
    tokens = last.training_tokens
    if len(measured) == 1:  # its limit: no size was timed yet
        tokens = prepared(config, place_of(config, world), console).train.n_tokens
    if last.flops_per_second is None and text_ends_first(last, config):
        measured.append(replace(last, training_tokens=tokens))
        return measured[-1]
    exact = deterministic_kernels(config.runtime.device) if config.parallel.exact_any_world_size else nullcontext()
    with console.busy("timing steps, to size the model"), exact:
        machine = timed_machine(config, world, warn, lambda text: None)
    measured.append(replace(machine, training_tokens=tokens))
    return measured[-1]
