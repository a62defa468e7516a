"""`gptlab train --from RUN`: the same losses bit for bit where nothing differs, and a line for whatever does."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Outcome, command, differences, outcome, train

import gptlab
from gptlab.app.run.attempt import Attempt
from gptlab.app.run.earlier_run import open_repeated
from gptlab.app.run.repeat import repeated_config, stored_config, what_differs
from gptlab.app.run.run_request import TrainArguments
from gptlab.cli.arguments.parser import read_request
from gptlab.config.errors import UserError
from gptlab.config.length import Horizon
from gptlab.config.load import apply_overrides, config_to_json
from gptlab.config.recipes import quickstart
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.provenance import PATCH_NAME, ZIP_NAME
from gptlab.runtime.records.run_directory import RunDirectory


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    return train(folder, "whole", steps=6)


@pytest.fixture(scope="module")
def expected(whole: Path) -> Outcome:
    return outcome(whole)


def facts(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "run.json").read_text())
    return values


class TestRepeats:
    def test_twice_over_it_is_the_same_run(self, folder: Path, whole: Path, expected: Outcome) -> None:
        """A repeated run may itself be repeated: its own configuration is whole."""
        code, out, err = command(["train", "--from", whole, "--run-dir", folder / "second"])
        assert (code, err, out.count("warning")) == (0, "", 0)
        assert command(["train", "--from", folder / "second", "--run-dir", folder / "third"])[0] == 0
        assert differences(expected, outcome(folder / "second")) == []
        assert differences(expected, outcome(folder / "third")) == []
        assert facts(whole)["from"] is None
        assert facts(folder / "third")["from"] == str(folder / "second")

    def test_in_a_folder_of_its_own(self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
        monkeypatch.chdir(tmp_path)
        assert command(["train", "--from", whole, "--steps", 1])[0] == 0
        (made,) = Path("runs").iterdir()
        assert made.name.startswith("quickstart-")
        assert json.loads((made / "config.json").read_text())["run_dir"] is None
        assert {path: path.read_bytes() for path in before} == before

    def test_from_python(self, folder: Path, whole: Path, expected: Outcome) -> None:
        result = gptlab.train(from_run=whole, run_dir=folder / "python")
        assert (result.exit_code, result.run_dir) == (0, folder / "python")
        assert differences(expected, outcome(folder / "python")) == []
        with pytest.raises(UserError, match="one of"):
            gptlab.train(from_run=whole, resume=whole)
        with pytest.raises(UserError, match="one of"):
            gptlab.train(stored_config(RunDirectory(whole)), from_run=whole)
        with pytest.raises(UserError, match="has another configuration: seed: 1337 vs 2"):
            gptlab.train(resume=whole, seed=2)

    def test_a_changed_field_changes_the_run(self, folder: Path, whole: Path, expected: Outcome) -> None:
        run = folder / "other-seed"
        assert command(["train", "--from", whole, "--run-dir", run, "--seed", 7])[0] == 0
        assert differences(expected, outcome(run)) != []


def save(folder: Path, config: RunConfig, **provenance: object) -> RunDirectory:
    """A run folder with nothing in it but how the run was configured and where it ran."""
    return RunDirectory.create(folder, config_to_json(config), provenance)


def repeated(run: RunDirectory, *argv: str) -> RunConfig:
    request = read_request(["--from", str(run.path), *argv], TrainArguments, prog="gptlab train", description="")
    return repeated_config(request, run)


class TestConfiguration:
    def test_is_that_of_the_run_but_for_its_place(self, tmp_path: Path) -> None:
        config = apply_overrides(RunConfig(), {"seed": 5, "run_dir": "runs/a", "model.vocab_size": 300})
        again = repeated(save(tmp_path / "r", config))
        assert again == apply_overrides(config, {"run_dir": None, "model.vocab_size": None})

    def test_flags_replace_its_fields(self, tmp_path: Path) -> None:
        config = apply_overrides(RunConfig(), {"horizon.until_val_loss": 2.5, "eval.every_steps": 9})
        again = repeated(save(tmp_path / "r", config), "--tokens", "1e6", "--optim.muon.lr", "0.5", "--data", "a,b")
        assert again.horizon == Horizon(amount=1e6, unit="tokens", until_val_loss=2.5)
        assert (again.optim.muon.lr, again.data.source) == (0.5, ("a", "b"))

    def test_a_length_alone_leaves_the_model_as_it_was(self, tmp_path: Path) -> None:
        """With a recipe, --minutes 30 makes a larger model; with --from it is that model, trained longer."""
        machine = Machine(device="cpu", flops_per_second=4e11)
        config = quickstart(machine=machine)
        again = repeated(save(tmp_path / "r", config, device="cpu", training_flops_per_second=4e11), "--minutes", "30")
        assert (again.model, again.batch, again.optim) == (config.model, config.batch, config.optim)
        assert again.horizon == Horizon(amount=1800.0, unit="seconds")

    def test_depth_is_the_recipes_dial_and_keeps_what_was_changed(self, tmp_path: Path) -> None:
        machine = Machine(device="cpu", flops_per_second=4e11)

        def changed(depth: int) -> RunConfig:
            changes = {"optim.muon.lr": 0.5, "eval.tokens": 4096, "data.source": ("notes",)}
            return apply_overrides(quickstart(depth=depth, machine=machine), changes)

        run = save(tmp_path / "r", changed(3), device="cpu", training_flops_per_second=4e11)
        assert repeated(run, "--depth", "6") == changed(6)
        assert changed(6).model.n_embd != changed(3).model.n_embd
        assert repeated(run, "--depth", "6", "--model.n-layer", "5").model.n_layer == 5

    def test_depth_needs_a_recipe_that_is_known(self, tmp_path: Path) -> None:
        run = save(tmp_path / "r", RunConfig(recipe="mine"))
        with pytest.raises(UserError, match=r"--depth = 6: the recipe 'mine' .* give --model.n-layer"):
            repeated(run, "--depth", "6")


NOW: dict[str, object] = {
    "gptlab_version": "0.1.0", "git_commit": "b" * 40, "git_dirty": False, "code_fingerprint": "two",
    "python_version": "3.11.7", "torch_version": "2.13.0", "cuda_version": None, "device_name": "EPYC", "cpu": "EPYC",
    "dtype": "bfloat16", "threads": 2, "world_size": 1, "data_fingerprint": "d", "tokenizer_fingerprint": "t",
}  # fmt: skip


class TestWarnings:
    @staticmethod
    def lines(
        folder: Path, asked: dict[str, Any] | None = None, files: tuple[str, ...] = (), **then: object
    ) -> list[str]:
        run = save(folder / "r", RunConfig(), **(NOW | then))
        run.write_files({f"code/{name}": b"" for name in files})
        return [line.replace(str(folder), "") for line in what_differs(run, NOW, asked or {})]

    def test_a_configuration_that_is_no_run(self, tmp_path: Path) -> None:
        """As of a lab's baseline: nothing is known of it, and nothing is lost."""
        (tmp_path / "config.json").touch()
        assert [*what_differs(RunDirectory(tmp_path), NOW, {})] == []

    def test_another_number_of_processes_that_changes_nothing(self, tmp_path: Path) -> None:
        run = save(tmp_path / "r", RunConfig(), **(NOW | {"world_size": 2}))
        (said,) = what_differs(run, NOW, {})
        assert "world_size 2 -> 1" in said
        assert [*what_differs(run, NOW, {}, any_world_size=True)] == []

    def test_nothing_differs(self, tmp_path: Path) -> None:
        # Another commit with the same code is the same code.
        assert self.lines(tmp_path, git_commit="a" * 40, git_dirty=True, start="then", argv=["x"], platform="P") == []

    @pytest.mark.parametrize(
        ("then", "files", "says"),
        [
            (
                {"git_commit": "a" * 40}, (),
                f"the code is not that of /r (commit {'a' * 12} -> commit {'b' * 12}); to have it: git checkout "
                + "a" * 40,
            ),
            (
                {"git_commit": "a" * 40, "git_dirty": True}, (PATCH_NAME,),
                f"the code is not that of /r (commit {'a' * 12} and changes -> commit {'b' * 12}); to have it: git "
                f"checkout {'a' * 40} && git apply /r/code/changes.patch",
            ),
            (
                {"git_commit": None, "git_dirty": None}, (ZIP_NAME,),
                f"the code is not that of /r (gptlab 0.1.0, of no commit -> commit {'b' * 12}); to have it: unzip "
                "/r/code/gptlab.zip -d FOLDER, then PYTHONPATH=FOLDER python -m gptlab",
            ),
        ],
    )  # fmt: skip
    def test_of_the_code(self, tmp_path: Path, then: dict[str, object], files: tuple[str, ...], says: str) -> None:
        assert self.lines(tmp_path, files=files, code_fingerprint="one", **then) == [says]

    def test_of_environment_machine_and_data(self, tmp_path: Path) -> None:
        then = {"torch_version": "2.12.1", "threads": 4, "dtype": "float32", "data_fingerprint": "x"}
        assert self.lines(tmp_path, **then) == [
            "the environment is not that of /r (torch_version 2.12.1 -> 2.13.0); /r/environment.txt lists it",
            "the machine is not that of /r (dtype float32 -> bfloat16, threads 4 -> 2): close to, not bit for bit",
            "the data is not that of /r (data_fingerprint x -> d)",
        ]

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ([{"step": 10, "fields": {"horizon.amount": [10.0, 14.0]}}], ["step 10 (horizon.amount)"]),
            ([{"step": 0, "fields": {"batch.micro_sequences": [8, 4]}}], []),
            ([{"step": 9}, {"step": "9", "fields": {}}, {"step": 9, "fields": []}, 3], []),
            ({"step": 10}, []),
        ],
        ids=["trained on", "before the first step", "nonsense", "no list"],
    )
    def test_of_the_configuration_while_it_trained(self, tmp_path: Path, changes: object, says: list[str]) -> None:
        """Its config.json is not what its first steps were trained with."""
        ends = "and here holds from the first step on: not bit for bit"
        found = self.lines(tmp_path, config_changes=changes)
        assert found == [f"the configuration of /r changed after {one}, {ends}" for one in says]
        assert [*what_differs(RunDirectory(tmp_path / "r"), NOW, {}, resumes=True)] == []
        assert [*what_differs(RunDirectory(tmp_path / "r"), NOW, {"horizon.amount": 5.0})] == []

    def test_not_of_what_was_asked_for(self, tmp_path: Path) -> None:
        then = {"device_name": "H200", "threads": 4, "dtype": "float32", "data_fingerprint": "x"}
        asked: dict[str, Any] = {"runtime.device": "cpu", "runtime.threads": 2, "runtime.dtype": "bfloat16"}
        assert self.lines(tmp_path, asked | {"tokenizer.kind": "byte"}, **then) == []

    def test_what_is_given_as_it_was_is_expected_to_be_the_same(self, tmp_path: Path) -> None:
        """So `gptlab sweep` gives the data to every run, and a run says if it has changed since the first one."""
        run = save(tmp_path / "r", apply_overrides(RunConfig(), {"data.source": ("a", "b")}))
        words = ["--from", str(run.path), "--data", "a,b", "--tokenizer.kind", "byte"]
        request = read_request(words, TrainArguments, prog="gptlab train", description="")
        assert open_repeated(request, Attempt(Console(), (), 0.0)).asked == {"tokenizer.kind": "byte"}

    def test_on_the_command_line(self, folder: Path, whole: Path) -> None:
        shutil.copytree(whole, folder / "older")
        record = facts(folder / "older") | {"torch_version": "1.0", "code_fingerprint": "x"}
        (folder / "older" / "run.json").write_text(json.dumps(record))
        code, out, _ = command(["train", "--from", folder / "older", "--steps", 1, "--run-dir", folder / "newer"])
        warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
        assert code == 0
        assert [warning.split(" is not that of ")[0] for warning in warnings] == [
            "warning: the code", "warning: the environment",
        ]  # fmt: skip

    def test_where_nobody_knows(self, folder: Path, whole: Path) -> None:
        shutil.copytree(whole, folder / "lost")
        (folder / "lost" / "run.json").write_text("{ torn")
        code, out, _ = command(["train", "--from", folder / "lost", "--steps", 1, "--run-dir", folder / "found"])
        assert code == 0
        assert out.count("run.json is lost or damaged: what") == 1


class TestRefusals:
    @pytest.fixture(autouse=True)
    def in_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def refused(self, *argv: str) -> str:
        code, out, err = command(["train", *argv])
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert [path.name for path in Path().rglob("*") if path.name.startswith("quickstart-")] == []
        return err

    @pytest.mark.parametrize("other", ["quickstart", "night.toml", "--resume runs/y"])
    def test_a_second_thing_to_train(self, other: str) -> None:
        assert f"--from runs/x and {other} both say what to train" in self.refused("--from", "runs/x", *other.split())

    def test_folders_that_are_no_runs(self) -> None:
        assert "there is no run folder runs/x" in self.refused("--from", "runs/x")
        Path("notes").mkdir()
        assert "notes is not a run folder: it has no config.json" in self.refused("--from", "notes")
        Path("file").touch()
        assert "there is no run folder file" in self.refused("--from", "file")

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("{ torn", "is damaged: it is not JSON"),
            ("[1]", "is damaged: it should hold one JSON object"),
            ('{"n_layer": 12}', "cannot be used: schema_version = None: not the configuration"),
            ('{"schema_version": 99}', "cannot be used: schema_version = 99: written by a newer gptlab"),
            ('{"schema_version": 1, "seed": 3}', "cannot be used: the configuration lacks recipe"),
        ],
    )
    def test_configurations_that_are_none(self, text: str, says: str) -> None:
        Path("r").mkdir()
        Path("r/config.json").write_text(text)
        error = self.refused("--from", "r")
        assert "r/config.json" in error
        assert says in error

    def test_fields_that_cannot_be(self, tmp_path: Path) -> None:
        save(tmp_path / "r", dataclasses.replace(RunConfig(), seed=3))
        assert "model.n_head = 7" in self.refused("--from", "r", "--model.n-head", "7")
        assert "there is no such field" in self.refused("--from", "r", "--model.n-heads", "2")

    def test_the_folder_of_the_run_itself(self, tmp_path: Path) -> None:
        save(tmp_path / "r", RunConfig())
        assert "already holds a run" in self.refused("--from", "r", "--run-dir", "r")
