"""Changed code: what is taken, and the diff that is kept."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from mutations.mutation import ROOT

from gptlab.config.errors import UserError
from gptlab.config.load import config_to_json, flatten
from gptlab.config.run import RunConfig
from gptlab.lab.judge.rules import RuleError
from gptlab.lab.judge.tree_rules import FIXED_FIELDS, PROTECTED, check_change, check_fields, read_change

FILES = {
    "__init__.py": "",
    "model/gpt.py": "one\ntwo\nthree",
    "model/norm.py": "x = 1\n",
    "eval/bits.py": "y = 1\n",
    "model/parts/__init__.py": "",
    "data/table.gz": "\x00binary",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "gptlab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, newline="")
    return folder


def test_the_diff_leads_from_one_to_the_other(tmp_path: Path) -> None:
    """A changed file, one without a last line feed, one with a form feed, new ones and removed ones, also empty."""
    after = FILES | {
        "model/gpt.py": "one\n2\nthree",
        "model/new.py": 'a = "\x0c"\nb = 2\n',
        "optim/x/__init__.py": "",
    }
    del after["model/norm.py"], after["model/parts/__init__.py"]
    base, changed = write(tmp_path / "base", FILES), write(tmp_path / "changed", after)
    (changed / "gptlab/model/__pycache__").mkdir()
    (changed / "gptlab/model/__pycache__/gpt.pyc").write_text("other code")
    (changed / "sitecustomize.py").write_text("import os")
    change = read_change(base, changed)
    check_change(change)
    patch = change.patch
    (tmp_path / "change.patch").write_text(patch, newline="")
    subprocess.run(["git", "apply", "../change.patch"], cwd=base, check=True)
    assert {name: (base / "gptlab" / name).read_bytes().decode() for name in after} == after
    assert {path.relative_to(base / "gptlab").as_posix() for path in base.rglob("*") if path.is_file()} == {*after}
    assert {line for line in patch.splitlines() if line.startswith(("--- ", "+++ "))} == {
        "--- a/gptlab/model/gpt.py", "+++ b/gptlab/model/gpt.py", "--- /dev/null", "+++ b/gptlab/model/new.py",
        "--- a/gptlab/model/norm.py", "+++ /dev/null",
    }  # fmt: skip


def test_equal_trees_have_no_diff(tmp_path: Path) -> None:
    assert read_change(write(tmp_path / "base", FILES), write(tmp_path / "changed", FILES)).patch == ""


def test_trees_that_are_none(tmp_path: Path) -> None:
    base = write(tmp_path / "base", FILES)
    with pytest.raises(RuleError, match="holds no package"):
        check_change(read_change(base, tmp_path))
    with pytest.raises(UserError, match="the baseline's code"):
        check_change(read_change(tmp_path, base))
    with pytest.raises(RuleError, match="not Python"):
        check_change(read_change(base, write(tmp_path / "changed", FILES | {"model/gpt.py": "def f(:\n"})))


def test_a_large_literal_that_was_there_may_stay(tmp_path: Path) -> None:
    table = f"T = {list(range(300))}\n"
    base = write(tmp_path / "base", FILES | {"model/gpt.py": table})
    check_change(read_change(base, write(tmp_path / "changed", FILES | {"model/gpt.py": f"{table}U = 1\n"})))
    with pytest.raises(RuleError, match="line 1 has an expression of 300 constants"):
        check_change(
            read_change(base, write(tmp_path / "other", FILES | {"model/gpt.py": table.replace("299", "300")}))
        )


def test_the_tables_name_what_exists() -> None:
    assert [name for name in PROTECTED if not (ROOT / "gptlab" / name).exists()] == []
    fields = flatten(config_to_json(RunConfig()))
    assert [
        fixed for fixed in FIXED_FIELDS if not any(name == fixed or name.startswith(fixed) for name in fields)
    ] == []
    check_fields(["model.n_embd", "optim.muon.lr", "depth", "batch.total_tokens", "schedule.warmup_fraction"])
