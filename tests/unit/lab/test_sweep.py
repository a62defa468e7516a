"""Which runs a sweep trains, in which order, and what it does about those that stopped or failed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked
from tiny_runs import arguments, command, write_corpus
from written_runs import write_run

from gptlab.app.run.repeat import repeated_config
from gptlab.cli.arguments.parser import read_request
from gptlab.cli.main import main
from gptlab.cli.sweep import SweepArguments, asked_sweep, config_of, read_vary
from gptlab.config.errors import UserError
from gptlab.config.load import config_to_json
from gptlab.config.recipes import quickstart
from gptlab.lab import sweep as sweeping
from gptlab.lab.launch import Stop, resumed_arguments
from gptlab.lab.sweep import Sweep, begin_sweep, locked, read_sweep, sides_of, train_sweep, variants_of, words_of
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.run_directory import RunDirectory


def make_sweep(folder: Path, seeds: Sequence[int] = (1, 2), **vary: Sequence[Any]) -> Sweep:
    fields = {name.replace("__", "."): values for name, values in vary.items()}
    return Sweep(folder / "sweep", "sweep", {"recipe": "quickstart", "steps": 20}, fields, list(seeds))


class Launches:
    """Stands for `launch`: writes what a run leaves, ends with the code that is given for its name, and takes notes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **codes: int) -> None:
        self.codes = {name.replace("_", "-"): code for name, code in codes.items()}
        self.seen: list[tuple[str, str]] = []
        monkeypatch.setattr(sweeping, "launch", self)

    def __call__(self, folder: Path, words: Sequence[str], *, log: Path, stop: Stop) -> int:
        code = self.codes.get(folder.name, 0)
        resumed = resumed_arguments(folder)
        self.seen.append((folder.name, " ".join(resumed or words)))
        log.write_text("gptlab: error: no such corpus\nand more\n")
        if code == 130:
            stop.requested = True
        if resumed:
            RunDirectory(folder).set_status("finished" if code == 0 else "preempted")
        elif code != 2:
            status = {0: "finished", 3: "failed"}.get(code, "preempted")
            write_run(folder, [4.0, 3.0], status=status)  # type: ignore[arg-type]
        return code

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.seen]


def train(sweep: Sweep, *, retry_failed: bool = False) -> list[tuple[str, int | None]]:
    begin_sweep(sweep)
    return [(run.name, code) for run, code in train_sweep(sweep, Stop(), retry_failed=retry_failed) if code is not None]


class TestPlan:
    def test_names_say_what_is_varied(self) -> None:
        assert [*variants_of({"model.activation": ["relu2", "gelu"], "depth": [2, 4]})] == [
            "relu2-depth-2", "relu2-depth-4", "gelu-depth-2", "gelu-depth-4"
        ]  # fmt: skip
        assert [*variants_of({"model.qk_norm": [True, False]})] == ["qk_norm-true", "qk_norm-false"]
        assert [*variants_of({"optim.muon.lr": [0.1], "optim.embedding.lr": [1e-5]})] == [
            "optim.muon.lr-0.1-optim.embedding.lr-1e-05"
        ]
        assert [*variants_of({"data": [("a/b",), ("a-b",), ("A-B",)]})] == ["a-b", "a-b-2", "A-B-3"]
        assert [*variants_of({"run": ["../.."]})] == ["run"]
        assert variants_of({}) == {"base": {}}

    def test_every_seed_takes_the_variants_in_another_order(self, tmp_path: Path) -> None:
        runs = make_sweep(tmp_path, seeds=(7, 8, 9), model__activation=["relu2", "gelu", "gelu_tanh"]).runs
        assert [run.name for run in runs] == [
            "relu2-seed-7", "gelu-seed-7", "gelu_tanh-seed-7",
            "gelu-seed-8", "gelu_tanh-seed-8", "relu2-seed-8",
            "gelu_tanh-seed-9", "relu2-seed-9", "gelu-seed-9",
        ]  # fmt: skip
        assert runs[3].changes == {"model.activation": "gelu", "seed": 8}

    def test_others_repeat_the_first_run_that_started(self, tmp_path: Path) -> None:
        sweep = make_sweep(tmp_path, depth=[2, 4])
        first, second = sweep.runs[:2]
        assert sweep.arguments(first, sweep.first_started) == ["quickstart", "--steps=20", "--depth=2", "--seed=1"]
        write_run(second.path, [4.0])
        assert sweep.first_started == second
        assert sweep.arguments(first, second) == [f"--from={second.path}", "--steps=20", "--depth=2", "--seed=1"]
        repeat = Sweep(sweep.folder, "sweep", {"from": "runs/a", "steps": 5}, sweep.vary, [1])
        assert repeat.arguments(first, second) == ["--from=runs/a", "--steps=5", "--depth=2", "--seed=1"]

    def test_a_field_that_equals_the_first_recipe_s_is_that_of_all_depths(self, tmp_path: Path) -> None:
        width = quickstart(depth=2).model.n_embd
        base = {"recipe": "quickstart", "steps": 20, "model.n_embd": width, "model.n_head": 1}
        first, second = (sweep := Sweep(tmp_path, "ladder", base, {"depth": [2, 4]}, [1])).runs
        RunDirectory.create(first.path, config_to_json(config_of({**base, **first.changes})), {})
        words = sweep.arguments(second, first)
        request = read_request(words, SweepArguments, prog="", description="")
        model = repeated_config(request, RunDirectory.open(first.path)).model
        assert (model.n_layer, model.n_embd, model.n_head) == (4, width, 1)

    def test_words_read_back_as_what_they_were(self) -> None:
        values = {
            "recipe": "quickstart", "depth": 3, "steps": 20, "model.qk_norm": False, "eval.every_steps": None,
            "sample.prompts": ("-x", "a b,c"), "data.source": ("a.txt", "b"), "optim.muon.lr": 1e-5,
            "data.val_source": (),
        }  # fmt: skip
        request = read_request(words_of(values), SweepArguments, prog="", description="")
        assert request.config(lambda _: pytest.fail("it has a depth")) == config_of(values)
        assert request.overrides["sample.prompts"] == ("-x", "a b,c")
        assert words_of({"minutes": 3.0, "flops": 1e15, "from": "a.0"}) == [
            "--minutes=3",
            "--flops=1000000000000000",
            "--from=a.0",
        ]


class TestVary:
    def test_values_are_those_of_the_field(self) -> None:
        texts = ["model.activation=relu2,gelu", "--model.n-embd=64,128", "minutes=1,2.5", "eval.every_steps=none,1e2"]
        assert read_vary(texts) == {
            "model.activation": ["relu2", "gelu"], "model.n_embd": [64, 128], "minutes": [1.0, 2.5],
            "eval.every_steps": [None, 100],
        }  # fmt: skip
        assert read_vary(["data.source=a,b", "data.source=c"]) == {"data.source": [("a,b",), ("c",)]}

    @pytest.mark.parametrize("vary", ["steps=5,9", "minutes=5,9", "target_param_data_ratio=5,9"])
    def test_a_length_replaces_that_of_a_file(self, tmp_path: Path, vary: str) -> None:
        file = tmp_path / "base.toml"
        file.write_text('recipe = "nanochat-tiny"\nsteps = 20')
        request = read_request([str(file)], SweepArguments, prog="", description="")
        sweep = asked_sweep(request, "sweep", read_vary([vary]), 1)
        lengths = [config_of({**sweep.base, **run.changes}).horizon.amount for run in sweep.runs]
        assert lengths[0] / lengths[1] == 5 / 9

    def test_a_depth_replaces_the_layers_of_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "base.toml"
        file.write_text('recipe = "quickstart"\nsteps = 20\n[model]\nn_layer = 1')
        request = read_request([str(file)], SweepArguments, prog="", description="")
        sweep = asked_sweep(request, "sweep", read_vary(["depth=2,3"]), 1)
        assert [config_of({**sweep.base, **run.changes}).model.n_layer for run in sweep.runs] == [2, 3]

    def test_what_only_the_variants_make_valid(self) -> None:
        words = ["quickstart", "--depth", "1", "--steps", "5", "--batch.total-tokens", "2048"]
        request = read_request(words, SweepArguments, prog="", description="")
        sweep = asked_sweep(request, "sweep", read_vary(["model.seq-len=64,128"]), 2)
        assert [run.seed for run in sweep.runs] == [1337, 1337, 1338, 1338]

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("model.activatoin=a", "nearest valid: model.activation"),
            ("model.activation=tanh", "must be one of relu2"),
            ("model.n_layer=2,x", "must be a whole number"),
            ("quickstart", "the recipe comes before it"),
            ("seed=1,2", "--seeds"),
            ("run_dir=a", "--name"),
        ],
    )
    def test_what_it_refuses(self, text: str, problem: str) -> None:
        with pytest.raises(UserError, match=problem):
            read_vary([text])

    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            ("--vary model.n_head=3", "model.n_head = 3"),
            ("--vary model.activation=relu2,relu2", "relu2 and relu2-2 are the same configuration"),
            ("--steps 5 --vary minutes=1", "both say how long"),
            ("--vary depth=2,3 --seeds 0", "--seeds = 0"),
            ("--run-dir x", "--name"),
            ("--resume x --steps 3", "give no other argument"),
            ("--resume x", "holds no sweep"),
        ],
    )
    def test_nothing_is_trained_before_all_is_right(
        self, words: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        recipe = [] if "--resume" in words else ["quickstart"]
        code, out, err = command(["sweep", *recipe, *words.split()])
        assert (code, out) == (2, "")
        assert problem in err
        assert [*tmp_path.iterdir()] == []


class TestFolder:
    def test_the_same_is_continued_and_another_is_refused_by_its_field(self, tmp_path: Path) -> None:
        sweep = make_sweep(tmp_path, depth=[2, 3])
        begin_sweep(sweep)
        begin_sweep(sweep)
        assert read_sweep(sweep.folder) == sweep
        for other, difference in (
            (make_sweep(tmp_path, depth=[2, 4]), r"with vary depth = \[2, 3\], not \[2, 4\]"),
            (make_sweep(tmp_path, (1, 2, 3), depth=[2, 3]), r"with seeds = \[1, 2\], not \[1, 2, 3\]"),
            (
                Sweep(sweep.folder, "sweep", {"recipe": "quickstart", "steps": 21}, sweep.vary, [1, 2]),
                "steps = 20, not",
            ),
        ):
            with pytest.raises(UserError, match=difference):
                begin_sweep(other)

    def test_a_folder_of_something_else_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "sweep").mkdir()
        (tmp_path / "sweep" / "thesis.tex").touch()
        with pytest.raises(UserError, match=r"holds no sweep but thesis\.tex"):
            begin_sweep(make_sweep(tmp_path))

    @pytest.mark.parametrize("text", ["[]", "{", '{"format": 2}', '{"format": 1, "kind": "sweep", "base": {}}'])
    def test_a_damaged_file_is_one_line(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(UserError, match=r"sweep\.json"):
            read_sweep(tmp_path)

    def test_two_processes_do_not_train_one_sweep(self, tmp_path: Path) -> None:
        sweep = make_sweep(tmp_path)
        begin_sweep(sweep)
        with locked(sweep), pytest.raises(UserError, match="another process"), locked(sweep):
            pass


class TestTraining:
    def test_what_failed_is_a_result_until_it_shall_be_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sweep = make_sweep(tmp_path, seeds=[1], depth=[2, 3, 4])
        launches = Launches(monkeypatch, depth_3_seed_1=3, depth_4_seed_1=2)
        assert train(sweep) == [("depth-2-seed-1", 0), ("depth-3-seed-1", 3), ("depth-4-seed-1", 2)]
        assert sweep.failures() == {"depth-3-seed-1": 3, "depth-4-seed-1": 2}
        assert [*sweep.statuses().values()] == ["finished", "failed", "failed"]
        assert sweeping.why_failed(sweep.runs[2]) == "no such corpus"
        assert {name: len(runs) for name, runs in sides_of(sweep).items()} == {"depth-2": 1, "depth-3": 1}
        launches.codes.clear()
        assert train(sweep) == [("depth-4-seed-1", 0)]  # its corpus may be there now
        assert sweep.failures() == {"depth-3-seed-1": 3}
        assert train(sweep, retry_failed=True) == [("depth-3-seed-1", 0)]
        assert launches.seen[-1] == ("depth-3-seed-1", f"--resume {sweep.runs[1].path}")
        assert (sweep.failures(), json.loads(sweep.file.read_text())["failed"]) == ({}, {})

    def test_a_failed_run_whose_folder_is_gone_is_trained_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sweep = make_sweep(tmp_path, seeds=[1], depth=[2, 3])
        Launches(monkeypatch, depth_3_seed_1=3)
        train(sweep)
        shutil.rmtree(sweep.runs[1].path)
        assert [*sides_of(sweep)] == ["depth-2"]
        assert [*sweep.statuses().values()] == ["finished", "waiting"]
        assert train(sweep) == [("depth-3-seed-1", 3)]
        assert [*sweep.statuses().values()] == ["finished", "failed"]

    def test_a_run_that_exploded_before_it_validated_counts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sweep = make_sweep(tmp_path, seeds=[1], depth=[2, 3])
        Launches(monkeypatch, depth_3_seed_1=3)
        train(sweep)
        failed = RunDirectory(sweep.runs[1].path)
        failed.metrics_path.write_bytes(b"")
        assert [*sides_of(sweep)] == ["depth-2"]  # as it does not say why it failed
        failed.set_failed("the loss exploded", step=1, loss=9e9)
        assert [*sides_of(sweep)] == ["depth-2", "depth-3"]

    def test_a_signal_ends_the_sweep_and_is_no_failure(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sweep = make_sweep(tmp_path, seeds=[1], depth=[2, 3, 4])
        launches = Launches(monkeypatch, depth_3_seed_1=130)
        assert train(sweep) == [("depth-2-seed-1", 0), ("depth-3-seed-1", 130)]
        assert [*sweep.statuses().values()] == ["finished", "stopped", "waiting"]
        launches.codes.clear()
        assert train(sweep) == [("depth-3-seed-1", 0), ("depth-4-seed-1", 0)]
        assert launches.seen[2][1].startswith("--resume")

    def test_somebody_stopped_one_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sweep = make_sweep(tmp_path, seeds=[1], depth=[2, 3])
        Launches(monkeypatch, depth_2_seed_1=75)
        assert train(sweep) == [("depth-2-seed-1", 75), ("depth-3-seed-1", 0)]
        assert sweep.failures() == {}

    def test_where_the_first_cannot_start_none_can(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sweep = make_sweep(tmp_path, seeds=[1], depth=[2, 3])
        launches = Launches(monkeypatch, depth_2_seed_1=2)
        with pytest.raises(UserError, match="depth-2-seed-1 cannot start: no such corpus"):
            train(sweep)
        assert (launches.names, sweep.failures()) == (["depth-2-seed-1"], {})


class TestCommand:
    WORDS = ("sweep", "quickstart", "--steps", 20, "--vary", "depth=2,3", "--seeds", 1, "--name", "s")

    def test_progress_results_and_exit_codes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        launches = Launches(monkeypatch, depth_2_seed_1337=3, depth_3_seed_1337=130)
        code, out, err = command(self.WORDS)
        assert code == 75
        assert "stopped: 1 of 2 runs have ended; continue with" in err
        lines = out.splitlines()
        assert lines[0] == "sweeps/s: 2 variants x 1 seed = 2 runs"
        assert lines[1].startswith("[1/2] depth-2-seed-1337  failed with 3: ")
        assert lines[2].startswith("[2/2] depth-3-seed-1337  stopped (")
        launches.codes.clear()
        code, out, err = command(["sweep", "--resume", "sweeps/s"])
        assert (code, err) == (0, "")
        assert out.splitlines()[1].startswith("[2/2] depth-3-seed-1337  val_bpb ")
        assert out.splitlines()[-1] == "depth-2-seed-1337: failed"
        assert launches.names == ["depth-2-seed-1337", "depth-3-seed-1337", "depth-3-seed-1337"]

    def test_an_error_says_how_to_try_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Launches(monkeypatch, depth_2_seed_1337=1, depth_3_seed_1337=2)
        code, _, err = command(self.WORDS)
        lines = err.splitlines()
        assert (code, len(lines)) == (2, 2)
        assert lines[0].endswith("sweep --resume sweeps/s --retry-failed")
        assert lines[1].endswith("sweep --resume sweeps/s")

    def test_variants_that_will_not_be_compared_are_told_before_training(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)

        def warned(*words: object) -> str:
            return command(["sweep", "quickstart", "--steps", 20, "--dry-run", *words])[2]

        tokenizers = ("--vary", "tokenizer.vocab-size=512,700")
        assert re.fullmatch(
            r"warning: .* will not be compared: .*--eval.tokens none\n",
            warned(*tokenizers, "--eval.tokens", 4096),
        )
        assert "will not be compared" in warned("--vary", "eval.tokens=4096,8192")
        sources = ("--vary", "data.source=a.txt,b.txt")
        assert "--data.val-source" in warned(*sources, "--eval.tokens", "none")
        assert "--data.val-source" in warned("--vary", "data.split=hash,tail")
        learned = warned(*sources, "--data.val-source", "c.txt")  # a tokenizer of each source counts the tokens
        assert "--eval.tokens none" in learned
        assert "--data.val-source" not in learned
        files = ("--data", "fineweb-edu", "--vary", "data.hub-files=1,2")
        assert "--eval.tokens none" in warned(*files, "--data.val-source", "c.txt")
        assert warned(*sources, "--data.val-source", "c.txt", "--eval.tokens", "none") == ""
        assert warned(*sources, "--data.val-source", "c.txt", "--tokenizer.kind", "byte") == ""
        assert warned(*tokenizers, "--eval.tokens", "none") == warned("--vary", "depth=2,3") == ""

    def test_json_says_why_there_is_no_comparison(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        launches = Launches(monkeypatch, depth_3_seed_1337=2)
        told = json.loads(command([*self.WORDS, "--json"])[1])
        assert told["comparison"] is None
        assert told["not_compared"] == "a comparison needs two sides with at least one run each"
        launches.codes.clear()
        told = json.loads(command([*self.WORDS, "--json"])[1])
        assert (told["comparison"]["at"], told["not_compared"]) == ("seconds", None)

    @pytest.mark.parametrize(
        ("vary", "at"), [("minutes=1,2", "end"), ("horizon.amount=60,90", "end"), ("depth=2,3", "seconds")]
    )
    def test_lengths_are_compared_at_the_end(
        self, vary: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Launches(monkeypatch)
        told = json.loads(command(["sweep", "quickstart", "--vary", vary, "--seeds", 1, "--json"])[1])
        assert told["comparison"]["at"] == at

    def test_a_dry_run_trains_and_writes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        code, out, _ = command([*self.WORDS, "--dry-run"])
        first, second = (line.partition(" train ")[2] for line in out.splitlines())
        assert code == 0
        assert first == "quickstart --steps=20 --depth=2 --seed=1337 --run-dir sweeps/s/depth-2-seed-1337"
        assert second == (
            "--from=sweeps/s/depth-2-seed-1337 --steps=20 --depth=3 --seed=1337 --run-dir sweeps/s/depth-3-seed-1337"
        )
        assert [run["status"] for run in json.loads(command([*self.WORDS, "--dry-run", "--json"])[1])["runs"]] == [
            "waiting", "waiting"
        ]  # fmt: skip
        assert [*tmp_path.iterdir()] == []


def in_this_process(folder: Path, words: Sequence[str], *, log: Path, stop: Stop) -> int:
    """Stands for `launch`: a process would import torch."""
    resumed = resumed_arguments(folder)
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        return main(["train", *(resumed or [*words, "--run-dir", str(folder)])])


def killed_at_step(step: int, time: int) -> Callable[[], None]:
    """Patches what writes metrics: the process is killed when it comes to this training step for the n-th time."""

    def patch() -> None:
        write, seen = MetricsLog.write, list[int]()

        def write_and_die(log: MetricsLog, kind: Any, /, **fields: Any) -> None:
            write(log, kind, **fields)
            seen.extend([1] * (kind == "train" and fields["step"] == step))
            if len(seen) == time:
                os.kill(os.getpid(), signal.SIGKILL)

        MetricsLog.write = write_and_die  # type: ignore[method-assign, assignment]

    return patch


def test_a_killed_sweep_ends_as_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "corpus")
    words = arguments(tmp_path, "unused", {"steps": 8, "sample.prompts": []})
    del words[words.index("--run-dir") : words.index("--run-dir") + 2]
    sweep = ["sweep", *words, "--vary", "model.activation=relu2,gelu", "--seeds", "1", "--json"]
    monkeypatch.setattr(sweeping, "launch", in_this_process)

    def told(name: str) -> Any:
        monkeypatch.chdir(tmp_path / name)
        code, out, err = command(sweep)
        assert code == 0, err
        told = json.loads(out)
        rows = [row for row in told["comparison"]["contrasts"][0]["rows"] if row["at"] != "seconds"]
        return rows, [{**run, "training_seconds": None} for run in told["runs"]]

    for name in ("whole", "first", "second"):
        (tmp_path / name).mkdir()
    whole = told("whole")
    assert [(run["name"], run["status"]) for run in whole[1]] == [
        ("relu2-seed-1337", "finished"), ("gelu-seed-1337", "finished")
    ]  # fmt: skip
    for time, name in enumerate(("first", "second"), start=1):
        monkeypatch.chdir(tmp_path / name)
        kill = killed_at_step(6, time)
        assert run_forked(lambda kill=kill: kill() or main(sweep)).returncode == -signal.SIGKILL  # type: ignore[misc]
        assert told(name) == whole
