"""--help of the commands that take a run: what people change on one page, everything else by section or --help-all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_origin

from gptlab.cli.arguments.help import default_text, entry, option, wrapped
from gptlab.config.errors import UserError, nearest_name
from gptlab.config.foreign_names import answer
from gptlab.config.load import bare, flatten
from gptlab.config.recipes import Recipe
from gptlab.config.recipes.own_arguments import own_arguments
from gptlab.config.scaling import Machine

HELP_FLAGS = ("-h", "--help", "--help-all")

SIZED = "sized"
"""Stands for a default that follows from the machine's speed."""

_UNDER_HELP = ("list",)
"""Of a command's own names, those that another line of the page mentions."""

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
        "until_val_loss": "and end at this loss, if sooner (nats/token)",
    },
    "Model and optimizer": {
        "model.seq_len": "context length in tokens",
        "model.window_pattern": "by layer: L full, S sliding window",
        "tokenizer.vocab_size": "entries of a BPE tokenizer",
        "batch.total_tokens": "tokens in one optimizer step",
        "batch.micro_sequences": "rows in one pass: lower it to save memory",
        "optim.muon.lr": "learning rate of the matrices (Muon)",
        "optim.embedding.lr": "learning rate of the tables (AdamW)",
    },
    "Along the way, and where": {
        "eval.every_steps": "validate every so many steps",
        "checkpoint.every_seconds": "save every so many seconds",
        "sample.prompts": "texts to continue",
        "run_dir": "folder of the run",
        "seed": "seeds weights, data, dropout and samples",
        "device": "one of auto, cpu, cuda, cuda:N, mps",
        "dtype": "one of auto, float32, bfloat16, float16",
        "compile": "use torch.compile: auto, on, off",
    },
}
"""What --help shows: {heading: {name: text}}; everything else is in the sections."""


@dataclass(frozen=True, slots=True)
class RunHelp:
    """All that the help of one command says: its arguments, and the defaults of one recipe."""

    prog: str
    description: str
    kinds: Mapping[str, Any]
    """{name: annotation} of everything that may be given."""
    docs: Mapping[str, str]
    """{name: text}"""
    defaults: Mapping[str, str]
    """{name: default as text}; nothing where there is none."""
    own: Sequence[str]
    """Names that only this command has."""
    recipe: str
    of_recipe: Sequence[str]
    """Names that only this recipe has."""

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
        lines = [f"usage: {self.prog} [RECIPE | FILE.toml] [--NAME VALUE ...]", "", *wrapped(self.description), ""]
        for heading, texts in self._groups():
            lines += [heading, *(line for name, text in texts.items() for line in self._row(name, text)), ""]
        return "\n".join([*lines, *self._more()])

    def about(self, topic: str) -> str:
        """The fields of a section, of a part of it (optim.muon), or of that name wherever it is (lr)."""
        wanted = topic.lstrip("-").replace("-", "_")
        names = self.sections.get(wanted) or [
            name for name in self.kinds if name == wanted or name.startswith(f"{wanted}.")
        ] or [name for name in self.kinds if name.rpartition(".")[2] == wanted]  # fmt: skip
        if not names:
            raise _unknown_topic(topic, wanted, [*self.sections, *self.kinds])
        return "\n".join([*wrapped(f"Defaults in [ ]: {self.recipe}."), *self._entries(names)])

    def everything(self) -> str:
        lines = [f"usage: {self.prog} [RECIPE | FILE.toml] [--NAME VALUE ...]", "", *wrapped(self.description), ""]
        lines += [*entry("RECIPE", self.docs["recipe"], self.recipe)]
        for section, names in self.sections.items():
            lines += ["", section, *self._entries(names)]
        return "\n".join(lines)

    def _groups(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        if self.of_recipe:
            yield f"Only {self.recipe}", {name: self.docs.get(name, "") for name in self.of_recipe}
        for heading, texts in _COMMON.items():
            of_command = {name: self.docs.get(name, "") for name in self.own if name not in _UNDER_HELP}
            yield heading, {**texts, **(of_command if heading == "What to train" else {})}

    def _row(self, name: str, text: str) -> list[str]:
        """On one line, unless the name or the text is too long for it."""
        default = self.defaults.get(name, "")
        text = text.partition(". ")[0].rstrip(".")
        text = text[:1].upper() + text[1:]
        left = "RECIPE" if name == "recipe" else _short_option(name, self.kinds[name])
        return _in_columns(left, f"{text} [{default}]" if 0 < len(default) <= _LONGEST_DEFAULT else text)

    def _entries(self, names: Sequence[str]) -> Iterator[str]:
        for name in names:
            yield from entry(option(name, self.kinds[name]), self.docs.get(name, ""), self.defaults.get(name, ""))

    def _more(self) -> list[str]:
        more = "--help-all has every argument; --help NAME those of a part, or with a name such as lr:"
        return wrapped(f"{more} {', '.join(self.sections)}.")


def help_of(
    *,
    prog: str,
    description: str,
    recipe: str,
    call: Recipe,
    kinds: Mapping[str, Any],
    docs: Mapping[str, str],
    aliases: Mapping[str, str],
    own: Sequence[str],
) -> RunHelp:
    """The help of a command with the defaults of `recipe`, whose function `call` is.

    `kinds` and `docs` are by the names that are given; `aliases` maps short forms to fields.
    """
    of_recipe = own_arguments(call)
    defaults = _defaults(call, aliases) | {name: default_text(one.default) for name, one in of_recipe.items()}
    return RunHelp(
        prog=prog,
        description=description,
        kinds=kinds,
        docs=docs,
        defaults=defaults,
        own=own,
        recipe=recipe,
        of_recipe=list(of_recipe),
    )


def asked_topic(argv: Sequence[str], recipes: Mapping[str, Recipe]) -> str | None:
    """The word behind --help that says of what; None where none does."""
    for word, following in zip(argv, [*argv[1:], "-"], strict=True):
        flag, _, inline = word.partition("=")
        if flag in HELP_FLAGS:
            asked = inline or following
            return None if asked.startswith("-") or asked in recipes or asked.endswith(".toml") else asked
    return None


def _defaults(call: Recipe, aliases: Mapping[str, str]) -> dict[str, str]:
    """{name: default as text}, of short forms too."""
    # Recipes are pure and cheap: what two machines a billion times apart get differently follows from the machine.
    slow, fast = (
        call(depth=None, horizon=None, machine=Machine(device="cpu", flops_per_second=flops)) for flops in (1e9, 1e18)
    )
    leaves, others = (flatten(dataclasses.asdict(config)) for config in (slow, fast))
    texts = {name: default_text(value) if value == others[name] else SIZED for name, value in leaves.items()}
    horizon = slow.horizon
    short = {alias: texts[name] for alias, name in aliases.items()}
    if horizon.unit == "seconds":
        short["minutes"] = default_text(horizon.amount / 60)
    else:
        short[horizon.unit] = default_text(horizon.amount)
    return texts | short | {"recipe": slow.recipe, "depth": texts["model.n_layer"], "run_dir": "runs/RECIPE-DATE-TIME"}


def _short_option(name: str, annotation: Any) -> str:
    """The page has no room for lists of choices, which the texts name, nor for `--no-...`."""
    leaf, _ = bare(annotation)
    if leaf is bool:
        return f"--{name.replace('_', '-')}"
    return option(name, str if get_origin(leaf) is Literal else annotation)


def _in_columns(left: str, text: str) -> list[str]:
    body = wrapped(text, _COLUMN)
    if len(left) + 3 > _COLUMN:
        return [f"  {left}", *body]
    return [f"  {left:<{_COLUMN - 2}}{body[0].strip()}", *body[1:]]


def _unknown_topic(topic: str, wanted: str, known: Sequence[str]) -> UserError:
    if (elsewhere := answer(wanted)) is not None:
        return UserError(f"there is no --{wanted.replace('_', '-')} here: {elsewhere}")
    nearest = nearest_name(wanted, known)
    hint = f"did you mean {nearest.replace('_', '-')}?" if nearest else "--help-all has every argument"
    return UserError(f"--help {topic}: there is no such section or name; {hint}")
