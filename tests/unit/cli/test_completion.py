"""The completion scripts: what bash really completes, and that all that a command reads is in them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gptlab.cli.completion import SCRIPTS, all_words
from gptlab.cli.main import COMMANDS
from gptlab.config.recipes import RECIPES


@pytest.fixture(scope="module")
def words() -> dict[str, list[str]]:
    return all_words()


@pytest.fixture(scope="module")
def script(words: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "gptlab.bash"
    path.write_text(SCRIPTS["bash"](words))
    (path.parent / "runs").mkdir()
    return path


def completed(script: Path, *line: str) -> list[str]:
    """What bash offers for the last word of the line, in a folder with `runs` in it."""
    call = 'source "$0"; COMP_WORDS=(gptlab "$@"); COMP_CWORD=$#; _gptlab; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", call, str(script), *line], capture_output=True, text=True, cwd=script.parent, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["ev"], ["eval"]),
        (["data", "pre"], ["prepare"]),
        (["data", "inspect", "--seq"], ["--seq-len"]),
        (["runs", "prune", "--che"], ["--checkpoints"]),
        (["train", "--dtype", "b"], ["bfloat16"]),
        (["train", "quickstart", "--log.to", "w"], ["wandb"]),
        (["train", "quick"], [name for name in RECIPES if name.startswith("quick")]),
        (["train", "--model.no-b"], ["--model.no-bias"]),
        (["lab", "new", "mine", "--target-param"], ["--target-param-data-ratio"]),
        (["eval", "ru"], ["runs"]),
        (["nothing", "x"], []),
    ],
)
def test_bash_completes(line: list[str], offered: list[str], script: Path) -> None:
    assert completed(script, *line) == offered


def test_all_arguments_are_there(words: dict[str, list[str]]) -> None:
    """Of commands that read a dataclass, and of those that read a run."""
    assert set(words[""]) >= {*COMMANDS, "--help"}
    assert {"--resume", "--model.n-layer", "--horizon.until-val-loss", "--from", *RECIPES} <= {*words["train"]}
    assert {"--core", "--html", "--json", "--no-json"} <= {*words["eval"]}
    assert words["completion"][:3] == ["bash", "zsh", "fish"]
    assert [place for place, found in words.items() if found == ["--help"]] == [], "their arguments were not found"


@pytest.mark.parametrize("shell", [shell for shell in SCRIPTS if shutil.which(shell)])
def test_script_is_one_of_its_shell(shell: str, words: dict[str, list[str]], tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(SCRIPTS[shell](words))
    subprocess.run([shell, "-n", str(path)], check=True)


def test_without_torch() -> None:
    program = (
        "import sys; from gptlab.cli.main import main; main(['completion', 'bash']); "
        "sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
