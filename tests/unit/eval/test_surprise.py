"""The surprise of a text against logits taken one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.data.tokenizer.base import ByteTokenizer, CharTokenizer, Tokenizer
from gptlab.eval.surprise import measure_text, pieces, windows
from gptlab.model.gpt import GPT, build_model

SEQ_LEN = 8
TEXT = "Noël → déjà vu, 🦊 and on"


@pytest.fixture(scope="module")
def model() -> GPT:
    config = ModelConfig(n_layer=2, n_embd=16, n_head=2, seq_len=SEQ_LEN, vocab_size=257, vocab_multiple=8)
    model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def nats_one_by_one(model: GPT, sequence: list[int], bos: int | None) -> list[float]:
    """Each token but the first, from the tokens that its window has before it: the first window is the beginning, each
    later one ends half a context further."""
    found, end = [], SEQ_LEN
    for place in range(1, len(sequence)):
        while place > end:
            end += SEQ_LEN // 2
        last = min(end, len(sequence) - 1)  # the last window ends with the text
        context = sequence[max(0, last - SEQ_LEN) : place]
        if last > SEQ_LEN and bos is not None:
            context = [bos, *context[1:]]
        with torch.no_grad():
            logits = model(torch.tensor([context]))[0, -1].double()
        found.append(float(torch.logsumexp(logits, 0) - logits[sequence[place]]))
    return found


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), CharTokenizer(sorted(set(TEXT)), bos=False)], ids=["bos", "not"]
)
@pytest.mark.parametrize("characters", [1, 2, 5, 8, 9, 13, len(TEXT)])
def test_each_token_is_predicted_from_its_window(model: GPT, tokenizer: Tokenizer, characters: int) -> None:
    text = TEXT[:characters]
    ids = tokenizer.encode(text).tolist()
    sequence = ids if tokenizer.bos_id is None else [tokenizer.bos_id, *ids]
    measure = lambda: measure_text(model, tokenizer, text, seq_len=SEQ_LEN, device="cpu", micro_sequences=2)  # noqa: E731
    if len(sequence) < 2:
        with pytest.raises(UserError, match="too short"):
            measure()
        return
    found, expected = measure(), nats_one_by_one(model, sequence, tokenizer.bos_id)
    # Another shape of the same float32 products: 2e-6 of about 6 nats.
    np.testing.assert_allclose(found.nats[found.first :], expected, rtol=2e-6)
    assert found.target_tokens == len(expected)
    size = len(text.encode()) - (0 if tokenizer.bos_id is not None else len(text[0].encode()))
    assert found.target_bytes == size
    assert found.bpb == pytest.approx(sum(expected) / math.log(2) / size, rel=2e-6)
    assert found.loss == pytest.approx(sum(expected) / len(expected), rel=2e-6)


@pytest.mark.parametrize("bos", [None, 99])
@pytest.mark.parametrize("seq_len", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [2, 3, 4, 8, 9, 10, 17, 40])
def test_every_token_is_a_target_once_with_half_a_context(length: int, seq_len: int, bos: int | None) -> None:
    sequence = np.arange(100, 100 + length)
    inputs, targets, _ = windows(sequence, seq_len, bos)
    rows, columns = np.nonzero(targets >= 0)
    assert sorted(targets[rows, columns].tolist()) == sequence[1:].tolist()
    for row, column in zip(rows, columns, strict=True):
        before, target = inputs[row, : column + 1].tolist(), int(targets[row, column])
        known = min(target - 100, seq_len // 2)
        assert before[len(before) - known :] == list(range(target - known, target))
        assert before[0] == bos or row == 0 or bos is None or seq_len == 1


def test_pieces_are_the_text(model: GPT) -> None:
    """A character of several bytes is one piece, with the bits of all of them."""
    tokenizer = ByteTokenizer()
    found = measure_text(model, tokenizer, TEXT, seq_len=SEQ_LEN, device="cpu", micro_sequences=3)
    shown = list(pieces(found, tokenizer))
    assert [piece.text for piece in shown] == list(TEXT)
    assert sum(piece.bits for piece in shown) == pytest.approx(found.bpb * found.target_bytes)
    first, end = TEXT[:3].encode(), len(TEXT[:2].encode())
    assert shown[2].bits == pytest.approx(found.nats[end : len(first)].sum() / math.log(2))
