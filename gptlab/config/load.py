"""Configurations to and from JSON and overrides. A wrong name, type or value is refused by its name."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gptlab.config.errors import ConfigError, UserError, nearest_name
from gptlab.config.fields import bare, require_choice
from gptlab.config.run import RunConfig

T = TypeVar("T")

SCHEMA_VERSION = 1
"""Incremented, from the first release on, when older files can no longer be read unchanged."""
MAX_INT = 2**63 - 1
"""Larger amounts overflow in floats and tensors."""

_MAY_HOLD_NUL = ("sample.prompts", "prompt")
"""Texts that a model continues. Other texts become paths or messages, which cannot contain a NUL."""


def config_to_json(config: RunConfig) -> dict[str, Any]:
    """Every field, nested like the dataclasses, with "schema_version"; exactly what reading it back from JSON gives."""
    return {"schema_version": SCHEMA_VERSION, **json.loads(json.dumps(dataclasses.asdict(config)))}


def config_from_json(values: object) -> RunConfig:
    """The inverse of `config_to_json`, strict: a missing or unknown field and a wrong type are ConfigErrors."""
    if not isinstance(values, dict):
        raise UserError(f"a configuration is a JSON object, this is {type(values).__name__}")
    version = values.get("schema_version")
    if type(version) is not int or version < 1:
        raise ConfigError("schema_version", version, "not the configuration of a gptlab run", SCHEMA_VERSION)
    if version > SCHEMA_VERSION:
        raise ConfigError(
            "schema_version", version, f"written by a newer gptlab; this one reads up to {SCHEMA_VERSION}: upgrade it"
        )
    leaves = flatten({name: value for name, value in values.items() if name != "schema_version"})
    missing = [name for name in leaf_fields(RunConfig) if name not in leaves]
    if missing and not (unknown := [name for name in leaves if name not in leaf_fields(RunConfig)]):
        raise UserError(f"the configuration lacks {', '.join(missing)}: the file is incomplete")
    if missing:  # A misspelled field is both missing and unknown; the unknown name is the one to correct.
        raise unknown_field(unknown[0], leaves[unknown[0]])
    return apply_overrides(RunConfig(), leaves)


def apply_overrides(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """`config` with {"model.n_layer": 6, ...} replaced.

    Each dataclass is built once, from the innermost out, with all its new values. So no check sees a combination that
    was not asked for (a new width with the old number of heads).
    """
    fields = leaf_fields(RunConfig)
    checked = {}
    for name, value in overrides.items():
        if name not in fields:
            raise unknown_field(name, value)
        checked[name] = checked_value(fields[name], value, name)
    return rebuild(config, checked | _rows_that_divide(config, checked))


def _rows_that_divide(config: RunConfig, overrides: Mapping[str, Any]) -> dict[str, int]:
    """`batch.micro_sequences`, where another size of step or row asks for fewer rows in a pass: the cut into passes
    does not change what is computed, so nobody has to give it too."""
    if overrides.keys().isdisjoint({"batch.total_tokens", "model.seq_len"}) or "batch.micro_sequences" in overrides:
        return {}
    tokens = overrides.get("batch.total_tokens", config.batch.total_tokens)
    seq_len = overrides.get("model.seq_len", config.model.seq_len)
    if seq_len < 1 or tokens % seq_len:  # which the fields' own checks refuse
        return {}
    return {"batch.micro_sequences": math.gcd(config.batch.micro_sequences, tokens // seq_len)}


def rebuild(value: T, overrides: Mapping[str, Any], prefix: str = "") -> T:
    """A frozen dataclass with {dotted name: checked value} replaced, and all of it checked. `prefix`: its dotted name,
    for errors."""
    own = {name: new for name, new in overrides.items() if "." not in name}
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(group := getattr(value, field.name)):
            head = f"{field.name}."  # a group without a replaced field too: it may never have been checked as a whole
            inner = {name.removeprefix(head): new for name, new in overrides.items() if name.startswith(head)}
            own[field.name] = rebuild(group, inner, f"{prefix}{head}")
    try:
        return dataclasses.replace(value, **own)  # type: ignore[type-var]
    except ConfigError as error:
        raise _of_owner(error, value, prefix) from None


def _of_owner(error: ConfigError, owner: object, prefix: str) -> ConfigError:
    """The error by the owner's dotted name: a dataclass that is used several times (AdamWConfig) does not know it."""
    field = error.field.rpartition(".")[2]
    return ConfigError(prefix + field, error.value, error.reason, error.nearest) if hasattr(owner, field) else error


def differences(a: RunConfig, b: RunConfig) -> list[str]:
    """The fields in which two configurations differ, one line each: "model.n_layer: 4 vs 6"."""
    left, right = flatten(dataclasses.asdict(a)), flatten(dataclasses.asdict(b))
    return [f"{name}: {left[name]!r} vs {right[name]!r}" for name in left if left[name] != right[name]]


_LEAVES = (str, int, float, list, type(None))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables to {dotted name: leaf}, with dashes in names read as underscores. ConfigError for a name that is
    given in two spellings."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        dotted = prefix + name.replace("-", "_")
        if isinstance(value, _LEAVES) or not isinstance(value, Mapping):  # the first is ten times as fast
            found = {dotted: value}
        else:
            found = flatten(value, f"{dotted}.")
        for twice in found:
            if twice in leaves:
                raise ConfigError(twice, found[twice], "is given twice: give it once")
        leaves |= found
    return leaves


def leaf_fields(cls: type) -> Mapping[str, Any]:
    """{dotted name: annotation} of every field of a dataclass that is not itself a dataclass, in order."""
    return _leaf_fields(cls)


@functools.cache  # apart: to mypy, type[T] is not hashable
def _leaf_fields(cls: type) -> Mapping[str, Any]:
    leaves: dict[str, Any] = {}
    for name, annotation in get_type_hints(cls, include_extras=True).items():
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            leaves |= {f"{name}.{inner}": leaf for inner, leaf in _leaf_fields(annotation).items()}
        elif name in cls.__dataclass_fields__:  # type: ignore[attr-defined]
            leaves[name] = annotation
    return leaves


def unknown_field(name: str, value: object, also: Iterable[str] = ()) -> ConfigError:
    """The error for an unknown name, with the most similar known one (`also`: names beside the fields)."""
    names = [*also, *leaf_fields(RunConfig)]
    inside = [known for known in names if known.startswith(f"{name}.")]
    if inside:
        return ConfigError(name, value, "is a group of fields, name one of them", inside[0])
    last = name.rpartition(".")[2]
    same_leaf = next((known for known in names if known.rpartition(".")[2] == last), None)
    return ConfigError(name, value, "there is no such field", same_leaf or nearest_name(name, names))


def checked_value(annotation: Any, value: Any, field: str) -> Any:
    """`value` as the field stores it (a list becomes a tuple, 3 becomes 3.0 for a float, "none" None, for which TOML
    has no word, or an empty tuple); ConfigError for a wrong type."""
    leaf, optional = bare(annotation)
    if optional and (value is None or value == "none"):
        return None
    if get_origin(leaf) is tuple and value == "none":
        return ()
    if get_origin(leaf) is tuple and isinstance(value, list | tuple):
        return tuple(checked_value(get_args(leaf)[0], item, field) for item in value)
    if get_origin(leaf) is Literal and isinstance(value, str):
        require_choice(field, value, get_args(leaf))
        return value
    if isinstance(value, Real) and type(value) not in (bool, int, float):  # NumPy's
        value = int(value) if isinstance(value, Integral) else float(value)
    if leaf is int and type(value) is float and value.is_integer():  # 1e6
        value = int(value)
    if type(value) is int and abs(value) > MAX_INT:
        raise ConfigError(field, value, "must be below 2^63")
    if leaf is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ConfigError(field, value, "must be a finite number")
        return float(value)
    if leaf is Path and isinstance(value, str | Path):
        return Path(value)
    if type(value) is str and "\0" in value and field not in _MAY_HOLD_NUL:
        raise ConfigError(field, value, "must not hold a NUL character")
    if leaf in (bool, int, str) and type(value) is leaf:
        return value
    raise ConfigError(field, value, f"must be {wanted(annotation)}")


def value_from_text(annotation: Any, text: str, field: str) -> Any:
    """A word of a command line as the field stores it (a tuple of one). None and True in any case; 1e6 is an integer;
    True is on and False is off where both are choices (nanoGPT's --compile=False)."""
    leaf, optional = bare(annotation)
    if optional and text.lower() == "none":
        return None
    if get_origin(leaf) is tuple:
        inner = get_args(leaf)[0]
        parts = text.split(",") if get_origin(inner) is Literal else [text]  # no choice has a comma
        return tuple(value_from_text(inner, part, field) for part in parts)
    value: Any = text
    if leaf is bool:
        value = {"true": True, "on": True, "false": False, "off": False}.get(text.lower(), text)
    elif leaf in (int, float):
        value = _number(leaf, text)
    elif {"on", "off"} <= {*get_args(leaf)}:
        value = {"true": "on", "false": "off"}.get(text.lower(), text)
    return checked_value(annotation, value, field)


def wanted(annotation: Any) -> str:
    """The values that a field accepts, in words."""
    leaf, optional = bare(annotation)
    plain = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    if get_origin(leaf) is Literal:
        text = f"one of {', '.join(get_args(leaf))}"
    else:
        text = "a list of texts" if get_origin(leaf) is tuple else plain.get(leaf, str(leaf))
    return f"{text}, or none" if optional else text


def _number(kind: type[int] | type[float], text: str) -> int | float | str:
    """1e6 and 3.0 count as whole numbers. Other texts are returned unchanged, for the type check to refuse."""
    with suppress(ValueError):
        return kind(text)
    with suppress(ValueError):
        if (number := float(text)).is_integer():
            return int(number)
    return text
