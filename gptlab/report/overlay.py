"""Several runs on one page: which belong together, and in what they differ."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from gptlab.lab.run_record import NOT_COMPARED
from gptlab.lab.sides import other_texts, what_was_trained
from gptlab.report.run_facts import RunFacts, Sample, plain

MAX_LABEL_CHARACTERS = 80
MAX_SAMPLES = 12


@dataclass(frozen=True)
class Overlay:
    runs: Sequence[RunFacts]
    """Two or more."""

    GROUP_COLUMNS: ClassVar = ("configuration", "runs", "mean bpb", "lowest", "highest")
    RUN_COLUMNS: ClassVar = ("run", "status", "configuration", "seed", "bpb", "steps", "tokens", "training")

    @property
    def title(self) -> str:
        return f"{len(self.runs)} runs"

    def sentence(self) -> str:
        """How many runs and configurations there are, and which has the lowest bits per byte, or why none has."""
        count = len(self.groups)
        recipes = ", ".join(dict.fromkeys(plain(run.record.fields.get("recipe")) for run in self.runs))
        kinds = "that differ by seed alone" if count == 1 else f"in {count} configurations"
        text = f"{len(self.runs)} runs of {recipes} {kinds}"
        known = [(_bpb(run), name, run.record) for name, _, run in self.labeled() if math.isfinite(_bpb(run))]
        if not known:
            return f"{text}."
        for *_, reason in other_texts([record for *_, record in known]):
            return f"{text}, whose bits per byte cannot be compared: {plain(reason)}."
        bpb, name = min((bpb, name) for bpb, name, _ in known)
        return f"{text}; the lowest bits per byte are {bpb:.4f}, of {name}."

    @cached_property
    def groups(self) -> dict[str, list[RunFacts]]:
        """{name of a configuration: its runs, which differ by seed alone, not by data or own parts either}, in the
        order of their first runs."""
        found: dict[str, list[RunFacts]] = {}
        for run in self.runs:
            found.setdefault(json.dumps(what_was_trained(run.record), sort_keys=True), []).append(run)
        names = Counter[str]()
        named = {}
        for runs in found.values():
            name = self._description(runs[0])
            names[name] += 1
            named[name if names[name] == 1 else f"{name} ({names[name]})"] = runs
        return named

    @cached_property
    def differing(self) -> list[str]:
        """The fields in which the runs differ, but for the seed, in the order of config.json."""
        every = dict.fromkeys(name for run in self.runs for name in run.record.fields if name not in NOT_COMPARED)
        return [name for name in every if len({json.dumps(run.record.fields.get(name)) for run in self.runs}) > 1]

    def labeled(self) -> Iterator[tuple[str, str, RunFacts]]:
        """(name, configuration, run) in the given order; equal names are numbered."""
        of_run = {id(run): name for name, runs in self.groups.items() for run in runs}
        names = Counter[str]()
        for run in self.runs:
            names[run.name] += 1
            yield (run.name if names[run.name] == 1 else f"{run.name} ({names[run.name]})"), of_run[id(run)], run

    def group_rows(self) -> list[tuple[str, ...]]:
        """A row a configuration, by mean bits per byte of its finished runs; none where no configuration has several
        runs. One with a broken run has no mean: that of the others would be that of the lucky seeds."""
        if all(len(runs) == 1 for runs in self.groups.values()):
            return []
        rows = []
        for name, runs in self.groups.items():
            values = [_bpb(run) for run in runs if run.status == "finished" and math.isfinite(_bpb(run))]
            count = str(len(runs)) if len(values) == len(runs) else f"{len(values)} of {len(runs)}"
            if broken := sum(map(_is_broken, runs)):
                values, count = [], f"{broken} of {len(runs)} broke"
            figures = (math.fsum(values) / len(values), min(values), max(values)) if values else ()
            shown = [f"{value:.4f}" for value in figures] or [""] * 3
            rows.append((figures[0] if figures else math.inf, (name, count, *shown)))
        return [row for _, row in sorted(rows)]

    def run_rows(self) -> list[tuple[str, ...]]:
        """A row a run, by bits per byte; those without a validation, and broken ones, last."""
        rows = []
        for number, (name, group, run) in enumerate(self.labeled()):
            figures = dict(run.figures())
            last = [figures.get(label, "") for label in ("bits per byte", "steps", "tokens", "training")]
            seed = str(run.record.seed)
            rows.append((_bpb(run), number, (name, run.status, group, seed, *last)))
        return [row for *_, row in sorted(rows)]

    def samples_of_one_prompt(self) -> list[tuple[str, str, Sample]]:
        """(run, prompt, last sample) for the first prompt that all runs continued; empty where there is none."""
        samples = [run.samples() for run in self.runs[:MAX_SAMPLES]]
        shared = [prompt for prompt in samples[0] if all(prompt in others for others in samples)]
        if not shared:
            return []
        named = [name for name, _, _ in self.labeled()]
        return [(name, shared[0], own[shared[0]][-1]) for name, own in zip(named, samples, strict=False)]

    def _description(self, run: RunFacts) -> str:
        fields = run.record.fields
        words = [f"{_shortest(name, self.differing)}={plain(fields.get(name))}" for name in self.differing]
        text = ", ".join(words) or plain(fields.get("recipe"))
        return text if len(text) <= MAX_LABEL_CHARACTERS else f"{text[: MAX_LABEL_CHARACTERS - 3]}..."


def _shortest(name: str, names: Sequence[str]) -> str:
    """The last parts of a field's name, as many as tell it from the other names."""
    parts = name.split(".")
    ends = [".".join(parts[place:]) for place in range(len(parts) - 1, 0, -1)]
    return next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in names) == 1), name)


def _is_broken(run: RunFacts) -> bool:
    """Whether its loss exploded, or its last validation is not finite."""
    bpb = run.reached.bpb
    return run.record.exploded or (bpb is not None and not math.isfinite(bpb))


def _bpb(run: RunFacts) -> float:
    """Infinity where it is unknown, and where the run is broken."""
    bpb = run.reached.bpb
    return math.inf if bpb is None or _is_broken(run) else bpb
