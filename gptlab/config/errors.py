"""Exit codes, and UserError: one line on stderr and exit code 2. Any other exception that reaches the user is a bug.

Also the limits of fields, which dataclasses check when they are made.
"""

from __future__ import annotations

import difflib
import errno
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

T = TypeVar("T")

EXIT_USAGE = 2  # wrong usage, input or environment
EXIT_TRAINING_FAILED = 3  # or a process of several was lost
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: a signal stopped the run, and it can be resumed
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

MAX_MESSAGE_CHARACTERS = 2000
MAX_VALUE_CHARACTERS = 300
MAX_NAME_CHARACTERS = 100
MAX_NAMES = 1000


class UserError(Exception):
    """Wrong usage, input or environment: a single line that says what, why, and what would work."""


class ConfigError(UserError):
    """An invalid configuration: names the field, its value, the reason, and the nearest valid choice."""

    def __init__(self, field: str, value: object, reason: str, nearest: object = None) -> None:
        self.field = field
        self.value = value
        self.reason = reason
        self.nearest = nearest
        hint = "" if nearest is None else f" (nearest valid: {nearest})"
        super().__init__(f"{field} = {_shown(value)}: {reason}{hint}")


@contextmanager
def paths_of_the_user() -> Iterator[None]:
    """Turns errors about a path that is too long, loops or may not be read into a UserError, wherever they are raised:
    every command has options that are paths."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES) or error.filename is None:
            raise
        raise UserError(f"cannot use {_shown(str(error.filename))}: {error.strerror}") from error


@contextmanager
def cannot(what: str) -> Iterator[None]:
    """Turns an OSError within the context into a UserError, "cannot WHAT: REASON"."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {what}: {error.strerror or error}") from error


def one_line(error: BaseException) -> str:
    """The message as a single line of bounded length, without control characters.

    Parts of it may come from an untrusted file, which must neither fill nor control the terminal.
    """
    text = printable(" ".join(str(error)[: 2 * MAX_MESSAGE_CHARACTERS].split()))
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[: MAX_MESSAGE_CHARACTERS - 4]} ..."


def printable(text: str, keep: str = "\n") -> str:
    """The text without control characters, but those of `keep`: names and values from an untrusted folder must not
    control the terminal."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 4]} ..."


def nearest_name(word: str, choices: Iterable[str]) -> str | None:
    """The choice most similar to `word`; None if none is similar."""
    # Names in an untrusted file may be very long, and comparing takes time in the product of the lengths.
    if len(word) > MAX_NAME_CHARACTERS:
        return None
    names = [choice for choice in itertools.islice(choices, MAX_NAMES) if len(choice) <= MAX_NAME_CHARACTERS]
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return matches[0] if matches else None


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
        shown = prefix + (name.replace("_", "-") if prefix == "--" else name)
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
