"""The decoder's logits are those of the model's plain forward pass, for every option of the architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from gptlab.config.model import ModelConfig
from gptlab.model import decoder as decoder_module
from gptlab.model.decoder import Decoder
from gptlab.model.gpt import GPT, build_model

SEQ_LEN = 12
MODERN = ModelConfig(
    n_layer=3, n_embd=32, n_head=4, n_kv_head=2, seq_len=SEQ_LEN, vocab_size=29, window_pattern="SSL", window_tokens=5
)
CONFIGS = {
    "modern": MODERN,
    "one key-value head": replace(MODERN, n_kv_head=1, window_pattern="L", window_tokens=None),
    "windows of one token": replace(MODERN, window_pattern="S", window_tokens=1),
    "gpt2": replace(
        MODERN, n_kv_head=None, position="learned", norm="layernorm", bias=True, activation="gelu_tanh", tied_head=True,
        qk_norm=False, value_embeddings=False, residual_lambdas=False, embedding_norm=False, logit_softcap=None,
        window_pattern="L", window_tokens=None,
    ),
    "layernorm without bias, gelu": replace(MODERN, norm="layernorm", activation="gelu"),
    "no key-query norm, scaled attention": replace(MODERN, qk_norm=False, attention_residual_scale=0.3),
    "scaled attention with bias": replace(MODERN, bias=True, attention_residual_scale=0.3, dropout=0.5),
    "key offset": replace(MODERN, key_offset=True),
    "key offset, whole context": replace(MODERN, key_offset=True, window_pattern="L", window_tokens=None),
    "value embeddings without rotary": replace(MODERN, position="learned", rmsnorm_eps=1e-2),
}  # fmt: skip


def shaken(config: ModelConfig, dtype: torch.dtype = torch.float64) -> GPT:
    """Weights far enough from their first values that every part matters."""
    model = build_model(config, device=torch.device("cpu"), compute_dtype=dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def both_ways(model: GPT, lengths: list[int], steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(decoder's logits, plain logits), each (B, V), of rows that begin with so many random tokens. A row that is full
    is read again, from its last half."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 29, (length,), generator=generator).tolist() for length in lengths]
    decoder = Decoder(model, len(texts))
    for row, text in enumerate(texts):
        yield decoder.read([row], text)[None], plain(model, [text])
    for _ in range(steps):
        full = [row for row in range(len(texts)) if decoder.length(row) == SEQ_LEN]
        new = torch.randint(0, 29, (len(texts),), generator=generator).tolist()
        texts = [[*text, token] for text, token in zip(texts, new, strict=True)]
        found = decoder.step(new)
        for row in full:
            texts[row] = texts[row][-SEQ_LEN // 2 :]
            found = found.index_copy(0, torch.tensor([row]), decoder.read([row], texts[row])[None])
        assert [decoder.length(row) for row in range(len(texts))] == [len(text) for text in texts]
        yield found, plain(model, texts)


def plain(model: GPT, texts: list[list[int]]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([text]))[0, -1] for text in texts])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [[3], [1, 12, 6]], ids=["one row", "other lengths"])
def test_logits_of_the_plain_forward_pass(name: str, lengths: list[int]) -> None:
    """Past the end of the context, where rows are cut. float64 leaves rounding of 1e-15 a step; 1e-9 is far from both
    that and any mistake."""
    for found, expected in both_ways(shaken(CONFIGS[name]), lengths, SEQ_LEN):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [[3], [1, 12, 6, 5, 5]], ids=["one row", "other lengths"])
def test_the_kernel_is_the_same(name: str, lengths: list[int]) -> None:
    """The kernel adds in another order than PyTorch: some hundred roundings of 6e-8, of logits up to 15."""
    model = shaken(CONFIGS[name], torch.float32)
    assert Decoder(model, 1)._kernel is not None
    for found, expected in both_ways(model, lengths, SEQ_LEN):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_kernel_hides_no_nan() -> None:
    """ReLU^2 of it was 0."""
    model = shaken(MODERN, torch.float32)
    with torch.no_grad():
        model.blocks[1].get_submodule("mlp.up").weight[3] = torch.nan  # type: ignore[index, operator]
    decoder = Decoder(model, 1)
    assert decoder._kernel is not None
    assert decoder.step([4]).isnan().all()


@pytest.mark.parametrize("name", ["modern", "key offset, whole context"])
@pytest.mark.parametrize("lengths", [[4, 4], [1, 12]], ids=["same length", "other lengths"])
def test_past_the_spare_columns(name: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is moved to its front."""
    monkeypatch.setattr(decoder_module, "SPARE_COLUMNS", 8)
    for found, expected in both_ways(shaken(CONFIGS[name]), lengths, 8 + SEQ_LEN):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_types() -> None:
    """float32 rounds to 6e-8 of values near 1, through three layers; bfloat16 to 4e-3, and the decoder rounds a gate,
    a norm and a sum less often than the model. Logits are capped at 15, and of size 5."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.5)):
        for found, expected in both_ways(shaken(MODERN, dtype), [3, 5], 8):
            assert found.dtype == expected.dtype == torch.float32
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_rows_share_what_is_read() -> None:
    model = shaken(MODERN)
    decoder = Decoder(model, 2)
    decoder.read([0, 1], [1, 2, 3])
    torch.testing.assert_close(decoder.step([4, 5]), plain(model, [[1, 2, 3, 4], [1, 2, 3, 5]]), rtol=1e-9, atol=1e-9)
