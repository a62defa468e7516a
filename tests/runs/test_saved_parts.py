"""Leave out each part of a checkpoint in turn, found by walking what is saved: something must notice."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fault_figures
import pytest
import torch
from forked_runs import Ended, ForkedRuns
from oracle_checkpoint import same_bits
from test_broken_steps import broken_loss
from tiny_runs import FakeClock, arguments, at_line, differences, make_config, outcome
from torch import Tensor

from gptlab.app.run.session import open_session
from gptlab.bench.training_rate import Rate
from gptlab.eval.bits_per_byte import evaluate
from gptlab.runtime.hardware.peak import Peak
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.hardware.rng import capture_rng, seed_everything
from gptlab.runtime.records.console import Console
from gptlab.training.checkpoint.load import Checkpoint, load_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.write import save_checkpoint
from gptlab.training.state import TrainState

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

CPU = torch.device("cpu")
NOTHING = object()
STARTUP = 7.0
"""Seconds."""


@dataclass(frozen=True)
class Scene:
    """A run that is killed right after a line, and so resumes from the checkpoint before it."""

    killed_behind: tuple[str, int]
    changes: dict[str, Any] = field(default_factory=dict)
    within: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


@contextlib.contextmanager
def getting_worse() -> Iterator[None]:
    """Within the context, the validation of step 4 is the best one: what is measured is turned over at its value."""

    def turned(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        worse = max(result.val_loss, 2 * LOSS_OF_STEP_4 - result.val_loss)
        return replace(result, val_loss=worse, val_bpb=result.val_bpb * worse / result.val_loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gptlab.app.run.session.evaluate", turned)
        yield


LOSS_OF_STEP_4 = 5.0
"""About: it falls from 5.5 to 4."""


@contextlib.contextmanager
def lively_loss_scale() -> Iterator[None]:
    """Within the context, float16's loss scale grows after three good steps, not after 2000."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gptlab.training.state._GOOD_STEPS", 3)
        yield


SCENES = {
    "in the middle": Scene(("train", 9)),
    "at the end": Scene(("checkpoint", 12)),
    "by the clock": Scene(
        ("train", 9),
        {"minutes": 0.25, "eval.every_steps": None, "eval.every_seconds": 4.0, "checkpoint.every_steps": None,
         "sample.every_steps": None, "sample.every_seconds": 3.0, "checkpoint.every_seconds": 2.5,
         "schedule.warmup_fraction": 0.0},
    ),
    "with a loss scale": Scene(
        ("train", 9), {"runtime.dtype": "float16", "eval.core_every_steps": None}, lively_loss_scale
    ),
    "updates left out": Scene(("train", 10), {}, broken_loss(6, 7, 8).in_training),
    "getting worse": Scene(("train", 9), {"eval.every_steps": 4, "checkpoint.keep_last": 1}, getting_worse),
    "loss spikes": Scene(
        ("checkpoint", 12),
        {"steps": 16, "faults.spike_factor": 3.0, "faults.spike_window": 4},
        broken_loss(9, 14, factor=50.0).in_training,
    ),
}  # fmt: skip
"""Together they make every part of a checkpoint differ from what it is at the start. No dropout: it draws from
generators that each micro-batch seeds again, so that what a checkpoint says of them would not matter."""
BASE: dict[str, Any] = {
    "model.n_layer": 1, "model.dropout": 0.0, "eval.core_every_steps": 6, "checkpoint.background": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[ForkedRuns]:
    with ForkedRuns(folder) as runs:
        yield runs


Parts = dict[str, Any]
"""{where in a checkpoint: the tensors of a kind, or a JSON value}."""


def walk(value: Any, name: str) -> Parts:
    """Every entry, those that hold others too; the configuration, whose fields are compared as one, is one."""
    inner = value if isinstance(value, Mapping) and name != "/state/run/config" else {}
    return {name: value} | {path: part for key in inner for path, part in walk(inner[key], f"{name}/{key}").items()}


def within(one: str, other: str) -> bool:
    """Whether one of the two entries is the other, or in it."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def kind_of(name: str, tensor: str) -> str:
    """Of a moment its name, of a weight that without its layer, of a generator all."""
    is_moment = name == "optimizer" and not tensor.startswith("rng.")
    return f"/{name}/*.{tensor.rpartition('.')[2]}" if is_moment else f"/{name}/{re.sub('[0-9]+', '*', tensor)}"


def parts_of(saved: Checkpoint) -> Parts:
    parts = {path: part for key in saved.state for path, part in walk(saved.state[key], f"/state/{key}").items()}
    for name in ("model", "optimizer"):
        for tensor, value in getattr(saved, name).items():
            parts.setdefault(kind_of(name, tensor), {})[tensor] = value
    return parts


def altered(saved: Checkpoint, part: str, value: Any) -> Checkpoint:
    """With `value` as the part; NOTHING: without it. "" changes nothing."""
    if not part:
        return saved
    name = part.split("/")[1]
    if name == "state":
        return replace(saved, state=_with_entry(saved.state, part.split("/")[2:], value))
    tensors = getattr(saved, name)
    kept = {tensor: held for tensor, held in tensors.items() if kind_of(name, tensor) != part}
    return replace(saved, **{name: kept if value is NOTHING else tensors | value})


def _with_entry(state: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    if len(path) > 1:
        return {**state, path[0]: _with_entry(state[path[0]], path[1:], value)}
    kept = {key: held for key, held in state.items() if key != path[0]}
    return kept if value is NOTHING else {**state, path[0]: value}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict) and any(isinstance(v, Tensor) for v in one.values()):
        return same_bits(one, other)
    return repr(one) == repr(other)


def another(part: str, value: Any) -> Any:
    """A value of the same type that is not this one."""
    if part.startswith("/optimizer/rng."):
        seed_everything(99, CPU)
        return {name: capture_rng(CPU)[name.removeprefix("rng.")] for name in value}
    if part.startswith(("/model/", "/optimizer/")):
        return {name: tensor + 1 for name, tensor in value.items()}
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, dict):
        return {"another": [1]}
    return value + type(value)(1) if isinstance(value, int | float) else [*value, 1]


def zero(value: Any) -> Any:
    """What a counter begins with."""
    if isinstance(value, Mapping):
        return {name: zero(inner) for name, inner in value.items()}
    return not value if isinstance(value, bool) else type(value)() if isinstance(value, int | float) else None


def keywords(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Flags as `make_config` takes them."""
    return {name.replace(".", "__"): value for name, value in changes.items()}


@contextlib.contextmanager
def in_scene(*, name: str, rank: int, killed: bool = False) -> Iterator[None]:
    """Within the context, the clock is the test's, what is to break breaks, and the run is killed where it is to be."""
    scene = SCENES[name]
    with contextlib.ExitStack() as stack:
        # A clock that stands still measures no machine, and what each process measures is never twice the same.
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        peak = Peak(1e11, "measured")
        patch.setattr("gptlab.runtime.hardware.place.peak_flops_per_second", lambda device, dtype: peak)
        patch.setattr("gptlab.bench.training_rate.time_rate", lambda *args: Rate(1.0, 1e11, 64, "2026-01-01"))
        clock = stack.enter_context(FakeClock.running())
        clock._charge(patch, "gptlab.app.run.session.make_passes", STARTUP)
        stack.enter_context(scene.within())
        if killed:
            kind, step = scene.killed_behind
            stack.enter_context(at_line(kind, step, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        yield


class Played:
    """A scene's run until it is killed, what every part of its checkpoint was at the start, and how it goes on."""

    def __init__(self, runs: ForkedRuns, folder: Path, name: str) -> None:
        self.runs = runs
        self.name = name
        self.run = folder / "run"
        self.template = folder / f"{name}, killed"
        changes = BASE | {"eval.core_dir": folder / "bundle"} | SCENES[name].changes
        whole = folder / f"{name}, whole"
        assert self.play(["train", *arguments(folder, whole.name, changes)]).codes == [0]
        shutil.rmtree(self.run, ignore_errors=True)
        assert self.play(["train", *arguments(folder, self.run.name, changes)], killed=True).was_killed
        self.run.rename(self.template)
        self.saved = load_checkpoint(list_checkpoints(self.template / "checkpoints")[-1])
        self.parts = parts_of(self.saved)
        self.initial = self.at_start(folder, changes)
        self.control = self.resumed(lambda saved: saved)
        assert differences(outcome(whole), outcome(self.run)) == []
        assert self.notices("", None) == [], "a resume that differs by itself would hide everything"

    def play(self, argv: Sequence[object], *, killed: bool = False) -> Ended:
        return self.runs.run(argv, within={"test_saved_parts.in_scene": {"name": self.name, "killed": killed}})

    def at_start(self, folder: Path, changes: dict[str, Any]) -> Parts:
        config = make_config(folder, "never-made", **keywords(changes))
        with Console() as console:
            state: TrainState = open_session(config, place_of(config), console).state
        model, other = ({one.name: one.tensor.clone() for one in kind} for kind in state.slices())
        at_start = parts_of(Checkpoint(0, model, other, state.to_json(), folder))
        return {name: at_start[name] if name in at_start else zero(value) for name, value in self.parts.items()}

    def resumed(self, alter: Callable[[Checkpoint], Checkpoint]) -> dict[str, Any]:
        """All that is to be seen of the run that goes on from an altered checkpoint."""
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.template, self.run)
        saved = alter(self.saved)
        save_checkpoint(
            self.run / "checkpoints", self.saved.step, model=saved.model, optimizer=saved.optimizer, state=saved.state
        )
        ended = self.play(["train", "--resume", self.run])
        if ended.codes != [0]:
            return {"refused": ended}
        checkpoints = list_checkpoints(self.run / "checkpoints")
        summary = json.loads((self.run / "summary.json").read_text())
        return {
            "damage": re.findall("is damaged: .*", ended.output),
            "lines": (self.run / "metrics.jsonl").read_text(),
            "log": re.sub(r"peak_vram_mb: .*", "", (self.run / "log.txt").read_text(encoding="utf-8")),
            "summary": {name: value for name, value in summary.items() if name != "peak_vram_mb"},
            "checkpoints": [path.name for path in checkpoints],
            "last": parts_of(load_checkpoint(checkpoints[-1])),
        }

    def notices(self, part: str, value: Any) -> list[str]:
        """In what the run with this as the part differs. The part's own way into the last checkpoint is no difference:
        it would only show that it is handed on."""
        seen, expected = self.resumed(lambda saved: altered(saved, part, value)), self.control
        if seen.keys() != expected.keys():
            return [str(seen)]
        different = [key for key in seen if key != "last" and seen[key] != expected[key]]
        # Weights and moments are what a run is for; of the generators' states it is promised that they go on.
        handed_on = part if part.startswith("/state/") else None
        last, expected_last = seen["last"], expected["last"]
        names = [name for name in last.keys() | expected_last.keys() if not handed_on or not within(name, handed_on)]
        return different + [name for name in names if not equal(last.get(name), expected_last.get(name))]


@pytest.fixture(scope="module")
def played(runs: ForkedRuns, folder: Path) -> dict[str, Played]:
    return {name: Played(runs, folder, name) for name in SCENES}


COMPARED_IF_THERE = "/state/implementations"
"""Checkpoints of earlier versions lack it and resume without a word; a difference is test_implementations' matter."""


def unnoticed(played: Mapping[str, Played], part: str) -> Iterator[str]:
    """Ways to leave a part out that nothing notices."""
    scenes = [scene for scene in played.values() if part in scene.parts]
    if part != COMPARED_IF_THERE and not any(scene.notices(part, NOTHING) for scene in scenes):
        yield f"{part} left out"
    # Forgotten by the code that saves or restores it, it would stay as it was at the start.
    forgotten = [scene for scene in scenes if not equal(scene.initial[part], scene.parts[part])]
    if forgotten and not any(scene.notices(part, scene.initial[part]) for scene in forgotten):
        yield f"{part} as at the start: {forgotten[0].initial[part]}"
    # What never changes must still be what it is.
    if not forgotten and not any(scene.notices(part, another(part, scene.parts[part])) for scene in scenes):
        yield f"{part} as {another(part, scenes[0].parts[part])}, though it never changes"


def test_every_part_counts(played: dict[str, Played]) -> None:
    started = time.perf_counter()
    parts = {part: None for scene in played.values() for part in scene.parts}
    problems = [problem for part in parts for problem in unnoticed(played, part)]
    fault_figures.note("parts", done=len(parts), problems=problems, started=started)
