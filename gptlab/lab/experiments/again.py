"""An experiment that is better than its baseline, which another worker's has replaced meanwhile: it is proposed again,
on top of the new baseline. So no gain is dropped, and nothing becomes the baseline that was not compared with it."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import Experiment, baseline_of
from gptlab.lab.experiments.proposal import Proposal, changed_files, code_of, copy_package, submit


def propose_again(lab: Lab, number: int) -> str:
    """Propose the experiment's fields and code against the baseline as it is now, once; what was done, in words. The
    caller has locked the ledger."""
    experiments = lab.ledger.experiments()
    one, by = experiments[number], f"experiment {number} again"
    for other in experiments.values():
        if other.by == by:  # by a process that was killed before it wrote the verdict
            return f"proposed again as {other.number}"
    old, new = (code_of(lab, base, experiments) for base in (experiments[one.against], baseline_of(experiments)))
    both = {*one.files} & {*changed_files(old, new)} if one.files else set()
    if both:
        return f"combine them by hand, both changed {', '.join(sorted(both))}"
    with tempfile.TemporaryDirectory(dir=lab.path, prefix=".again-") as folder:
        tree = _on_top(lab, one, new, Path(folder)) if one.files else None
        return f"proposed again as {submit(lab, Proposal(one.fields, tree, one.why, one.expect, by))}"


def earlier_races(experiments: Mapping[int, Experiment], one: Experiment) -> int:
    """How often the same proposal was raced before, against earlier baselines."""
    before = re.fullmatch(r"experiment (\d+) again", one.by)
    return 0 if before is None else 1 + earlier_races(experiments, experiments[int(before[1])])


def _on_top(lab: Lab, one: Experiment, base: Path, folder: Path) -> Path:
    """A copy of the package in `base` with the files that the experiment changed."""
    copy_package(base, folder)
    for name in one.files:
        source, target = lab.experiment(one.number) / "tree" / name, folder / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        else:
            target.unlink()
    return folder
