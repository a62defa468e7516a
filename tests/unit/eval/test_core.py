"""CORE: worked out by hand, against nanochat's procedure done slowly, and within a run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks_in_turn import in_turn
from tiny_runs import (
    FLAGS,
    Outcome,
    arguments,
    command,
    differences,
    killed_at,
    lines_of,
    make_config,
    outcome,
    train,
    write_bundle,
)
from torch import Tensor, nn

import gptlab
from gptlab.config.errors import ConfigError, UserError
from gptlab.config.model import ModelConfig
from gptlab.data.prepare import prepare
from gptlab.data.rows import validation_rows
from gptlab.data.tokenizer.tokenizer import ByteTokenizer, CharTokenizer
from gptlab.eval.core import CoreResult, EncodedTask, core_result, encode_tasks, gpt_logits, measure_core, score
from gptlab.eval.core_tasks import Example, Kind, Task, find_bundle, read_tasks
from gptlab.model.gpt import GPT, build_model
from gptlab.runtime.processes.distributed import Group
from gptlab.training.checkpoint.load import load_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.write import save_checkpoint

CPU = torch.device("cpu")


def task(kind: Kind, *examples: Example, shots: int = 0, delimiter: str = ":", chance: float = 0.0) -> Task:
    return Task(kind, kind, shots, delimiter, chance, examples, len(examples))


def choice(query: str, *choices: str, gold: int) -> Example:
    return Example(tuple((query, text) for text in choices), gold)


def schema(continuation: str, *contexts: str, gold: int) -> Example:
    return Example(tuple((context, continuation) for context in contexts), gold)


def language(context: str, continuation: str) -> Example:
    return Example(((context, continuation),), 0)


# -log2 of the probability of each character, and of those behind a b.
BITS = {"a": 1, "b": 2, "c": 3, "x": 4, ":": 5, " ": 6, "\n": 6}
BITS_AFTER_B = {":": 1, "a": 2, "b": 3, "c": 4, "x": 5, " ": 6, "\n": 6}


class TestByHand:
    """Probabilities that depend on the last character: after b a colon is likely, otherwise an a."""

    @pytest.fixture(params=[False, True])
    def tokenizer(self, request: pytest.FixtureRequest) -> CharTokenizer:
        return CharTokenizer("".join(BITS), bos=request.param)

    def answers(self, tokenizer: CharTokenizer, one: Task) -> tuple[list[bool], CoreResult]:
        (encoded,) = encode_tasks([one], tokenizer, context=100)
        answers = score(self.logits(tokenizer), encoded.questions, device=CPU, max_pass_tokens=50)
        return answers, core_result([encoded], answers)

    def logits(self, tokenizer: CharTokenizer) -> Callable[[Tensor, Tensor], Tensor]:
        table = torch.full((tokenizer.vocab_size, tokenizer.vocab_size), -1e9)
        for last in range(tokenizer.vocab_size):
            bits = BITS_AFTER_B if last == tokenizer.encode("b")[0] else BITS
            assert sum(2.0**-n for n in bits.values()) == 1
            for character, n in bits.items():
                table[last, tokenizer.encode(character)[0]] = 5.0 - n * np.log(2)  # softmax does not see the 5
        return lambda tokens, positions: table[tokens.flatten()[positions]]

    MULTIPLE_CHOICE = task(
        "multiple_choice",
        choice("x", "ab", "b", gold=0),  # 1 + 2 bits: mean 1.5 | 2
        choice("x", "b", "aac", gold=1),  # 2 | 1 + 1 + 3: mean 5/3, though its sum is larger
        choice("x", "xxa", "xxc", gold=1),  # 1 | 3: the common xx counts for neither, and the gold one loses
        choice("x", "bx", "xb", gold=1),  # 2 + 5: mean 3.5 | 4 + 2: mean 3
        chance=0.5,
    )
    SCHEMA = task(
        "schema",
        schema("c", "xa", "xb", gold=1),  # ":c" is scored: 5 + 3 bits | after b 1 + 3
        schema("c", "xa", "xb", gold=0),
        chance=0.5,
    )
    LANGUAGE_MODELING = task(
        "language_modeling", language("x", "aa"), language("x", "a"), language("x", "ab"), chance=0.0
    )  # fmt: skip

    def test_multiple_choice(self, tokenizer: CharTokenizer) -> None:
        answers, result = self.answers(tokenizer, self.MULTIPLE_CHOICE)
        assert answers == [True, True, False, True]
        assert result.accuracy == {"multiple_choice": 0.75}
        assert result.centered == {"multiple_choice": 0.5}  # (0.75 - 0.5) / (1 - 0.5)

    def test_schema(self, tokenizer: CharTokenizer) -> None:
        answers, result = self.answers(tokenizer, self.SCHEMA)
        assert answers == [True, False]
        assert result.centered == {"schema": 0.0}

    def test_language_modeling(self, tokenizer: CharTokenizer) -> None:
        """After the colon, and after an a, an a is likeliest."""
        answers, result = self.answers(tokenizer, self.LANGUAGE_MODELING)
        assert answers == [True, True, False]
        assert result.centered == pytest.approx({"language_modeling": 2 / 3})

    def test_the_space_in_front_belongs_to_the_continuation(self, tokenizer: CharTokenizer) -> None:
        """ "x a": given is x, and the likeliest character behind it is no space."""
        answers, _ = self.answers(tokenizer, task("language_modeling", language("x", "a"), delimiter=" "))
        assert answers == [False]

    def test_core_is_the_mean_of_the_centered(self, tokenizer: CharTokenizer) -> None:
        tasks = encode_tasks([self.MULTIPLE_CHOICE, self.SCHEMA, self.LANGUAGE_MODELING], tokenizer, context=100)
        questions = [question for task in tasks for question in task.questions]
        answers = score(self.logits(tokenizer), questions, device=CPU, max_pass_tokens=20)
        result = core_result(tasks, answers)
        assert result.core_metric == pytest.approx((1 / 2 + 0 + 2 / 3) / 3)

    def test_an_option_that_begins_all_others_is_chosen_in_the_first_place_only(self, tokenizer: CharTokenizer) -> None:
        """nanochat's mean of no losses is NaN, and min([nan, 1.0]) is nan, min([1.0, nan]) is 1.0."""
        examples = (
            choice("x", "a", "ac", gold=0),
            choice("x", "a", "ac", gold=1),
            choice("x", "ac", "a", gold=0),
            choice("x", "ac", "a", gold=1),
            choice("x", "ac", "a", "aa", gold=2),  # behind an a, an a is likelier than a c
            choice("x", "c", "c", gold=0),
        )
        answers = self.answers(tokenizer, task("multiple_choice", *examples))[0]
        assert answers == [True, False, True, False, True, True]

    def test_broken_logits_are_never_the_best(self, tokenizer: CharTokenizer) -> None:
        """NaN compares with nothing, so that it could win by its place alone."""
        whole = self.logits(tokenizer)
        (encoded,) = encode_tasks([task("multiple_choice", choice("x", "xa", "c", gold=0))], tokenizer, context=100)

        def broken_behind_x(tokens: Tensor, positions: Tensor) -> Tensor:
            logits = whole(tokens, positions).clone()
            logits[tokens.flatten()[positions] == tokenizer.encode("x")[0]] = torch.nan
            return logits

        assert score(broken_behind_x, encoded.questions, device=CPU, max_pass_tokens=50) == [False]


class TestPrompts:
    """To the letter."""

    def test_multiple_choice(self) -> None:
        examples = [choice(f"Q{n}", f"yes{n}", f"no{n}", gold=n % 2) for n in range(3)]
        one = task("multiple_choice", *examples, shots=2, delimiter="\nAnswer: ")
        first, second = (examples.index(example) for example in one.worked_examples(0))
        assert {first, second} == {1, 2}
        answers = {1: "no1", 2: "yes2"}
        front = f"Q{first}\nAnswer: {answers[first]}\n\nQ{second}\nAnswer: {answers[second]}\n\n"
        assert one.prompts(0) == [front + "Q0\nAnswer: yes0", front + "Q0\nAnswer: no0"]

    def test_schema(self) -> None:
        one = task("schema", schema("end", "A", "B", gold=1), schema("fin", "C", "D", gold=0), shots=1, delimiter=" ")
        assert one.prompts(0) == ["C fin\n\nA end", "C fin\n\nB end"]
        assert one.prompts(1) == ["B end\n\nC fin", "B end\n\nD fin"]

    def test_language_modeling(self) -> None:
        """The text up to the continuation loses the space at its end, and the whole text does not."""
        one = task("language_modeling", language("A", "b "), language("C", "d"), shots=1, delimiter=" ")
        assert one.prompts(0) == ["C d\n\nA", "C d\n\nA b "]
        assert one.prompts(1) == ["A b \n\nC", "A b \n\nC d"]
        assert replace(one, shots=0, delimiter="\nAnswer: ").prompts(1) == ["C\nAnswer:", "C\nAnswer: d"]

    @pytest.mark.parametrize("shots", [0, 1, 3, 10])
    def test_worked_examples_are_those_of_a_slow_draw(self, shots: int) -> None:
        examples = [language(str(n), "x") for n in range(23)]
        one = task("language_modeling", *examples, shots=shots)
        for index in range(23):
            others = [example for place, example in enumerate(examples) if place != index]
            assert one.worked_examples(index) == random.Random(1234 + index).sample(others, shots)


class TestTokens:
    def test_cropping_keeps_the_end(self) -> None:
        """Context 6 of "xxabc:c" and "xabd:cc" with BOS; what is scored stays what it was, as far as it is there."""
        tokenizer = CharTokenizer("abcdx:", bos=True)
        (whole,) = encode_tasks([task("multiple_choice", choice("xxab", "c", "dcc", gold=1))], tokenizer, context=20)
        (cut,) = encode_tasks([task("multiple_choice", choice("xxab", "c", "dcc", gold=1))], tokenizer, context=6)
        (tiny,) = encode_tasks([task("multiple_choice", choice("xxab", "c", "dcc", gold=1))], tokenizer, context=3)

        def parts(encoded: EncodedTask) -> list[tuple[str, str]]:
            (question,) = encoded.questions
            assert question.gold == 1
            return [
                (tokenizer.decode(tokens[:start]), tokenizer.decode(tokens[start:]))
                for tokens, start in zip(question.options, question.starts, strict=True)
            ]

        assert whole.questions[0].options[0][0] == tokenizer.bos_id
        assert parts(whole) == [("xxab:", "c"), ("xxab:", "dcc")]
        assert parts(cut) == [("xxab:", "c"), ("ab:", "dcc")]
        assert parts(tiny) == [("b:", "c"), ("d", "cc")]  # something must stand in front of what is scored
        assert [len(tokens) for tokens in cut.questions[0].options] == [6, 6]

    def test_tokens_that_reach_over_the_border(self) -> None:
        """A tokenizer that makes one token of "bc": scored is from where the two texts part, and no further back."""

        class Pairs(ByteTokenizer):
            def encode_batch(self, texts: Any) -> list[np.ndarray]:
                return [np.array([ord(c) for c in text.replace("bc", "€")], dtype=np.int32) for text in texts]

        tokenizer = Pairs()
        (one,) = encode_tasks([task("language_modeling", language("ab", "cd"), delimiter="")], tokenizer, context=20)
        assert [chr(token) for token in one.questions[0].options[0][one.questions[0].starts[0] :]] == ["€", "d"]


def slow_answer(model: GPT, one: Task, index: int, tokenizer: ByteTokenizer) -> bool:
    """nanochat's way: draw, render, encode, crop, one forward pass an option, compare."""
    example = one.examples[index]
    others = [other for place, other in enumerate(one.examples) if place != index]
    text = ""
    for other in random.Random(1234 + index).sample(others, one.shots):
        context, continuation = other.options[other.gold]
        text += context + one.delimiter + continuation + "\n\n"
    ids = [[tokenizer.bos_id, *tokenizer.encode(text + c + one.delimiter + t).tolist()] for c, t in example.options]
    if one.kind == "schema":
        n = 0
        while len({tuple(tokens[len(tokens) - n - 1 :]) for tokens in ids}) == 1:
            n += 1
        starts = [len(tokens) - n for tokens in ids]
    elif one.kind == "multiple_choice":
        n = 0
        while n < min(map(len, ids)) and len({tokens[n] for tokens in ids}) == 1:
            n += 1
        starts = [n for _ in ids]
    else:
        starts = [1 + len(tokenizer.encode((text + example.options[0][0] + one.delimiter).strip()))]
    means = []
    for tokens, start in zip(ids, starts, strict=True):
        cut = max(0, len(tokens) - model.config.seq_len)
        kept = torch.tensor(tokens[cut:])
        losses, greedy = [], True
        with torch.no_grad():
            probabilities = model(kept[None])[0].softmax(-1)
        for place in range(start - cut, len(kept)):
            losses.append(-probabilities[place - 1, kept[place]].log().item())
            greedy = greedy and int(probabilities[place - 1].argmax()) == int(kept[place])
        if one.kind == "language_modeling":
            return greedy
        means.append(sum(losses) / len(losses) if losses else math.nan)
    return means.index(min(means)) == example.gold


@pytest.fixture(scope="module")
def model() -> GPT:
    """Random weights with preferences of their own; float64, so that no rounding decides."""
    config = ModelConfig(n_layer=2, n_embd=32, n_head=2, seq_len=64, vocab_size=257, window_pattern="SL")
    model = build_model(config, device=CPU, compute_dtype=torch.float64, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    """Texts of 10 to 200 bytes: some are longer than the context. The language is one that this model speaks: what it
    says greedily is the continuation of every second example."""
    rng = random.Random(5)

    def word() -> str:
        return "".join(rng.choice("abcdef ") for _ in range(rng.randrange(2, 12))).strip() or "a"

    return [
        task("multiple_choice", *(choice(word(), word() + "1", word() + "2", word() + "3", gold=rng.randrange(3))
                                  for _ in range(16)), shots=3, delimiter="\nAnswer: "),
        replace(task("multiple_choice", *(choice(word(), "A", "B", "C", "D", gold=rng.randrange(4))
                                          for _ in range(16)), shots=2), label="letters"),
        replace(task("multiple_choice", *(choice(word(), *rng.sample(("ab", "abc", "abd"), 3), gold=rng.randrange(3))
                                          for _ in range(8)), shots=1), label="beginnings"),
        task("schema", *(schema(word(), word() + "1", word() + "22", gold=rng.randrange(2)) for _ in range(16))),
        task("language_modeling", *(language(word(), word()) for _ in range(16)), shots=1, delimiter=" "),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def spoken(model: GPT, tasks: list[Task]) -> list[Task]:
    """The same, where every second continuation of the language-modeling task is what the model says."""
    tokenizer = ByteTokenizer()
    one = tasks[-1]
    examples = list(one.examples)
    for index in range(0, len(examples), 2):
        tokens = [256, *tokenizer.encode(replace(one, examples=tuple(examples)).prompts(index)[0]).tolist()]
        said: list[int] = []
        while len(said) < 2:
            with torch.no_grad():
                said.append(int(model(torch.tensor([(tokens + said)[-64:]]))[0, -1].argmax()))
        examples[index] = language(examples[index].options[0][0], bytes(min(t, 127) for t in said).decode())
    return [*tasks[:-1], replace(one, examples=tuple(examples), delimiter="")]


class TestAgainstTheSlowWay:
    TOKENIZER = ByteTokenizer()

    @pytest.fixture(scope="class")
    @classmethod
    def slow(cls, model: GPT, spoken: list[Task]) -> list[bool]:
        return [slow_answer(model, one, index, cls.TOKENIZER) for one in spoken for index in range(one.n_scored)]

    def test_every_answer_for_every_batching(self, model: GPT, spoken: list[Task], slow: list[bool]) -> None:
        expected = slow
        assert 15 < sum(expected) < len(expected) - 15
        encoded = encode_tasks(spoken, self.TOKENIZER, model.config.seq_len)
        questions = [question for one in encoded for question in one.questions]
        lengths = [len(tokens) for question in questions for tokens in question.options]
        assert max(lengths) == 64
        assert min(lengths) < 30
        for max_pass_tokens in (1, 100, 1000, 100_000):
            found = score(gpt_logits(model), questions, device=CPU, max_pass_tokens=max_pass_tokens, module=model)
            assert found == expected, max_pass_tokens

    def test_parts_of_the_list_add_up(self, model: GPT, spoken: list[Task], slow: list[bool]) -> None:
        """As ranks would: each takes every third question."""
        encoded = encode_tasks(spoken, self.TOKENIZER, model.config.seq_len)
        questions = [question for one in encoded for question in one.questions]
        merged = [False] * len(questions)
        for rank in range(3):
            merged[rank::3] = score(gpt_logits(model), questions[rank::3], device=CPU, max_pass_tokens=300)
        whole = measure_core(model, encoded, max_pass_tokens=300)
        assert core_result(encoded, merged) == whole
        assert merged == slow

    @pytest.mark.parametrize("size", [2, 3, 100])
    def test_ranks_share_the_passes_and_all_have_the_answers(self, model: GPT, spoken: list[Task], size: int) -> None:
        """The passes are those of one process, so that no rounding can turn an answer over."""
        encoded = encode_tasks(spoken, self.TOKENIZER, model.config.seq_len)
        questions = [question for one in encoded for question in one.questions]
        passes: list[Tensor] = []

        def watched(tokens: Tensor, positions: Tensor) -> Tensor:
            passes.append(tokens)
            return gpt_logits(model)(tokens, positions)

        def answers(group: Group) -> list[bool]:
            return score(watched, questions, device=CPU, max_pass_tokens=300, group=group)

        alone = answers(Group())
        of_one, passes[:] = [tokens.tolist() for tokens in passes], []
        assert in_turn(size, answers) == alone
        assert sorted(tokens.tolist() for tokens in passes) == sorted(of_one)

    def test_passes_are_bounded_and_letters_share_theirs(self, model: GPT, tasks: list[Task]) -> None:
        shapes, told = [], []

        def watched(tokens: Tensor, positions: Tensor) -> Tensor:
            shapes.append(tuple(tokens.shape))
            return gpt_logits(model)(tokens, positions)

        encoded = encode_tasks(tasks[1:2], self.TOKENIZER, model.config.seq_len)
        score(watched, encoded[0].questions, device=CPU, max_pass_tokens=200, advance=told.append)
        assert all(rows * width <= 200 or rows == 1 for rows, width in shapes)
        assert [width for _, width in shapes] == sorted((width for _, width in shapes), reverse=True)
        assert sum(rows for rows, _ in shapes) == 16  # not 64: four letters, one pass
        assert sum(told) == sum(len(tokens) for question in encoded[0].questions for tokens in question.options)


def test_leaves_modes_gradients_and_random_state_as_they_were(tasks: list[Task]) -> None:
    config = ModelConfig(n_layer=1, n_embd=32, n_head=2, seq_len=64, vocab_size=257, dropout=0.5)
    model = build_model(config, device=CPU, compute_dtype=torch.float32, seed=1).train()
    encoded = encode_tasks(tasks, ByteTokenizer(), 64)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    results = [measure_core(model, encoded, max_pass_tokens=500) for _ in range(2)]
    assert results[0] == results[1]  # with dropout they would differ
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])  # type: ignore[index]
    assert random.getstate() == states[2]
    assert all(part.training for part in model.modules() if not isinstance(part, nn.Identity))
    assert all(parameter.grad is None for parameter in model.parameters())


class TestBundle:
    @pytest.fixture
    def bundle(self, tmp_path: Path) -> Path:
        return write_bundle(tmp_path / "bundle")

    def test_read(self, bundle: Path) -> None:
        pick, fit, go_on = read_tasks(bundle)
        assert (pick.label, pick.kind, pick.shots, pick.delimiter) == ("pick", "multiple_choice", 2, "\nAnswer: ")
        assert (fit.label, fit.kind, fit.shots, fit.delimiter) == ("fit", "schema", 0, " ")
        assert (pick.random_accuracy, fit.random_accuracy, go_on.random_accuracy) == (0.25, 0.5, 0.0)
        assert fit.examples[0].options[0][1] == fit.examples[0].options[1][1]
        assert all(example.options[0][0].startswith("the ") for example in go_on.examples)  # stripped

    @pytest.mark.parametrize("wanted", [None, 1, 3, 1000])
    def test_order_and_number(self, bundle: Path, wanted: int | None) -> None:
        (pick, *_) = read_tasks(bundle, wanted)
        records = [json.loads(line) for line in (bundle / "eval_data/a/pick.jsonl").read_text().splitlines()]
        random.Random(1337).shuffle(records)
        n_scored = min(wanted or len(records), len(records))
        assert pick.n_scored == n_scored
        # nanochat draws the two worked examples among the questions, so it could not ask fewer than three.
        assert len(pick.examples) == max(n_scored, 3)
        assert [e.options[0][0] for e in pick.examples] == [r["query"] for r in records[: len(pick.examples)]]
        assert [e.gold for e in pick.examples] == [r["gold"] for r in records[: len(pick.examples)]]

    def test_where_it_is(self, bundle: Path, tmp_path: Path) -> None:
        assert find_bundle(str(bundle), tmp_path) == bundle
        assert find_bundle(None, tmp_path) is None
        with pytest.raises(ConfigError, match=r"eval.core_dir.*core.yaml"):
            find_bundle(str(tmp_path), tmp_path)
        bundle.rename(tmp_path / "core")
        assert find_bundle(None, tmp_path) == tmp_path / "core"

    @pytest.mark.parametrize(
        ("file", "damage", "words"),
        [
            ("core.yaml", None, "core.yaml"),
            ("core.yaml", lambda s: "icl_tasks: [", "core.yaml is damaged"),
            ("core.yaml", lambda s: "icl_tasks: []", "needs tasks"),
            ("core.yaml", lambda s: "- a", "core.yaml is damaged"),
            ("core.yaml", lambda s: s.replace("label: fit", "label: pick"), "label of its own"),
            ("core.yaml", lambda s: s.replace("schema", "scheme"), "'scheme', not one of multiple_choice"),
            ("core.yaml", lambda s: s.replace("num_fewshot: [0], ", ""), "'num_fewshot' is missing"),
            ("core.yaml", lambda s: s.replace("[2]", "[200]"), "too few for pick, which shows 200"),
            ("eval_meta_data.csv", None, "eval_meta_data.csv"),
            ("eval_meta_data.csv", lambda s: s.replace("fit,", "fat,"), "fit: eval_meta_data.csv has no random"),
            ("eval_meta_data.csv", lambda s: s.replace("50", "100"), "fit: eval_meta_data.csv has no random"),
            ("eval_meta_data.csv", lambda s: s.replace("50", "half"), "half"),
            ("eval_meta_data.csv", lambda s: s.replace("Random", "Chance"), "'Random baseline' is missing"),
            ("eval_data/a/pick.jsonl", None, "pick.jsonl"),
            ("eval_data/a/pick.jsonl", lambda s: "", "0 examples"),
            ("eval_data/a/pick.jsonl", lambda s: s[:-4], "pick.jsonl, line"),
            ("eval_data/a/pick.jsonl", lambda s: s.replace('"query"', '"kweri"', 1), "'query' is missing"),
            ("eval_data/a/pick.jsonl", lambda s: s.replace('"gold": 2', '"gold": 3', 1), "gold = 3 is none of its 3"),
            ("eval_data/a/pick.jsonl", lambda s: s.replace('"gold": 1', '"gold": true', 1), "gold = True"),
            ("eval_data/a/pick.jsonl", lambda s: s.replace('"x"', "7", 1), "are texts"),
            ("eval_data/a/pick.jsonl", lambda s: s.replace('"x"', '" "', 1), "is empty"),
            ("eval_data/b/fit.jsonl", lambda s: "[1]\n" + s, "fit.jsonl, line 1 is damaged"),
            ("eval_data/b/go-on.jsonl", lambda s: s.replace('"context": "', '"context": 3, "y": "', 1), "line 1"),
        ],
    )
    def test_damage(self, bundle: Path, file: str, damage: Callable[[str], str] | None, words: str) -> None:
        text = (bundle / file).read_text()
        (bundle / file).unlink()
        if damage is not None:
            assert damage(text) != text
            (bundle / file).write_text(damage(text))
        with pytest.raises(UserError) as caught:
            read_tasks(bundle)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        assert str(bundle) in str(caught.value)


MEASURED: dict[str, Any] = {"eval.core_every_steps": 6, "eval.train_tokens": 300}


@pytest.fixture(scope="module")
def console_text(folder: Path) -> str:
    words = arguments(folder, "whole", MEASURED | {"eval.core_dir": folder / "bundle"})
    code, out, err = command(["train", *words])
    assert (code, err) == (0, "")
    return out


@pytest.fixture(scope="module")
def whole(folder: Path, console_text: str) -> Path:
    return folder / "whole"


@pytest.fixture(scope="module")
def expected(whole: Path) -> Outcome:
    return outcome(whole)


def again(folder: Path, name: str, **changes: Any) -> Path:
    """The same run in another folder."""
    settings: dict[str, Any] = {"eval__core_every_steps": 6, "eval__train_tokens": 300}
    return train(folder, name, **settings | {"eval__core_dir": folder / "bundle"} | changes)


class TestWithinARun:
    def test_lines(self, whole: Path) -> None:
        lines = lines_of(whole, "core")
        assert [line["step"] for line in lines] == [6, 12]
        for line in lines:
            assert list(line) == [
                "kind", "step", "core_metric", "tasks", "centered", "train_seconds", "core_seconds",
            ]  # fmt: skip
            assert list(line["tasks"]) == list(line["centered"]) == ["pick", "fit", "go on"]
            chances = {"pick": 0.25, "fit": 0.5, "go on": 0.0}
            for label, chance in chances.items():
                assert line["centered"][label] == pytest.approx((line["tasks"][label] - chance) / (1 - chance))
            assert line["core_metric"] == pytest.approx(sum(line["centered"].values()) / 3)
            assert line["core_seconds"] > 0
        order = [line["kind"] for line in map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())
                 if line["step"] == 12]  # fmt: skip
        assert order == ["train", "eval", "core", "sample", "sample", "checkpoint"]

    def test_console_and_summary(self, whole: Path, console_text: str) -> None:
        metric = lines_of(whole, "core")[-1]["core_metric"]
        assert f"step 00012 | CORE metric: {metric:.4f} | " in console_text
        assert console_text.splitlines()[-1].split() == ["core_metric:", f"{metric:.4f}"]
        assert json.loads((whole / "summary.json").read_text())["core_metric"] == metric
        code, out, _ = command(["train", "--resume", whole])
        assert (code, out.splitlines()[-1]) == (0, console_text.splitlines()[-1])

    def test_seconds_are_off_the_clock(self, whole: Path) -> None:
        summary = json.loads((whole / "summary.json").read_text())
        assert summary["evaluation_seconds"] > sum(line["core_seconds"] for line in lines_of(whole, "core"))
        assert lines_of(whole, "core")[-1]["train_seconds"] == lines_of(whole, "train")[-1]["train_seconds"]

    @pytest.fixture(scope="class")
    @classmethod
    def without(cls, folder: Path) -> Outcome:
        return outcome(train(folder, "without"))

    def test_training_does_not_notice(self, folder: Path, expected: Outcome, without: Outcome) -> None:
        assert all(torch.equal(tensor, without.tensors[name]) for name, tensor in expected.tensors.items())
        kinds = ("train", "sample")
        same = [[line for line in lines if json.loads(line)["kind"] in kinds]
                for lines in (expected.lines, without.lines)]  # fmt: skip
        assert same[0] == same[1]
        assert "core_metric" not in without.summary
        assert "core_metric" not in (folder / "without/log.txt").read_text()
        assert all("train_loss" not in line for line in lines_of(folder / "without", "eval"))

    def test_killed_and_resumed(self, folder: Path, expected: Outcome) -> None:
        """One run that is killed before or right after each of these lines, in turn."""
        run = folder / "killed"
        for kind, step, before in [
            ("core", 6, True), ("core", 6, False), ("checkpoint", 8, False), ("core", 12, False),
            ("sample", 12, False), ("checkpoint", 12, False),
        ]:  # fmt: skip
            with killed_at(kind, step, before=before):
                gptlab.train(resume=run) if run.exists() else again(folder, run.name)
        assert gptlab.train(resume=run).exit_code == 0
        assert differences(expected, outcome(run)) == []

    def test_checkpoints_from_before_there_was_core(self, folder: Path, without: Outcome) -> None:
        with killed_at("train", 9):
            train(folder, "old")
        saved = load_checkpoint(list_checkpoints(folder / "old/checkpoints")[-1])
        marks = {name: mark for name, mark in saved.state["marks"].items() if name != "core_measured"}
        state = {name: value for name, value in saved.state.items() if name != "core_metric"} | {"marks": marks}
        assert len(marks) == 3
        assert len(state) == len(saved.state) - 1
        save_checkpoint(
            folder / "old/checkpoints", saved.step, model=saved.model, optimizer=saved.optimizer, state=state
        )
        assert gptlab.train(resume=folder / "old").exit_code == 0
        assert differences(without, outcome(folder / "old")) == []

    def test_the_end_is_measured_whenever_it_was_due(self, folder: Path) -> None:
        run = again(folder, "at-the-end", steps=2, eval__core_every_steps=100)
        assert [line["step"] for line in lines_of(run, "core")] == [2]

    def test_only_looking_measures_too(self, folder: Path) -> None:
        run = again(folder, "only", eval__only=True)
        assert [(line["kind"], line["step"]) for line in map(json.loads, (run / "metrics.jsonl").open())] == [
            ("eval", 0),
            ("core", 0),
        ]

    def test_no_bundle_is_no_reason_to_stop(self, folder: Path) -> None:
        code, out, _ = command(["train", *arguments(folder, "no-bundle", MEASURED | {"steps": 2})])
        assert code == 0
        (warning,) = [line for line in out.splitlines() if line.startswith("warning:")]
        assert "without CORE" in warning
        assert str(folder / "cache" / "core") in warning
        assert "gptlab data prepare core" in warning
        assert lines_of(folder / "no-bundle", "core") == []

    def test_a_folder_that_was_named_and_is_none(self, folder: Path, tmp_path: Path) -> None:
        words = arguments(folder, "none", MEASURED | {"eval.core_dir": tmp_path})
        code, _, err = command(["train", *words])
        assert code == 2
        assert "eval.core_dir" in err
        assert not (folder / "none").exists()

    def test_text_that_the_tokenizer_does_not_know_is_told_before_training(self, folder: Path) -> None:
        changes = MEASURED | {"eval.core_dir": folder / "bundle", "tokenizer.kind": "char", "data.rows": "random"}
        code, _, err = command(["train", *arguments(folder, "char", changes)])
        assert code == 2
        assert len(err.splitlines()) == 1
        assert not (folder / "char").exists()


class TestTrainLoss:
    def test_is_the_loss_of_the_same_training_text_without_dropout(self, folder: Path, whole: Path) -> None:
        """The final one, by the definition, from the checkpoint."""
        config = make_config(folder, "whole")
        prepared = prepare(config.data, config.tokenizer)
        rows = validation_rows(prepared.train, FLAGS["model.seq_len"], prepared.tokenizer.bos_id, 300)
        inputs, targets = (torch.from_numpy(a).long() for a in rows.read(0, np.arange(rows.rows_per_epoch)))
        assert int((targets >= 0).sum()) == 300
        model = build_model(replace(config.model, vocab_size=257), device=CPU, compute_dtype=torch.float32, seed=0)
        model.load_state_dict(load_checkpoint(list_checkpoints(whole / "checkpoints")[-1]).model, strict=False)
        with torch.no_grad():
            log_probabilities = model.eval()(inputs).log_softmax(-1)
        nats = [-log_probabilities[r, c, targets[r, c]].item() for r, c in (targets >= 0).nonzero().tolist()]
        lines = lines_of(whole, "eval")
        # float32 log-softmax is good to about 1e-7 relative a token.
        assert lines[-1]["train_loss"] == pytest.approx(sum(nats) / 300, rel=1e-6)
        assert [line["step"] for line in lines] == [0, 3, 6, 9, 12]
        assert list(lines[0]) == ["kind", "step", "val_loss", "val_bpb", "train_loss", "train_seconds", "tokens"]
        assert lines[-1]["train_loss"] < lines[0]["train_loss"] - 0.5

    def test_on_the_console(self, whole: Path, console_text: str) -> None:
        line = lines_of(whole, "eval")[-1]
        assert (
            f"step 00012 | train loss: {line['train_loss']:.4f} | validation loss: {line['val_loss']:.4f} | bpb: "
            in (console_text)
        )


class TestEvalCommand:
    def test_core(self, whole: Path) -> None:
        code, out, err = command(["eval", whole, "--core"])
        assert code == 0
        assert "CORE: " in err
        found = dict(line.split(": ", 1) for line in out.splitlines())
        line = lines_of(whole, "core")[-1]
        assert list(found)[:2] == ["run", "step"]
        for label in ("pick", "fit", "go on"):
            assert float(found[label]) == pytest.approx(line["tasks"][label], abs=1e-6)
            assert float(found[f"{label}_centered"]) == pytest.approx(line["centered"][label], abs=1e-6)
        assert float(found["core_metric"]) == pytest.approx(line["core_metric"], abs=1e-6)

    def test_another_bundle_and_number(self, folder: Path, tmp_path: Path) -> None:
        run = train(folder, "unmeasured")
        code, _, err = command(["eval", run, "--core"])
        assert code == 2
        assert "--core-dir" in err
        bundle = write_bundle(tmp_path / "other")
        for number, shares in (("2", {0.0, 0.5, 1.0}), ("0", {n / 10 for n in range(11)})):  # of its ten examples
            code, out, _ = command(["eval", run, "--core", "--core-dir", bundle, "--core-examples", number])
            assert code == 0
            found = dict(line.split(": ", 1) for line in out.splitlines())
            assert float(found["fit"]) in {round(share, 6) for share in shares}
        assert command(["eval", run, "--core", "--core-examples", "-1"])[0] == 2

    def test_train_loss(self, whole: Path) -> None:
        code, out, _ = command(["eval", whole])
        assert code == 0
        found = dict(line.split(": ", 1) for line in out.splitlines())
        assert float(found["train_loss"]) == pytest.approx(lines_of(whole, "eval")[-1]["train_loss"], abs=1e-6)
