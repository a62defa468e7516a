"""What a run would be: parameters, FLOPs, memory, steps and time, counted from its modules on the meta device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch

from gptlab.bench.memory import Memory, count_memory
from gptlab.bench.training_rate import Rate, assumed_vocab_size
from gptlab.config.load import config_to_json
from gptlab.config.model import ModelConfig
from gptlab.config.run import RunConfig
from gptlab.model.counting import FlopsPerToken, ParameterCounts, flops_per_token, parameter_counts
from gptlab.model.gpt import GPT
from gptlab.runtime.hardware.place import Peak


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    config: RunConfig
    vocab_source: str
    dtype: torch.dtype
    parameters: ParameterCounts
    flops: FlopsPerToken
    memory: Memory
    peak: Peak
    steps: int | None
    """None: a horizon in seconds on a machine whose peak is unknown."""
    memory_is_shared: bool
    """Whether the device computes in the host's memory."""
    seconds: float | None
    """On the training clock. None: unknown, since no step of this configuration was timed here."""
    rate: Rate | None = None
    """The last timed speed of this configuration on this machine."""

    @property
    def memory_bytes(self) -> int:
        """Of the device."""
        return self.memory.total if self.memory_is_shared else self.memory.device_total


def make_plan(
    config: RunConfig, *, dtype: torch.dtype, peak: Peak, rate: Rate | None = None, memory_is_shared: bool = True
) -> RunPlan:
    """Count everything for one device. Raises ConfigError when the horizon is shorter than one step."""
    vocab_size, vocab_source = assumed_vocab_size(config)
    config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    with torch.device("meta"):
        model = GPT(config.model, dtype)
    if dtype == torch.float64:
        model = model.double()
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
        dtype=dtype,
        parameters=counts,
        flops=flops,
        memory=count_memory(model, config),
        peak=peak,
        steps=steps,
        memory_is_shared=memory_is_shared,
        seconds=seconds,
        rate=rate,
    )


def figures(plan: RunPlan, *, device: str, device_memory: int | None) -> dict[str, object]:
    """The plan as plain values: bytes, FLOPs, seconds. None: unknown."""
    tokens = None if plan.steps is None else plan.steps * plan.config.batch.total_tokens
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
        "memory_bytes": plan.memory_bytes,
        "memory_bytes_by_part": asdict(plan.memory),
        "device": device,
        "device_memory_bytes": device_memory,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "peak_flops_per_second": plan.peak.flops_per_second,
        "peak_source": plan.peak.source,
    }


def model_text(model: ModelConfig) -> str:
    return f"depth {model.n_layer}, width {model.n_embd}, heads {model.n_head}, context {model.seq_len} tokens"


def step_text(config: RunConfig) -> str:
    count = config.micro_batches
    rows = f"{config.batch.micro_sequences} rows of {config.model.seq_len} tokens"
    return f"{config.batch.total_tokens:,} tokens: {count} micro-batch{'es' * (count > 1)} of {rows}"
