"""Dataclasses that check their fields when they are made: limits, choices, and the decorator that checks them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from gptlab.config.errors import ConfigError, nearest_name

T = TypeVar("T")


def flag_of(name: str) -> str:
    """`--model.seq-len` for the field model.seq_len."""
    return f"--{name.replace('_', '-')}"


def require(condition: bool, field: str, value: object, reason: str, nearest: object = None) -> None:
    if not condition:
        raise ConfigError(field, value, reason, nearest)


def require_choice(field: str, value: str, choices: Iterable[str]) -> None:
    choices = tuple(choices)
    if value not in choices:
        nearest = nearest_name(str(value), choices) or choices[0]
        raise ConfigError(field, value, f"must be one of {', '.join(choices)}", nearest)


def require_device(name: str) -> None:
    """That it is written as a device is; whether there is one is found out elsewhere."""
    kind, colon, number = name.partition(":")
    require_choice("runtime.device", kind, ("auto", "cpu", "cuda", "mps"))
    if colon and (kind != "cuda" or not number.isdecimal()):
        raise ConfigError("runtime.device", name, "only cuda takes a number, as in cuda:0", kind)


def require_positive(field: str, value: float | None) -> None:
    """None passes: it means "not set"."""
    if value is not None and not value > 0:
        raise ConfigError(field, value, "must be greater than zero")


@dataclass(frozen=True, slots=True)
class Limit:
    """Which values a field of an Annotated type may have."""

    holds: Callable[[Any], bool]
    reason: str
    nearest: object = None


Positive = Annotated[T, Limit(lambda value: value > 0, "must be greater than zero")]
NotNegative = Annotated[T, Limit(lambda value: value >= 0, "must not be negative", 0)]
Share = Annotated[float, Limit(lambda value: 0 <= value <= 1, "must be in [0, 1]")]
BelowOne = Annotated[float, Limit(lambda value: 0 <= value < 1, "must be in [0, 1)")]


_fields_alone = ContextVar("fields_alone", default=False)


@contextmanager
def each_field_alone() -> Iterator[None]:
    """Within the context, checked dataclasses check each field and not what the fields are together: for a
    configuration whose other fields come later. `load.rebuild` then checks it as a whole."""
    token = _fields_alone.set(True)
    try:
        yield
    finally:
        _fields_alone.reset(token)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def checked_dataclass(prefix: str) -> Callable[[type[T]], type[T]]:
    """A frozen dataclass of keyword arguments that refuses values outside of its fields' Limits and Literals, before
    its own __post_init__, and stores 3 as 3.0 in a field of floats. `prefix` precedes the names in errors: "model." or,
    for flags, "--"."""

    def made(cls: type[T]) -> type[T]:
        own = getattr(cls, "__post_init__", None)

        def check(self: T) -> None:
            _check_fields(self, prefix)
            if own is not None and not _fields_alone.get():
                own(self)

        cls.__post_init__ = check  # type: ignore[attr-defined]
        return dataclass(frozen=True, slots=True, kw_only=True)(cls)

    return made


def _check_fields(owner: object, prefix: str) -> None:
    """ConfigError for a field that is outside of its Limit or no choice of its Literal. None passes: "not set"."""
    cls: type = type(owner)
    for name, leaf, choices, limits in _checked_fields(cls):
        if (value := getattr(owner, name)) is None:
            continue
        if leaf is float and type(value) is int:
            object.__setattr__(owner, name, float(value))  # it is frozen
        shown = flag_of(name) if prefix == "--" else prefix + name
        if choices:
            require_choice(shown, value, choices)
        for limit in limits:
            require(limit.holds(value), shown, value, limit.reason, limit.nearest)


@functools.cache
def _checked_fields(cls: type) -> list[tuple[str, Any, tuple[str, ...], list[Limit]]]:
    """(name, type, choices of its Literal, limits) of each field with something to check."""
    found = []
    for name, annotation in get_type_hints(cls, include_extras=True).items():
        leaf, optional = bare(annotation)
        or_none = "; none is a value too" if optional else ""
        limits = [replace(limit, reason=limit.reason + or_none) for limit in limits_of(annotation)]
        found.append((name, leaf, get_args(leaf) if get_origin(leaf) is Literal else (), limits))
    return [one for one in found if one[1] is float or one[2] or one[3]]


def limits_of(annotation: Any) -> list[Limit]:
    """Those of an Annotated type, and of `Positive[int] | None` too."""
    parts = (annotation, *get_args(annotation))
    return [item for part in parts for item in getattr(part, "__metadata__", ()) if isinstance(item, Limit)]


def bare(annotation: Any) -> tuple[Any, bool]:
    """(the type without Annotated and None, whether None is allowed)."""
    optional = False
    if get_origin(annotation) is Annotated:  # Positional[int | None]
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        optional = type(None) in get_args(annotation)
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    return (get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation), optional
