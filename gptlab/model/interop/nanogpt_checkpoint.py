"""nanoGPT's `ckpt.pt`: {model, optimizer, model_args, iter_num, best_val_loss, config}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gptlab.config.errors import ConfigError, UserError
from gptlab.config.model import ModelConfig
from gptlab.model.interop.hf_config import FIXED
from gptlab.model.interop.hf_weights import from_transformers
from gptlab.model.interop.torch_file import only_tensors, read_torch_file

_SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")


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
    number = content.get("iter_num")
    notes = {
        "iter_num": number if type(number) is int else None,
        "best_val_loss": _finite(content.get("best_val_loss")),
        "dataset": _name(settings.get("dataset")) if isinstance(settings, dict) else None,
    }
    return NanoGptCheckpoint(path, _model_config(arguments, path), only_tensors(content["model"], path), notes)


def _model_config(arguments: Mapping[object, object], path: Path) -> ModelConfig:
    bias = arguments.get("bias", True)  # checkpoints older than the option all have biases
    if type(bias) is not bool:
        raise UserError(f"{path}: model_args says bias = {type(bias).__name__}, which is neither True nor False")
    sizes: dict[str, int] = {}
    for name in _SIZES:
        value = arguments.get(name)
        if type(value) is not int:
            shown = value if value is None or isinstance(value, float | bool) else type(value).__name__
            raise UserError(f"{path}: model_args says {name} = {shown}, which is no whole number")
        sizes[name] = value
    try:
        return ModelConfig(
            n_layer=sizes["n_layer"],
            n_embd=sizes["n_embd"],
            n_head=sizes["n_head"],
            seq_len=sizes["block_size"],
            vocab_size=sizes["vocab_size"],
            activation="gelu",
            bias=bias,
            tied_head=True,
            init="gpt2",
            **FIXED["gpt2"],
        )
    except ConfigError as error:
        raise UserError(f"{path}: its model_args describe no GPT: {error}") from None


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) < 100 else None


def _finite(value: object) -> float | None:
    """nanoGPT keeps its best loss as a 0-d tensor, and 1e9 before the first."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return float(number) if isinstance(number, int | float) and math.isfinite(number) else None
