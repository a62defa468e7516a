"""report.html and report.md: what they say, and that nothing of a run is more than text in them."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import command
from written_runs import write_run

from gptlab.app.run.attempt import Result
from gptlab.lab.run_list import list_runs
from gptlab.report.dashboard.watched_run import WatchedRun
from gptlab.report.markdown import code, fenced, run_text
from gptlab.report.overlay import Overlay
from gptlab.report.page import overlay_page, run_page
from gptlab.report.run_facts import duration, read_facts
from gptlab.runtime.files.plain_file import write_json_atomic
from gptlab.runtime.records.console import short_number
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.run_directory import RunDirectory

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`|\x1b]0;x\x07{{}}&lt;"


class Page(HTMLParser):
    """The elements of a page, and what stands in its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._inside = tag if tag in self.raw else ""
        if self._inside:
            self.raw[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.raw[self._inside][-1] += data
        else:
            self.text += data


def policy_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def add_lines(run: Path, *lines: dict[str, Any]) -> Path:
    with MetricsLog(run / "metrics.jsonl") as log:
        for line in lines:
            log.write(line["kind"], **{key: value for key, value in line.items() if key != "kind"})
    return run


def change(path: Path, **values: Any) -> None:
    write_json_atomic(path, {**json.loads(path.read_text()), **values})


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """A finished run with everything that a report shows."""
    run = add_lines(
        write_run(tmp_path / "rich", [4.0, 3.0, 2.5], recipe="quickstart", model__n_layer=4),
        {"kind": "sample", "step": 10, "prompt": "The ", "text": "The cat"},
        {"kind": "sample", "step": 20, "prompt": "The ", "text": "The dog sat"},
        {"kind": "core", "step": 20, "core_metric": 0.1, "tasks": {"lambada": 0.25}, "centered": {"lambada": 0.25}},
        {"kind": "event", "step": 15, "what": "skipped", "value": "nan", "reason": "loss", "data_step": 14},
        {"kind": "event", "step": 17, "what": "rewound", "value": 9.0, "reason": "spike", "to_step": 10},
    )  # fmt: skip
    change(run / "summary.json", total_seconds=100.0, training_seconds=60.0, evaluation_seconds=30.0)
    change(run / "run.json", argv=["train", "quickstart", "--data", "my notes"], git_commit="ab" * 20)
    return run


class TestWhatItSays:
    def test_facts(self, rich: Path) -> None:
        facts = read_facts(rich)
        assert facts.sentence().endswith("on stdlib for 3 min; it reached 2.5000 bits per byte.")
        assert facts.figures()[0] == ("bits per byte", "2.5000")
        assert facts.time() == [("training", 60), ("evaluation", 30), ("sampling and the rest", 10)]
        assert [(one.step, one.text) for one in facts.samples()["The "]] == [(10, "cat"), (20, "dog sat")]
        assert facts.events() == [
            ("step 15", "update skipped: its loss was not finite (nan)"),
            ("step 17", "rewound to step 10: a loss spike (9)"),
        ]
        commands = dict(facts.commands())
        assert commands["what was typed"] == "gptlab train quickstart --data 'my notes'"
        assert commands["the code that ran"] == f"git checkout {'ab' * 20}"

    def test_numbers_are_those_of_the_last_step_not_of_the_last_that_was_logged(self, tmp_path: Path) -> None:
        """20 steps, of which the 14th is the last with a training line, or which were skipped from the 15th on."""
        run = write_run(tmp_path / "run", [4.0, 3.0], every_steps=14)
        change(run / "summary.json", num_steps=20, total_tokens_M=0.02, total_flops=1.2e8, training_seconds=40.0)
        figures = dict(read_facts(run).figures())
        shown = {label: figures[label] for label in ("steps", "tokens", "FLOPs", "training", "tokens a second")}
        expected = {"steps": "20", "tokens": "20k", "FLOPs": "1.2e+08", "training": "40 s", "tokens a second": "500"}
        assert shown == expected

    def test_the_first_number_of_a_run_whose_weights_broke_is_not_an_earlier_one(self, tmp_path: Path) -> None:
        broken = write_run(tmp_path / "broken", [4.0, 2.5, math.nan])
        assert read_facts(broken).figures()[:2] == [("bits per byte", "nan"), ("lowest", "2.5000")]
        overlay = Overlay([read_facts(broken), read_facts(write_run(tmp_path / "sound", [4.0, 3.0], seed=1))])
        assert [(row[0], row[4]) for row in overlay.run_rows()] == [("sound", "3.0000"), ("broken", "nan")]

    def test_numbers_of_an_unfinished_run_count_steps_that_were_skipped_before_its_last_validation(
        self, tmp_path: Path
    ) -> None:
        run = write_run(tmp_path / "run", [4.0, 3.0], status="killed")  # type: ignore[arg-type]
        line = {"kind": "eval", "step": 15, "val_loss": 3.0, "val_bpb": 2.9, "train_seconds": 16.0, "tokens": 15_000}
        facts = read_facts(add_lines(run, line))
        assert facts.reached == (2.9, 15, 15_000, 9e7, 16)
        assert "was killed after step 15 or a later one; at its last validation it had 2.9000" in facts.sentence()
        (listed,), row = list_runs([run]), WatchedRun(run, "run")
        row.refresh()
        assert (listed.tokens, listed.training_seconds) == (15_000, 16)
        assert [row.row[name] for name in ("step", "tokens", "seconds")] == [15, 15_000, 16]

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({}, "trained with the recipe custom on stdlib for 40 steps; it reached 3.0000 bits per byte."),
            (
                {"horizon__until_val_loss": 5.0, "eval__every_steps": 20},
                "on stdlib to a validation loss of 5, at most 40 steps; it reached",
            ),
            ({"eval__only": True}, "was validated without training, with the recipe custom on stdlib; it reached"),
        ],
    )
    def test_length(self, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
        run = write_run(tmp_path / "run", [4.0, 3.0], horizon__unit="steps", horizon__amount=40.0, **fields)
        assert words in read_facts(run).sentence()

    def test_page_and_text_show_them(self, rich: Path) -> None:
        shown, text = Page(run_page(read_facts(rich))), run_text(read_facts(rich))
        for words in ("2.5000", "dog sat", "lambada", "rewound to step 10", "git checkout", "Where the time went"):
            assert words in shown.text, words
            assert words in text, words
        assert "60.0%" in shown.text
        assert "⣀" in text, "the curve"

    def test_what_differs_from_the_recipe_comes_first(self, rich: Path) -> None:
        change(rich / "config.json", seed=5)
        changes = {field: (value, of_recipe) for field, value, of_recipe in read_facts(rich).changes() or ()}
        assert changes["seed"] == ("5", "1337")
        assert Page(run_page(read_facts(rich))).text.index("What differs") < len(run_page(read_facts(rich)))

    def test_what_only_python_can_repeat(self, tmp_path: Path) -> None:
        own = write_run(tmp_path / "own", [4.0, 3.0])
        (own / "checkpoints" / "step-00000010").mkdir(parents=True)
        change(own / "run.json", own_parts={"optimizer": {"name": "train.sgd", "sha256": None}})
        commands, call = dict(read_facts(own).commands()), f"gptlab.train(from_run={str(own)!r}, optimizer=...)"
        assert commands["the same again, in a new folder"] == call
        assert commands["the same with another seed"].endswith(", optimizer=..., seed=1338)")
        assert commands["sample from it"] == f"gptlab sample {own}"
        assert read_facts(own).train_on.startswith(f"gptlab.train(resume={str(own)!r}, optimizer=..., ")
        change(own / "run.json", own_parts={"change_model": {"name": "train.gated", "sha256": None}})
        assert not [command for command in dict(read_facts(own).commands()).values() if command.startswith("gptlab ")]

    def test_of_a_run_that_failed_or_was_killed(self, tmp_path: Path) -> None:
        failed = write_run(tmp_path / "failed", [4.0, 3.0], status="failed")
        change(failed / "run.json", failure={"reason": "loss exploded", "step": 12, "loss": "nan"})
        assert (
            "it failed at step 12: loss exploded; at its last validation it had 3.0000" in read_facts(failed).sentence()
        )
        killed = write_run(tmp_path / "killed", [4.0, 3.0], status="running")
        assert "was killed after step 10 or a later one; at its last" in read_facts(killed).sentence()
        resume = ("continue it from its last checkpoint", f"gptlab train --resume {killed}")
        commands = dict(read_facts(killed).commands())
        assert commands["start it again, since it has no checkpoint"] == resume[1]
        assert "sample from it" not in commands
        (killed / "checkpoints" / "step-00000010").mkdir(parents=True)
        assert resume in read_facts(killed).commands()
        assert resume[1] in Page(run_page(read_facts(killed))).text
        assert read_facts(killed).provenance()["status"] == "killed"
        stopped = write_run(tmp_path / "stopped", [4.0, 3.0], status="preempted")
        assert "was stopped after step 10; at its last" in read_facts(stopped).sentence()
        with RunDirectory(killed).lock():
            assert "is training" in read_facts(killed).sentence()

    def test_of_a_run_with_nothing_in_it(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", [4.0], status="running")
        for name in ("metrics.jsonl", "run.json"):
            (run / name).unlink()
        assert "has an unknown status" in Page(run_page(read_facts(run))).text
        assert run_text(read_facts(run)).startswith("# `run`")

    def test_texts(self) -> None:
        assert [duration(one) for one in (0.5, 42, 200, 3600, 7530)] == [
            "0.5 s",
            "42 s",
            "3 min 20 s",
            "1 h",
            "2 h 5 min",
        ]
        shown = {950: "950", 23_500: "23.5k", 1_210_000: "1.21M", 3.28e9: "3.28B", 3.28e12: "3.28T", 0.5: "0.5"}
        rounded_up = {999.7: "1k", 999_817_216: "1B", 999_499_999: "999M"}
        assert {one: short_number(one) for one in shown | rounded_up} == shown | rounded_up


class TestUntrusted:
    @pytest.fixture
    def hostile(self, tmp_path: Path) -> Path:
        run = add_lines(
            write_run(tmp_path / HOSTILE.replace("/", "_"), [4.0, 3.0], status="failed", recipe=HOSTILE),
            {"kind": "sample", "step": 1, "prompt": HOSTILE, "text": f"{HOSTILE}```\n{HOSTILE}"},
            {"kind": "core", "step": 1, "tasks": {HOSTILE: 0.5}, "centered": {HOSTILE: "nan"}},
            {"kind": "event", "step": HOSTILE, "what": "skipped", "reason": HOSTILE},
        )
        facts = {"failure": {"reason": HOSTILE, "step": HOSTILE}, "cpu": HOSTILE, "argv": ["train", HOSTILE]}
        change(run / "run.json", **facts, config_changes=[{"step": HOSTILE, "fields": {HOSTILE: 1}}], status=HOSTILE)
        return run

    def test_is_text_in_the_page(self, hostile: Path, rich: Path) -> None:
        for page in (run_page(read_facts(hostile)), overlay_page(Overlay([read_facts(hostile), read_facts(rich)]))):
            found = Page(page)
            assert found.tags.count("script") == 4
            assert not {"img", "iframe", "a", "object", "link", "form"} & {*found.tags}
            names = {name for name, _ in found.attributes}
            assert not {name for name in names if name.startswith("on") or name in ("style", "src", "href")}
            data = json.loads(found.raw["script"][0])
            assert data["runs"][0]["name"] == hostile.name
            assert hostile.name in found.text

    def test_scripts_and_styles_are_those_that_the_policy_names(self, hostile: Path) -> None:
        found = Page(run_page(read_facts(hostile)))
        (policy,) = [value for _, value in found.attributes if value.startswith("default-src 'none'")]
        allowed = set(re.findall(r"'sha256-[^']+'", policy))
        _, *scripts = found.raw["script"]
        assert {policy_hash(text) for text in (*scripts, *found.raw["style"])} == allowed
        assert "unsafe" not in policy

    def test_a_name_that_is_not_utf_8_is_shown_with_a_mark(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / os.fsdecode(b"d\xff"), [4.0, 3.0], recipe="quickstart\ud800")
        assert command(["report", run])[0] == 0
        assert "<h1>d?" in (run / "report.html").read_text(encoding="utf-8")
        assert "d\N{REPLACEMENT CHARACTER}" in (run / "report.md").read_text(encoding="utf-8")

    def test_is_code_in_the_text(self, hostile: Path) -> None:
        text = run_text(read_facts(hostile))
        assert "\x1b" not in text
        assert "\x07" not in text
        # Outside of code, a bracket that could begin an element is escaped.
        prose = re.sub(r"(`{3,})\n.*?\n\1|(`+)[^`].*?\2", "", text, flags=re.S)
        assert not re.search(r"(?<!\\)<", prose)

    def test_fences_are_longer_than_what_they_hold(self) -> None:
        assert fenced("a\n```\nb") == "````\na\n```\nb\n````"
        assert code("a ``b` c") == "```a ``b` c```"
        assert code("`") == "`` ` ``"

    @pytest.mark.parametrize("name", ["config.json", "summary.json", "metrics.jsonl"])
    def test_a_damaged_file_is_one_line(self, rich: Path, name: str) -> None:
        (rich / name).write_text("[" * 200_000 + "\n")
        code, out, err = command(["report", rich])
        assert (code, out) == (2, "")
        assert re.fullmatch(rf"gptlab: error: .*{name}.*\n", err)

    @pytest.mark.parametrize(
        "facts",
        [{"summary.json": {"total_seconds": [], "val_bpb": {}, "total_tokens_M": "nan", "mfu_percent": True}},
         {"run.json": {"argv": 3, "resumes": [1], "config_changes": {}, "failure": [], "status": ["x"], "start": {}}},
         {"config.json": {"recipe": 4, "data": [], "horizon": 5, "model": {}}}],
    )  # fmt: skip
    def test_values_of_other_kinds_are_left_out(self, rich: Path, facts: dict[str, dict[str, Any]]) -> None:
        for name, values in facts.items():
            change(rich / name, **values)
        assert command(["report", rich])[0] == 0


class TestOverlay:
    def test_seeds_of_one_configuration_are_a_group(self, tmp_path: Path) -> None:
        for seed in (1, 2):
            for lr, gain in ((0.02, 0.0), (0.04, 0.5)):
                write_run(tmp_path / f"{lr}-{seed}", [4.0, 3.0 - gain + seed / 10], seed=seed, optim__muon__lr=lr)
        overlay = Overlay([read_facts(path) for path in sorted(tmp_path.iterdir())])
        assert {name: [run.record.seed for run in runs] for name, runs in overlay.groups.items()} == {
            "lr=0.02": [1, 2], "lr=0.04": [1, 2],
        }  # fmt: skip
        assert overlay.group_rows()[0] == ("lr=0.04", "2", "2.6500", "2.6000", "2.7000")
        assert [row[0] for row in overlay.run_rows()] == ["0.04-1", "0.04-2", "0.02-1", "0.02-2"]
        assert overlay.sentence().endswith("in 2 configurations; the lowest bits per byte are 2.6000, of 0.04-1.")
        data = json.loads(Page(overlay_page(overlay)).raw["script"][0])
        assert [run["group"] for run in data["runs"]] == ["lr=0.02", "lr=0.02", "lr=0.04", "lr=0.04"]

    def test_what_cannot_be_compared_is_not(self, tmp_path: Path) -> None:
        """Runs on other data, with a part of their own, and validated on less text than the others."""
        paths = [write_run(tmp_path / f"{n}", [4.0, 3.0 - n], seed=n) for n in range(2)]
        own = write_run(tmp_path / "own", [4.0, 3.0], seed=2)
        change(own / "run.json", own_parts={"optimizer": {"name": "Lion"}})
        three = Overlay([*map(read_facts, paths), read_facts(own)])
        assert [len(runs) for runs in three.groups.values()] == [2, 1]
        assert three.sentence().endswith("in 2 configurations; the lowest bits per byte are 2.0000, of 1.")
        other = write_run(tmp_path / "other", [4.0, 1.0], seed=1, data_fingerprint="e" * 64)
        for path in (paths[0], other):
            change(path / "run.json", tokenizer_fingerprint="t" * 64)
        two = Overlay([read_facts(paths[0]), read_facts(other)])
        assert len(two.groups) == 2
        assert two.sentence().endswith(
            "in 2 configurations, whose bits per byte cannot be compared: no field explains why their data differs "
            "(data_fingerprint in run.json): train them on the same text."
        )
        less = write_run(tmp_path / "less", [4.0, 1.0], eval__tokens=4096)
        said = Overlay([read_facts(paths[0]), read_facts(less)]).sentence()
        assert ": they validated on different amounts of text: eval.tokens is" in said

    def test_a_first_run_that_does_not_say_its_data_hides_no_other_text(self, tmp_path: Path) -> None:
        paths = [write_run(tmp_path / name, [4.0, 3.0], data_fingerprint=name * 24) for name in "abc"]
        change(paths[0] / "run.json", data_fingerprint=None)
        said = Overlay([*map(read_facts, paths)]).sentence()
        assert ", whose bits per byte cannot be compared: no field explains why their data differs" in said

    def test_a_configuration_names_its_fields_unambiguously(self, tmp_path: Path) -> None:
        for number in (1, 2):
            rates = {"optim__muon__lr": 0.01 * number, "optim__embedding__lr": 0.1 * number}
            write_run(tmp_path / str(number), [4.0, 3.0], model__n_layer=number, **rates)
        (first, _) = Overlay([read_facts(path) for path in sorted(tmp_path.iterdir())]).groups
        assert sorted(first.split(", ")) == ["embedding.lr=0.1", "muon.lr=0.01", "n_layer=1"]

    def test_the_mean_of_a_configuration_is_that_of_its_finished_runs(self, tmp_path: Path) -> None:
        for seed, bpb, lr in ((1, 3.0, 0.02), (2, 3.2, 0.02), (3, 9.0, 0.04)):
            write_run(tmp_path / str(seed), [4.0, bpb], seed=seed, optim__muon__lr=lr)
        for name, status, lr in (("failed", "failed", 0.02), ("stopped", "preempted", 0.04)):
            write_run(tmp_path / name, [4.0, 2.0], status=status, seed=9, optim__muon__lr=lr)  # type: ignore[arg-type]
        write_run(tmp_path / "alone", [4.0, 2.0], status="killed", optim__muon__lr=0.06)  # type: ignore[arg-type]
        overlay = Overlay([read_facts(path) for path in sorted(tmp_path.iterdir())])
        assert overlay.group_rows() == [
            ("lr=0.02", "2 of 3", "3.1000", "3.0000", "3.2000"),
            ("lr=0.04", "1 of 2", "9.0000", "9.0000", "9.0000"),
            ("lr=0.06", "0 of 1", "", "", ""),
        ]

    def test_a_configuration_with_a_broken_run_has_no_mean(self, tmp_path: Path) -> None:
        for seed, bpb, lr in ((1, 3.0, 0.02), (2, 2.0, 0.04), (3, math.nan, 0.06), (4, 2.5, 0.06)):
            write_run(tmp_path / str(seed), [4.0, bpb], seed=seed, optim__muon__lr=lr)
        exploded = write_run(tmp_path / "exploded", [4.0, 1.0], status="running", optim__muon__lr=0.04)
        RunDirectory(exploded).set_failed("the loss exploded", step=12, loss=200.0)
        overlay = Overlay([read_facts(path) for path in sorted(tmp_path.iterdir())])
        assert overlay.group_rows() == [
            ("lr=0.02", "1", "3.0000", "3.0000", "3.0000"),
            ("lr=0.04", "1 of 2 broke", "", "", ""),
            ("lr=0.06", "1 of 2 broke", "", "", ""),
        ]
        assert overlay.sentence().endswith("the lowest bits per byte are 2.0000, of 2.")
        assert [row[0] for row in overlay.run_rows()] == ["2", "4", "1", "3", "exploded"]


class TestCommand:
    def test_one_run_is_reported_in_its_folder(self, rich: Path) -> None:
        code, out, _ = command(["report", rich])
        assert (code, out.splitlines()[-1]) == (0, f"report: {rich / 'report.html'}")
        assert out.startswith("validation bits per byte\n")
        assert (rich / "report.md").read_text(encoding="utf-8").startswith("# `rich`")

    def test_several_runs_where_it_is_asked_for(self, rich: Path, tmp_path: Path) -> None:
        write_run(tmp_path / "other", [4.0, 3.5])
        code, out, _ = command(["report", tmp_path, "--out", tmp_path / "both.html", "--json"])
        assert code == 0
        assert json.loads(out) == {
            "runs": [str(tmp_path / "other"), str(rich)],
            "html": str(tmp_path / "both.html"),
            "markdown": str(tmp_path / "both.md"),
        }
        assert "<title>2 runs" in (tmp_path / "both.html").read_text(encoding="utf-8")
        assert not (rich / "report.html").exists()

    def test_wrong_usage_is_one_line(self, rich: Path) -> None:
        assert command(["report"])[2] == "gptlab: error: name a run, or several: gptlab report runs/NAME\n"
        assert "names the page, such as x.html" in command(["report", rich, "--out", "x.md"])[2]

    def test_a_reported_run_can_be_pruned(self, rich: Path) -> None:
        command(["report", rich])
        assert command(["runs", "prune", rich, "--keep-best", 0, "--yes"])[0] == 0
        assert not rich.exists()


def test_a_notebook_shows_numbers_and_a_curve(rich: Path) -> None:
    shown = Result(0, rich, {})._repr_html_()
    assert shown is not None
    assert {"svg", "polyline", "table"} <= {*Page(shown).tags}
    assert "2.5000" in Page(shown).text
    assert Result(0, rich / "gone", {})._repr_html_() is None
