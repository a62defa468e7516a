"""The model again, slow and obvious: float64, one sequence, one position at a time, from the papers.

Nothing here calls the model's code; weights come in by name. Plain tensor operations, so that autograd gives the
oracle's gradients too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gptlab.config.model import ModelConfig

Weights = Mapping[str, Tensor]

# The model's documented convention: positions turn the pairs (x[i], x[i + D/2]) by minus their angle.
ROTATION_SIGN = -1


def visible(position: int, window: int | None) -> range:
    """Positions that a query sees: itself and those before it, `window` in all."""
    return range(0 if window is None else max(0, position - window + 1), position + 1)


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """q (B, H, T, D), k and v (B, G, T, D): softmax(q . k / sqrt(D)) over what is visible, one query at a time."""
    group = q.shape[1] // k.shape[1]  # query heads 0..group-1 share key-value head 0, and so on
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    rows = []
    for t in range(q.shape[2]):
        seen = slice(visible(t, window).start, t + 1)
        scores = (k[:, :, seen] * q[:, :, t : t + 1]).sum(-1) / math.sqrt(q.shape[3])  # (B, H, keys)
        rows.append((torch.softmax(scores, 2)[..., None] * v[:, :, seen]).sum(2))
    return torch.stack(rows, dim=2)


def rotate(x: Tensor, base: float) -> Tensor:
    """x (T, D): pair i of position t as a complex number, times exp(i t base^(-2 i / D)) (arXiv:2104.09864, eq. 34)."""
    n_tokens, width = x.shape
    half = width // 2
    pairs = torch.complex(x[:, :half], x[:, half:])
    angles = [[ROTATION_SIGN * t * base ** (-2 * i / width) for i in range(half)] for t in range(n_tokens)]
    turned = pairs * torch.tensor([[complex_exp(angle) for angle in row] for row in angles], dtype=torch.complex128)
    return torch.cat((turned.real, turned.imag), dim=1)


def complex_exp(angle: float) -> complex:
    return complex(math.cos(angle), math.sin(angle))


def rms_norm(config: ModelConfig, x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rmsnorm_eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    y = (x - mean) / torch.sqrt(variance + 1e-5) * weight
    return y if bias is None else y + bias


def norm(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    if config.norm == "rmsnorm":
        return rms_norm(config, x)
    return layer_norm(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias


def activation(config: ModelConfig, x: Tensor) -> Tensor:
    if config.activation == "relu2":
        return torch.where(x > 0, x * x, 0.0)
    if config.activation == "gelu_tanh":  # arXiv:1606.08415, section 2
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def offset_key(key: Tensor) -> Tensor:
    """key (T, D): half of the channels, those of the slower rotary frequencies, are those of the token before."""
    width = key.shape[1]
    pairs = max(1, width // 2)
    rows = []
    for t in range(len(key)):
        is_slow = [i % pairs >= pairs / 2 for i in range(width)]
        rows.append(torch.stack([key[max(0, t - 1) if is_slow[i] else t, i] for i in range(width)]))
    return torch.stack(rows)


def attention_branch(config: ModelConfig, weights: Weights, layer: int, x: Tensor, tokens: Tensor) -> Tensor:
    """x (T, C) -> (T, C)."""
    name, width, groups = f"blocks.{layer}.attention", config.head_dim, config.kv_heads
    qkv = linear(weights, f"{name}.qkv", x)
    columns = [qkv[:, i * width : (i + 1) * width] for i in range(config.n_head + 2 * groups)]
    queries, keys, values = columns[: config.n_head], columns[config.n_head :][:groups], columns[-groups:]
    if config.has_value_embedding(layer):
        table = weights[f"value_embeddings.{layer}.weight"]
        read = x[:, : min(32, config.n_embd)]
        for g in range(groups):
            gate = 2 / (1 + torch.exp(-(read @ weights[f"{name}.value_gate.weight"][g])))
            values[g] = values[g] + gate[:, None] * table[tokens][:, g * width : (g + 1) * width]
    if config.position == "rope":
        queries, keys = ([rotate(h, config.rope_base) for h in heads] for heads in (queries, keys))
    if config.qk_norm:
        queries, keys = ([rms_norm(config, h) for h in heads] for heads in (queries, keys))
    if config.key_offset:
        keys = [offset_key(key) for key in keys]
    q, k, v = (torch.stack(list(heads))[None] for heads in (queries, keys, values))
    seen = attention(q, k, v, config.layer_windows()[layer])[0]  # (H, T, D)
    return linear(weights, f"{name}.out", torch.cat(list(seen), dim=1))


def logits_of_sequence(config: ModelConfig, weights: Weights, tokens: Tensor) -> Tensor:
    """tokens (T,) -> (T, V)."""
    x = weights["token_embedding.weight"][tokens]
    if config.position == "learned":
        x = x + weights["position_embedding.weight"][: len(tokens)]
    if config.embedding_norm:
        x = norm(config, weights, "embedding_norm", x)
    x0 = x
    for layer in range(config.n_layer):
        if config.residual_lambdas:
            x = weights["residual_lambdas"][layer] * x + weights["x0_lambdas"][layer] * x0
        scale = 1.0 if config.attention_residual_scale is None else config.attention_residual_scale
        normed = norm(config, weights, f"blocks.{layer}.attention_norm", x)
        x = x + scale * attention_branch(config, weights, layer, normed, tokens)
        normed = norm(config, weights, f"blocks.{layer}.mlp_norm", x)
        hidden = activation(config, linear(weights, f"blocks.{layer}.mlp.up", normed))
        x = x + linear(weights, f"blocks.{layer}.mlp.out", hidden)
    x = norm(config, weights, "final_norm", x)
    head = weights["token_embedding.weight" if config.tied_head else "head.weight"]
    z = x @ head[: config.vocab_size].T
    return z if config.logit_softcap is None else config.logit_softcap * torch.tanh(z / config.logit_softcap)


def logits(config: ModelConfig, weights: Weights, tokens: Tensor) -> Tensor:
    """tokens (B, T) -> (B, T, V), each sequence on its own."""
    return torch.stack([logits_of_sequence(config, weights, row) for row in tokens])


def loss(config: ModelConfig, weights: Weights, tokens: Tensor, targets: Tensor) -> Tensor:
    """Nats of all targets that are not -1, summed."""
    total = torch.zeros((), dtype=torch.float64)
    for scores, row in zip(logits(config, weights, tokens), targets, strict=True):
        for z, target in zip(scores, row, strict=True):
            if target >= 0:
                total = total + torch.log(torch.exp(z).sum()) - z[target]
    return total
