"""One GPT whose parts the configuration chooses, so that every lineage is a set of fields.

Shapes: B sequences, T positions, C = n_embd channels, H query heads, G key-value heads, D = C / H head width,
V vocabulary entries (P with padding). Weights are float32 masters; activations are `compute_dtype`. Each weight is cast
where it is used, so that precision is visible in the code, without an autocast context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from gptlab.config.model import ModelConfig
from gptlab.model.attention import cached_attention, offset_keys, rotary_tables
from gptlab.model.head import HeadLoss, capped_logits
from gptlab.model.hooks import all_are_hooked, is_hooked
from gptlab.model.init import initial_weights
from gptlab.model.kernels import torch_ops
from gptlab.model.kernels.ops import ACTIVATIONS, implementation, linear, load_kernels, look_up, mlp, whole_blocks
from gptlab.model.kv_cache import KVCache
from gptlab.runtime.files.cache import keep_compiled
from gptlab.runtime.hardware.device import Platform

if TYPE_CHECKING:
    from gptlab.data.document_capacity import DocumentCapacity
    from gptlab.model.kernels.torch_attention import DocumentMask

# Channels that a value-embedding gate reads (autoresearch and nanochat: 32).
GATE_CHANNELS = 32

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, each (T, D / 2)."""


class Linear(nn.Linear):
    """A linear layer whose master weight is cast to the type of its input."""

    loss = HeadLoss  # of a head

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    by_weight = forward  # see `is_by_weight`


class Embedding(nn.Embedding):
    """A table that `GPT.init_weights` fills. torch's own draw, on the meta device, would import its compiler: 0.8 s."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype | None) -> None:
        """`dtype`: what rows are rounded to. None: the table's own."""
        super().__init__(rows, width)
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) if self.dtype is None else look_up(self.weight, tokens, self.dtype)

    def reset_parameters(self) -> None:
        pass


class LayerNorm(nn.LayerNorm):
    """LayerNorm in float32 (float64 for float64), whatever the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return implementation(x).layer_norm(x, self.weight, self.bias, self.eps)

    def of_sum(self, x: Tensor, y: Tensor, a: float | Tensor, b: float | Tensor) -> tuple[Tensor, Tensor]:
        """a x + b y, and its norm."""
        return implementation(x).sum_and_layer_norm(x, y, a, b, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) over the last dimension, without a weight (arXiv:1910.07467); in float32 (float64 for
    float64), whatever the type of its input, as PyTorch does."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return implementation(x).rms_norm(x, self.eps)

    def of_sum(self, x: Tensor, y: Tensor, a: float | Tensor, b: float | Tensor) -> tuple[Tensor, Tensor]:
        """a x + b y, and its norm."""
        return implementation(x).sum_and_rms_norm(x, y, a, b, self.eps)


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    return RMSNorm(config.rmsnorm_eps) if config.norm == "rmsnorm" else LayerNorm(config.n_embd, bias=config.bias)


class Dropout(nn.Dropout):
    """nn.Dropout, computed by a C++ kernel on CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        return implementation(x).dropout(x, self.p) if self.training else x


def make_dropout(config: ModelConfig) -> nn.Module:
    """Dropout, or nothing at all: a compiled block without dropout serves both training and validation."""
    return Dropout(config.dropout) if config.dropout > 0 else nn.Identity()


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.attend: Callable[..., Tensor] | None = None  # None: as `implementation` does
        self.head_dim = config.head_dim
        self.n_head, self.n_kv_head = config.n_head, config.kv_heads
        self.window = config.layer_windows()[layer]
        self.dropout, self.key_offset = config.dropout, config.key_offset
        rows = (self.n_head + 2 * self.n_kv_head) * self.head_dim
        self.qkv = Linear(config.n_embd, rows, bias=config.bias)
        self.out = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.qk_norm = RMSNorm(config.rmsnorm_eps) if config.qk_norm else None
        gated = config.has_value_embedding(layer)
        self.value_gate = Linear(min(GATE_CHANNELS, config.n_embd), self.n_kv_head, bias=False) if gated else None

    def forward(
        self, x: Tensor, value: Tensor | None, rotary: Rotary | None, cache: KVCache | None, documents: Tensor | None
    ) -> Tensor:
        """x: (B, T, C); value: (B, T, G * D), the value embedding of the tokens; documents: see `DocumentMask`."""
        batch, n_tokens, _ = x.shape
        heads = self.qkv(x).view(batch, n_tokens, -1, self.head_dim)
        gates = None if self.value_gate is None else self.value_gate(x[..., : self.value_gate.in_features])
        norm_eps = None if self.qk_norm is None else self.qk_norm.eps
        if gates is not None or rotary is not None or norm_eps is not None:
            is_apart = self.attend is not None and cache is None and x.device.type != "cpu"
            prepare = torch_ops.prepare_heads_apart if is_apart else implementation(x).prepare_heads
            heads = prepare(heads, self.n_head, gates, value, rotary, norm_eps)
        if cache is None:
            dropout = self.dropout if self.dropout > 0 and self.training else 0.0
            if self.attend is None:
                y = implementation(x).attention(heads, self.n_head, self.window, dropout, self.key_offset)
            else:
                y = self.attend(heads, self.n_head, self.window, dropout, documents, self.key_offset)
        else:
            y = self._attend_cached(heads, cache)
        return self.out(y.reshape(batch, n_tokens, -1))

    def _attend_cached(self, heads: Tensor, cache: KVCache) -> Tensor:
        """Attention of these tokens to those in the cache too, which then holds them."""
        q, k, v = heads.transpose(1, 2).split((self.n_head, self.n_kv_head, self.n_kv_head), dim=1)
        k, v = cache.append(self.layer, k, v)
        if self.key_offset:
            k = offset_keys(k.transpose(1, 2)).transpose(1, 2)
        return cached_attention(q, k, v, window=self.window).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = Linear(config.n_embd, config.mlp_width, bias=config.bias)
        self.out = Linear(config.mlp_width, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return mlp(x, self.up, ACTIVATIONS[self.activation], self.out)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = make_norm(config), Attention(config, layer)
        self.mlp_norm, self.mlp = make_norm(config), MLP(config)
        scale = config.attention_residual_scale
        self.attention_scale = 1.0 if scale is None else scale
        self.dropout = make_dropout(config)

    def forward(
        self, x: Tensor, x0: Tensor, lambdas: tuple[Tensor, Tensor] | None, value: Tensor | None,
        rotary: Rotary | None, cache: KVCache | None = None, documents: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x, x0: (B, T, C), the residual stream and the embedding; lambdas: their two weights, 0-d."""
        if lambdas is None:
            normed = self.attention_norm(x)
        else:
            x, normed = self.attention_norm.of_sum(x, x0, *lambdas)
        y = self.dropout(self.attention(normed, value, rotary, cache, documents))
        x, normed = self.mlp_norm.of_sum(x, y, 1.0, self.attention_scale)
        return x + self.dropout(self.mlp(normed))


class GPT(nn.Module):
    """`model(tokens)` gives logits; `model.loss(tokens, targets)` gives the summed loss without keeping all logits."""

    cos: Tensor
    sin: Tensor
    made_of: ClassVar = {
        kind.__name__: (kind, kind.forward) for kind in (Linear, LayerNorm, RMSNorm, Dropout, Attention, MLP, Block)
    }
    """What `whole_blocks` may compute: no caller's parts, nor patched ones."""

    def __init__(
        self, config: ModelConfig, compute_dtype: torch.dtype = torch.float32, platform: Platform = "cpu"
    ) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.config, self.compute_dtype, self.vocab_size = config, compute_dtype, config.vocab_size
        self.platform = platform
        self.document_mask: DocumentMask | None = None
        self.is_replaced = False  # some of it, by a caller's change_model
        self.saved_shapes: dict[str, torch.Size] = {}  # what a replaced model has to keep, so that it can be loaded
        rows, width = config.padded_vocab_size, config.n_embd
        value_width = config.kv_heads * config.head_dim
        learned = config.position == "learned"  # then the sum of two rows is rounded, and neither of them
        self.token_embedding = Embedding(rows, width, None if learned else compute_dtype)
        self.position_embedding = Embedding(config.seq_len, width, None) if learned else None
        self.value_embeddings = nn.ModuleDict(
            {
                str(layer): Embedding(rows, value_width, compute_dtype)
                for layer in range(config.n_layer)
                if config.has_value_embedding(layer)
            }
        )
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        self.dropout = make_dropout(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        if config.residual_lambdas:
            self.residual_lambdas = nn.Parameter(torch.empty(config.n_layer))
            self.x0_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.final_norm = make_norm(config)
        self.head = Linear(width, rows, bias=False)
        if config.tied_head:
            self.head.weight = self.token_embedding.weight
        if config.position == "rope":
            self.register_buffer("cos", torch.empty(config.seq_len, config.head_dim // 2), persistent=False)
            self.register_buffer("sin", torch.empty(config.seq_len, config.head_dim // 2), persistent=False)
        if platform != "cpu":
            self.attend_by_torch()

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """tokens (B, T) int64 -> logits (B, T, V) in float32 (float64 when that is the compute type).

        With a cache the tokens continue those already in it. ValueError for positions beyond seq_len.
        """
        logits = self.logits(self.hidden(tokens, cache=cache))
        if cache is not None:
            cache.advance(tokens.shape[1])
        return logits

    def loss(self, tokens: Tensor, targets: Tensor, scale: Tensor | None = None) -> Tensor:
        """Sum of the cross-entropy in nats over all targets that are not -1; tokens and targets are (B, T). `scale` as
        for `HeadLoss`."""
        return self.head_loss(self.hidden(tokens), targets, scale)

    def hidden(
        self, tokens: Tensor, blocks: Sequence[Callable[..., Tensor]] | None = None,
        embed: Callable[..., Tensor] | None = None, look_up: Callable[..., Tensor] | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:  # fmt: skip
        """The residual stream after the last block, (B, T, C) in compute_dtype.

        `blocks`, `embed` and `look_up` replace the model's own: the same ones, compiled.
        """
        start = 0 if cache is None else cache.length
        stop = start + tokens.shape[1]
        if stop > self.config.seq_len:
            raise ValueError(f"{stop} positions, but the model has a context of {self.config.seq_len}")
        x0 = (embed or self.embed)(tokens, start)
        x = x0.view_as(x0)  # another object, or torch.compile would compile the first block twice, for `x is x0`
        rotary = (self.cos[start:stop], self.sin[start:stop]) if self.config.position == "rope" else None
        documents = None if self.document_mask is None or cache is not None else self.document_mask.bounds(tokens)
        if blocks is None and look_up is None and cache is None and documents is None:
            whole = whole_blocks(self, x0, tokens, rotary)
            if whole is not None:
                return whole
        for layer, block in enumerate(blocks or list(self.blocks)):
            lambdas = (self.residual_lambdas[layer], self.x0_lambdas[layer]) if self.config.residual_lambdas else None
            # Looked up only here: so a backward pass completes a table's gradient with its block's, and not at its end.
            tables, name = self.value_embeddings, str(layer)
            value = (look_up or self.look_up)(tables[name], tokens) if name in tables else None
            x = block(x, x0, lambdas, value, rotary, cache, documents)
        return x

    def is_changed(self) -> bool:
        """Whether a Python caller replaced, patched or hooked parts, or gave them other numbers: only `forward`,
        without a cache, says what it computes."""
        patched = any(kind.forward is not forward for kind, forward in self.made_of.values())
        as_made = _described_as_made(self.config, self.compute_dtype, self.platform)
        return self.is_replaced or patched or all_are_hooked() or _described(self) != as_made

    def saved_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it, by name: its weights, and persistent buffers, which only a caller's own parts
        have. Live, without gradients."""
        buffers, persistent = dict(self.named_buffers()), self.state_dict()
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        return tensors | {name: buffer for name, buffer in buffers.items() if name in persistent}

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """The residual stream before the first block, (B, T, C), of tokens at the positions from `start` on."""
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[start : start + tokens.shape[1]]
        x = x.to(self.compute_dtype)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.dropout(x)

    def look_up(self, table: nn.Module, tokens: Tensor) -> Tensor:
        """A value embedding of tokens (B, T): (B, T, G * D) in compute_dtype."""
        value: Tensor = table(tokens).to(self.compute_dtype)
        return value

    def mask_documents(self, bos_id: int, capacity: DocumentCapacity | None = None) -> None:
        """From here on, tokens attend only to their own document, which begins with BOS, except with a cache."""
        by = self.attend_by_torch()
        from gptlab.model.kernels.torch_attention import DocumentMask

        self.document_mask = DocumentMask(by, bos_id, capacity)

    def attend_by_torch(self) -> str:
        """Compute attention as `torch_attention` chooses, which it returns."""
        keep_compiled()  # varlen imports the compiler
        from gptlab.model.kernels import torch_attention

        by = torch_attention.choose(self.config, self.compute_dtype, self.platform)
        for module in self.modules():
            if isinstance(module, Attention):
                module.attend = partial(torch_attention.attention, by)
        return by

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) after the last block -> (..., V), without the padding of the vocabulary."""
        return capped_logits(self.head, self.final_norm(hidden), self.vocab_size, self.config.logit_softcap)

    def head_loss(self, hidden: Tensor, targets: Tensor, scale: Tensor | None = None) -> Tensor:
        """Summed cross-entropy of hidden (B, T, C) against targets (B, T); 0-d."""
        x = self.final_norm(hidden.flatten(0, 1))
        weight, cap = self.head.weight, self.config.logit_softcap
        return self.head.loss.apply(x, weight, targets.flatten(), self.vocab_size, cap, scale)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every weight and buffer."""
        parameters = dict(self.named_parameters())
        for name, values in initial_weights(self, self.config, seed):
            parameters[name].copy_(values)
        self.init_buffers()

    def init_buffers(self) -> None:
        if self.config.position == "rope":
            config = self.config
            cos, sin = rotary_tables(config.seq_len, config.head_dim, config.rope_base, self.cos.dtype)
            self.cos.copy_(cos)
            self.sin.copy_(sin)


def _described(model: GPT) -> list[Any]:
    """Of each part its kind, the shapes of its weights, and what else it holds, except for what training and
    `attend_by_torch` set."""
    parts = []
    for name, part in model.named_modules():
        shapes = {key: weight.shape for key, weight in part._parameters.items() if weight is not None}
        held = {key: value for key, value in vars(part).items() if isinstance(value, (int, float, str, type(None)))}
        held = {} if part is model else {key: held[key] for key in held.keys() - {"training", "attend"}}
        kind = getattr(type(part), "evaluates_as", type(part))
        parts.append((name, kind, is_hooked(part), shapes, held))
    return parts


@functools.cache
def _described_as_made(config: ModelConfig, compute_dtype: torch.dtype, platform: Platform) -> list[Any]:
    with torch.device("meta"):
        return _described(GPT(config, compute_dtype, platform))


def build_model(config: ModelConfig, *, device: torch.device, compute_dtype: torch.dtype, seed: int) -> GPT:
    """A GPT with initial weights on `device`; loads its kernels. It is built on the meta device first, so that nothing
    is allocated twice."""
    load_kernels(device, compute_dtype)
    with torch.device("meta"):
        model = GPT(config, compute_dtype, cast(Platform, device.type))
        model = model.to(torch.float64 if compute_dtype == torch.float64 else torch.float32)  # not torch's default
    _allocate(model, device)
    if config.tied_head:  # every module has been given a tensor of its own
        model.head.weight = model.token_embedding.weight
    model.init_weights(seed)
    return model


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Give every module on the meta device tensors of its own. `to_empty` does as much, but on its way torch imports
    sympy: two thirds of a second of every start."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
