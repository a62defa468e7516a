"""One run as a row of the dashboard's list: read once, then kept up to date by what its files gained."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError, one_line
from gptlab.config.load import config_to_json, flatten
from gptlab.config.run import RunConfig
from gptlab.lab.run_list import changes_from_recipe
from gptlab.lab.run_record import fields_compared, number, reached
from gptlab.report.curves import evenly_chosen
from gptlab.report.dashboard.bounds import Signature, bounded, cut, json_object, require_file, signature
from gptlab.report.dashboard.tail import Tail
from gptlab.runtime.records.metrics import last_line_of_kind, lines_of_kind
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.names import list_checkpoints

QUIET_SECONDS = 10.0
"""A run that says it is running may have been killed if its files have not changed for so long. Asking its lock takes
it for a moment, so it is asked no more often than this."""
SPARK_POINTS = 32
"""At most, of the finite values."""

_DAMAGE = (UserError, OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What values raise that gptlab did not write."""


class WatchedRun:
    """A run folder below the folder of the dashboard."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.id = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        """What requests call the run: they never name a path."""
        self.row: dict[str, Any] = {}
        """What the list shows, as JSON."""
        self._name = cut(name)
        self._signatures: tuple[Signature, ...] = ()
        self._asked = 0.0
        self._facts: dict[str, Any] = {}
        """What the small files say, as fields of the row."""
        self._summary: dict[str, Any] = {}
        self._small: tuple[dict[str, Any], dict[str, Any]] | None = None
        """Configuration and run.json, until they are compared with the recipe."""
        self._forget()

    def refresh(self) -> bool:
        """Read what changed; whether the row did. Whatever is wrong with the folder is the row's `problem`."""
        run = RunDirectory(self.path)
        small = (run.config_path, run.provenance_path, run.summary_path, run.checkpoints_path)
        before, self._signatures = self._signatures, tuple(map(signature, (*small, run.metrics_path)))
        if before == self._signatures and not (self._facts.get("status") == "running" and self._is_quiet()):
            return False
        row: dict[str, Any] = {"id": self.id, "name": self._name, "status": "damaged", "problem": None}
        try:
            if not self._facts or before[:-1] != self._signatures[:-1]:
                self._small = _small_files(run)
                self._facts = _facts(run, *self._small)
                finished = self._facts["status"] == "finished" and os.path.lexists(run.summary_path)
                self._summary = json_object(run.summary_path) if finished else {}
            self._read_metrics()
            row |= self._facts | self._progress()
            if row["status"] == "running" and self._is_quiet():
                self._asked = time.time()
                row["status"] = "running" if _is_held(run) else "killed"
        except _DAMAGE as error:
            row["problem"] = cut(one_line(error) or type(error).__name__)
            self._forget()
        changed, self.row = row != self.row, row
        return changed

    def compare_with_recipe(self) -> bool:
        """Add to the row in what the run differs from its recipe, unless it is there; whether it was added. Making a
        recipe's configuration takes as long as all else, so the rows of all runs come first."""
        if self._small is None or not self._facts:
            return False
        (fields, record), self._small = self._small, None
        try:
            changes = changes_from_recipe(fields, record)
        except _DAMAGE:
            changes = None
        listed = None if changes is None else [[name, bounded(value)] for name, value in changes.items()]
        self._facts["changes"] = listed
        self.row = self.row | {"changes": listed}
        return True

    def _forget(self) -> None:
        self._facts, self._summary, self._small = {}, {}, None
        self._tail, self._restarts = Tail(self.path / "metrics.jsonl"), 0
        self._validations: list[tuple[float, float]] = []
        """(step, bits per byte), in the order of steps."""
        self._trained: Mapping[str, Any] = {}
        self._validated: Mapping[str, Any] = {}
        """The last training line, and that of the last validation."""

    def _read_metrics(self) -> None:
        trained = b""
        for block in self._tail.blocks():
            self._drop_undone()
            for line in lines_of_kind(block, "eval"):
                found = json.loads(line)
                step = float(found["step"])
                # A rewind repeats steps: the later line counts.
                while self._validations and self._validations[-1][0] >= step:
                    self._validations.pop()
                self._validations.append((step, float(found.get("val_bpb", math.nan))))
                self._validated = found
            trained = last_line_of_kind(block, "train") or trained
        self._drop_undone()
        if trained:
            self._trained = dict(json.loads(trained))

    def _drop_undone(self) -> None:
        """Forget lines of a file that was truncated or replaced."""
        if self._restarts != self._tail.restarts:
            self._restarts = self._tail.restarts
            self._validations, self._trained, self._validated = [], {}, {}

    def _progress(self) -> dict[str, Any]:
        """How far the run is and how good, by its metrics; what its summary says comes first."""
        found = reached(self._summary, self._trained, self._validated)
        amount, unit = self._facts["horizon"]
        done = found._asdict().get(unit)
        bpb = [value for _, value in self._validations]
        return {
            "val_bpb": found.bpb,
            "tokens": found.tokens,
            "seconds": found.seconds,
            "step": found.steps,
            "share": min(1.0, done / amount) if amount and done is not None else None,
            "spark": [round(value, 5) for value in evenly_chosen([*filter(math.isfinite, bpb)], SPARK_POINTS)],
        }

    def _is_quiet(self) -> bool:
        newest = max((found[-1] / 1e9 for found in self._signatures if found), default=0.0)
        return time.time() - max(newest, self._asked) > QUIET_SECONDS


def _small_files(run: RunDirectory) -> tuple[dict[str, Any], dict[str, Any]]:
    """{dotted name: value} of config.json, and run.json: empty where it is lost or damaged. UserError where config.json
    is damaged, or one is not a regular file."""
    fields = flatten(json_object(run.config_path))
    if not isinstance(fields.get("recipe"), str):
        raise UserError(f"{run.config_path} is not the configuration of a run")
    if os.path.lexists(run.provenance_path):
        require_file(run.provenance_path)
    return fields, run.recorded()


def _facts(run: RunDirectory, fields: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """What the small files of a run say, as fields of its row. UserError, or what damaged values raise."""
    status, start = record.get("status", "unknown"), record.get("start")
    base = default_fields()
    unusual = {name: value for name, value in fields.items() if name not in base or value != base[name]}
    data = record.get("data_fingerprint")
    trained = repr((sorted(fields_compared(unusual, data).items()), record.get("own_parts"), data))
    return {
        "status": cut(str(status), 20),
        "start": cut(start, 40) if isinstance(start, str) else None,
        "recipe": cut(fields["recipe"]),
        "seed": bounded(fields.get("seed")),
        # Only fields that gptlab knows, and only where they differ: a thousand rows are sent at once.
        "fields": {name: bounded(value) for name, value in unusual.items() if name in base},
        "group": hashlib.sha256(trained.encode()).hexdigest()[:16],
        "horizon": [number(fields.get("horizon.amount")), cut(str(fields.get("horizon.unit")), 20)],
        "has_checkpoint": _has_checkpoint(run.checkpoints_path),
    }


@cache
def default_fields() -> dict[str, Any]:
    """{dotted name: value} of a configuration that nobody changed, as in config.json."""
    return flatten(config_to_json(RunConfig()))


def _has_checkpoint(folder: Path) -> bool:
    if os.path.lexists(folder) and not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise UserError(f"{folder} is not a folder")
    return bool(list_checkpoints(folder))


def _is_held(run: RunDirectory) -> bool:
    """Whether a process trains the run, as far as its lock says."""
    for name in (".lock", ".lock.json"):
        if os.path.lexists(run.path / name):
            require_file(run.path / name)
    return run.in_use()
