"""What a run would be: parameters, FLOPs, memory, steps and time, counted from its modules on the meta device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import cast

import torch

from gptlab.bench.memory import Memory, count_memory, model_on_meta
from gptlab.bench.training_rate import Rate, assumed_vocab_size
from gptlab.config.load import config_to_json
from gptlab.config.model import ModelConfig
from gptlab.config.run import RunConfig
from gptlab.model.counting import FlopsPerToken, ParameterCounts, flops_per_token, parameter_counts
from gptlab.runtime.hardware.device import Platform, compiler_available
from gptlab.runtime.hardware.place import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    config: RunConfig
    vocab_source: str
    place: Place
    parameters: ParameterCounts
    flops: FlopsPerToken
    memory: Memory
    steps: int | None
    """None: a horizon in seconds on a machine whose peak is unknown."""
    seconds: float | None
    """On the training clock. None: unknown, since no step of this configuration was timed here."""
    rate: Rate | None = None
    """The last timed speed of this configuration on this machine, of steps that may have had another size."""

    @property
    def memory_is_shared(self) -> bool:
        """Whether the device computes in the host's memory."""
        return self.place.device.type != "cuda"

    @property
    def memory_bytes(self) -> int:
        """Of the device."""
        return self.memory.total if self.memory_is_shared else self.memory.device_total


def make_plan(config: RunConfig, place: Place, rate: Rate | None = None) -> RunPlan:
    """Count everything for one device. Raises ConfigError when the horizon is shorter than one step, or the device
    lacks what the configuration asks for."""
    vocab_size, vocab_source = assumed_vocab_size(config)
    config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    model = model_on_meta(config, place.dtype, cast(Platform, place.device.type))
    counts, flops = parameter_counts(model), flops_per_token(model)
    steps = config.horizon.total_steps(
        tokens_per_step=config.batch.total_tokens, flops_per_token=flops.total, scaling_params=counts.scaling
    )
    seconds = config.horizon.amount if config.horizon.unit == "seconds" else None
    if rate is not None:
        step_seconds = config.batch.total_tokens / rate.tokens_per_second
        # A run stops with the first step that ends past its budget, so there is always one.
        steps = steps or max(1, round(config.horizon.amount / step_seconds))
        seconds = seconds or steps * step_seconds
    return RunPlan(
        config=config,
        vocab_source=vocab_source,
        place=place,
        parameters=counts,
        flops=flops,
        memory=count_memory(model, config, compiled=_compiles_for_gpu(config, place)),
        steps=steps,
        seconds=seconds,
        rate=rate,
    )


def _compiles_for_gpu(config: RunConfig, place: Place) -> bool:
    if place.device.type != "cuda" or config.runtime.compile == "off":
        return False
    return not torch.cuda.is_available() or compiler_available(place.device)  # planned for one that is not here


def figures(plan: RunPlan, *, device_memory: int | None) -> dict[str, object]:
    """The plan as plain values: bytes, FLOPs, seconds. None: unknown."""
    place, tokens = plan.place, None if plan.steps is None else plan.steps * plan.config.batch.total_tokens
    return {
        "config": config_to_json(plan.config),
        "parameters": plan.parameters.total,
        "parameters_by_role": dict(plan.parameters.by_role),
        "scaling_parameters": plan.parameters.scaling,
        "flops_per_token": plan.flops.total,
        "steps": plan.steps,
        "tokens": tokens,
        "total_flops": None if tokens is None else tokens * plan.flops.total,
        "training_seconds": plan.seconds,
        "timed_tokens_per_step": None if plan.rate is None else plan.rate.tokens_per_step,
        "memory_bytes": plan.memory_bytes,
        "memory_bytes_by_part": {name: count for name, count in asdict(plan.memory).items() if name != "compiled"},
        "memory_counts": "compiled" if plan.memory.compiled else "uncompiled",
        "device": str(place.device),
        "device_memory_bytes": device_memory,
        "dtype": place.dtype_name,
        "peak_flops_per_second": place.peak.flops_per_second,
        "peak_source": place.peak.source,
    }


def model_text(model: ModelConfig) -> str:
    return f"depth {model.n_layer}, width {model.n_embd}, heads {model.n_head}, context {model.seq_len} tokens"


def step_text(config: RunConfig) -> str:
    count = config.micro_batches
    rows = f"{config.batch.micro_sequences} rows of {config.model.seq_len} tokens"
    return f"{config.batch.total_tokens:,} tokens: {count} micro-batch{'es' * (count > 1)} of {rows}"
