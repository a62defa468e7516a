"""Whole weights by name into a model, strictly."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.model.gpt import GPT


@torch.no_grad()
def load_weights(model: GPT, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights by name. UserError, with nothing changed, unless names and shapes are exactly the model's."""
    own = dict(model.named_parameters())
    require_same_shapes(own, tensors)
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


def require_weights_of(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """UserError unless these are the weights of such a model. Called before a model is built: a configuration from a
    file may have any size."""
    if len(tensors) < config.n_layer:
        raise UserError(
            f"the checkpoint is of another model: it has {len(tensors):,} tensors for {config.n_layer:,} layers"
        )
    with torch.device("meta"):
        require_same_shapes(dict(GPT(config).named_parameters()), tensors)


def require_same_shapes(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """UserError unless names and shapes of a checkpoint's `tensors` are exactly the model's."""
    different = sorted(own.keys() ^ tensors.keys())
    if different:
        raise UserError(f"the checkpoint is of another model: {different[0]} is in only one of the two")
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(
                f"the checkpoint is of another model: {name} is {tuple(tensors[name].shape)} there, "
                f"{tuple(parameter.shape)} here"
            )
