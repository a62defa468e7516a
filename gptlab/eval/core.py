"""CORE: how much better than guessing a model is at the tasks of DCLM (arXiv:2406.11794), as nanochat measures it.

    centered = (accuracy - accuracy of guessing) / (1 - accuracy of guessing)      of each task
    CORE     = mean of centered over the tasks

The answer is the option whose continuation has the lowest mean loss per token. A language-modeling example is correct
if every token of its continuation is the likeliest one. Both are computed here from logits. The model's own loss is
never used, no random number is drawn, and examples become texts by the same rules every time.

Three things make it fast and change only rounding: logits are computed only where a token is scored; options that
differ only in their last token (A, B, C, D) take one pass, since nothing reads that token; and sequences of several
examples, sorted by length, go through the model together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gptlab.data.tokenizer.tokenizer import Tokenizer
from gptlab.eval.bits_per_byte import evaluation_mode, token_nats
from gptlab.eval.core_tasks import Kind, Task
from gptlab.model.gpt import GPT
from gptlab.runtime.processes.distributed import Group

Logits = Callable[[Tensor, Tensor], Tensor]
"""(tokens (B, T) int64, positions (N,) int64 into the flattened tokens) -> logits at these positions, (N, V)."""


@dataclass(frozen=True, slots=True)
class Question:
    """One example as token ids."""

    options: tuple[np.ndarray, ...]
    """(tokens,) int32 each, two at least."""
    starts: tuple[int, ...]
    """Where the scored part of each option begins; at least 1, since something must precede it. The option's length if
    nothing in it is scored, because all the others begin with it."""
    gold: int | None
    """The correct option. None: the only option must be the greedy continuation."""


@dataclass(frozen=True, slots=True)
class EncodedTask:
    label: str
    random_accuracy: float
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class CoreResult:
    accuracy: dict[str, float]
    """By task label."""
    centered: dict[str, float]
    """By task label. 0: as good as guessing; 1: all correct."""

    @property
    def core_metric(self) -> float:
        return sum(self.centered.values()) / len(self.centered)


def encode_tasks(tasks: Iterable[Task], tokenizer: Tokenizer, context: int) -> list[EncodedTask]:
    """Texts to token ids, once for any number of measurements. They begin with BOS if there is one. Texts longer than
    `context` tokens lose their beginning, as in nanochat those for GPT-2 do; nanochat's own model reads them whole.
    UserError for text that cannot be encoded."""
    encoded = []
    for task in tasks:
        prompts = [task.prompts(index) for index in range(task.n_scored)]
        ids = iter(tokenizer.encode_batch([text for texts in prompts for text in texts]))
        bos = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype=np.int32)
        questions = tuple(
            _question(
                task.kind, [np.concatenate([bos, next(ids)]).astype(np.int32) for _ in texts], example.gold, context
            )
            for texts, example in zip(prompts, task.examples, strict=False)
        )
        encoded.append(EncodedTask(task.label, task.random_accuracy, questions))
    return encoded


def _question(kind: Kind, ids: list[np.ndarray], gold: int, context: int) -> Question:
    """What the texts share, at the beginning or (schema) at the end, separates the given part from the scored part."""
    if kind == "schema":
        same = _common_prefix([tokens[::-1] for tokens in ids])
        starts = [len(tokens) - same for tokens in ids]
    else:
        starts = [_common_prefix(ids)] * len(ids)
    if kind == "language_modeling":
        del ids[0]
        starts = [min(starts[1], len(ids[0]) - 1)]
    cut = [max(0, len(tokens) - context) for tokens in ids]
    return Question(
        tuple(tokens[n:] for tokens, n in zip(ids, cut, strict=True)),
        tuple(max(1, start - n) for start, n in zip(starts, cut, strict=True)),
        None if kind == "language_modeling" else gold,
    )


def _common_prefix(sequences: Sequence[np.ndarray]) -> int:
    """The number of tokens that all sequences begin with."""
    shortest = min(map(len, sequences))
    same = np.all([tokens[:shortest] == sequences[0][:shortest] for tokens in sequences], axis=0)
    return shortest if same.all() else int(same.argmin())


def gpt_logits(model: GPT) -> Logits:
    """The logits of the uncompiled model: shapes change from pass to pass."""
    return lambda tokens, positions: model.logits(model.hidden(tokens).flatten(0, 1)[positions])


def measure_core(
    model: GPT,
    tasks: Sequence[EncodedTask],
    *,
    max_pass_tokens: int,
    advance: Callable[[float], None] | None = None,
    group: Group | None = None,
) -> CoreResult:
    """The model's answers to every question of every task. Arguments: as `score`."""
    questions = [question for task in tasks for question in task.questions]
    answers = score(
        gpt_logits(model), questions, device=next(model.parameters()).device, max_pass_tokens=max_pass_tokens,
        module=model, advance=advance, group=group,
    )  # fmt: skip
    return core_result(tasks, answers)


def core_result(tasks: Sequence[EncodedTask], correct: Sequence[bool]) -> CoreResult:
    """The metric from the answers to all questions, in the order of tasks and questions."""
    answers = iter(correct)
    accuracy = {task.label: sum(next(answers) for _ in task.questions) / len(task.questions) for task in tasks}
    centered = {t.label: (accuracy[t.label] - t.random_accuracy) / (1 - t.random_accuracy) for t in tasks}
    return CoreResult(accuracy, centered)


def score(
    logits: Logits,
    questions: Sequence[Question],
    *,
    device: torch.device | str,
    max_pass_tokens: int,
    module: nn.Module | None = None,
    advance: Callable[[float], None] | None = None,
    group: Group | None = None,
) -> list[bool]:
    """Which questions are answered correctly. Each is judged alone, so any part of a list may be scored anywhere.

    A pass holds at most `max_pass_tokens`, padding included, or one sequence. This changes the speed, and the result
    only if two options are equally good to within rounding. In a `group` of W processes each takes every W-th pass, and
    all get the answers of one process, since the passes are the same. `module` is in evaluation mode meanwhile;
    `advance` is called with the number of option tokens that this process has scored.
    """
    group = group or Group()
    readers: dict[bytes, list[tuple[int, int]]] = {}  # input tokens -> (question, option) that are scored on them
    for number, question in enumerate(questions):
        for option, tokens in enumerate(question.options):
            readers.setdefault(tokens[:-1].tobytes(), []).append((number, option))
    # For every option: mean loss, and whether it is the greedy continuation. Zero on the ranks that do not score it.
    places = [0, *itertools.accumulate(len(question.options) for question in questions)]
    scored = torch.zeros(places[-1], 2, dtype=torch.float64)
    with evaluation_mode(module):
        for inputs in itertools.islice(_passes(readers, max_pass_tokens), group.rank, None, group.size):
            asked = [(row, *reader) for row, tokens in enumerate(inputs) for reader in readers[tokens.tobytes()]]
            spans = [(row, questions[n].starts[o], questions[n].options[o]) for row, n, o in asked]
            for (_, n, o), (nats, hit) in zip(asked, _read_off(logits, inputs, spans, device), strict=True):
                scored[places[n] + o] = torch.tensor([math.inf if math.isnan(nats) else nats, hit], dtype=torch.float64)
            if advance is not None:
                advance(sum(len(tokens) for _, _, tokens in spans))
    losses, greedy = group.sum(scored, "CORE").t().tolist()
    answers = []
    for question, start in zip(questions, places, strict=False):
        of_options = losses[start : start + len(question.options)]
        right = bool(greedy[start]) if question.gold is None else _chosen(question, of_options) == question.gold
        answers.append(right)
    return answers


def _chosen(question: Question, losses: Sequence[float]) -> int:
    """The option with the lowest mean loss, the first of equals.

    An option with nothing to score is chosen if it is the first, and never otherwise, whatever the model says. So does
    nanochat: the mean of no losses is NaN, which Python's `min` keeps only in the first place. Six questions of the
    bundle have such an option.
    """
    comparable = list(losses)
    for option, (tokens, start) in enumerate(zip(question.options, question.starts, strict=True)):
        if len(tokens) == 1:  # nothing precedes it
            comparable[option] = math.inf
        elif start == len(tokens):
            comparable[option] = -math.inf if option == 0 else math.inf
    return comparable.index(min(comparable))


def _passes(inputs: Iterable[bytes], max_pass_tokens: int) -> Iterator[list[np.ndarray]]:
    """Longest first, so that the first pass is the one that may not fit into memory."""
    waiting: list[np.ndarray] = []
    for tokens in sorted(inputs, key=len, reverse=True):
        if waiting and (len(waiting) + 1) * len(waiting[0]) > max_pass_tokens:
            yield waiting
            waiting = []
        if tokens:
            waiting.append(np.frombuffer(tokens, dtype=np.int32))
    if waiting:
        yield waiting


def _read_off(
    logits: Logits,
    inputs: Sequence[np.ndarray],  # (T,) int32 each, the longest first
    spans: Sequence[tuple[int, int, np.ndarray]],  # row of the inputs, start of the scored part, the option's tokens
    device: torch.device | str,
) -> list[tuple[float, bool]]:
    """One pass: for each span its mean loss in nats, and whether every token of it is the likeliest one."""
    width = len(inputs[0])
    tokens = np.zeros((len(inputs), width), dtype=np.int64)
    for row, given in enumerate(inputs):
        tokens[row, : len(given)] = given  # padding comes after everything that is scored, which does not see it
    places = np.concatenate([row * width + np.arange(start - 1, len(option) - 1) for row, start, option in spans])
    targets = np.concatenate([option[start:] for _, start, option in spans]).astype(np.int64)
    lengths = [len(option) - start for _, start, option in spans]
    scores = logits(torch.from_numpy(tokens).to(device), torch.from_numpy(places).to(device))
    target = torch.from_numpy(targets).to(device)
    nats = token_nats(scores, target).cpu().double().split(lengths)
    hits = (scores.argmax(-1) == target).cpu().split(lengths)
    return [(float(n.mean()), bool(h.all())) for n, h in zip(nats, hits, strict=True)]
