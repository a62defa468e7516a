"""The tasks of CORE (DCLM, arXiv:2406.11794), as texts, from the evaluation bundle that nanochat uses.

    core.yaml            for each task: label, file, kind, number of worked examples, delimiter
    eval_meta_data.csv   for each task: the accuracy of guessing, in percent
    eval_data/           the examples, one JSON object a line

Everything here follows nanochat exactly (order, choice of worked examples, prompts), so that results are comparable.
"""

from __future__ import annotations

import csv
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gptlab.config.errors import ConfigError, UserError
from gptlab.data.corpus.known_corpora import CORE
from gptlab.runtime.files.cache import is_inside
from gptlab.runtime.files.plain_file import read_plain

Kind = Literal["multiple_choice", "schema", "language_modeling"]
"""One context and several continuations | several contexts and one continuation | a continuation to generate."""

# nanochat's random seeds: for the order of examples, and (plus i) for the worked examples before example i.
ORDER_SEED = 1337
WORKED_EXAMPLES_SEED = 1234
MAX_YAML_DEPTH = 10
TASKS, DATA = "core.yaml", "eval_data"
TASKS_BYTES = 1 << 16
"""The real one has 4 kB; PyYAML reads this much in a second."""
LARGEST_TABLE_BYTES = 1 << 20
LARGEST_TASK_BYTES = 1 << 28
"""More than all tasks of the bundle take together."""


@dataclass(frozen=True, slots=True)
class Example:
    options: tuple[tuple[str, str], ...]
    """(context, continuation), one or several."""
    gold: int
    """The index of the correct one."""


@dataclass(frozen=True, slots=True)
class Task:
    label: str
    kind: Kind
    shots: int
    """Worked examples before each example."""
    delimiter: str
    """Between context and continuation."""
    random_accuracy: float
    """The accuracy of guessing, in [0, 1)."""
    examples: tuple[Example, ...]
    """In shuffled order. Worked examples are drawn from all of them."""
    n_scored: int
    """How many of them, from the first on, are questions."""

    def worked_examples(self, index: int) -> list[Example]:
        """Those before example `index`, never itself; always the same ones."""
        others = random.Random(WORKED_EXAMPLES_SEED + index).sample(range(len(self.examples) - 1), self.shots)
        return [self.examples[other + (other >= index)] for other in others]

    def prompts(self, index: int) -> list[str]:
        """One text for each option. Language modeling: the text up to the continuation, and the text with it."""
        worked = [example.options[example.gold] for example in self.worked_examples(index)]
        front = "".join(f"{context}{self.delimiter}{continuation}\n\n" for context, continuation in worked)
        options = self.examples[index].options
        texts = [f"{front}{context}{self.delimiter}{continuation}" for context, continuation in options]
        if self.kind == "language_modeling":
            # Without the final space, which belongs to the first token of the continuation.
            texts.insert(0, f"{front}{options[0][0]}{self.delimiter}".strip())
        return texts


def core_folder(root: Path) -> Path:
    return root / CORE


def find_bundle(core_dir: str | None, cache: Path) -> Path | None:
    """The bundle's folder: `core_dir`, or CACHE/core if that is None. None if CACHE/core does not exist; ConfigError if
    `core_dir` is not a bundle."""
    folder = core_folder(cache) if core_dir is None else Path(os.path.expanduser(core_dir))
    if (folder / TASKS).is_file():
        return folder
    if core_dir is None:
        return None
    raise ConfigError(
        "eval.core_dir",
        core_dir,
        "there is no core.yaml in it; `gptlab data prepare core` puts the bundle into the cache",
    )


def read_tasks(folder: Path, max_examples: int | None = None) -> list[Task]:
    """Every task of a bundle with its first `max_examples` examples (None: all) as questions.

    UserError, one line that names file and line, if something is missing or damaged.
    """
    baselines = _read_baselines(folder / "eval_meta_data.csv")
    return [_read_task(folder, settings, baselines, max_examples) for settings in read_settings(folder / TASKS)]


def read_settings(path: Path) -> list[Mapping[str, Any]]:
    """Each task's entry in core.yaml; UserError where that is damaged."""
    import yaml  # 15 ms, and few runs measure CORE

    try:
        text = _read(path, TASKS_BYTES)
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            # Sixty lines of aliases, each twice the one before, would make a value of 2^60 parts.
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it has aliases")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_YAML_DEPTH:
                raise ValueError("nested too deep")
        settings = yaml.safe_load(text)["icl_tasks"]
        if not settings or len({one["label"] for one in settings}) < len(settings):
            raise ValueError("it needs tasks, each with a label of its own")
        return list(settings)
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from None


def _read_baselines(path: Path) -> dict[str, float]:
    """{label: accuracy of guessing, in [0, 1)}."""
    try:
        table = csv.DictReader(_read(path, LARGEST_TABLE_BYTES).decode().splitlines())
        return {row["Eval Task"]: 0.01 * float(row["Random baseline"]) for row in table}
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise _damaged(path, error) from None


def _read_task(
    folder: Path, settings: Mapping[str, Any], baselines: Mapping[str, float], max_examples: int | None
) -> Task:
    try:
        label, kind = str(settings["label"]), settings["icl_task_type"]
        path, shots = folder / DATA / settings["dataset_uri"], int(settings["num_fewshot"][0])
        delimiter = str(settings.get("continuation_delimiter", " "))
        if not is_inside(settings["dataset_uri"]):
            raise ValueError(f"{label}: dataset_uri = {settings['dataset_uri']!r} leads out of {DATA}")
        if shots < 0:
            raise ValueError(f"{label}: num_fewshot is {shots}")
        if kind not in get_args(Kind):
            raise ValueError(f"{label}: icl_task_type is {kind!r}, not one of {', '.join(get_args(Kind))}")
        if not 0.0 <= baselines.get(label, -1.0) < 1.0:
            raise ValueError(f"{label}: eval_meta_data.csv has no random baseline below 100 for it")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise _damaged(folder / TASKS, error) from None
    lines = [
        (number, line)
        for number, line in enumerate(_read(path, LARGEST_TASK_BYTES).split(b"\n"), start=1)
        if line.strip()
    ]
    random.Random(ORDER_SEED).shuffle(lines)
    n_scored = min(len(lines), max_examples or len(lines))
    # As in nanochat, worked examples come from among the questions, unless these are too few.
    pool = lines[: max(n_scored, shots + 1)]
    if n_scored == 0 or len(pool) <= shots:
        raise UserError(f"{path} has {len(lines)} examples: too few for {label}, which shows {shots} worked ones")
    return Task(
        label, kind, shots, delimiter, baselines[label],
        tuple(_read_example(kind, path, number, line) for number, line in pool), n_scored,
    )  # fmt: skip


def _read_example(kind: Kind, path: Path, number: int, line: bytes) -> Example:
    try:
        record = json.loads(line)
        if kind == "multiple_choice":
            options = tuple((record["query"], choice) for choice in record["choices"])
        elif kind == "schema":
            options = tuple((context, record["continuation"]) for context in record["context_options"])
        else:
            options = ((record["context"].strip(), record["continuation"]),)
        gold = 0 if kind == "language_modeling" else record["gold"]
        if not all(isinstance(text, str) for option in options for text in option):
            raise ValueError("contexts and continuations are texts")
        if not all(continuation.strip() for _, continuation in options):
            raise ValueError("a continuation is empty")
        if type(gold) is not int or not 0 <= gold < len(options):
            raise ValueError(f"gold = {gold!r} is none of its {len(options)} options")
        return Example(options, gold)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(f"{path}, line {number}", error) from None


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        return read_plain(path, max_bytes)
    except OSError as error:
        raise UserError(
            f"cannot read {path}, which the CORE bundle needs ({error.strerror or error}); `gptlab data prepare core` "
            "brings the whole bundle"
        ) from error


def _damaged(place: object, error: Exception) -> UserError:
    what = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return UserError(f"{place} is damaged: {' '.join(what.split())}")
