"""An exported model's weights by the names of its form, and back.

NanoChatForCausalLM keeps queries, keys and values apart, where gptlab has one matrix of their rows in that order. The
form of gptlab's own has gptlab's names. Tables lose the padding of the vocabulary, which no logit ever sees; on the way
back it is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.model.gpt import GPT
from gptlab.model.interop.export_config import Form
from gptlab.model.interop.gpt2_weights import from_gpt2, require_finite, require_layers, same_values, to_gpt2

_NANOCHAT_BLOCK = {"attention.out": "self_attn.o_proj", "mlp.up": "mlp.fc1", "mlp.out": "mlp.fc2"}
_TIED = {
    "nanochat": ("lm_head.weight", "model.embed_tokens.weight"),
    "gptlab": ("head.weight", "token_embedding.weight"),
}
_NANOCHAT_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def to_transformers(tensors: Mapping[str, Tensor], config: ModelConfig, form: Form) -> dict[str, Tensor]:
    """What model.safetensors holds, contiguous; without a tied head."""
    if form == "gpt2":
        return to_gpt2(tensors, config)
    found: dict[str, Tensor] = {}
    for name, foreign in _names(config, form):
        value = tensors[name]
        value = value[: config.vocab_size] if _is_table(name) else value
        parts = value.split(_qkv_rows(config)) if len(foreign) > 1 else [value]
        found |= {theirs: part.contiguous() for theirs, part in zip(foreign, parts, strict=True)}
    return found


def from_transformers(tensors: Mapping[str, Tensor], config: ModelConfig, form: Form) -> dict[str, Tensor]:
    """The inverse, of the shapes that a GPT of `config` has.

    UserError for missing, unknown or misshapen tensors, and numbers that are not finite.
    """
    if form == "gpt2":
        return from_gpt2(tensors, config)
    require_layers(tensors, config)
    given = dict(tensors)
    if config.tied_head:  # transformers may have written it twice
        head, table = _TIED[form]
        twin = given.pop(head, None)
        if twin is not None and table in given and not same_values(twin, given[table]):
            raise UserError(f"{head} differs from {table}, though the model's head is tied to its embedding")
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in GPT(config).named_parameters()}
    found = {}
    for name, foreign in _names(config, form):
        missing = [theirs for theirs in foreign if theirs not in given]
        if missing:
            raise UserError(f"the weights lack {missing[0]}")
        parts = [given.pop(theirs) for theirs in foreign]
        if len({(part.dtype, part.shape[1:]) for part in parts}) > 1 or not all(part.dim() for part in parts):
            shapes_there = ", ".join(str(tuple(part.shape)) for part in parts)
            raise UserError(
                f"the weights' {' + '.join(foreign)} have the shapes {shapes_there}, which do not go together"
            )
        value = torch.cat(parts)
        require_finite(value, foreign[0])
        wanted = (config.vocab_size, *shapes[name][1:]) if _is_table(name) else tuple(shapes[name])
        if value.shape not in (wanted, shapes[name]):  # a table may come with its padding
            raise UserError(
                f"the weights' {' + '.join(foreign)} has the shape {tuple(value.shape)}, "
                f"but the configuration asks for {wanted}"
            )
        found[name] = torch.cat((value, value.new_zeros(shapes[name][0] - len(value), *value.shape[1:])))
    if given:
        raise UserError(f"the weights have {min(given)}, which a model of this configuration has not")
    return found


def _names(config: ModelConfig, form: Form) -> Iterator[tuple[str, tuple[str, ...]]]:
    """gptlab's name of every weight, and the form's: several where it keeps parts of the rows apart."""
    with torch.device("meta"):
        own = [name for name, _ in GPT(config).named_parameters()]
    for name in own:
        if form == "gptlab":
            yield name, (name,)
        elif name == "token_embedding.weight":
            yield name, ("model.embed_tokens.weight",)
        elif name == "head.weight":
            yield name, ("lm_head.weight",)
        else:
            layer, _, part = name.removeprefix("blocks.").removesuffix(".weight").partition(".")
            theirs = _NANOCHAT_QKV if part == "attention.qkv" else (_NANOCHAT_BLOCK[part],)
            yield name, tuple(f"model.layers.{layer}.{one}.weight" for one in theirs)


def _qkv_rows(config: ModelConfig) -> list[int]:
    heads = (config.n_head, config.kv_heads, config.kv_heads)
    return [count * config.head_dim for count in heads]


def _is_table(name: str) -> bool:
    """One row for each entry of the vocabulary."""
    return name in ("token_embedding.weight", "head.weight") or name.startswith("value_embeddings.")
