"""Metrics as columns, thinned for drawing; the vendored files."""

from __future__ import annotations

import hashlib
import json
import math
import random
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptlab.config.errors import UserError
from gptlab.report.curves import Metrics, _table_of_frames, buckets_for, chart_run, read_metrics_file, thinned
from gptlab.runtime.records.metrics import MetricsLog

TOKENS, FLOPS = 64, 640


def train_line(step: int, loss: Any = 2.0, **fields: Any) -> dict[str, Any]:
    line = {
        "kind": "train", "step": step, "tokens": TOKENS * step, "total_flops": FLOPS * step, "loss": loss,
        "lr_scale": 1.0, "grad_norm": 0.5, "train_seconds": 0.25 * step, "tokens_per_second": 256.0, "mfu": None,
    }  # fmt: skip
    return {**line, **fields}


def write(log: MetricsLog, line: dict[str, Any]) -> None:
    log.write(line["kind"], **{name: value for name, value in line.items() if name != "kind"})


def metrics_of(*lines: dict[str, Any]) -> Metrics:
    metrics = Metrics()
    metrics.add(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    return metrics


class TestReading:
    def test_lines_of_each_kind(self, tmp_path: Path) -> None:
        with MetricsLog(tmp_path / "metrics.jsonl") as log:
            log.write("eval", step=0, val_loss=4.0, val_bpb=3.0, train_seconds=0.0, tokens=0)
            for step in (1, 2):
                write(log, train_line(step, loss=4.0 - step))
            log.write("sample", step=2, prompt="a", text="b")
            log.write("event", step=3, what="skipped", value=math.nan, reason="loss", data_step=2)
            write(log, train_line(4, loss=math.inf))
        metrics = read_metrics_file(tmp_path / "metrics.jsonl")
        assert metrics.train["loss"].tolist() == [3.0, 2.0, math.inf]
        assert metrics.train["train_seconds"].tolist() == [0.25, 0.5, 1.0]
        assert np.isnan(metrics.train["mfu"]).all()
        assert metrics.validations["val_bpb"].tolist() == [3.0]
        assert (metrics.samples[0]["text"], metrics.events[0]["what"]) == ("b", "skipped")

    def test_of_a_step_that_was_repeated_the_later_line_counts(self) -> None:
        steps = [1, 2, 3, 4, 5, 3, 4, 6]
        metrics = metrics_of(*(train_line(step, loss=float(place)) for place, step in enumerate(steps)))
        assert metrics.train["step"].tolist() == [1, 2, 3, 4, 6]
        assert metrics.train["loss"].tolist() == [0, 1, 5, 6, 7]

    def test_lines_added_later_are_those_read_at_once(self, tmp_path: Path) -> None:
        lines = [train_line(step, loss=random.Random(step).random()) for step in range(1, 30)]
        together, apart = metrics_of(*lines), Metrics()
        for line in lines:
            apart.add(json.dumps(line).encode() + b"\n")
        assert chart_run("a", apart) == chart_run("a", together)
        assert chart_run("a", apart) == chart_run("a", together), "asking changes nothing"

    @pytest.mark.parametrize("mfu", [0.25, None])
    def test_lines_of_the_recorder_are_read_as_json_reads_them(self, mfu: float | None) -> None:
        """Every digit, and lines of other kinds between them. Lines that are not as the recorder writes them are read
        as JSON: their block has other bytes, and the same values."""
        draws = random.Random(3)
        lines = []
        names = ("loss", "loss_ema", "lr_scale", "grad_norm", "step_seconds", "train_seconds", "tokens_per_second")
        for step in range(1, 200):
            line = {
                "kind": "train",
                "step": step,
                "tokens": TOKENS * step,
                "total_flops": FLOPS * step,
                "epoch": step / 7,
            }
            # Python writes numbers below 1e-4 with an exponent.
            line |= {name: draws.choice([0.0, 1.0, 1e-4 + draws.random(), 1e5 * draws.random()]) for name in names}
            lines.append(line | {"mfu": mfu})
        assert _table_of_frames(b"".join(json.dumps(line).encode() + b"\n" for line in lines)) is not None
        lines.insert(50, {"kind": "sample", "step": 50, "prompt": 'a\n{"kind": "train", ', "text": "b"})
        fast, slow = metrics_of(*lines), metrics_of(*lines, {"kind": "train", "step": 1000})
        assert [line["step"] for line in fast.samples] == [50]
        assert fast.last_step["step"] == 199
        for name, column in fast.train.items():
            # The last bit of a number with 16 or 17 digits may differ.
            np.testing.assert_allclose(column, slow.train[name][:-1], rtol=3e-16, atol=0)

    @pytest.mark.parametrize(
        "damage",
        [("1.5", "1.5.5"), ("1.5", ""), ('"epoch": 1.5, "loss":', '"loss": 2.5, "epoch":'), ("1.5", "1.5e-05")],
    )
    def test_a_line_that_is_almost_the_recorders_is_not_misread(self, tmp_path: Path, damage: tuple[str, str]) -> None:
        names = ("epoch", "loss", "loss_ema", "lr_scale", "grad_norm", "step_seconds", "train_seconds",
                 "tokens_per_second", "mfu")  # fmt: skip
        lines = [
            json.dumps({"kind": "train", "step": step, "tokens": 1, "total_flops": 1, **dict.fromkeys(names, 1.5)})
            for step in range(1, 4)
        ]
        lines[1] = lines[1].replace(*damage, 1)
        path = tmp_path / "metrics.jsonl"
        path.write_text("\n".join(lines) + "\n")
        try:
            values = [float(json.loads(line)["loss"]) for line in lines]
        except ValueError:
            with pytest.raises(UserError, match="is damaged: a line"):
                read_metrics_file(path)
        else:
            assert read_metrics_file(path).train["loss"].tolist() == values

    def test_an_incomplete_last_line_is_dropped_and_no_file_is_an_empty_run(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        assert chart_run("a", read_metrics_file(path))["train"]["step"] == []
        path.write_text(json.dumps(train_line(1)) + '\n{"kind": "tra')
        assert read_metrics_file(path).train["step"].tolist() == [1]

    @pytest.mark.parametrize(
        "line",
        ["no JSON", "[" * 100_000, "7", '{"kind": "train", "step": 1, "loss": [1]}', '{"kind": "eval", "step": "one"}',
         '{"kind": "train", "step": 1' + "0" * 400 + "}"],
    )  # fmt: skip
    def test_a_damaged_line_is_one_line(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text(f"{json.dumps(train_line(1))}\n{line}\n")
        with pytest.raises(UserError, match=r"metrics.jsonl is damaged: a line"):
            read_metrics_file(path)


class TestThinning:
    def test_keeps_first_last_and_every_extreme(self) -> None:
        draws = random.Random(1)
        values = np.array([draws.gauss(0, 1) for _ in range(10_007)])
        values[[17, 5_000, 10_001]] = 40.0, -40.0, math.nan
        kept = thinned([values], 50)
        assert len(kept) <= 2 * 50 + 2
        assert {0, 17, 5_000, 10_006} <= set(kept.tolist())
        size = math.ceil(len(values) / 50)
        for start in range(0, len(values), size):  # bucket by bucket, the slow way
            bucket = {
                float(values[i]): i for i in range(start, min(start + size, len(values))) if values[i] == values[i]
            }
            assert {bucket[max(bucket)], bucket[min(bucket)]} <= set(kept.tolist())

    def test_leaves_short_runs_as_they_are(self) -> None:
        assert thinned([np.arange(100.0)], 50).tolist() == list(range(100))
        assert thinned([np.zeros(0)], 50).tolist() == []

    def test_all_rows_are_of_one_length_and_numbers_that_are_not_finite_are_null(self) -> None:
        lines = [train_line(step, loss="nan" if step == 7 else float(step), mfu=None) for step in range(1, 3_000)]
        run = chart_run("a", metrics_of(*lines), buckets=20)
        assert len({len(values) for values in run["train"].values()}) == 1
        assert set(run["train"]["mfu"]) == {None}
        assert json.loads(json.dumps(run, allow_nan=False)) == run
        assert (run["tokens_per_step"], run["flops_per_step"]) == (TOKENS, FLOPS)

    def test_many_runs_share_the_points(self) -> None:
        assert [buckets_for(runs) for runs in (1, 10, 20, 1000)] == [400, 400, 200, 60]


def test_the_mean_is_over_as_many_steps_on_both_sides() -> None:
    losses = [random.Random(step).random() for step in range(1_000)]
    losses[500] = math.nan
    run = chart_run("a", metrics_of(*(train_line(step + 1, loss=str(loss)) for step, loss in enumerate(losses))))
    half = run["mean_steps"] // 2
    assert half == 10
    for place, step in enumerate(run["train"]["step"]):
        at = step - 1
        reach = min(half, at, len(losses) - 1 - at)
        around = [loss for loss in losses[at - reach : at + reach + 1] if loss == loss]
        # Six digits are kept, and running sums of 1,000 numbers below 1 are exact to 1e-13.
        assert run["train"]["loss_mean"][place] == pytest.approx(sum(around) / len(around), rel=1e-5)


def test_events_are_marked() -> None:
    metrics = metrics_of(
        {"kind": "event", "step": 4, "what": "rewound"}, {"kind": "event", "step": 5, "what": "<b>"},
        {"kind": "event", "step": [], "what": "failed"},
    )  # fmt: skip
    assert chart_run("a", metrics)["marks"] == [{"step": 4, "text": "rewound"}]


def test_vendored_files_are_those_of_the_release() -> None:
    assets = resources.files("gptlab.report") / "assets"
    record = json.loads((assets / "VENDORED.json").read_text())
    for name, digest in record["sha256"].items():
        assert hashlib.sha256((assets / name).read_bytes()).hexdigest() == digest, name
    script = (assets / "uPlot.iife.min.js").read_text()
    assert f"v{record['version']}" in script[:100]
    # Reports put it into a <script>, under a policy without eval and without inline styles.
    assert not [
        word for word in ("</script", "eval(", "new Function", "cssText", 'setAttribute("style') if word in script
    ]
