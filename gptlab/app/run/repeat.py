"""`--from RUN`: a run's configuration again, and which of its code, environment, machine and data differ today."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from gptlab.app.run.run_request import RunRequest
from gptlab.config.errors import ConfigError, UserError, shortened
from gptlab.config.length import Horizon
from gptlab.config.load import apply_overrides, config_from_json, flatten
from gptlab.config.recipes import RECIPES, configure, recorded_arguments, with_changes
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.lab.experiments.folder import require_validation_text
from gptlab.runtime.records.provenance import PATCH_NAME, ZIP_NAME
from gptlab.runtime.records.run_directory import RunDirectory, is_run, list_in

_ENVIRONMENT = ("python_version", "torch_version", "cuda_version")
_MACHINE = ("device_name", "cpu", "dtype", "threads", "world_size")
_DATA = ("data_fingerprint", "tokenizer_fingerprint")

Facts = Mapping[str, object]


def stored_config(run: RunDirectory) -> RunConfig:
    """A run's own configuration. UserError, naming the folder, where it is damaged."""
    values = run.read_config()
    try:
        return config_from_json(values)
    except UserError as error:
        raise UserError(f"{run.config_path} cannot be used: {error}") from None


def repeated_config(request: RunRequest, run: RunDirectory) -> RunConfig:
    """The configuration of `run`, with what the request changes. UserError where it would validate on the training
    text of a lab."""
    stored = stored_config(run)
    # The vocabulary size follows from the tokenizer, which other data or another --tokenizer may change.
    config = replace(stored, run_dir=None, model=replace(stored.model, vocab_size=None))
    request.require_own_arguments(config.recipe)
    if request.depth is not None or request.recipe_arguments:
        config = _from_recipe(config, request, run.sized_for())
    config = with_changes(config, request.overrides)
    if config.eval.validates:
        require_validation_text(config.data)
    return config


def _from_recipe(config: RunConfig, request: RunRequest, sized_for: Facts) -> RunConfig:
    """The run's recipe at another depth or with other arguments of its own, plus the fields in which the run differed
    from its recipe."""
    if config.recipe not in RECIPES:
        raise ConfigError(
            "--depth", request.depth, f"the recipe {config.recipe!r} of that run is not one of this gptlab, so nothing "
            "says what follows from a depth; give --model.n-layer, and what else shall change"
        )  # fmt: skip
    rate = sized_for.get("training_flops_per_second")
    machine = Machine(
        device=str(sized_for.get("device", "cpu")),
        flops_per_second=float(rate) if isinstance(rate, int | float) else None,
    )
    horizon = Horizon(amount=config.horizon.amount, unit=config.horizon.unit)
    given = recorded_arguments(config)
    before = configure(config.recipe, depth=config.model.n_layer, horizon=horizon, machine=machine, own=given)
    own, of_recipe = flatten(asdict(config)), flatten(asdict(before))
    differs = {name: value for name, value in own.items() if value != of_recipe[name]}
    after = configure(
        config.recipe,
        depth=config.model.n_layer if request.depth is None else request.depth,
        horizon=None if "target_param_data_ratio" in request.recipe_arguments else horizon,
        machine=machine,
        own=given | dict(request.recipe_arguments),
    )
    return apply_overrides(after, differs)


def what_differs(
    run: RunDirectory, now: Facts, asked: Mapping[str, Any], *, any_world_size: bool = False, resumes: bool = False
) -> Iterator[str]:
    """A line for each of code, environment, machine and data that differs from what `run` recorded, and how to get it
    back; also, unless this process resumes it, for each change of its configuration while it trained. Fields that were
    `asked` for ({dotted field: value}) are expected to differ, and skipped, and so is the number of processes with
    `any_world_size`. No line where the folder holds a configuration alone."""
    recorded = run.recorded()
    if not is_run(os.listdir(run.path)):
        return
    if not recorded:
        yield f"{run.provenance_path} is lost or damaged: what {run.path} was trained with is unknown"
        return
    if recorded.get("code_fingerprint") != now["code_fingerprint"]:
        change = f"{_code(recorded)} -> {_code(now)}"
        yield f"the code is not that of {run.path} ({change}){_how_to_have_code(run, recorded)}"
    if changed := _changed(recorded, now, _ENVIRONMENT):
        yield f"the environment is not that of {run.path} ({changed}); {run.environment_path} lists it"
    skipped = {"world_size"} if any_world_size else set()
    skipped |= {"device_name" if name == "runtime.device" else name.removeprefix("runtime.") for name in asked}
    if changed := _changed(recorded, now, [name for name in _MACHINE if name not in skipped]):
        yield f"the machine is not that of {run.path} ({changed}): close to, not bit for bit"
    other_data = any(name.partition(".")[0] in ("data", "tokenizer") for name in asked)
    if not other_data and (changed := _changed(recorded, now, _DATA)):
        yield f"the data is not that of {run.path} ({changed})"
    for change in [] if resumes else list_in(recorded, "config_changes"):
        match change:
            case {"step": int(step), "fields": dict(fields)} if step > 0 and (kept := [*(fields.keys() - asked)]):
                names = _shown(", ".join(sorted(kept)))
                yield (
                    f"the configuration of {run.path} changed after step {step} ({names}), and here holds from the "
                    "first step on: not bit for bit"
                )


def implementations_changed(recorded: object, now: Mapping[str, str]) -> str:
    """Which implementations differ from `recorded`, as "kernels: 0a1b... -> none". Empty where none differs
    or none was recorded."""
    if not isinstance(recorded, dict):
        return ""
    names = [*now, *(name for name in recorded if name not in now)]
    return ", ".join(
        # From an untrusted file: as much as a line can take.
        f"{str(name)[:60]}: {str(recorded.get(name))[:60]} -> {now.get(name)}"
        for name in names[:20]
        if recorded.get(name) != now.get(name)
    )


def _changed(recorded: Facts, now: Facts, names: Sequence[str]) -> str:
    return ", ".join(
        f"{name} {_shown(recorded.get(name))} -> {now[name]}" for name in names if recorded.get(name) != now[name]
    )


def _shown(value: object) -> str:
    """A value of run.json, an untrusted file, shortened to fit a line."""
    return shortened(str(value), 100)


def _code(facts: Facts) -> str:
    commit = facts.get("git_commit")
    if not commit:
        return f"gptlab {_shown(facts.get('gptlab_version'))}, of no commit"
    return f"commit {str(commit)[:12]}{' and changes' * bool(facts.get('git_dirty'))}"


def _how_to_have_code(run: RunDirectory, recorded: Facts) -> str:
    """Commands to copy, with every part quoted: names and commits come from an untrusted file."""
    patch, archive = run.code_path / PATCH_NAME, run.code_path / ZIP_NAME
    if archive.is_file():
        return f"; to have it: unzip {shlex.quote(str(archive))} -d FOLDER, then PYTHONPATH=FOLDER python -m gptlab"
    commit = recorded.get("git_commit")
    if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{7,64}", commit):
        return ""
    apply = f" && git apply {shlex.quote(str(patch.resolve()))}" if patch.is_file() else ""
    return f"; to have it: git checkout {commit}{apply}"
