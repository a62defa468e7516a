"""`[RECIPE] [--FIELD VALUE ...]` to a request for a run, for `train`, `plan` and `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gptlab.app.run_request import RunArguments, RunRequest, argument_types, request_of
from gptlab.cli.arguments.parser import read_words
from gptlab.cli.arguments.run_help import HELP_FLAGS, show_help
from gptlab.config.errors import ConfigError, UserError
from gptlab.config.foreign_names import answer
from gptlab.config.load import unknown_field
from gptlab.config.recipes import OWN_TYPES, RECIPES


def read_request(argv: Sequence[str], arguments: type[RunArguments], *, prog: str, description: str) -> RunRequest:
    """Read a command line and the TOML file it may name. UserError for a mistake; SystemExit(0) after --help."""
    if {word.partition("=")[0] for word in argv} & {*HELP_FLAGS}:
        show_help(argv, arguments, prog=prog, description=description)
    names = argument_types(arguments)
    given = read_words(
        argv, names | OWN_TYPES, positionals=["recipe"], implied={"compile": "on"},
        unknown=lambda n, v: _unknown_flag(n, v, names),
    )  # fmt: skip
    return request_of(given.pop("recipe", None), given)


def recipe_list() -> str:
    """One line a recipe: its name and the first line of its docstring."""
    width = max(map(len, RECIPES))
    return "\n".join(f"{name:<{width}}  {(call.__doc__ or '').partition(chr(10))[0]}" for name, call in RECIPES.items())


def _unknown_flag(name: str, value: object, names: Mapping[str, Any]) -> UserError:
    flag = f"--{name.replace('_', '-')}"
    if (elsewhere := answer(name)) is not None:
        return UserError(f"there is no {flag} here: {elsewhere}")
    error = unknown_field(name.lower(), value, also=names)
    nearest = None if error.nearest is None else f"--{str(error.nearest).replace('_', '-')}"
    return ConfigError(flag, value, error.reason, nearest)
