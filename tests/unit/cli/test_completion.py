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


# What each shell offers for the last word of a line; zsh would leave it to `compadd` to drop what does not fit.
CALLS = {
    "bash": 'source "$0"; COMP_WORDS=(gptlab "$@"); COMP_CWORD=$#; _gptlab; printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": """
        compdef() {}; compadd() { print -rl -- ${(M)${(P)@[-1]}:#$PREFIX*}; }; _files() { print -rl -- $PREFIX*(N); }
        source "$0"; words=(gptlab "$@"); CURRENT=$#words; PREFIX=$words[-1]; _gptlab""",
    "fish": 'source $argv[1]; complete -C "gptlab $argv[2..]"',
}


@pytest.fixture(scope="module", params=SCRIPTS)
def shell(request: pytest.FixtureRequest) -> str:
    if not shutil.which(request.param):
        pytest.skip(f"no {request.param} on the path")  # a failure in CI: tests/conftest.py
    return str(request.param)


@pytest.fixture(scope="module")
def script(shell: str, words: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / f"gptlab.{shell}"
    path.write_text(SCRIPTS[shell](words))
    (path.parent / "runs").mkdir()
    return path


def completed(shell: str, script: Path, *line: str) -> list[str]:
    """In a folder with `runs` in it."""
    quiet = {"zsh": ["-f"], "fish": ["-N"]}.get(shell, [])
    done = subprocess.run(
        [shell, *quiet, "-c", CALLS[shell], str(script), *line],
        capture_output=True, text=True, cwd=script.parent, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return [line.partition("\t")[0].rstrip("/") for line in done.stdout.splitlines() if line]


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
        (["nothing", "xyz"], []),
    ],
)
def test_words_and_files_that_fit(line: list[str], offered: list[str], shell: str, script: Path) -> None:
    assert sorted(completed(shell, script, *line)) == sorted(offered)


def test_all_arguments_are_there(words: dict[str, list[str]]) -> None:
    """Of commands that read a dataclass, and of those that read a run."""
    assert set(words[""]) >= {*COMMANDS, "--help"}
    assert {"--resume", "--model.n-layer", "--horizon.until-val-loss", "--from", *RECIPES} <= {*words["train"]}
    assert {"--core", "--html", "--json", "--no-json"} <= {*words["eval"]}
    assert words["completion"][:3] == ["bash", "zsh", "fish"]
    assert [place for place, found in words.items() if found == ["--help"]] == [], "their arguments were not found"


def test_without_torch() -> None:
    program = (
        "import sys; from gptlab.cli.main import main; main(['completion', 'bash']); "
        "sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
