"""The list of runs: what a row says, what is read again, and what a hostile folder can do."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_files import deep, endless, hole, many_digits, pipe
from written_runs import write_run

from gptlab.lab.run_list import list_runs
from gptlab.report.dashboard.index import RunIndex
from gptlab.report.dashboard.watched_run import WatchedRun
from gptlab.runtime.records.metrics import MetricsLog, last_line_of_kind, lines_of_kind, read_metrics
from gptlab.runtime.records.run_directory import RunDirectory

CURVE = (3.5, 2.0, 1.5, 1.25)


def row_of(run: Path) -> dict[str, Any]:
    watched = WatchedRun(run, run.name)
    assert watched.refresh()
    assert watched.compare_with_recipe()
    assert not watched.compare_with_recipe()
    return watched.row


def log(run: Path, kind: Any, **fields: object) -> None:
    with MetricsLog(run / "metrics.jsonl") as metrics:
        metrics.write(kind, **fields)


class TestRow:
    def test_of_a_finished_run(self, tmp_path: Path) -> None:
        row = row_of(write_run(tmp_path / "a", CURVE, recipe="quickstart", seed=7, model__n_layer=3))
        kept = ("name", "status", "problem", "recipe", "seed", "val_bpb", "tokens", "seconds", "spark", "step")
        assert {name: row[name] for name in kept} == {
            "name": "a", "status": "finished", "problem": None, "recipe": "quickstart", "seed": 7, "val_bpb": 1.25,
            "tokens": 30_000.0, "seconds": 30.0, "spark": list(CURVE), "step": 30.0,
        }  # fmt: skip
        assert row["fields"]["model.n_layer"] == 3
        assert not row["has_checkpoint"]

    def test_says_what_gptlab_runs_says(self, tmp_path: Path) -> None:
        """`gptlab runs` reads every run from scratch: a slow and obvious oracle."""
        for number, status in enumerate(("finished", "failed", "preempted", "running")):
            fields = {"recipe": "quickstart" if number else "custom", "model__n_layer": number + 1}
            write_run(tmp_path / status, CURVE[: number + 1], status=status, **fields)
        for listed in list_runs([tmp_path]):
            for path in listed.path.iterdir():
                os.utime(path, ns=(1, 1))  # silent for long, so that the lock is asked
            row = row_of(listed.path)
            assert (row["status"], row["val_bpb"], row["recipe"]) == (listed.status, listed.val_bpb, listed.recipe)
            assert (row["tokens"], row["seconds"]) == (listed.tokens, listed.training_seconds) or listed.tokens is None
            assert row["changes"] == (
                None if listed.changes is None else [list(pair) for pair in listed.changes.items()]
            )

    def test_of_a_run_whose_run_json_is_damaged_or_whose_fields_are_lists(self, tmp_path: Path) -> None:
        """As `gptlab runs` says it."""
        run = write_run(tmp_path / "a", CURVE, data__source=("a.txt", "b.txt"))
        (run / "run.json").write_text("{")
        row, (listed,) = row_of(run), list_runs([run])
        assert (row["status"], row["problem"], row["val_bpb"]) == (listed.status, None, listed.val_bpb)
        assert (row["status"], row["val_bpb"]) == ("unknown", 1.25)
        assert row["fields"]["data.source"] == ["a.txt", "b.txt"]

    def test_seeds_of_one_configuration_have_one_group(self, tmp_path: Path) -> None:
        groups = [
            row_of(write_run(tmp_path / f"{depth}-{seed}", CURVE, **fields, model__n_layer=depth))["group"]
            for depth in (2, 3)
            for seed, fields in enumerate([{"seed": 0}, {"seed": 1, "data__source": ("./a.txt", "b.txt")}])
        ]
        assert [groups.index(group) for group in groups] == [0, 0, 2, 2]

    def test_runs_on_other_data_or_with_own_parts_have_another_group(self, tmp_path: Path) -> None:
        runs = [write_run(tmp_path / str(seed), CURVE, seed=seed) for seed in (0, 1)]
        runs.append(write_run(tmp_path / "other", CURVE, data_fingerprint="e" * 64))
        runs.append(write_run(tmp_path / "own", CURVE))
        record = json.loads((runs[-1] / "run.json").read_text())
        (runs[-1] / "run.json").write_text(json.dumps(record | {"own_parts": {"optimizer": {"name": "Lion"}}}))
        groups = [row_of(run)["group"] for run in runs]
        assert [groups.index(group) for group in groups] == [0, 0, 2, 3]

    def test_of_a_running_run_follows_its_metrics(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "a", CURVE, status="running", horizon__amount=100.0, horizon__unit="steps")
        with RunDirectory(run).lock():
            watched = WatchedRun(run, "a")
            watched.refresh()
            assert (watched.row["status"], watched.row["share"]) == ("running", 0.3)
            log(run, "train", step=40, tokens=40_000, train_seconds=40.0)
            log(run, "eval", step=40, val_bpb=1.1, train_seconds=40.0, tokens=40_000)
            assert watched.refresh()
            assert not watched.refresh()
        row = watched.row
        assert (row["val_bpb"], row["step"], row["tokens"], row["share"]) == (1.1, 40, 40_000, 0.4)
        assert row["spark"] == [*CURVE, 1.1]

    def test_of_a_killed_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its files are silent, and nobody holds its lock."""
        run = write_run(tmp_path / "a", CURVE, status="running")
        watched = WatchedRun(run, "a")
        watched.refresh()
        assert watched.row["status"] == "running"
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 60)
        with RunDirectory(run).lock():
            watched.refresh()
            assert watched.row["status"] == "running"
        monkeypatch.setattr(time, "time", lambda: now + 120)
        assert watched.refresh()
        assert watched.row["status"] == "killed"

    def test_forgets_lines_that_a_resumed_run_removed(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "a", CURVE, status="running")
        watched = WatchedRun(run, "a")
        watched.refresh()
        lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (run / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
        log(run, "eval", step=15, val_bpb=1.9)
        watched.refresh()
        assert watched.row["spark"] == [3.5, 2.0, 1.9]

    def test_a_rewind_undoes_validations(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "a", CURVE, status="running")
        log(run, "eval", step=20, val_bpb=1.6)
        assert row_of(run)["spark"] == [3.5, 2.0, 1.6]

    def test_a_diverged_run_has_a_row(self, tmp_path: Path) -> None:
        row = row_of(write_run(tmp_path / "a", [3.5, float("nan"), float("inf")], status="failed"))
        assert (row["spark"], row["val_bpb"]) == ([3.5], float("inf"))


def test_the_lines_of_a_kind_are_those_that_parsing_all_lines_finds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", CURVE)
    log(run, "sample", step=30, prompt='{"kind": "eval"', text='\n{"kind": "train", "step": 99}\n')
    log(run, "eval", step=40, val_bpb=1.0)
    path, text = run / "metrics.jsonl", (run / "metrics.jsonl").read_bytes()
    for kind in ("eval", "train", "sample", "core"):
        expected = [line for line in read_metrics(path) if line["kind"] == kind]
        assert [json.loads(line) for line in lines_of_kind(text, kind)] == expected
        assert json.loads(last_line_of_kind(text, kind) or b"null") == (expected[-1] if expected else None)


class TestIndex:
    def test_finds_what_gptlab_runs_finds(self, tmp_path: Path) -> None:
        for name in ("a", "sweep/b", "sweep/deeper/c", ".hidden/d"):
            write_run(tmp_path / name, CURVE)
        (tmp_path / "link").symlink_to(tmp_path / "a")
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "config.json").write_text("{}")
        index = RunIndex(tmp_path)
        index.refresh()
        found = index.changes(0, wait_seconds=0)
        assert found is not None
        assert sorted(row["name"] for row in found["rows"]) == ["a", "sweep/b", "sweep/deeper/c"]
        listed = {run.path for run in list_runs([tmp_path])}
        assert listed == {tmp_path / row["name"] for row in found["rows"]}

    def test_the_run_that_is_the_folder_has_its_name_and_deep_ones_are_not_found(self, tmp_path: Path) -> None:
        for folder, names in (
            (write_run(tmp_path / "run", CURVE), ["run"]),
            (write_run(tmp_path / "deep/1/2/3/4/5", CURVE).parents[4], ["1/2/3/4/5"]),
            (write_run(tmp_path / "deeper/1/2/3/4/5/6", CURVE).parents[5], []),
        ):
            index = RunIndex(folder)
            index.refresh()
            found = index.changes(0, wait_seconds=0)
            assert found is not None
            assert [row["name"] for row in found["rows"]] == names

    def test_reports_what_changed_since_a_version(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gptlab.report.dashboard.index.SCAN_SECONDS", 0.0)
        a, b = (write_run(tmp_path / name, CURVE, status="running") for name in ("a", "b"))
        index = RunIndex(tmp_path)
        assert index.changes(0, wait_seconds=0) is None
        index.refresh()
        first = index.changes(0, wait_seconds=0)
        assert first is not None
        assert (first["loaded"], sorted(row["name"] for row in first["rows"]), first["gone"]) == (True, ["a", "b"], [])
        index.refresh()
        assert index.changes(first["version"], wait_seconds=0) is None
        log(b, "eval", step=40, val_bpb=1.0)
        index.refresh()
        second = index.changes(first["version"], wait_seconds=0)
        assert second is not None
        assert [(row["name"], row["val_bpb"]) for row in second["rows"]] == [("b", 1.0)]
        gone = next(row["id"] for row in first["rows"] if row["name"] == "a")
        shutil.rmtree(a)
        write_run(tmp_path / "c", CURVE)
        index.refresh()
        third = index.changes(second["version"], wait_seconds=0)
        assert third is not None
        assert ([row["name"] for row in third["rows"]], third["gone"]) == (["c"], [gone])
        assert index.run(gone) is None

    def test_is_loaded_once_it_has_looked_again_for_who_watches(self, tmp_path: Path) -> None:
        """A page that is opened later does not choose among the runs of before."""
        write_run(tmp_path / "a", CURVE)
        index = RunIndex(tmp_path)
        index.refresh()
        write_run(tmp_path / "b", CURVE)
        with index.watched():
            stale = index.changes(0, wait_seconds=0)
            assert stale is not None
            assert not stale["loaded"]
            index.refresh()
            with index.watched():
                fresh = index.changes(0, wait_seconds=0)
            assert fresh is not None
            assert (fresh["loaded"], sorted(row["name"] for row in fresh["rows"])) == (True, ["a", "b"])

    def test_wakes_whoever_waits(self, tmp_path: Path) -> None:
        write_run(tmp_path / "a", CURVE)
        index, found = RunIndex(tmp_path), list[Any]()
        waiting = threading.Thread(target=lambda: found.append(index.changes(0, wait_seconds=30)))
        waiting.start()
        index.refresh()
        waiting.join(10)
        assert found
        assert found[0] is not None

    def test_reads_each_byte_once(self, tmp_path: Path) -> None:
        runs = [write_run(tmp_path / str(number), CURVE, status="running") for number in range(5)]
        index = RunIndex(tmp_path)
        index.refresh()
        for step in range(40, 100, 10):
            for run in runs[:2]:
                log(run, "eval", step=step, val_bpb=1.0)
            index.refresh()
            index.refresh()
        sizes = [(run / "metrics.jsonl").stat().st_size for run in runs]
        assert sorted(run._tail.bytes_read for run in index._runs.values()) == sorted(sizes)

    def test_many_runs_load_fast(self, tmp_path: Path) -> None:
        """A thousand runs of a thousand lines in under 2 s: here a twentieth of it, in process time, in a twentieth of
        the time and as much again, since a machine that runs tests is not idle."""
        first = write_run(tmp_path / "0", CURVE)
        train = b'{"kind": "train", "step": 1, "tokens": 4096, "loss": 8.317424774169922%s}\n' % (b" " * 220)
        text = (train * 100 + b'{"kind": "eval", "step": 1, "val_bpb": 3.5}\n') * 10
        for number in range(1, 50):
            shutil.copytree(first, tmp_path / str(number))
            (tmp_path / str(number) / "metrics.jsonl").write_bytes(text)
        index, start = RunIndex(tmp_path), time.process_time()
        index.refresh()
        seconds = time.process_time() - start
        found = index.changes(0, wait_seconds=0)
        assert found is not None
        assert len(found["rows"]) == 50
        assert seconds < 0.2, seconds


def _text(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


def _link(path: Path) -> None:
    (path.parent.parent / "target").write_text('{"recipe": "x"}')
    path.symlink_to(path.parent.parent / "target")


HARM: dict[str, Callable[[Path], None]] = {
    "empty": _text(""),
    "no JSON": _text("{"),
    "a list": _text("[]"),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe{}") and None,
    "deep": deep,
    "many digits": many_digits,
    "a pipe": pipe,
    "endless": endless,
    "a hole": hole,
    "a link": _link,
    "a folder": lambda path: path.mkdir(),
    "other values": _text(
        '{"recipe": {"a": [1]}, "horizon": 3, "status": [], "start": {}, "model": {"n_layer": 1e999}}'
    ),
    "a text in capitals": _text('"' + "A" * 100_000 + '"'),
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("name", ["config.json", "run.json", "summary.json", "metrics.jsonl", "checkpoints", ".lock"])
def test_a_hostile_folder_is_one_line(tmp_path: Path, name: str, harm: str) -> None:
    """Never a hang or an exception; the other runs are listed as ever."""
    write_run(tmp_path / "runs/good", CURVE)
    bad = write_run(
        tmp_path / "runs/bad", CURVE, status="running" if name in ("metrics.jsonl", ".lock") else "finished"
    )
    (bad / name).unlink(missing_ok=True)
    HARM[harm](bad / name)
    for path in bad.iterdir():
        if path.is_file() and not path.is_symlink():
            os.utime(path, ns=(1, 1))  # silent for long, so that its lock is asked
    index, start = RunIndex(tmp_path / "runs"), time.process_time()
    index.refresh()
    index.refresh()
    assert time.process_time() - start < 1.0
    found = index.changes(0, wait_seconds=0)
    assert found is not None
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["good"]["status"] == "finished"
    text = json.dumps(rows["bad"], allow_nan=True)
    assert len(text) < 10_000
    assert "\n" not in (rows["bad"]["problem"] or "")


def test_a_damaged_run_that_is_repaired_is_listed_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", CURVE)
    text = (run / "config.json").read_text()
    (run / "config.json").write_text("{")
    watched = WatchedRun(run, "a")
    watched.refresh()
    assert watched.row["status"] == "damaged"
    assert not watched.refresh()
    (run / "config.json").write_text(text)
    assert watched.refresh()
    assert (watched.row["status"], watched.row["problem"], watched.row["spark"]) == ("finished", None, list(CURVE))
