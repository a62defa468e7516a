"""nanoGPT's forward pass and the layout of its ckpt.pt, from its documented names; calls nothing of gptlab.

nanoGPT names the parts: transformer.{wte, wpe, h[i].{ln_1, attn.{c_attn, c_proj}, ln_2, mlp.{c_fc, c_proj}}, ln_f},
nn.Linear matrices (outputs, inputs), exact GELU, a head tied to wte.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
ARGUMENTS: dict[str, Any] = {
    "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 24, "bias": False, "vocab_size": 13, "dropout": 0.0,
}  # fmt: skip


def random_state(arguments: dict[str, Any]) -> State:
    """Every tensor of the model's state_dict, float32, drawn so that each matters; lm_head is wte itself."""
    generator = torch.Generator().manual_seed(8)
    width, bias = arguments["n_embd"], arguments["bias"]

    def draw(*shape: int, around: float = 0.0) -> Tensor:
        return around + 0.3 * torch.randn(shape, generator=generator)

    state = {
        "transformer.wte.weight": draw(arguments["vocab_size"], width),
        "transformer.wpe.weight": draw(arguments["block_size"], width),
    }
    for layer in range(arguments["n_layer"]):
        for norm in ("ln_1", "ln_2"):
            state[f"transformer.h.{layer}.{norm}.weight"] = draw(width, around=1.0)
            if bias:
                state[f"transformer.h.{layer}.{norm}.bias"] = draw(width)
        for name, rows, columns in (
            ("attn.c_attn", 3 * width, width), ("attn.c_proj", width, width),
            ("mlp.c_fc", 4 * width, width), ("mlp.c_proj", width, 4 * width),
        ):  # fmt: skip
            state[f"transformer.h.{layer}.{name}.weight"] = draw(rows, columns)
            if bias:
                state[f"transformer.h.{layer}.{name}.bias"] = draw(rows)
    state["transformer.ln_f.weight"] = draw(width, around=1.0)
    if bias:
        state["transformer.ln_f.bias"] = draw(width)
    return state | {"lm_head.weight": state["transformer.wte.weight"]}


def logits(arguments: dict[str, Any], state: State, tokens: Tensor) -> Tensor:
    """tokens (T,) -> (T, V)."""
    n_tokens, width = len(tokens), arguments["n_embd"]
    x = state["transformer.wte.weight"][tokens] + state["transformer.wpe.weight"][:n_tokens]
    mask = torch.ones(n_tokens, n_tokens, dtype=torch.bool).tril()
    size = width // arguments["n_head"]
    for layer in range(arguments["n_layer"]):
        name = f"transformer.h.{layer}."
        q, k, v = linear(state, f"{name}attn.c_attn", norm(state, f"{name}ln_1", x)).split(width, dim=1)
        heads = []
        for h in range(arguments["n_head"]):
            part = slice(h * size, (h + 1) * size)
            scores = (q[:, part] @ k[:, part].T / math.sqrt(size)).masked_fill(~mask, -math.inf)
            heads.append(torch.softmax(scores, dim=1) @ v[:, part])
        x = x + linear(state, f"{name}attn.c_proj", torch.cat(heads, dim=1))
        hidden = linear(state, f"{name}mlp.c_fc", norm(state, f"{name}ln_2", x))
        x = x + linear(state, f"{name}mlp.c_proj", hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2)
    return norm(state, "transformer.ln_f", x) @ state["lm_head.weight"].T


def norm(state: State, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    y = centred / torch.sqrt((centred**2).mean(1, keepdim=True) + 1e-5) * state[f"{name}.weight"]
    return y + state.get(f"{name}.bias", torch.zeros(()))


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", torch.zeros(()))


def write_checkpoint(path: Path, arguments: dict[str, Any], state: State, **changes: Any) -> Path:
    """What nanoGPT's train.py saves: the optimizer's state too, and its best loss as a 0-d tensor."""
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    weight.sum().backward()
    optimizer.step()
    content = {
        "model": state, "optimizer": optimizer.state_dict(), "model_args": arguments, "iter_num": 2000,
        "best_val_loss": torch.tensor(1.875),
        "config": {"out_dir": "out", "dataset": "shakespeare_char", "learning_rate": 1e-3, "compile": True},
    }  # fmt: skip
    torch.save(content | changes, path)
    return path
