"""The labs beside a folder of runs: what each has tried, and its best so far."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError, one_line
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.report import report
from gptlab.report.dashboard.bounds import cut, require_file, signature

MAX_LEDGER_BYTES = 1 << 26
"""Ten thousand experiments take a quarter of it."""
MAX_LABS = 100
MAX_EXPERIMENTS = 2_000
"""Of one lab, that are sent: the last ones."""

_FILES = ("lab.json", "ledger.jsonl")


class WatchedLabs:
    """The labs in `folder`, each read again when its ledger has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.figures: list[dict[str, Any]] = []
        """Of each lab, as JSON: its name, and `problem` or the figures of its report."""
        self._read: dict[str, tuple[object, dict[str, Any]]] = {}

    def refresh(self) -> bool:
        """Whether the figures of a lab changed."""
        found = {}
        for name in self._names():
            lab, known = self.folder / name, self._read.get(name)
            now = tuple(signature(lab / file) for file in _FILES)
            found[name] = known if known and known[0] == now else (now, _figures(lab))
        changed = found != self._read
        self._read, self.figures = found, [figures for _, figures in found.values()]
        return changed

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.folder) as entries:
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []
        return sorted(name for name in names if os.path.lexists(self.folder / name / "lab.json"))[:MAX_LABS]


def _figures(path: Path) -> dict[str, Any]:
    """A lab's report. An untrusted ledger may hold anything: what cannot be read is one line."""
    shown: dict[str, Any] = {"name": cut(path.name), "problem": None}
    try:
        for name in _FILES:
            require_file(path / name, MAX_LEDGER_BYTES)
        figures = report(Lab.open(path))
        shown |= {name: figures[name] for name in ("best", "best_bpb", "first_bpb", "verdicts", "runs", "run_seconds")}
        shown |= {name: cut(str(figures[name])) for name in ("recipe", "length")}
        shown["frontier"] = [
            row | {"change": cut(str(row["change"]))} for row in figures["frontier"][-MAX_EXPERIMENTS:]
        ]
    except Exception as error:
        shown["problem"] = cut(one_line(error) if isinstance(error, UserError | OSError) else "its ledger is damaged")
    return shown
