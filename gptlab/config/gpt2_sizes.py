"""The shapes of OpenAI's four GPT-2 models, by the names that the Hugging Face hub knows them by."""

from __future__ import annotations

from collections.abc import Mapping

from gptlab.config.model import ModelConfig


def _gpt2(n_layer: int, n_embd: int) -> ModelConfig:
    """Heads are 64 wide in all four; biases everywhere, and GELU by tanh: nanoGPT's own runs have neither."""
    return ModelConfig(
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_embd // 64,
        seq_len=1024,
        vocab_size=50257,
        vocab_multiple=64,
        norm="layernorm",
        position="learned",
        activation="gelu_tanh",
        bias=True,
        tied_head=True,
        qk_norm=False,
        value_embeddings=False,
        residual_lambdas=False,
        embedding_norm=False,
        logit_softcap=None,
        init="gpt2",
    )


GPT2_SIZES: Mapping[str, ModelConfig] = {
    "gpt2": _gpt2(12, 768),  # 124M parameters
    "gpt2-medium": _gpt2(24, 1024),  # 355M
    "gpt2-large": _gpt2(36, 1280),  # 774M
    "gpt2-xl": _gpt2(48, 1600),  # 1558M
}
