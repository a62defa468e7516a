"""Arguments of a recipe's own: keywords from which it derives fields, such as learning rates before they are scaled.

A recipe declares them in its signature, with defaults, and explains them in the `Args:` section of its docstring. They
are flags of `gptlab train RECIPE`, keys of a TOML file and keywords of `gptlab.train`. `RunConfig.recipe_arguments`
keeps those that were given, so that `--from RUN --depth N` calls the recipe as the run did.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, get_type_hints

from gptlab.config.errors import UserError
from gptlab.config.load import checked_value
from gptlab.config.run import RunConfig

P = ParamSpec("P")

COMMON = ("depth", "horizon", "minutes", "machine")
"""What every recipe takes."""


@dataclass(frozen=True, slots=True)
class OwnArgument:
    annotation: Any
    default: Any
    text: str
    """What it is, with its unit."""


def keeps_own_arguments(recipe: Callable[P, RunConfig]) -> Callable[P, RunConfig]:
    """The recipe, noting in its configuration the arguments of its own that are not at their defaults."""

    @functools.wraps(recipe)
    def noted(*args: P.args, **kwargs: P.kwargs) -> RunConfig:
        own = own_arguments(recipe)
        given = {name: kwargs[name] for name in own if name in kwargs and kwargs[name] != own[name].default}
        texts = tuple(f"{name}={json.dumps(value)}" for name, value in given.items())
        return replace(recipe(*args, **kwargs), recipe_arguments=texts)

    return noted


def own_arguments(recipe: Callable[..., RunConfig]) -> Mapping[str, OwnArgument]:
    """{name: argument}; empty for a recipe that has none."""
    parameters = inspect.signature(recipe).parameters
    own = [name for name, parameter in parameters.items() if name not in COMMON and parameter.kind is _KEYWORD]
    if not own:
        return {}
    kinds, texts = get_type_hints(recipe), _texts(inspect.getdoc(recipe) or "")
    return {name: OwnArgument(kinds[name], parameters[name].default, texts.get(name, "")) for name in own}


def recorded_arguments(config: RunConfig, recipe: Callable[..., RunConfig]) -> dict[str, Any]:
    """The arguments that `config` notes, checked against its recipe. UserError where they are none of it."""
    own, found = own_arguments(recipe), dict[str, Any]()
    for text in config.recipe_arguments:
        name, _, value = text.partition("=")
        try:
            found[name] = checked_value(own[name].annotation, json.loads(value), name)
        except (KeyError, ValueError):
            raise UserError(f"recipe_arguments: {text!r} is no argument of {config.recipe}") from None
    return found


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _texts(doc: str) -> dict[str, str]:
    """The entries of an `Args:` section."""
    section = doc.partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: _sentence(text) for name, text in entries}


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]
