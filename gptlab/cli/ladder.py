"""`gptlab ladder RECIPE --depths 2,3,4,6`: a run a depth, a row a depth, and a power law through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptlab.cli.arguments.parser import read_request, whole_numbers
from gptlab.cli.compare import write_csv
from gptlab.cli.sweep import ManyRunsArguments, asked_sweep, train_and_show
from gptlab.config.errors import UserError
from gptlab.lab.ladder import PowerLaw, Rung, power_law, power_law_with_term, rungs_of
from gptlab.lab.run_record import RunRecord, is_broken
from gptlab.lab.sweep import Sweep
from gptlab.runtime.records.run_directory import require_outside_runs
from gptlab.runtime.records.table import table

DESCRIPTION = "Train a recipe at several depths, and fit a power law: bits per byte, FLOPs."


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderArguments(ManyRunsArguments):
    depths: tuple[str, ...] = ()
    """Layers of each size: 2,3,4,6."""
    csv: str | None = None
    """Write the rows to this file."""


def main(argv: Sequence[str]) -> int:
    request = read_request(
        argv, LadderArguments, prog="gptlab ladder", description=DESCRIPTION, refuses=["run_dir", "depth"]
    )
    depths = whole_numbers(request.options.get("depths", ()), "depths")
    if request.resume is None and len(depths) < 2:
        raise UserError("gptlab ladder needs two depths or more: --depths 2,3,4,6")
    if request.depth is not None:
        raise UserError("--depth is one size, and --depths are those of a ladder: give --depths alone")
    path = request.options.get("csv")
    if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):  # before hours of training
        raise UserError(f"--csv {path}: its folder does not exist, or it is a folder itself")
    if path is not None:
        require_outside_runs(Path(path), "--csv")

    def result(sweep: Sweep, sides: Mapping[str, Sequence[RunRecord]]) -> tuple[str, dict[str, Any]]:
        rows = rungs_of(sides)
        if path is not None:
            write_csv(Path(path), Rung.__dataclass_fields__, map(asdict, rows))
        amounts = [row.flops for row in rows], [row.bpb for row in rows]
        laws = [law for law in (power_law(*amounts), power_law_with_term(*amounts)) if law is not None]
        broken = {name: [*map(is_broken, runs)] for name, runs in sides.items()}
        notes = [
            f"{name}: no row, since {sum(own)} of {len(own)} runs broke" for name, own in broken.items() if any(own)
        ]
        notes += [f"{name}: {status}" for name, status in sweep.statuses().items() if status != "finished"]
        figures = {"depths": [asdict(row) for row in rows], "laws": [asdict(law) for law in laws]}
        return "\n".join([describe(rows, laws), *notes]), figures

    return train_and_show(asked_sweep(request, "ladder", {"depth": depths}, request.options.get("seeds", 1)),
                          request.options, result)  # fmt: skip


def describe(rows: Sequence[Rung], laws: Sequence[PowerLaw]) -> str:
    """The table, a row a depth, and what the laws through it say."""
    if not rows:
        return "no depth has a result"
    heading = ["depth", "seeds", "parameters", "tokens", "FLOPs", "seconds", "val_bpb"]
    residuals = ["fit", "with term"][: len(laws)]
    cells = [
        [
            f"{row.depth}", f"{row.seeds}", f"{row.parameters:,.0f}", f"{row.tokens:,.0f}", f"{row.flops:.3g}",
            f"{row.seconds:,.1f}", f"{row.bpb:.4f}", *(f"{law.residuals[number]:+z.4f}" for law in laws),
        ]
        for number, row in enumerate(rows)
    ]  # fmt: skip
    lines = [table([heading + residuals, *cells], ">" * (len(heading) + len(laws)))]
    names = ["fit (a line in logarithms)", "with an irreducible term"]
    for name, law in zip(names, laws, strict=False):
        term = "" if law.half_width is None else f"{law.irreducible:.4f} (± {law.half_width:.4f}) + "
        lines.append(f"{name}: bpb = {term}{law.a:.4g} FLOPs^{-law.b:.4f}")
    if laws and laws[0].b < 0:
        lines.append("The exponent is positive: by this line, bits per byte rise with FLOPs.")
    if laws:
        lines.append("Least squares of log(bpb); the columns are what a row has above its fit, in bpb.")
    if len(rows) >= 4 and len(laws) < 2:
        lines.append("An irreducible term cannot be told from 0 by these rows.")
    return "\n".join(lines)
