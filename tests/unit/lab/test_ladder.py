"""Power laws through depths, and what `gptlab ladder` shows of them."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import command
from written_runs import TOKENS_PER_STEP, write_run

from gptlab.cli.ladder import describe
from gptlab.lab import sweep as sweeping
from gptlab.lab.ladder import PowerLaw, Rung, power_law, power_law_with_term, rungs_of
from gptlab.lab.launch import resumed_arguments
from gptlab.lab.run_record import read_run
from gptlab.runtime.records.run_directory import RunDirectory

FLOPS = [1e15, 4e15, 2e16, 1e17]


def test_a_line_in_logarithms_by_hand() -> None:
    law = power_law([1.0, math.e**2], [math.e**3, math.e])
    assert law is not None
    assert (law.a, law.b) == pytest.approx((math.e**3, 1.0), rel=1e-12)
    assert law.residuals == pytest.approx((0, 0), abs=1e-12)
    assert power_law([1.0], [2.0]) is power_law([], []) is power_law([5.0, 5.0], [2.0, 3.0]) is None


def test_the_residuals_are_in_bits_per_byte() -> None:
    bpb = [1.30, 1.18, 1.09, 0.99]
    law = power_law(FLOPS, bpb)
    assert law is not None
    design = np.stack([np.ones(4), -np.log(FLOPS)], axis=1)
    (log_a, b), *_ = np.linalg.lstsq(design, np.log(bpb), rcond=None)
    fitted = np.exp(log_a) * np.array(FLOPS) ** -b
    assert (law.a, law.b) == pytest.approx((math.exp(log_a), b), rel=1e-9)
    assert law.residuals == pytest.approx(bpb - fitted, abs=1e-12)


def test_an_irreducible_term_is_found_where_it_can_be_told() -> None:
    law = power_law_with_term(FLOPS, [0.7 + 50 * flops**-0.12 for flops in FLOPS])
    assert law is not None
    assert (law.irreducible, law.b) == pytest.approx((0.7, 0.12), rel=1e-6)  # what the optimizer stops at
    assert law.residuals == pytest.approx([0] * 4, abs=1e-9)
    assert power_law_with_term(FLOPS[:3], [1.3, 1.2, 1.1]) is None
    straight = [3 * flops**-0.05 * (1 + 1e-3 * sign) for flops, sign in zip(FLOPS, (1, -1, 1, -1), strict=True)]
    assert power_law_with_term(FLOPS, straight) is None


def test_its_interval_holds_the_true_term_19_times_in_20() -> None:
    """Of 60 fits to 8 rows with errors of a thousandth. With a true 95%, there are fewer than 52 in one of 200 tests
    (the binomial distribution)."""
    random, flops = np.random.default_rng(1), np.geomspace(1e15, 1e18, 8)
    held = 0
    for _ in range(60):
        bpb = (0.7 + 50 * flops**-0.12) * np.exp(1e-3 * random.standard_normal(8))
        law = power_law_with_term([*flops], [*bpb])
        held += law is not None and law.half_width is not None and abs(law.irreducible - 0.7) <= law.half_width
    assert held >= 52


def test_rows_are_means_over_seeds_of_what_has_finished(tmp_path: Path) -> None:
    def run(name: str, bpb: float, depth: int, **changes: Any) -> Any:
        return read_run(write_run(tmp_path / name, [5.0, bpb], model__n_layer=depth, **changes))

    sides = {
        "depth-4": [run("a", 1.0, 4), run("b", 2.0, 4, seed=2), run("c", 9.0, 4, status="failed")],
        "depth-2": [run("d", 3.0, 2)],
        "depth-6": [run("e", math.inf, 6), run("f", 9.0, 6, status="failed")],
    }
    rows = rungs_of(sides)
    assert [(row.depth, row.seeds, row.bpb) for row in rows] == [(2, 1, 3.0), (4, 2, 1.5)]
    assert (rows[0].tokens, rows[0].parameters) == (10 * TOKENS_PER_STEP, 1e5)


def test_a_depth_with_a_broken_run_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of the seeds that survived would be that of the lucky ones."""

    def written(folder: Path, words: Sequence[str], *, log: Path, stop: Any) -> int:
        depth, seed = (int(folder.name.split("-")[place]) for place in (1, 3))
        if (depth, seed) == (3, 1338):
            RunDirectory(write_run(folder, [], status="running", seed=seed)).set_failed("the loss exploded", loss=9e9)
            return 3
        write_run(folder, [4.0, math.nan if (depth, seed) == (4, 1337) else 3.0], model__n_layer=depth, seed=seed)
        return 0

    monkeypatch.setattr(sweeping, "launch", written)
    monkeypatch.chdir(tmp_path)
    code, out, err = command(["ladder", "quickstart", "--depths", "2,3,4", "--seeds", 2, "--steps", 9])
    assert (code, err) == (0, "")
    assert out.splitlines()[-4:] == [
        "    2      2     100,000  10,000  6e+07     10.0   3.0000",
        "depth-3: no row, since 1 of 2 runs broke",
        "depth-4: no row, since 1 of 2 runs broke",
        "depth-3-seed-1338: failed",
    ]


def test_the_command_s_table_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(folder: Path, words: Sequence[str], *, log: Path, stop: Any) -> int:
        depth = int(next(word for word in words if word.startswith("--depth=")).partition("=")[2])
        if depth == 7:
            log.write_text("gptlab: error: out of memory\n")
            return 2
        per_token = 1000 * depth**3
        bpb = 0.5 + 2 * (10 * TOKENS_PER_STEP * per_token) ** -0.1
        if resumed_arguments(folder) is not None:
            write_run(folder, [4.0, bpb], flops_per_token=per_token, model__n_layer=depth)
        return 0

    monkeypatch.setattr(sweeping, "launch", written)
    monkeypatch.chdir(tmp_path)
    code, out, err = command(["ladder", "quickstart", "--depths", "2,3,4,6,7", "--steps", 9, "--csv", "rows.csv"])
    assert code == 2
    assert re.fullmatch(
        "gptlab: error: depth-7-seed-1337 ended with 2: see ladders/quickstart/depth-7-seed-1337.log, and try again "
        "with .* ladder --resume ladders/quickstart\n", err,
    )  # fmt: skip
    table = out.partition("\n\n")[2].splitlines()
    assert table[0].split() == [
        "depth",
        "seeds",
        "parameters",
        "tokens",
        "FLOPs",
        "seconds",
        "val_bpb",
        "fit",
        "with",
        "term",
    ]
    assert table[1].split()[:7] == ["2", "1", "100,000", "10,000", "8e+07", "10.0", f"{0.5 + 2 * 8e7**-0.1:.4f}"]
    assert [row.split()[-1].lstrip("+-") for row in table[1:5]] == ["0.0000"] * 4
    assert "with an irreducible term: bpb = 0.5000 (± 0.0000) + 2 FLOPs^-0.1000" in out
    assert table[-1] == "depth-7-seed-1337: failed"
    assert max(map(len, table)) <= 80
    with open("rows.csv", newline="") as file:
        assert [row["depth"] for row in csv.DictReader(file)] == ["2", "3", "4", "6"]
    code, out, err = command(["ladder", "--resume", "ladders/quickstart", "--json"])
    told = json.loads(out)
    assert [law["irreducible"] for law in told["laws"]] == [0.0, pytest.approx(0.5, rel=1e-6)]
    assert [law["half_width"] is None for law in told["laws"]] == [True, False]
    assert [row["depth"] for row in told["depths"]] == [2, 3, 4, 6]
    assert told["runs"][4]["exit_code"] == 2


def test_a_law_of_models_that_do_not_improve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(folder: Path, words: Sequence[str], *, log: Path, stop: Any) -> int:
        depth = int(folder.name.split("-")[1])
        write_run(folder, [4.0, 2.0 * depth], flops_per_token=1000 * depth, model__n_layer=depth)
        return 0

    monkeypatch.setattr(sweeping, "launch", written)
    monkeypatch.chdir(tmp_path)
    lines = command(["ladder", "quickstart", "--depths", "2,4", "--steps", 9])[1].splitlines()
    assert lines[-3].endswith(f"= {4 / 2e7:.4g} FLOPs^1.0000")
    assert lines[-2] == "The exponent is positive: by this line, bits per byte rise with FLOPs."


@pytest.mark.parametrize("words", ["--depths 2", "", "--depths 2,x", "--depths 2,3 --depth 4", "--resume sweeps/x"])
def test_what_it_refuses(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(["ladder", *words.split()])
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "depth" in err or "holds no sweep" in err


def test_a_table_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "rows.csv"):
        code, _, err = command(["ladder", "quickstart", "--depths", "2,3", "--steps", 9, "--csv", path])
        assert (code, "its folder does not exist" in err) == (2, True)


def test_zero_has_no_minus() -> None:
    rows = [Rung(depth, 1, 1e5, 1e6, flops, 9.0, bpb) for depth, flops, bpb in ((2, 1e14, 1.2), (4, 1e15, 1.1))]
    law = PowerLaw(9.0, 0.06, 0.0, (-1e-15, 1e-15))
    text = describe(rows, [law])
    assert "-0.0000" not in text
    assert text.count("+0.0000") == 2
