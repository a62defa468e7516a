"""--help: every argument with its type, text and default, from the dataclasses, in 80 columns."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gptlab.config.fields import bare, flag_of
from gptlab.config.load import leaf_fields

WIDTH = 80
INDENT = 6

HELP_FLAGS = ("-h", "--help", "--help-all")


def command_help(cls: type, *, prog: str, description: str, positionals: Iterable[str]) -> str:
    """The help of a command whose arguments are one dataclass."""
    kinds, docs, first = leaf_fields(cls), field_docs(cls), [*positionals]
    defaults = {field.name: field.default for field in fields(cls)}
    required = {name for name in first if defaults[name] in (MISSING, "")}
    written = ((name, _positional(name, kinds[name])) for name in first)
    words = " ".join(word if name in required else f"[{word}]" for name, word in written)
    lines = [f"usage: {' '.join(filter(None, (prog, words)))} [--ARGUMENT VALUE ...]", "", *wrapped(description), ""]
    for name in [*first, *(name for name in kinds if name not in first)]:
        left = _positional(name, kinds[name]) if name in first else option(name, kinds[name])
        lines += entry(left, docs.get(name, ""), default_text(defaults[name]))
    return "\n".join([*lines, "", "  -h, --help", " " * INDENT + "This text."])


def option(name: str, annotation: Any) -> str:
    """`--model.seq-len N`, `--model.bias, --model.no-bias`, `--data.rows packed|sequential|random`."""
    leaf, _ = bare(annotation)
    return f"{flag_of(name)}, {negated_flag(name)}" if leaf is bool else f"{flag_of(name)} {placeholder(annotation)}"


def negated_flag(name: str) -> str:
    """`--model.no-bias`, which means False for model.bias."""
    stem, dot, last = name.rpartition(".")
    return flag_of(f"{stem}{dot}no_{last}")


def placeholder(annotation: Any) -> str:
    """The placeholder of a value of this type: N (whole), X (real), TEXT, or the choices."""
    leaf, _ = bare(annotation)
    if get_origin(leaf) is Literal:
        return "|".join(get_args(leaf))
    if get_origin(leaf) is tuple:
        return f"{placeholder(get_args(leaf)[0])} ..."
    return {int: "N", float: "X", bool: "true|false"}.get(leaf, "TEXT")


def default_text(value: object) -> str:
    """A default as it would be typed; empty for none (the text then says what happens)."""
    if value is None or value is MISSING or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(repr(item) if set(str(item)) & set(" \n\t") else str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def entry(left: str, text: str, default: str = "") -> list[str]:
    """An argument with its default on one line where that fits, and its text below."""
    shown = f" [{default}]" if default else ""
    head = [f"  {left}{shown}"]
    if len(head[0]) > WIDTH:
        head = [f"  {left}", *wrapped(f"[{default}]", INDENT)] if default else [f"  {left}"]
        head = [line for part in head for line in (wrapped(part.strip(), 2) if len(part) > WIDTH else [part])]
    return [*head, *wrapped(text, INDENT)]


def wrapped(text: str, indent: int = 0) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )


def fitted(text: str, width: int = WIDTH) -> str:
    """Break lines longer than `width`: each goes on below where its last column begins."""
    lines = []
    for line in text.split("\n"):
        margin = " " * (line.rfind("  ") + 2 if "  " in line else 0)
        broken = textwrap.wrap(
            line, width, subsequent_indent=margin, break_on_hyphens=False, break_long_words=False
        )  # fmt: skip
        lines += broken if len(line) > width else [line]
    return "\n".join(lines)


def field_docs(cls: type) -> dict[str, str]:
    """{dotted name: docstring of the field}, with the names of `leaf_fields`."""
    docs: dict[str, str] = {}
    own = _own_docs(cls)
    for name, annotation in get_type_hints(cls, include_extras=True).items():
        if is_dataclass(annotation) and isinstance(annotation, type):
            docs |= {f"{name}.{inner}": text for inner, text in field_docs(annotation).items()}
        elif name in own:
            docs[name] = own[name]
    return docs


@cache
def _own_docs(cls: type) -> Mapping[str, str]:
    """Python does not keep docstrings of fields, so they are read from the source; none where there is no source."""
    docs: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        with suppress(OSError, TypeError):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for statement, below in pairwise(definition.body):  # type: ignore[attr-defined]
                match statement, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        docs[name] = text
    return docs


def _positional(name: str, annotation: Any) -> str:
    leaf, _ = bare(annotation)
    return name.upper().replace("_", "-") + " ..." * (get_origin(leaf) is tuple)
