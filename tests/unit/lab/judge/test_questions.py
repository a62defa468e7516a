"""The judge's loss, against evaluation's and by hand; and what is asked twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from judged import BASELINE, CPU, MODEL, Candidate, begin, examined, questions, questions_of, trained_model
from tiny_runs import make_config, write_corpus

from gptlab.config.errors import UserError
from gptlab.data.packing import IGNORED
from gptlab.data.tokenizer.base import ByteTokenizer
from gptlab.eval.bits_per_byte import evaluate, nats_of
from gptlab.lab.judge.audits import Asked, check_again, check_two_seeds, halves, second_questions
from gptlab.lab.judge.judging import Audit, examine
from gptlab.lab.judge.questions import Questions, Scores, loss_of, scores
from gptlab.lab.judge.rules import RuleError


def test_the_loss_is_that_of_evaluation(tmp_path_factory: pytest.TempPathFactory) -> None:
    """On packed rows: with padding, BOS, and a limit in the middle of a row."""
    folder = tmp_path_factory.mktemp("questions")
    write_corpus(folder / "corpus", documents=60)
    asked = questions_of(make_config(folder, "run", eval__tokens=601))
    model = trained_model()
    nats = examine(begin(lambda: model, None), asked, {}, BASELINE, Audit(rows=5))[0]
    expected = evaluate(nats_of(model), asked.rows, asked.tokenizer.token_bytes, device=CPU, micro_sequences=7)
    found = loss_of(asked, nats)
    assert (found.target_tokens, found.target_bytes) == (expected.target_tokens, expected.target_bytes) == (601, 601)
    assert found.val_bpb == pytest.approx(expected.val_bpb, rel=1e-6)  # float32 there
    assert found.val_loss == pytest.approx(expected.val_loss, rel=1e-6)


def test_answering_processes_never_run_at_one_time() -> None:
    """The first could tell the second which rows it was asked."""
    running, most = 0, []

    @contextmanager
    def counted() -> Iterator[Candidate]:
        nonlocal running
        running += 1
        most.append(running)
        with begin(trained_model, None)() as candidate:
            yield candidate
        running -= 1

    examine(counted, questions(), {}, BASELINE, Audit(rows=8))
    assert most == [1, 1]


class OneRow:
    """Tokens a, BOS, b: a BOS counts as a token of no bytes; the last target is ignored."""

    rows_per_epoch = 1

    def read(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.array([[1, 2, 256, 3]]), np.array([[2, 256, 3, IGNORED]])

    def target_counts(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return np.array([3])


def test_the_loss_by_hand() -> None:
    loss = loss_of(Questions(OneRow(), ByteTokenizer(), 4, "", None), np.array([[1.0, 2.0, 4.0, 9.0]]))
    assert (loss.target_tokens, loss.target_bytes) == (3, 2)
    assert loss.val_loss == pytest.approx(7 / 3, rel=1e-12)
    assert loss.val_bpb == pytest.approx((1 + 4) / (2 * math.log(2)), rel=1e-12)


def test_scores_by_hand() -> None:
    logits = np.array([[0.0, math.log(3)], [5.0, 5.0], [1000.0, 0.0]], dtype=np.float32)
    found = scores(iter([logits[:1], logits[1:]]), np.array([1, IGNORED, 1]), np.array([1.0, -1.0]))
    assert found.nats.tolist() == pytest.approx([math.log(4 / 3), 0.0, 1000.0], rel=1e-6)
    assert found.prints.tolist() == pytest.approx([-math.log(3) / math.sqrt(2), 0.0, 1000 / math.sqrt(2)], rel=1e-6)
    with pytest.raises(RuleError, match="NaN or infinite"):
        scores(iter([np.array([[0.0, np.inf]], dtype=np.float32)]), np.array([0]), np.ones(2))


def test_every_token_is_asked_once_in_the_second_process() -> None:
    random = np.random.default_rng(3)
    first, second = halves(41, random)
    assert sorted(np.concatenate([first, second]).tolist()) == list(range(41))
    asked = second_questions(first, second, np.zeros((41, 16)), random)
    of_row = {row: np.zeros(16, dtype=int) for row in range(41)}
    for one in asked:
        of_row[one.row][: one.same] += 1
        of_row[one.tail_of][one.same :] += 1
    assert all((counts == 1).all() for counts in of_row.values())
    swapped = [one for one in asked if one.tail_of != one.row]
    assert len(swapped) == 14
    assert {one.row for one in swapped} <= set(first.tolist())
    assert {row for row in of_row if row not in {one.row for one in asked}} == set()


def test_half_of_the_cuts_are_where_the_candidate_gains() -> None:
    """It gains in one position of a hundred, and little elsewhere."""
    random, gains = np.random.default_rng(0), np.zeros((400, 100))
    gains[:, 70] = 1.0
    asked = second_questions(np.arange(400), np.arange(0), gains, random)
    cuts = [one.same for one in asked if one.tail_of != one.row]
    assert 0.35 < np.mean(np.array(cuts) == 71) < 0.65  # 150 independent cuts, standard deviation 0.04
    assert min(cuts) >= 1
    assert max(cuts) <= 99


def test_who_looks_ahead_in_few_places_is_asked_there() -> None:
    """At one token in sixteen, and the baseline's nats are known: an honest model's."""
    rare = "logits = self.logits(self.hidden(tokens, cache=cache))"
    ahead = "5.0 * torch.nn.functional.one_hot(tokens.roll(-1, 1), self.vocab_size) * (tokens % 16 == 0)[..., None]"
    asked = questions(120)
    honest = examined(trained_model)
    known = type(BASELINE)(config=BASELINE.config, model=MODEL, nats=honest.astype(np.float32))
    with pytest.raises(RuleError, match="only later tokens"):
        examine(begin(lambda: trained_model(old=rare, new=f"{rare} + {ahead}"), None), asked, {}, known, Audit(rows=20))


def test_how_many_rows_differ_by_hand() -> None:
    """Rows 0 and 1 are asked again as they were; row 1 differs. Rows 2 to 4 are asked with another row's last position;
    rows 3 and 4 differ before it, and row 2 only there, where it may."""

    def answers(*nats: list[float]) -> dict[int, Scores]:
        return {row: Scores(np.array(values), np.zeros(3)) for row, values in enumerate(nats)}

    asked = [Asked(0, 0, 3), Asked(1, 1, 3), Asked(2, 3, 2), Asked(3, 2, 2), Asked(4, 2, 2)]
    first = answers([1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3])
    assert check_again(asked, first, answers([1, 2, 3], [1, 2, 3], [1, 2, 9], [1, 2, 3], [1, 2, 3]), 0.1) == 0
    with pytest.raises(RuleError, match=r"^memoryless: row 1, position 2: .* by 0\.5 .*; 1 of 2 such rows differ$"):
        check_again(asked, first, answers([1, 2, 3], [1, 2, 3.5], [1, 2, 9], [1, 2, 3], [1, 2, 3]), 0.1)
    with pytest.raises(RuleError, match=r"^causality: row 3, position 0: .* by 2 .*; 2 of 3 such rows differ$"):
        check_again(asked, first, answers([1, 2, 3], [1, 2, 3], [1, 2, 9], [3, 2, 3], [1, 1, 3]), 0.1)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(UserError, match="audits need 16"):
        halves(15, np.random.default_rng(0))


def test_a_weight_that_is_the_same_for_two_seeds() -> None:
    check_two_seeds({"a": "1", "b": "2"}, {"a": "3", "c": "2"})
    with pytest.raises(RuleError, match="b starts with the same values"):
        check_two_seeds({"a": "1", "b": "2"}, {"a": "3", "b": "2"})


def test_bfloat16_answers_are_as_reproducible() -> None:
    """The tolerance is not loosened for it: rows of one shape are computed alike, wherever they are in a question."""
    from gptlab.model.gpt import build_model

    def make() -> torch.nn.Module:
        model = build_model(MODEL, device=CPU, compute_dtype=torch.bfloat16, seed=1).eval()
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
        return model

    examined(make)
