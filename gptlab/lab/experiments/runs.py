"""The processes of an experiment: runs, and steps one at a time, each supervised.

A process can write in a folder of its own alone, which is moved or removed when it has ended: what one process of a
candidate leaves, no other finds. Weights that it trained while its steps were timed would otherwise cost it no time.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gptlab.config.errors import UserError, cannot
from gptlab.config.load import config_to_json, flatten
from gptlab.data.rows import validation_rows
from gptlab.lab.experiments.equal_time import ProcessFailedError, StepProcess, last_words
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import Experiment, Slice, all_fields
from gptlab.lab.experiments.proposal import code_of
from gptlab.lab.judge.judging import Baseline, Judged, damage_breaks, judge_run
from gptlab.lab.judge.questions import Questions
from gptlab.lab.judge.rules import RuleError
from gptlab.lab.judge.supervise import (
    Finished,
    Limits,
    candidate_environment,
    copy_compiled,
    printed_to,
    start,
    supervise,
    texts_in_cache,
)
from gptlab.lab.sweep import words_of
from gptlab.runtime.files.plain_file import read_json_object, to_json, write_json_atomic
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.load import load_checkpoint, read_manifest, verify_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints, step_of
from gptlab.training.checkpoint.write import remove_tree, save_checkpoint

START_SECONDS = 900.0
"""The longest that reading data and compiling may take. A cold compilation takes two minutes on one slow core."""
SLOW_START = 10.0
"""Where runs are not compiled, a start may take this many times the seconds that the baseline's first took."""
SLOWER = 4.0
"""A run may take this many times the seconds that its steps took when they were timed: the machine may be busy."""
TIMING = "work-timing-"
"""Prefix of the names of the folders in which steps are timed."""
LEAST_SECONDS = 120.0
"""What a start and a step may take in any case: that of a cold compilation."""
MEMORY_SHARE = 0.9
MIN_FREE_BYTES = 1 << 24
"""What a run writes beside its checkpoints (records, logs, a copy of changed code) is a tenth of it."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What is trained: a baseline or a candidate."""

    number: int
    fields: Mapping[str, Any]
    """On top of the lab's baseline configuration."""
    code: Path
    """The folder with its package."""
    steps: int | None
    step_seconds: float | None = None
    """Seconds of one of its steps, when they were timed."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A run that has finished, within the rules."""

    run: Path
    finished: Finished
    """How its process ended."""
    resumed: bool
    """Whether the run was stopped before: `finished` is then of its last process alone."""


def variant_of(lab: Lab, experiment: Experiment, experiments: Mapping[int, Experiment]) -> Variant:
    code = code_of(lab, experiment, experiments)
    return Variant(
        experiment.number, all_fields(experiment, experiments), code, experiment.steps, experiment.step_seconds
    )


def run_folder(lab: Lab, number: int, seed: int) -> Path:
    return lab.experiment(number) / "runs" / f"seed-{seed}"


def train(lab: Lab, variant: Variant, seed: int) -> Trained:
    """The finished run of `variant` with `seed`: trained now, resumed where it was stopped, or as it is where it was
    finished already. A run that began before the lab was moved is trained again from its start.

    ProcessFailedError, RuleError where it does not finish, also where its loss broke. UserError where it fails and the
    lab's disk is full.
    """
    run = run_folder(lab, variant.number, seed)
    began = _work(lab, variant, run.name) / run.name
    for path in (run, began):
        if _is_of_another_place(lab, path):
            remove_tree(path)
    # Beside the run, where its process cannot write: a lab that was stopped while it judged still checks the time.
    ended = run.with_name(f"{run.name}.json")
    if ended.exists() and RunDirectory(run).recorded().get("status") == "finished":
        values: dict[str, Any] = read_json_object(ended)
        return Trained(run, Finished(**{**values["finished"], "left": (), "opened": ()}), values["resumed"])
    if resumed := (began / "config.json").is_file():
        words = ["train", "--resume", str(began), "--quiet"]
    else:
        shutil.rmtree(began.parent, ignore_errors=True)
        words = _words_for(lab, variant, began, seed)
    finished = _train(lab, variant, run, words)
    write_json_atomic(ended, {"finished": asdict(finished), "resumed": resumed})
    return Trained(run, finished, resumed)


def _is_of_another_place(lab: Lab, run: Path) -> bool:
    """Whether the run, if there is one, reads the tokenizer (and the data) where the lab was before it was moved."""
    with suppress(UserError):
        return flatten(RunDirectory(run).read_config()).get("tokenizer.path") != lab.places()["tokenizer.path"]
    return False


def train_again(lab: Lab, variant: Variant, seed: int, *, candidate: int, same_as: Path | None = None) -> Finished:
    """Train what is trained already, only to see what it costs now, for the check of one candidate.

    With `same_as`, a run: RuleError where it does not finish (checkpoint), or ends with other weights than that run
    (wall-clock).
    """
    run = run_folder(lab, variant.number, seed).with_name(f"again-for-{candidate}")
    work = _work(lab, variant, run.name)
    shutil.rmtree(work, ignore_errors=True)  # of a lab that was killed
    try:
        finished = _train(lab, variant, run, _words_for(lab, variant, work / run.name, seed))
        if same_as is not None:
            with damage_breaks("checkpoint"):
                is_finished = RunDirectory(run).read_provenance()["status"] == "finished"
                if not is_finished or step_of(list_checkpoints(run / "checkpoints")[-1]) != variant.steps:
                    raise RuleError("checkpoint", f"trained again, it did not finish its {variant.steps:,} steps")
            # Otherwise it could have trained off the clock the first time alone: it can see which time it is.
            if not same_weights(run, same_as):
                raise RuleError("wall-clock", "training took too long, and trained again it ended with other weights")
        return finished
    finally:
        shutil.rmtree(run, ignore_errors=True)


def same_weights(one: Path, other: Path) -> bool:
    """Whether two finished runs ended with the same weights, to the bit. RuleError (checkpoint) where one is damaged:
    a candidate may have written in its manifest what it wants."""
    found = []
    for run in (one, other):
        with damage_breaks("checkpoint"):
            newest = list_checkpoints(run / "checkpoints")[-1]
            verify_checkpoint(newest)
            manifest = read_manifest(newest)
            found.append([manifest.files[name] for name in manifest.files_of("model")])
    return found[0] == found[1]


def _words_for(lab: Lab, variant: Variant, run: Path, seed: int) -> list[str]:
    assert variant.steps is not None
    given = arguments(lab, variant, seed=seed, steps=variant.steps) | {"run_dir": str(run)}
    return ["train", *words_of(given), "--quiet"]


def _train(lab: Lab, variant: Variant, run: Path, words: Sequence[str]) -> Finished:
    """Train in a folder of the process's own, from which the run is moved to `run`."""
    assert variant.steps is not None
    run.parent.mkdir(parents=True, exist_ok=True)
    log, work = run.with_name(f"{run.name}.log"), _work(lab, variant, run.name)
    seconds = _start_seconds(lab) + SLOWER * variant.steps * (variant.step_seconds or 1.0)
    process = _process(lab, variant, work, _cache(lab, variant, work))
    finished = supervise([sys.executable, "-m", "gptlab", *words], **process, log=log, limits=limits(seconds))
    free = shutil.disk_usage(lab.path).free  # before the folder of the process is removed
    trained = work / run.name
    try:
        if os.path.lexists(trained):
            with damage_breaks("checkpoint"), cannot(f"read {trained}"):
                _make_own(trained)
        if trained.is_dir():
            remove_tree(run)
            trained.replace(run)
    finally:
        remove_tree(work)
    if finished.timed_out:
        raise ProcessFailedError(f"training took longer than {seconds:.0f} s", timed_out=True)
    finished.require_lawful("training")
    if finished.exit_code != 0:
        if free < _space_of_run(lab):
            what = f"the disk of {lab.path} has {free:,} bytes left: free some space, then finish what is in flight"
            raise UserError(f"experiment {variant.number} failed to train, and {what}")
        with log.open("rb") as printed:
            raise ProcessFailedError(last_words(printed) or f"training ended with exit code {finished.exit_code}")
    return finished


def _make_own(path: Path) -> None:
    """Let the lab write in every folder of a run that a process left. RuleError for what is not a regular file or
    folder: a link would lead the lab to files that are not the run's, which it would judge, and remove."""
    mode = path.lstat().st_mode
    if stat.S_ISDIR(mode):
        path.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)
        for entry in path.iterdir():
            _make_own(entry)
    elif not stat.S_ISREG(mode):
        raise RuleError("checkpoint", f"{path.name} is not a regular file or folder")


def _space_of_run(lab: Lab) -> int:
    """Bytes below which a run may have failed for lack of space: it has two checkpoints while it saves one, each with
    two moments for every weight."""
    saved = run_folder(lab, 0, lab.settings.first_seed) / "checkpoints"
    return MIN_FREE_BYTES + 2 * 3 * sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())


def drop_moments(run: Path) -> None:
    """Save the checkpoint of a judged run without the optimizer's tensors, two thirds of it: nothing trains it on.
    CheckpointError where the disk is full."""
    saved = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    # What a candidate wrote in state.json may be read and not written: such a checkpoint stays as it is.
    with suppress(ValueError):
        save_checkpoint(run / "checkpoints", saved.step, model=saved.model, optimizer={}, state=saved.state)


def judge(lab: Lab, variant: Variant, run: Path, where: Slice, seed: int, against: int) -> Judged:
    """What the judge finds of the finished run of `variant` with `seed`. Audits look where it gained over the run of
    `against`, the experiment that is its baseline. RuleError for a rule that the run breaks."""
    tokenizer, text = lab.tokenizer(), lab.slice(where)
    config = lab.run_config(seed, tokenizer.vocab_size)
    limit = config.eval.tokens
    rows = validation_rows(text, config.model.seq_len, tokenizer.bos_id, limit)
    questions = Questions(rows, tokenizer, config.model.seq_len, f"{where} of {lab.settings.data_fingerprint}", limit)
    theirs = _nats_path(lab, against, where, seed)
    baseline = Baseline(
        config=config_to_json(config), model=config.model,
        nats=np.load(theirs, allow_pickle=False) if theirs.exists() else None,
    )  # fmt: skip
    judged = judge_run(
        run, questions, tree=variant.code, limits=limits(START_SECONDS), baseline=baseline,
        hidden=[lab.path, *lab.texts()[0]], cache=lab.experiment(0) / "cache",
        log=run.with_name(f"{run.name}.answers.log"),
    )  # fmt: skip
    own = _nats_path(lab, variant.number, where, seed)
    own.parent.mkdir(exist_ok=True)
    np.save(own, judged.nats)
    return judged


def _nats_path(lab: Lab, number: int, where: Slice, seed: int) -> Path:
    """The nats of every target of a judged run."""
    return lab.private / "nats" / f"{number:04}-{where}-{seed}.npy"


@contextmanager
def steps_of(
    lab: Lab, variant: Variant, steps: int, run_seconds: float = START_SECONDS, *, place: Path | None = None
) -> Iterator[StepProcess]:
    """Within the context, a process that makes steps of the variant when it is asked. Its schedule is that of a run of
    `steps` steps. `run_seconds`: of the baseline's run. What takes much longer for one step can make none in its time.
    `place`: the folder of the experiment that is timed; None: that of the variant. RuleError at the end, whatever else
    went wrong, where it opened a hidden file.
    """
    own = lab.experiment(variant.number)
    for folder in (own, place or own):
        folder.mkdir(parents=True, exist_ok=True)
    # Of this process alone: several workers time the same baseline at one time.
    work = Path(tempfile.mkdtemp(prefix=TIMING, dir=place or own))
    process = _process(lab, variant, work, _cache(lab, variant, work, keep=_is_compiled(lab)))
    log = own / "timing.log"
    given = arguments(lab, variant, seed=lab.settings.first_seed, steps=steps)
    longest = min(max(SLOWER * run_seconds, LEAST_SECONDS), START_SECONDS)
    argv = [sys.executable, "-m", "gptlab.app.step_timer", to_json(given), str(0.9 * longest)]
    limit = limits(2 * START_SECONDS)
    try:
        with printed_to(log, limit) as printed, start(argv, **process, limits=limit, stderr=printed) as running:
            try:
                yield StepProcess(running, printed, max(_start_seconds(lab), longest), longest)
            finally:
                running.stop()
                if opened := running.finish().opened:  # also where that made it fail: a decoy is empty
                    raise RuleError("private-files", f"the timing of its steps opened {', '.join(opened)}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def forget_timings(lab: Lab, number: int) -> None:
    """Remove the folders of killed processes that timed this experiment, which nobody times now."""
    for path in lab.experiment(number).glob(f"{TIMING}*"):
        shutil.rmtree(path, ignore_errors=True)


def _start_seconds(lab: Lab) -> float:
    """The longest that a start may take in this lab."""
    took = lab.ledger.experiments()[0].start_seconds
    if took is None or _is_compiled(lab):
        return START_SECONDS
    return min(max(SLOW_START * took, LEAST_SECONDS), START_SECONDS)


def arguments(lab: Lab, variant: Variant, *, seed: int, steps: int) -> dict[str, Any]:
    """The arguments of `gptlab.train()` for a run of the variant. No proposed field replaces what the lab decides."""
    decided = {"from": str(lab.path / "baseline"), "steps": steps, "seed": seed}
    return dict(variant.fields) | decided | lab.places()


def limits(seconds: float) -> Limits:
    """Those of a process that may take so many seconds on this machine."""
    memory = int(MEMORY_SHARE * psutil.virtual_memory().total)
    return Limits(wall_seconds=seconds, cpu_seconds=seconds * (os.cpu_count() or 1), memory_bytes=memory)


def forget(lab: Lab, number: int) -> None:
    """Remove what an experiment that was not kept needs no more: weights, its cache and its copy of the package."""
    folder = lab.experiment(number)
    for path in (folder / "cache", folder / "tree", *folder.glob("work-*"), *folder.glob("runs/*/checkpoints")):
        shutil.rmtree(path, ignore_errors=True)
    for path in (lab.private / "nats").glob(f"{number:04}-*.npy"):
        path.unlink(missing_ok=True)


def forget_promotion(lab: Lab, number: int) -> None:
    """Remove the weights of the experiment's runs that a promotion trained. What the judge kept of them stays: the
    audits of later promotions look where a candidate gained over them."""
    for where, seed in lab.ledger.experiments()[number].bpb:
        if where == "promotion":
            shutil.rmtree(run_folder(lab, number, seed) / "checkpoints", ignore_errors=True)


def _work(lab: Lab, variant: Variant, name: str) -> Path:
    """The folder that one process of the variant may write in."""
    return lab.experiment(variant.number) / f"work-{name}"


def _process(lab: Lab, variant: Variant, work: Path, cache: Path) -> dict[str, Any]:
    """Where a process of the variant runs and what it may see: its own folder, training data, its code."""
    return {
        "cwd": work,
        "environment": candidate_environment(variant.code, cache),
        "hidden": [lab.path, *texts_in_cache(), *lab.texts()[0]],
        "readable": [lab.path / "baseline", lab.path / "data", variant.code],
        "writable": [work, cache],
    }


def _cache(lab: Lab, variant: Variant, work: Path, *, keep: bool = False) -> Path:
    """The folder of compiled code of a process in `work`. Changed code gets a copy, which goes with `work`, unless it
    is to `keep` what it compiles."""
    work.mkdir(parents=True, exist_ok=True)
    own = lab.experiment(variant.number) / "cache"
    cache = own if keep or variant.code == lab.path / "code" else work / "cache"
    if not cache.exists():
        copy_compiled(own if own.exists() else lab.experiment(0) / "cache", cache)
    return cache


def _is_compiled(lab: Lab) -> bool:
    """Whether runs take as long to compile as a candidate could not do again for each of them."""
    found = RunDirectory(run_folder(lab, 0, lab.settings.first_seed)).recorded().get("implementations")
    return isinstance(found, dict) and found.get("compile", "off") != "off"
