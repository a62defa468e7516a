"""What a report says of the tokens of a run's corpus, beside what the rows themselves count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written_runs import write_run

from gptlab.config.run import DataConfig
from gptlab.data.rows import make_rows
from gptlab.data.token_fate import token_fate as fate_of_rows
from gptlab.data.tokens.shards import SplitWriter, TokenSplit
from gptlab.report.run_facts import read_facts
from gptlab.report.token_fate import token_fate
from gptlab.runtime.files.plain_file import write_json_atomic
from gptlab.runtime.records.metrics import MetricsLog

TEXT = {"tokens": 10_000, "bytes": 40_000, "documents": 12, "shards": 1}


def said(folder: Path, corpus: Any, steps: int = 20, **fields: Any) -> dict[str, str]:
    """Of a run of so many steps with 100 tokens each."""
    run = write_run(folder, [4.0, 3.0], every_steps=steps, batch__total_tokens=100, batch__micro_sequences=1,
                    model__seq_len=100, **fields)  # fmt: skip
    path = run / "run.json"
    write_json_atomic(path, {**json.loads(path.read_text()), "corpus": corpus})
    return dict(token_fate(read_facts(run)))


def test_of_a_part_of_an_epoch(tmp_path: Path) -> None:
    fate = said(tmp_path / "run", {"train": TEXT, "val": {"tokens": 500}, "rows_per_epoch": 80})
    assert fate == {
        "training text": "10,000 tokens, 40,000 bytes, 12 documents",
        "validation text": "500 tokens",
        "one epoch": "80 rows of 100 tokens: 8,000",
        "dropped in an epoch": "none: long documents are cut, and continue in another row",
        "trained on": "2,000: 20 steps of 100",
        "epochs": "0.25: 60 rows (75%) were not reached",
    }


def test_of_several_epochs_and_skipped_steps(tmp_path: Path) -> None:
    corpus = {"train": TEXT, "val": TEXT, "rows_per_epoch": 8}
    assert said(tmp_path / "run", corpus)["epochs"] == "2.50: each row was read 2 or 3 times"
    summary = tmp_path / "run" / "summary.json"
    # The last of 22 steps has no line: it was skipped, or is not one of every N that are logged.
    write_json_atomic(summary, {**json.loads(summary.read_text()), "skipped_updates": 3, "num_steps": 22})
    fate = dict(token_fate(read_facts(tmp_path / "run")))
    assert fate["trained on"] == "1,900: 19 steps of 100"
    assert fate["skipped"] == "300: 3 steps without an update"
    assert fate["epochs"] == "2.75: each row was read 2 or 3 times"


def test_skipped_steps_of_a_run_that_has_not_finished(tmp_path: Path) -> None:
    """Steps 20 to 22 were skipped, and the run was killed before it validated after the last of them."""
    said(tmp_path / "run", {"train": TEXT, "val": TEXT, "rows_per_epoch": 8}, status="killed", steps=19)
    with MetricsLog(tmp_path / "run" / "metrics.jsonl") as metrics:
        for step in (20, 21, 22):
            metrics.write("event", step=step, what="skipped", value="nan", reason="loss")
            if step == 21:
                metrics.write("eval", step=step, val_loss=3.0, val_bpb=3.0, train_seconds=21.0, tokens=2_100)
    fate = dict(token_fate(read_facts(tmp_path / "run")))
    assert fate["trained on"] == "1,900: 19 steps of 100"
    assert fate["skipped"] == "200: 2 steps without an update"


def test_random_windows_leave_out_what_they_do_in_a_simulation(tmp_path: Path) -> None:
    corpus = {"train": TEXT, "val": TEXT, "rows_per_epoch": 20}
    fate = said(tmp_path / "run", corpus, data__rows="random")
    assert fate["epochs"] == "1.00; windows are drawn with replacement: about 36.8% of tokens were in none"
    # 20,000 windows of 10 tokens, on a circle of 200,000; the share's standard deviation is below 0.4%.
    starts = np.random.default_rng(0).integers(200_000, size=20_000)
    drawn = np.zeros(200_000, dtype=bool)
    for place in range(10):
        drawn[(starts + place) % 200_000] = True
    assert abs(1 - drawn.mean() - 0.368) < 0.02


def test_what_sequential_rows_drop_is_what_they_count(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    writer = SplitWriter(tmp_path / "tokens", "train", 300, 256)
    writer.add(np.zeros(3_070, dtype=np.int64), n_bytes=3_070, content_hash=0)
    counts = writer.close()
    split = TokenSplit.open(tmp_path / "tokens", "train", n_shards=counts["shards"], n_bytes=counts["bytes"])
    rows = make_rows(split, DataConfig(rows="sequential"), 100, 256, 0, None)
    corpus = {"train": counts, "val": counts, "rows_per_epoch": rows.rows_per_epoch}
    fate = said(tmp_path / "run", corpus, data__rows="sequential")
    assert fate["dropped in an epoch"] == "70: the last ones, which fill no row"
    assert fate_of_rows(rows).cropped == 70


def test_of_cropped_rows_it_says_where_they_are_counted(tmp_path: Path) -> None:
    corpus = {"train": TEXT, "val": TEXT, "rows_per_epoch": 80}
    assert "gptlab data inspect" in said(tmp_path / "run", corpus, data__long_documents="crop")["dropped in an epoch"]


def test_cropped_rows_are_new_ones_in_each_epoch(tmp_path: Path) -> None:
    corpus = {"train": TEXT, "val": TEXT, "rows_per_epoch": 8}
    for kind, expected in {"packed": "rows of their own", "sequential": "each row was read 2 or 3 times"}.items():
        fields = {"data__rows": kind, "data__long_documents": "crop"}
        assert said(tmp_path / kind, corpus, **fields)["epochs"].endswith(expected)
    corpus["rows_per_epoch"] = 80
    assert said(tmp_path / "part", corpus, data__long_documents="crop")["epochs"].endswith("(75%) were not reached")


UNCOUNTED = [
    None, "x", {}, {"train": 3}, {"train": {"tokens": "nan"}, "rows_per_epoch": 1},
    {"train": TEXT, "rows_per_epoch": -1}, {"train": TEXT, "rows_per_epoch": "1e999"},
]  # fmt: skip


@pytest.mark.parametrize("corpus", UNCOUNTED)
def test_nothing_is_said_of_what_is_not_recorded(tmp_path: Path, corpus: Any) -> None:
    assert said(tmp_path / "run", corpus) == {}
