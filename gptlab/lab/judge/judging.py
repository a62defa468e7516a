"""One trained run, judged: its weights answer, the judge computes, counts and audits."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.config.load import flatten
from gptlab.config.model import ModelConfig
from gptlab.lab.judge.answering import Answering
from gptlab.lab.judge.audits import (
    Asked,
    check_again,
    check_draws,
    check_report,
    check_two_seeds,
    plan,
    second_questions,
)
from gptlab.lab.judge.questions import Questions, Scores, loss_of, scores
from gptlab.lab.judge.rules import Broken
from gptlab.lab.judge.supervise import Finished, Limits, start
from gptlab.lab.judge.tree_rules import FIXED_FIELDS
from gptlab.lab.run_record import RunRecord, read_run
from gptlab.runtime.files.plain_file import write_json_atomic
from gptlab.training.checkpoint.format import list_checkpoints
from gptlab.training.checkpoint.load import load_checkpoint
from gptlab.training.checkpoint.write import save_checkpoint

ANSWERS = (sys.executable, "-m", "gptlab.app.answers")
"""The command that answers; the folder of the staged run is its last argument."""
INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SYSTEMROOT")
MAX_CONFIG_BYTES = 65_536
"""Of a run's config.json, eight times quickstart's: it is given to the answering process too."""
MAX_NAMES_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """How much is audited, and how strictly."""

    share: float = 0.25
    """Of the rows, asked twice; a quarter costs a quarter more."""
    least: int = 64
    """Rows asked twice at least, as far as there are (at most half of all)."""
    tolerance: float = 1e-4
    """Largest honest difference between two answers to the same tokens, in nats: see docs/judge.md for what was
    measured."""
    rows: int = 16
    """In one question. All questions have the same shape, so that the same kernels compute the same bits."""
    start_seconds: float = 120.0
    """Until the weights are loaded."""
    answer_seconds: float = 120.0
    """For one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What is known of the run that a candidate's is compared with: of the same seed, trained with the lab's code."""

    config: Mapping[str, Any]
    """The content of its config.json."""
    model: ModelConfig
    """Its model, with the number of its tokenizer's entries."""
    nats: NDArray[np.float32] | None = None
    """`Judged.nats` of it: audits look where the candidate gained. None: at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the judge found: nothing in it was computed by the candidate's code."""

    val_loss: float
    """Nats per target token."""
    val_bpb: float
    target_tokens: int
    target_bytes: int
    parameters: int
    """Elements of the weights that answered."""
    step: int
    largest_difference: float
    """Between two answers to the same tokens, in nats."""
    audited: int
    """Rows that were asked twice."""
    nats: NDArray[np.float32]
    """(rows, seq_len): of every target; 0 where there is none."""
    answering: tuple[Finished, Finished]
    """The two processes that answered."""


def judge_run(
    run: Path,
    questions: Questions,
    *,
    tree: Path,
    limits: Limits,
    baseline: Baseline,
    hidden: Iterable[Path] = (),
    audit: Audit | None = None,
    command: Sequence[str] = ANSWERS,
    isolate: bool | None = None,
    log: Path | None = None,
) -> Judged:
    """Judge the last checkpoint of the finished run in `run`, which the code in `tree`/gptlab has trained.

    The answering processes see a copy of the run's weights, its config.json and the lab's tokenizer. `limits` are those
    of each of them; `hidden`: see `supervise`; what they print goes to `log`. Broken names the rule that was broken.
    """
    audit = audit or Audit()
    with _damage_is_broken():
        record = read_run(run)
        check_config(record.fields, flatten(baseline.config))
        saved = load_checkpoint(list_checkpoints(record.directory.checkpoints_path)[-1])
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.model.items()}
    random = np.random.default_rng(secrets.randbits(128))
    signs = random.choice([-1.0, 1.0], questions.tokenizer.vocab_size)
    ways = plan(questions.count, audit.share, audit.least, random)
    nats = np.zeros((questions.count, questions.seq_len))
    finished: list[Finished] = []
    answers: list[dict[int, Scores]] = []
    asked: list[Asked] = [Asked(int(row), int(row), questions.seq_len) for row in ways.halves[0]]
    seeds = [int(baseline.config["seed"]), secrets.randbits(62)]
    drawn: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="gptlab-judge-run-") as folder:
        staged = _stage(Path(folder) / "run", record, saved.step, saved.model, questions)
        for number in range(2):
            if number:
                known = nats if baseline.nats is None else np.maximum(baseline.nats.astype(np.float64) - nats, 0.0)
                asked = second_questions(ways, np.zeros_like(nats) if baseline.nats is None else known, random)
            with _answering(
                [*command, str(staged)], tree, limits, [run, *hidden], staged, audit, isolate, log, finished
            ) as process:
                # Both processes do the same things, so that neither knows which one it is.
                seed = seeds[number]
                drawn.append(check_draws(baseline.model, seed, process.initial_weights(seed, shapes)))
                answers.append(_ask_all(process, questions, asked, audit.rows, signs))
            for one in asked:
                if one.tail_of == one.row and not (number and one.row in answers[0]):
                    nats[one.row] = answers[-1][one.row].nats
    check_two_seeds(*drawn)
    difference = check_again(asked, answers[0], answers[1], audit.tolerance)
    loss = loss_of(questions, nats)
    check_report(_claimed(record, questions, saved.step), loss)
    return Judged(
        val_loss=loss.val_loss, val_bpb=loss.val_bpb, target_tokens=loss.target_tokens, target_bytes=loss.target_bytes,
        parameters=sum(tensor.numel() for tensor in saved.model.values()), step=saved.step,
        largest_difference=difference, audited=ways.audits, nats=nats.astype(np.float32),
        answering=(finished[0], finished[1]),
    )  # fmt: skip


def candidate_environment(tree: Path, **more: str) -> dict[str, str]:
    """The variables of a process that runs the code in `tree`: few of the lab's own, none of its secrets."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    fixed = {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return inherited | fixed | more


def check_config(fields: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """Broken (field) where a run was trained with another value of a fixed field than the baseline; both flat. The
    length is apart: equal time means other steps."""
    for name, value in baseline.items():
        if name == "run_dir" or name.startswith("horizon."):
            continue
        if any(name == fixed or (fixed[-1] == "." and name.startswith(fixed)) for fixed in FIXED_FIELDS):
            found = fields.get(name)
            if found != value:
                raise Broken("field", f"{name} = {found!r} in the run's config.json, {value!r} for the baseline")


@contextmanager
def _damage_is_broken() -> Iterator[None]:
    try:
        yield
    except IndexError:
        raise Broken("checkpoint", "the run has no checkpoint") from None
    except UserError as error:
        raise Broken("checkpoint", str(error)) from None


def _stage(folder: Path, record: RunRecord, step: int, model: Mapping[str, Tensor], questions: Questions) -> Path:
    """A run folder with nothing but what an answer may depend on: weights, configuration, tokenizer. No moments, and
    nothing of state.json, where more weights could hide."""
    if record.directory.config_path.stat().st_size > MAX_CONFIG_BYTES:
        raise Broken("checkpoint", f"config.json has more than {MAX_CONFIG_BYTES:,} bytes")
    if sum(map(len, model)) > MAX_NAMES_BYTES:
        raise Broken("checkpoint", "the names of the weights are too long")
    questions.tokenizer.save(folder / "tokenizer")
    save_checkpoint(folder / "checkpoints", step, model=model, optimizer={}, state={})
    write_json_atomic(folder / "config.json", record.directory.read_config())
    return folder


@contextmanager
def _answering(
    argv: Sequence[str],
    tree: Path,
    limits: Limits,
    hidden: Sequence[Path],
    staged: Path,
    audit: Audit,
    isolate: bool | None,
    log: Path | None,
    finished: list[Finished],
) -> Iterator[Answering]:
    """An answering process. Broken where it breaks a rule within the context or at its end."""
    with (
        open(log or os.devnull, "ab") as output,
        start(
            argv, cwd=tree, environment=candidate_environment(tree), limits=limits, hidden=hidden,
            readable=[tree, staged], isolate=isolate, stderr=output,
        ) as running,
    ):  # fmt: skip
        try:
            process = Answering(running, start_seconds=audit.start_seconds, answer_seconds=audit.answer_seconds)
            yield process
            process.end()
        except Broken:
            running.stop()
            running.finish().require_lawful("an answering process")  # why it did not answer
            raise
        finished.append(running.finish())
        finished[-1].require_lawful("an answering process")


def _ask_all(
    process: Answering, questions: Questions, asked: Sequence[Asked], rows: int, signs: NDArray[np.float64]
) -> dict[int, Scores]:
    """{row: the scores of its answer, by the row's own targets}. The last question is filled up with rows of the first,
    whose second answers are not kept."""
    found: dict[int, Scores] = {}
    for first in range(0, len(asked), rows):
        batch = list(asked[first : first + rows])
        batch += [asked[number % len(asked)] for number in range(rows - len(batch))]
        inputs, targets = questions.read(np.array([one.row for one in batch]))
        tails, _ = questions.read(np.array([one.tail_of for one in batch]))
        own = np.arange(inputs.shape[1]) < np.array([one.same for one in batch])[:, None]
        answer = scores(
            process.logits(np.where(own, inputs, tails), len(signs)), targets.reshape(-1), signs
        )  # fmt: skip
        for place, one in enumerate(batch):
            here = slice(place * questions.seq_len, (place + 1) * questions.seq_len)
            found.setdefault(one.row, Scores(answer.nats[here], answer.prints[here]))
    return found


def _claimed(record: RunRecord, questions: Questions, step: int) -> float | None:
    """The run's own bits per byte of the judged step, if it validated on the judge's text."""
    if record.provenance.get("data_fingerprint") != questions.data_fingerprint:
        return None
    if record.fields.get("eval.tokens") != questions.max_tokens:
        return None
    with _damage_is_broken():
        curve = record.curve
    found = np.flatnonzero(curve.at["steps"] == step)
    return float(curve.bpb[found[-1]]) if len(found) else None
