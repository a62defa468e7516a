"""config.json of transformers as a model's fields, and back. Imports no torch and reads no weights.

A model is exported as the plainest of three forms: GPT-2, NanoChat, or gptlab's own, which brings a modelling file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gptlab.config.errors import ConfigError, UserError
from gptlab.config.load import checked_value, leaf_fields
from gptlab.config.model import Activation, ModelConfig
from gptlab.runtime.files.plain_file import read_json_object

CONFIG_FILE = "config.json"
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
"""One file, several with an index, pickle; the first that exists is read."""

Form = Literal["gpt2", "nanochat", "gptlab"]
"""transformers' `model_type`; gptlab's own comes with a modelling file."""

ARCHITECTURES: dict[Form, str] = {
    "gpt2": "GPT2LMHeadModel", "nanochat": "NanoChatForCausalLM", "gptlab": "GPTLabForCausalLM",
}  # fmt: skip
MODELLING_MODULE = "modeling_gptlab"

RECORD = "gptlab"
"""The key of config.json that holds all fields of the ModelConfig, also those that the form has no word for (no biases,
the padding of the vocabulary, initial weights). So a model comes back as what it was."""

MASKED_DOCUMENTS = "mask_documents"
"""The key of config.json that holds the run's data.mask_documents, which no form has: a warning is due where it is
true."""

FIXED: dict[Form, dict[str, Any]] = {
    "gpt2": {
        "norm": "layernorm", "position": "learned", "qk_norm": False, "key_offset": False, "embedding_norm": False,
        "logit_softcap": None, "value_embeddings": False, "residual_lambdas": False, "attention_residual_scale": None,
    },
    "nanochat": {
        "norm": "rmsnorm", "position": "rope", "qk_norm": True, "key_offset": False, "embedding_norm": True,
        "bias": False, "value_embeddings": False, "residual_lambdas": False, "attention_residual_scale": None,
    },
    "gptlab": {},
}  # fmt: skip
"""The fields that a form fixes. Those of NanoChat: modeling_nanochat.py of transformers 5, whose normalization has no
weight, and comes after the embedding and, per head, after the rotation."""

_FIELDS: dict[Form, dict[str, str]] = {
    "gpt2": {
        "vocab_size": "vocab_size", "n_positions": "seq_len", "n_embd": "n_embd", "n_layer": "n_layer",
        "n_head": "n_head", "n_inner": "mlp_width",
    },
    "nanochat": {
        "vocab_size": "vocab_size", "max_position_embeddings": "seq_len", "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_key_value_heads": "kv_heads",
        "intermediate_size": "mlp_width",
    },
    "gptlab": {
        "vocab_size": "vocab_size", "seq_len": "seq_len", "n_layer": "n_layer", "n_embd": "n_embd", "n_head": "n_head",
        "n_kv_head": "kv_heads", "mlp_width": "mlp_width", "norm": "norm", "rmsnorm_eps": "rmsnorm_eps",
        "position": "position", "rope_base": "rope_base", "activation": "activation", "bias": "bias",
        "qk_norm": "qk_norm", "key_offset": "key_offset", "layer_windows": "window_pattern",
        "value_embedding_layers": "value_embeddings",
        "residual_lambdas": "residual_lambdas", "embedding_norm": "embedding_norm", "logit_softcap": "logit_softcap",
        "attention_residual_scale": "attention_residual_scale",
    },
}  # fmt: skip
"""{the form's key: the field of ModelConfig}, in the order of config.json."""
_DEFAULTS: dict[Form, tuple[int | None, ...]] = {
    "gpt2": (50257, 1024, 768, 12, 12, None), "nanochat": (50304, 2048, 768, 12, 6, None, 8192),
}  # fmt: skip
"""transformers' own sizes, in that order. None: four times the width; as many key-value heads as heads."""

# transformers' names (its activations.py): gelu_new is OpenAI's, gelu_pytorch_tanh the same formula in one kernel.
_ACTIVATIONS: dict[str, Activation] = {
    "relu2": "relu2", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
_GPT2_NAMES: dict[Activation, str] = {"relu2": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_new"}
_NANOCHAT_NAMES: dict[Activation, str] = {"relu2": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def choose_form(config: ModelConfig) -> tuple[Form, str]:
    """The plainest form that computes what the model computes, and the reason, in words."""
    against_gpt2, against_nanochat = obstacles(config, "gpt2"), obstacles(config, "nanochat")
    if not against_gpt2:
        return "gpt2", "all its parts are GPT-2's"
    if not against_nanochat:
        return "nanochat", "all its parts are NanoChat's"
    nearest, against = min((("GPT-2", against_gpt2), ("NanoChat", against_nanochat)), key=lambda pair: len(pair[1]))
    return "gptlab", f"the nearest class of transformers, {nearest}, would need {', '.join(against)}"


def obstacles(config: ModelConfig, form: Form) -> list[str]:
    """The fields that rule this form out, each with the value that the form demands."""
    found = [f"{name} {value}" for name, value in FIXED[form].items() if getattr(config, name) != value]
    if form != "gptlab" and any(config.layer_windows()):
        found.append("window_pattern L")
    if form == "gpt2" and config.kv_heads != config.n_head:
        found.append(f"n_kv_head {config.n_head}")
    return found


def export_config(config: ModelConfig, form: Form, *, bos_id: int | None, dtype: str) -> dict[str, Any]:
    """The whole of config.json; `dtype` is that of the weights, such as "float32"."""
    drop = config.dropout
    own: dict[Form, dict[str, Any]] = {
        "gpt2": {"resid_pdrop": drop, "embd_pdrop": drop, "attn_pdrop": drop},
        "nanochat": {"attention_dropout": drop},
        "gptlab": {
            "auto_map": {
                "AutoConfig": f"{MODELLING_MODULE}.GPTLabConfig",
                "AutoModelForCausalLM": f"{MODELLING_MODULE}.{ARCHITECTURES['gptlab']}",
            },
            "dropout": drop,
        },
    }
    return {
        "model_type": form,
        "architectures": [ARCHITECTURES[form]],
        **network_fields(config, form),
        **own[form],
        "bos_token_id": bos_id,
        "eos_token_id": bos_id,
        "pad_token_id": None,
        "use_cache": True,
        "dtype": dtype,
        RECORD: dataclasses.asdict(config),
    }


def network_fields(config: ModelConfig, form: Form) -> dict[str, Any]:
    """The part of config.json that says which function the weights compute."""
    fields: dict[str, Any] = {theirs: getattr(config, own) for theirs, own in _FIELDS[form].items()}
    if form == "gpt2":
        fields |= {"activation_function": _GPT2_NAMES[config.activation], "layer_norm_epsilon": 1e-5}
    elif form == "nanochat":
        fields |= {
            "hidden_act": _NANOCHAT_NAMES[config.activation],
            "rms_norm_eps": config.rmsnorm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
            "final_logit_softcapping": config.logit_softcap,
            "attention_bias": False,
        }
    else:  # patterns, spelled out layer by layer
        fields["layer_windows"] = list(config.layer_windows())
        fields["value_embedding_layers"] = [i for i in range(config.n_layer) if config.has_value_embedding(i)]
    return fields | {"tie_word_embeddings": config.tied_head}


def recorded_model_config(hf_config: Mapping[str, Any]) -> ModelConfig | None:
    """The ModelConfig that was exported, or None if fields are missing or the rest of config.json no longer agrees.

    For example, training with transformers may have enlarged the vocabulary: then the record is of another model. A
    GPT-2 that transformers saved has biases, which it may have trained, also where the exported model had none.
    """
    form, record = hf_config.get("model_type"), hf_config.get(RECORD)
    kinds = leaf_fields(ModelConfig)
    if form not in ARCHITECTURES or not isinstance(record, Mapping) or record.keys() != kinds.keys():
        return None
    try:
        config = ModelConfig(**{name: checked_value(kinds[name], value, name) for name, value in record.items()})
    except UserError:
        return None
    stated = network_fields(config, form)
    same = not obstacles(config, form) and all(hf_config.get(name, value) == value for name, value in stated.items())
    if form == "gpt2" and "transformers_version" in hf_config:  # which gptlab does not write
        config = dataclasses.replace(config, bias=True)
    return config if same else None


def read_hf_config(folder: Path) -> dict[str, object]:
    """config.json of a folder that transformers saved. UserError if there is none."""
    config = read_json_object(folder / CONFIG_FILE)
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{folder / CONFIG_FILE} names no model_type: transformers did not save this model")
    return config


def model_config_of(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The model of any config.json that gptlab reads, dispatched on its `model_type`. UserError for others."""
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
        raise UserError("config.json is no longer what gptlab exported: its record is incomplete or contradicts it")
    raise UserError(f"config.json has model_type {kind!r}, but gptlab reads only gpt2, nanochat and gptlab")


def gpt2_model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """transformers' GPT-2 in gptlab's parts, so that both compute the same function.

    Dropout is zero whatever the file says: it belongs to the training, not to the weights. UserError for an option that
    gptlab's GPT does not have.
    """
    activation = _activation(hf_config, "activation_function", "gelu_new", tuple(_ACTIVATIONS), "GPT-2")
    for name, only in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
        ("layer_norm_epsilon", 1e-5),
    ):
        _require_value(name, hf_config.get(name, only), only, "GPT-2")
    tied = bool(hf_config.get("tie_word_embeddings", True))
    try:
        return ModelConfig(
            **_sizes(hf_config, "gpt2"), **FIXED["gpt2"], activation=activation, bias=True, tied_head=tied, init="gpt2"
        )
    except ConfigError as error:
        raise UserError(f"config.json describes no GPT-2: {error}") from None


def nanochat_model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """A NanoChatForCausalLM that gptlab did not export. UserError for an option that gptlab's GPT does not have."""
    get, sizes = hf_config.get, _sizes(hf_config, "nanochat")
    rope = get("rope_parameters") or {}
    head_dim = sizes["n_embd"] // sizes["n_head"]
    _require_value("attention_bias", get("attention_bias", False), False, "NanoChat")
    _require_value("rope_type", rope.get("rope_type", "default"), "default", "NanoChat")
    _require_value("head_dim", get("head_dim", head_dim), head_dim, "NanoChat")
    activation = _activation(hf_config, "hidden_act", "relu2", tuple(_NANOCHAT_NAMES.values()), "NanoChat")
    eps = get("rms_norm_eps", 1e-6)
    if type(eps) not in (int, float) or not 0 < eps < 1:
        raise _unsupported("NanoChat", "rms_norm_eps", eps, "it must be between 0 and 1")
    softcap = get("final_logit_softcapping", 15.0)
    return ModelConfig(
        **sizes,
        **FIXED["nanochat"],
        rmsnorm_eps=float(eps),
        rope_base=float(rope.get("rope_theta", get("rope_theta", 10_000.0))),
        activation=activation,
        tied_head=bool(get("tie_word_embeddings", False)),
        logit_softcap=None if softcap is None else float(softcap),
    )


def _sizes(hf_config: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """The sizes as fields of a ModelConfig; transformers' default where one is missing or null."""
    sizes: dict[str, Any] = {"kv_heads": None}
    for (name, own), default in zip(_FIELDS[form].items(), _DEFAULTS[form], strict=True):
        sizes[own] = value = default if hf_config.get(name) is None else hf_config[name]
        if value is not None and (type(value) is not int or not 0 < value < 2**63):
            raise UserError(f"config.json: {name} = {value!r} must be a positive whole number")
    width, mlp_width, kv_heads = sizes["n_embd"], sizes.pop("mlp_width"), sizes.pop("kv_heads")
    return sizes | {"mlp_ratio": 4.0 if mlp_width is None else mlp_width / width, "n_kv_head": kv_heads}


def _activation(hf_config: Mapping[str, Any], key: str, default: str, known: tuple[str, ...], model: str) -> Activation:
    name = str(hf_config.get(key, default))
    if name not in known:
        raise _unsupported(model, key, name, f"the known ones are {', '.join(known)}")
    return _ACTIVATIONS[name]


def _require_value(name: str, value: object, only: object, model: str) -> None:
    if value != only:
        raise _unsupported(model, name, value, f"gptlab's GPT has {only!r}")


def _unsupported(model: str, name: str, value: object, remedy: str) -> UserError:
    return UserError(f"this {model} cannot be used: config.json has {name} = {value!r}, {remedy}")
