"""One trained run, judged: its weights answer, the judge computes, counts and audits."""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
    halves,
    second_questions,
)
from gptlab.lab.judge.questions import Loss, Questions, Scores, loss_of, scores
from gptlab.lab.judge.rules import Rule, RuleError
from gptlab.lab.judge.supervise import (
    Limits,
    candidate_environment,
    copy_compiled,
    printed_to,
    start,
    texts_in_cache,
)
from gptlab.lab.judge.tree_rules import FIXED_FIELDS
from gptlab.lab.run_record import RunRecord, read_run
from gptlab.runtime.files.plain_file import write_json_atomic
from gptlab.training.checkpoint.load import load_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.write import save_checkpoint

ANSWERS = (sys.executable, "-m", "gptlab.app.answers")
"""The command that answers; the folder of the staged run is its last argument."""
_PYTHON = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
MAX_CONFIG_BYTES = 65_536
"""Of a run's config.json, eight times quickstart's: it is given to the answering process too."""
MAX_NAMES_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """How answers are asked for, and how strictly they are compared."""

    tolerance: float = 1e-5
    """Largest honest difference between two answers to the same tokens, in nats. Measured on CPUs: none, in float32 and
    bfloat16, since all questions have one shape; ten times what another number of rows changes (1e-6)."""
    rows: int = 16
    """In one question. The last one is filled up, so that the same kernels compute the same bits."""
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

    loss: Loss
    parameters: int
    """Elements of the weights that answered."""
    step: int
    largest_difference: float
    """Between two answers to the same tokens, in nats."""
    nats: NDArray[np.float32]
    """(rows, seq_len): of every target; 0 where there is none."""


def judge_run(
    run: Path,
    questions: Questions,
    *,
    tree: Path,
    limits: Limits,
    baseline: Baseline,
    cache: Path,
    hidden: Iterable[Path],
    audit: Audit | None = None,
    command: Sequence[str] = ANSWERS,
    log: Path,
) -> Judged:
    """Judge the last checkpoint of the finished run in `run`, which the code in `tree`/gptlab has trained.

    The answering processes see a copy of the run's weights, its config.json and the lab's tokenizer. `limits` are those
    of each of them. `hidden`: see `supervise`; texts in the user's cache are hidden too. `cache`: a folder of compiled
    code, which may be missing and which no candidate may have written; each process gets a copy. What one prints
    is appended to `log` when it has ended.
    RuleError names the rule that was broken.
    """
    audit = audit or Audit()
    with damage_breaks("checkpoint"):
        record = read_run(run)
        check_config(record.fields, flatten(baseline.config))
        saved = load_checkpoint(list_checkpoints(record.directory.checkpoints_path)[-1])
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.model.items()}
    with tempfile.TemporaryDirectory(prefix="gptlab-judge-run-") as folder:
        staged = _stage(Path(folder) / "run", record, saved.step, saved.model, questions)

        @contextmanager
        def answering() -> Iterator[Answering]:
            with _copy_of(cache) as own, printed_to(log, limits) as printed, start(
                [*command, str(staged)], cwd=tree, environment=candidate_environment(tree, own) | _PYTHON,
                limits=limits, hidden=[run, *texts_in_cache(), *hidden], readable=[tree, staged], writable=[own],
                stderr=printed,
            ) as running:  # fmt: skip
                try:
                    process = Answering(running, start_seconds=audit.start_seconds, answer_seconds=audit.answer_seconds)
                    yield process
                    process.end()
                except RuleError:
                    running.stop()
                    running.finish().require_lawful("an answering process")  # why it did not answer
                    raise
                running.finish().require_lawful("an answering process")

        nats, difference = examine(answering, questions, shapes, baseline, audit)
    loss = loss_of(questions, nats)
    check_report(_claimed(record, questions, saved.step), loss)
    return Judged(
        loss=loss, parameters=sum(tensor.numel() for tensor in saved.model.values()), step=saved.step,
        largest_difference=difference, nats=nats.astype(np.float32),
    )  # fmt: skip


@contextmanager
def _copy_of(cache: Path) -> Iterator[Path]:
    """A copy that one process alone may write in. What is not in it, that process compiles."""
    with tempfile.TemporaryDirectory(prefix="gptlab-judge-cache-", ignore_cleanup_errors=True) as folder:
        own = Path(folder) / "cache"  # a copy has the mode and the time of its source: the folder keeps its own
        copy_compiled(cache, own)
        yield own


def examine(
    begin: Callable[[], AbstractContextManager[Answering]],
    questions: Questions,
    shapes: Mapping[str, tuple[int, ...]],
    baseline: Baseline,
    audit: Audit,
) -> tuple[NDArray[np.float64], float]:
    """Ask every question, and some twice, of two fresh candidates that `begin` makes one after the other. Returns the
    nats of every position (questions.count, seq_len), and the largest difference of two answers to the same tokens.

    Both are asked for the first weights of two seeds, then rows, in questions of one shape: neither knows which it is.
    They never run at the same time: namespaces do not keep one from telling the other which rows it was asked.
    """
    random = np.random.default_rng(secrets.randbits(128))
    signs = random.choice([-1.0, 1.0], questions.tokenizer.vocab_size)
    first_half, second_half = halves(questions.count, random)
    nats = np.zeros((questions.count, questions.seq_len))
    with begin() as candidate:
        first_draws = _checked_draws(candidate, shapes, baseline)
        asked = [Asked(int(row), int(row), questions.seq_len) for row in first_half]
        first = _ask_all(candidate, questions, asked, audit.rows, signs)
    for row, found in first.items():
        nats[row] = found.nats
    gains = np.zeros_like(nats) if baseline.nats is None else np.maximum(baseline.nats - nats, 0.0)
    with begin() as candidate:
        second_draws = _checked_draws(candidate, shapes, baseline)
        asked = second_questions(first_half, second_half, gains, random)
        second = _ask_all(candidate, questions, asked, audit.rows, signs)
    for row in second_half.tolist():
        nats[row] = second[row].nats
    if first_draws != second_draws:
        raise RuleError("seed", "the first values of the weights differ from process to process")
    return nats, check_again(asked, first, second, audit.tolerance)


def _checked_draws(candidate: Answering, shapes: Mapping[str, tuple[int, ...]], baseline: Baseline) -> dict[str, str]:
    """{name: hash} of the first weights of the run's seed, which are what they must be, as are those of another."""
    own, other = int(baseline.config["seed"]), secrets.randbits(62)
    order = (own, other) if secrets.randbits(1) else (other, own)
    drawn = {seed: check_draws(baseline.model, seed, candidate.initial_weights(seed, shapes)) for seed in order}
    check_two_seeds(drawn[own], drawn[other])
    return drawn[own]


def check_config(fields: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """RuleError (field) where a run was trained with another value of a fixed field than the baseline; both flat. The
    length is apart: equal time means other steps."""
    for name, value in baseline.items():
        if name == "run_dir" or name.startswith("horizon."):
            continue
        if any(name == fixed or (fixed[-1] == "." and name.startswith(fixed)) for fixed in FIXED_FIELDS):
            found = fields.get(name)
            if found != value:
                raise RuleError("field", f"{name} = {found!r} in the run's config.json, {value!r} for the baseline")


@contextmanager
def damage_breaks(rule: Rule) -> Iterator[None]:
    """RuleError where what is read within the context is damaged: the files of a run may hold anything."""
    try:
        yield
    except (UserError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise RuleError(rule, f"the run's folder is damaged: {error}") from None


def _stage(folder: Path, record: RunRecord, step: int, model: Mapping[str, Tensor], questions: Questions) -> Path:
    """A run folder with nothing but what an answer may depend on: weights, configuration, tokenizer. No moments, and
    nothing else of state.json and run.json, where more weights could hide."""
    if record.directory.config_path.stat().st_size > MAX_CONFIG_BYTES:
        raise RuleError("checkpoint", f"config.json has more than {MAX_CONFIG_BYTES:,} bytes")
    if sum(map(len, model)) > MAX_NAMES_BYTES:
        raise RuleError("checkpoint", "the names of the weights are too long")
    questions.tokenizer.save(folder / "tokenizer")
    save_checkpoint(folder / "checkpoints", step, model=model, optimizer={}, state={})
    write_json_atomic(folder / "config.json", record.directory.read_config())
    computed: dict[str, Any] = {name: str(record.provenance.get(name))[:200] for name in ("device", "cpu", "dtype")}
    match record.provenance.get("implementations"):
        case {"products": "kernels" | "library" as products}:
            computed["implementations"] = {"products": products}
    write_json_atomic(folder / "run.json", computed)  # what dtype and products = auto were in training
    return folder


def _ask_all(
    candidate: Answering, questions: Questions, asked: Sequence[Asked], rows: int, signs: NDArray[np.float64]
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
            candidate.logits(np.where(own, inputs, tails), len(signs)), targets.reshape(-1), signs
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
    with damage_breaks("report"):
        curve = record.curve
    found = np.flatnonzero(curve.at["steps"] == step)
    return float(curve.bpb[found[-1]]) if len(found) else None
