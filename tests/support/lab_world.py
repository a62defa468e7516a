"""A lab whose runs are numbers: training and judging take no time and follow a formula, everything else is the lab's
own code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import make_config, write_corpus

import gptlab
from gptlab.data.prepare import prepare
from gptlab.lab.experiments import folder as folder_module
from gptlab.lab.experiments import runs
from gptlab.lab.experiments.equal_time import ProcessFailedError
from gptlab.lab.experiments.folder import Lab, Settings, create
from gptlab.lab.experiments.ledger import Experiment
from gptlab.lab.experiments.proposal import Proposal
from gptlab.lab.experiments.runs import Trained, Variant
from gptlab.lab.judge.supervise import Finished
from gptlab.runtime.records.provenance import code_fingerprint

SPEED = {"batch.micro_sequences": 1.25}
"""Fields that make steps faster, and by how much."""
CRASHES = {"model.activation": "gelu_tanh"}
"""Fields with which a run crashes."""
PAIRED_SD = 0.001
SOURCES = ("__init__.py", "eval/bits_per_byte.py", "model/gpt.py", "optim/schedule.py")
"""The code of labs, none of which runs: that of the whole package would be copied hundreds of times."""


def new_lab(folder: Path, **changes: Any) -> Lab:
    """A lab on a small corpus, with nothing trained."""
    if not (folder / "corpus").exists():
        write_corpus(folder / "corpus", documents=60)
    config = make_config(folder, "never", sample__prompts=())
    settings = Settings(
        **({"name": "lab", "recipe": "quickstart", "seconds": None, "steps": 100, "validation_bytes": {}} | changes)
    )
    package, few = Path(gptlab.__file__).parent, folder / "few" / "gptlab"
    for name in SOURCES:
        (few / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package / name, few / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_module, "gptlab", SimpleNamespace(__file__=str(few / "__init__.py")))
        patch.setattr(folder_module, "code_fingerprint", lambda package: _own_fingerprint())  # of what judges
        return create(folder / "lab", config, prepare(config.data, config.tokenizer), settings)


@functools.cache
def _own_fingerprint() -> str:
    return code_fingerprint(Path(gptlab.__file__).parent)


def bpb_of(fields: Mapping[str, Any], seed: int) -> float:
    """1.5, less what `optim.head.lr` is worth (0.01 a unit) and `optim.vector.lr` costs, and noise: of the seed, and of
    fields and seed."""
    worth = 0.01 * (float(fields.get("optim.head.lr", 0.0)) - float(fields.get("optim.vector.lr", 0.0)))
    return 1.5 - worth + 0.01 * _noise("seed", seed) + PAIRED_SD * _noise(json.dumps(sorted(fields.items())), seed)


def _noise(what: str, seed: int) -> float:
    """About standard normal: the sum of twelve uniform numbers."""
    draws = hashlib.sha256(f"{what} {seed}".encode()).digest()[:12]
    return sum(draw / 255 for draw in draws) - 6


@contextlib.contextmanager
def formula(trained: list[tuple[int, int]] | None = None) -> Iterator[pytest.MonkeyPatch]:
    """Within the context, runs follow `bpb_of`, and what its patch changes is as before at the end. `trained`: gets
    (experiment, seed) of each that is trained."""

    def train(lab: Lab, variant: Variant, seed: int) -> Trained:
        run = runs.run_folder(lab, variant.number, seed)
        if variant.fields.items() >= CRASHES.items():
            raise ProcessFailedError("the activation failed")
        checkpoint = run / "checkpoints" / "step-00000100"
        checkpoint.mkdir(parents=True, exist_ok=True)
        weights = "same" if variant.fields.get("runtime.allocator") else repr(sorted(variant.fields.items()))
        (checkpoint / "optimizer.safetensors").touch()
        (checkpoint / "model.safetensors").write_text(weights if variant.fields else "same")
        if trained is not None:
            trained.append((variant.number, seed))
        return Trained(run, Finished(0, 10.0, 10.0, 2**20, None, (), ()), resumed=False)

    def drop_moments(run: Path) -> None:
        next(run.glob("checkpoints/*/optimizer.safetensors")).unlink()

    def same_weights(one: Path, other: Path) -> bool:
        first, second = (next(run.glob("checkpoints/*/model.safetensors")).read_text() for run in (one, other))
        return first == second

    def judge(lab: Lab, variant: Variant, run: Path, where: str, seed: int, against: int) -> Any:
        fields = {name: value for name, value in variant.fields.items() if name != "runtime.allocator"}
        loss = SimpleNamespace(val_bpb=bpb_of(fields, seed))
        return SimpleNamespace(loss=loss, parameters=1000, step=variant.steps)

    @contextlib.contextmanager
    def steps_of(
        lab: Lab, variant: Variant, steps: int, run_seconds: float = 0.0, *, place: Path | None = None
    ) -> Iterator[Any]:
        seconds = 0.1
        for name in variant.fields:
            seconds /= SPEED.get(name, 1.0)
        known = {"config": dict(variant.fields), "tokens_per_step": 100, "flops_per_step": 100}
        yield SimpleNamespace(ready=lambda: known, step=lambda: seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "train", train)
        patch.setattr(runs, "drop_moments", drop_moments)
        patch.setattr(runs, "same_weights", same_weights)
        patch.setattr(runs, "judge", judge)
        patch.setattr(runs, "steps_of", steps_of)
        yield patch


def in_order(*proposals: Proposal) -> Any:
    """A program that proposes these, one after the other, by how many the lab has."""

    def propose(lab: Lab) -> Proposal:
        return proposals[max(lab.ledger.experiments()) - 1]

    return propose


def told(experiment: Experiment) -> dict[str, Any]:
    """What an experiment came to, without times."""
    verdict = {name: value for name, value in (experiment.verdict or {}).items() if name != "time"}
    return {
        "fields": dict(experiment.fields), "files": experiment.files, "steps": experiment.steps,
        "bpb": experiment.bpb, "verdict": verdict, "against": experiment.against,
    }  # fmt: skip


def quiet(text: str) -> None:
    """What a lab says, unheard."""
