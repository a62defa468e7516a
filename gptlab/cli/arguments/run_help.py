"""--help of `train`, `plan` and `bench`, which take a run: one page of what people change; the rest by section or with
--help-all."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_origin

from gptlab.app.run.run_request import (
    ALIASES,
    DEFAULT_RECIPE,
    GIVEN_NAMES,
    RunArguments,
    argument_types,
)
from gptlab.cli.arguments.help import HELP_FLAGS, default_text, entry, field_docs, option, wrapped
from gptlab.config.errors import UserError, nearest_name
from gptlab.config.fields import bare, flag_of
from gptlab.config.foreign_names import answer
from gptlab.config.load import flatten
from gptlab.config.recipes import OWN_TYPES, RECIPES, configure, own_arguments
from gptlab.config.recipes.nanochat import NanochatArguments
from gptlab.config.scaling import FASTEST, SLOWEST

SIZED = "sized"
"""Shown for a default that follows from the machine's speed."""

_UNDER_HELP = ("list",)
"""Names of a command's own that another line of the page mentions."""

_COLUMN = 32
_LONGEST_DEFAULT = 24

_COMMON: Mapping[str, Mapping[str, str]] = {
    "What to train": {
        "recipe": "a name of `gptlab train --list`",
        "data": "files, folders, globs, corpora by name",
        "depth": "layers; width, heads, rates follow",
        "init_from": "weights to start from: gpt2, a run, a folder",
    },
    "How long: one of": {
        "minutes": "minutes on the training clock",
        "steps": "optimizer steps",
        "tokens": "tokens",
        "flops": "floating-point operations of training",
        "tokens_per_param": "tokens per matrix and head parameter",
        "until_val_loss": "stop at this loss, if sooner (nats/token)",
    },
    "Model and optimizer": {
        "model.seq_len": "context length in tokens",
        "model.window_pattern": "by layer: L full, S sliding window",
        "tokenizer.vocab_size": "entries of a BPE tokenizer",
        "batch.total_tokens": "tokens in one optimizer step",
        "batch.micro_sequences": "rows in one pass: fewer save memory",
        "optim.muon.lr": "learning rate of the matrices (Muon)",
        "optim.embedding.lr": "learning rate of the tables (AdamW)",
    },
    "Along the way, and where": {
        "eval.every_steps": "validate every N steps",
        "checkpoint.every_seconds": "save every X seconds",
        "sample.prompts": "texts to continue",
        "run_dir": "folder of the run",
        "seed": "random seed of the whole run",
        "device": "one of auto, cpu, cuda, cuda:N, mps",
        "dtype": "one of auto, float32, bfloat16, float16",
        "compile": "use torch.compile: auto, on, off",
    },
}
"""The page of --help: {heading: {name: text}}."""


def recipe_list() -> str:
    """One line a recipe: its name and the first line of its docstring."""
    width = max(map(len, RECIPES))
    return "\n".join(f"{name:<{width}}  {(call.__doc__ or '').partition(chr(10))[0]}" for name, call in RECIPES.items())


def show_help(
    argv: Sequence[str], arguments: type[RunArguments], refuses: Collection[str], *, prog: str, description: str
) -> None:
    """Print help with the defaults of the recipe that is named beside --help. Raises SystemExit(0)."""
    recipe = next((word for word in argv if word in RECIPES), DEFAULT_RECIPE)
    page = RunHelp(arguments, refuses, recipe, prog=prog, description=description)
    topic = _asked_topic(argv)
    print(page.about(topic) if topic is not None else page.everything() if "--help-all" in argv else page.short())
    raise SystemExit(0)


class RunHelp:
    """The help of a command that takes a run, with the defaults of one recipe."""

    def __init__(
        self, arguments: type[RunArguments], refuses: Collection[str], recipe: str, *, prog: str, description: str
    ) -> None:
        kinds = {name: kind for name, kind in argument_types(arguments).items() if name not in refuses}
        common, of_recipe = argument_types(RunArguments), own_arguments(recipe)
        docs = {GIVEN_NAMES.get(name, name): text for name, text in field_docs(arguments).items()}
        self.head = [
            f"usage: {prog} [RECIPE | FILE.toml] [--NAME VALUE ...]",
            "",
            *wrapped(f"{description} Defaults in [ ]: {recipe}; `sized`: by machine."),
            "",
        ]
        self.recipe = recipe
        self.kinds: Mapping[str, Any] = kinds | {name: OWN_TYPES[name] for name in of_recipe}
        self.docs = docs | field_docs(NanochatArguments)
        self.defaults = _defaults(recipe) | {name: default_text(value) for name, value in of_recipe.items()}
        """{name: default as text}; empty or missing for none."""
        self.of_command = [name for name in kinds if name not in common and name not in _UNDER_HELP]
        self.of_recipe = list(of_recipe)

    @property
    def sections(self) -> dict[str, list[str]]:
        """{section: its names}, in the order of the configuration."""
        found: dict[str, list[str]] = {"run": [], "recipe": list(self.of_recipe)}
        for name in self.kinds:
            if name != "recipe" and name not in self.of_recipe:
                found.setdefault(name.partition(".")[0] if "." in name else "run", []).append(name)
        return {section: names for section, names in found.items() if names}

    def short(self) -> str:
        """One page."""
        own, of_command = ({n: self.docs.get(n, "") for n in names} for names in (self.of_recipe, self.of_command))
        groups = ({f"Only {self.recipe}": own} if own else {}) | {name: dict(texts) for name, texts in _COMMON.items()}
        groups["What to train"] |= of_command
        lines = list(self.head)
        for heading, texts in groups.items():
            taken = {name: text for name, text in texts.items() if name in self.kinds}
            lines += [heading, *(line for name, text in taken.items() for line in self._row(name, text)), ""]
        more = "--help-all has every argument; --help NAME those of a part, or with a name such as lr:"
        return "\n".join([*lines, *wrapped(f"{more} {', '.join(self.sections)}.")])

    def about(self, topic: str) -> str:
        """The fields of a section, of a part of it (optim.muon), or of a name in any section (lr)."""
        wanted = topic.lstrip("-").replace("-", "_")
        names = self.sections.get(wanted) or [
            name for name in self.kinds if name == wanted or name.startswith(f"{wanted}.")
        ] or [name for name in self.kinds if name.rpartition(".")[2] == wanted]  # fmt: skip
        if not names:
            raise _unknown_topic(topic, wanted, [*self.sections, *self.kinds])
        return "\n".join([*wrapped(f"Defaults in [ ]: {self.recipe}."), *self._entries(names)])

    def everything(self) -> str:
        lines = [*self.head, *entry("RECIPE", self.docs["recipe"], self.recipe)]
        for section, names in self.sections.items():
            lines += ["", section, *self._entries(names)]
        return "\n".join(lines)

    def _row(self, name: str, text: str) -> list[str]:
        """One line, unless the name or the text is too long. There is no room for `--no-...`, nor for choices, which
        the text names."""
        kind, default = bare(self.kinds[name])[0], self.defaults.get(name, "")
        flag = option(name, str if get_origin(kind) is Literal else self.kinds[name]).partition(",")[0]
        text = text.partition(". ")[0].rstrip(".")
        text = text[:1].upper() + text[1:] + (f" [{default}]" if 0 < len(default) <= _LONGEST_DEFAULT else "")
        left, body = "RECIPE" if name == "recipe" else flag, wrapped(text, _COLUMN)
        if len(left) + 3 > _COLUMN:
            return [f"  {left}", *body]
        return [f"  {left:<{_COLUMN - 2}}{body[0].strip()}", *body[1:]]

    def _entries(self, names: Sequence[str]) -> Iterator[str]:
        for name in names:
            yield from entry(option(name, self.kinds[name]), self.docs.get(name, ""), self.defaults.get(name, ""))


def _asked_topic(argv: Sequence[str]) -> str | None:
    """The word after --help that names a section or an argument; None if there is none."""
    for word, following in zip(argv, [*argv[1:], "-"], strict=True):
        flag, _, inline = word.partition("=")
        if flag in HELP_FLAGS:
            asked = inline or following
            return None if asked.startswith("-") or asked in RECIPES or asked.endswith(".toml") else asked
    return None


def _defaults(recipe: str) -> dict[str, str]:
    """{name: default as text}, short forms included."""
    slow, fast = (configure(recipe, machine=machine) for machine in (SLOWEST, FASTEST))
    leaves, others = (flatten(dataclasses.asdict(config)) for config in (slow, fast))
    texts = {name: default_text(value) if value == others[name] else SIZED for name, value in leaves.items()}
    horizon = slow.horizon
    short = {alias: texts[name] for alias, name in ALIASES.items()}
    if horizon.unit == "seconds":
        short["minutes"] = default_text(horizon.amount / 60)
    else:
        short[horizon.unit] = default_text(horizon.amount)
    return texts | short | {"recipe": slow.recipe, "depth": texts["model.n_layer"], "run_dir": "runs/RECIPE-DATE-TIME"}


def _unknown_topic(topic: str, wanted: str, known: Sequence[str]) -> UserError:
    if (elsewhere := answer(wanted)) is not None:
        return UserError(f"there is no {flag_of(wanted)} here: {elsewhere}")
    nearest = nearest_name(wanted, known)
    hint = f"did you mean {nearest.replace('_', '-')}?" if nearest else "--help-all has every argument"
    return UserError(f"--help {topic}: there is no such section or name; {hint}")
