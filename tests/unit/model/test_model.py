"""The model against `oracle_model`, part by part and mixed; its initial weights; what must not influence what."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import oracle_model
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gptlab.config.model import ModelConfig
from gptlab.config.optim import Role
from gptlab.model.attention import apply_rotary, rotary_tables
from gptlab.model.counting import fused_rows, parameter_roles
from gptlab.model.gpt import GPT, RMSNorm, build_model

CPU = torch.device("cpu")
PLAIN = ModelConfig(
    n_layer=2,
    n_embd=24,
    n_head=4,
    seq_len=12,
    vocab_size=19,
    vocab_multiple=8,
    norm="layernorm",
    position="learned",
    activation="gelu",
    qk_norm=False,
    value_embeddings=False,
    residual_lambdas=False,
    embedding_norm=False,
    logit_softcap=None,
)

# Each part alone, on top of the plainest model.
PARTS = {
    "plain": {},
    "rmsnorm": {"norm": "rmsnorm"},
    "rmsnorm with a large eps": {"norm": "rmsnorm", "rmsnorm_eps": 0.1},
    "rope": {"position": "rope"},
    "rope base": {"position": "rope", "rope_base": 100.0},
    "relu2": {"activation": "relu2"},
    "gelu by tanh": {"activation": "gelu_tanh"},
    "bias": {"bias": True},
    "tied head": {"tied_head": True},
    "qk norm": {"qk_norm": True},
    "key offset": {"position": "rope", "key_offset": True},
    "key offset without rotary, grouped": {"key_offset": True, "n_kv_head": 2, "window_pattern": "S"},
    "qk norm with a large eps": {"qk_norm": True, "rmsnorm_eps": 0.1},
    "grouped queries": {"n_kv_head": 2},
    "one key-value head": {"n_kv_head": 1},
    "windows": {"n_layer": 4, "window_pattern": "SSSL", "window_tokens": 5},
    "default window": {"n_layer": 3, "window_pattern": "S"},
    "value embeddings": {"n_layer": 3, "value_embeddings": True},
    "value embeddings, grouped": {"value_embeddings": True, "n_kv_head": 2},
    "value gate of 32 channels": {"value_embeddings": True, "n_embd": 40, "n_layer": 1},
    "lambdas": {"residual_lambdas": True},
    "embedding norm": {"embedding_norm": True},
    "softcap": {"logit_softcap": 2.0},
    "no padding": {"vocab_multiple": 1},
    "scaled attention": {"attention_residual_scale": 0.3},
    "narrow mlp": {"mlp_ratio": 1.5},
    "one layer": {"n_layer": 1},
}
# Whole lineages: nanoGPT, the speedrun (modded-nanogpt), autoresearch and nanochat.
LINEAGES = {
    "nanogpt": {"bias": True, "tied_head": True},
    "speedrun": {
        "norm": "rmsnorm",
        "position": "rope",
        "qk_norm": False,
        "tied_head": True,
        "attention_residual_scale": 1 / math.sqrt(4),
    },
    "nanochat": {
        "n_layer": 5,
        "n_embd": 40,
        "n_kv_head": 2,
        "norm": "rmsnorm",
        "position": "rope",
        "activation": "relu2",
        "qk_norm": True,
        "value_embeddings": True,
        "residual_lambdas": True,
        "embedding_norm": True,
        "logit_softcap": 15.0,
        "window_pattern": "SSSL",
    },
}
# Choices drawn at random, so that parts meet in combinations that nobody thought of.
CHOICES: dict[str, tuple[object, ...]] = {
    "n_layer": (1, 2, 3),
    "n_kv_head": (1, 2, 4),
    "norm": ("rmsnorm", "layernorm"),
    "position": ("rope", "learned"),
    "activation": ("relu2", "gelu", "gelu_tanh"),
    "bias": (False, True),
    "tied_head": (False, True),
    "qk_norm": (False, True),
    "window_pattern": ("L", "S", "SL"),
    "window_tokens": (None, 1, 4, 11),
    "value_embeddings": (False, True),
    "residual_lambdas": (False, True),
    "embedding_norm": (False, True),
    "logit_softcap": (None, 1.5),
    "attention_residual_scale": (None, 0.5),
    "key_offset": (False, True),
}


def mixed(seed: int) -> dict[str, object]:
    dice = random.Random(seed)
    return {name: dice.choice(values) for name, values in CHOICES.items()}


CASES = PARTS | LINEAGES | {f"mixed {seed}": mixed(seed) for seed in range(12)}


def shaken(config: ModelConfig, dtype: torch.dtype = torch.float64) -> GPT:
    """A model whose every weight matters: fresh ones have zero projections, gates and biases."""
    model = build_model(config, device=CPU, compute_dtype=dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def rows(config: ModelConfig, n_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (2, n_tokens or config.seq_len)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    targets = torch.randint(-1, config.vocab_size, shape, generator=generator)
    targets[0, 0] = -1
    return tokens, targets


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_the_oracle(case: str) -> None:
    """Both compute in float64, where a few thousand roundings of 1e-16 stay far below 1e-10."""
    config = replace(PLAIN, **CASES[case])  # type: ignore[arg-type]
    model = shaken(config)
    tokens, targets = rows(config)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = oracle_model.loss(config, weights, tokens, targets)

    assert model(tokens).dtype == torch.float64
    torch.testing.assert_close(model(tokens), oracle_model.logits(config, weights, tokens), rtol=1e-10, atol=1e-10)
    actual = model.loss(tokens, targets)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)

    actual.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rmsnorm_is_pytorchs_where_eps_is_left_to_it(dtype: torch.dtype) -> None:
    """torch 2.9 and later add float32's epsilon in all three types (not the type's own, 0.0078 for bfloat16). Values
    whose mean square is a hundredth of it to a million times it: each result is at most two roundings off."""
    norm = RMSNorm(ModelConfig().rmsnorm_eps)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for size in (3e-5, 3e-4, 3e-3, 0.3):
        scaled = (size * x).to(dtype)
        expected = F.rms_norm(scaled, (64,))
        torch.testing.assert_close(norm(scaled), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("case", ["nanogpt", "speedrun", "nanochat"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.25)])
def test_lower_precision_stays_near_the_oracle(case: str, dtype: torch.dtype, tolerance: float) -> None:
    """Logits of size about 3 behind 10 to 30 roundings of 1e-7 (float32) or 4e-3 (bfloat16), errors adding up."""
    config = replace(PLAIN, **CASES[case])  # type: ignore[arg-type]
    model = shaken(config, dtype)
    tokens, _ = rows(config)
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    assert all(p.dtype == torch.float32 for p in model.parameters())
    logits = model(tokens)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), oracle_model.logits(config, weights, tokens), rtol=0, atol=tolerance)


@pytest.mark.parametrize("n_tokens", [1, 2, 7])
def test_rows_shorter_than_the_context(n_tokens: int) -> None:
    config = replace(PLAIN, **CASES["nanochat"])  # type: ignore[arg-type]
    model = shaken(config)
    tokens, _ = rows(config, n_tokens)
    expected = oracle_model.logits(config, dict(model.named_parameters()), tokens)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_positions_beyond_the_context_are_refused(position: str) -> None:
    model = shaken(replace(PLAIN, position=position))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="context"):
        model(torch.zeros(1, PLAIN.seq_len + 1, dtype=torch.int64))


def test_a_token_changes_no_logits_before_it() -> None:
    config = replace(PLAIN, **CASES["nanochat"])  # type: ignore[arg-type]
    model = shaken(config)
    tokens, _ = rows(config)
    before = model(tokens)
    for position in range(config.seq_len):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % config.vocab_size
        after = model(changed)
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position], before[:, position])


def test_padding_of_the_vocabulary_is_invisible() -> None:
    config = replace(PLAIN, vocab_multiple=64)
    model = shaken(config)
    tokens, targets = rows(config)
    logits, loss = model(tokens), model.loss(tokens, targets)
    assert logits.shape == (2, config.seq_len, 19)
    loss.backward()
    assert model.head.weight.shape[0] == 64
    assert torch.count_nonzero(model.head.weight.grad[19:]) == 0
    with torch.no_grad():
        model.head.weight[19:] = 1e3
    assert torch.equal(model(tokens), logits)
    assert torch.equal(model.loss(tokens, targets), loss)


def test_softcap_by_hand() -> None:
    """A head of zeros but for one row: cap * tanh(z / cap), and 0 for the rest."""
    config = replace(PLAIN, logit_softcap=2.0)
    model = shaken(config)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.weight[5] = 100.0 * model.final_norm.weight
    logits = model(rows(config)[0])
    assert logits.abs().max() <= 2.0
    assert torch.count_nonzero(logits[..., :5]) == 0
    assert (logits[..., 5].abs() > 1.99).any()


def test_rotation_by_hand() -> None:
    """Width 4, base 100: pair 0 turns by 1 radian a position, pair 1 by a tenth, both backwards."""
    cos, sin = rotary_tables(3, 4, 100.0, torch.float64)
    x = torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=torch.float64).expand(1, 3, 1, 4)  # pairs (1, 0) and (2, 0)
    turned = apply_rotary(x, cos, sin)[0, :, 0]
    for t in range(3):
        expected = [math.cos(t), 2 * math.cos(0.1 * t), -math.sin(t), -2 * math.sin(0.1 * t)]
        torch.testing.assert_close(turned[t], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


def test_rotated_halves_are_joined_in_the_compute_type() -> None:
    """What is joined may be kept for the backward pass: in float32, it takes twice the memory."""
    cos, sin = rotary_tables(3, 4, 100.0, torch.float32)
    graph = make_fx(apply_rotary, tracing_mode="fake")(torch.zeros(1, 3, 2, 4, dtype=torch.bfloat16), cos, sin).graph
    (joined,) = graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert joined.meta["val"].dtype == torch.bfloat16


def test_rotated_scores_depend_on_the_distance_only() -> None:
    cos, sin = rotary_tables(40, 8, 10_000.0, torch.float64)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    turned_q, turned_k = (apply_rotary(x.expand(1, 40, 1, 8), cos, sin)[0, :, 0] for x in (q, k))
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 13):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-12)


def test_a_tied_head_is_the_embedding() -> None:
    config = replace(PLAIN, tied_head=True)
    for dtype in (torch.float32, torch.float64):
        model = build_model(config, device=CPU, compute_dtype=dtype, seed=1)
        assert model.head.weight is model.token_embedding.weight
        assert Role.HEAD not in parameter_roles(model).values()


class TestDropout:
    config = replace(PLAIN, dropout=0.5, position="rope")

    def test_is_off_in_evaluation_mode(self) -> None:
        model, (tokens, _) = shaken(self.config).eval(), rows(self.config)
        assert torch.equal(model(tokens), shaken(replace(self.config, dropout=0.0))(tokens))

    def test_draws_from_the_generator_that_is_seeded(self) -> None:
        model, (tokens, _) = shaken(self.config).train(), rows(self.config)
        draws = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            draws.append(model(tokens))
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])

    @pytest.mark.parametrize("part", ["embedding", "attention weights", "attention branch", "mlp branch"])
    def test_reaches_every_place(self, part: str) -> None:
        """With all other places silenced, the one that is left still makes two passes differ."""
        model, (tokens, _) = shaken(self.config).train(), rows(self.config)
        block = model.blocks[0]
        if part != "embedding":
            model.dropout.p = 0.0
        for other in model.blocks:
            if part != "attention weights":
                other.attention.dropout = 0.0
            other.dropout.p = 0.5 if part.endswith("branch") else 0.0
        with torch.no_grad():
            for other in model.blocks:
                if part == "attention branch":  # the MLP then adds nothing that could be dropped
                    other.mlp.out.weight.zero_()
                if part == "mlp branch":
                    other.attention.out.weight.zero_()
        torch.manual_seed(0)
        assert block.dropout.p == (0.5 if part.endswith("branch") else 0.0)
        assert not torch.equal(model(tokens), model(tokens))


class TestInitialWeights:
    wide = ModelConfig(n_layer=4, n_embd=256, n_head=4, seq_len=64, vocab_size=512, bias=True, norm="layernorm")

    def build(self, seed: int = 7, **changes: object) -> dict[str, Tensor]:
        config = replace(self.wide, **changes)  # type: ignore[arg-type]
        return dict(build_model(config, device=CPU, compute_dtype=torch.float32, seed=seed).named_parameters())

    def test_nanochat(self) -> None:
        """The standard deviation of n draws has a relative error of about 1 / sqrt(2 n): here 4 sigma are under 2%."""
        weights = self.build()
        bound = math.sqrt(3 / 256)
        for name, weight in weights.items():
            if name.endswith(("out.weight", "bias", "value_gate.weight")):
                assert torch.count_nonzero(weight) == 0, name
            elif name.endswith("norm.weight") or name == "residual_lambdas":
                assert (weight == 1).all(), name
            elif name == "x0_lambdas":
                assert (weight == 0.1).all()
            elif name in ("token_embedding.weight", "head.weight"):
                assert weight.std().item() == pytest.approx(1.0 if "token" in name else 0.001, rel=0.02)
            else:
                assert weight.std().item() == pytest.approx(1 / 16, rel=0.02), name
                assert bound * 0.99 < weight.abs().max() <= bound, name

    def test_gpt2(self) -> None:
        weights = self.build(init="gpt2", position="learned", value_embeddings=False, residual_lambdas=False)
        for name, weight in weights.items():
            if name.endswith("norm.weight"):
                assert (weight == 1).all(), name
            elif name.endswith("bias"):
                assert torch.count_nonzero(weight) == 0, name
            else:
                expected = 0.02 / math.sqrt(2 * 4) if name.endswith("out.weight") else 0.02
                assert weight.std().item() == pytest.approx(expected, rel=0.03), name
                assert abs(weight.mean().item()) < 5 * expected / math.sqrt(weight.numel()), name

    def test_a_fresh_model_predicts_almost_uniformly(self) -> None:
        for changes in ({}, {"tied_head": True}, {"init": "gpt2"}, {"init": "gpt2", "tied_head": True}):
            config = replace(self.wide, **changes)  # type: ignore[arg-type]
            model = build_model(config, device=CPU, compute_dtype=torch.float32, seed=0)
            tokens = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))
            assert model.loss(tokens, tokens.roll(1)).item() / 128 == pytest.approx(math.log(512), abs=0.3)

    def test_depends_on_the_seed_alone(self) -> None:
        torch.manual_seed(1)
        first = self.build(seed=7)
        state = torch.get_rng_state()
        second, third = self.build(seed=7), self.build(seed=8)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not torch.equal(first["blocks.0.mlp.up.weight"], third["blocks.0.mlp.up.weight"])
        assert not torch.equal(first["blocks.0.mlp.up.weight"], first["blocks.1.mlp.up.weight"])

    def test_shared_parts_of_two_configurations_start_alike(self) -> None:
        with_values, without = self.build(), self.build(value_embeddings=False)
        assert all(torch.equal(with_values[name], weight) for name, weight in without.items())


def test_roles() -> None:
    config = replace(PLAIN, **CASES["value embeddings"], residual_lambdas=True, bias=True)  # type: ignore[arg-type]
    model = build_model(config, device=CPU, compute_dtype=torch.float32, seed=0)
    roles = parameter_roles(model)
    assert roles.keys() == dict(model.named_parameters()).keys()
    expected = {
        "token_embedding.weight": Role.EMBEDDING,
        "position_embedding.weight": Role.POSITION_EMBEDDING,
        "value_embeddings.2.weight": Role.VALUE_EMBEDDING,
        "head.weight": Role.HEAD,
        "residual_lambdas": Role.RESIDUAL_LAMBDA,
        "x0_lambdas": Role.X0_LAMBDA,
        "final_norm.weight": Role.VECTOR,
        "blocks.1.attention_norm.bias": Role.VECTOR,
        "blocks.0.attention.qkv.bias": Role.VECTOR,
        "blocks.0.attention.qkv.weight": Role.MATRIX,
        "blocks.0.attention.value_gate.weight": Role.MATRIX,
        "blocks.2.mlp.out.weight": Role.MATRIX,
    }
    assert {name: roles[name] for name in expected} == expected
    assert "value_embeddings.1.weight" not in roles
    sizes = {name: model.get_parameter(name).shape[0] for name in fused_rows(model)}
    assert {name: sum(parts) for name, parts in fused_rows(model).items()} == sizes
