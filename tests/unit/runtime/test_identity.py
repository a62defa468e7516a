"""A checkpoint knows its run: no other run's is used, and no configuration but the one that it was trained with."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracle_checkpoint import tree
from tiny_runs import Outcome, arguments, at_line, command, differences, killed_at, outcome, train, write_corpus

from gptlab.runtime.records.identity import change_config
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.load import load_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.write import save_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a run that was killed in step 10, and a finished one that differs in nothing but its seed."""
    folder = tmp_path_factory.mktemp("identity")
    write_corpus(folder / "corpus")
    with killed_at("train", 9):
        train(folder, "killed")
    train(folder, "another", seed=2)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Outcome:
    return outcome(train(folder, "whole"))


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    """The killed run, in a folder of another name."""
    shutil.copytree(folder / "killed", tmp_path / "renamed")
    return tmp_path / "renamed"


def edit(run: Path, field: str, value: object) -> None:
    config = json.loads((run / "config.json").read_text())
    *groups, name = field.split(".")
    place = config
    for group in groups:
        place = place[group]
    assert name in place
    place[name] = value
    (run / "config.json").write_text(json.dumps(config))


def resealed(checkpoint: Path, alter: Callable[[dict[str, Any]], object]) -> None:
    """Save a checkpoint again with another state.json."""
    saved = load_checkpoint(checkpoint)
    alter(saved.state)
    save_checkpoint(checkpoint.parent, saved.step, model=saved.model, optimizer=saved.optimizer, state=saved.state)


def refused(*words: object) -> str:
    code, _, err = command(words)
    assert (code, err.count("\n")) == (2, 1), err
    return err


def test_id_and_hash_stand_in_every_checkpoint(folder: Path) -> None:
    """The hash is that of config.json as any program computes it: sorted keys, Python's separators."""
    for name in ("killed", "another"):
        record = json.loads((folder / name / "run.json").read_text())
        config = json.loads((folder / name / "config.json").read_text())
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
        assert record["config_sha256"] == digest
        for path in list_checkpoints(folder / name / "checkpoints"):
            of_run = json.loads((path / "state.json").read_text())["run"]
            assert (of_run["id"], of_run["config_sha256"]) == (record["run_id"], digest)
            assert of_run["config"] == config
            assert of_run["data_fingerprint"] == record["data_fingerprint"]
    assert json.loads((folder / "killed/run.json").read_text())["run_id"] != record["run_id"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("seed", 2, "seed = 2, not 1337"),
        ("optim.muon.lr", 0.5, "optim.muon.lr = 0.5, not 0.02"),
        ("horizon.amount", 24.0, "horizon.amount = 24.0, not 12"),
        ("batch.micro_sequences", 8, "batch.micro_sequences = 8, not 4"),
    ],
)
def test_an_edited_configuration_is_refused_by_field(run: Path, field: str, value: object, says: str) -> None:
    edit(run, field, value)
    before = tree(run)
    err = refused("train", "--resume", run)
    assert says in err
    assert "config.json was edited after step-00000008 was saved" in err
    assert f"--from {run}" in err
    assert tree(run) == before | {".lock": b""}


def test_reading_commands_report_an_edited_configuration(run: Path) -> None:
    edit(run, "optim.muon.lr", 0.5)
    code, out, err = command(["sample", run, "--prompt", "the ", "--max-tokens", 2])
    assert code == 0
    assert "config.json was edited after step-00000008 was saved (optim.muon.lr = 0.5" in out + err


def test_what_decides_nothing_that_is_computed_may_change(run: Path, tmp_path: Path, expected: Outcome) -> None:
    """The folder has moved, and so have corpus and cache; a full disk asked for fewer checkpoints."""
    edit(run, "run_dir", str(run))
    edit(run, "data.cache_dir", str(tmp_path / "another-cache"))
    edit(run, "checkpoint.on_failure", "continue")
    code, out, err = command(["train", "--resume", run])
    assert (code, err) == (0, "")
    assert "edited" not in out
    assert differences(expected, outcome(run)) == []


def test_when_a_run_saves_may_change(run: Path, expected: Outcome) -> None:
    before = (run / "config.json").read_bytes()
    words = ["--checkpoint.every-steps", 5, "--checkpoint.every-seconds", 3600, "--checkpoint.keep-last", 9]
    code, out, err = command(["train", "--resume", run, *words])
    assert (code, err, "bit for bit" in out) == (0, "", False)
    assert [path.name[-2:] for path in list_checkpoints(run / "checkpoints")] == ["04", "08", "10", "12"]
    assert (run / "config.json").read_bytes() == before
    lines = [[line for line in of.lines if '"checkpoint"' not in line] for of in (outcome(run), expected)]
    assert lines[0] == lines[1]


def test_unless_a_spike_rewinds_to_a_checkpoint(run: Path) -> None:
    """When the run saves then decides what it computes, so run.json records it."""
    words = ["--faults.spike-factor", 50, "--checkpoint.every-steps", 5, "--checkpoint.keep-last", 9]
    code, out, err = command(["train", "--resume", run, *words])
    assert (code, err) == (0, "")
    said = "faults.spike_factor = 50.0 (was None) from step 8 on: the run may end as another one, not bit for bit"
    assert f"warning: checkpoint.every_steps = 5 (was 4), {said}" in out
    (change,) = json.loads((run / "run.json").read_text())["config_changes"]
    assert change["fields"] == {"checkpoint.every_steps": [4, 5], "faults.spike_factor": [None, 50.0]}
    config = json.loads((run / "config.json").read_text())
    assert (config["checkpoint"]["every_steps"], config["faults"]["spike_factor"]) == (5, 50.0)
    assert command(["train", "--resume", run, "--resume-from-step", 8])[0] == 0  # saved before the change
    edit(run, "checkpoint.every_steps", 6)
    assert "checkpoint.every_steps = 6, not 5" in refused("train", "--resume", run, "--resume-from-step", 10)


def test_another_runs_checkpoint_is_refused(folder: Path, run: Path, tmp_path: Path) -> None:
    """It has the same shapes, and would be the newest."""
    foreign = run / "checkpoints/step-00000012"
    shutil.copytree(folder / "another/checkpoints/step-00000012", foreign)
    before = tree(run)
    for words in (
        ["train", "--resume", run], ["eval", run], ["sample", run, "--prompt", "a"],
        ["export", run, tmp_path / "exported"], ["sample", run, "--prompt", "a", "--checkpoint", "12"],
    ):  # fmt: skip
        err = refused(*words)
        assert f"{foreign} is a checkpoint of another run" in err
        assert f"move it out of {foreign.parent}" in err
    assert tree(run) == before | {".lock": b""}
    shutil.rmtree(foreign)
    assert command(["train", "--resume", run])[0] == 0


def test_one_checkpoint_of_another_run_is_no_start_for_a_third(folder: Path, run: Path, tmp_path: Path) -> None:
    for path in list_checkpoints(run / "checkpoints"):
        shutil.rmtree(path)
    shutil.copytree(folder / "another/checkpoints/step-00000012", run / "checkpoints/step-00000012")
    words = arguments(folder, "third", {"run_dir": tmp_path / "third", "init_from": run})
    assert "is a checkpoint of another run" in refused("train", *words)


@pytest.mark.skipif(os.name == "nt", reason="Windows moves no folder with an open file")
@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_folder_is_moved_while_it_trains(
    folder: Path, tmp_path: Path, expected: Outcome, replaced: bool
) -> None:
    """It made the folder again, without a configuration, or saved into the run that was there instead."""
    run, moved = tmp_path / "run", tmp_path / "moved"

    def move() -> None:
        run.rename(moved)
        if replaced:
            shutil.copytree(folder / "another", run)

    words = arguments(folder, "run", {"run_dir": run, "checkpoint.background": False})
    with at_line("train", 6, move):
        code, _, err = command(["train", *words])
    remedy = "continue it where it is now, with gptlab train --resume FOLDER"
    says = f"gptlab: error: the run folder {run} was moved or removed while it trained: {remedy}\n"
    assert (code, err) == (2, says)
    assert (tree(run) == tree(folder / "another")) if replaced else not run.exists()
    assert command(["train", "--resume", moved])[0] == 0
    assert differences(expected, outcome(moved)) == []


def test_a_run_of_an_older_gptlab_resumes_with_a_word(run: Path, expected: Outcome) -> None:
    """Neither its checkpoints nor its run.json name the run; from now on they do."""
    for path in list_checkpoints(run / "checkpoints"):
        resealed(path, lambda state: state.pop("run"))
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({k: v for k, v in record.items() if k not in ("run_id", "config_sha256")}))
    code, out, err = command(["sample", run, "--prompt", "the ", "--max-tokens", 2])
    assert (code, "warning" in out + err) == (0, False)
    code, out, _ = command(["train", "--resume", run])
    assert code == 0
    assert "step-00000008 does not say which run it is of" in out
    assert differences(expected, outcome(run)) == []
    last = json.loads((run / "checkpoints/step-00000012/state.json").read_text())
    assert last["run"]["id"] == json.loads((run / "run.json").read_text())["run_id"]


@pytest.mark.parametrize("value", [None, [], {}, {"id": 3, "config": {}}, {"id": "x", "config": []}, "x"], ids=repr)
def test_nonsense_about_the_run_is_one_line(run: Path, value: object) -> None:
    resealed(run / "checkpoints/step-00000008", lambda state: state.update(run=value))
    assert "was not written by gptlab" in refused("train", "--resume", run)
    assert "was not written by gptlab" in refused("sample", run, "--prompt", "a")


def test_a_change_that_gptlab_made_is_recorded_and_resumes(run: Path) -> None:
    """What `change_config` does stands in run.json; the same field edited by hand afterwards is refused."""
    directory = RunDirectory.open(run)
    config = directory.read_config()
    horizon = config["horizon"]
    assert isinstance(horizon, dict)
    change_config(directory, config | {"horizon": horizon | {"amount": 10.0}}, step=8)
    (change,) = json.loads((run / "run.json").read_text())["config_changes"]
    assert change["step"] == 8
    assert change["fields"] == {"horizon.amount": [12, 10.0]}
    edit(run, "horizon.amount", 11.0)
    assert "horizon.amount = 11.0, not 12" in refused("train", "--resume", run)
    edit(run, "horizon.amount", 10.0)
    edit(run, "seed", 3)
    assert "seed = 3" in refused("train", "--resume", run)
    edit(run, "seed", 1337)
    assert command(["train", "--resume", run])[0] == 0
    assert list_checkpoints(run / "checkpoints")[-1].name == "step-00000010"
    assert "is finished; to train it on" in command(["train", "--resume", run])[1]


@pytest.mark.parametrize(
    "harm",
    [Path.unlink, lambda p: p.write_bytes(b"{"), lambda p: p.write_bytes(b"[]")],
    ids=["lost", "cut off", "a list"],
)
def test_a_lost_or_damaged_run_json_is_replaced(run: Path, expected: Outcome, harm: Callable[[Path], object]) -> None:
    """The checkpoint says which run it is and on which data it was trained; what was damaged is kept beside it."""
    before = json.loads((run / "run.json").read_text())
    harm(run / "run.json")
    damaged = (run / "run.json").read_bytes() if (run / "run.json").exists() else None
    code, out, err = command(["train", "--resume", run])
    assert (code, err) == (0, "")
    assert "run.json was lost or damaged: it now says what this process knows" in out
    assert differences(expected, outcome(run)) == []
    after = json.loads((run / "run.json").read_text())
    for fact in ("run_id", "config_sha256", "data_fingerprint", "tokenizer_fingerprint", "torch_version"):
        assert after[fact] == before[fact]
    assert (after["status"], len(after["resumes"])) == ("finished", 1)
    assert "repaired" in after
    kept = run / "run.json.damaged"
    assert (kept.read_bytes() if kept.exists() else None) == damaged


def test_other_data_is_noticed_without_run_json(folder: Path, run: Path, tmp_path: Path) -> None:
    (run / "run.json").unlink()
    write_corpus(tmp_path / "corpus", documents=19)
    edit(run, "data.source", [str(tmp_path / "corpus")])
    assert "the data is not what" in refused("train", "--resume", run)


def test_a_tokenizer_of_another_size_is_other_data(folder: Path, tmp_path: Path) -> None:
    """A tokenizer of characters has as many entries as the text has characters: the error named a field that nobody
    had given."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\n" * 99)
    run = train(folder, "of-characters", tokenizer__kind="char", data__source=[text], steps=1)
    text.write_text("the quick brown fox naps\n" * 99)
    err = refused("train", "--resume", run, "--steps", 2)
    assert "to resume a run, bring back the data that it was trained on" in err


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_a_lost_or_damaged_tokenizer_is_written_again(run: Path, expected: Outcome, name: str, how: str) -> None:
    whole = tree(run / "tokenizer")
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if how == "damaged":
        path.write_bytes(b"{}") if name.endswith("json") else path.mkdir()
    code, out, err = command(["train", "--resume", run])
    assert (code, err) == (0, "")
    (said,) = [line for line in out.splitlines() if line.endswith("written again")]
    assert str(run / "tokenizer") in said
    assert tree(run / "tokenizer") == whole
    assert differences(expected, outcome(run)) == []
