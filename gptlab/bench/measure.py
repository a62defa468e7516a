"""`gptlab bench`: the figures of one configuration on this machine, measured and derived."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gptlab.bench.plan import model_text, step_text
from gptlab.bench.timing import StepTimes, made_up_run, time_steps
from gptlab.bench.training_rate import assumed_vocab_size, remember_rate, seen_rate
from gptlab.config.run import RunConfig
from gptlab.model.counting import FlopsPerToken, flops_per_token, parameter_counts
from gptlab.model.kernels.choice import ProductTimes, product_times
from gptlab.runtime.files.cache import keep_compiled
from gptlab.runtime.hardware import peak as hardware
from gptlab.runtime.hardware.device import device_name
from gptlab.runtime.hardware.place import Place, place_of
from gptlab.runtime.records.console import Console
from gptlab.training.compilation import Passes, warm_up
from gptlab.training.state import TrainState

Compiled = Literal["off", "cold", "cached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What was measured; the median where several steps were timed."""

    device: str
    device_name: str
    threads: int
    dtype: str
    recipe: str
    model: str
    parameters: int
    shape: str
    """Of a step."""
    tokens_per_step: int
    flops_per_token: FlopsPerToken
    forward_flops_per_token: float
    """The forward pass's part; more than a third where the head computes its gradient with its loss."""
    vendor_peak_flops_per_second: float | None
    """FLOP/s by the data sheet; None where there is none."""
    measured_peaks_flops_per_second: tuple[float, ...]
    """FLOP/s of matrix products before, between and after the steps; empty where the device has none."""
    sustained_shares: tuple[float, ...]
    """At the same times: the share of its best rate that a stream of small products sustained; less beside other
    programs."""
    product_times: ProductTimes | None = None
    """By gptlab's kernels and by the library; None where there is nothing to choose."""
    compiled: Compiled
    compile_seconds: float
    """Compilation, or without it the first step and the first validation pass."""
    graphs: bool
    """Whether whole steps are CUDA graphs. Their parts are launched."""
    steps: int
    """How many were timed as a whole, and as many part by part."""
    step_seconds: float
    best_step_seconds: float
    part_seconds: Mapping[str, float]

    @property
    def peak_flops_per_second(self) -> float | None:
        """The FLOP/s that MFU refers to: the vendor's figure, as in training, else the best that was measured."""
        return self.vendor_peak_flops_per_second or max(self.measured_peaks_flops_per_second, default=None)

    @property
    def peak_spread(self) -> float:
        """How much the measured peaks differ: 0.15 where the worst is 15% below the best."""
        peaks = self.measured_peaks_flops_per_second
        return 1.0 - min(peaks) / max(peaks) if peaks else 0.0

    @property
    def rest_seconds(self) -> float:
        """A step as a whole less its parts: reading the loss, and noise. Below zero where parts overlap (on a GPU)."""
        return self.step_seconds - sum(self.part_seconds.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def forward_backward_flops_per_second(self) -> float:
        """FLOP/s while in forward and backward, attention over the whole context counted."""
        seconds = self.part_seconds["forward"] + self.part_seconds["backward"]
        return self.flops_per_token.total * self.tokens_per_step / seconds

    @property
    def causal_flops_per_token(self) -> float:
        """With attention counted only for the positions that a causal mask leaves."""
        return self.flops_per_token.matmul + self.flops_per_token.attention_causal

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization as training states it, attention over the whole context counted."""
        return self._share_of_peak(self.flops_per_token.total * self.tokens_per_second)

    @property
    def causal_mfu(self) -> float | None:
        return self._share_of_peak(self.causal_flops_per_token * self.tokens_per_second)

    def to_json(self) -> dict[str, Any]:
        """Everything, the derived figures too."""
        derived = [name for name, value in vars(Bench).items() if isinstance(value, property)]
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}

    def _share_of_peak(self, flops_per_second: float) -> float | None:
        return None if self.peak_flops_per_second is None else flops_per_second / self.peak_flops_per_second


def measure(config: RunConfig, console: Console, *, steps: int, seconds: float) -> Bench:
    """Build the run as `train` does, on random tokens, and time it. The peak is measured before, between and after the
    two halves of the steps. TrainingFailed where the steps break."""
    vocab_size, _ = assumed_vocab_size(config)
    config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    place = place_of(config)
    state, passes = made_up_run(config, place, console.warn)
    with state.loader:
        console.live("compiling" if passes.compiled else "warming up")
        compiled, compile_seconds = _warm_up(state, passes, config, console)
        console.live("timing steps")
        peaks, times = [_peak_now(place)], StepTimes([], {})
        for half in (steps - steps // 2, steps // 2):
            if half:
                times += time_steps(state, passes.loss_sum, config, max_steps=half, max_seconds=seconds / 2)
            peaks.append(_peak_now(place))
        flops = flops_per_token(state.model)
        step_seconds = statistics.median(times.whole_seconds)
        remember_rate(config, place, seen_rate(config.batch.total_tokens, step_seconds, state.model))
        return Bench(
            device=str(place.device),
            device_name=device_name(place.device),
            threads=place.threads,
            dtype=place.dtype_name,
            recipe=config.recipe,
            model=f"{model_text(config.model)}, {vocab_size:,} vocabulary entries",
            parameters=parameter_counts(state.model).total,
            shape=step_text(config),
            tokens_per_step=config.batch.total_tokens,
            flops_per_token=flops,
            # A third, and the two products of the head's gradient (model/head.py).
            forward_flops_per_token=flops.total / 3 + 4 * state.model.head.weight.numel(),
            vendor_peak_flops_per_second=place.peak.flops_per_second if place.peak.source == "table" else None,
            measured_peaks_flops_per_second=tuple(one[0] for one in peaks if one is not None),
            sustained_shares=tuple(one[1] for one in peaks if one is not None),
            product_times=product_times(state.model.config, place.dtype) if place.device.type == "cpu" else None,
            compiled=compiled,
            compile_seconds=compile_seconds,
            graphs=state.captured is not None,
            steps=len(times.whole_seconds),
            step_seconds=step_seconds,
            best_step_seconds=min(times.whole_seconds),
            part_seconds={name: statistics.median(values) for name, values in times.part_seconds.items()},
        )


def _warm_up(state: TrainState, passes: Passes, config: RunConfig, console: Console) -> tuple[Compiled, float]:
    """As before training. Whether the compiler's cache folder has new files tells "cold" from "cached"."""
    folder = keep_compiled()
    before = _files(folder)
    started = time.perf_counter()
    warm_up(state, passes, config, config.eval_sequences, console.warn)
    seconds = time.perf_counter() - started
    if not passes.compiled:
        return "off", seconds
    return ("cached" if _files(folder) == before else "cold"), seconds


def _files(folder: Path) -> set[str]:
    return {os.path.join(path, name) for path, _, names in os.walk(folder) for name in names}


def _peak_now(place: Place) -> tuple[float, float] | None:
    """(the peak FLOP/s of matrix products, the share of it that small ones sustain); None where the device has none."""
    try:
        measured = hardware.measure_matmul_flops(place.device, place.dtype)
        return measured, hardware.sustained_share(place.device, place.dtype)
    except RuntimeError:  # as in peak_flops_per_second: no memory, or no such products on this device
        return None
