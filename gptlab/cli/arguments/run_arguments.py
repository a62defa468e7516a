"""`[RECIPE] [--FIELD VALUE ...]` to a request for a run, for `train`, `plan` and `bench`, and their --help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gptlab.app.run_request import (
    ALIASES,
    DEFAULT_RECIPE,
    GIVEN_NAMES,
    RunArguments,
    RunRequest,
    argument_types,
    recipes_own_types,
    request_of,
)
from gptlab.cli.arguments.help import field_docs
from gptlab.cli.arguments.parser import read_words
from gptlab.cli.arguments.run_help import HELP_FLAGS, RunHelp, asked_topic, help_of
from gptlab.config.errors import ConfigError, UserError
from gptlab.config.foreign_names import answer
from gptlab.config.load import unknown_field
from gptlab.config.recipes import RECIPES
from gptlab.config.recipes.own_arguments import own_arguments


def read_request(argv: Sequence[str], arguments: type[RunArguments], *, prog: str, description: str) -> RunRequest:
    """Read a command line and the TOML file it may name. UserError: one line; --help: SystemExit(0)."""
    if {word.partition("=")[0] for word in argv} & {*HELP_FLAGS}:
        _show_help(argv, arguments, prog=prog, description=description)
    names = argument_types(arguments)
    given = read_words(
        argv, names | recipes_own_types(), positionals=["recipe"], implied={"compile": "on"},
        unknown=lambda n, v: _unknown_flag(n, v, names),
    )  # fmt: skip
    return request_of(given.pop("recipe", None), given)


def recipe_list() -> str:
    """One line a recipe: its name and the first line of its docstring."""
    width = max(map(len, RECIPES))
    return "\n".join(f"{name:<{width}}  {(call.__doc__ or '').partition(chr(10))[0]}" for name, call in RECIPES.items())


def _show_help(argv: Sequence[str], arguments: type[RunArguments], *, prog: str, description: str) -> None:
    """Print help with the defaults of the recipe that is named beside --help. Raises SystemExit(0)."""
    recipe = next((word for word in argv if word in RECIPES), DEFAULT_RECIPE)
    text = _help(arguments, recipe, prog=prog, description=description)
    topic = asked_topic(argv, RECIPES)
    if topic is not None:
        print(text.about(topic))
    else:
        print(text.everything() if "--help-all" in argv else text.short())
    raise SystemExit(0)


def _help(arguments: type[RunArguments], recipe: str, *, prog: str, description: str) -> RunHelp:
    docs = {GIVEN_NAMES.get(name, name): text for name, text in field_docs(arguments).items()}
    kinds, common = argument_types(arguments), argument_types(RunArguments)
    of_recipe = {name: one.annotation for name, one in own_arguments(RECIPES[recipe]).items()}
    texts = {name: one.text for call in RECIPES.values() for name, one in own_arguments(call).items() if one.text}
    return help_of(
        prog=prog,
        description=f"{description} Defaults in [ ]: {recipe}; `sized`: by machine.",
        recipe=recipe,
        call=RECIPES[recipe],
        kinds=kinds | of_recipe,
        docs=docs | texts,
        aliases=ALIASES,
        own=[name for name in kinds if name not in common],
    )


def _unknown_flag(name: str, value: object, names: Mapping[str, Any]) -> UserError:
    flag = f"--{name.replace('_', '-')}"
    if (elsewhere := answer(name)) is not None:
        return UserError(f"there is no {flag} here: {elsewhere}")
    error = unknown_field(name.lower(), value, also=names)
    nearest = None if error.nearest is None else f"--{str(error.nearest).replace('_', '-')}"
    return ConfigError(flag, value, error.reason, nearest)
