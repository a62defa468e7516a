"""What `gptlab lab` refuses before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import command


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
