"""A GPT as gptlab trains it, for transformers. `gptlab export` lays this file beside the weights of a model whose parts
no class of transformers has; `from_pretrained(folder, trust_remote_code=True)` runs it. Needs torch and transformers.

Shapes: B sequences, T positions, S keys, C = n_embd channels, H query heads, G key-value heads, D = C / H head width,
V vocabulary entries. Weights have the names that gptlab gives them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PretrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

GATE_CHANNELS = 32
DEFAULTS: dict[str, Any] = {
    "vocab_size": 257, "seq_len": 512, "n_layer": 4, "n_embd": 256, "n_head": 4, "n_kv_head": 4, "mlp_width": 1024,
    "norm": "rmsnorm", "rmsnorm_eps": 1e-6, "position": "rope", "rope_base": 10_000.0, "activation": "relu2",
    "bias": False, "dropout": 0.0, "qk_norm": True, "key_offset": False, "residual_lambdas": True,
    "embedding_norm": True, "logit_softcap": 15.0, "attention_residual_scale": None, "use_cache": True,
}  # fmt: skip
"""Fields of config.json that the network depends on; `layer_windows` and `value_embedding_layers` name layers."""


class GPTLabConfig(PretrainedConfig):
    """The fields that the network depends on; `gptlab train --help model` explains each. Beside them, `gptlab` keeps
    gptlab's own record of the model, which nothing here reads."""

    model_type = "gptlab"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "max_position_embeddings": "seq_len",
    }

    def __init__(
        self,
        *,
        layer_windows: list[int | None] | None = None,
        value_embedding_layers: list[int] | None = None,
        tie_word_embeddings: bool = False,
        **fields: Any,
    ) -> None:
        for name, default in DEFAULTS.items():
            setattr(self, name, fields.pop(name, default))
        self.layer_windows = [None] * self.n_layer if layer_windows is None else layer_windows
        self.value_embedding_layers = value_embedding_layers or []
        super().__init__(tie_word_embeddings=tie_word_embeddings, **fields)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) over the last dimension, without a weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def make_norm(config: GPTLabConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.rmsnorm_eps)
    return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


def rotary(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions (B, T), each (B, T, 1, D / 2), computed in float64 where the device has it."""
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=wide, device=positions.device) / head_dim)
    angles = (positions.to(wide)[..., None] * frequencies)[:, :, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) of x (B, T, heads, D) by minus the position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).to(x.dtype)


def padded(padding: Tensor, n_keys: int) -> Tensor:
    """(B, n_keys) bool: where there is a token, of `padding` (B, any number)."""
    return F.pad(padding[:, :n_keys].bool(), (0, max(0, n_keys - padding.shape[1])))


def offset_keys(k: Tensor, padding: Tensor | None) -> Tensor:
    """Keys (B, G, S, D) whose channels of the slower half of the rotary frequencies are those of the token before; the
    first token, before which there is none or padding, keeps its own."""
    before = torch.cat((k[:, :, :1], k[:, :, :-1]), dim=2)
    if padding is not None:
        follows = F.pad(padded(padding, k.shape[2]), (1, -1))
        before = torch.where(follows[:, None, :, None], before, k)
    half = max(1, k.shape[3] // 2)
    is_slow = torch.arange(k.shape[3], device=k.device) % half * 2 >= half
    return torch.where(is_slow, before, k)


class Attention(nn.Module):
    def __init__(self, config: GPTLabConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim = config.n_embd // config.n_head
        self.window = config.layer_windows[layer]
        self.dropout, self.key_offset = config.dropout, config.key_offset
        rows = (self.n_head + 2 * self.n_kv_head) * self.head_dim
        self.qkv = nn.Linear(config.n_embd, rows, bias=config.bias)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.qk_norm = RMSNorm(config.rmsnorm_eps) if config.qk_norm else None
        self.value_gate = (
            nn.Linear(min(GATE_CHANNELS, config.n_embd), self.n_kv_head, bias=False)
            if layer in config.value_embedding_layers
            else None
        )

    def forward(
        self,
        x: Tensor,
        value: Tensor | None,
        tables: tuple[Tensor, Tensor] | None,
        slots: Tensor,
        padding: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """x: (B, T, C); value: (B, T, G * D); slots: (T,), places in the cache; padding: (B, S), zero where there is
        no token."""
        batch, n_tokens, _ = x.shape
        heads = self.qkv(x).view(batch, n_tokens, -1, self.head_dim)
        q, k, v = heads.split((self.n_head, self.n_kv_head, self.n_kv_head), dim=2)  # each (B, T, heads, D)
        if self.value_gate is not None and value is not None:
            gate = 2 * torch.sigmoid(self.value_gate(x[..., : self.value_gate.in_features]))
            v = v + gate.unsqueeze(-1) * value.view_as(v)
        if tables is not None:
            q, k = rotate(q, *tables), rotate(k, *tables)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q), self.qk_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if self.key_offset:
            k = offset_keys(k, padding)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.seen(slots, k.shape[2], padding),
            dropout_p=self.dropout if self.training else 0.0, enable_gqa=self.n_head != self.n_kv_head,
        )  # fmt: skip
        return self.out(y.transpose(1, 2).reshape(batch, n_tokens, -1))

    def seen(self, slots: Tensor, n_keys: int, padding: Tensor | None) -> Tensor:
        """(T, S), or (B, 1, T, S) with padding: each query sees itself and what came before, within the window."""
        queries, keys = slots[:, None], torch.arange(n_keys, device=slots.device)
        seen = keys <= queries
        if self.window is not None:
            seen &= keys > queries - self.window
        if padding is None:
            return seen
        # A query of the padding sees itself: with nothing to see it would be NaN, and spread.
        return seen & padded(padding, n_keys)[:, None, None, :] | (keys == queries)


class MLP(nn.Module):
    def __init__(self, config: GPTLabConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = nn.Linear(config.n_embd, config.mlp_width, bias=config.bias)
        self.out = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.activation == "relu2":
            return self.out(F.relu(hidden).square())
        return self.out(F.gelu(hidden, approximate="tanh" if self.activation == "gelu_tanh" else "none"))


class Block(nn.Module):
    def __init__(self, config: GPTLabConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = make_norm(config), Attention(config, layer)
        self.mlp_norm, self.mlp = make_norm(config), MLP(config)
        self.attention_scale = 1.0 if config.attention_residual_scale is None else config.attention_residual_scale
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        y = self.attention(self.attention_norm(x), *context)
        x = x + self.attention_scale * self.dropout(y)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPTLabForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = GPTLabConfig
    base_model_prefix = "gpt"
    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "token_embedding.weight"}
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    _supports_sdpa = True

    def __init__(self, config: GPTLabConfig) -> None:
        super().__init__(config)
        width, value_width = config.n_embd, config.n_kv_head * (config.n_embd // config.n_head)
        self.token_embedding = nn.Embedding(config.vocab_size, width)
        self.position_embedding = nn.Embedding(config.seq_len, width) if config.position == "learned" else None
        self.value_embeddings = nn.ModuleDict(
            {str(layer): nn.Embedding(config.vocab_size, value_width) for layer in config.value_embedding_layers}
        )
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        if config.residual_lambdas:
            self.residual_lambdas = nn.Parameter(torch.ones(config.n_layer))
            self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        self.final_norm = make_norm(config)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.token_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.token_embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.head = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As in transformers, which does not know of the value embeddings: they get as many entries."""
        table = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        for layer, values in self.value_embeddings.items():
            self.value_embeddings[layer] = self._get_resized_embeddings(
                values, table.num_embeddings, mean_resizing=mean_resizing
            )
        return table

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **kwargs: Any) -> Tensor | None:
        """With a static cache transformers would make masks before `forward`, ignorant of windows: it gets back what
        it has."""
        return attention_mask

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """input_ids (B, T) continue what the cache holds; attention_mask (B, S) is zero at padding.

        Logits are (B, T, V), or those of the last `logits_to_keep` positions, or of those that a tensor lists. Hidden
        states, if wanted, are what each layer reads and what the head reads, (B, T, C) each. ValueError beyond the
        context length.
        """
        config = self.config
        if past_key_values is None and (config.use_cache and not self.training if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        if start + input_ids.shape[1] > config.seq_len:
            raise ValueError(f"{start + input_ids.shape[1]} positions, but a context of {config.seq_len}")
        slots = torch.arange(input_ids.shape[1], device=input_ids.device) + start
        if position_ids is None:
            position_ids = slots[None, :]

        x = self.token_embedding(input_ids)
        if self.position_embedding is not None:
            x = x + self.position_embedding(position_ids)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = x0 = self.dropout(x)
        tables = None
        if config.position == "rope":
            wide = torch.promote_types(x.dtype, torch.float32)
            tables = rotary(position_ids, config.n_embd // config.n_head, config.rope_base, wide)
        wants_hidden = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden: tuple[Tensor, ...] = ()
        for layer, block in enumerate(self.blocks):
            hidden += (x,) if wants_hidden else ()
            if config.residual_lambdas:
                x = self.residual_lambdas[layer] * x + self.x0_lambdas[layer] * x0
            value = self.value_embeddings[str(layer)](input_ids) if str(layer) in self.value_embeddings else None
            x = block(x, value, tables, slots, attention_mask, past_key_values)
        x = self.final_norm(x)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(x[:, kept])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if config.logit_softcap is not None:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        loss = None if labels is None else self.loss_function(logits, labels, config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=past_key_values,
            hidden_states=(*hidden, x) if wants_hidden else None,
        )  # fmt: skip
        return output if (config.return_dict if return_dict is None else return_dict) else output.to_tuple()
