"""`gptlab plan`: the size and cost of a run, counted from the real modules on the meta device. Reads no data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil

from gptlab.app.run.run_request import RunArguments, RunRequest
from gptlab.cli.arguments.parser import read_request, whole_numbers
from gptlab.config.errors import UserError
from gptlab.config.fields import require_positive
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.runtime.files.plain_file import to_json

if TYPE_CHECKING:
    import torch

    from gptlab.bench.plan import RunPlan
    from gptlab.runtime.hardware.peak import Peak

DESCRIPTION = "Size up a run without training: parameters, FLOPs, memory, steps and hours. Reads no data."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments(RunArguments):
    json: bool = False
    """Print one JSON object, numbers unrounded."""
    ranks: tuple[str, ...] = ()
    """A table for 8,64,1024 GPUs. What each would hold, send and save, counted with fake processes."""
    depths: tuple[str, ...] = ()
    """Depths in that table, in place of --depth."""
    gpu_gb: float = 80.0
    """Memory of a GPU in that table. GB are 1e9 bytes."""


def main(argv: list[str]) -> int:
    request = read_request(argv, PlanArguments, prog="gptlab plan", description=DESCRIPTION)
    if request.options.get("ranks"):
        return _many_ranks(request)
    if request.options.keys() & {"depths", "gpu_gb"}:
        raise UserError("--depths and --gpu-gb belong to the table of --ranks: give --ranks 8,64 too")
    # Imported here, since torch takes a second: help and completion go without.
    from gptlab.bench.plan import figures, make_plan
    from gptlab.bench.training_rate import limited_machine, remembered_rate
    from gptlab.config.recipes.quickstart import why_quickstart_size
    from gptlab.runtime.hardware.place import place_of

    config = request.config(_remembered, limited_machine)
    place = place_of(config)
    plan, memory = make_plan(config, place, remembered_rate(config, place)), _device_memory(place.device)
    if request.options.get("json"):
        print(to_json(figures(plan, device_memory=memory), indent=2))
    else:
        size = why_quickstart_size(config, _remembered(config))
        print(describe(plan, size=size, device_memory=memory))
    return 0


def _many_ranks(request: RunRequest) -> int:
    from gptlab.bench.training_rate import limited_machine
    from gptlab.cli.plan_ranks import UNITS, rows, table

    depths = whole_numbers(request.options.get("depths", ()), "depths")
    if depths and request.depth is not None:
        raise UserError("--depth and --depths both say how deep: give one of them")
    require_positive("--gpu-gb", request.options.get("gpu_gb"))
    sized = [replace(request, depth=depth) for depth in depths] or [request]
    made = rows(
        [one.config(_remembered, limited_machine) for one in sized],
        whole_numbers(request.options["ranks"], "ranks"),
        gpu_gb=request.options.get("gpu_gb", 80.0),
    )
    if request.options.get("json"):
        print(to_json([row.as_json() for row in made], indent=2))
    else:
        print(f"{table(made)}\n\n{UNITS}")
    return 0


def _remembered(config: RunConfig) -> Machine:
    """This machine with the rate that `train` or `bench` timed, or else with the most that its steps can reach."""
    from gptlab.bench.training_rate import limited_machine, machine_at, remembered_rate
    from gptlab.runtime.hardware.place import place_of
    from gptlab.runtime.processes.distributed import ALONE

    place = place_of(config)
    rate = remembered_rate(config, place)
    return limited_machine(config) if rate is None else machine_at(config, place, ALONE, rate.flops_per_second)


def describe(plan: RunPlan, *, size: str | None = None, device_memory: int | None = None) -> str:
    """The plan as text, one fact a line, units named. `size`: how it was chosen."""
    from gptlab.bench.plan import model_text, step_text
    from gptlab.runtime.hardware.device import device_name

    config, model, place = plan.config, plan.config.model, plan.place
    rows = [
        ("recipe", config.recipe),
        ("model", model_text(model)),
        ("size", size),
        ("vocabulary", f"{model.vocab_size:,} entries ({plan.vocab_source})"),
        ("parameters", f"{plan.parameters.total:,} ({plan.parameters.scaling:,} in matrices and head)"),
    ]
    rows += [(f"  {role}", f"{count:,}") for role, count in plan.parameters.by_role.items() if count]
    rows += [
        ("FLOPs per token", f"{plan.flops.total:,} (matmul {plan.flops.matmul:,}, attention {plan.flops.attention:,})"),
        ("step", step_text(config)),
        ("horizon", str(config.horizon)),
        *_length(plan),
        ("memory", _bytes(plan.memory_bytes) + _fits(plan, device_memory)),
        ("  weights", f"{_bytes(plan.memory.weights)} float{64 if '64' in str(place.dtype) else 32}"),
        ("  gradients", _bytes(plan.memory.gradients)),
        ("  optimizer", f"{_bytes(plan.memory.optimizer)} of moments"),
        ("  activations", f"{_bytes(plan.memory.activations)} {_activations(plan)}"),
        ("  update", _update(plan)),
        ("  validation", _validation(plan)),
        ("  snapshot", _snapshot(plan)),
        ("device", f"{device_name(place.device)} ({place.device})"),
        ("peak", _peak(place.peak)),
        ("time", _time(plan)),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows if text)


def _length(plan: RunPlan) -> list[tuple[str, str]]:
    if plan.steps is None:
        return [("steps", f"unknown until steps are timed: {_how_to_time(plan)}")]
    tokens = plan.steps * plan.config.batch.total_tokens
    about = "about " if plan.config.horizon.unit == "seconds" else ""
    return [
        ("steps", f"{about}{plan.steps:,}"),
        ("tokens", f"{about}{tokens:,} ({tokens / plan.parameters.scaling:.3g} per matrix and head parameter)"),
        ("FLOPs", f"{about}{tokens * plan.flops.total:.3g}"),
    ]


def _activations(plan: RunPlan) -> str:
    dtype = plan.place.dtype_name
    if plan.memory.compiled:
        return f"at the peak of a micro-batch's passes in {dtype}, compiled"
    if plan.place.device.type == "cuda" and not plan.config.runtime.activation_checkpointing:
        return f"at the peak of a micro-batch's passes in {dtype}, uncompiled"
    less = "the C++ kernels keep" if plan.place.device.type == "cpu" else "torch.compile keeps"
    return f"kept for the backward pass of a micro-batch in {dtype}; {less} less"


def _update(plan: RunPlan) -> str:
    more = plan.memory.update
    return f"{_bytes(more)} more than the activations, which are freed before it" if more else ""


def _validation(plan: RunPlan) -> str:
    more = plan.memory.validation
    freed = "gradients and activations, which are freed before"
    return f"{_bytes(more)} more for its logits than for {freed}" if more else ""


def _snapshot(plan: RunPlan) -> str:
    if not plan.memory.snapshot:
        return ""
    where = "" if plan.memory_is_shared else " of host memory, not counted above"
    return f"{_bytes(plan.memory.snapshot)}{where}: weights and moments as of the step that is being saved"


def _fits(plan: RunPlan, there: int | None) -> str:
    if there is None:
        return ""
    of, memory = f" of {_bytes(there)}", plan.memory
    if plan.memory_bytes < there:
        return of
    rows_help = memory.weights + memory.gradients + memory.optimizer < there and plan.config.batch.micro_sequences > 1
    return f"{of}: too little; lower {'batch.micro_sequences' if rows_help else 'the depth or width of the model'}"


def _peak(peak: Peak) -> str:
    if peak.flops_per_second is None:
        return "unknown"
    return f"{peak.flops_per_second / 1e12:.3g} TFLOP/s ({'vendor' if peak.source == 'table' else peak.source})"


def _time(plan: RunPlan) -> str:
    if plan.seconds is None:
        return f"{_least(plan)}; {_how_to_time(plan)}"
    training = f"{_hours(plan.seconds)} of training"
    if plan.rate is None:
        return training
    timed = f"timed on {plan.rate.date} with {plan.rate.tokens_per_step:,} tokens a step"
    speed = f"{plan.rate.tokens_per_second:,.0f} tokens/s, {timed}"
    return f"{training} at {speed}; evaluation and saving are not included"


def _least(plan: RunPlan) -> str:
    """A lower bound: no step is faster than the matrix products alone."""
    if plan.place.peak.flops_per_second is None or plan.steps is None:
        return "unknown"
    flops = plan.steps * plan.config.batch.total_tokens * plan.flops.total
    return f"more than {_hours(flops / plan.place.peak.flops_per_second)}, at the peak"


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{f'{hours:,.0f}' if hours >= 100 else f'{hours:.3g}'} hours ({seconds:,.0f} seconds)"


def _how_to_time(plan: RunPlan) -> str:
    return f"`gptlab bench {plan.config.recipe}` with the same arguments times this machine"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _device_memory(device: torch.device) -> int | None:
    """Total memory of the device in bytes; None if unknown."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total  # Also Apple's GPUs, which share it.
