"""What is read of run folders."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import lines_of, train, write_corpus
from written_runs import FLOPS_PER_TOKEN, write_run

from gptlab.config.errors import UserError
from gptlab.lab.run_list import list_runs
from gptlab.lab.run_record import read_run
from gptlab.report.curves import bpb_history
from gptlab.report.dashboard.watched_run import WatchedRun
from gptlab.report.run_facts import read_facts


def test_a_trained_run_is_read_as_its_files_say(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    run = read_run(train(tmp_path, "run", sample__prompts=(), seed=5))
    evals, last = lines_of(run.path, "eval"), lines_of(run.path, "train")[-1]
    assert (run.status, run.seed, run.fields["model.n_embd"]) == ("finished", 5, 32)
    assert run.summary["val_bpb"] == run.curve.bpb[-1]
    assert run.curve.bpb.tolist() == [line["val_bpb"] for line in evals]
    assert run.curve.at["steps"].tolist() == [0, 3, 6, 9, 12]
    assert run.curve.at["seconds"].tolist() == [line["train_seconds"] for line in evals]
    assert run.curve.at["flops"][-1] == pytest.approx(last["total_flops"], rel=1e-12)


def test_between_two_validations_the_curve_is_a_line_and_outside_it_is_unknown(tmp_path: Path) -> None:
    curve = read_run(write_run(tmp_path / "run", [4.0, 2.0, 1.0])).curve
    assert [curve.value("steps", at) for at in (-1, 0, 5, 10, 15, 20, 20.001)] == [None, 4.0, 3.0, 2.0, 1.5, 1.0, None]
    assert curve.value("flops", 5_000 * FLOPS_PER_TOKEN) == 3.0


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [4.0, 2.0], status="running")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step": 2')
    run = read_run(path)
    assert (run.status, run.summary, len(run.curve)) == ("running", {}, 2)
    (path / "metrics.jsonl").unlink()
    assert len(read_run(path).curve) == 0
    assert read_run(path).curve.value("steps", 0) is None


def test_metrics_that_end_before_their_run_are_refused(tmp_path: Path) -> None:
    """Its last validation would be taken for the final one."""
    path = write_run(tmp_path / "run", [4.0, 3.0, 2.0])
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:-1]))
    problem = r"metrics\.jsonl has no validation at step 20, where summary\.json says that the run ended: copy it again"
    with pytest.raises(UserError, match=problem):
        read_run(path).curve  # noqa: B018
    (path / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=problem):
        read_run(path).curve  # noqa: B018
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | {"val_bpb": None}))
    assert len(read_run(path).curve) == 0  # it never validated


@pytest.mark.parametrize("order", [list, reversed])
def test_metrics_that_another_program_wrote_again_are_read_alike(
    tmp_path: Path, order: Callable[[Any], Iterable[Any]]
) -> None:
    """`jq -c` leaves no spaces, `jq -cS` another order of keys, and not every reader parses every line."""
    path = write_run(tmp_path / "run", [4.0, 3.0, 2.0], status="failed") / "metrics.jsonl"
    watched = WatchedRun(path.parent, "run")
    watched.refresh()
    curve, row, listed, history = read_run(path.parent).curve, watched.row, list_runs([tmp_path]), bpb_history(path)
    values = [dict(order(json.loads(line).items())) for line in path.open()]
    path.write_text("".join(f"{json.dumps(value, separators=(',', ':'))}\n" for value in values))
    again, watched = read_run(path.parent).curve, WatchedRun(path.parent, "run")
    watched.refresh()
    assert (again.bpb.tolist(), again.at["flops"].tolist()) == (curve.bpb.tolist(), curve.at["flops"].tolist())
    assert [(run.val_bpb, run.tokens) for run in list_runs([tmp_path])] == [(run.val_bpb, run.tokens) for run in listed]
    assert (watched.row, bpb_history(path)) == (row, history)
    assert history == [4.0, 3.0, 2.0]


def test_what_a_finished_run_reached_is_what_its_summary_says(tmp_path: Path) -> None:
    """A number that it lacks is unknown to every reader, and not that of an earlier step."""
    path = write_run(tmp_path / "run", [4.0, 3.0])
    (path / "summary.json").write_text('{"total_tokens_M": 0.5, "num_steps": 12}')
    watched = WatchedRun(path, "run")
    watched.refresh()
    (listed,) = list_runs([tmp_path])
    assert (listed.val_bpb, listed.tokens, listed.training_seconds) == (None, 500_000, None)
    assert [watched.row[name] for name in ("val_bpb", "tokens", "seconds")] == [None, 500_000, None]
    assert read_facts(path).reached == (None, 12, 500_000, None, None)


def test_broken_values_are_read_as_such(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [4.0, math.nan])
    assert math.isnan(read_run(path).curve.bpb[1])
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join(line for line in lines if json.loads(line)["kind"] == "eval") + "\n")
    assert math.isnan(read_run(path).curve.at["flops"][1])  # no training step says how many


def test_a_damaged_line_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [4.0, 2.0])
    (path / "metrics.jsonl").write_text('{"kind": "eval", "step"\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged"):
        read_run(path).curve  # noqa: B018


@pytest.mark.parametrize(
    "line",
    [
        '[{"kind": "eval"}]', '{"kind": "eval"}', '{"kind": "eval", "step": "x", "tokens": 1, "train_seconds": 1}',
        '{"kind": "eval", "step": 1, "tokens": 1, "train_seconds": 1, "val_bpb": null}',
        '{"kind": "eval", "step": 1' + "0" * 400 + ', "tokens": 1, "train_seconds": 1, "val_bpb": 1}',
        '{"kind": "eval", "step": 11, "tokens": "nan", "train_seconds": 1, "val_bpb": 1}',
        '{"kind": "eval", "step": 11, "tokens": 20000, "train_seconds": 1, "val_bpb": 1}',
        '{"kind": "train", "tokens": 0, "total_flops": 1}', '{"kind": "train"}',
        pytest.param('{"kind": "eval", "step": ' + "[" * 10**5, id="deep"), pytest.param("x" * 2**25, id="long"),
    ],
)  # fmt: skip
def test_a_line_that_no_run_writes_is_refused(tmp_path: Path, line: str) -> None:
    path = write_run(tmp_path / "run", [4.0, 2.0])
    with (path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged"):
        read_run(path).curve  # noqa: B018


def test_validations_that_a_rewind_has_undone_do_not_count(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [4.0, 3.0, 9.0])
    with (path / "metrics.jsonl").open("a") as file:
        for step, bpb in ((15, 2.5), (20, 2.0)):
            line = {"kind": "eval", "step": step, "tokens": 1000 * step, "train_seconds": step + 10, "val_bpb": bpb}
            file.write(json.dumps(line) + "\n")
    curve = read_run(path).curve
    assert (curve.at["steps"].tolist(), curve.bpb.tolist()) == ([0, 10, 15, 20], [4.0, 3.0, 2.5, 2.0])
    assert curve.at["seconds"].tolist() == [0, 10, 25, 30]


def test_a_configuration_without_a_seed_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [4.0, 2.0])
    (path / "config.json").write_text('{"seed": "5"}')
    with pytest.raises(UserError, match="has no seed"):
        read_run(path)
