"""Where a run happens: device, dtype, threads and peak FLOP/s, determined once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from gptlab.config.run import RunConfig
from gptlab.runtime.hardware.cpu import set_threads
from gptlab.runtime.hardware.device import resolve_device, resolve_dtype
from gptlab.runtime.hardware.memory import keep_freed_memory, set_gpu_allocator
from gptlab.runtime.hardware.peak import Peak, peak_flops_per_second
from gptlab.runtime.processes.distributed import World

_ALONE = World()


@dataclass(frozen=True, slots=True)
class Place:
    device: torch.device
    dtype: torch.dtype
    threads: int
    peak: Peak


def place_of(config: RunConfig, world: World = _ALONE) -> Place:
    """The place that a configuration selects. UserError where this machine does not have it."""
    runtime = config.runtime
    set_gpu_allocator(runtime.allocator)
    return _place(runtime.device, runtime.dtype, runtime.threads, _local_rank(world))


def _local_rank(world: World) -> int | None:
    return None if world.size == 1 else world.local_rank


@functools.cache
def _place(device_name: str, dtype_name: str, threads: int | None, local_rank: int | None) -> Place:
    # Cached: a recipe that sizes itself and the run that follows share half a second of measurement.
    device = resolve_device(device_name, local_rank)
    dtype = resolve_dtype(dtype_name, device)
    if device.type == "cpu":
        keep_freed_memory()
    in_force = set_threads(threads)
    return Place(device, dtype, in_force, peak_flops_per_second(device, dtype))
