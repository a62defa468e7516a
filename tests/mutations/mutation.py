"""What a mutation is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutation:
    """One deliberate defect of gptlab, and the tests that must notice it."""

    defect: str
    """What is wrong with gptlab once `old` is `new`, in words."""
    file: str
    """Below gptlab/."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    tests: Sequence[str]
    """FILE::NAME, without folders and parameters. Each of them must fail."""
    rows: Sequence[str] = ()
    """The rows of docs/lineages.md whose behaviour this breaks: how their first column begins."""

    def occurrences(self, root: Path = ROOT) -> int:
        return (root / "gptlab" / self.file).read_text(encoding="utf-8").count(self.old)


def file_of_test(name: str, root: Path = ROOT) -> Path:
    """The test file of this name, in whichever folder below tests/; no two have the same name."""
    (path,) = (root / "tests").rglob(name)
    return path
