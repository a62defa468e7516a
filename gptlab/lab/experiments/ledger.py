"""ledger.jsonl: everything that a lab did, in order, one JSON object a line. It is the lab's only state.

    proposed   experiment, fields, files (changed ones), why, expect, by
    timed      experiment, speed (its steps per second over the baseline's) with its interval low and high where it was
               timed, step_seconds, steps (what it trains); of a baseline start_seconds, until its first step
    measured   experiment, seed, slice (validation | promotion), bpb, and what the run cost (its last process, where it
               was resumed)
    verdict    experiment, verdict, reason, and the difference with its evidence
    promotion  experiment, depth (null: the lab's own), confirmed, and the difference with its evidence

Experiment 0 is the baseline as the lab began. A line is written whole and made durable before anything follows from it,
so a lab that was killed at any moment knows what it has done: what is not in the ledger is done again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from filelock import FileLock

from gptlab.config.errors import UserError, cannot
from gptlab.runtime.files.plain_file import open_plain, to_json
from gptlab.runtime.records.metrics import AppendFile

Verdict = Literal["keep", "discard", "inconclusive", "no-op", "invalid", "crashed", "timed-out"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

Slice = Literal["validation", "promotion"]
SLICES: tuple[Slice, ...] = get_args(Slice)
"""Which part of the validation text: promotion is only read to confirm what is about to be kept."""

NOTHING = "nothing"
"""The name, in `why`, of the edit that changes bits and nothing else: experiment 1, which measures the noise."""


SECOND_SIZE = "gptlab lab promote"
"""Who proposes, in `by`, an experiment that is another one at a second depth. It has no verdict of its own."""


@dataclass(slots=True)
class Experiment:
    """What the ledger says of one experiment."""

    number: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    """{dotted name: value} of the proposal, on top of the baseline's."""
    files: tuple[str, ...] = ()
    """Changed files of the package. Empty: the baseline's code."""
    why: str = ""
    expect: float | None = None
    """The difference that was predicted, in bits per byte: negative is better."""
    by: str = ""
    against: int = 0
    """The experiment that was the baseline when this one was proposed."""
    time: str = ""
    steps: int | None = None
    """Optimizer steps at equal time. None: not timed yet."""
    speed: float = 1.0
    """Steps per second, over the baseline's."""
    speed_interval: tuple[float, float] | None = None
    """That of `speed`. None: nothing was timed, the work of a step is the baseline's."""
    step_seconds: float | None = None
    """Of one step, when steps were timed."""
    start_seconds: float | None = None
    """From the start of the process that made these steps until it could begin. None: not a baseline."""
    bpb: dict[tuple[Slice, int], float] = field(default_factory=dict)
    """{(slice, seed): bits per byte}."""
    costs: list[Mapping[str, Any]] = field(default_factory=list)
    """Of each run, the fields of its `measured` line."""
    verdict: Mapping[str, Any] | None = None
    """The fields of its `verdict` line. None: in flight, or the baseline."""
    promotions: list[Mapping[str, Any]] = field(default_factory=list)
    """The answers of its `promotion` lines."""

    @property
    def is_kept(self) -> bool:
        return self.verdict is not None and self.verdict["verdict"] == "keep"

    @property
    def says(self) -> str:
        return "" if self.verdict is None else str(self.verdict["verdict"])


class Ledger:
    """The ledger of a lab, read whole, and appended to by any number of processes under a lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(f"{path}.lock", is_singleton=True)

    def append(self, kind: str, **values: object) -> None:
        """Write one line, durable when this returns. UserError if the disk refuses."""
        line = to_json({"kind": kind, "time": datetime.now(UTC).isoformat(timespec="seconds"), **values})
        with self._lock:
            file = AppendFile(self.path)
            try:
                file.append(line)
                file.sync()
            finally:
                file.close()

    def locked(self) -> AbstractContextManager[object]:
        """Within the context, no other process appends."""
        return self._lock

    def experiments(self) -> dict[int, Experiment]:
        """{number: experiment}, in the order of their numbers. UserError for a damaged line."""
        return fold(self._lines())

    def _lines(self) -> dict[int, Mapping[str, Any]]:
        """By their numbers in the file, from 1; without blank lines and an incomplete last line, which a killed process
        left and the next `append` removes."""
        if not self.path.exists():
            return {}
        with cannot(f"read {self.path}"), open_plain(self.path) as file:
            *lines, _ = file.read().split(b"\n")
        found = {}
        for place, line in enumerate(lines, 1):
            try:
                if line.strip():
                    found[place] = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"{self.path} is damaged: line {place} is not a JSON object") from None
        return found


def fold(lines: Mapping[int, Mapping[str, Any]]) -> dict[int, Experiment]:
    """The experiments that the lines of a ledger, by their numbers, describe. UserError for one that no lab wrote."""
    found, proposed_in, place = dict[int, Experiment](), dict[int, int](), 0
    try:
        for place, line in lines.items():
            number, kind = int(line["experiment"]), line["kind"]
            if kind == "proposed":
                _require(0 <= line["against"] < max(number, 1), f"experiment {number} against {line['against']}")
                proposed_in[number] = place
                found[number] = Experiment(
                    number, line["fields"], tuple(line["files"]), line["why"], line["expect"], line["by"],
                    line["against"], line["time"],
                )  # fmt: skip
            elif kind == "timed":
                found[number].steps, found[number].speed = int(line["steps"]), float(line["speed"])
                found[number].step_seconds = float(line["step_seconds"])
                if "start_seconds" in line:
                    found[number].start_seconds = float(line["start_seconds"])
                if "low" in line:
                    found[number].speed_interval = float(line["low"]), float(line["high"])
            elif kind == "measured":
                found[number].bpb[line["slice"], int(line["seed"])] = float(line["bpb"])
                found[number].costs.append(line)
            elif kind == "verdict":
                found[number].verdict = line
                _require(line["verdict"] in VERDICTS, f"verdict {line['verdict']!r}")
                for name in ("difference", "half_width"):
                    float(line.get(name) or 0.0)  # infinity is a text
            elif kind == "promotion":
                found[number].promotions.append({key: line[key] for key in line if key not in ("kind", "time")})
        for one in found.values():
            place = proposed_in[one.number]
            _require(one.against in found, f"experiment {one.number} against {one.against}, which there is not")
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"the ledger is damaged in line {place}: {type(error).__name__}: {error}") from None
    return dict(sorted(found.items()))


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def baseline_of(experiments: Mapping[int, Experiment]) -> Experiment:
    """The last one that was kept, or experiment 0."""
    kept = [one for one in experiments.values() if one.is_kept]
    return kept[-1] if kept else experiments[0]


def all_fields(experiment: Experiment, experiments: Mapping[int, Experiment]) -> dict[str, Any]:
    """The experiment's fields on top of those of every baseline before it. A depth replaces the layers of those."""
    if experiment.number == 0:
        return dict(experiment.fields)
    before = all_fields(experiments[experiment.against], experiments)
    if "depth" in experiment.fields:
        before.pop("model.n_layer", None)
    return before | dict(experiment.fields)
