"""Which form of transformers an exported model takes, and its config.json, in both directions. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from gptlab.config.errors import UserError
from gptlab.config.load import checked_value, leaf_fields, rebuild, with_later_model_fields
from gptlab.config.model import Activation, ModelConfig

Form = Literal["gpt2", "nanochat", "gptlab"]
"""transformers' `model_type`; gptlab's own comes with a modelling file."""

ARCHITECTURES: dict[Form, str] = {
    "gpt2": "GPT2LMHeadModel",
    "nanochat": "NanoChatForCausalLM",
    "gptlab": "GPTLabForCausalLM",
}
MODELLING_MODULE = "modeling_gptlab"

RECORD = "gptlab"
"""The key of config.json under which all fields of the ModelConfig stand, also those that the form has no word for
(no biases, the vocabulary's padding, initial weights): so a model comes back as what it was."""

# The fields that a form fixes. Those of NanoChat: modeling_nanochat.py of transformers 5, whose normalization has no
# weight, and comes after the embedding and, per head, after the rotation.
_FIXED: dict[Form, dict[str, object]] = {
    "gpt2": {
        "norm": "layernorm", "position": "learned", "qk_norm": False, "embedding_norm": False, "logit_softcap": None,
        "value_embeddings": False, "residual_lambdas": False, "attention_residual_scale": None,
    },
    "nanochat": {
        "norm": "rmsnorm", "position": "rope", "qk_norm": True, "embedding_norm": True, "bias": False,
        "value_embeddings": False, "residual_lambdas": False, "attention_residual_scale": None,
    },
    "gptlab": {},
}  # fmt: skip

# transformers' names (its activations.py): gelu_new is OpenAI's, gelu_pytorch_tanh the same formula in one kernel.
_GPT2_ACTIVATIONS: dict[Activation, str] = {"relu2": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_new"}
_NANOCHAT_ACTIVATIONS: dict[Activation, str] = {"relu2": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def choose_form(config: ModelConfig) -> tuple[Form, str]:
    """The plainest form that computes what the model computes, and why, in words."""
    against_gpt2, against_nanochat = obstacles(config, "gpt2"), obstacles(config, "nanochat")
    if not against_gpt2:
        return "gpt2", "all its parts are GPT-2's"
    if not against_nanochat:
        return "nanochat", "all its parts are NanoChat's"
    nearest, against = min((("GPT-2", against_gpt2), ("NanoChat", against_nanochat)), key=lambda pair: len(pair[1]))
    return "gptlab", f"the nearest class of transformers, {nearest}, would need {', '.join(against)}"


def obstacles(config: ModelConfig, form: Form) -> list[str]:
    """The fields that keep a model from this form, each with the value that the form demands."""
    found = [f"{name} {value}" for name, value in _FIXED[form].items() if getattr(config, name) != value]
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
    """What config.json says of the function that the weights compute."""
    if form == "gpt2":
        return {
            "vocab_size": config.vocab_size,
            "n_positions": config.seq_len,
            "n_embd": config.n_embd,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_inner": config.mlp_width,
            "activation_function": _GPT2_ACTIVATIONS[config.activation],
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": config.tied_head,
        }
    if form == "nanochat":
        return {
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.seq_len,
            "hidden_size": config.n_embd,
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": config.n_head,
            "num_key_value_heads": config.kv_heads,
            "intermediate_size": config.mlp_width,
            "hidden_act": _NANOCHAT_ACTIVATIONS[config.activation],
            "rms_norm_eps": config.rmsnorm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
            "final_logit_softcapping": config.logit_softcap,
            "attention_bias": False,
            "tie_word_embeddings": config.tied_head,
        }
    return {
        "vocab_size": config.vocab_size,
        "seq_len": config.seq_len,
        "n_layer": config.n_layer,
        "n_embd": config.n_embd,
        "n_head": config.n_head,
        "n_kv_head": config.kv_heads,
        "mlp_width": config.mlp_width,
        "norm": config.norm,
        "rmsnorm_eps": config.rmsnorm_eps,
        "position": config.position,
        "rope_base": config.rope_base,
        "activation": config.activation,
        "bias": config.bias,
        "qk_norm": config.qk_norm,
        "layer_windows": list(config.layer_windows()),
        "value_embedding_layers": [i for i in range(config.n_layer) if config.has_value_embedding(i)],
        "residual_lambdas": config.residual_lambdas,
        "embedding_norm": config.embedding_norm,
        "logit_softcap": config.logit_softcap,
        "attention_residual_scale": config.attention_residual_scale,
        "tie_word_embeddings": config.tied_head,
    }


def recorded_model_config(hf_config: Mapping[str, Any]) -> ModelConfig | None:
    """The ModelConfig that was exported, as far as the rest of config.json still says the same; None otherwise.

    Who trained on with transformers may have enlarged the vocabulary: then the record is of another model.
    """
    form, record = hf_config.get("model_type"), hf_config.get(RECORD)
    if form not in ARCHITECTURES or not isinstance(record, Mapping):
        return None
    annotations = leaf_fields(ModelConfig)
    try:
        fields = with_later_model_fields(dict(record))
        checked = {name: checked_value(annotations[name], value, f"model.{name}") for name, value in fields.items()}
        config = rebuild(ModelConfig(), checked, "model.")
    except (KeyError, UserError):
        return None
    stated = network_fields(config, form)
    same = not obstacles(config, form) and all(hf_config.get(name, value) == value for name, value in stated.items())
    return config if same else None


def nanochat_model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The parts of a NanoChatForCausalLM that gptlab did not export. UserError for what gptlab has no part for."""
    get = hf_config.get
    width, heads = int(get("hidden_size", 768)), int(get("num_attention_heads", 6))
    rope = get("rope_parameters") or {}
    activations = {name: activation for activation, name in _NANOCHAT_ACTIVATIONS.items()}
    for name, value, only in (
        ("attention_bias", get("attention_bias", False), False),
        ("rope_type", rope.get("rope_type", "default"), "default"),
        ("head_dim", get("head_dim", width // heads), width // heads),
    ):
        if value != only:
            raise UserError(f"this NanoChat cannot be used: config.json has {name} = {value!r}, gptlab's GPT {only!r}")
    if (activation := get("hidden_act", "relu2")) not in activations:
        raise UserError(
            f"this NanoChat cannot be used: config.json has hidden_act = {activation!r}, "
            f"the known ones are {', '.join(activations)}"
        )
    eps = get("rms_norm_eps", 1e-6)
    if type(eps) not in (int, float) or not 0 < eps < 1:
        raise UserError(f"this NanoChat cannot be used: config.json has rms_norm_eps = {eps!r}, not between 0 and 1")
    softcap = get("final_logit_softcapping", 15.0)
    return ModelConfig(
        n_layer=int(get("num_hidden_layers", 12)),
        n_embd=width,
        n_head=heads,
        n_kv_head=get("num_key_value_heads"),
        seq_len=int(get("max_position_embeddings", 2048)),
        vocab_size=int(get("vocab_size", 50304)),
        mlp_ratio=int(get("intermediate_size", 8192)) / width,
        rmsnorm_eps=float(eps),
        rope_base=float(rope.get("rope_theta", get("rope_theta", 10_000.0))),
        activation=activations[str(activation)],
        tied_head=bool(get("tie_word_embeddings", False)),
        value_embeddings=False,
        residual_lambdas=False,
        logit_softcap=None if softcap is None else float(softcap),
    )
