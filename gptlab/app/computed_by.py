"""What computes a run: alike on all ranks, recorded in run.json, compared with what computed it before."""

from __future__ import annotations

from collections.abc import Mapping

from gptlab.app.repeat import recorded_facts
from gptlab.config.errors import UserError
from gptlab.model.gpt import GPT
from gptlab.model.kernels.ops import implementations, missing_kernels
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.load import Checkpoint
from gptlab.training.compilation import Kernels


def require_same_implementations(model: GPT, kernels: Kernels, group: Group) -> dict[str, str]:
    """{part: what computes it}; of `compile` known after the warm-up only, since a compiler may be there and fail.

    UserError on rank 0 where another rank computes a part of the run by another implementation: the ranks would not
    have the same weights for long. The other ranks end by it.
    """
    device, dtype = model.token_embedding.weight.device, model.compute_dtype
    ours = implementations(device, dtype) | {"compile": kernels.compiler}
    everybody = group.gather("implementations", {"found": ours, "missing": missing_kernels(device, dtype)})
    for rank, theirs in enumerate(everybody if group.is_main else []):
        found = theirs["found"]
        if found != ours:
            parts = [name for name in {**ours, **found} if found.get(name) != ours.get(name)]
            what = "; ".join(f"{name}: {found.get(name)}, not {ours.get(name)}" for name in parts)
            raise UserError(
                f"rank {rank} computes otherwise than rank 0 ({theirs['missing'] or what}): give all of them the same "
                "C++ compiler, kind of processor and torch, and a cache that can be written ($GPTLAB_CACHE)"
            )
    return ours


def settle_implementations(
    model: GPT,
    kernels: Kernels,
    run: RunDirectory,
    checkpoint: Checkpoint | None,
    origin: RunDirectory | None,
    group: Group,
    console: Console,
) -> dict[str, str]:
    """What computes the run, to be called after the warm-up, and recorded in run.json. UserError as above; a warning
    where it is not what computed the checkpoint, or the run that this one repeats (`origin`)."""
    found = require_same_implementations(model, kernels, group)
    if group.is_main:
        resumes = recorded_facts(run).get("resumes")
        if isinstance(resumes, list) and resumes:
            run.set_status("running", resumes=[*resumes[:-1], resumes[-1] | {"implementations": found}])
        else:
            run.set_status("running", implementations=found)
    if checkpoint is not None:
        if what := changed(checkpoint.state.get("implementations"), found):
            console.warn(f"not computed as the checkpoint was ({what}): close to, not bit for bit")
    elif origin is not None and (what := changed(recorded_facts(origin).get("implementations"), found)):
        console.warn(f"not computed as {origin.path} was ({what}): close to, not bit for bit")
    return found


def changed(recorded: object, now: Mapping[str, str]) -> str:
    """What is computed differently than `recorded`, as "attention: kernels 0a1b... -> torch". Empty where nothing is,
    and where a run or a checkpoint recorded nothing."""
    if not isinstance(recorded, dict):
        return ""
    names = [*now, *(name for name in recorded if name not in now)]
    return ", ".join(
        # From an untrusted file: as much as a line can take.
        f"{str(name)[:60]}: {str(recorded.get(name))[:60]} -> {now.get(name)}"
        for name in names[:20]
        if recorded.get(name) != now.get(name)
    )
