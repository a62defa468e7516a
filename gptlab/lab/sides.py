"""The sides of a comparison: runs found, grouped by what differs, and whether they can be compared at all."""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from gptlab.config.errors import UserError
from gptlab.config.load import flatten
from gptlab.lab.run_record import NOT_COMPARED, RunRecord, fields_compared, read_run
from gptlab.runtime.records.run_directory import is_run, list_in

Sides = Mapping[str, Sequence[RunRecord]]
"""{name: its runs}. The first is the baseline."""

_TEXT = ("data.source", "data.hub_files", "data.split", "data.val_fraction", "data.text_column")
"""Fields that decide which text validates where neither run has a `data.val_source`."""
_OWN_TEXT = ("data.val_source", "data.text_column")

_FACTS = {
    "code_fingerprint": "the code",
    "implementations.kernels": "the library of C++ kernels",
    "implementations.products": "what multiplies matrices",
    "implementations.compile": "torch.compile",
    "implementations.attention": "what computes attention",
    "implementations.vectors": "the instruction set",
    "device": "the device",
    "device_name": "the device's name",
    "threads": "the number of threads",
    "dtype": "the dtype",
    "world_size": "the number of processes",
    "torch_version": "torch's version",
    "own_parts": "a Python caller's own parts",
    "data_fingerprint": "the data (its fingerprint covers training text, validation text and tokenizer)",
}
"""Facts of run.json by which runs may differ although their fields do not: {key: in words}."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    name: str
    values: Mapping[str, Sequence[Any]]
    """{side: its distinct values}."""


def find_runs(words: Iterable[str]) -> list[RunRecord]:
    """The runs that run folders, folders of runs, and patterns (`runs/base-*`) name, each once. UserError where one
    names none, or a run is damaged. Another model among the folders, as `gptlab export` writes it, is skipped."""
    found: dict[Path, RunRecord] = {}
    for word in words:
        if (Path(word) / "config.json").is_file():
            runs = [Path(word)]  # where it is none, `read_run` says what it is
        else:
            folders = [Path(word)] if Path(word).exists() else [Path(name) for name in sorted(glob.glob(word))]
            if len(folders) == 1 and not _is_run(folders[0]) and folders[0].is_dir():
                folders = sorted(folders[0].iterdir())
            runs = [folder for folder in folders if _is_run(folder)]
        if not runs:
            raise UserError(f"there is no run in {word}: name run folders, folders of runs, or a pattern of them")
        for folder in runs:
            if (key := folder.resolve()) not in found:
                found[key] = read_run(folder)
    return list(found.values())


def _is_run(folder: Path) -> bool:
    with suppress(PermissionError):  # such as lost+found
        return folder.is_dir() and is_run(os.listdir(folder))
    return False


def group_by_seed(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs that differ by seed alone, together, as A, B, ... in the order of their first runs. UserError for fewer than
    two groups."""
    groups = _grouped(runs, what_was_trained)
    if len(groups) < 2:
        raise UserError(
            "no two of these runs differ by more than their seed: name runs with another field too, or two sides with "
            "--a and --b"
        )
    return dict(zip(_names(), groups.values(), strict=False))


def _names() -> Iterator[str]:
    """A to Z, AA to ZZ, ..."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(ascii_uppercase, repeat=length))


def field_differences(sides: Sides) -> list[FieldDifference]:
    """The fields that differ between the sides, in the order of config.json; the folder and the seed never do."""
    names = dict.fromkeys(name for run in _all(sides) for name in run.fields if name not in NOT_COMPARED)
    found = []
    for name in names:
        values = {side: _distinct(run.fields.get(name) for run in runs) for side, runs in sides.items()}
        if not _alike(values.values()):
            found.append(FieldDifference(name, values))
    return found


def require_comparable(sides: Sides) -> None:
    """UserError unless every side has runs, no run is on two of them, and all have validated on the same text (or
    exploded before they could).

    Bits per byte are comparable between tokenizers. As run.json has one fingerprint for training text, validation text
    and tokenizer, two runs with different ones must have what explains the difference among their fields, and the same
    fields for the validation text.
    """
    if len(sides) < 2 or not all(sides.values()):
        raise UserError("a comparison needs two sides with at least one run each")
    side_of: dict[str, str] = {}
    for side, runs in sides.items():
        for run in runs:
            if side_of.setdefault(_identity(run), side) != side:
                raise UserError(f"{run.path} is on two sides, {side_of[_identity(run)]} and {side}")
    for run in _all(sides):
        if not run.has_result:
            raise UserError(f"{run.path} has no validation to compare (its status is {run.status})")
    for one, other, reason in other_texts(_all(sides)):
        raise UserError(f"{one.path} and {other.path} cannot be compared: {reason}")


def _identity(run: RunRecord) -> str:
    """The same for a copy of the run, until one of the two trains on."""
    if run_id := run.provenance.get("run_id"):
        return _text([run_id, what_was_trained(run), run.curve.at["steps"][-1:].tolist()])
    return str(run.path.resolve())


def other_texts(runs: Sequence[RunRecord]) -> Iterator[tuple[RunRecord, RunRecord, str]]:
    """Each two runs that may have validated on different text, and why. What explains that the data of a third differs
    from both of theirs does not explain a difference between these two."""
    for a, b in itertools.combinations(runs, 2):
        if reason := _other_text(a, b):
            yield a, b, reason


def _other_text(a: RunRecord, b: RunRecord) -> str | None:
    """Why two runs may have validated on different text; None where they have not."""
    tokens = [run.fields.get("eval.tokens") for run in (a, b)]
    if tokens[0] != tokens[1]:
        return f"they validated on different amounts of text: eval.tokens is {tokens[0]} and {tokens[1]}"
    data, tokenizers = ([run.provenance.get(f"{what}_fingerprint") for run in (a, b)] for what in ("data", "tokenizer"))
    if None not in data and data[0] == data[1]:
        return None
    for name in _OWN_TEXT if any(run.fields.get("data.val_source") for run in (a, b)) else _TEXT:
        values = [run.fields.get(name) for run in (a, b)]
        if values[0] != values[1]:
            fields = f"{name} is {_text(values[0])} and {_text(values[1])}"
            return f"their validation text may differ, since {fields}: name runs on the same data"
    if tokens[0] is not None and None in tokenizers:
        unknown = (a, b)[tokenizers.index(None)].path
        return f"run.json of {unknown} does not say with which tokenizer eval.tokens = {tokens[0]} were counted"
    same_tokenizer = None not in tokenizers and tokenizers[0] == tokenizers[1]
    if tokens[0] is not None and not same_tokenizer:
        other = f"their tokenizers differ, so that eval.tokens = {tokens[0]} is not the same text"
        return f"{other}: train them with --eval.tokens none"
    # A tokenizer's own fields explain that it is another one; text that has changed gives another one too.
    tokenizer = [] if same_tokenizer else [name for name in a.fields if name.startswith("tokenizer.")]
    explained = any(a.fields.get(name) != b.fields.get(name) for name in ("data.rows", *_TEXT, *tokenizer))
    if None not in data and not explained:
        return "no field explains why their data differs (data_fingerprint in run.json): train them on the same text"
    return None


def warnings_of(sides: Sides) -> list[str]:
    """What else than the fields may make the difference, one line each."""
    return [*_about_runs(sides), *_about_rows(sides), *_about_repetitions(sides), *_about_facts(sides)]


def _about_runs(sides: Sides) -> Iterator[str]:
    for run in _all(sides):
        if not run.provenance:
            yield f"{run.path} has no run.json that can be read: its code, machine, data and status are unknown"
        elif run.status != "finished":
            last = f"last validated at step {run.curve.at['steps'][-1]:,.0f}" if len(run.curve) else "has not validated"
            yield f"{run.path} has not finished (its status is {run.status}): it {last}"
        if _length_changed(list_in(run.provenance, "config_changes")):
            yield f"{run.path} has another length than it started with: it followed two schedules, one after the other"


def _about_rows(sides: Sides) -> Iterator[str]:
    """Tokens that others made have documents only for packed rows; data_fingerprint then differs, and nothing else."""
    same_text = (*_TEXT, "data.val_source")
    for a, b in itertools.combinations(_all(sides), 2):
        rows = [run.fields.get("data.rows") for run in (a, b)]
        data, tokenizers = ([run.provenance.get(f"{of}_fingerprint") for run in (a, b)] for of in ("data", "tokenizer"))
        if "packed" not in rows or rows[0] == rows[1] or data[0] == data[1] or tokenizers[0] != tokenizers[1]:
            continue
        if all(a.fields.get(name) == b.fields.get(name) for name in same_text):
            yield (
                f"data.rows is {rows[0]} and {rows[1]}: of these tokens, packed rows validate each document by itself, "
                "and the others validate across documents"
            )
            return


def _length_changed(changes: list[Any]) -> bool:
    """Others may be of the rows of a micro-batch, or of the limits of faults."""
    fields = [one.get("fields") for one in changes if isinstance(one, dict)]
    names = [name for found in fields if isinstance(found, dict) for name in found]
    return any(name.startswith(("horizon.", "schedule.")) for name in names)


def _about_repetitions(sides: Sides) -> Iterator[str]:
    """Runs of one side and size that differ by more than the seed, or not even by that."""
    for side, runs in sides.items():
        for same_size in _grouped(runs, size_of).values():
            trained = [*map(what_was_trained, same_size)]
            names = dict.fromkeys(name for one in trained for name in one if name not in _FACTS)
            mixed = [name for name in names if len(_distinct(one.get(name) for one in trained)) > 1]
            if mixed:
                yield f"the runs of {side} differ by more than their seed: in {', '.join(mixed)}"
            for same in _grouped(same_size, lambda run: run.seed).values():
                if len(same) > 1:
                    yield f"{side}: {_count(same)} have seed {same[0].seed}; their mean counts as one value"


def size_of(run: RunRecord) -> tuple[Any, Any]:
    """(layers, width), by which the sizes of a ladder differ."""
    return run.fields.get("model.n_layer"), run.fields.get("model.n_embd")


def _about_facts(sides: Sides) -> Iterator[str]:
    for key, words in _FACTS.items():
        values = {side: _distinct(_recorded(run, key) for run in runs) for side, runs in sides.items()}
        mixed = [side for side, own in values.items() if len(own) > 1]
        if mixed or not _alike(values.values()):
            where = f"within {', '.join(mixed)}" if mixed else "between the sides"
            listed = "; ".join(f"{side} {', '.join(map(_short, own))}" for side, own in values.items())
            yield f"{words} differs {where}: {listed}"


def what_was_trained(run: RunRecord) -> dict[str, Any]:
    """The fields that runs are compared by, what a Python caller replaced, and the fingerprint of the data."""
    data = run.provenance.get("data_fingerprint")
    return fields_compared(run.fields, data) | {"own_parts": _recorded(run, "own_parts"), "data_fingerprint": data}


def _recorded(run: RunRecord, key: str) -> Any:
    """A fact of run.json, with those of the processes that resumed the run where they differ; None if unknown."""
    if key == "own_parts":
        parts = run.provenance.get(key)
        named = [(n, part) for n, part in parts.items() if isinstance(part, dict)] if isinstance(parts, dict) else ()
        return ", ".join(f"{n}={part.get('name')} {part.get('sha256') or ''}".rstrip() for n, part in named) or "none"
    starts = [run.provenance, *(one for one in list_in(run.provenance, "resumes") if isinstance(one, dict))]
    values = _distinct(facts[key] for facts in map(flatten, starts) if key in facts)
    return values if len(values) > 1 else next(iter(values), None)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else _text(value)
    return "unknown" if value is None else re.sub(r"\b([0-9a-f]{12})[0-9a-f]+\b", r"\1", text)


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Each once, by equality: lists have no hash."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _alike(sides: Iterable[Sequence[Any]]) -> bool:
    """Whether all have the same values, in any order."""
    first, *others = sides
    return all(len(own) == len(first) and all(value in first for value in own) for own in others)


def _grouped(runs: Iterable[RunRecord], key: Callable[[RunRecord], Any]) -> dict[str, list[RunRecord]]:
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(_text(key(run)), []).append(run)
    return groups


def _all(sides: Sides) -> list[RunRecord]:
    return [run for runs in sides.values() for run in runs]


def _count(runs: Sequence[RunRecord]) -> str:
    return f"{len(runs)} run{'s' * (len(runs) != 1)}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
