"""Weights in transformers' folders and by transformers' names, and by gptlab's; nanoGPT's `ckpt.pt`.

    gpt2       layers of OpenAI's code (Conv1D), whose matrices are (inputs, outputs): the transpose of nn.Linear's.
               nanoGPT has the same names with nn.Linear.
    nanochat   queries, keys and values apart, where gptlab has one matrix of their rows in that order
    gptlab     gptlab's own names

Tables lose the padding of the vocabulary, which no logit ever sees; it is zero on the way back. A tied head is not
written, but may be there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gptlab.config.errors import ConfigError, UserError, cannot
from gptlab.config.model import ModelConfig
from gptlab.model.gpt import GPT
from gptlab.model.interop.hf_config import FIXED, WEIGHT_FILES, Form, read_hf_config
from gptlab.model.interop.torch_file import only_tensors, read_torch_file
from gptlab.runtime.files.plain_file import open_plain, read_json_object

MAX_HEADER_BYTES = 1 << 23
"""About 100 bytes a tensor: a model of 400 layers has 1 MB. The library takes 100 MB, and seconds to parse them."""
_SINGLE, _INDEX, _PICKLED = WEIGHT_FILES
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_MODULES: dict[Form, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "token_embedding": ("wte",), "position_embedding": ("wpe",), "final_norm": ("ln_f",), "head": ("lm_head",),
        "attention_norm": ("h.{}.ln_1",), "mlp_norm": ("h.{}.ln_2",),
        "attention.qkv": ("h.{}.attn.c_attn",), "attention.out": ("h.{}.attn.c_proj",),
        "mlp.up": ("h.{}.mlp.c_fc",), "mlp.out": ("h.{}.mlp.c_proj",),
    },
    "nanochat": {
        "token_embedding": ("model.embed_tokens",), "head": ("lm_head",),
        "attention.qkv": tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
        "attention.out": ("model.layers.{}.self_attn.o_proj",),
        "mlp.up": ("model.layers.{}.mlp.fc1",), "mlp.out": ("model.layers.{}.mlp.fc2",),
    },
}  # fmt: skip
"""gptlab's module, without the layer: the form's, several where it keeps parts of the rows apart. GPT-2's without
"transformer." in front."""
_NANOGPT_SIZES = {
    "n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "seq_len", "vocab_size": "vocab_size",
}  # fmt: skip
"""nanoGPT's name of a size, and gptlab's."""


def read_hf_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The weights by gptlab's names, for `config`: that of `model_config_of`, or one that leaves rows of its vocabulary
    unused. UserError if they are missing, damaged, or do not fit."""
    form = cast(Form, read_hf_config(folder)["model_type"])  # one of them, or there would be no `config`
    tensors = read_hf_tensors(folder)
    try:
        return from_transformers(tensors, config, form)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def read_hf_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors by their own names, on the CPU; safetensors if there are any. UserError if there are none."""
    if (folder / _SINGLE).is_file():
        return _read_safetensors(folder / _SINGLE)
    if (folder / _INDEX).is_file():
        return _read_shards(folder)
    if (folder / _PICKLED).is_file():
        return only_tensors(read_torch_file(folder / _PICKLED), folder / _PICKLED)
    raise UserError(f"{folder} holds no weights: there is no {_SINGLE}, {_INDEX} or {_PICKLED}")


@dataclass(frozen=True, slots=True)
class NanoGptCheckpoint:
    path: Path
    model: ModelConfig
    """Its vocabulary is the rows of the table; nanoGPT pads GPT-2's 50,257 entries to 50,304."""
    tensors: Mapping[str, Tensor]
    """By nanoGPT's names, memory-mapped."""
    notes: Mapping[str, object]
    """About the training: iter_num, best_val_loss (nats/token), dataset; None where the file does not say."""

    def weights(self, model: ModelConfig) -> dict[str, Tensor]:
        """By gptlab's names, for its own model or one that leaves rows of its vocabulary unused. UserError if they do
        not fit."""
        try:
            return from_transformers(self.tensors, model, "gpt2", transposed=False)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None


def read_nanogpt(path: Path) -> NanoGptCheckpoint:
    """Read a checkpoint without running anything in it. UserError for any other file."""
    content = read_torch_file(path)
    arguments, settings = content.get("model_args"), content.get("config")
    if "model" not in content or not isinstance(arguments, dict):
        raise UserError(f"{path} is not a nanoGPT checkpoint: it has no `model` and `model_args`")
    number, dataset = content.get("iter_num"), settings.get("dataset") if isinstance(settings, dict) else None
    notes = {
        "iter_num": number if type(number) is int else None,
        "best_val_loss": _finite(content.get("best_val_loss")),
        "dataset": dataset if isinstance(dataset, str) and len(dataset) < 100 else None,
    }
    return NanoGptCheckpoint(path, _nanogpt_model(arguments, path), only_tensors(content["model"], path), notes)


def _nanogpt_model(arguments: Mapping[Any, object], path: Path) -> ModelConfig:
    bias = arguments.get("bias", True)  # checkpoints older than the option all have biases
    if type(bias) is not bool:
        raise UserError(f"{path}: model_args says bias = {type(bias).__name__}, which is neither True nor False")
    sizes: dict[str, Any] = {}
    for name, own in _NANOGPT_SIZES.items():
        sizes[own] = value = arguments.get(name)
        if type(value) is not int:
            shown = value if value is None or isinstance(value, float | bool) else type(value).__name__
            raise UserError(f"{path}: model_args says {name} = {shown}, which is no whole number")
    try:
        return ModelConfig(**sizes, **FIXED["gpt2"], activation="gelu", bias=bias, tied_head=True, init="gpt2")
    except ConfigError as error:
        raise UserError(f"{path}: its model_args describe no GPT: {error}") from None


def _finite(value: object) -> float | None:
    """nanoGPT keeps its best loss as a 0-d tensor, and 1e9 before the first."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return float(number) if isinstance(number, int | float) and math.isfinite(number) else None


def to_transformers(tensors: Mapping[str, Tensor], config: ModelConfig, form: Form) -> dict[str, Tensor]:
    """The content of model.safetensors, contiguous. A model without biases gets zeros for those of GPT-2, which always
    has them."""
    found: dict[str, Tensor] = {}
    qkv_rows = [heads * config.head_dim for heads in (config.n_head, config.kv_heads, config.kv_heads)]
    for name, shape in _shapes(config, form).items():
        theirs = _theirs(name, form)
        value = tensors[name] if name in tensors else next(iter(tensors.values())).new_zeros(shape)
        value = value[: config.vocab_size] if _is_table(name) else value
        value = value.T if form == "gpt2" and _is_matrix(name, shape) else value
        parts = value.split(qkv_rows) if len(theirs) > 1 else [value]
        for one, part in zip(theirs, parts, strict=True):
            prefix = "transformer." if form == "gpt2" and name != "head.weight" else ""
            found[prefix + one] = part.contiguous()
    return found


def from_transformers(
    tensors: Mapping[str, Tensor], config: ModelConfig, form: Form, *, transposed: bool = True
) -> dict[str, Tensor]:
    """The inverse, of the shapes that a GPT of `config` has. `transposed`: the matrices of "gpt2" are (inputs,
    outputs), as transformers has them and nanoGPT does not.

    GPT-2's names may lack "transformer." in front (OpenAI's own files do). UserError for missing, unknown or misshapen
    tensors, numbers that are not finite, and a head that differs from the embedding it is tied to.
    """
    # Before anything is built from the configuration, which may come from a file with any number in it.
    if len(tensors) < config.n_layer:
        raise UserError(
            f"the weights are {len(tensors):,} tensors, too few for the configuration's {config.n_layer:,} layers"
        )
    given = dict(tensors)
    if form == "gpt2":
        masks = (".attn.bias", ".attn.masked_bias")  # the causal mask, which older files hold as a buffer
        given = {
            name.removeprefix("transformer."): value for name, value in tensors.items() if not name.endswith(masks)
        }
    if config.tied_head:
        head, table = (_theirs(name, form)[0] for name in ("head.weight", "token_embedding.weight"))
        twin, tied = given.pop(head, None), given.get(table)
        if (
            twin is not None
            and tied is not None
            and not (twin.dtype == tied.dtype and torch.equal(twin, tied))
            and torch.isfinite(tied).all()  # NaN differs from itself, and is refused below
        ):
            raise UserError(f"{head} differs from {table}, though the model's head is tied to its embedding")
    found = {}
    for name, shape in _shapes(config, form).items():
        theirs = _theirs(name, form)
        label = " + ".join(theirs)
        if name.endswith(".bias") and not config.bias:  # zeros are the same
            value = given.pop(label, None)
            if value is not None and bool(value.any()):
                raise UserError(f"the weights have {label}, but the model has no biases")
            continue
        missing = [one for one in theirs if one not in given]
        if missing:
            raise UserError(f"the weights lack {missing[0]}")
        parts = [given.pop(one) for one in theirs]
        if len({(part.dtype, part.shape[1:]) for part in parts}) > 1 or not all(part.dim() for part in parts):
            there = ", ".join(str(tuple(part.shape)) for part in parts)
            raise UserError(f"the weights' {label} have the shapes {there}, which do not go together")
        value = torch.cat(parts) if len(parts) > 1 else parts[0]
        if value.dtype not in _WEIGHT_DTYPES:
            raise UserError(f"the weights' {theirs[0]} is of {value.dtype}, which is no type of weights")
        if not bool(torch.isfinite(value).all()):
            raise UserError(f"the weights' {theirs[0]} holds values that are no finite numbers")
        turned = form == "gpt2" and transposed and _is_matrix(name, shape)
        value = value.T if turned else value
        wanted = (config.vocab_size, *shape[1:]) if _is_table(name) else shape
        if value.shape not in (wanted, shape):  # a table may come with its padding
            sizes = [str(tuple(size)[:: -1 if turned else 1]) for size in (value.shape, wanted)]
            raise UserError(f"the weights' {label} has the shape {sizes[0]}, but the configuration asks for {sizes[1]}")
        padding = value.new_zeros(shape[0] - len(value), *shape[1:])
        found[name] = torch.cat((value, padding)) if len(padding) else value.contiguous()
    if given:
        raise UserError(f"the weights have {min(given)}, which a model of this configuration does not have")
    return found


def _theirs(name: str, form: Form) -> tuple[str, ...]:
    """The form's names of one of gptlab's weights."""
    if form == "gptlab":
        return (name,)
    module, _, kind = name.rpartition(".")
    layer = ""
    if module.startswith("blocks."):
        _, layer, module = module.split(".", 2)
    return tuple(f"{one.format(layer)}.{kind}" for one in _MODULES[form][module])


def _shapes(config: ModelConfig, form: Form) -> dict[str, tuple[int, ...]]:
    """Of every weight, by gptlab's names; for "gpt2" with every bias, also if the model has none."""
    with torch.device("meta"):
        model = GPT(replace(config, bias=True) if form == "gpt2" else config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _is_table(name: str) -> bool:
    """One row for each entry of the vocabulary."""
    return name.split(".")[0] in ("token_embedding", "value_embeddings", "head")


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """The weight of a linear layer in a block."""
    return name.startswith("blocks.") and len(shape) == 2


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = read_json_object(folder / _INDEX)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{folder / _INDEX} is damaged: it has no weight_map")
    tensors: dict[str, Tensor] = {}
    if not all(isinstance(value, str) for value in places.values()):
        raise UserError(f"{folder / _INDEX} is damaged: its weight_map names no files")
    for name in sorted(set(places.values())):
        if Path(name).name != name or set(name) & set("\\:\0"):
            raise UserError(f"{folder / _INDEX} names {name!r}, which is outside the folder")
        tensors |= _read_safetensors(folder / name)
    missing = sorted(places.keys() - tensors.keys())
    if missing:
        raise UserError(f"{folder / _INDEX} names {missing[0]}, which its file does not hold")
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with cannot(f"read {path}"):
            with open_plain(path) as file:
                header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise UserError(f"{path} is damaged: no complete safetensors file (a header of {header_bytes:,} bytes)")
            return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: no complete safetensors file ({error})") from None
