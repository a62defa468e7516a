"""A run that somebody looks at closely: all of its metrics as columns, followed while it trains."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError
from gptlab.lab.run_record import number
from gptlab.report.curves import Metrics, chart_run
from gptlab.report.dashboard.bounds import bounded, cut, json_object
from gptlab.report.dashboard.tail import Tail

MAX_METRICS_BYTES = 1 << 30
"""Three million steps. Columns of more are not kept in the server's memory."""
MAX_SAMPLES, MAX_SAMPLE_CHARACTERS = 60, 4_000
MAX_EVENTS = 100

_FACTS = ("device_name", "dtype", "world_size", "gptlab_version", "git_commit", "start", "end")
"""What is shown of run.json."""


class OpenedRun:
    """The metrics of the run in `path`. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tail = Tail(path / "metrics.jsonl")
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._restarts = self._tail.restarts
        self._metrics = Metrics()

    def chart(self, row: Mapping[str, Any], *, group: str | None, buckets: int) -> dict[str, Any]:
        """The run as charts.js draws it, up to its newest line. UserError where its metrics are damaged."""
        with self._lock:
            self._follow()
            seed = row.get("seed")
            return {
                "id": row["id"],
                **chart_run(
                    row["name"], self._metrics, group=group, seed=seed if isinstance(seed, int) else None,
                    status=row["status"], buckets=buckets,
                ),
            }  # fmt: skip

    def details(self) -> dict[str, Any]:
        """Samples, events and provenance, as JSON of bounded size. UserError where the metrics are damaged."""
        with self._lock:
            self._follow()
            samples, events = self._metrics.samples[-MAX_SAMPLES:], self._metrics.events[-MAX_EVENTS:]
        record: dict[str, Any] = {}
        with suppress(UserError, OSError):
            record = json_object(self._path / "run.json")
        failure = record.get("failure")
        return {
            "samples": [
                {"step": number(one.get("step"))}
                | {name: cut(str(one.get(name, "")), MAX_SAMPLE_CHARACTERS) for name in ("prompt", "text")}
                for one in samples
            ],
            "events": [
                {name: bounded(one.get(name)) for name in ("step", "what", "reason", "value")} for one in events
            ],
            "facts": {name: bounded(record[name]) for name in _FACTS if record.get(name) is not None},
            "failure": bounded(failure.get("reason")) if isinstance(failure, dict) else None,
        }

    def _follow(self) -> None:
        try:
            for block in self._tail.blocks():
                if self._restarts != self._tail.restarts:
                    self._forget()
                if self._tail.bytes_read > MAX_METRICS_BYTES:
                    raise UserError(f"{self._tail.path} is too long for the dashboard: `gptlab report` draws it")
                self._metrics.add(block)
        except (UserError, ValueError, RecursionError) as error:
            self._tail = Tail(self._tail.path)
            self._forget()
            text = str(error) if isinstance(error, UserError) else f"{self._tail.path} is damaged: {error}"
            raise UserError(text) from None
        if self._restarts != self._tail.restarts:
            self._forget()
