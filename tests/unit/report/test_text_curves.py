"""Curves of characters, and the sparklines of `gptlab runs`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tiny_runs import command
from written_runs import write_run

from gptlab.report.curves import bpb_history
from gptlab.report.text_curves import BLOCKS, sparkline, svg_curve, text_curve


class TestSparkline:
    def test_by_hand(self) -> None:
        assert sparkline([8, 4, 2, 1]) == "█▄▂▁"
        assert sparkline([1.0] * 3) == "▁▁▁"
        assert sparkline([3, math.nan, 1]) == "█ ▁"
        assert [sparkline([]), sparkline([math.nan, math.inf])] == ["", ""]

    def test_of_many_values_the_first_and_last_are_shown(self) -> None:
        line = sparkline([*range(1000, 0, -1)], 10)
        assert line == "".join(sorted(line, reverse=True))
        assert (len(line), line[0], line[-1]) == (10, BLOCKS[-1], BLOCKS[0])


class TestTextCurve:
    def test_a_line_by_hand(self) -> None:
        assert text_curve([0, 1, 2], [2, 1, 0], columns=13, rows=3, ascii=True, unit="s") == (
            "2 |***\n"
            "  |   ****\n"
            "0 |       ***\n"
            "  +----------\n"
            "   0      2 s"
        )  # fmt: skip

    def test_braille_dots_are_those_of_the_line(self) -> None:
        drawn = text_curve([0, 1], [1, 0], columns=23, rows=5).splitlines()
        # 20 columns of cells are 40 dots, and 5 rows are 20: every dot row has two dots, which end to end fall.
        dots = {
            (4 * row + y, 2 * column + x)
            for row, line in enumerate(drawn[:5])
            for column, character in enumerate(line[3:])
            for x, y, bit in (
                (0, 0, 1),
                (0, 1, 2),
                (0, 2, 4),
                (1, 0, 8),
                (1, 1, 16),
                (1, 2, 32),
                (0, 3, 64),
                (1, 3, 128),
            )
            if character != " " and (ord(character) - 0x2800) & bit
        }
        assert {(0, 0), (19, 39)} <= dots
        assert all(abs(y - x * 19 / 39) <= 1 for y, x in dots)
        assert {x for _, x in dots} == {*range(40)}

    @pytest.mark.parametrize("ys", [[], [1.0], [math.nan, 1.0], [math.inf, -math.inf, 1e308]])
    def test_is_empty_where_there_is_no_line(self, ys: list[float]) -> None:
        assert text_curve([*range(len(ys))], ys) == ""
        assert svg_curve([*range(len(ys))], ys, title="x") == ""

    def test_labels_differ_where_the_values_do(self) -> None:
        drawn = text_curve([0, 1_234_567], [4.46512, 4.46507], unit="steps").splitlines()
        assert [line.split()[0] for line in (drawn[0], drawn[7])] == ["4.46512", "4.46507"]
        assert drawn[-1].split() == ["0", "1,234,567", "steps"]
        assert text_curve([12_345_678, 1e99], [1, 2], columns=8).splitlines()[-1].split() == ["12,345,678", "1e+99"]
        assert ">4.46507<" in svg_curve([0, 1_234_567], [4.46512, 4.46507], title="x")

    def test_a_flat_line_and_places_out_of_order(self) -> None:
        assert text_curve([5, 1, 3], [2, 2, 2], rows=2, columns=14).splitlines()[0].startswith("2 │⠉")


class TestHistory:
    def test_is_what_was_validated(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", [4.0, 3.0, 2.0])
        assert bpb_history(run / "metrics.jsonl") == [4.0, 3.0, 2.0]
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "eval", "step": 99, "val_bpb": 1.0')  # not complete
        assert bpb_history(run / "metrics.jsonl") == [4.0, 3.0, 2.0]

    def test_of_many_is_thinned(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", [float(n) for n in range(500)])
        found = bpb_history(run / "metrics.jsonl", 8)
        assert (len(found), found[0], found[-1]) == (8, 0.0, 499.0)

    @pytest.mark.parametrize("text", ["", '{"kind": "eval", "val_bpb": []}\n', '{"kind": "eval", nonsense\n'])
    def test_of_a_damaged_file_is_empty(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "metrics.jsonl").write_text(text)
        assert bpb_history(tmp_path / "metrics.jsonl") == []
        assert bpb_history(tmp_path / "none") == []


def test_runs_are_listed_with_their_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "falls", [4.0, 3.0, 2.0], recipe="quickstart")
    monkeypatch.setattr("gptlab.report.text_curves.stdout_lacks_dots", lambda: False)
    heading, row = command(["runs", tmp_path])[1].splitlines()
    assert heading.index("curve") == row.index("█▅▁")
    monkeypatch.setattr("gptlab.report.text_curves.stdout_lacks_dots", lambda: True)
    assert "█" not in command(["runs", tmp_path])[1]
    assert "█" not in json.dumps(json.loads(command(["runs", tmp_path, "--json"])[1]))
