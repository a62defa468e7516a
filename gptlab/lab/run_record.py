"""What a run folder says of a run: its fields, how it ended, and its validation curve."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from gptlab.config.errors import UserError
from gptlab.config.load import flatten
from gptlab.runtime.files.plain_file import read_json_object
from gptlab.runtime.records.metrics import blocks_of_lines, last_line_of_kind, lines_of_kind
from gptlab.runtime.records.run_directory import RunDirectory

Axis = Literal["steps", "tokens", "seconds", "flops"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""What runs can be compared at: optimizer steps, tokens, seconds of the training clock, FLOPs of the training."""
At = Literal[Axis, "end"]
"""Where runs are compared: at an equal amount, or at their ends."""

NOT_COMPARED = frozenset({"schema_version", "run_dir", "seed", "log.to", "log.report", "runtime.threads"})
"""Fields in which repetitions of one experiment differ; threads, because a run takes fewer on a busy machine."""


def fields_compared(fields: Mapping[str, Any], data_fingerprint: object) -> dict[str, Any]:
    """The fields by which experiments differ. Where the fingerprint of the data is known, it stands for the names of
    the sources, since a folder has several."""
    left_out = NOT_COMPARED if data_fingerprint is None else NOT_COMPARED | {"data.source", "data.val_source"}
    return {name: value for name, value in fields.items() if name not in left_out}


@dataclass(frozen=True, slots=True)
class Curve:
    """The validations of a run, in the order of its steps. Every array has the shape (validations,)."""

    at: Mapping[Axis, NDArray[np.float64]]
    """Where each was made. NaN where it is unknown (FLOPs of a run that logged no training step)."""
    bpb: NDArray[np.float64]
    """Validation bits per byte; NaN or infinity where the weights were broken."""

    def __len__(self) -> int:
        return len(self.bpb)

    def value(self, axis: Axis, amount: float) -> float | None:
        """Bits per byte at `amount`, interpolated linearly between the two validations around it. None outside of what
        was validated: a curve is never extrapolated."""
        at = self.at[axis]
        if not len(self) or not at[0] <= amount <= at[-1]:
            return None
        return float(np.interp(amount, at, self.bpb))


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder records it. What is large is read when it is asked for."""

    directory: RunDirectory
    fields: Mapping[str, Any]
    """{dotted name: value} of config.json."""

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def seed(self) -> int:
        return int(self.fields["seed"])

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """run.json; empty if it is lost or damaged."""
        return self.directory.recorded()

    @property
    def status(self) -> str:
        """running | finished | preempted | failed, as recorded: a killed run says that it is running."""
        return str(self.provenance.get("status", "unknown"))

    @property
    def exploded(self) -> bool:
        """Whether it failed by its loss, perhaps before its first validation."""
        failure = self.provenance.get("failure")
        return self.status == "failed" and isinstance(failure, dict) and failure.get("loss") is not None

    @property
    def has_result(self) -> bool:
        """Whether it has validated, or exploded before it could. UserError as `curve` raises it."""
        return self.exploded or len(self.curve) > 0

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json; empty unless the run has finished."""
        path = self.directory.summary_path
        return read_json_object(path) if self.status == "finished" and path.exists() else {}

    @cached_property
    def curve(self) -> Curve:
        """UserError if metrics.jsonl is damaged, or ends before its run did."""
        path = self.directory.metrics_path
        try:
            validations, trained = read_validations(path)
            at: dict[Axis, NDArray[np.float64]] = {
                "steps": _numbers(validations, "step"),
                "tokens": _numbers(validations, "tokens"),
                "seconds": _numbers(validations, "train_seconds"),
            }
            if not all(np.all(np.isfinite(amounts)) and np.all(np.diff(amounts) >= 0) for amounts in at.values()):
                raise ValueError("steps, tokens or seconds are missing, or not in order")
            at["flops"] = at["tokens"] * (float(trained["total_flops"]) / trained["tokens"] if trained else math.nan)
            found = Curve(at, _numbers(validations, "val_bpb"))
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            raise UserError(f"{path} is damaged: {error or type(error).__name__}") from None
        end = number(self.summary.get("num_steps"))
        if self.summary.get("val_bpb") is not None and end is not None and end not in found.at["steps"]:
            where = f"at step {end:,.0f}, where {self.directory.summary_path.name} says that the run ended"
            raise UserError(f"{path} has no validation {where}: copy it again, or train the run again")
        return found


def read_run(path: str | Path) -> RunRecord:
    """The run in the folder `path`. UserError where there is none, or its config.json is damaged."""
    directory = RunDirectory.open(Path(path))
    fields = flatten(directory.read_config())
    if type(fields.get("seed")) is not int:
        raise UserError(f"{directory.config_path} is damaged: it has no seed")
    return RunRecord(directory, fields)


def is_broken(run: RunRecord) -> bool:
    """Whether its loss exploded, or its last validation is not finite. The run must have a result."""
    return run.exploded or not math.isfinite(run.curve.bpb[-1])


def read_validations(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The validations of a metrics.jsonl, and its last training step; both empty where it has none, or does not exist.

    The others are not parsed. An incomplete last line, as a killed run leaves it, is dropped. So are validations that a
    rewind has undone: those of a step that a later one is not beyond. UserError where one is not what a run writes.
    """
    if not path.exists():
        return [], {}
    validated, trained = list[bytes](), b""
    validations, first = list[dict[str, Any]](), math.inf
    try:
        for text in blocks_of_lines(path):
            validated += lines_of_kind(text, "eval")
            trained = last_line_of_kind(text, "train") or trained
        for found in map(_object, reversed(validated)):
            if not (step := float(found.get("step", "nan"))) >= first:
                validations.append(found)
                first = step
        return validations[::-1], _object(trained or b"{}")
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error or type(error).__name__}") from None


class Reached(NamedTuple):
    """What a run reached; None for what is unknown."""

    bpb: float | None
    steps: float | None
    tokens: float | None
    flops: float | None
    seconds: float | None


def reached(summary: Mapping[str, Any], last_step: Mapping[str, Any], validation: Mapping[str, Any]) -> Reached:
    """By summary.json, which counts steps after the last training line too; where it is empty, since the run has not
    finished, by the later of that line and that of the last validation: skipped steps have no training line."""
    if not summary:
        lines = (last_step, validation)
        steps, tokens, seconds = (
            max((one for line in lines if (one := number(line.get(name))) is not None and one == one), default=None)
            for name in ("step", "tokens", "train_seconds")
        )
        flops, of_tokens = (number(last_step.get(name)) for name in ("total_flops", "tokens"))
        if flops is not None and tokens and of_tokens:
            flops *= tokens / of_tokens
        return Reached(number(validation.get("val_bpb")), steps, tokens, flops, seconds)
    names = ("val_bpb", "num_steps", "total_tokens_M", "total_flops", "training_seconds")
    bpb, steps, millions, flops, seconds = (number(summary.get(name)) for name in names)
    return Reached(bpb, steps, None if millions is None else 1e6 * millions, flops, seconds)


def number(value: Any) -> float | None:
    """A number of a run's files, in which "nan" and "inf" are texts; None for anything else."""
    with suppress(TypeError, ValueError, OverflowError):
        return None if isinstance(value, bool) else float(value)
    return None


def _object(line: bytes) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("a line is not a JSON object")
    return value


def _numbers(lines: list[dict[str, Any]], key: str) -> NDArray[np.float64]:
    """The values of one key as floats; `"nan"` and `"inf"` are read as such, and a missing one as NaN."""
    return np.array([float(line.get(key, "nan")) for line in lines], dtype=np.float64)
