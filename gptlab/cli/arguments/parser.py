"""Command lines to frozen dataclasses and to requests for a run; every mistake is one line.

The syntax is that of tyro, and a test compares the two: `--model.n-layer 6`, `--model.bias` and `--model.no-bias`,
`--data.source A B`, None.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

from gptlab.cli.arguments.help import HELP_FLAGS, command_help, fitted
from gptlab.config.errors import ConfigError, UserError, nearest_name
from gptlab.config.fields import bare, flag_of, require_positive
from gptlab.config.foreign_names import answer
from gptlab.config.load import leaf_fields, unknown_field, value_from_text, wanted
from gptlab.runtime.files.plain_file import listed_sources

if TYPE_CHECKING:
    from gptlab.app.run.run_request import RunArguments, RunRequest

T = TypeVar("T")

_POSITIONAL = "positional"
Positional = Annotated[T, _POSITIONAL]
"""Marks a field that is given by its position."""

TRUTH_WORDS = ("true", "false", "on", "off")
"""Values of a boolean flag. Without one of them, the flag means True."""

_IMPLIED = {"compile": "on"}
"""Values of other flags that are given without one."""

DESCRIBE = "--describe-arguments"
"""For `gptlab completion`: as the last word, a command raises DescribedError instead of running."""


class DescribedError(Exception):
    """What a command reads: its further commands, or else its fields and which of them are given by position."""

    def __init__(
        self, fields: Mapping[str, Any], positionals: Sequence[str] = (), commands: Sequence[str] | None = None
    ) -> None:
        self.fields, self.positionals, self.commands = fields, positionals, commands


Unknown = Callable[[str, object], UserError]
"""The error for a flag of no field: its name, and what follows it or None."""


def parse(cls: type[T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """`cls` from a command line. UserError, one line, for an unknown, missing or malformed argument.

    `cls` is a dataclass with no other one in it. --help prints the help and raises SystemExit(0).
    """
    fields = leaf_fields(cls)
    positionals = [name for name, annotation in fields.items() if _is_positional(annotation)]
    if DESCRIBE in argv:
        raise DescribedError(fields, positionals)
    if {"-h", "--help"} & set(argv):
        print(command_help(cls, prog=prog, description=description, positionals=positionals))
        raise SystemExit(0)
    values = read_words(argv, fields, positionals=positionals)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.name not in values:
            needed = flag_of(field.name) if field.name not in positionals else field.name.upper().replace("_", "-")
            raise UserError(f"{prog} needs {needed} (see {prog} --help)")
    return cls(**values)


def read_request(
    argv: Sequence[str], arguments: type[RunArguments], *, prog: str, description: str, refuses: Collection[str] = ()
) -> RunRequest:
    """Read a command line and the TOML file it may name. UserError for a mistake; SystemExit(0) after --help, which
    leaves out what the command `refuses`."""
    # Imported here: commands that take no run do without recipes, and runs without pages of help.
    from gptlab.app.run.run_request import SOURCES, argument_types, request_of
    from gptlab.config.recipes import OWN_TYPES

    if {word.partition("=")[0] for word in argv} & {*HELP_FLAGS}:
        from gptlab.cli.arguments.run_help import show_help

        show_help(argv, arguments, refuses, prog=prog, description=description)
    names = argument_types(arguments)
    if DESCRIBE in argv:
        shown = {name: kind for name, kind in names.items() if name not in refuses}
        raise DescribedError(shown | OWN_TYPES, ["recipe"])
    given = read_words(argv, names | OWN_TYPES, positionals=["recipe"], unknown=lambda n, v: _unknown_flag(n, v, names))
    given |= {name: listed_sources(given[name]) for name in SOURCES if name in given}
    return request_of(given.pop("recipe", None), given)


def _unknown_flag(name: str, value: object, names: Mapping[str, Any]) -> UserError:
    if (elsewhere := answer(name)) is not None:
        return UserError(f"there is no {flag_of(name)} here: {elsewhere}")
    error = unknown_field(name.lower(), value, also=names)
    nearest = None if error.nearest is None else flag_of(str(error.nearest))
    return ConfigError(flag_of(name), value, error.reason, nearest)


def whole_numbers(words: Sequence[str], name: str) -> list[int]:
    """The different numbers of `8,64` or `8 64`, all above zero."""
    texts = [text for word in words for text in word.split(",") if text]
    numbers = [*dict.fromkeys(value_from_text(int, text, name) for text in texts)]
    for number in numbers:
        require_positive(name, number)
    return numbers


def run_subcommand(
    argv: Sequence[str], commands: Mapping[str, Callable[[list[str]], int | None]], *, prog: str, usage: str
) -> int:
    """Run the command that the first word names; without one, or for --help, print the usage. None counts as 0."""
    name = argv[0] if argv else "--help"
    if name == DESCRIBE:
        raise DescribedError({}, commands=[*commands])
    if name in ("-h", "--help", "help"):
        print(fitted(usage))
        return 0
    if name not in commands:
        nearest = nearest_name(name, commands) or next(iter(commands))
        raise UserError(f"{prog} {name}: no such command, there are {', '.join(commands)} (nearest: {nearest})")
    return commands[name](list(argv[1:])) or 0


def read_words(
    argv: Sequence[str], fields: Mapping[str, Any], *, positionals: Sequence[str] = (), unknown: Unknown | None = None
) -> dict[str, Any]:
    """{field: value} of what was given: `--field value`, `--field=value`, `--flag`, `--no-flag`, and `positionals`.

    A tuple takes every word up to the next flag, and more when its flag is repeated; `none` alone is an empty one for a
    run's dotted fields. For other fields, the last one counts. Underscores are read as dashes.
    """
    unknown = unknown or (lambda name, value: _unknown(name, [n for n in fields if n not in positionals]))
    texts: dict[str, list[str]] = {}
    words, places, refused = list(argv), list(positionals), list[UserError]()
    while words:
        word = words.pop(0)
        if _is_flag(word):
            try:
                name, given = _read_flag(word, words, fields, unknown)
            except UserError as error:  # all of them are said at once: commands of other programs have many
                refused.append(error)
                words = [*dropwhile(lambda word: not _is_flag(word), words)]
                continue
        elif places:
            name, given = places[0], [word]
            places = places if _is_tuple(fields[name]) else places[1:]
        else:
            raise UserError(f"{word!r} is one word too many: fields are given as --FIELD VALUE (see --help)")
        texts[name] = [*texts.get(name, ()), *given]
    if refused:
        raise refused[0] if len(refused) == 1 else UserError("; ".join(map(str, refused)))
    return {name: _value(fields[name], given, name) for name, given in texts.items()}


def _value(annotation: Any, texts: Sequence[str], field: str) -> Any:
    """A field's value from all the words that it was given."""
    if _is_tuple(annotation) and "." in field and [text.lower() for text in texts] == ["none"]:
        return ()
    values = [value_from_text(annotation, text, field) for text in texts]
    return sum(values, ()) if _is_tuple(annotation) else values[-1]


def _read_flag(word: str, words: list[str], fields: Mapping[str, Any], unknown: Unknown) -> tuple[str, list[str]]:
    """The field that a flag names, and its values, which are removed from `words`."""
    flag, has_inline, inline = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    stem, _, last = name.rpartition(".")
    negated = f"{stem}.{last[3:]}".lstrip(".") if last.startswith("no_") else ""
    following = [] if has_inline else list(takewhile(lambda word: not _is_flag(word), words))
    if name not in fields and bare(fields.get(negated))[0] is bool and not has_inline:
        return negated, ["false"]
    if name not in fields or not word.startswith("--"):
        raise unknown(name, inline if has_inline else next(iter(following), None))
    if has_inline:
        return name, [inline]
    given = following if _is_tuple(fields[name]) else following[:1]
    is_bool = bare(fields[name])[0] is bool
    if is_bool and given and given[0].lower() not in TRUTH_WORDS:
        given = []
    del words[: len(given)]
    if given or _is_tuple(fields[name]):
        return name, given
    if is_bool or name in _IMPLIED:
        return name, [_IMPLIED.get(name, "true")]
    raise UserError(f"{flag} needs a value: {wanted(fields[name])}")


def _is_flag(word: str) -> bool:
    """A flag is a dash and a letter; -1 and - are values."""
    return re.match(r"--?[A-Za-z]", word) is not None


def _is_tuple(annotation: Any) -> bool:
    return get_origin(bare(annotation)[0]) is tuple


def _unknown(name: str, known: Sequence[str]) -> UserError:
    nearest = nearest_name(name, known)
    hint = f" (nearest: {flag_of(nearest)})" if nearest else " (see --help)"
    return UserError(f"{flag_of(name)}: there is no such option{hint}")


def _is_positional(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated and _POSITIONAL in get_args(annotation)[1:]
