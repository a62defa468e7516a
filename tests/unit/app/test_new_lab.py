"""`gptlab lab new`: what a request for a run makes of a lab, before anything is trained."""

from __future__ import annotations

import io
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from lab_world import formula, quiet
from tiny_runs import arguments, write_corpus

import gptlab
from gptlab.app import sizing
from gptlab.app.new_lab import new_lab
from gptlab.app.run import micro_batch
from gptlab.app.run.repeat import repeated_config
from gptlab.app.run.run_request import RunRequest, TrainArguments
from gptlab.cli.arguments.parser import read_request
from gptlab.cli.lab import NewArguments
from gptlab.config.errors import UserError
from gptlab.config.scaling import Machine
from gptlab.data.prepare import prepare
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.overview import best
from gptlab.lab.experiments.proposal import changed_files
from gptlab.lab.experiments.trial import measure_baseline
from gptlab.runtime.hardware import installed
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.run_directory import RunDirectory

TOKENS_A_STEP = 2 * 4 * 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labs")
    write_corpus(folder / "corpus", documents=60)
    return folder


def make(folder: Path, name: str, *length: object) -> Lab:
    words = arguments(folder, "never")
    at = words.index("--run-dir")
    del words[at : at + 2]
    words[words.index("--steps") : words.index("--steps") + 2] = map(str, length)
    request = read_request(words, NewArguments, prog="gptlab lab new", description="")
    return new_lab(folder / name, request, words, Console(stream=io.StringIO()))


def request(folder: Path, *given: str) -> tuple[RunRequest, list[str]]:
    fields = ["--data.cache-dir", str(folder / "cache"), "--model.seq-len", "32", "--data.val-fraction", "0.3"]
    words = [*given, "--data", str(folder / "corpus"), *fields]
    return read_request(words, NewArguments, prog="gptlab lab new", description=""), words


def on_machine(monkeypatch: pytest.MonkeyPatch, flops_per_second: float) -> Machine:
    """A machine whose steps are always timed at this rate."""
    machine = Machine(device="cpu", flops_per_second=flops_per_second)
    monkeypatch.setattr(sizing, "limited_machine", lambda *_: machine)
    monkeypatch.setattr(sizing, "timed_machine", lambda *_: machine)
    return machine


@pytest.mark.parametrize(
    ("length", "seconds", "steps"),
    [
        (("--minutes", 2), 120.0, None),
        (("--steps", 7), None, 7),
    ],
)
def test_length(folder: Path, length: tuple[object, ...], seconds: float | None, steps: int | None) -> None:
    lab = make(folder, "-".join(map(str, length)), *length)
    assert (lab.settings.seconds, lab.settings.steps) == (seconds, steps)
    assert changed_files(Path(gptlab.__file__).parents[1], lab.path / "code") == ()
    stored = lab.baseline_config()
    assert (stored["horizon.unit"], stored["horizon.amount"]) == (
        ("seconds", seconds) if steps is None else ("steps", steps)
    )


def test_tokens_are_whole_steps(folder: Path) -> None:
    lab = make(folder, "tokens", "--tokens", 10 * TOKENS_A_STEP + 5)
    assert (lab.settings.seconds, lab.settings.steps) == (None, 10)  # rounded down, as in a run
    stored = lab.baseline_config()  # as asked: recipes choose another batch for so many steps
    assert (stored["horizon.unit"], stored["horizon.amount"]) == ("tokens", 10 * TOKENS_A_STEP + 5)


@pytest.mark.parametrize("length", [("--minutes", "1"), ("--tokens", "20480")])
def test_another_depth_has_its_own_rates(
    folder: Path, monkeypatch: pytest.MonkeyPatch, length: tuple[str, str]
) -> None:
    """`--depth` in a lab gives what the recipe makes of that depth on the machine and for the length of `lab new`."""
    machine = on_machine(monkeypatch, flops_per_second=2e12)

    def asked(depth: str) -> tuple[RunRequest, list[str]]:
        return request(folder, "quickstart", "--tokenizer.kind", "byte", "--depth", depth, *length)

    lab = new_lab(folder / f"depth{length[0]}", *asked("2"), Console(stream=io.StringIO()))
    deeper = repeated_config(RunRequest(depth=4), RunDirectory(lab.path / "baseline"))
    recipes = asked("4")[0].config(lambda config: machine)
    assert (deeper.model, deeper.batch, deeper.optim) == (recipes.model, recipes.batch, recipes.optim)


def test_its_run_is_that_of_train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sized by the number of tokens of its text, and has the rows that fit into the memory of a GPU."""
    machine = on_machine(monkeypatch, flops_per_second=1e10)
    monkeypatch.setattr(installed, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(
        micro_batch, "with_rows_that_fit",
        lambda config, *_: replace(config, batch=replace(config.batch, micro_sequences=2)),
    )  # fmt: skip
    asked, words = request(folder, "shakespeare-char", "--minutes", "1")
    lab = new_lab(folder / "as-train", asked, words, Console(stream=io.StringIO()))
    assert asked.config(lambda _: machine).optim.muon.weight_decay == 0.2  # of tiny Shakespeare
    assert lab.baseline_config()["optim.muon.weight_decay"] == 0.6  # many epochs of this text
    assert lab.baseline_config()["batch.micro_sequences"] == 2


def test_the_command_for_the_best_trains_on_its_text_from_any_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs of the lab read copies of the tokens and of the tokenizer, and no validation text."""
    write_corpus(tmp_path / "diary", documents=30)
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        shutil.copytree(folder / "corpus", "corpus")
        given = ("quickstart", "--depth", "1", "--steps", "5", "--data.val-source", "diary", "--data", "corpus")
        fields = (
            "--tokenizer.kind",
            "byte",
            "--data.hub-files",
            "3",
            "--data.cache-dir",
            "cache",
            "--model.seq-len",
            "32",
        )
        words = [*given, *fields]
        asked = read_request(words, NewArguments, prog="gptlab lab new", description="")
        lab = new_lab(tmp_path / "lab", asked, words, Console(stream=io.StringIO()))
    with formula():
        measure_baseline(lab, quiet)
    command = shlex.split(best(lab)["command"])
    again = read_request(command[2:], TrainArguments, prog="gptlab train", description="")
    config = repeated_config(again, RunDirectory(lab.path / "baseline"))
    assert prepare(config.data, config.tokenizer).fingerprint == lab.settings.data_fingerprint
    assert (config.data.hub_files, config.data.cache_dir) == (3, str(tmp_path / "cache"))


def test_no_lab_for_less_than_a_step(folder: Path) -> None:
    with pytest.raises(UserError, match="less than one step of 256 tokens"):
        make(folder, "short", "--tokens", 10)


def test_no_lab_for_a_length_in_flops(folder: Path) -> None:
    with pytest.raises(UserError, match="--minutes, --steps or --tokens"):
        make(folder, "flops", "--flops", 1e9)
    assert not (folder / "flops").exists()


def test_the_same_words_again_are_the_same_lab(folder: Path) -> None:
    one = make(folder, "lab", "--steps", 5)
    assert make(folder, "lab", "--steps", 5) == one
    with pytest.raises(UserError, match="is a lab already"):
        make(folder, "lab", "--steps", 6)


def test_a_file_that_was_edited_makes_no_lab_that_is_there(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    asked = ("--tokenizer.kind", "byte", "--depth", "1", "--steps", "5")

    def made(text: str) -> Lab:
        file.write_text(text)
        return new_lab(tmp_path / "lab", *request(folder, str(file), *asked), Console(stream=io.StringIO()))

    text = 'recipe = "quickstart"\n[optim.muon]\nlr = 0.03\n'
    one = made(text)
    assert made(text + "# a comment\n") == one
    for edited, names in (
        (text.replace("0.03", "0.04"), "optim.muon.lr"),
        (text.replace("quickstart", "shakespeare-char"), "recipe"),
        (text + "weight_decay = 0.1\n", "optim.muon.weight_decay"),
    ):
        with pytest.raises(UserError, match=rf"lab was edited after `gptlab lab new` \({names}\): undo that"):
            made(edited)


def test_no_lab_whose_runs_the_judge_would_refuse(folder: Path) -> None:
    with pytest.raises(UserError, match=r"has \d rows of 512 tokens, and the judge needs 16: hold out .*val-fraction"):
        make(folder, "few", "--steps", 5, "--model.seq-len", 512, "--batch.total-tokens", 2048)
    assert not (folder / "few").exists()
