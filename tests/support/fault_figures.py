"""What the long tests of faults did: each notes its figures, and they become the table of docs/reliability.md.

`python tests/support/fault_figures.py` prints the table of the last runs; with `--write` it puts it into the page.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
FIGURES = ROOT / "build" / "faults"
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"

ROWS = {
    "failpoints-1": "SIGKILL at every file operation of a run, 1 process",
    "failpoints-2-0": "SIGKILL at every file operation of saves and retention that leaves a trace, rank 0 of 2",
    "failpoints-2-1": "the same, rank 1 of 2",
    "failpoints-load-1": "SIGKILL at every file operation of a resume, 1 process",
    "failpoints-load-2-0": "SIGKILL at one file operation of each kind of a resume, rank 0 of 2",
    "failpoints-load-2-1": "the same in a resume, rank 1 of 2",
    "kills-1": "SIGKILL at a random moment, 1 process",
    "kills-2-one": "SIGKILL at a random moment, one rank of 2",
    "kills-2-all": "SIGKILL at a random moment, both ranks at once",
    "steps-1": "resume from each of 40 steps, 1 process",
    "steps-2": "resume from each of 40 steps, 2 processes",
    "flips": "one bit of a checkpoint's files turned over",
    "damage": "a checkpoint's file cut, filled with zeros, longer, gone, or of another checkpoint",
    "lab-failpoints": "SIGKILL at every file operation of a lab's night that leaves a trace",
    "lab-kills": "SIGKILL of a lab's night at a random moment, with real runs",
    "parts": "a part of a checkpoint missing, or as it was at the start",
}
"""What is done in each row."""


def note(row: str, *, done: int, problems: Sequence[str], started: float) -> None:
    """Keep the figures of a row, and fail where there are problems: one line for each of `done` that did not survive.
    `started` is time.perf_counter() when its test began."""
    assert row in ROWS, row
    FIGURES.mkdir(parents=True, exist_ok=True)
    figures = {
        "done": done, "survived": done - len(problems), "seconds": round(time.perf_counter() - started),
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": _commit(), "machine": _machine(),
    }  # fmt: skip
    (FIGURES / f"{row}.json").write_text(json.dumps(figures))
    (FIGURES / f"{row}.txt").write_text("\n".join(problems))
    assert not problems, "\n".join([f"{len(problems)} of {done} did not survive", *problems[:10]])


def table() -> str:
    """In Markdown; rows that were not run are left out."""
    kept = {row: FIGURES / f"{row}.json" for row in ROWS}
    rows = {row: json.loads(path.read_text()) for row, path in kept.items() if path.exists()}
    lines = ["| what is done | times | survived | seconds |", "| --- | --- | --- | --- |"]
    lines += [f"| {ROWS[row]} | {f['done']:,} | {f['survived']:,} | {f['seconds']:,} |" for row, f in rows.items()]
    total = {name: sum(figures[name] for figures in rows.values()) for name in ("done", "survived", "seconds")}
    lines.append(f"| all | {total['done']:,} | {total['survived']:,} | {total['seconds']:,} |")
    where = {name: ", ".join(sorted({f[name] for f in rows.values()})) for name in ("machine", "date", "commit")}
    lines += ["", f"{where['machine']}; {where['date']}; commit {where['commit']}."]
    return "\n".join(lines) + "\n"


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False).stdout.strip()

    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + " with changes" * bool(git("status", "--porcelain"))


def _machine() -> str:
    from gptlab.runtime.hardware.cpu import cpu_model

    return f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores"


if __name__ == "__main__":
    print(table())
    if "--write" in sys.argv:
        page = re.sub(f"({BEGIN}).*?({END})", lambda m: m[1] + table() + m[2], PAGE.read_text("utf-8"), flags=re.S)
        PAGE.write_text(page, encoding="utf-8")
