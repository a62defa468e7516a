"""Comparisons of runs with given curves: what is compared, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from written_runs import write_run

from gptlab.lab.compare import compare_runs, describe, sentence
from gptlab.lab.run_record import RunRecord, read_run
from gptlab.lab.statistics import paired_difference

STEPS = {"horizon__unit": "steps", "horizon__amount": 20}


def side(folder: Path, name: str, finals: dict[int, float], **fields: object) -> list[RunRecord]:
    """A run of 20 steps for each {seed: final bpb}: it falls from 4 over the mean of both."""
    return [
        read_run(write_run(folder / f"{name}-{seed}", [4.0, 2 + final / 2, final], seed=seed, **{**STEPS, **fields}))
        for seed, final in finals.items()
    ]


def test_three_pairs_by_hand(tmp_path: Path) -> None:
    sides = {
        "A": side(tmp_path, "a", {1: 1.20, 2: 1.22, 3: 1.24}),
        "B": side(tmp_path, "b", {1: 1.18, 2: 1.20, 3: 1.23}, model__activation="gelu"),
    }
    comparison = compare_runs(sides)
    (contrast,) = comparison.contrasts
    expected = paired_difference([1.20, 1.22, 1.24], [1.18, 1.20, 1.23])
    assert (comparison.at, contrast.verdict, contrast.judged.difference) == ("steps", "better", expected)
    assert contrast.judged.baseline_bpb == pytest.approx(1.22)
    assert [row.amount for row in contrast.rows] == [20, 20_000, 20, pytest.approx(1.2e8), None]
    assert sentence(contrast) == "B is better than A by 0.0167 ± 0.0143 bpb at equal steps (3 paired seeds, p = 0.038)"
    assert [(field.name, field.values) for field in comparison.fields] == [
        ("model.activation", {"A": ["relu2"], "B": ["gelu"]})
    ]
    assert comparison.warnings == []
    lines = describe(comparison).replace(f"{tmp_path}/", "").splitlines()
    assert max(map(len, lines[:-1])) <= 80
