"""Where a run happens, found out once: device, type, threads and peak."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from gptlab.app.run_request import RunRequest
from gptlab.config.run import RunConfig
from gptlab.runtime.hardware.allocator import keep_freed_memory, set_gpu_allocator
from gptlab.runtime.hardware.determinism import deterministic_kernels
from gptlab.runtime.hardware.device import resolve_device, resolve_dtype
from gptlab.runtime.hardware.peak import Peak, peak_flops_per_second
from gptlab.runtime.hardware.threads import set_threads
from gptlab.runtime.processes.distributed import World

_ALONE = World()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run happens."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    peak: Peak


def place_of(config: RunConfig, world: World = _ALONE) -> Place:
    """The place that a configuration asks for. UserError where this machine does not have it."""
    runtime = config.runtime
    set_gpu_allocator(runtime.allocator)
    return _place(runtime.device, runtime.dtype, runtime.threads, _local_rank(world))


def kernels_for(config: RunConfig | None, request: RunRequest) -> AbstractContextManager[None]:
    """Within it kernels are as a configuration wants them (None: as what a request names does, before there is one). To
    be entered before anything of this module that measures."""
    if config is not None:
        exact, device = config.parallel.exact_any_world_size, config.runtime.device
    else:
        exact = request.overrides.get("parallel.exact_any_world_size", False)
        device = request.overrides.get("runtime.device", "auto")
    return deterministic_kernels(device) if exact else nullcontext()


def _local_rank(world: World) -> int | None:
    return None if world.size == 1 else world.local_rank


@functools.cache
def _place(device_name: str, dtype_name: str, threads: int | None, local_rank: int | None) -> Place:
    # Cached: a recipe that sizes itself and the run that follows need the same half second of measurement.
    device = resolve_device(device_name, local_rank)
    dtype = resolve_dtype(dtype_name, device)
    if device.type == "cpu":
        keep_freed_memory()
    in_force = set_threads(threads)
    return Place(device, dtype, in_force, peak_flops_per_second(device, dtype))
