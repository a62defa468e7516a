"""`gptlab compare`: its forms of output, what it refuses, and folders that are damaged."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.parsers import expat

import pytest
from tiny_runs import command
from written_runs import write_run

from gptlab.lab import plot
from gptlab.runtime.records.run_directory import RunDirectory

CONTRACTS = (Path(__file__).parents[3] / "docs" / "contracts.md").read_text(encoding="utf-8")
FINALS = {"base": (1.20, 1.22, 1.24), "new": (1.18, 1.20, 1.23)}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/base-1 to -3 and runs/new-1 to -3, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, finals in FINALS.items():
        for seed, bpb in enumerate(finals, start=1):
            fields = {"seed": seed, "model__bias": name == "new", "horizon__unit": "steps", "horizon__amount": 20}
            write_run(Path("runs", f"{name}-{seed}"), [4.0, 2.0, bpb], **fields)
    return tmp_path / "runs"


def answer(*words: object) -> dict[str, Any]:
    code, out, err = command(["compare", *words, "--json"])
    assert (code, err) == (0, "")
    return json.loads(out)


def refused(*words: object) -> str:
    """The one line on stderr."""
    code, out, err = command(["compare", *words])
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err.removeprefix("gptlab: error: ").strip()


SENTENCE = "B is better than A by 0.0167 ± 0.0143 bpb at equal steps (3 paired seeds, p = 0.038)"


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    "words",
    [
        ["runs"], ["runs/*"], ["runs/base-*", "runs/new-*"], ["--a", "runs/base-*", "--b", "runs/new-*"],
        ["--a", "runs/base-1", "runs/base-2", "runs/base-3", "--b", "runs/new-*"],
    ],
)  # fmt: skip
def test_runs_are_named_in_several_ways(words: list[str]) -> None:
    code, out, err = command(["compare", *words])
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == SENTENCE
    assert max(map(len, out.splitlines()[:-1])) <= 80


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "runs", "--csv"], ["compare", "runs", "--plot"], ["report", "runs", "--out"],
        ["tour", "runs/new-1", "--out"], ["ladder", "quickstart", "--depths", "1,2", "--csv"],
    ],
    ids=lambda words: words[0] + words[-1],
)  # fmt: skip
def test_no_file_of_a_run_is_overwritten(runs: Path, words: list[str]) -> None:
    """A report took the place of the run's configuration."""
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    name = "picture.png" if words[-1] == "--plot" else "config.json"
    code, out, err = command([*words, f"runs/new-1/{name}"])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"runs/new-1/{name} is inside the run folder" in err
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("runs")
def test_final_values_can_be_asked_for(tmp_path: Path) -> None:
    assert answer("runs", "--at", "end", "--plot", tmp_path / "new.svg")["at"] == "end"


@pytest.mark.usefixtures("runs")
def test_json_and_csv_have_the_documented_keys(tmp_path: Path) -> None:
    found = answer("runs", "--csv", tmp_path / "rows.csv")
    row = re.search(r"^\| `gptlab compare` \| (.*) \|$", CONTRACTS, re.MULTILINE)
    assert row is not None
    listed = set(re.findall(r"`(\w+)`", row[1]))
    (contrast,) = found["contrasts"]
    assert {*found, *contrast} <= listed
    section = CONTRACTS.partition("The keys of a row")[2].partition("\n- ")[0]
    assert set(contrast["rows"][0]) == set(re.findall(r"`(\w+)`", section))
    assert contrast["sentence"] == SENTENCE
    assert contrast["rows"][0]["difference"] == pytest.approx(-1 / 60, rel=1e-12)
    assert found["sides"]["B"] == {"runs": [f"runs/new-{n}" for n in (1, 2, 3)], "seeds": [1, 2, 3]}
    assert found["fields"] == {"model.bias": {"A": [False], "B": [True]}}
    with (tmp_path / "rows.csv").open(newline="") as file:
        lines = [*csv.DictReader(file)]
    assert [line["at"] for line in lines] == ["steps", "tokens", "seconds", "flops", "end"]
    for line, same in zip(lines, contrast["rows"], strict=True):
        assert line == {key: "" if value is None else str(value) for key, value in same.items()}


def test_json_of_multipliers_has_the_documented_keys(tmp_path: Path) -> None:
    for side in "ab":
        for layers in (1, 2):
            fields = {"model__n_layer": layers, "flops_per_token": 1000 * layers, "model__bias": side == "b"}
            write_run(tmp_path / f"{side}{layers}", [4.0, 3.0 - layers - (side == "b") / 10], **fields)
    found = answer("--a", tmp_path / "a*", "--b", tmp_path / "b*")
    row = re.search(r"`multipliers`: a list of (.*) \|$", CONTRACTS, re.MULTILINE)
    assert row is not None
    write_run(tmp_path / "wide", [4.0, 1.0], model__n_embd=128)
    assert "no size is on both sides" in refused("--a", tmp_path / "a*", "--b", tmp_path / "wide", "--plot", "x.png")
    inside, outside = found["multipliers"]
    assert set(inside) == set(outside) == set(re.findall(r"`(\w+)`", row[1]))
    assert inside["multiplier"] == pytest.approx(2**0.1)
    assert (inside["low"], inside["seeds"], outside["multiplier"]) == (None, 1, None)


def test_json_of_a_broken_run_is_json(runs: Path) -> None:
    write_run(runs / "new-4", [4.0, math.nan], seed=4, model__bias=True, horizon__unit="steps", horizon__amount=20)
    write_run(runs / "base-4", [4.0, 2.0, 1.2], seed=4, horizon__unit="steps", horizon__amount=20)
    (contrast,) = answer("runs")["contrasts"]
    assert (contrast["verdict"], contrast["rows"][0]["candidate_bpb"]) == ("broken", "inf")
    assert (contrast["rows"][0]["half_width"], contrast["p_adjusted"]) == (None, None)


@pytest.mark.usefixtures("runs")
class TestPlot:
    def test_png(self, tmp_path: Path) -> None:
        assert command(["compare", "runs", "--plot", tmp_path / "new.png", "--at", "flops"])[::2] == (0, "")
        assert (tmp_path / "new.png").read_bytes().startswith(b"\x89PNG")

    def test_svg_of_one_seed_a_side_and_a_broken_run(self, tmp_path: Path) -> None:
        """In names, `$` would be mathematics to matplotlib."""
        exploded = write_run(Path("runs/exploded"), [], status="running", model__bias=True, model__n_layer=1)
        RunDirectory(exploded).set_failed("the loss exploded", step=0, loss=9e9)
        assert command(["compare", "runs/base-1", exploded, "--plot", tmp_path / "new.svg"])[::2] == (0, "")
        write_run(Path("runs/$broken$"), [4.0, math.nan, math.nan], seed=1, model__bias=True, model__n_layer=1)
        words = ["compare", "runs/base-1", "runs/$broken$", "--plot", tmp_path / "new.svg"]
        assert command(words)[::2] == (0, "")
        expat.ParserCreate().Parse((tmp_path / "new.svg").read_bytes(), True)
        assert "$broken$" in (tmp_path / "new.svg").read_text()

    def test_the_mean_is_of_runs_that_are_not_broken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run that exploded and has no partner is not in the differences either."""
        drawn, draw = dict[str, list[float]](), plot._draw

        def note(*words: Any) -> Any:
            drawn[words[-1].partition(", ")[2]] = words[2][1].tolist()
            return draw(*words)

        monkeypatch.setattr(plot, "_draw", note)
        write_run(Path("runs/base-9"), [4.0, 9.0, math.nan], seed=9, horizon__unit="steps", horizon__amount=20)
        assert command(["compare", "runs", "--plot", tmp_path / "new.svg"])[::2] == (0, "")
        assert drawn["4 runs, 1 broken, not drawn"] == pytest.approx([2.0, 1.22])

    def test_a_legend_that_would_cover_the_curves_is_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for curves, is_named in ((2, True), (1, False)):
            monkeypatch.setattr(plot, "MAX_LEGEND", curves)
            assert command(["compare", "runs", "--plot", tmp_path / "new.svg"])[::2] == (0, "")
            drawn = (tmp_path / "new.svg").read_text()
            assert ("legend" in drawn, "of 2 sides: gptlab report names each" in drawn) == (is_named, not is_named)

    def test_that_cannot_be_drawn(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "name a file that ends with .png or .svg" in refused("runs", "--plot", "new.pdf")
        assert "cannot write nowhere/new.png" in refused("runs", "--plot", "nowhere/new.png")
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert refused("runs", "--plot", tmp_path / "x.png") == "--plot needs matplotlib: pip install 'gptlab[plot]'"


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "name runs"), (["--a", "runs/base-1"], "two sides with --a and --b"),
        (["runs", "--a", "runs/base-1", "--b", "runs/new-1"], "name runs"), (["--b", "runs"], "two sides"),
        (["runs/base-*"], "no two of these runs"), (["runs/nothing"], "there is no run in runs/nothing"),
        (["--a", "runs/base-1", "--b", "runs/base-*"], "is on two sides"),
        (["runs", "--at", "hours"], "must be one of"),
        (["runs", "--csv", "nowhere/x.csv"], "cannot write nowhere/x.csv"), (["x" * 5000], "too long"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_one_line(words: list[str], reason: str) -> None:
    assert reason in refused(*words)


def test_runs_without_a_validation_are_left_out_of_folders_and_patterns(runs: Path) -> None:
    for seed in (4, 5):
        write_run(runs / f"new-{seed}", [], status="running", seed=seed, model__bias=True)
    for words in (["runs"], ["--a", "runs/base-*", "--b", "runs/new-*"]):
        code, out, err = command(["compare", *words])
        assert (code, out.splitlines()[-1]) == (0, SENTENCE)
        assert err == "warning: left out, without a validation to compare: runs/new-4 and 1 more\n"
    assert refused("runs/base-1", "runs/new-4").startswith("runs/new-4 has no validation to compare")


def replaced(name: str, text: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).write_text(text)

    return damage


def link(run: Path) -> None:
    (run / "metrics.jsonl").rename(run.parent / "elsewhere")
    (run / "metrics.jsonl").symlink_to(run.parent / "elsewhere")


def with_fields(**fields: Any) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(config | fields))

    return damage


class TestHostileFolders:
    """Each in the place of one run among six."""

    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            (replaced("config.json", "{"), r"config\.json is damaged"),
            (replaced("config.json", "[1]"), r"config\.json is damaged"),
            (replaced("config.json", "{}"), r"has no seed"),
            (with_fields(seed=True), "has no seed"),
            (with_fields(seed="1; rm"), "has no seed"),
            (replaced("metrics.jsonl", '{"kind": "eval"}\n'), r"metrics\.jsonl is damaged"),
            (
                replaced("metrics.jsonl", '{"kind": "eval", "step": ' + "[" * 100_000 + "\n"),
                r"metrics\.jsonl is damaged",
            ),
            (replaced("metrics.jsonl", ""), "no validation at step 20"),
            (link, "is a link"),
        ],
    )
    def test_are_one_line(self, runs: Path, damage: Callable[[Path], None], reason: str) -> None:
        damage(runs / "new-2")
        line = refused("runs")
        assert re.search(reason, line)
        assert "new-2" in line

    @pytest.mark.parametrize(
        "damage",
        [
            replaced("run.json", "{"), replaced("run.json", "[]"),
            replaced("run.json", '{"status": ["finished"], "failure": "x", "resumes": {"a": 1}, "config_changes": 3}'),
            replaced("run.json", '{"status": "finished", "run_id": [1], "resumes": [1, {"threads": {"a": []}}]}'),
            with_fields(model=3), with_fields(model={"n_layer": "x", "n_embd": None}),
            with_fields(horizon={"unit": []}),
            with_fields(**{"\x1b[2J": "\x1b[31m", "data": None}),
        ],
    )  # fmt: skip
    def test_that_can_be_read_are_compared_and_do_not_control_the_terminal(
        self, runs: Path, damage: Callable[[Path], None]
    ) -> None:
        damage(runs / "new-2")
        code, out, err = command(["compare", "--a", "runs/base-*", "--b", "runs/new-*"])
        assert (code, err) == (0, "")
        assert " - A is " in out or " than A by " in out or " from A: " in out or "not finished" in out
        assert "\x1b" not in out
