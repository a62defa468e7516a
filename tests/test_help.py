"""Every command explains itself: exit code 0, defaults and units named, and quickly where nothing is computed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gptlab
from gptlab.cli.main import COMMANDS, HELP, main

ROOT = Path(__file__).parent.parent

LEAVES = [
    ["train"], ["plan"], ["eval"], ["sample"], ["export"], ["bench"],
    ["data", "list"], ["data", "prepare"], ["data", "inspect"], ["tokenizer", "train"], ["tokenizer", "eval"],
    ["import", "hf"], ["import", "nanogpt"],
]  # fmt: skip

UNITS = {
    "train": ("tokens", "minutes", "seconds", "nats/token", "steps", "floating-point operations"),
    "plan": ("tokens", "minutes", "seconds", "nats/token", "steps", "floating-point operations"),
    "sample": ("tokens",),
    "eval": ("tokens",),
}


def fresh(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_every_command_has_a_leaf() -> None:
    assert {leaf[0] for leaf in LEAVES} == set(COMMANDS)


@pytest.mark.parametrize("leaf", LEAVES, ids=" ".join)
def test_help_names_every_argument_with_its_default(leaf: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*leaf, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"usage: gptlab {' '.join(leaf)}" in out
    assert "default: " in out
    for unit in UNITS.get(leaf[0], ()):
        assert unit in " ".join(out.replace("│", " ").split()), f"{leaf[0]} --help does not name {unit}"


@pytest.mark.parametrize("command", ["data", "tokenizer", "import"])
def test_groups_list_their_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for group, *names in LEAVES if group == command for name in names)


def test_the_first_page(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert main(argv) == 0
        assert capsys.readouterr().out == HELP
    assert all(f"\n  {name} " in HELP for name in COMMANDS)
    assert max(map(len, HELP.splitlines())) <= 120


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gptlab {gptlab.__version__}\n"


def test_the_first_page_takes_under_half_a_second() -> None:
    """As a process of its own, interpreter start included; in seconds of processor time: the machine may be busy."""
    times = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-m", "gptlab", "--help"], cwd=ROOT, capture_output=True, timeout=60)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert done.returncode == 0
    assert min(times) < 0.5


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["train", "--help"], ["train", "--list"], ["trian"]])
def test_no_torch_where_nothing_is_computed(argv: list[str]) -> None:
    done = fresh(f"import sys; from gptlab.cli.main import main; main({argv}); assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_nothing() -> None:
    done = fresh("import sys, gptlab; gptlab.recipes; assert not {'torch', 'numpy', 'tyro'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_python_has_the_same_names() -> None:
    assert gptlab.recipes.quickstart(depth=4, minutes=3).model.n_layer == 4
    assert gptlab.recipes.quickstart(depth=4, minutes=3).horizon.amount == 180.0
    importlib.import_module("gptlab.train.retention")  # Binds the package to the name that is also the function's.
    assert callable(gptlab.train)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = gptlab.nothing_like_it


def test_a_reader_that_leaves_is_no_error() -> None:
    """`gptlab --help | true`: no traceback, and the exit code that shells give to a broken pipe."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(0.5); from gptlab.cli.main import entry_point; entry_point()"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141
