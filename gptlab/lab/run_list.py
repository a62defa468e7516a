"""The runs in a folder: how each ended, in what it differs from its recipe, what it reached, the space it takes."""

from __future__ import annotations

import fnmatch
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError, one_line
from gptlab.config.fields import require_choice
from gptlab.config.length import HORIZONS, Horizon, HorizonUnit
from gptlab.config.load import config_to_json, flatten, leaf_fields, unknown_field, value_from_text
from gptlab.config.recipes import configure, recorded_arguments
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.lab.run_record import number, reached, read_validations
from gptlab.runtime.files.plain_file import read_json_object
from gptlab.runtime.records.run_directory import RunDirectory, is_run
from gptlab.training.checkpoint.names import list_checkpoints

_NOT_A_CHANGE = ("run_dir", "recipe", "model.n_layer", "model.vocab_size", "horizon.amount", "horizon.unit", "log.")
"""Fields that the recipe is called with, that follow from data and place, or that decide nothing of a run."""

_OWN = re.compile(
    r"config\.json|run\.json(\.damaged)?|code|environment\.txt|gpu\.txt|metrics\.jsonl|log\.txt|tokenizer|checkpoints"
    r"|tensorboard|summary\.json|report\.(html|md)|set-aside-\d+|\.lock(\.json)?|\..+\.tmp"
)
"""What gptlab writes into a run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    path: Path
    status: str = "damaged"
    """running | finished | preempted | failed | killed (recorded as running, but no process holds it) | damaged |
    unknown (run.json is lost)."""
    problem: str | None = None
    """Why it is damaged."""
    start: str = ""
    """UTC."""
    recipe: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """{dotted name: value} of its configuration."""
    changes: Mapping[str, Any] | None = None
    """{field: value} where it is not the recipe's for that depth and horizon; None where the recipe is unknown."""
    val_bpb: float | None = None
    """Of the final weights; of a run that has not finished, its last validation."""
    tokens: int | None = None
    training_seconds: float | None = None
    data_fingerprint: str | None = None
    disk_bytes: int = 0
    checkpoint_bytes: int = 0
    has_checkpoint: bool = False
    is_own: bool = False
    """Whether it was trained, and all in its folder was written, by gptlab."""


COLUMNS: Mapping[str, Callable[[ListedRun], Any]] = {
    "run": lambda run: str(run.path),
    "status": lambda run: run.status,
    "val_bpb": lambda run: run.val_bpb,
    "tokens": lambda run: run.tokens,
    "seconds": lambda run: run.training_seconds,
    "disk": lambda run: run.disk_bytes,
    "recipe": lambda run: run.recipe,
    "depth": lambda run: run.fields.get("model.n_layer"),
    "start": lambda run: run.start,
}
"""What runs can be sorted and selected by."""
_WILDCARDS = frozenset("*?[")
_NUMBERS = ("val_bpb", "tokens", "seconds", "disk", "depth")
_DECIMALS = {"val_bpb": 4, "seconds": 0}
"""Of those that are shown rounded."""


def list_runs(folders: Iterable[Path]) -> list[ListedRun]:
    """All runs in and below the folders, newest first. Links are not followed. UserError for a missing folder."""
    found: dict[Path, ListedRun] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}: name one that holds runs")
        for path in run_folders(folder):
            found.setdefault(path.resolve(), listed(path))
    return sorted(found.values(), key=lambda run: run.start, reverse=True)


def sort_runs(runs: Iterable[ListedRun], column: str, *, reverse: bool = False) -> list[ListedRun]:
    """By a column, ascending; runs without a value last."""
    require_choice("--sort", column, COLUMNS)
    value = COLUMNS[column]

    def known(run: ListedRun) -> bool:
        return value(run) is not None and value(run) == value(run)

    every = [*runs]
    rest = [run for run in every if not known(run)]
    return sorted(filter(known, every), key=value, reverse=reverse) + rest


def select_runs(runs: Iterable[ListedRun], conditions: Sequence[str]) -> list[ListedRun]:
    """Those for which every condition FIELD=VALUE holds: of a column, of a field of the configuration, or of the length
    that was asked for (steps=60). With the wildcards of a shell, VALUE has to fit the value as text, or a member of a
    list. val_bpb and seconds also equal what they are rounded, as they are shown."""
    tests = [_condition(text) for text in conditions]
    return [run for run in runs if all(test(run) for test in tests)]


def _condition(text: str) -> Callable[[ListedRun], bool]:
    name, equals, wanted = text.partition("=")
    name = name.replace("-", "_")
    if not equals:
        raise UserError(f"--where {text}: it takes FIELD=VALUE, such as status=finished")
    kinds = leaf_fields(RunConfig)
    if name in HORIZONS and name not in COLUMNS:
        unit, factor = HORIZONS[name]
        length = unit, value_from_text(float, wanted, name) * factor
        return lambda run: (run.fields.get("horizon.unit"), run.fields.get("horizon.amount")) == length
    if name not in COLUMNS and name not in kinds:
        raise unknown_field(name, wanted, also=COLUMNS)
    of = COLUMNS.get(name) or (lambda run: run.fields.get(name, ()))
    if not _WILDCARDS.isdisjoint(wanted):
        return lambda run: any(one == wanted or fnmatch.fnmatchcase(one, wanted) for one in _texts(of(run)))
    if name in COLUMNS:
        expected = value_from_text(float, wanted, name) if name in _NUMBERS else wanted
    else:
        expected = json.loads(json.dumps(value_from_text(kinds[name], wanted, name)))
    if (decimals := _DECIMALS.get(name)) is not None:
        return lambda run: (value := of(run)) is not None and expected in (value, round(value, decimals))
    return lambda run: of(run) == expected


def _texts(value: Any) -> list[str]:
    """The members of a list, or the only one, as they are written; empty for None."""
    members = value if isinstance(value, list | tuple) else [value]
    return [one if isinstance(one, str) else json.dumps(one) for one in members if one is not None]


def run_folders(folder: Path, max_depth: float = math.inf) -> Iterator[Path]:
    """The runs in and below a folder, `max_depth` folders below it at most. Links are not followed, and hidden folders
    not entered."""
    with suppress(OSError):
        with os.scandir(folder) as entries:
            found = {entry.name: entry for entry in entries}
        if is_run(found):
            yield folder
            return
        for name in sorted(found) if max_depth > 0 else ():
            if found[name].is_dir(follow_symlinks=False) and not name.startswith("."):
                yield from run_folders(folder / name, max_depth - 1)


def listed(path: Path, *, held: bool = False) -> ListedRun:
    """The run in a folder. What is wrong with it is its `problem`, not an error. `held`: whether this process holds its
    lock."""
    directory, found = RunDirectory(path), ListedRun(path=path)
    try:
        found = replace(found, disk_bytes=bytes_below(path))
        weights = weight_folders(path)
        record, fields = directory.recorded(), flatten(directory.read_config())
        start = record.get("start")
        found = replace(found, start=start[:25] if isinstance(start, str) else "")
        if type(fields.pop("schema_version", None)) is not int or not isinstance(fields.get("recipe"), str):
            raise UserError(f"{directory.config_path} is not the configuration of a run")
        status = str(record.get("status", "unknown"))[:20]
        if status == "running" and (held or not directory.in_use()):
            status = "killed"
        numbers = _reached(directory, status)
    except (UserError, OSError) as error:
        return replace(found, problem=one_line(error))
    data = record.get("data_fingerprint")
    return replace(
        found,
        status=status,
        checkpoint_bytes=sum(map(bytes_below, weights)),
        has_checkpoint=any(map(list_checkpoints, weights)),
        recipe=fields["recipe"],
        fields=fields,
        changes=changes_from_recipe(fields, record),
        data_fingerprint=data if isinstance(data, str) else None,
        is_own=isinstance(record.get("run_id"), str)
        and "imported" not in record
        and all(map(_OWN.fullmatch, os.listdir(path))),
        **numbers,
    )


def bytes_below(folder: Path | str) -> int:
    """Bytes of all files below a folder. UserError for a link."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise UserError(f"{entry.path} is a link, and a run folder holds no links")
            with suppress(FileNotFoundError):  # a temporary file of a run that is training
                is_folder = entry.is_dir(follow_symlinks=False)
                total += bytes_below(entry.path) if is_folder else entry.stat(follow_symlinks=False).st_size
    return total


def weight_folders(path: Path) -> list[Path]:
    """The folders that hold checkpoints: of the run, and of those that were set aside."""
    return [folder for folder in (path / "checkpoints", *path.glob("set-aside-*/checkpoints")) if folder.is_dir()]


def _reached(run: RunDirectory, status: str) -> dict[str, Any]:
    """What a run reached: by summary.json where it has finished, else by metrics.jsonl."""
    if status == "finished" and run.summary_path.exists():
        found = reached(read_json_object(run.summary_path), {}, {})
    else:
        validations, trained = read_validations(run.metrics_path)
        found = reached({}, trained, validations[-1] if validations else {})
    tokens = round(found.tokens) if found.tokens is not None and math.isfinite(found.tokens) else None
    return {"val_bpb": found.bpb, "tokens": tokens, "training_seconds": found.seconds}


def changes_from_recipe(fields: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any] | None:
    """{field: value} where a configuration is not its recipe's for the same depth and horizon; None where the recipe is
    unknown. `record`: run.json. Of a run that began with trained weights, these decide the model."""
    if (of_recipe := recipe_fields(fields, record)) is None:
        return None
    begun = fields.get("init_from") is not None
    skipped = ("model.", *_NOT_A_CHANGE) if begun else _NOT_A_CHANGE
    return {
        name: value
        for name, value in fields.items()
        if value != of_recipe.get(name, value) and not name.startswith(skipped)
    }


def recipe_fields(fields: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any] | None:
    """{field: value} of what a run's recipe makes of its depth, horizon and machine; None where it is unknown."""
    try:
        return _recipe_fields(
            fields["recipe"],
            None if fields.get("init_from") is not None else fields["model.n_layer"],
            (fields["horizon.amount"], fields["horizon.unit"], fields.get("horizon.until_val_loss")),
            (str(record.get("device", "cpu")), number(record.get("training_flops_per_second"))),
            tuple(fields.get("recipe_arguments", ())),
        )
    except (UserError, ArithmeticError, KeyError, TypeError, ValueError):
        return None


@functools.lru_cache(maxsize=256)
def _recipe_fields(
    recipe: str,
    depth: int | None,
    length: tuple[float, HorizonUnit, float | None],
    machine: tuple[str, float | None],
    recipe_arguments: tuple[str, ...],
) -> dict[str, Any]:
    """Every field of what a recipe makes of these, as in config.json, but without a loss to reach, which is a change of
    it. KeyError for an unknown recipe."""
    own = recorded_arguments(replace(RunConfig(), recipe=recipe, recipe_arguments=recipe_arguments))
    horizon = Horizon(amount=length[0], unit=length[1], until_val_loss=length[2])
    on = Machine(device=machine[0], flops_per_second=machine[1])
    made = flatten(config_to_json(configure(recipe, depth=depth, horizon=horizon, machine=on, own=own)))
    return made | {"horizon.until_val_loss": None}
