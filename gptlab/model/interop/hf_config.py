"""What a config.json of transformers says of a model, in gptlab's fields. Reads no weights, imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gptlab.config.errors import ConfigError, UserError
from gptlab.config.model import Activation, ModelConfig
from gptlab.model.interop.export_config import nanochat_model_config, recorded_model_config
from gptlab.runtime.files.strict_json import read_json_object

CONFIG_FILE = "config.json"
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
"""One file, several with an index, pickle; the first that is there is read."""

# transformers' names (transformers/activations.py). gelu_new and gelu_pytorch_tanh are one formula.
_GPT2_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


def read_hf_config(folder: Path) -> dict[str, object]:
    """config.json of a folder that transformers saved. UserError where there is none."""
    config = read_json_object(folder / CONFIG_FILE)
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{folder / CONFIG_FILE} names no model_type: it is not of a model that transformers saved")
    return config


def model_config_of(hf_config: Mapping[str, object]) -> ModelConfig:
    """The model of any config.json that gptlab reads, dispatched on its `model_type`. UserError for other ones."""
    kind = hf_config.get("model_type")
    if (recorded := recorded_model_config(hf_config)) is not None:
        return recorded
    if kind == "gpt2":
        return gpt2_model_config(hf_config)
    if kind == "nanochat":
        try:
            return nanochat_model_config(hf_config)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UserError(f"config.json describes no NanoChat: {error}") from None
    if kind == "gptlab":
        raise UserError("config.json is no longer what gptlab exported: its record of the model contradicts the rest")
    raise UserError(
        f"config.json is of a model_type {kind!r}, and gptlab reads gpt2, nanochat and gptlab: "
        "its weights cannot be used"
    )


def gpt2_model_config(hf_config: Mapping[str, object]) -> ModelConfig:
    """The parts of transformers' GPT-2 as gptlab's, so that both compute the same function.

    Dropout is zero whatever the file says: it is a choice of the training, not of the weights. UserError for an option
    that gptlab's GPT has no part for.
    """
    get = hf_config.get
    activation = str(get("activation_function", "gelu_new"))
    if activation not in _GPT2_ACTIVATIONS:
        raise _unsupported("activation_function", activation, f"the known ones are {', '.join(_GPT2_ACTIVATIONS)}")
    for name, only in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
        ("layer_norm_epsilon", 1e-5),
    ):
        if get(name, only) != only:
            raise _unsupported(name, get(name), f"gptlab's GPT has it at {only}")
    width = _count(hf_config, "n_embd", 768)
    inner = _count(hf_config, "n_inner", 4 * width)
    try:
        return ModelConfig(
            n_layer=_count(hf_config, "n_layer", 12),
            n_embd=width,
            n_head=_count(hf_config, "n_head", 12),
            seq_len=_count(hf_config, "n_positions", 1024),
            vocab_size=_count(hf_config, "vocab_size", 50257),
            mlp_ratio=inner / width,
            norm="layernorm",
            position="learned",
            activation=_GPT2_ACTIVATIONS[activation],
            bias=True,
            tied_head=bool(get("tie_word_embeddings", True)),
            qk_norm=False,
            value_embeddings=False,
            residual_lambdas=False,
            embedding_norm=False,
            logit_softcap=None,
            init="gpt2",
        )
    except ConfigError as error:
        raise UserError(f"config.json describes no GPT-2: {error}") from None


def _count(hf_config: Mapping[str, object], name: str, default: int) -> int:
    """A size, transformers' default where it is not given or null."""
    value = hf_config.get(name)
    if value is None:
        return default
    if type(value) is not int or not 0 < value < 2**63:
        raise UserError(f"config.json: {name} = {value!r} must be a positive whole number")
    return value


def _unsupported(name: str, value: object, what_would: str) -> UserError:
    return UserError(f"this GPT-2 cannot be used: config.json has {name} = {value!r}, {what_would}")
