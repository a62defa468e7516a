"""What is listed of run folders, and what pruning deletes of them."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import command
from written_runs import TOKENS_PER_STEP, write_run

from gptlab.cli.runs import _lines
from gptlab.config.errors import UserError
from gptlab.config.length import minutes, steps
from gptlab.config.load import config_to_json
from gptlab.config.recipes import configure
from gptlab.config.scaling import Machine
from gptlab.lab.removals import removals, remove
from gptlab.lab.run_list import list_runs, select_runs, sort_runs
from gptlab.runtime.files.plain_file import write_json_atomic
from gptlab.runtime.records.run_directory import RunDirectory


def named(path: Path, **facts: Any) -> Path:
    """With changes to run.json."""
    run = RunDirectory(path)
    write_json_atomic(run.provenance_path, {**run.read_provenance(), **facts})
    return path


def with_checkpoint(path: Path, size: int = 1000) -> Path:
    folder = path / "checkpoints" / "step-00000010"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * size)
    return path


def of_recipe(path: Path, **changes: Any) -> Path:
    """A run of quickstart with four layers and 50 steps."""
    values = config_to_json(configure("quickstart", depth=4, horizon=steps(50)))
    for name, value in changes.items():
        group, _, field = name.partition("__")
        values[group] = {**values[group], field: value} if field else value
    write_run(path, [4.0, 3.0])
    write_json_atomic(path / "config.json", values)
    return path


class TestListing:
    def test_a_run_is_what_its_files_say(self, tmp_path: Path) -> None:
        path = with_checkpoint(of_recipe(tmp_path / "run", seed=7, model__activation="gelu", run_dir="elsewhere"))
        (run,) = list_runs([tmp_path])
        assert (run.path, run.status, run.recipe) == (path, "finished", "quickstart")
        assert run.changes == {"seed": 7, "model.activation": "gelu"}
        assert (run.val_bpb, run.tokens, run.training_seconds) == (3.0, 10 * TOKENS_PER_STEP, 10.0)
        assert run.disk_bytes == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        assert (run.checkpoint_bytes, run.has_checkpoint, run.is_own) == (1000, True, True)

    def test_a_machine_that_timed_itself_changes_nothing(self, tmp_path: Path) -> None:
        """quickstart's batch follows from the rate in run.json."""
        machine = Machine(device="cpu", flops_per_second=9e12)
        config = configure("quickstart", horizon=minutes(3), machine=machine)
        assert config.batch != configure("quickstart", depth=config.model.n_layer).batch
        path = write_run(tmp_path / "run", [4.0])
        write_json_atomic(path / "config.json", config_to_json(config))
        named(path, device="cpu", training_flops_per_second=9e12)
        assert list_runs([path])[0].changes == {}
        named(path, training_flops_per_second=None)
        assert "batch.total_tokens" in (list_runs([path])[0].changes or {})

    def test_a_loss_to_reach_is_one_change_with_the_validations_that_it_takes(self, tmp_path: Path) -> None:
        config = configure("quickstart", depth=4, horizon=replace(steps(50), until_val_loss=2.0))
        path = write_run(tmp_path / "run", [4.0])
        write_json_atomic(path / "config.json", config_to_json(config))
        assert list_runs([path])[0].changes == {"horizon.until_val_loss": 2.0}

    def test_unfinished_runs_are_read_from_their_last_lines(self, tmp_path: Path) -> None:
        path = write_run(tmp_path / "run", [4.0, 3.0, 2.0], status="running")
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "step": 25, "tokens": 25000, "train_seconds": 25.5}\n{"kind": "eval", "val')
        (run,) = list_runs([tmp_path])
        assert (run.status, run.val_bpb, run.tokens, run.training_seconds) == ("killed", 2.0, 25_000, 25.5)
        with RunDirectory(path).lock():
            assert list_runs([tmp_path])[0].status == "running"
        (path / "metrics.jsonl").write_bytes(b"")
        assert list_runs([tmp_path])[0].val_bpb is None

    def test_metrics_of_finished_runs_are_not_read(self, tmp_path: Path) -> None:
        path = write_run(tmp_path / "run", [4.0, 3.0])
        (path / "metrics.jsonl").write_text('{"kind": "eval", damaged\n')
        assert list_runs([tmp_path])[0].val_bpb == 3.0

    def test_folders_are_searched_but_neither_runs_nor_links(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "sweeps" / "a" / "run", [4.0])
        shutil.copytree(run, run / "checkpoints" / "step-00000001")
        outside = write_run(tmp_path / "outside", [4.0])
        (tmp_path / "sweeps" / "link").symlink_to(outside)
        exported = tmp_path / "sweeps" / "exported"
        exported.mkdir()
        (exported / "config.json").write_text('{"model_type": "gpt2"}')
        assert [one.path for one in list_runs([tmp_path / "sweeps"])] == [run]
        assert [one.path for one in list_runs([run, tmp_path / "sweeps"])] == [run]
        with pytest.raises(UserError, match="there is no folder"):
            list_runs([tmp_path / "missing"])

    def test_damage_is_a_line_and_no_end(self, tmp_path: Path) -> None:
        for name, text in {"no-json": "{", "foreign": '{"a": 1}', "nan": '{"a": NaN}', "deep": "[" * 1000}.items():
            (write_run(tmp_path / name, [4.0]) / "config.json").write_text(text)
        linked = write_run(tmp_path / "linked", [4.0])
        (linked / "checkpoints").symlink_to(tmp_path)
        (write_run(tmp_path / "summary", [4.0]) / "summary.json").write_text('{"val_bpb": [], "total_tokens_M": "inf"}')
        (write_run(tmp_path / "metrics", [4.0], status="failed") / "metrics.jsonl").write_text('{"kind": "eval",\n')
        strange = of_recipe(tmp_path / "strange", model__n_layer=[4], recipe_arguments=[{}])
        (strange / "run.json").unlink()
        runs = {run.path.name: run for run in list_runs([tmp_path])}
        damaged = {"no-json", "foreign", "nan", "deep", "linked", "metrics"}
        assert {name for name, run in runs.items() if run.status == "damaged"} == damaged
        assert all((runs[name].problem or "").count(name) for name in damaged)
        assert (runs["summary"].val_bpb, runs["summary"].tokens) == (None, None)
        assert (runs["strange"].status, runs["strange"].changes) == ("unknown", None)
        assert removals([*runs.values()], keep_best=0, failed=True, checkpoints=True) == []


class TestChoosing:
    def test_order(self, tmp_path: Path) -> None:
        for number, bpb in enumerate([3.0, 1.0, math.nan, 2.0]):
            named(write_run(tmp_path / f"{number}", [bpb]), start=f"2026-11-2{number}")
        write_run(tmp_path / "4", [], status="failed")
        runs = list_runs([tmp_path])

        def names(runs: Any) -> str:
            return "".join(run.path.name for run in runs)

        assert names(runs) == "34210"
        assert names(sort_runs(runs, "val_bpb")) == "13042"
        assert names(sort_runs(runs, "val_bpb", reverse=True)) == "03142"
        with pytest.raises(UserError, match="must be one of run, status"):
            sort_runs(runs, "loss")

    def test_conditions(self, tmp_path: Path) -> None:
        of_recipe(tmp_path / "a", seed=7)
        of_recipe(tmp_path / "b", model__activation="gelu")
        write_run(tmp_path / "c", [4.0], status="failed", model__n_layer=2)
        runs = list_runs([tmp_path])

        def names(*conditions: str) -> str:
            return "".join(sorted(run.path.name for run in select_runs(runs, conditions)))

        assert names() == "abc"
        assert names("status=finished") == names("recipe=quick*") == names("model.n_layer=4") == "ab"
        assert names("status=finished", "seed=7") == names("run=*/a") == "a"
        assert (names("val_bpb=3"), names("model.activation=gelu"), names("data.source=stdlib")) == ("ab", "b", "abc")
        assert (names("eval.every_steps=none", "seed=7"), names("val_bpb=3.1")) == ("a", "")
        assert names("data.source=*std*") == names("data.source=stdli?") == names("model.n_embd=[0-9]*") == "abc"
        assert (names("model.activation=gel*"), names("model.n_layer=[!4]"), names("model.bias=f*")) == (
            "b",
            "c",
            "abc",
        )
        write_run(tmp_path / "d", [2.62271234], data__source=("notes[1]", "b.txt"))
        runs = list_runs([tmp_path])
        assert names("val_bpb=2.6227") == names("val_bpb=2.62271234") == names("data.source=b.*") == "d"
        assert names("data.source=notes[1]") == names("data.source=notes[[]1]") == "d"
        assert (names("val_bpb=2.6228"), names("val_bpb=2.622712")) == ("", "")
        write_run(tmp_path / "e", [3.0, 2.9], seconds_per_step=0.96, horizon__unit="seconds", horizon__amount=120)
        runs = list_runs([tmp_path])
        assert (names("depth=2"), names("depth=4"), names("steps=50")) == ("c", "abde", "ab")
        assert (names("minutes=2"), names("minutes=1"), names("seconds=10", "minutes=2")) == ("e", "", "e")
        wrong = {"status": "FIELD=VALUE", "model.n_layr=4": "nearest valid", "seed=x": "whole number"}
        for condition, problem in wrong.items():
            with pytest.raises(UserError, match=problem):
                select_runs(runs, [condition])


class TestPruning:
    def chosen(self, folder: Path, **asked: Any) -> dict[str, bool]:
        """{run: whether all of it goes}."""
        return {one.run.path.name: one.whole for one in removals(list_runs([folder]), **asked)}

    def test_what_is_chosen(self, tmp_path: Path) -> None:
        for name, bpb in {"best": 1.0, "second": 2.0, "third": 3.0, "broken": math.nan}.items():
            with_checkpoint(write_run(tmp_path / name, [bpb]))
        with_checkpoint(write_run(tmp_path / "other-data", [9.0], data_fingerprint="e" * 64))
        with_checkpoint(write_run(tmp_path / "other-share", [9.0], eval__tokens=4096))
        write_run(tmp_path / "bare", [4.0])
        for status in ("failed", "preempted", "running"):
            write_run(tmp_path / f"{status}-bare", [4.0], status=status)  # type: ignore[arg-type]
            with_checkpoint(write_run(tmp_path / f"{status}-saved", [4.0], status=status))  # type: ignore[arg-type]
        named(with_checkpoint(write_run(tmp_path / "imported", [8.0])), imported={"format": "hf"})
        (with_checkpoint(write_run(tmp_path / "annotated", [8.0])) / "notes.md").touch()
        assert self.chosen(tmp_path) == {}
        assert self.chosen(tmp_path, checkpoints=True) == dict.fromkeys(("second", "third", "broken"), False)
        assert self.chosen(tmp_path, checkpoints=True, keep_best=2) == {"third": False, "broken": False}
        assert self.chosen(tmp_path, keep_best=2) == dict.fromkeys(("third", "bare", "broken"), True)
        ended = ("failed-bare", "preempted-bare", "running-bare")
        assert self.chosen(tmp_path, failed=True) == dict.fromkeys(ended, True)
        with RunDirectory(tmp_path / "running-bare").lock():
            assert self.chosen(tmp_path, failed=True) == dict.fromkeys(ended[:2], True)

    def test_checkpoints_go_and_the_record_stays(self, tmp_path: Path) -> None:
        path = with_checkpoint(write_run(tmp_path / "run", [4.0]))
        shutil.copytree(path / "checkpoints", path / "set-aside-1" / "checkpoints")
        before = {file.relative_to(path) for file in path.iterdir()}
        (one,) = removals(list_runs([path]), checkpoints=True, keep_best=0)
        assert one.bytes == 2000
        remove(one)
        assert {file.relative_to(path) for file in path.iterdir()} == before - {Path("checkpoints")}
        assert not list_runs([path])[0].has_checkpoint
        assert removals(list_runs([path]), checkpoints=True, keep_best=0) == []

    def test_a_folder_goes_whole(self, tmp_path: Path) -> None:
        path = write_run(tmp_path / "run", [4.0], status="running")
        (path / "code").mkdir()
        (path / "code" / "changes.patch").touch()
        remove(removals(list_runs([tmp_path]), failed=True)[0])
        assert [*tmp_path.iterdir()] == []

    def test_a_folder_goes_where_no_open_file_can_be_deleted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on Windows, where it is the lock's own business to delete its file."""
        path, unlink = write_run(tmp_path / "run", [4.0], status="running"), Path.unlink

        def refuse(file: Path, missing_ok: bool = False) -> None:
            if file.name == ".lock":
                raise PermissionError(13, "The process cannot access the file", str(file))
            unlink(file, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", refuse)
        remove(removals(list_runs([tmp_path]), failed=True)[0])
        assert [file.name for file in path.iterdir()] == [".lock"]

    def test_what_changed_since_it_was_listed_stays(self, tmp_path: Path) -> None:
        path = write_run(tmp_path / "run", [4.0], status="preempted")
        (one,) = removals(list_runs([tmp_path]), failed=True)
        with RunDirectory(path).lock(), pytest.raises(UserError, match="in use"):
            remove(one)
        with_checkpoint(path)
        with pytest.raises(UserError, match="no longer what was listed"):
            remove(one)
        shutil.rmtree(path / "checkpoints")
        (path / "thesis.tex").touch()
        with pytest.raises(UserError, match="no longer what was listed"):
            remove(one)
        (path / "thesis.tex").unlink()
        (path / "checkpoints").symlink_to(tmp_path)
        with pytest.raises(UserError, match="no longer what was listed"):
            remove(one)
        assert (path / "config.json").exists()


class TestCommand:
    def test_the_table(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert command(["runs"])[::2] == (2, "gptlab: error: there is no folder runs: name one that holds runs\n")
        of_recipe(tmp_path / "runs" / "a", seed=7, model__activation="gelu", runtime__threads=1)
        named(tmp_path / "runs" / "a", start="2026-11-23")
        (write_run(tmp_path / "runs" / "b", [4.0]) / "config.json").write_text("{\x1b[31m")
        code, out, err = command(["runs"])
        assert (code, err) == (0, "")
        heading, first, second = out.splitlines()
        assert heading.split()[:6] == ["run", "status", "val_bpb", "tokens", "seconds", "disk"]
        assert first.split()[:5] == ["runs/a", "finished", "3.0000", "10k", "10"]
        assert first.endswith("quickstart depth=4 steps=50 seed=7 model.activation=gelu")
        assert second.startswith("runs/b  damaged")
        assert "\x1b" not in out
        told = json.loads(command(["runs", "--json", "--where", "status=finished"])[1])["runs"]
        assert (told[0]["depth"], told[0]["horizon"]) == (4, {"amount": 50, "unit": "steps"})
        assert [run["changes"] for run in told] == [{"seed": 7, "model.activation": "gelu", "runtime.threads": 1}]

    def test_a_line_break_in_a_name_is_shown_as_another_character(self, tmp_path: Path) -> None:
        for name in ("plain", "two\nlines", "of\u2028another kind", "\x85"):
            write_run(tmp_path / name, [4.0, 3.0], status="failed")
        code, out, err = command(["runs", tmp_path])
        assert (code, err, out.count("\n")) == (0, "", 5)
        assert "two\N{REPLACEMENT CHARACTER}lines " in out
        code, out, _ = command(["runs", "prune", "--failed", tmp_path, "--yes"])
        assert (code, out.count("\n")) == (0, 6)

    def test_it_fits_a_terminal(self, tmp_path: Path) -> None:
        of_recipe(tmp_path / "quickstart-20261122-170807", seed=7, model__activation="gelu")
        runs = [replace(run, path=Path("runs") / run.path.name) for run in list_runs([tmp_path])]
        lines = [line for row in _lines(runs, 80) for line in row.splitlines()]
        assert max(map(len, lines)) <= 80
        assert lines[2] == "    quickstart depth=4 steps=50 seed=7 model.activation=gelu"
        assert len([*_lines(runs, 200)]) == 2
        of_recipe(tmp_path / "other", seed=7, model__activation="gelu_tanh")
        both = [*_lines(list_runs([tmp_path]), 1000)]
        assert sorted(line.partition("steps=50 ")[2] for line in both) == [
            "", "model.activation=gelu seed=7", "model.activation=gelu_tanh seed=7"  # what all have comes last
        ]  # fmt: skip

    def test_a_long_name_stands_above_its_figures(self, tmp_path: Path) -> None:
        for name in ("short", "nanogpt-shakespeare-char-20261127-234002"):
            of_recipe(tmp_path / name, seed=7, model__activation="gelu")
        runs = [replace(run, path=Path("runs") / run.path.name) for run in list_runs([tmp_path])]
        lines = [line for row in _lines(runs, 80) for line in row.splitlines()]
        assert max(map(len, lines)) <= 80
        assert len(lines) == 1 + 3 * 2
        assert {lines[1], lines[4]} == {"runs/short", "runs/nanogpt-shakespeare-char-20261127-234002"}
        for line in (lines[2], lines[5]):
            assert line.split()[:2] == ["finished", "3.0000"]
            assert line.index("finished") == lines[0].index("status")

    def test_pruning_asks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_run(tmp_path / "runs" / "a", [4.0], status="failed")
        monkeypatch.chdir(tmp_path)
        assert command(["runs", "prune", "--checkpoints"])[:2] == (0, "nothing to delete\n")
        code, out, err = command(["runs", "prune", "--failed"])
        assert (code, "runs/a" in out, "--yes deletes without asking" in err, path.exists()) == (2, True, True, True)
        monkeypatch.setattr("gptlab.cli.runs.sys.stdin", Answers("no\n", "y\n"))
        code, out, err = command(["runs", "prune", "--failed"])
        assert (code, path.exists()) == (0, True)
        assert out.endswith(" kB of 1 run? [y/N] nothing was deleted\n")
        code, out, err = command(["runs", "prune", "--failed"])
        assert (code, path.exists()) == (0, False)
        write_run(path, [4.0], status="failed")
        assert command(["runs", "prune", "--failed", "--yes"])[0] == 0
        assert not path.exists()
        assert command(["runs", "prune"])[0] == 2

    def test_a_lab_stays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        lab = tmp_path / "labs" / "night"
        (lab / "baseline").mkdir(parents=True)
        (lab / "lab.json").touch()
        (lab / "baseline" / "config.json").write_text("{}")
        write_run(lab / "work" / "1", [4.0], status="failed")
        monkeypatch.chdir(tmp_path)
        assert command(["runs", "prune", "--failed", "labs", "--yes"])[:2] == (0, "nothing to delete\n")
        assert "baseline" not in command(["runs", "labs"])[1]


class Answers:
    """A terminal in which somebody types these lines."""

    def __init__(self, *lines: str) -> None:
        self.lines = [*lines]

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self.lines.pop(0)
