"""What was asked for, by its names, and the RunConfig that it makes: recipe < TOML file < what is given beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gptlab.config.errors import ConfigError, UserError, nearest_name
from gptlab.config.fields import bare, flag_of, require_positive
from gptlab.config.foreign_names import answer, config_file_answer
from gptlab.config.length import LENGTH_FIELDS, Horizon, replaced_lengths, with_length_fields
from gptlab.config.load import apply_overrides, checked_value, differences, flatten, leaf_fields, rebuild, unknown_field
from gptlab.config.recipes import OWN_TYPES, RECIPES, configure, own_arguments, recorded_arguments, with_changes
from gptlab.config.run import Compile, DType, RunConfig
from gptlab.config.scaling import FASTEST, SLOWEST, Machine
from gptlab.runtime.files.plain_file import listed_sources, load_toml
from gptlab.runtime.records.identity import FREE_FIELDS, changeable_fields

DEFAULT_RECIPE = "quickstart"

ALIASES = {
    "data": "data.source",
    "device": "runtime.device",
    "dtype": "runtime.dtype",
    "compile": "runtime.compile",
    "exact_any_world_size": "parallel.exact_any_world_size",
    "until_val_loss": "horizon.until_val_loss",
}
"""Short form -> the field that it stands for."""

SOURCES = ("data", "data.source", "data.val_source")
"""Lists of corpora, in which the word A,B means A B."""

MAX_SIZES_TIMED = 3

Measure = Callable[[RunConfig], Machine]
Recipe = Callable[[int | None, Machine | None], RunConfig]
"""(depth or None, machine or None) -> a configuration."""

GIVEN_NAMES = {"sources": "data", "from_run": "from"}
"""Attribute -> flag, where they cannot be the same: `data` is a group, `from` a keyword."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments(RunConfig):
    """Every name a command line may use: a run's fields and the short forms. --help shows it; it is never built from
    flags (see `RunRequest`)."""

    recipe: str = DEFAULT_RECIPE
    """A name from `gptlab train --list`, or a TOML file (.toml) with the names below, dotted or in tables."""
    depth: int | None = None
    """Transformer blocks; width, heads, batch and learning rates follow from it. None: the recipe decides."""
    minutes: float | None = None
    """Train for so many minutes of the training clock. Give one of minutes, steps, tokens, flops, tokens_per_param, or
    none of them for the recipe's length."""
    steps: int | None = None
    """Train for so many optimizer steps."""
    tokens: int | None = None
    """Train on so many tokens."""
    flops: float | None = None
    """Train for so many floating-point operations, forward and backward."""
    tokens_per_param: float | None = None
    """Train on so many tokens per matrix and head parameter."""
    until_val_loss: float | None = None
    """Stop at this validation loss (nats/token); the length above stays the cap."""
    sources: tuple[str, ...] = ()
    """Short for --data.source: stdlib, a file (.txt .jsonl .parquet), a folder, a glob, a name of `gptlab data
    list`; several as A B, as A,B, or repeated."""
    device: str | None = None
    """Short for --runtime.device: auto | cpu | cuda | cuda:N | mps."""
    dtype: DType | None = None
    """Short for --runtime.dtype."""
    compile: Compile | None = None
    """Short for --runtime.compile; --compile alone means on."""
    exact_any_world_size: bool = False
    """Short for --parallel.exact-any-world-size: the same bits with 1, 2, 4 and 8 processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainArguments(RunArguments):
    resume: str | None = None
    """Continue the run in this folder, bit for bit. Fields given beside it must be those that the run has, but for
    those that change nothing of what is trained (--data where the corpus was moved, --checkpoint.every-seconds), and
    the limits on faults (--faults.max-rewinds, --runtime.max-loss)."""
    resume_from_step: int | None = None
    """With --resume: the step to continue from. Its checkpoint must be there; later ones are set aside."""
    from_run: str | None = None
    """Repeat the run in this folder. Fields given beside it replace its own."""
    quiet: bool = False
    """Print warnings and the closing block only. Errors go to stderr as ever; log.txt has the rest."""
    list: bool = False
    """Print the recipes and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What a user asks for, before a recipe is called or a machine measured."""

    recipe: str | None = None
    """None: DEFAULT_RECIPE."""
    depth: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """{dotted field: checked value}, a length by its fields; applied after the recipe."""
    resume: str | None = None
    resume_from_step: int | None = None
    from_run: str | None = None
    recipe_arguments: Mapping[str, Any] = field(default_factory=dict)
    """The given arguments of the recipe's own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The given arguments that a command adds to RunArguments."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """All given arguments but the recipe, fields by their full names, a length as it was given."""

    @property
    def gives_length(self) -> bool:
        return not LENGTH_FIELDS.isdisjoint(self.overrides)

    def horizon(self, recipe: str) -> Horizon | None:
        """The requested length, with `recipe`'s amount or unit where only the other is requested; None where neither
        is."""
        if not self.gives_length:
            return None
        whole = self.overrides.keys() >= LENGTH_FIELDS
        default = Horizon() if whole else configure(recipe, depth=self.depth, own=self.recipe_arguments).horizon
        heads = ((name.partition("."), value) for name, value in self.overrides.items())
        return rebuild(default, {name: value for (group, _, name), value in heads if group == "horizon"}, "horizon.")

    def config(self, measure: Measure, limit: Measure | None = None) -> RunConfig:
        """The configuration of a new run. `measure` times a configuration's steps on this machine, `limit` says how
        fast they can be at most; both are called only where the recipe sizes itself by the machine."""
        name = self.recipe or DEFAULT_RECIPE
        if self.recipe_arguments:
            self.require_own_arguments(name)
        horizon = self.horizon(name)

        def recipe(depth: int | None, machine: Machine | None) -> RunConfig:
            return configure(name, depth=depth, horizon=horizon, machine=machine, own=self.recipe_arguments)

        slow, fast = (recipe(self.depth, machine) for machine in (SLOWEST, FASTEST))
        config = self._with_fields(slow if slow == fast else self._sized(recipe, measure, limit))
        if config.horizon.unit == "tokens":  # less than a step is refused before data is read
            config.horizon.total_steps(tokens_per_step=config.batch.total_tokens, flops_per_token=1, scaling_params=1)
        return config

    def _sized(self, recipe: Recipe, measure: Measure, limit: Measure | None) -> RunConfig:
        """The recipe's configuration, sized by this machine. What is timed has the requested fields."""
        known = None if limit is None else limit(self._with_fields(recipe(self.depth, None)))
        return sized_by_measurement(recipe, self.depth, lambda config: measure(self._with_fields(config)), known)

    def _with_fields(self, config: RunConfig) -> RunConfig:
        """A recipe's configuration with the requested fields and initial weights."""
        init_from = self.overrides.get("init_from", config.init_from)
        return apply_overrides(config, self.overrides) if init_from is None else self._from_weights(init_from, config)

    def _from_weights(self, init_from: str, config: RunConfig) -> RunConfig:
        from gptlab.model.interop.pretrained import begin_from

        asked = {} if self.depth is None else {"model.n_layer": self.depth}
        return begin_from(init_from, config, asked | dict(self.overrides))

    def require_own_arguments(self, recipe: str) -> None:
        """UserError for an argument of another recipe."""
        own = own_arguments(recipe)
        for name in self.recipe_arguments:
            if name not in own:
                instead = answer(name)
                theirs = [other for other in RECIPES if name in own_arguments(other)]
                raise UserError(
                    f"{flag_of(name)} is an argument of {' and '.join(theirs)}, not of {recipe}; here: {instead}"
                )

    def resumed(self, stored: RunConfig) -> RunConfig:
        """A stored run's configuration, with those of the requested fields that change nothing of what was trained. A
        mode comes without the former one's shard_ranks."""
        free = FREE_FIELDS - {"run_dir", "init_from"} | changeable_fields(None)
        asked = {name: value for name, value in self.overrides.items() if name in free}
        if "parallel.mode" in asked:
            asked.setdefault("parallel.shard_ranks", None)
        return apply_overrides(stored, asked)

    def with_length(self, stored: RunConfig) -> RunConfig:
        """A stored run's configuration with the requested length."""
        return with_changes(
            stored, {name: value for name, value in self.overrides.items() if name.startswith("horizon.")}
        )

    def disagreements(self, stored: RunConfig) -> list[str]:
        """Where the request differs from a stored run, one line a field; the run's folder does not count."""
        asked = {name: value for name, value in self.overrides.items() if name != "run_dir"}
        if self.depth is not None:
            asked.setdefault("model.n_layer", self.depth)
        lines = differences(stored, apply_overrides(stored, asked)) + self._other_arguments(stored)
        if self.recipe not in (None, stored.recipe):
            lines.insert(0, f"recipe: {stored.recipe!r} vs {self.recipe!r}")
        return lines

    def _other_arguments(self, stored: RunConfig) -> list[str]:
        """The requested arguments of the recipe's own that differ from the stored run's."""
        if not self.recipe_arguments:
            return []
        self.require_own_arguments(stored.recipe)
        theirs = {**own_arguments(stored.recipe), **recorded_arguments(stored)}
        return [f"{name}: {theirs[name]} vs {v}" for name, v in self.recipe_arguments.items() if theirs[name] != v]


def sized_by_measurement(
    recipe: Recipe, depth: int | None, measure: Measure, limit: Machine | None = None
) -> RunConfig:
    """The configuration that `recipe(depth, machine)` makes for the speed of this machine.

    FLOP/s depend on the size that is timed (twice as many at depth 4 as at depth 2, docs/LOG.md, 2026-11-22). So the
    recipe's guess, from the `limit` that is known of this machine, is timed, and then the size that follows, until the
    depth stays: on a CPU, where that takes a second (a minute with --compile on) and makes up for a moment in which
    other programs were busy. A GPU compiles each size for tens of seconds, more than one layer is worth: there, the
    depth may be one too small or twice too large.
    """
    config = recipe(depth, limit)
    for _ in range(MAX_SIZES_TIMED):
        machine = measure(config)
        sized, layers = recipe(depth, machine), config.model.n_layer
        compiles = machine.device != "cpu" and machine.flops_per_second is not None
        least, most = (layers / 2, layers + 1) if compiles else (layers, layers)
        if least <= sized.model.n_layer <= most:
            return recipe(layers, machine)
        config = sized
    return config


def request_from_values(recipe: str | None, values: Mapping[str, Any]) -> RunRequest:
    """The request that a Python caller makes by {name: value}, with groups of fields nested as in a TOML file."""
    names = argument_types(TrainArguments) | OWN_TYPES
    del names["list"]  # which the command prints
    leaves = flatten({name: _plain(value) for name, value in values.items()})
    return request_of(recipe, {name: _checked(name, value, names) for name, value in leaves.items()})


def request_of(recipe: str | None, given: Mapping[str, Any]) -> RunRequest:
    """The request of a recipe's name or a TOML file, and {name: checked value} beside it. UserError: one line."""
    if "from" in given or "resume_from_step" in given:
        _require_one_start(recipe, given)
    values = _full_names(given)
    of_training = {"tokenizer.vocab_size", "tokenizer.max_digits", "tokenizer.train_bytes"} & values.keys()
    if of_training and values.get("tokenizer.path") is not None:
        reason = "is for a tokenizer that is trained, and tokenizer.path names a finished one: give one of them"
        raise UserError(f"{min(of_training)} {reason}")
    if recipe is not None and recipe not in RECIPES:
        recipe, values = _with_file(recipe, values)
    values |= {name: os.path.expanduser(values[name]) for name in ("run_dir", "resume", "from") if values.get(name)}
    require_positive("depth", values.get("depth"))
    if values.get("sample.prompts") == ():  # none, and none from the validation text either
        values.setdefault("sample.from_validation", 0)
    fields, common = leaf_fields(RunConfig), argument_types(RunArguments) | OWN_TYPES
    return RunRequest(
        recipe=recipe,
        depth=values.get("depth"),
        overrides={name: value for name, value in with_length_fields(values).items() if name in fields},
        resume=values.get("resume"),
        resume_from_step=values.get("resume_from_step"),
        from_run=values.get("from"),
        recipe_arguments={name: value for name, value in values.items() if name in OWN_TYPES},
        options={name: value for name, value in values.items() if name not in common},
        given=values,
    )


def _with_file(recipe: str, given: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The recipe that a TOML file names, and its values with those that are given beside it. A depth or a length that
    is given replaces what of the file means the same."""
    if not recipe.endswith(".toml"):
        raise _unknown_recipe(recipe)
    file = with_length_fields(_full_names(_read_file(recipe)))
    named = file.pop("recipe", None)
    if named is not None and named not in RECIPES:
        raise _unknown_recipe(named)
    replaced = replaced_lengths(given) | ({"model.n_layer"} if "depth" in given else set())
    return named, {name: value for name, value in file.items() if name not in replaced} | dict(given)


def _unknown_recipe(name: str) -> UserError:
    if (elsewhere := config_file_answer(name)) is not None:
        return UserError(f"nanoGPT's {name} is a recipe here: {elsewhere}")
    nearest = nearest_name(name, RECIPES)
    hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(RECIPES)}"
    return UserError(f"{name!r} is neither a recipe nor a .toml file: {hint}")


def _require_one_start(recipe: str | None, given: Mapping[str, Any]) -> None:
    """UserError where two arguments say what to train."""
    if given.get("resume_from_step") is not None and given.get("resume") is None:
        raise UserError("--resume-from-step needs --resume RUN, the run to continue")
    if given.get("from") is None:
        return
    other = f"--resume {given['resume']}" if given.get("resume") is not None else recipe
    if other is not None:
        raise UserError(f"--from {given['from']} and {other} both say what to train: give one of them")


def argument_types(arguments: type[RunArguments]) -> dict[str, Any]:
    """{argument's name: its type}."""
    fields = {GIVEN_NAMES.get(name, name): kind for name, kind in leaf_fields(arguments).items()}
    del fields["recipe_arguments"]  # which the recipe writes
    return fields


def _full_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the full names of fields in place of ALIASES; None leaves one out, or is the field's value."""
    fields, values = leaf_fields(RunConfig), {name: value for name, value in given.items() if name not in ALIASES}
    for name, field_name in ALIASES.items():
        if name in given and (given[name] is not None or bare(fields[field_name])[1]):
            if field_name in given:
                names = " and ".join(map(flag_of, (name, field_name)))
                raise UserError(f"{names} are one field: give one of them")
            values[field_name] = given[name]
    return values


def _read_file(path: str) -> dict[str, Any]:
    names, values = argument_types(RunArguments) | OWN_TYPES, dict[str, Any]()
    try:
        for name, value in load_toml(path).items():
            values[name] = _checked(name, value, names)
    except ConfigError as error:
        raise UserError(f"{path}: {error}") from None
    return values


def _checked(name: str, value: Any, names: Mapping[str, Any]) -> Any:
    if name not in names:
        if (elsewhere := answer(name)) is not None:
            raise UserError(f"there is no {name} here: {elsewhere}")
        raise unknown_field(name, value, also=names)
    if name in SOURCES and isinstance(value, str) and value != "none":
        value = listed_sources([value])
    return checked_value(names[name], value, name)


def _plain(value: Any) -> Any:
    """Paths as text, also inside lists and groups."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
