"""The initial values of every weight, as one table: a row for each tensor, a column for each scheme (`model.init`)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor, nn

from gptlab.config.model import ModelConfig
from gptlab.runtime.hardware.rng import fold_seed

Draw = Callable[[Tensor, Generator], Tensor]
"""Fills a tensor, in place."""


def initial_weights(model: nn.Module, config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """The first values of every weight of a GPT, whole, float32 on the CPU.

    Each weight draws from a generator of its own, keyed by (seed, its name). So values are the same on every device,
    and a part that two configurations share starts out the same in both.
    """
    table = initial_draws(config)
    for name, parameter in model.named_parameters():
        generator = Generator().manual_seed(fold_seed(seed, zlib.crc32(name.encode())))
        draw = table[".".join(part for part in name.split(".") if not part.isdigit())]
        yield name, draw(torch.empty(parameter.shape, dtype=torch.float32), generator)


def initial_draws(config: ModelConfig) -> dict[str, Draw]:
    """{name of a weight, without the number of its layer: how it is drawn}."""
    zeros, ones = constant(0.0), constant(1.0)
    small = normal(0.02)
    projection = normal(0.02 / math.sqrt(2 * config.n_layer))  # GPT-2: the sum of all layers keeps its variance
    by_width = uniform(math.sqrt(3 / config.n_embd))  # standard deviation 1 / sqrt(n_embd)
    # torch's own for nn.Linear, which writes it as He's rule for a leaky ReLU of slope sqrt(5).
    linear, linear_out = uniform(1 / math.sqrt(config.n_embd)), uniform(1 / math.sqrt(config.mlp_width))
    # A tied table is the head too: unit variance would start with logits of variance n_embd.
    table = small if config.tied_head else normal(1.0)
    columns = ("nanochat", "gpt2", "torch")
    rows: dict[str, tuple[Draw, Draw, Draw]] = {
        # "torch" draws a tied table as the linear layer that it is as the head.
        "token_embedding.weight": (table, small, linear if config.tied_head else normal(1.0)),
        "position_embedding.weight": (table, small, normal(1.0)),
        "value_embeddings.weight": (by_width, small, normal(1.0)),
        "blocks.attention.qkv.weight": (by_width, small, linear),
        "blocks.attention.qkv.bias": (zeros, zeros, linear),
        "blocks.attention.value_gate.weight": (zeros, zeros, zeros),  # a gate of 2 * sigmoid(0) = 1
        "blocks.attention.out.weight": (zeros, projection, linear),
        "blocks.attention.out.bias": (zeros, zeros, linear),
        "blocks.mlp.up.weight": (by_width, small, linear),
        "blocks.mlp.up.bias": (zeros, zeros, linear),
        "blocks.mlp.out.weight": (zeros, projection, linear_out),
        "blocks.mlp.out.bias": (zeros, zeros, linear_out),
        "head.weight": (normal(0.001), small, linear),
        "residual_lambdas": (ones, ones, ones),
        "x0_lambdas": (constant(0.1),) * 3,  # nanochat: a little of the embedding from the start
    }
    for norm in ("embedding_norm", "blocks.attention_norm", "blocks.mlp_norm", "final_norm"):
        rows |= {f"{norm}.weight": (ones, ones, ones), f"{norm}.bias": (zeros, zeros, zeros)}
    return {name: draws[columns.index(config.init)] for name, draws in rows.items()}


def constant(value: float) -> Draw:
    return lambda values, generator: values.fill_(value)


def normal(std: float) -> Draw:
    return lambda values, generator: values.normal_(0.0, std, generator=generator)


def uniform(bound: float) -> Draw:
    return lambda values, generator: values.uniform_(-bound, bound, generator=generator)
