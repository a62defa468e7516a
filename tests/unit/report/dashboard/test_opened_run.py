"""A run that somebody looks at closely: its columns follow its file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from written_runs import write_run

from gptlab.config.errors import UserError
from gptlab.report.curves import chart_run, read_metrics_file
from gptlab.report.dashboard.opened_run import MAX_EVENTS, MAX_SAMPLE_CHARACTERS, MAX_SAMPLES, OpenedRun
from gptlab.runtime.records.metrics import MetricsLog

CURVE = (3.5, 2.0, 1.5, 1.25)
ROW = {"id": "x", "name": "a", "seed": 7, "status": "running"}


def log(run: Path, *lines: tuple[Any, dict[str, object]]) -> None:
    with MetricsLog(run / "metrics.jsonl") as metrics:
        for kind, fields in lines:
            metrics.write(kind, **fields)


def whole(run: Path) -> dict[str, Any]:
    """What reading the whole file gives: a slow and obvious oracle."""
    chart = chart_run("a", read_metrics_file(run / "metrics.jsonl"), group="A", seed=7, status="running", buckets=100)
    return {"id": "x", **chart}


def test_a_run_that_is_followed_has_the_curves_of_its_whole_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", CURVE, status="running")
    opened, size = OpenedRun(run), (run / "metrics.jsonl").stat().st_size
    assert opened.chart(ROW, group="A", buckets=100) == whole(run)
    for step in (40, 50, 60):
        log(run, ("train", {"step": step, "tokens": step, "loss": 1.0}), ("eval", {"step": step, "val_bpb": 1.0}))
        assert opened.chart(ROW, group="A", buckets=100) == whole(run)
    os.truncate(run / "metrics.jsonl", size)  # a resumed run removes lines, and writes others
    log(run, ("eval", {"step": 45, "val_bpb": 0.9}), ("eval", {"step": 99, "val_bpb": 0.8}))
    assert opened.chart(ROW, group="A", buckets=100) == whole(run)
    assert whole(run)["val"]["step"] == [0, 10, 20, 30, 45, 99]


def test_details_are_of_bounded_size(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", CURVE)
    samples = [("sample", {"step": step, "prompt": "p", "text": "x" * 10_000}) for step in range(MAX_SAMPLES + 40)]
    events = [("event", {"step": step, "what": "skipped", "value": "nan"}) for step in range(MAX_EVENTS + 40)]
    log(run, *samples, *events, ("sample", {"step": None, "prompt": ["a"], "text": None}))
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(
        json.dumps(record | {"device_name": "y" * 10_000, "failure": {"reason": "z" * 10_000}})
    )
    details = OpenedRun(run).details()
    assert (len(details["samples"]), len(details["events"])) == (MAX_SAMPLES, MAX_EVENTS)
    assert max(len(one["text"]) for one in details["samples"]) == MAX_SAMPLE_CHARACTERS
    assert details["samples"][-1] == {"step": None, "prompt": "['a']", "text": "None"}
    assert details["events"][-1] == {"step": MAX_EVENTS + 39, "what": "skipped", "reason": None, "value": "nan"}
    assert len(details["facts"]["device_name"]) == len(details["failure"]) == 200


@pytest.mark.parametrize("harm", ["{}x\n", '{"kind": "train", "step": {}}\n', "[1]\n", "[" * 100_000 + "\n"])
def test_a_damaged_line_is_one_error_until_it_is_gone(tmp_path: Path, harm: str) -> None:
    run = write_run(tmp_path / "a", CURVE)
    opened, size = OpenedRun(run), (run / "metrics.jsonl").stat().st_size
    opened.details()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(harm)
    for _ in range(2):
        with pytest.raises(UserError, match=r"metrics\.jsonl is damaged: "):
            opened.details()
    os.truncate(run / "metrics.jsonl", size)
    assert opened.chart(ROW, group="A", buckets=100) == whole(run)
