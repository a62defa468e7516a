"""What a model is made of: the role of each parameter, how many there are of each, and FLOPs per token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from gptlab.config.optim import Role
from gptlab.model.gpt import GPT, Attention

_BY_MODULE = {
    "token_embedding": Role.EMBEDDING,
    "position_embedding": Role.POSITION_EMBEDDING,
    "value_embeddings": Role.VALUE_EMBEDDING,
    "head": Role.HEAD,
    "residual_lambdas": Role.RESIDUAL_LAMBDA,
    "x0_lambdas": Role.X0_LAMBDA,
}


def parameter_roles(model: GPT) -> dict[str, Role]:
    """{name: role}, all that the optimizer knows of the model. A shared table (tied head) is there once, as the
    embedding."""
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    by_dimensions = {name: Role.MATRIX if ndim == 2 else Role.VECTOR for name, ndim in shapes.items()}
    return {name: _BY_MODULE.get(name.split(".")[0], role) for name, role in by_dimensions.items()}


def fused_rows(model: GPT) -> dict[str, tuple[int, ...]]:
    """Row counts of the matrices that stack several: query, key and value of gptlab's own attention."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    return {
        f"{name}.qkv.weight": tuple(n * layer.head_dim for n in (layer.n_head, layer.n_kv_head, layer.n_kv_head))
        for name, layer in layers.items()
    }


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    total: int
    """All trained numbers; a shared (tied) table counts once, vocabulary padding included."""
    by_role: dict[Role, int]
    """Sums to `total`. A role that the model lacks has 0; a tied table counts as EMBEDDING."""
    scaling: int
    """Matrices and head: the count that gave nanochat the cleanest scaling laws. A tied table is the head."""


@dataclass(frozen=True, slots=True)
class FlopsPerToken:
    """Floating-point operations of one forward and backward pass per token, at full context.

    A layer that several places share counts at each of them. Of a caller's own parts, only `nn.Linear` layers count.
    A multiplication with a weight costs 2 forward and 4 backward, an attended position 2 * 2 * head width per head
    forward and twice that backward (PaLM, arXiv:2204.02311, appendix B). Lookups, norms and activations are free.
    """

    matmul: int
    """6 for each weight in a matrix product, including the head's padding."""
    attention: int
    """12 * n_head * head_dim * min(window, seq_len), summed over layers: nanochat's and PaLM's convention, which does
    not halve for causality. MFU uses it, so that it compares with theirs. A window of half the context is one key
    longer than estimate_flops of nanochat and autoresearch counts, the token itself: below 0.02% of the total."""
    attention_causal: float
    """The same with only the positions that a causal mask leaves, averaged over the row: an exact kernel's minimum."""

    @property
    def total(self) -> int:
        return self.matmul + self.attention


def parameter_counts(model: GPT) -> ParameterCounts:
    by_role = dict.fromkeys(Role, 0)
    for name, role in parameter_roles(model).items():
        by_role[role] += model.get_parameter(name).numel()
    return ParameterCounts(sum(by_role.values()), by_role, scaling=by_role[Role.MATRIX] + model.head.weight.numel())


def flops_per_token(model: GPT) -> FlopsPerToken:
    seq_len = model.config.seq_len
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    layers = [module for module in modules if isinstance(module, Attention)]
    windows = [seq_len if layer.window is None else min(layer.window, seq_len) for layer in layers]
    widths = [12 * layer.n_head * layer.head_dim for layer in layers]
    return FlopsPerToken(
        matmul=6 * sum(module.weight.numel() for module in modules if isinstance(module, nn.Linear)),
        attention=sum(width * window for width, window in zip(widths, windows, strict=True)),
        attention_causal=sum(w * _mean_visible(window, seq_len) for w, window in zip(widths, windows, strict=True)),
    )


def _mean_visible(window: int, seq_len: int) -> float:
    """Mean over positions 1..seq_len of min(position, window): a triangle, then a band."""
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
