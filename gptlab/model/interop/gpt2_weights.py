"""GPT-2's weights by transformers' names, and by gptlab's.

transformers' GPT-2 has the layers of OpenAI's code, Conv1D: their matrices are (inputs, outputs), the transpose of
nn.Linear's. nanoGPT has the same names with nn.Linear. The token table is padded with zero rows to gptlab's multiple;
padding is removed on the way back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.model.gpt import GPT
from gptlab.model.interop.hf_config import gpt2_model_config

__all__ = ["from_gpt2", "gpt2_model_config", "gptlab_tensors", "to_gpt2"]

_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.out": "mlp.c_proj",
}
_TABLES = ("token_embedding.weight", "head.weight")
_HEAD = "lm_head.weight"
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def from_gpt2(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """transformers' GPT-2 tensors by gptlab's names, of the shapes that a GPT of `config` has.

    Names may lack "transformer." in front (OpenAI's own files do). UserError for missing, unknown or misshapen tensors,
    numbers that are not finite, and a head that differs from the embedding it is tied to.
    """
    return gptlab_tensors(tensors, config, transposed=True)


def to_gpt2(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `from_gpt2`: what GPT2LMHeadModel's safetensors hold, contiguous, without the tied head.

    A model without biases gets zeros for them, since transformers' GPT-2 always has them.
    """
    found = {}
    for name, foreign in _gpt2_names(config).items():
        value = tensors.get(name)
        if value is None:
            weight = tensors[name.removesuffix("bias") + "weight"]
            value = weight.new_zeros(weight.shape[0])
        if name in _TABLES:
            value = value[: config.vocab_size]
        value = value.T if _is_matrix(name) else value
        found[foreign if foreign == _HEAD else f"transformer.{foreign}"] = value.contiguous()
    return found


def gptlab_tensors(tensors: Mapping[str, Tensor], config: ModelConfig, *, transposed: bool) -> dict[str, Tensor]:
    """`from_gpt2`; `transposed`: matrices are (inputs, outputs) there."""
    require_layers(tensors, config)
    given = {name.removeprefix("transformer."): value for name, value in tensors.items() if not _is_mask(name)}
    if config.tied_head:
        head, embedding = given.pop(_HEAD, None), given.get("wte.weight")
        if head is not None and embedding is not None and not same_values(head, embedding):
            raise UserError(f"{_HEAD} differs from wte.weight, though the model's head is tied to its embedding")
    shapes = {name: parameter.shape for name, parameter in _on_meta(config).named_parameters()}
    found = {}
    for name, foreign in _gpt2_names(config).items():
        value = given.pop(foreign, None)
        if name not in shapes:  # a bias, and the model has none: zeros say the same
            if value is not None and bool(value.any()):
                raise UserError(f"the weights have {foreign}, but the model has no biases")
            continue
        if value is None:
            raise UserError(f"the weights lack {foreign}")
        require_finite(value, foreign)
        value = value.T if transposed and _is_matrix(name) else value
        if name in _TABLES and value.shape == (config.vocab_size, config.n_embd):
            value = torch.cat((value, value.new_zeros(shapes[name][0] - len(value), config.n_embd)))
        if value.shape != shapes[name]:
            there, wanted = tuple(value.shape), tuple(shapes[name])
            if transposed and _is_matrix(name):
                there, wanted = there[::-1], wanted[::-1]
            raise UserError(f"the weights' {foreign} has the shape {there}, but the configuration asks for {wanted}")
        found[name] = value.contiguous()
    if given:
        raise UserError(f"the weights have {min(given)}, which a GPT-2 of this configuration has not")
    return found


def require_layers(tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
    """UserError where a configuration has more layers than weights could be of: asked before anything is built by it,
    since it may come from an untrusted file with any number."""
    if len(tensors) < config.n_layer:
        raise UserError(
            f"the weights are {len(tensors):,} tensors, too few for the configuration's {config.n_layer:,} layers"
        )


def require_finite(value: Tensor, name: str) -> None:
    """UserError where weights hold anything but finite numbers of at least 16 bits."""
    if value.dtype not in _WEIGHT_DTYPES or not bool(torch.isfinite(value).all()):
        raise UserError(f"the weights' {name} holds values that are no finite numbers")


def same_values(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _gpt2_names(config: ModelConfig) -> dict[str, str]:
    """gptlab's name -> GPT-2's, without "transformer." in front; every bias, also of a model that has none."""
    names = {"token_embedding.weight": "wte.weight", "position_embedding.weight": "wpe.weight"}
    for layer in range(config.n_layer):
        for own, foreign in _BLOCK.items():
            for part in ("weight", "bias"):
                names[f"blocks.{layer}.{own}.{part}"] = f"h.{layer}.{foreign}.{part}"
    names |= {"final_norm.weight": "ln_f.weight", "final_norm.bias": "ln_f.bias"}
    return names if config.tied_head else names | {"head.weight": _HEAD}


def _on_meta(config: ModelConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def _is_matrix(name: str) -> bool:
    """A linear layer's weight; tables lie alike in both."""
    return name.startswith("blocks.") and name.endswith("weight") and not name.endswith("norm.weight")


def _is_mask(name: str) -> bool:
    """The causal mask that older files hold as a buffer."""
    return name.endswith((".attn.bias", ".attn.masked_bias"))
