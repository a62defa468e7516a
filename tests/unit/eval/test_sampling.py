"""Generation: cached equals recomputed, draws follow the settings, and training notices nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.eval.sampling import generate, sample_text
from gptlab.model.gpt import GPT, build_model
from gptlab.model.kv_cache import KVCache

CONFIG = ModelConfig(
    n_layer=2, n_embd=32, n_head=4, n_kv_head=2, seq_len=16, vocab_size=29, window_pattern="SL", window_tokens=5
)
CONFIGS = {
    "modern": CONFIG,
    "learned positions": replace(CONFIG, position="learned", norm="layernorm", bias=True, window_pattern="L"),
    "key offset": replace(CONFIG, key_offset=True),
    "every layer windowed but the last": replace(CONFIG, window_pattern="S", window_tokens=1),
}


def shaken(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float64) -> GPT:
    """Weights far enough from their first values that contexts matter."""
    model = build_model(config, device=torch.device("cpu"), compute_dtype=dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


class Constant(torch.nn.Module):
    """Stands in for a model: gives every next token the same distribution, whatever the context."""

    document_mask = None

    def __init__(self, probabilities: Sequence[float]) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(probabilities, dtype=torch.float64).log())
        self.config = replace(CONFIG, vocab_size=len(probabilities))
        self.compute_dtype = torch.float64

    def is_changed(self) -> bool:
        return False

    def forward(self, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        return self.logits.expand(*tokens.shape, -1)


def recompute(
    model: GPT, tokens: list[int], max_tokens: int, *, temperature: float, keep_first: bool = False
) -> list[int]:
    """Without a cache: the whole context again for every token, cut to its last half whenever it is full."""
    seq_len, context, drawn = model.config.seq_len, list(tokens), []
    generator = torch.Generator().manual_seed(11)
    for _ in range(max_tokens):
        if len(context) > seq_len:
            context = ([context[0]] if keep_first else []) + context[-(seq_len // 2) :]
        with torch.no_grad():
            logits = model(torch.tensor([context]))[0, -1]
        if temperature == 0:
            drawn.append(int(logits.argmax()))
        else:  # one uniform number a token: the first token at which the cumulative sum exceeds it
            sums = accumulate((logits / temperature).softmax(0).tolist())
            uniform = float(torch.rand(1, dtype=torch.float64, generator=generator))
            drawn.append(next(token for token, total in enumerate(sums) if total > uniform))
        context.append(drawn[-1])
    return drawn


# Every model with every prompt, and each of both with both temperatures: drawing reads the logits alone.
@pytest.mark.parametrize(
    ("name", "prompt_tokens", "temperature"),
    [
        (name, prompt_tokens, 1.5 * ((row + column) % 2))
        for row, name in enumerate(CONFIGS)
        for column, prompt_tokens in enumerate([1, 16, 40])
    ],
)
def test_equals_full_recompute(name: str, prompt_tokens: int, temperature: float) -> None:
    """30 tokens with a context of 16: the context is cut several times on the way. float64, so no tie is broken."""
    model = shaken(CONFIGS[name]).eval()
    prompt = torch.randint(0, 29, (prompt_tokens,), generator=torch.Generator().manual_seed(4)).tolist()
    expected = recompute(model, prompt, 30, temperature=temperature)
    assert temperature == 0 or len(set(expected)) > 10  # a constant continuation would prove little
    assert list(generate(model, prompt, max_tokens=30, temperature=temperature, seed=11)) == expected
    if temperature == 0:
        assert list(generate(model, prompt, max_tokens=30, temperature=0.7, top_k=1)) == expected


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = shaken()
    with torch.no_grad():
        model.head.weight[3] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        list(generate(model, [1], max_tokens=1))


def test_a_cut_context_starts_with_bos_again() -> None:
    model = shaken().eval()
    prompt = [28, 3, 4, 5]
    expected = recompute(model, prompt, 40, temperature=1.5, keep_first=True)
    drawn = list(generate(model, prompt, max_tokens=40, temperature=1.5, seed=11, bos_id=28, stop_at_bos=False))
    assert drawn == expected
    assert drawn != recompute(model, prompt, 40, temperature=1.5)


@pytest.mark.parametrize("seq_len", [1, 2, 3])
def test_tiny_contexts_go_on(seq_len: int) -> None:
    model = shaken(replace(CONFIG, seq_len=seq_len, window_tokens=None))
    drawn = generate(model, [28, 1, 2, 3], max_tokens=9, temperature=0.0, bos_id=28, stop_at_bos=False)
    assert len(list(drawn)) == 9


@pytest.mark.parametrize("name", CONFIGS)
def test_cache_in_pieces_equals_one_pass(name: str) -> None:
    config = CONFIGS[name]
    model = shaken(config).eval()
    tokens = torch.randint(0, 29, (3, 16), generator=torch.Generator().manual_seed(5))
    cache = KVCache(config, 3, 16, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        pieces = torch.cat([model(piece, cache=cache) for piece in tokens.split([1, 6, 1, 3, 5], dim=1)], dim=1)
        torch.testing.assert_close(pieces, model(tokens), rtol=1e-10, atol=1e-10)
    assert cache.length == 16
    with pytest.raises(ValueError, match="context"):
        model(tokens[:, :1], cache=cache)


def test_a_cache_that_is_too_small_is_refused() -> None:
    cache = KVCache(CONFIG, 1, 4, torch.device("cpu"), torch.float64)
    with pytest.raises(ValueError, match="room for 4 tokens"):
        shaken()(torch.zeros(1, 5, dtype=torch.int64), cache=cache)


class TestDraws:
    probabilities = (0.5, 0.25, 0.125, 0.0625, 0.0625)

    def frequencies(self, **settings: object) -> np.ndarray:
        drawn = list(generate(Constant(self.probabilities), [0], max_tokens=800, **settings))  # type: ignore[arg-type]
        return np.bincount(drawn, minlength=5) / 800

    # A frequency of 800 draws has a standard error of at most 0.018; 0.07 is about four of them.

    def test_follow_the_distribution(self) -> None:
        np.testing.assert_allclose(self.frequencies(temperature=1.0), self.probabilities, atol=0.07)

    def test_temperature_by_hand(self) -> None:
        """At temperature 0.5 probabilities are squared: 64, 16, 4, 1, 1 parts of 86."""
        np.testing.assert_allclose(self.frequencies(temperature=0.5), np.array([64, 16, 4, 1, 1]) / 86, atol=0.07)

    def test_top_k_by_hand(self) -> None:
        """The two likeliest, renormalized: 2/3 and 1/3."""
        frequencies = self.frequencies(temperature=1.0, top_k=2)
        np.testing.assert_allclose(frequencies, [2 / 3, 1 / 3, 0, 0, 0], atol=0.07)
        assert frequencies[2:].sum() == 0

    def test_ties_at_the_edge_do_not_widen_top_k(self) -> None:
        assert np.count_nonzero(self.frequencies(temperature=1.0, top_k=4)) == 4

    def test_top_k_beyond_the_vocabulary_is_all(self) -> None:
        model = Constant(self.probabilities)
        assert list(generate(model, [0], max_tokens=50, top_k=99)) == list(generate(model, [0], max_tokens=50))

    def test_a_tiny_temperature_is_greedy(self) -> None:
        for temperature in (1e-3, 1e-45, 1e-320):
            assert set(generate(Constant(self.probabilities), [0], max_tokens=50, temperature=temperature)) == {0}

    def test_seed(self) -> None:
        model = shaken()
        first, again, other = (list(generate(model, [1], max_tokens=30, seed=seed)) for seed in (5, 5, 6))
        assert first == again
        assert first != other


def test_padding_is_never_drawn() -> None:
    model = shaken(replace(CONFIG, vocab_size=3, vocab_multiple=64))
    assert set(generate(model, [0], max_tokens=50, temperature=5.0)) <= {0, 1, 2}


def test_training_notices_nothing() -> None:
    """Global random state, modes, gradients and weights are as before, also between two tokens and when abandoned."""
    model = shaken(replace(CONFIG, dropout=0.5)).train()
    model.blocks[1].eval()
    modes = [part.training for part in model.modules()]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    stream = generate(model, [1, 2, 3], max_tokens=30, temperature=1.0, seed=0)
    for _ in range(3):
        next(stream)
        assert [part.training for part in model.modules()] == modes
        assert torch.is_grad_enabled()
    stream.close()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in model.named_parameters())


def test_dropout_is_off_while_generating() -> None:
    with_dropout = shaken(replace(CONFIG, dropout=0.5)).train()
    plain = list(generate(shaken(), [1], max_tokens=20, temperature=0.0))
    assert list(generate(with_dropout, [1], max_tokens=20, temperature=0.0)) == plain


def test_a_model_can_train_after_it_generated() -> None:
    model = shaken().train()
    list(generate(model, [1], max_tokens=20))
    tokens = torch.randint(0, 29, (2, 16))
    model.loss(tokens, tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_ends_at_bos_unless_told_otherwise() -> None:
    model = Constant([0.5, 0.5])
    drawn = list(generate(model, [1, 0], max_tokens=200, seed=3, bos_id=1))
    endless = list(generate(model, [1, 0], max_tokens=200, seed=3, bos_id=1, stop_at_bos=False))
    assert len(drawn) < 30
    assert len(endless) == 200
    assert set(drawn) <= {0}
    assert endless[: len(drawn) + 1] == [*drawn, 1]


def test_zero_tokens_are_none() -> None:
    assert list(generate(shaken(), [1], max_tokens=0)) == []


class Bytes:
    """One token a byte; 256 is BOS where there is one."""

    def __init__(self, bos_id: int | None) -> None:
        self.bos_id = bos_id

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(i for i in ids if i < 256)


class Script(torch.nn.Module):
    """Stands in for a model: writes a fixed byte string, and remembers what it was shown."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = replace(CONFIG, vocab_size=257, seq_len=64)
        self.compute_dtype = torch.float32
        self.script = list(text)
        self.shown: list[list[int]] = []

    def is_changed(self) -> bool:
        return False

    def forward(self, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        self.shown.append(tokens[0].tolist())
        logits = torch.zeros(1, tokens.shape[1], 257)
        logits[0, -1, self.script.pop(0)] = 100.0
        return logits


def pieces(text: bytes, prompt: str = "x", bos_id: int | None = None) -> tuple[list[str], list[list[int]]]:
    model = Script(text)
    stream = sample_text(model, Bytes(bos_id), prompt, max_tokens=len(text), temperature=0.0)  # type: ignore[arg-type]
    return list(stream), model.shown


def test_characters_spread_over_tokens_come_out_whole() -> None:
    text = "aé→😀z"  # 1, 2, 3, 4 and 1 bytes, one token each
    assert pieces(text.encode())[0] == ["a", "é", "→", "😀", "z"]


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert "".join(pieces(b"a\xffb\xe2\x86c")[0]) == "a\ufffdb\ufffdc"


def test_a_character_cut_off_at_the_end_is_left_out() -> None:
    assert "".join(pieces(b"ab" + "😀".encode()[:3])[0]) == "ab"


def test_prompts_start_with_bos_where_there_is_one() -> None:
    assert pieces(b"a", "hi", bos_id=256)[1] == [[256, 104, 105]]
    assert pieces(b"a", "", bos_id=256)[1] == [[256]]
    assert pieces(b"a", "hi")[1] == [[104, 105]]


def test_an_empty_prompt_without_bos_is_a_clear_error() -> None:
    with pytest.raises(UserError, match="prompt is empty"):
        pieces(b"a", "")


def test_prompts_draw_apart_and_each_the_same_again() -> None:
    """With one sequence of draws, this model would continue every prompt with the same bytes."""
    model = Constant([1 / 257] * 257)
    drawn = ["".join(sample_text(model, Bytes(None), prompt, max_tokens=20, seed=1)) for prompt in "aba"]
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]


def test_one_token_at_a_time_behind_the_prompt() -> None:
    assert pieces(b"abc", "hi")[1] == [[104, 105], [97], [98]]
