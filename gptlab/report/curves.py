"""The metrics of a run as columns, and as the JSON value that `assets/charts.js` draws.

    {"version": 1,
     "runs": [{"name": "quickstart-20261122-170807",
               "group": "activation=gelu", its configuration: runs of one group differ by seed alone; or null
               "seed": 1337,
               "status": "finished",
               "tokens_per_step": 4096,    null where the run logged no step
               "flops_per_step": 4.5e10,   forward and backward; null as above
               "mean_steps": 7,            how many logged steps `loss_mean` is the mean of
               "train": {"step": [...], "seconds": [...], "loss": [...], "loss_mean": [...], "lr_scale": [...],
                         "grad_norm": [...], "tokens_per_second": [...], "mfu": [...]},
               "val": {"step": [...], "seconds": [...], "loss": [...], "bpb": [...]},
               "marks": [{"step": 120, "text": "update skipped"}]}]}

All lists of "train" have one length, and so have those of "val". Seconds are those of the training clock, losses are
nats per token, mfu is 1 at the peak. An unknown number, and one that is not finite, is null. Numbers but `step` have
six digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gptlab.config.errors import UserError
from gptlab.runtime.records.metrics import blocks_of_lines, lines_of_kind

T = TypeVar("T")
Column = NDArray[np.float64]
Columns = dict[str, Column]

TRAIN = ("step", "loss", "lr_scale", "grad_norm", "train_seconds", "tokens_per_second", "mfu")
VALIDATION = ("step", "tokens", "train_seconds", "val_loss", "val_bpb", "train_loss")

MAX_BUCKETS = 400
"""A chart is at most about 1,200 pixels wide: three to a bucket, of which two hold its minimum and maximum."""
_POINTS_OF_ALL_RUNS = 4000
_MIN_BUCKETS = 60

_SPIKY = ("loss", "grad_norm", "tokens_per_second")
"""Columns whose extremes must be seen. The learning rate has none, and MFU is proportional to the speed."""
_MEAN_SHARE, _MEAN_STEPS, _LARGEST_MEAN_SHARE = 0.01, 20, 0.05
"""`loss_mean` is over a hundredth of the logged steps, but over 20 in a run of less than 2,000, and never over more
than a twentieth: enough to hide the noise of batches, too few to hide a bend."""

# A training line as the recorder writes it: all but the digits of its numbers. JSON of a hundred thousand of them takes
# a second, this a third of that.
_FIELDS = (
    "step", "tokens", "total_flops", "epoch", "loss", "loss_ema", "lr_scale", "grad_norm", "step_seconds",
    "train_seconds", "tokens_per_second", "mfu",
)  # fmt: skip
_DRAWN = [_FIELDS.index(name) for name in TRAIN]
_KIND = b'{"kind": "train", '
_FRAME = _KIND + b", ".join(b'"%s": ' % name.encode() for name in _FIELDS) + b"}\n"
_FRAME_WITHOUT_PEAK = _FRAME.replace(b"}", b"null}")
_DIGITS = b"0123456789."
_ALL_BUT_NUMBERS = bytes(set(range(256)) - {*_DIGITS, *b",\n"})
_SPACED = bytes.maketrans(b",\n", b"  ")
_EXACT_POWERS = 10.0 ** np.arange(23)
"""Those that float64 holds exactly."""


@dataclass
class Metrics:
    """The lines of a metrics.jsonl, in their order; more can be added while a run trains."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    core: list[dict[str, Any]] = field(default_factory=list)
    last_step: dict[str, Any] = field(default_factory=dict)
    """The last training line."""
    _train: list[NDArray[np.float64]] = field(default_factory=list)
    _validations: list[NDArray[np.float64]] = field(default_factory=list)
    _train_columns: Columns | None = None
    """Those of `train`, until more lines are added."""

    def add(self, text: bytes) -> None:
        """Complete lines, each with its newline. ValueError, and nothing is added, where one is not what a run
        writes."""
        steps, others = _train_lines(text)
        by_kind, train = _by_kind(others), _table_of_frames(steps)
        if train is not None and not by_kind["train"]:
            by_kind["train"] = _objects([steps[steps.rfind(b"\n", 0, -1) + 1 :]])
        else:
            by_kind = _by_kind(text.split(b"\n"))
            train = _table(by_kind["train"], TRAIN)
        validations = _table(by_kind["eval"], VALIDATION)
        self._train.append(train)
        self._train_columns = None
        self._validations.append(validations)
        self.last_step = by_kind["train"][-1] if by_kind["train"] else self.last_step
        self.samples += by_kind["sample"]
        self.events += by_kind["event"]
        self.core += by_kind["core"]

    @property
    def train(self) -> Columns:
        """Each of `TRAIN`, shape (logged steps,); NaN where a line has no such number."""
        if self._train_columns is None:
            self._train_columns = _columns(self._train, TRAIN)
        return self._train_columns

    @property
    def validations(self) -> Columns:
        """Each of `VALIDATION`, shape (validations,); NaN where a line has no such number."""
        return _columns(self._validations, VALIDATION)


def read_metrics_file(path: Path) -> Metrics:
    """The metrics of a run so far; empty where the file does not exist. An incomplete last line is dropped, as a killed
    run leaves it. UserError where the file is damaged."""
    metrics = Metrics()
    if not path.exists():
        return metrics
    try:
        for text in blocks_of_lines(path):
            metrics.add(text)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return metrics


def bpb_history(path: Path, most: int = 32) -> list[float]:
    """At most `most` validations of a metrics.jsonl, evenly chosen, without parsing the rest of it; those that were
    undone are among them. Empty where there is none, or the file is damaged."""
    with suppress(UserError, ValueError, TypeError):
        lines = [line for text in blocks_of_lines(path) for line in lines_of_kind(text, "eval")]
        return [float(_object(line).get("val_bpb", "nan")) for line in evenly_chosen(lines, most)]
    return []


def chart_run(
    name: str, metrics: Metrics, *, group: str | None = None, seed: int | None = None, status: str = "unknown",
    buckets: int = MAX_BUCKETS,
) -> dict[str, Any]:  # fmt: skip
    """A run as the module's JSON has it, thinned to about `buckets` places without losing a spike."""
    train, validations = metrics.train, metrics.validations
    kept = thinned([train[name] for name in _SPIKY], buckets)
    mean, mean_steps = _centered_mean(train["loss"])
    drawn = {
        "seconds": train["train_seconds"], "loss": train["loss"], "loss_mean": mean,
        **{column: train[column] for column in ("lr_scale", "grad_norm", "tokens_per_second", "mfu")},
    }  # fmt: skip
    named = {"seconds": "train_seconds", "loss": "val_loss", "bpb": "val_bpb"}
    tokens, flops = (_per_step(metrics.last_step, what) for what in ("tokens", "total_flops"))
    if tokens is None and len(validations["step"]):
        tokens = _per_step({name: column[-1] for name, column in validations.items()}, "tokens")
    return {
        "name": name,
        "group": group,
        "seed": seed,
        "status": status,
        "tokens_per_step": tokens,
        "flops_per_step": flops,
        "mean_steps": mean_steps,
        "train": {"step": _whole(train["step"][kept])} | {key: _numbers(drawn[key][kept]) for key in drawn},
        "val": {"step": _whole(validations["step"])} | {key: _numbers(validations[of]) for key, of in named.items()},
        "marks": [*_marks(metrics.events)],
    }


def chart_data(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON value of the module, from `chart_run` of each run."""
    return {"version": 1, "runs": [*runs]}


def evenly_chosen(values: Sequence[T], most: int) -> list[T]:
    """At most `most` of the values, evenly spread, the first and the last among them."""
    count = min(most, len(values))
    return [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]


def buckets_for(runs: int) -> int:
    """Places of each of so many runs on one page."""
    return max(_MIN_BUCKETS, min(MAX_BUCKETS, _POINTS_OF_ALL_RUNS // max(1, runs)))


def thinned(columns: Sequence[Column], buckets: int) -> NDArray[np.intp]:
    """Which rows to draw: the first, the last, and in each of `buckets` equal parts the minimum and the maximum of each
    column. NaN is neither. All rows, where they are no more than that would be."""
    rows = len(columns[0])
    if rows <= 2 * buckets:
        return np.arange(rows)
    size = -(-rows // buckets)
    kept = np.zeros(size * buckets, dtype=np.bool_)
    kept[[0, rows - 1]] = True
    for column in columns:
        for sign in (1, -1):
            values = np.full(size * buckets, np.inf)
            values[:rows] = np.where(np.isnan(column), np.inf, sign * column)
            kept[values.reshape(buckets, size).argmin(axis=1) + size * np.arange(buckets)] = True
    return np.flatnonzero(kept[:rows])


def latest_of_each_step(steps: Column) -> NDArray[np.bool_]:
    """Which lines count: after a rewind, a run repeats steps, and their earlier lines were undone."""
    if not len(steps):
        return np.ones(0, dtype=np.bool_)
    lowest_after = np.minimum.accumulate(steps[::-1])[::-1]
    return np.append(steps[:-1] < lowest_after[1:], True)


def _train_lines(text: bytes) -> tuple[bytes, list[bytes]]:
    """What seem to be training lines, and the others: by the letter at which kinds differ. Lines are neither split nor
    parsed."""
    letters = np.frombuffer(text, np.uint8)
    starts = np.append(0, np.flatnonzero(letters == ord("\n")) + 1)
    kinds = letters[np.minimum(starts[:-1] + _KIND.index(b"train"), len(letters) - 1)]
    places = np.flatnonzero(kinds != ord("t"))
    begins, ends = starts[places].tolist(), starts[places + 1].tolist()
    between = zip([0, *ends], [*begins, len(text)], strict=True)
    return b"".join(text[begin:end] for begin, end in between), [
        text[begin:end] for begin, end in zip(begins, ends, strict=True)
    ]


def _table_of_frames(text: bytes) -> NDArray[np.float64] | None:
    """Shape (TRAIN, lines), of lines that are `_FRAME` with decimal numbers in it; an mfu of null is NaN. None where
    there is no line, or one is not so. A number of more than 15 digits may differ from float()'s in the last bit."""
    lines = text.count(b"\n")
    frame = text.translate(None, _DIGITS)
    fields = len(_FIELDS) - (frame == _FRAME_WITHOUT_PEAK * lines)
    if not lines or (fields == len(_FIELDS) and frame != _FRAME * lines):
        return None
    numbers = text.translate(_SPACED, _ALL_BUT_NUMBERS)
    letters = np.frombuffer(numbers, np.uint8)
    # A line has a comma after its kind, which no number precedes; one after each other field, and its newline.
    ends = np.flatnonzero(letters == ord(" ")).reshape(lines, len(_FIELDS) + 1)[:, 1 : 1 + fields].ravel()
    dots = np.flatnonzero(letters == ord("."))
    of = np.searchsorted(ends, dots)
    decimals = np.zeros(len(ends), np.int64)
    decimals[of] = ends[of] - dots - 1
    digits = np.fromstring(numbers.replace(b".", b""), np.int64, sep=" ")
    if len(digits) != len(ends) or np.any(np.diff(of) == 0) or decimals.max() >= len(_EXACT_POWERS):
        return None
    table = (digits / _EXACT_POWERS[decimals]).reshape(lines, fields).T
    return np.vstack([table, np.full(lines, np.nan)])[_DRAWN] if fields < len(_FIELDS) else table[_DRAWN]


def _by_kind(lines: Iterable[bytes]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ("train", "eval", "sample", "event", "core")}
    for line in _objects([*lines]):
        if (kind := line.get("kind")) in found:
            found[kind].append(line)
    return found


def _objects(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The lines as JSON objects. One call parses all: a call for each takes a third longer."""
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        values = []
    if len(values) == len(lines) and all(type(value) is dict for value in values):
        return values
    return [_object(line) for line in lines if line]


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("a line is not a JSON object")
    return value


def _table(lines: Sequence[dict[str, Any]], names: Iterable[str]) -> NDArray[np.float64]:
    """Shape (names, lines). Texts that are numbers ("nan", "inf") are read as such; null is NaN."""
    try:
        rows = [[line.get(name) for line in lines] for name in names]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(lines))
    except (ValueError, TypeError, OverflowError):
        raise ValueError("a line has something else where a number should be") from None


def _columns(tables: list[NDArray[np.float64]], names: Sequence[str]) -> Columns:
    """The tables as one, without undone lines and those that name no step."""
    if not tables:
        return {name: np.zeros(0) for name in names}
    if len(tables) > 1:  # the next call finds one
        tables[:] = [np.concatenate(tables, axis=1)]
    table = tables[0]
    table = table[:, np.isfinite(table[0])]
    return dict(zip(names, table[:, latest_of_each_step(table[0])], strict=True))


def _centered_mean(values: Column) -> tuple[Column, int]:
    """The mean of each value and its neighbors, and of how many it is (see `_MEAN_SHARE`). Nearer to an end it is
    over fewer, as many on both sides, so that a falling curve is not raised there. What is not finite is not counted;
    NaN where nothing is."""
    steps = max(_MEAN_SHARE * len(values), min(_MEAN_STEPS, _LARGEST_MEAN_SHARE * len(values)))
    half = max(1, round(steps / 2))
    at = np.arange(len(values))
    reach = np.minimum(half, np.minimum(at, len(values) - 1 - at))
    finite = np.isfinite(values)
    sums = np.append(0.0, np.cumsum(np.where(finite, values, 0.0)))
    counts = np.append(0, np.cumsum(finite))
    counted = counts[at + reach + 1] - counts[at - reach]
    total = sums[at + reach + 1] - sums[at - reach]
    return np.where(counted > 0, total / np.maximum(counted, 1), np.nan), 2 * half + 1


def _per_step(line: Mapping[str, Any], name: str) -> float | None:
    """Of something that grows by the same amount with every step, in a line; None where it is unknown."""
    amount, step = (float(value) if isinstance(value := line.get(key), int | float) else 0.0 for key in (name, "step"))
    return _number(amount / step) if step > 0 and amount > 0 else None


def _marks(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    texts = {"skipped": "update skipped", "rewound": "rewound", "failed": "failed"}
    for event in events:
        step, text = event.get("step"), texts.get(str(event.get("what")))
        if text is not None and isinstance(step, int):
            yield {"step": step, "text": text}


def _numbers(values: Column) -> list[float | None]:
    """With six digits; None where a number is not finite."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        places = 5 - np.floor(np.log10(np.abs(values)))
        up, down = 10.0 ** np.clip(places, 0, 300), 10.0 ** np.clip(-places, 0, 300)
        rounded = np.where(values == 0, 0.0, np.round(values * up / down) * down / up)
    return [value if math.isfinite(value) else None for value in rounded.tolist()]


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _whole(values: Column) -> list[int]:
    return [int(value) for value in values.tolist()]
