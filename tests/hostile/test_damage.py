"""The files of a checkpoint, damaged in every way: found and named, and the run goes on from the one before."""

from __future__ import annotations

import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_figures
import pytest
from forked_runs import Ended, ForkedRuns
from oracle_checkpoint import same_bits
from tiny_runs import Outcome, arguments, differences, outcome

from gptlab.training.checkpoint.format import DamagedCheckpointError
from gptlab.training.checkpoint.load import load_checkpoint, load_newest
from gptlab.training.checkpoint.names import list_checkpoints

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs fork"),
    pytest.mark.faults,
    pytest.mark.timeout(1800),
]

FLAGS: dict[str, Any] = {
    "steps": 4, "model.n_layer": 1, "eval.every_steps": 2, "eval.tokens": 64, "sample.prompts": [],
    "checkpoint.every_steps": 1, "checkpoint.keep_last": 4,
}  # fmt: skip
FLIPS = 500
RESUMED_EVERY = 10
"""Of the flips; each is read by the code that a resume reads with."""
SEED = 11


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[ForkedRuns]:
    with ForkedRuns(folder) as runs:
        yield runs


class Stopped:
    """A run on so many ranks that was killed behind the checkpoint of step 3, with those of steps 1 to 3."""

    def __init__(self, runs: ForkedRuns, folder: Path, ranks: int) -> None:
        self.runs = runs
        self.ranks = ranks
        self.template = folder / f"whole-{ranks}"
        if not self.template.exists():
            argv = ["train", *arguments(folder, self.template.name, FLAGS)]
            assert runs.run(argv, ranks=ranks).codes == [0] * ranks
        self.expected: Outcome = outcome(self.template)
        self.run = folder / f"damaged-{ranks}"
        self.checkpoints = self.run / "checkpoints"

    def restore(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.template, self.run)
        (self.run / "summary.json").unlink()
        shutil.rmtree(list_checkpoints(self.checkpoints)[-1])

    @property
    def newest(self) -> Path:
        return list_checkpoints(self.checkpoints)[-1]

    def files(self) -> list[Path]:
        return sorted(self.newest.iterdir())

    def unnoticed(self, harmed: Path, *, anywhere: bool = False) -> str | None:
        """What is wrong with how a load takes the damage to a file; None where nothing is. `anywhere`: another file may
        be named."""
        lines: list[str] = []
        loaded = load_newest(self.checkpoints, lines.append)
        if loaded.step != 2 or len(lines) != 1:
            return f"read as step {loaded.step}, with {lines}"
        said = lines[0]
        names = r"\w+(-[0-9]+-of-[0-9]+)?\.(safetensors|json)" if anywhere else re.escape(harmed.name)
        return None if self.newest.name in said and re.search(names, said) else f"told as {said}"

    def wrong(self, harmed: str) -> str | None:
        """The same for a resume, to its end."""
        ended: Ended = self.runs.run(["train", "--resume", self.run], ranks=self.ranks)
        if ended.codes != [0] * self.ranks or "step-00000003 is damaged" not in ended.output:
            return f"{harmed}: {ended}"
        found = differences(self.expected, outcome(self.run))
        return f"{harmed}: {found}" if found else None


def test_a_bit_turned_over(runs: ForkedRuns, folder: Path) -> None:
    """Half of them in the files of one process, half in those of two; as many in each file. Every tenth is resumed."""
    started = time.perf_counter()
    chance = random.Random(SEED)
    problems = []
    for number in range(FLIPS):
        stopped = Stopped(runs, folder, ranks=1 + number % 2)
        resumed = number // 2 % RESUMED_EVERY == 0
        if resumed or number < 2:
            stopped.restore()
        files = stopped.files()
        path = files[number // 2 % len(files)]
        whole = path.read_bytes()
        content = bytearray(whole)
        byte, bit = chance.randrange(len(content)), chance.randrange(8)
        content[byte] ^= 1 << bit
        path.write_bytes(content)
        what = f"{stopped.ranks} ranks, {path.name}, byte {byte}, bit {bit}"
        # What the manifest says of a file is compared with that file, which may be the one that is named.
        problem = stopped.unnoticed(path, anywhere=path.name == "manifest.json")
        if problem is None and resumed:
            problem = stopped.wrong(what)
            stopped.restore()
        path.write_bytes(whole)
        problems += [f"{what}: {problem}"] if problem else []
    fault_figures.note("flips", done=FLIPS, problems=problems, started=started)


def cut(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shorter(path: Path, other: Path) -> None:
    """By two bytes: the last one of a manifest is a line's end, without which it says the same."""
    path.write_bytes(path.read_bytes()[:-2])


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def longer(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def zeros(path: Path, other: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def zero_block(path: Path, other: Path) -> None:
    """As a disk does that lost a sector: the last one that is not zero anyway."""
    content = bytearray(path.read_bytes())
    start = max(start for start in range(0, len(content), 512) if any(content[start : start + 512]))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)


def gone(path: Path, other: Path) -> None:
    path.unlink()


def mixed(path: Path, other: Path) -> None:
    """The file of another checkpoint of the same run."""
    shutil.copy(other, path)


def mixed_with_manifest(path: Path, other: Path) -> None:
    """All files but this one of another checkpoint, its manifest too: only the step tells them apart."""
    for theirs in other.parent.iterdir():
        if theirs.name != path.name:
            shutil.copy(theirs, path.parent / theirs.name)


def test_a_file_damaged(runs: ForkedRuns, folder: Path) -> None:
    started = time.perf_counter()
    harms: list[Callable[[Path, Path], None]] = [
        cut, shorter, empty, longer, zeros, zero_block, gone, mixed, mixed_with_manifest,
    ]  # fmt: skip
    done, problems = 0, []
    for ranks in (1, 2):
        stopped = Stopped(runs, folder, ranks)
        stopped.restore()
        for name in [path.name for path in stopped.files()]:
            for number, harm in enumerate(harms):
                stopped.restore()
                path = stopped.newest / name
                before = path.read_bytes()
                harm(path, list_checkpoints(stopped.checkpoints)[-2] / name)
                what = f"{ranks} ranks, {name}, {harm.__name__}"
                assert harm is mixed_with_manifest or not path.exists() or path.read_bytes() != before, what
                problem = stopped.unnoticed(path, anywhere=name == "manifest.json" or harm is mixed_with_manifest)
                if ranks == 1 or number % len(harms) == done % len(harms):
                    problem = problem or stopped.wrong(what)
                done += 1
                problems += [f"{what}: {problem}"] if problem else []
    fault_figures.note("damage", done=done, problems=problems, started=started)


def test_the_comparison_would_notice(runs: ForkedRuns, folder: Path) -> None:
    """What was not damaged is read as it is, and the files of two checkpoints differ."""
    stopped = Stopped(runs, folder, ranks=1)
    stopped.restore()
    last, former = (load_checkpoint(path) for path in list_checkpoints(stopped.checkpoints)[:0:-1])
    assert not same_bits(last.model, former.model)
    assert stopped.unnoticed(stopped.newest / "state.json") == "read as step 3, with []"
    (stopped.newest / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpointError):
        load_checkpoint(stopped.newest)
