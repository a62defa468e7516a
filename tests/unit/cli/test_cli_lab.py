"""What `gptlab lab` refuses before it begins, and what an interrupt leaves."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from forked import run_forked
from lab_world import formula, new_lab, quiet
from tiny_runs import command

from gptlab.cli.main import main
from gptlab.lab.experiments import runs
from gptlab.lab.experiments.trial import in_flight, measure_baseline
from gptlab.runtime.files.plain_file import write_json_atomic


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seeds", "0"], "--seeds = 0: must be greater than zero"),
        (["--seed", "7"], "--seed cannot be given: a lab trains with seeds 1, 2, ..."),
        (["--run-dir", "runs/a"], "--run-dir cannot be given: NAME is the lab's folder"),
        (
            ["--until-val-loss", "2", "--eval.every-steps", "2"],
            "--until-val-loss cannot be given: a lab's runs have one",
        ),
    ],
)
def test_a_new_lab(arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = command(["lab", "new", "night", "quickstart", "--steps", "5", *arguments])
    assert (code, says in err, [*tmp_path.iterdir()]) == (2, True, [])


@pytest.mark.parametrize(
    "arguments",
    [["try", "--optim.head.lr", "0"], ["run", "--agent", "true"], ["promote"], ["new", "quickstart", "--steps", "5"]],
)
def test_another_gptlab_than_the_labs_own_does_not_judge(arguments: list[str], tmp_path: Path) -> None:
    """Otherwise `try --tree .` in a changed checkout would let the change judge itself."""
    lab = new_lab(tmp_path)
    settings = json.loads((lab.path / "lab.json").read_text())
    write_json_atomic(lab.path / "lab.json", settings | {"code_fingerprint": "another", "asked": arguments[1:]})
    code, _, err = command(["lab", arguments[0], str(lab.path), *arguments[1:]])
    assert (code, lab.ledger.experiments()) == (2, {})
    says = f"which judges: give the command as PYTHONPATH={lab.path / 'code'} {sys.executable} -P -m gptlab lab ..."
    assert f"is not the code that {lab.path} began with, {says}" in err
    assert command(["lab", "status", str(lab.path)])[0] == 0, "looking is allowed"


@pytest.mark.parametrize("name", ["new", "try", "run", "promote"])
def test_windows_judges_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has neither fork nor limits of processes: imports failed."""
    monkeypatch.setattr("gptlab.cli.lab.os", SimpleNamespace(name="nt"))
    code, _, err = command(["lab", name, "night"])
    assert (code, f"gptlab lab {name} does not work on Windows" in err) == (2, True)
    assert command(["lab", name, "--help"])[0] == 0


def test_a_night_without_a_baseline_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lab new` was interrupted. Each proposal of a model costs money."""
    monkeypatch.setattr("gptlab.lab.workers.night.PAUSES", ())
    lab = new_lab(tmp_path)
    with formula() as patch:
        patch.setattr(runs, "train", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            measure_baseline(lab, quiet)
    code, _, err = command(["lab", "run", str(lab.path), "--agent", f"touch {tmp_path / 'asked'}"])
    assert (code, (tmp_path / "asked").exists()) == (2, False)
    assert "has no baseline yet: `gptlab lab new` with the same arguments finishes it" in err


def test_an_interrupted_try_is_finished_by_run(tmp_path: Path) -> None:
    lab = new_lab(tmp_path, seeds=1)
    with formula() as patch:
        measure_baseline(lab, quiet)
        assert command(["lab", "run", str(lab.path)])[0] == 2, "nothing is in flight"
        honest = runs.train
        patch.setattr(runs, "train", Mock(side_effect=KeyboardInterrupt))
        code, _, err = command(["lab", "try", str(lab.path), "--optim.head.lr", "0"])
        assert code == 130
        assert f"experiment 2 is in flight: gptlab lab run {lab.path} finishes it" in err
        patch.setattr(runs, "train", honest)
        code, out, _ = command(["lab", "run", str(lab.path)])
        assert (code, out.startswith("0002 discard"), in_flight(lab)) == (0, True, [])


@pytest.mark.parametrize("words", [("try", "--optim.head.lr", "0"), ("promote", "1")])
def test_sigterm_cleans_up_as_an_interrupt_does(words: tuple[str, ...], tmp_path: Path) -> None:
    """It ends what judges: the temporary folders hold weights."""
    lab = new_lab(tmp_path, seeds=1)
    with formula():
        measure_baseline(lab, quiet)
    (temporary := tmp_path / "temporary").mkdir()

    def ended_while_it_judges(*run: object) -> None:
        with tempfile.TemporaryDirectory(dir=temporary):
            signal.raise_signal(signal.SIGTERM)

    def work() -> int:
        with formula() as patch:
            patch.setattr(runs, "judge", ended_while_it_judges)
            return main(["lab", words[0], str(lab.path), *words[1:]])

    ended = run_forked(work)
    assert (ended.returncode, [*temporary.iterdir()]) == (128 + signal.SIGTERM, [])
    assert ("experiment 2 is in flight: gptlab lab run" in ended.stderr) == (words[0] == "try")
