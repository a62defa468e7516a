"""Several samples as one batch: each is what it is alone, and what the plain generator draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from test_sampling import CONFIG, CONFIGS, Bytes, shaken

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.data.tokenizer.tokenizer import ByteTokenizer
from gptlab.eval.continuation import Drawing, DrawnToken, continue_text, draw, text_of, truncated
from gptlab.eval.sampling import generate, prompt_seed, sample_text
from gptlab.model.gpt import GPT, build_model

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def model() -> GPT:
    return shaken(replace(CONFIG, vocab_size=257))


def constant(probabilities: Sequence[float]) -> GPT:
    """A model that gives every next token the same distribution, whatever the context."""
    config = replace(PLAIN_HEAD, vocab_size=len(probabilities))
    model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float64, seed=0)
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.fill_(1.0)
        model.head.weight.zero_()
        model.head.weight[: len(probabilities), 0] = torch.tensor(probabilities, dtype=torch.float64).log()
    return model


PLAIN_HEAD = ModelConfig(
    n_layer=1, n_embd=4, n_head=1, seq_len=8, norm="layernorm", bias=True, logit_softcap=None, value_embeddings=False
)


def pieces(tokens: object) -> bytes:
    return b"".join(token.piece for token in tokens)  # type: ignore[attr-defined]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.5}, {"temperature": 0.7, "top_k": 5}])
@pytest.mark.parametrize("prompt", ["", "seven", "longer than the context of 16"])
def test_one_sample_is_what_the_plain_generator_draws(model: GPT, settings: dict[str, float], prompt: str) -> None:
    """float64, so that no draw lies within rounding of another. 30 tokens: the context is cut on the way."""
    drawing = Drawing(max_tokens=30, **settings)  # type: ignore[arg-type]
    expected = list(sample_text(model, TOKENIZER, prompt, max_tokens=30, seed=3, **settings))
    assert list(text_of(continue_text(model, TOKENIZER, prompt, drawing, seed=3)[0])) == expected


def test_a_sample_does_not_depend_on_how_many_there_are_nor_on_who_reads_first(model: GPT) -> None:
    drawing = Drawing(max_tokens=30, temperature=1.5)
    alone = [pieces(continue_text(model, TOKENIZER, "a", drawing, samples=n + 1)[n]) for n in range(3)]
    together = continue_text(model, TOKENIZER, "a", drawing, samples=3)
    last = pieces(together[2])
    assert [pieces(together[0]), pieces(together[1]), last] == alone
    assert len(set(alone)) == 3


def test_samples_end_one_by_one() -> None:
    """At BOS, with or without others that go on."""
    halting = constant([*[0.9 / 256] * 256, 0.1])
    drawing = Drawing(max_tokens=40)
    together = [pieces(tokens) for tokens in continue_text(halting, TOKENIZER, "x", drawing, samples=6)]
    assert len({len(text) for text in together}) > 3
    seeds = [prompt_seed(0, "x")]
    tokens = [token for seed in seeds for token in generate(halting, [256, 120], max_tokens=40, seed=seed, bos_id=256)]
    assert together[0] == bytes(tokens)
    endless = continue_text(halting, TOKENIZER, "x", replace(drawing, stop_at_bos=False), samples=2)
    assert [len(list(tokens)) for tokens in endless] == [40, 40]


@pytest.mark.parametrize("name", ["modern", "key offset"])
def test_nothing_before_a_bos_that_was_drawn_is_seen_where_documents_are_masked(name: str) -> None:
    """As in training: probabilities are those of the masked model that reads all again for each token."""
    model, tokenizer = shaken(replace(CONFIGS[name], vocab_size=5)), Bytes(4)
    model.mask_documents(4)
    tokenizer.tokens = (b"a", b"b", b"c", b"d", b"|")  # type: ignore[attr-defined]
    tokenizer.encode = lambda text: torch.tensor([0])  # type: ignore[method-assign, assignment, return-value]
    drawing = Drawing(max_tokens=14, temperature=5.0, stop_at_bos=False, heal=False)
    found = []
    for stream in continue_text(model, tokenizer, "a", drawing, samples=3):  # type: ignore[arg-type]
        text = [4, 0]
        for drawn in stream:
            with torch.no_grad():
                shares = model(torch.tensor([text]))[0, -1].softmax(-1)
            text.append(b"abcd|".index(drawn.piece))
            assert drawn.probability == pytest.approx(float(shares[text[-1]]), rel=1e-9)
        found.append(text[2:])
    assert any(4 in text[:-1] for text in found)
    seed = prompt_seed(0, "a")
    plain = generate(model, [4, 0], max_tokens=14, temperature=5.0, seed=seed, bos_id=4, stop_at_bos=False)
    assert list(plain) == found[0]


class CachingNorm(torch.nn.Module):
    """Keeps the table that it makes at its first call."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.full(x.shape[-1:], 2.0)
        return x * self.table


def test_a_replaced_part_that_caches_can_train_after_it_sampled() -> None:
    model = build_model(
        replace(CONFIG, vocab_size=257), device=torch.device("cpu"), compute_dtype=torch.float32, seed=0
    )
    model.final_norm, model.is_replaced = CachingNorm(), True  # type: ignore[assignment]
    assert pieces(continue_text(model, TOKENIZER, "a", Drawing(max_tokens=2))[0])
    tokens = torch.tensor([[1, 2, 3]])
    model.loss(tokens, tokens).backward()


def test_probabilities_and_alternatives() -> None:
    """The model's own, whatever the temperature."""
    shares = (0.5, 0.25, 0.125, 0.125)
    model, tokenizer = constant(shares), Bytes(None)
    tokenizer.tokens = (b"a", b"b", b"c", b"d")  # type: ignore[attr-defined]
    tokenizer.encode = lambda text: torch.tensor([0])  # type: ignore[method-assign, assignment, return-value]
    for token in continue_text(model, tokenizer, "a", Drawing(max_tokens=20, temperature=3.0), alternatives=2)[0]:  # type: ignore[arg-type]
        assert token.probability == pytest.approx(shares[b"abcd".index(token.piece)])
        assert token.alternatives == ((b"a", pytest.approx(0.5)), (b"b", pytest.approx(0.25)))
    (plain,) = continue_text(model, tokenizer, "a", Drawing(max_tokens=1, temperature=0.0))[0]  # type: ignore[arg-type]
    assert plain == DrawnToken(b"a", pytest.approx(0.5), ())


class TestTruncation:
    """By hand, of probabilities 0.5, 0.25, 0.125, 0.0625, 0.0625."""

    shares = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625], dtype=torch.float64)

    @pytest.mark.parametrize(
        ("top_p", "min_p", "kept"),
        [
            (1.0, 0.0, 5),
            (0.5, 0.0, 1),  # reached by the first
            (0.51, 0.0, 2),
            (0.75, 0.0, 2),
            (0.9, 0.0, 4),  # of two that are alike, one
            (1e-9, 0.0, 1),
            (1.0, 0.5, 2),  # 0.25 is just half of 0.5
            (1.0, 0.51, 1),
            (1.0, 0.2, 3),
            (0.6, 0.2, 2),
            (0.9, 0.4, 2),
        ],
    )
    def test_by_hand(self, top_p: float, min_p: float, kept: int) -> None:
        expected = torch.where(torch.arange(5) < kept, self.shares, 0.0)
        found = truncated(self.shares.expand(2, 5), top_p, min_p)
        torch.testing.assert_close(found, (expected / expected.sum()).expand(2, 5), rtol=1e-12, atol=0)

    def test_top_p_that_is_reached_to_the_last_bit(self) -> None:
        """0.4 + 0.3 - 0.3 is less than 0.4."""
        shares = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
        assert truncated(shares, 0.4, 0.0).tolist() == [1, 0, 0, 0]
        assert truncated(shares, 0.7, 0.0).count_nonzero() == 2

    def test_order(self) -> None:
        """Temperature 2 (square roots: 2, 1.414, 1), then the likeliest two (0.586, 0.414), then top-p. At temperature
        1 the first of two has 0.667, and of all three at temperature 2 it has 0.453."""
        model, tokenizer = constant([4 / 7, 2 / 7, 1 / 7]), Bytes(None)
        tokenizer.tokens = (b"a", b"b", b"c")  # type: ignore[attr-defined]
        tokenizer.encode = lambda text: torch.tensor([0])  # type: ignore[method-assign, assignment, return-value]
        drawing = Drawing(max_tokens=60, temperature=2.0, top_k=2, top_p=0.59)
        drawn = pieces(continue_text(model, tokenizer, "a", drawing)[0])  # type: ignore[arg-type]
        assert set(drawn) == {*b"ab"}
        only = pieces(continue_text(model, tokenizer, "a", replace(drawing, top_p=0.58))[0])  # type: ignore[arg-type]
        assert set(only) == {*b"a"}

    def test_top_p_takes_the_likeliest_wherever_they_stand(self) -> None:
        logits = torch.tensor([[0.1, 0.2, 0.7]]).log()
        drawing, generator = Drawing(top_p=0.8), torch.Generator().manual_seed(0)
        assert {draw(logits, drawing, [generator])[0] for _ in range(100)} == {1, 2}


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 1.0},
        {"min_p": -0.1},
        {"top_k": 0},
        {"max_tokens": -1},
        {"temperature": -1.0},
    ],
)
def test_impossible_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Drawing(**wrong)  # type: ignore[arg-type]


def test_nothing_to_start_from() -> None:
    with pytest.raises(UserError, match="prompt is empty"):
        continue_text(constant([0.5, 0.5]), Bytes(None), "", Drawing())  # type: ignore[arg-type]


def test_no_tokens() -> None:
    assert list(continue_text(constant([1 / 257] * 257), TOKENIZER, "x", Drawing(max_tokens=0))[0]) == []


def test_training_notices_nothing(model: GPT) -> None:
    """Modes, gradients and the global generator, also between two tokens."""
    training = shaken(replace(CONFIG, vocab_size=257, dropout=0.5)).train()
    state = torch.get_rng_state()
    stream = continue_text(training, TOKENIZER, "abc", Drawing(max_tokens=20, temperature=0.0))[0]
    next(stream)
    assert all(part.training for part in training.modules())
    assert torch.is_grad_enabled()
    list(stream)
    assert torch.equal(torch.get_rng_state(), state)
    training.loss(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)).backward()
