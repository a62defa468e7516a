"""`--from RUN`: a run's configuration once more, and what of its code, environment, machine and data differs today."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from gptlab.app.run_request import RunRequest
from gptlab.config.errors import ConfigError, UserError
from gptlab.config.horizon import Horizon
from gptlab.config.load import apply_overrides, config_from_json, flatten
from gptlab.config.recipes import RECIPES
from gptlab.config.recipes.own_arguments import recorded_arguments
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.runtime.records.code_snapshot import PATCH_NAME, ZIP_NAME
from gptlab.runtime.records.run_directory import RunDirectory

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
    """The configuration of `run` with what was asked for beside --from, to be trained in a folder of its own."""
    stored = stored_config(run)
    # Found out from the tokenizer, which other data or another --tokenizer may change.
    config = replace(stored, run_dir=None, model=replace(stored.model, vocab_size=None))
    request.require_own_arguments(config.recipe)
    if request.depth is not None or request.recipe_arguments:
        config = _from_recipe(config, request, recorded_facts(run))
    asked = dict(request.overrides)
    if request.horizon is not None:
        asked = {"horizon.amount": request.horizon.amount, "horizon.unit": request.horizon.unit} | asked
    return apply_overrides(config, asked)


def _from_recipe(config: RunConfig, request: RunRequest, recorded: Facts) -> RunConfig:
    """What the run's recipe makes of another depth or of other arguments of its own, and on it what the run had
    otherwise than its recipe."""
    if config.recipe not in RECIPES:
        raise ConfigError(
            "--depth", request.depth, f"the recipe {config.recipe!r} of that run is none of this gptlab, so nothing "
            "says what follows from a depth; give --model.n-layer, and what else shall change"
        )  # fmt: skip
    recipe = RECIPES[config.recipe]
    rate = recorded.get("training_flops_per_second")
    machine = Machine(
        device=str(recorded.get("device", "cpu")),
        flops_per_second=float(rate) if isinstance(rate, int | float) else None,
    )
    horizon = Horizon(amount=config.horizon.amount, unit=config.horizon.unit)
    given = recorded_arguments(config, recipe)
    before = recipe(depth=config.model.n_layer, horizon=horizon, machine=machine, **given)
    own, of_recipe = flatten(asdict(config)), flatten(asdict(before))
    changed = {name: value for name, value in own.items() if value != of_recipe[name]}
    return apply_overrides(
        recipe(
            depth=config.model.n_layer if request.depth is None else request.depth,
            horizon=None if "target_param_data_ratio" in request.recipe_arguments else horizon,
            machine=machine,
            **(given | dict(request.recipe_arguments)),
        ),
        changed,
    )


def recorded_facts(run: RunDirectory) -> Facts:
    """run.json; empty where it is lost, for what a run did does not hang on it."""
    try:
        return run.read_provenance()
    except UserError:
        return {}


def what_differs(run: RunDirectory, now: Facts, asked: Mapping[str, Any]) -> Iterator[str]:
    """A line for each of code, environment, machine and data that is not what `run` recorded, and how to have it.

    What was `asked` for otherwise ({dotted field: value}) is no surprise, and is left out.
    """
    recorded = recorded_facts(run)
    if not recorded:
        yield f"{run.provenance_path} is lost or damaged: nobody knows what {run.path} was trained with"
        return
    if recorded.get("code_fingerprint") != now["code_fingerprint"]:
        change = f"{_code(recorded)} -> {_code(now)}"
        yield f"the code is not that of {run.path} ({change}){_how_to_have_code(run, recorded)}"
    if changed := _changed(recorded, now, _ENVIRONMENT):
        yield f"the environment is not that of {run.path} ({changed}); {run.environment_path} lists it"
    by_request = {"device_name" if name == "runtime.device" else name.removeprefix("runtime.") for name in asked}
    if changed := _changed(recorded, now, [name for name in _MACHINE if name not in by_request]):
        yield f"the machine is not that of {run.path} ({changed}): close to, not bit for bit"
    other_data = any(name.partition(".")[0] in ("data", "tokenizer") for name in asked)
    if not other_data and (changed := _changed(recorded, now, _DATA)):
        yield f"the data is not that of {run.path} ({changed})"


def _changed(recorded: Facts, now: Facts, names: Sequence[str]) -> str:
    return ", ".join(
        f"{name} {_shown(recorded.get(name))} -> {now[name]}" for name in names if recorded.get(name) != now[name]
    )


def _shown(value: object) -> str:
    """A value of run.json, which a stranger may have written, as a line can take it."""
    text = str(value)
    return text if len(text) <= 100 else f"{text[:96]} ..."


def _code(facts: Facts) -> str:
    commit = facts.get("git_commit")
    if not commit:
        return f"gptlab {_shown(facts.get('gptlab_version'))}, of no commit"
    return f"commit {str(commit)[:12]}{' and changes' * bool(facts.get('git_dirty'))}"


def _how_to_have_code(run: RunDirectory, recorded: Facts) -> str:
    """Commands to copy, and so with every part of them quoted: names and commits may be a stranger's."""
    patch, archive = run.code_path / PATCH_NAME, run.code_path / ZIP_NAME
    if archive.is_file():
        return f"; to have it: unzip {shlex.quote(str(archive))} -d FOLDER, then PYTHONPATH=FOLDER python -m gptlab"
    commit = recorded.get("git_commit")
    if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{7,64}", commit):
        return ""
    apply = f" && git apply {shlex.quote(str(patch.resolve()))}" if patch.is_file() else ""
    return f"; to have it: git checkout {commit}{apply}"
