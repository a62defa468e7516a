"""What an honest candidate passes: audits of its answers, its first weights, its time, its own report, and of the
lab's folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.lab.judge.questions import Loss, Scores
from gptlab.lab.judge.rules import Rule, RuleError
from gptlab.lab.judge.supervise import Finished
from gptlab.model.gpt import GPT
from gptlab.model.init import initial_weights

# --- questions that are asked twice

MIN_ROWS = 16
"""Of the validation text: six of them get another's end."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One row of one process's questions."""

    row: int
    """The row of the validation text, of which the first `same` tokens are asked."""
    tail_of: int
    """The row from which the rest comes; `row` itself where all is asked."""
    same: int
    """Positions whose answers must be those of `row` alone."""


def halves(count: int, random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`count` rows in two halves, drawn at random: the first process is asked the first, the second the other, and the
    first again, in another order, in other batches, among other rows. UserError for too few rows."""
    if count < MIN_ROWS:
        raise UserError(f"the validation text has {count} rows; audits need {MIN_ROWS}: hold out more of it")
    order = random.permutation(count)
    half = -(-count // 2)
    return order[:half], order[half:]


def second_questions(
    first: NDArray[np.int64],
    second: NDArray[np.int64],
    gains: NDArray[np.float64],  # (rows, seq_len) >= 0
    random: np.random.Generator,
) -> list[Asked]:
    """The second half of the rows, mixed with those of the first, which are asked again.

    A quarter of these are unchanged. Of the others, two by two, the ends are exchanged: so every token is asked once in
    this process, and a row with another's end looks like any other. A cut shows what the position before it knew of
    the token after it. Half of the cuts are drawn at random and half where the candidate gained most, and so are the
    rows that are cut: who gains by looking ahead in few places is asked about these.
    """
    seq_len = gains.shape[1]
    chosen = random.choice(first, len(first), replace=False, p=_mixed(gains[first].sum(1)))
    swapped = chosen[: 2 * (3 * len(chosen) // 8)]
    asked = [Asked(int(row), int(row), seq_len) for row in (*second, *chosen[len(swapped) :])]
    if seq_len > 1:
        for one, other in swapped.reshape(-1, 2).tolist():
            # The token at `cut` is the target of the position before it.
            cut = 1 + int(random.choice(seq_len - 1, p=_mixed((gains[one] + gains[other])[:-1])))
            asked += [Asked(one, other, cut), Asked(other, one, cut)]
    return [asked[number] for number in random.permutation(len(asked))]


def _mixed(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities: half uniform, half in proportion to `weights`."""
    uniform = np.full(len(weights), 1 / len(weights))
    total = weights.sum()
    return uniform if not total > 0 else 0.5 * uniform + 0.5 * weights / total


def check_again(
    asked: Iterable[Asked],
    first: Mapping[int, Scores],  # {row: its scores in the first process}
    again: Mapping[int, Scores],  # {row: its scores in the second}
    tolerance: float,
) -> float:
    """The largest difference between two answers to the same tokens. RuleError (memoryless) where a row asked again has
    another answer, (causality) where only one with another end has."""
    differences: dict[bool, list[tuple[float, int, int]]] = {True: [], False: []}
    for one in asked:
        if one.row in first:
            one_way, other_way = first[one.row], again[one.row]
            apart = np.maximum(np.abs(one_way.nats - other_way.nats), np.abs(one_way.prints - other_way.prints))
            apart = apart[: one.same]
            at = int(apart.argmax())
            differences[one.tail_of == one.row].append((float(apart[at]), one.row, at))
    for same_row, found in differences.items():
        largest, row, at = max(found, default=(0.0, 0, 0))
        if largest > tolerance:
            what = f"row {row}, position {at}: its logits differ by {largest:.3g} (tolerance {tolerance:.3g})"
            # Tells another implementation, which changes every row, from a single wrong result.
            count = f"{sum(apart > tolerance for apart, _, _ in found)} of {len(found)} such rows differ"
            if same_row:
                why = "when the same row is asked in another process, order and batch"
                raise RuleError("memoryless", f"{what} {why}; {count}")
            raise RuleError("causality", f"{what} when only later tokens are changed; {count}")
    return max((found[0] for kind in differences.values() for found in kind), default=0.0)


# --- initial weights

MIN_ELEMENTS = 256
"""Of a tensor whose draws are compared: uncorrelated values of so many correlate above 0.5 once in 10^16."""
MIN_CORRELATION = 0.5
"""Scaled, clipped or orthogonalized draws correlate above 0.8 with the draws."""


def check_draws(config: ModelConfig, seed: int, drawn: Iterable[tuple[str, NDArray[np.float32]]]) -> dict[str, str]:
    """RuleError (seed) unless the weights `drawn` with `seed` are the baseline's, or made from them: a weight that the
    baseline (`config`) has in the same shape correlates with its draw there, or is constant.

    So a pair of runs shares what chance gives both; another distribution is a function of the same draws. Returns
    {name: hash} of what is not constant.
    """
    with torch.device("meta"):
        model = GPT(config)
    own, hashes = dict(initial_weights(model, config, seed)), {}
    for name, values in drawn:
        flat = values.astype(np.float64).reshape(-1)
        if flat.size < MIN_ELEMENTS or float(flat.std()) == 0:
            continue
        hashes[name] = hashlib.sha256(values.tobytes()).hexdigest()
        theirs = own.get(name)
        if theirs is None or tuple(theirs.shape) != values.shape or float(theirs.std()) == 0:
            continue
        correlation = float(np.corrcoef(flat, theirs.double().numpy().reshape(-1))[0, 1])
        if not abs(correlation) >= MIN_CORRELATION:
            what = f"the first values of {name} are not made from the baseline's draws"
            raise RuleError("seed", f"{what} (correlation {correlation:.2f}, at least {MIN_CORRELATION})")
    return hashes


def check_two_seeds(one: Mapping[str, str], other: Mapping[str, str]) -> None:
    """RuleError (seed) where a weight starts with the same values for two seeds; both as `check_draws` returns them."""
    for name in one.keys() & other.keys():
        if one[name] == other[name]:
            raise RuleError("seed", f"{name} starts with the same values for two seeds")


# --- time

TIME_TOLERANCE = 0.5
"""Share above which it is too much. Measured: see docs/judge.md."""
SLACK_SECONDS = 5.0
"""Added to both times: the start of Python and torch depends on what the disk has cached."""


def check_time(finished: Finished, *, cpu_seconds: float, wall_seconds: float) -> None:
    """RuleError (cpu-time, wall-clock) where training took more than its steps and a start like the baseline's should
    take: it trained off the clock, or was slower than when its steps were timed."""
    times: tuple[tuple[Rule, str, float, float], ...] = (
        ("cpu-time", "CPU seconds", finished.cpu_seconds, cpu_seconds),
        ("wall-clock", "seconds", finished.wall_seconds, wall_seconds),
    )
    for rule, unit, took, due in times:
        if took > (most := due * (1 + TIME_TOLERANCE) + SLACK_SECONDS):
            what = f"training took {took:.1f} {unit}; its steps and a start take {due:.1f} (at most {most:.1f})"
            raise RuleError(rule, what)


# --- the run's own report

REPORT_TOLERANCE = 2e-3
"""Relative. A compiled bfloat16 model differs by up to 0.001 from the same weights without compilation."""


def check_report(claimed: float | None, loss: Loss) -> None:
    """RuleError (report) where the run's own last bits per byte (None: it claims nothing) are not the judge's."""
    if claimed is not None and not abs(claimed - loss.val_bpb) <= REPORT_TOLERANCE * loss.val_bpb:
        raise RuleError("report", f"the run reports {claimed:.6f} bits per byte; its weights have {loss.val_bpb:.6f}")


# --- the lab's folders


@contextmanager
def unchanged(folders: Iterable[Path]) -> Iterator[None]:
    """RuleError (private-files) if a file in one of the folders was changed, added or removed within the context."""
    folders = list(folders)
    before = _contents(folders)
    yield
    after = _contents(folders)
    different = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    if different:
        raise RuleError("private-files", f"{different[0]} was changed, added or removed ({len(different)} in all)")


def _contents(folders: Iterable[Path]) -> dict[str, str]:
    """{path: kind and SHA-256} of everything in the folders."""
    found: dict[str, str] = {}
    for folder in folders:
        for inner, _, files in os.walk(folder):
            found[inner] = "folder"
            for path in (Path(inner, name) for name in files):
                if path.is_symlink():
                    found[str(path)] = f"link to {os.readlink(path)}"
                elif path.is_file():
                    with path.open("rb") as file:
                        found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
