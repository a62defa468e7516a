"""Attention on GPUs: which implementation a layer takes, shown on the meta device, and against brute force."""

from __future__ import annotations

from typing import Any

import oracle_model
import pytest
import torch
from torch.overrides import TorchFunctionMode

from gptlab.config.model import ModelConfig
from gptlab.model.gpt import GPT
from gptlab.model.kernels import gpu_attention
from gptlab.runtime.hardware.device import Platform


class Called(TorchFunctionMode):
    """Notes the names of the functions of torch that are called."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_platform_decides_and_not_the_device(platform: Platform) -> None:
    config = ModelConfig(n_layer=2, n_embd=32, n_head=2, seq_len=16, vocab_size=10, window_pattern="L")
    with torch.device("meta"):
        model = GPT(config, torch.bfloat16, platform)
        tokens = torch.empty(2, 16, dtype=torch.int64)
    with Called() as called:
        model.loss(tokens, tokens).backward()
    assert called.names.count("scaled_dot_product_attention") == (2 if platform == "cuda" else 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("n_head", "n_kv_head"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 1, 37, 300])
def test_on_a_gpu(n_head: int, n_kv_head: int, window: int | None) -> None:
    """In float64, so that the tolerance is that of the CPU."""
    heads = torch.randn(2, 201, n_head + 2 * n_kv_head, 8, dtype=torch.float64)
    q, k, v = heads.transpose(1, 2).split((n_head, n_kv_head, n_kv_head), dim=1)
    out = gpu_attention.attention(heads.cuda(), n_head, window, 0.0).transpose(1, 2)
    torch.testing.assert_close(out.cpu(), oracle_model.attention(q, k, v, window), rtol=1e-10, atol=1e-10)
