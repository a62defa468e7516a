"""What is proposed: fields, or a changed copy of the package, and why. The lab keeps it before anything is trained."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from gptlab.config.errors import UserError, cannot
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import Experiment, baseline_of
from gptlab.lab.judge.tree_rules import MAX_BYTES
from gptlab.runtime.files.plain_file import read_json_object, read_plain, write_json_atomic
from gptlab.runtime.files.staged_folder import staged_folder

MAX_WHY = 2_000
"""Characters of a reason that are kept."""


@dataclass(frozen=True, slots=True)
class Proposal:
    fields: Mapping[str, Any] = field(default_factory=dict)
    """{dotted name: value}, on top of the baseline's."""
    tree: Path | None = None
    """A folder with a changed copy of the package, `TREE/gptlab`. None: the baseline's code."""
    why: str = ""
    expect: float | None = None
    """The predicted difference in bits per byte: negative is better."""
    by: str = ""
    """Who proposes: a person, or the name of a program."""
    against: int | None = None
    """The experiment whose code `tree` changes. None: the baseline as it is now."""


def submit(lab: Lab, proposal: Proposal) -> int:
    """Record a proposal with a copy of its code; its number. UserError for a tree that is none, or a full disk."""
    experiments = lab.require_baseline()
    baseline = baseline_of(experiments) if proposal.against is None else experiments[proposal.against]
    files: tuple[str, ...] = ()
    if proposal.tree is not None:
        files = changed_files(code_of(lab, baseline, experiments), proposal.tree)
    proposed = _encodable(
        {"fields": dict(proposal.fields), "files": files, "why": proposal.why[:MAX_WHY], "by": proposal.by}
    )
    with lab.ledger.locked():
        number = max(lab.ledger.experiments()) + 1
        folder = lab.experiment(number)
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed before it wrote the line below
        with staged_folder(folder) as staged:
            if proposal.tree is not None:
                copy_package(proposal.tree, staged / "tree")
            write_json_atomic(staged / "overrides.json", proposed["fields"])
        lab.ledger.append(
            "proposed", experiment=number, **proposed, expect=proposal.expect, against=baseline.number
        )  # fmt: skip
    return number


def _encodable(values: dict[str, Any]) -> dict[str, Any]:
    """The values with `?` for what UTF-8 cannot encode: half of a surrogate pair in JSON, or a byte of a command line
    or file name that is not UTF-8."""
    return dict(json.loads(json.dumps(values, ensure_ascii=False).encode(errors="replace")))


def code_of(lab: Lab, experiment: Experiment, experiments: Mapping[int, Experiment]) -> Path:
    """The folder whose `gptlab` the experiment runs: its own, or that of the baseline it was proposed against."""
    while not experiment.files and experiment.number != experiment.against:
        experiment = experiments[experiment.against]
    return lab.experiment(experiment.number) / "tree" if experiment.files else lab.path / "code"


def changed_files(base: Path, tree: Path) -> tuple[str, ...]:
    """Names of the package's files that differ between two trees, sorted. Links and special files always do: they are
    not opened, and the rules on trees refuse them. UserError where `tree` has no package, or a file cannot be read."""
    if not (tree / "gptlab" / "__init__.py").is_file():
        raise UserError(f"{tree} has no gptlab/: name a folder that holds a changed copy of the package")
    before, after = _files(base), _files(tree)
    return tuple(sorted(name for name in before | after if not _same_file(before.get(name), after.get(name))))


def copy_package(tree: Path, target: Path) -> None:
    """The package of `tree`, without byte code. Of what the rules on trees refuse without reading it, there is what
    they refuse: links stay links, a special file becomes a link, a large file an empty one of its size."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".git")
    shutil.copytree(tree / "gptlab", target / "gptlab", symlinks=True, ignore=ignored, copy_function=_copy_file)


def _copy_file(source: str, target: str) -> None:
    status = os.lstat(source)
    if not stat.S_ISREG(status.st_mode):
        os.symlink(source, target)
    elif status.st_size > MAX_BYTES:
        with open(target, "xb") as file:
            file.truncate(status.st_size)
    else:
        shutil.copy2(source, target)


def read_proposal(path: Path, tree: Path | None, by: str) -> Proposal:
    """The proposal that a program wrote: a JSON object with any of `fields`, `why`, `expect`. UserError otherwise."""
    values = read_json_object(path) if path.exists() else {}
    match values:
        case {**rest} if rest.keys() <= {"fields", "why", "expect"}:
            fields, why, expect = values.get("fields", {}), values.get("why", ""), values.get("expect")
            if isinstance(fields, dict) and isinstance(why, str) and _is_finite(expect):
                return Proposal(fields, tree, why, expect, by)
    raise UserError(f"{path.name} must be a JSON object with fields (an object), why (a text), expect (a number)")


def _is_finite(value: Any) -> TypeGuard[float | None]:
    """Whether it is None, or a number that is finite as a float: JSON has larger ones."""
    try:
        return value is None or (isinstance(value, int | float) and math.isfinite(value))
    except OverflowError:
        return False


def _files(tree: Path) -> dict[str, Path]:
    """{name: path} of everything in the package that is no folder, links to folders included."""
    found = {}
    for folder, folders, names in os.walk(tree / "gptlab"):
        folders[:] = [name for name in folders if name != "__pycache__"]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for path in (Path(folder, name) for name in (*names, *links)):
            found[str(path.relative_to(tree))] = path
    return found


def _same_file(one: Path | None, other: Path | None) -> bool:
    """Whether both are regular files of the same content. UserError where one cannot be read."""
    if one is None or other is None:
        return False
    first, second = one.lstat(), other.lstat()
    if not (stat.S_ISREG(first.st_mode) and stat.S_ISREG(second.st_mode) and first.st_size == second.st_size):
        return False
    with cannot(f"read {other}"):
        return one.read_bytes() == read_plain(other, second.st_size)
