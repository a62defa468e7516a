"""What is proposed: fields, or a changed copy of the package, and why. The lab keeps it before anything is trained."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import Experiment, baseline_of
from gptlab.runtime.files.plain_file import read_json_object, write_json_atomic
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
    """Names of the package's files that differ between two trees, sorted. UserError where `tree` has no package."""
    if not (tree / "gptlab" / "__init__.py").is_file():
        raise UserError(f"{tree} has no gptlab/: name a folder that holds a changed copy of the package")
    before, after = _sources(base), _sources(tree)
    return tuple(sorted(name for name in before | after if before.get(name) != after.get(name)))


def copy_package(tree: Path, target: Path) -> None:
    """The package of `tree`, without byte code. Links stay links: the rules on trees refuse them."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".git")
    shutil.copytree(tree / "gptlab", target / "gptlab", symlinks=True, ignore=ignored)


def read_proposal(path: Path, tree: Path | None, by: str) -> Proposal:
    """The proposal that a program wrote: a JSON object with any of `fields`, `why`, `expect`. UserError otherwise."""
    values = read_json_object(path) if path.exists() else {}
    match values:
        case {**rest} if rest.keys() <= {"fields", "why", "expect"}:
            fields, why, expect = values.get("fields", {}), values.get("why", ""), values.get("expect")
            if isinstance(fields, dict) and isinstance(why, str) and isinstance(expect, int | float | None):
                return Proposal(fields, tree, why, expect, by)
    raise UserError(f"{path.name} must be a JSON object with fields (an object), why (a text), expect (a number)")


def _sources(tree: Path) -> dict[str, bytes]:
    """{name: content} of the package's files, links by where they lead to."""
    found = {}
    for folder, folders, names in os.walk(tree / "gptlab"):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = Path(folder, name)
            content = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
            found[str(path.relative_to(tree))] = content
    return found
