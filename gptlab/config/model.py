"""The network's configuration. Every difference between the four lineages is one field, so that it can be ablated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from gptlab.config.errors import ConfigError
from gptlab.config.fields import BelowOne, Limit, Positive, checked_dataclass, require

Norm = Literal["rmsnorm", "layernorm"]
Position = Literal["rope", "learned"]
Activation = Literal["relu2", "gelu", "gelu_tanh"]
Init = Literal["nanochat", "gpt2", "torch"]

# Kernels for bfloat16 and PyTorch's operations compute tanh as 1 - 2 / (1 + exp(2 x / cap)), to 1e-7 of the cap. With
# a cap of 1e8 no logit is left, and the loss is that of a guess (docs/LOG.md, 2026-11-29).
_Softcap = Annotated[
    Positive[float], Limit(lambda cap: cap <= 1e4, "must be 1e4 or less: a larger one loses logits to rounding", 1e4)
]

_MOST = {
    "n_layer": 10_000, "n_embd": 2**20, "n_head": 2**20, "n_kv_head": 2**20, "seq_len": 2**30, "vocab_size": 2**31 - 1,
    "vocab_multiple": 2**31 - 1, "mlp_ratio": 1024, "window_tokens": 2**30,
}  # fmt: skip
"""Limits an order of magnitude above any model ever built. In an untrusted file, larger numbers would cost hours of
computing or overflow 64-bit integers."""


@checked_dataclass("model.")
class ModelConfig:
    n_layer: Positive[int] = 4
    """Transformer blocks."""
    n_embd: Positive[int] = 256
    """Width of the residual stream (channels)."""
    n_head: Positive[int] = 4
    """Query heads. Must divide n_embd."""
    n_kv_head: Positive[int] | None = None
    """Key and value heads (grouped-query attention). Must divide n_head. None: n_head."""
    seq_len: Positive[int] = 512
    """Context length in tokens; also the length of a training row."""
    vocab_size: Positive[int] | None = None
    """Entries of the tokenizer. None: taken from the tokenizer when the data is ready."""
    vocab_multiple: Positive[int] = 64
    """The embedding and head tables are padded to a multiple of this; padding never appears in the logits."""
    mlp_ratio: Positive[float] = 4.0
    """Hidden width of the MLP divided by n_embd."""
    norm: Norm = "rmsnorm"
    """rmsnorm (weightless) | layernorm (with weight, and bias where `bias`)."""
    rmsnorm_eps: Annotated[float, Limit(lambda eps: 0 < eps < 1, "must be in (0, 1)")] = 2**-23
    """Added to the mean square under the root of every RMSNorm. 2^-23 = 1.19e-7, float32's machine epsilon, is
    PyTorch's default in float32, bfloat16 and float16 (autoresearch, nanochat). modded-nanogpt's record has 1e-6."""
    position: Position = "rope"
    """rope | learned (absolute table of seq_len rows)."""
    rope_base: Positive[float] = 10_000.0
    """Base of the rotary frequencies."""
    activation: Activation = "relu2"
    """relu2 (squared ReLU, Primer, arXiv:2109.08668) | gelu (exact, erf) | gelu_tanh (the approximation with which
    OpenAI trained GPT-2)."""
    bias: bool = False
    """Biases in linear layers and LayerNorm."""
    dropout: BelowOne = 0.0
    """Dropout probability on embeddings, attention weights and residual branches while training."""
    tied_head: bool = False
    """The output head shares the embedding's weight."""
    qk_norm: bool = True
    """Normalize queries and keys per head after the rotation."""
    key_offset: bool = False
    """Half of a key's channels, those of the slower rotary frequencies, come from the token before. So one layer finds
    what followed a token's earlier occurrence (modded-nanogpt's partial key offset, pull request 169)."""
    window_pattern: str = "L"
    """One letter per layer, tiled: L attends to the whole context, S to a sliding window. The last layer is always
    L."""
    window_tokens: Positive[int] | None = None
    """Tokens that an S layer attends to, itself included; seq_len or more: all. None: itself and half the context
    before it (autoresearch, nanochat: FlashAttention's window_size = (seq_len // 2, 0) counts keys to the left)."""
    value_embeddings: bool = True
    """Add a second embedding table to the values of every other layer (the last one included), gated per head."""
    residual_lambdas: bool = True
    """Two learned scalars per layer: x = residual_lambda * x + x0_lambda * x0 (x0: the normalized embedding)."""
    embedding_norm: bool = True
    """Normalize right after the embedding."""
    logit_softcap: _Softcap | None = 15.0
    """cap * tanh(logits / cap). None: off."""
    attention_residual_scale: float | None = None
    """Constant on the attention branch (modded-nanogpt: 1/sqrt(2 n_layer)). None: 1."""
    init: Init = "nanochat"
    """nanochat: uniform matrices of std 1/sqrt(width), zero projections, embedding std 1 | gpt2: normal 0.02, and
    0.02/sqrt(2 n_layer) on projections into the residual stream | torch: PyTorch's defaults, uniform in 1/sqrt(inputs)
    for nn.Linear and normal 1 for nn.Embedding (modded-nanogpt)."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            require(value is None or value <= most, f"model.{name}", value, "is more than any model has", most)
        require(self.mlp_width > 0, "model.mlp_ratio", self.mlp_ratio, "gives an MLP of width 0", 1 / self.n_embd)
        _require_divisor("model.n_head", self.n_head, self.n_embd, "heads must divide the width n_embd")
        _require_divisor("model.n_kv_head", self.kv_heads, self.n_head, "key-value heads must divide n_head")
        if self.position == "rope" and self.head_dim % 2:
            reason = f"rotary positions need an even head width, this gives {self.head_dim}"
            raise ConfigError("model.n_head", self.n_head, reason)
        if not (self.window_pattern and set(self.window_pattern) <= set("SL")):
            nearest = "".join(letter for letter in self.window_pattern.upper() if letter in "SL") or "L"
            reason = "only the letters S (window) and L (full) are known"
            raise ConfigError("model.window_pattern", self.window_pattern, reason, nearest)

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def mlp_width(self) -> int:
        return round(self.n_embd * self.mlp_ratio)

    @property
    def padded_vocab_size(self) -> int:
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size", None, "not known before the tokenizer is ready")
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def short_window(self) -> int:
        """Tokens that an S layer attends to, itself included."""
        return self.seq_len // 2 + 1 if self.window_tokens is None else self.window_tokens

    def layer_windows(self) -> tuple[int | None, ...]:
        """Tokens that each layer attends to (itself included); None for the whole context, as in the last layer."""
        short = self.short_window
        letters = [self.window_pattern[i % len(self.window_pattern)] for i in range(self.n_layer)]
        letters[-1] = "L"
        return tuple(short if c == "S" and short < self.seq_len else None for c in letters)

    def has_value_embedding(self, layer: int) -> bool:
        """Every other layer, counted so that the last one has it (nanochat, autoresearch)."""
        return self.value_embeddings and layer % 2 == (self.n_layer - 1) % 2


def _require_divisor(field: str, heads: int, whole: int, what: str) -> None:
    if whole % heads:
        nearest = min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: abs(d - heads))
        raise ConfigError(field, heads, f"{what} = {whole}", nearest)


# Heads are 64 wide in all four. They have biases and GELU by tanh; nanoGPT's own runs have neither.
_GPT2 = ModelConfig(
    n_layer=12, n_embd=768, n_head=12, seq_len=1024, vocab_size=50257, vocab_multiple=64, norm="layernorm",
    position="learned", activation="gelu_tanh", bias=True, tied_head=True, qk_norm=False, value_embeddings=False,
    residual_lambdas=False, embedding_norm=False, logit_softcap=None, init="gpt2",
)  # fmt: skip
GPT2_SIZES: Mapping[str, ModelConfig] = {
    "gpt2": _GPT2,  # 124M parameters
    "gpt2-medium": replace(_GPT2, n_layer=24, n_embd=1024, n_head=16),  # 355M
    "gpt2-large": replace(_GPT2, n_layer=36, n_embd=1280, n_head=20),  # 774M
    "gpt2-xl": replace(_GPT2, n_layer=48, n_embd=1600, n_head=25),  # 1558M
}
"""The shapes of OpenAI's four GPT-2 models, by their names on the Hugging Face hub."""
