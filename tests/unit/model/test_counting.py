"""Parameter and FLOP counts: one model by hand, the sums, and the modules against the formulas of the papers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from gptlab.config.model import ModelConfig
from gptlab.config.optim import Role
from gptlab.model.counting import flops_per_token, fused_rows, parameter_counts
from gptlab.model.gpt import GPT, Linear, build_model
from gptlab.model.kernels import ops

HAND = ModelConfig(
    n_layer=3, n_embd=64, n_head=4, n_kv_head=2, seq_len=10, vocab_size=100, window_pattern="SL", window_tokens=4
)


def meta(config: ModelConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def test_parameters_by_hand() -> None:
    """Width 64, heads of 16, vocabulary 100 padded to 128, value embeddings of 2 * 16 in layers 0 and 2."""
    counts = parameter_counts(meta(HAND))
    qkv, out, mlp, gate = (64 + 32 + 32) * 64, 64 * 64, 2 * 64 * 256, 32 * 2
    assert counts.by_role == {
        Role.EMBEDDING: 128 * 64,
        Role.POSITION_EMBEDDING: 0,
        Role.VALUE_EMBEDDING: 2 * 128 * 32,
        Role.HEAD: 128 * 64,
        Role.MATRIX: 3 * (qkv + out + mlp) + 2 * gate,
        Role.RESIDUAL_LAMBDA: 3,
        Role.X0_LAMBDA: 3,
        Role.VECTOR: 0,
    }
    assert counts.total == 8192 + 8192 + 8192 + 135_168 + 128 + 6
    assert counts.scaling == 135_168 + 128 + 8192


def test_flops_by_hand() -> None:
    """Layers see 4, 10 and 10 (the last sees all) of 10 tokens; 4 heads of 16."""
    flops = flops_per_token(meta(HAND))
    assert flops.matmul == 6 * (135_168 + 128 + 8192)
    assert flops.attention == 12 * 4 * 16 * (4 + 10 + 10)
    # Positions see 1, 2, 3, then 4 tokens seven times (34 / 10), and 1 to 10 (55 / 10).
    assert flops.attention_causal == pytest.approx(12 * 4 * 16 * (3.4 + 5.5 + 5.5))
    assert flops.total == flops.matmul + flops.attention


CONFIGS = [
    HAND,
    replace(HAND, tied_head=True),
    replace(HAND, norm="layernorm", bias=True, position="learned"),
    replace(HAND, norm="layernorm", value_embeddings=False, residual_lambdas=False),
    replace(HAND, n_layer=1, n_embd=16, vocab_multiple=1),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_roles_sum_to_what_is_stored(config: ModelConfig) -> None:
    model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=0)
    counts = parameter_counts(model)
    storages = {p.data_ptr(): p.numel() for p in model.parameters()}
    assert counts.total == sum(counts.by_role.values()) == sum(storages.values())


def test_a_tied_table_counts_once_and_scales_as_the_head() -> None:
    free, tied = meta(HAND), meta(replace(HAND, tied_head=True))
    assert parameter_counts(free).total - parameter_counts(tied).total == 128 * 64
    assert parameter_counts(tied).by_role[Role.HEAD] == 0
    assert parameter_counts(free).scaling == parameter_counts(tied).scaling
    assert flops_per_token(free) == flops_per_token(tied)


def test_what_layers_share_is_computed_by_each() -> None:
    """A run of so many FLOPs took almost twice the steps where all layers had one MLP."""
    model = meta(replace(HAND, window_pattern="L", value_embeddings=False))
    apart, weights = flops_per_token(model), parameter_counts(model).total
    model.blocks[2].mlp = model.blocks[1].mlp
    model.blocks[1].attention = model.blocks[0].attention
    assert flops_per_token(model) == apart
    assert parameter_counts(model).total < weights


def test_only_matrices_of_gptlabs_attention_are_fused() -> None:
    """An own attention's layer of that name ended the first step in Muon, or was split into rows that mean nothing."""
    model = meta(HAND)
    model.blocks[1].attention = nn.ModuleDict({"qkv": Linear(64, 128, bias=False)})
    assert fused_rows(model) == {f"blocks.{layer}.attention.qkv.weight": (64, 32, 32) for layer in (0, 2)}


def test_gpt2_small() -> None:
    """GPT-2's 124,439,808 parameters: the published checkpoint, counted with its position table and tied head."""
    config = ModelConfig(
        n_layer=12,
        n_embd=768,
        n_head=12,
        seq_len=1024,
        vocab_size=50_257,
        vocab_multiple=1,
        norm="layernorm",
        position="learned",
        activation="gelu",
        bias=True,
        tied_head=True,
        qk_norm=False,
        value_embeddings=False,
        residual_lambdas=False,
        embedding_norm=False,
        logit_softcap=None,
        init="gpt2",
    )
    model = meta(config)
    assert parameter_counts(model).total == 124_439_808
    # Every matrix: 12 blocks of 12 C^2 weights, and the head.
    assert flops_per_token(model).matmul == 6 * (12 * 12 * 768**2 + 50_257 * 768)
    assert flops_per_token(model).attention == 12 * 12 * 768 * 1024


def test_measured_by_torch_s_own_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second opinion: the FLOPs that torch sees in forward and backward, up to what the conventions leave out."""
    from torch.utils.flop_counter import FlopCounterMode

    config = replace(HAND, window_pattern="L", n_kv_head=None)
    model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=0)
    monkeypatch.setattr(ops, "_fused", None)  # whose work it does not see
    tokens = torch.randint(0, 100, (3, config.seq_len))
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens).backward()
    # One block of queries covers a row this short, so the kernel computes the full square as the convention counts.
    # The first layer's inputs are embeddings, which need gradients too, so nothing is saved at the bottom.
    assert counter.get_total_flops() == flops_per_token(model).total * tokens.numel()
