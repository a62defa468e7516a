"""The Makefile: the interpreter that is asked for, and the list of targets."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


def test_no_other_interpreter_is_taken_than_the_one_that_is_named(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    words = ["make", "PYTHON=python-no-such", ".venv/bin/python"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stderr.startswith("error: python-no-such is no Python >= 3.11 that runs; install one or name it: ")
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


def test_help_is_a_table() -> None:
    words = ["make", "--no-print-directory", "help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    rows = [re.fullmatch(r"(  make \S+ +)\S.*", line) for line in done.stdout.splitlines()]
    assert len({len(row[1]) for row in rows if row}) == 1, done.stdout
    assert len(rows) > 5
    assert None not in rows
