"""The peak FLOP/s that MFU is a share of: a vendor's figure, a measurement, or "unknown"."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gptlab.runtime.hardware.cpu import one_thread, usable_cores
from gptlab.runtime.hardware.device import device_name, synchronize


@dataclass(frozen=True, slots=True)
class Peak:
    flops_per_second: float | None
    """Dense matrix products, a multiplication and an addition counted as two. None: unknown."""
    source: Literal["table", "measured", "unknown"]


# Data sheets that quote a rate "with sparsity" are halved. Where float16 could accumulate in float16, the rate with
# float32 accumulation, as torch computes, counts. A device has the rate of the entry whose words all occur in its name.
# A test recomputes the entries from multiprocessors, FLOP per clock and boost clock.
_TERAFLOPS: dict[str, float] = {
    "gb200": 2500,  # NVIDIA GB200 NVL72 data sheet: 360 PFLOPS sparse for 72 GPUs
    "b200": 2250,  # NVIDIA DGX B200 data sheet / Blackwell architecture brief: 4.5 PFLOPS sparse
    "h200": 989.5,  # NVIDIA H200 data sheet: 1979 sparse (and autoresearch, for Hopper)
    "h200 nvl": 835.5,  # NVIDIA H200 data sheet, NVL column: 1671 sparse
    "gh200": 989.5,  # NVIDIA GH200 data sheet: the GPU of an H100 SXM, 1979 sparse
    "h100": 989.5,  # NVIDIA H100 data sheet, SXM: 1979 sparse; autoresearch
    "h100 pcie": 756,  # NVIDIA H100 data sheet, PCIe: 1513 sparse
    "h100 nvl": 835.5,  # NVIDIA H100 data sheet, NVL (one card): 1671 sparse
    "a100": 312,  # NVIDIA A100 data sheet, SXM
    "a100 pcie": 312,  # NVIDIA A100 data sheet, PCIe: the same rate
    "a30": 165,  # NVIDIA A30 data sheet
    "a40": 149.7,  # NVIDIA A40 data sheet
    "a10": 125,  # NVIDIA A10 data sheet
    "a10g": 70,  # NVIDIA A10G data sheet (the A10 of AWS g5 instances is another chip setting)
    "rtx a6000": 154.8,  # NVIDIA GA102 whitepaper: full rate with float32 accumulation, unlike GeForce
    "l4": 121,  # NVIDIA L4 data sheet: 242 sparse
    "l40": 181.05,  # NVIDIA L40 data sheet
    "l40s": 362.05,  # NVIDIA L40S data sheet
    "rtx 6000 ada": 364.2,  # NVIDIA Ada architecture whitepaper
    "rtx 3090": 71,  # NVIDIA GA102 whitepaper
    "rtx 3090 ti": 80,  # NVIDIA Ada architecture whitepaper, comparison tables
    "rtx 4080": 97.5,  # NVIDIA Ada architecture whitepaper
    "rtx 4090": 165.2,  # NVIDIA Ada architecture whitepaper
    "rtx 5080": 112.6,  # NVIDIA RTX Blackwell architecture whitepaper
    "rtx 5090": 209.5,  # NVIDIA RTX Blackwell architecture whitepaper
    "v100 sxm2": 125,  # NVIDIA V100 data sheet
    "v100 pcie": 112,  # NVIDIA V100 data sheet
    "t4": 65,  # NVIDIA T4 data sheet
    "mi355x": 2516.6,  # AMD Instinct MI355X data sheet
    "mi350x": 2306.9,  # AMD Instinct MI350X data sheet
    "mi325x": 1307.4,  # AMD Instinct MI325X data sheet
    "mi300x": 1307.4,  # AMD Instinct MI300X data sheet
    "mi300a": 980.6,  # AMD Instinct MI300A data sheet
    "mi250x": 191.5,  # AMD Instinct MI250X data sheet: 383 a card, which torch sees as two devices
    "mi250": 181.05,  # AMD Instinct MI250 data sheet: 362.1 a card, two devices
    "mi210": 181,  # AMD Instinct MI210 data sheet
}  # fmt: skip
_WITHOUT_BFLOAT16 = ("v100 sxm2", "v100 pcie", "t4")

# Words that make another product of the same number: an entry counts only if it names exactly those of the device.
_VARIANTS = frozenset(("nvl", "pcie", "sxm2", "ti", "super", "d", "laptop", "max", "mobile", "mig", "ada", "64gb"))
# A slice of a GPU (vGPU profiles such as "A40-12Q") has an unknown share of the peak.
_VIRTUAL = re.compile(r"\d+[abcq]|grid")


# Threads on a quiet CPU together do most of what each does alone: two cores 0.99, and many lose a quarter to the clock
# that all of them share. Beside two busy processes the best product of two threads was 0.01 to 0.05 or 0.8 to 0.95 of
# it in eight measurements, since each product waits for its slowest thread; that of one thread varied by 4%.
_QUIET_SHARE = 0.6


def table_peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of dense products by the vendor's data sheet; None if the table has no entry.

    It has none for dtypes other than bfloat16 and float16, dtypes that the tensor cores lack, laptop chips (their rate
    depends on cooling), and slices of a GPU (MIG, vGPU).
    """
    words = frozenset(re.findall(r"[a-z0-9]+", device_name.lower()))
    if any(_VIRTUAL.fullmatch(word) for word in words):
        return None
    named = {entry: frozenset(entry.split()) for entry in _TERAFLOPS}
    matches = [entry for entry, its in named.items() if its <= words and (words - its).isdisjoint(_VARIANTS)]
    # Some drivers name two products at once ("MI250X / MI250"): no answer.
    if len(matches) != 1 or dtype not in (torch.bfloat16, torch.float16):
        return None
    lacks_dtype = dtype == torch.bfloat16 and matches[0] in _WITHOUT_BFLOAT16
    return None if lacks_dtype else _TERAFLOPS[matches[0]] * 1e12


def peak_flops_per_second(device: torch.device, dtype: torch.dtype) -> Peak:
    """The vendor's figure for a GPU, else a measured one (takes about half a second), else "unknown"."""
    known = table_peak_flops(device_name(device), dtype) if device.type == "cuda" else None
    if known is not None:
        return Peak(known, "table")
    try:
        return Peak(measure_matmul_flops(device, dtype), "measured")
    except RuntimeError:  # no memory left for it, or a type that the device does not multiply
        return Peak(None, "unknown")


def measure_matmul_flops(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.5) -> float:
    """FLOP/s of the best square matrix product seen within about `seconds`; random data, not a global generator's.
    Best, not mean: other processes slow some tries down."""
    several = device.type == "cpu" and torch.get_num_threads() > 1
    return (_flops_of_threads if several else _best_flops)(device, dtype, seconds)


def _flops_of_threads(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """The same of a CPU's threads. If other processes slow all tries down, it is that of one thread, which waits for no
    other, times the number of threads that have a core."""
    threads = min(torch.get_num_threads(), usable_cores())

    def alone() -> float:
        with one_thread():
            return _best_flops(device, dtype, seconds / 10)

    first, together = alone(), _best_flops(device, dtype, 0.8 * seconds)
    one = max(first, alone())  # again, since other programs may have stopped
    return together if together >= _QUIET_SHARE * threads * one else threads * one


def _best_flops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """The same of all threads in force together. Large products are faster, and a slow machine must not pay for an
    8192."""
    deadline, best = time.perf_counter() + seconds, 0.0
    for size in (256, 512, 1024, 2048, 4096, 8192):
        until = min(deadline, time.perf_counter() + seconds / 10)
        fastest = min(product_times(size, device, dtype, until))
        best = max(best, 2 * size**3 / fastest)
        # Twice the size is 8 times the work; 4 tries of it, the choice of a library and making the matrices must fit.
        if time.perf_counter() + 80 * fastest > deadline:
            break
    if time.perf_counter() < deadline:
        best = max(best, 2 * size**3 / min(product_times(size, device, dtype, deadline)))
    return best


def sustained_share(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.25) -> float:
    """The share of its best rate that a stream of small products sustains: shows whether other programs compute here.

    Measured on two cores (size 512): 0.92 to 0.95 on a quiet machine, 0.24 to 0.26 beside one busy process, while the
    best of the large products stayed what it was: each small one waits for its slowest thread.
    """
    times = product_times(512, device, dtype, time.perf_counter() + seconds)
    return min(times) * len(times) / sum(times)


def product_times(size: int, device: torch.device, dtype: torch.dtype, deadline: float) -> list[float]:
    """Seconds of each product of two random (size, size) matrices until `deadline` (of time.perf_counter): at least
    two, after a warm-up."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    times, multiply = list[float](), _faster_product(left, right)
    while len(times) < 3 or time.perf_counter() < deadline:
        synchronize(device)
        start = time.perf_counter()
        multiply()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times[1:]


def _faster_product(left: Tensor, right: Tensor) -> Callable[[], object]:
    """What multiplies the matrices. In float32 a CPU may have two libraries for it: on two Zen 5 cores torch.mm, by
    MKL, reaches 110 GFLOP/s a core and oneDNN 240, as gptlab's kernels do (docs/LOG.md, 2026-11-25). In float16 its
    rate depends on how the right matrix lies in memory: 13 to 25 GFLOP/s as linear layers have it, else 1 to 3
    (2026-11-27)."""
    if left.device.type == "cpu" and left.dtype == torch.float16:
        right = right.t()
    by_mm = functools.partial(torch.mm, left, right, out=torch.empty_like(left))
    if left.device.type != "cpu" or left.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return by_mm
    by_onednn = functools.partial(torch.nn.functional.linear, left.to_mkldnn(), right.to_mkldnn())

    def seconds(multiply: Callable[[], object]) -> float:
        multiply()  # warms up
        start = time.perf_counter()
        multiply()
        return time.perf_counter() - start

    return min((by_mm, by_onednn), key=seconds)
