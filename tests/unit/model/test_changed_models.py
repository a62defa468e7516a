"""What a Python caller changes of a model is what is computed, trained and sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.config.optim import AdamWConfig
from gptlab.model.changed import apply_change
from gptlab.model.gpt import GPT, MLP, Dropout, Linear, build_model
from gptlab.model.kernels import ops, torch_ops
from gptlab.model.kernels.fp8 import Fp8Linear
from gptlab.optim.adamw import AdamW, AdamWGroup

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    n_layer=2, n_embd=32, n_head=2, seq_len=600, vocab_size=50, norm="layernorm", position="learned", bias=False,
    qk_norm=False, residual_lambdas=False, activation="gelu", value_embeddings=True,
)  # fmt: skip


def built(**fields: Any) -> GPT:
    model = build_model(replace(CONFIG, **fields), device=CPU, compute_dtype=torch.float32, seed=1)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    return model


def tokens(count: int) -> Tensor:
    return torch.randint(50, (1, count), generator=torch.Generator().manual_seed(0))


class OwnMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


CHANGES: dict[str, Callable[[Any], object]] = {  # of a model, or of its first block
    "own kind": lambda model: setattr(model.blocks[0], "mlp", OwnMLP(CONFIG)),
    "own layer": lambda model: setattr(model.blocks[0].mlp, "up", nn.Linear(32, 128, bias=False)),
    "patched part": lambda model: setattr(model.blocks[0].mlp, "forward", lambda x: x),
    "patched table": lambda model: setattr(model.token_embedding, "forward", lambda tokens: torch.zeros(1, 1, 32)),
    "hook": lambda model: model.blocks[0].mlp.register_forward_hook(lambda *_: None),
    "narrower MLP": lambda model: setattr(model.blocks[0], "mlp", MLP(replace(CONFIG, mlp_ratio=2.0))),
    "scale": lambda model: setattr(model.blocks[0], "attention_scale", 0.5),
    "activation": lambda model: setattr(model.blocks[0].mlp, "activation", "relu2"),
    "norm": lambda model: setattr(model, "final_norm", nn.RMSNorm(32, eps=1e-5)),
    "bias of the head": lambda model: setattr(model.head, "bias", nn.Parameter(torch.ones(50))),
    "bias of a gate": lambda model: setattr(model.blocks[1].attention.value_gate, "bias", nn.Parameter(torch.ones(2))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_not_sampled_as_if_it_were_not(change: str) -> None:
    """What generates text reads weights and configuration, and a pruned MLP ended the process."""
    model = built()
    assert not model.is_changed()
    CHANGES[change](model)
    assert model.is_changed()


def test_a_hook_of_all_modules_and_a_patched_kind_change_it_too() -> None:
    model = built()
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert model.is_changed()
    with mock.patch.object(MLP, "forward", lambda self, x: x):
        assert model.is_changed()
    assert not model.is_changed()
    model.train().requires_grad_(False)
    assert not model.is_changed()


def test_products_in_8_bits_change_training_alone() -> None:
    model = built()
    for part in model.modules():
        if type(part) is Linear:
            part.__class__ = Fp8Linear
    assert not model.is_changed()


@pytest.mark.parametrize("name", ["blocks.0.mlp.up", "blocks.1.mlp.out", "head"])
@pytest.mark.parametrize("count", [100, 600])
def test_hooks_are_called_for_any_number_of_tokens(name: str, count: int) -> None:
    """Kernels took the layer's weight from so many positions on."""
    model, seen = built(), []
    model.get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    with torch.no_grad():
        model(tokens(count))
    assert seen == [name]


@pytest.mark.parametrize("name", ["blocks.0.mlp.up", "head"])
def test_a_layer_of_another_kind_is_called(name: str) -> None:
    class Negative(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    model, (owner, _, last) = built(), name.rpartition(".")
    with torch.no_grad():
        before = model(tokens(600))[:, :100]
        layer = Negative(*reversed(model.get_parameter(f"{name}.weight").shape), bias=False)
        layer.weight = model.get_submodule(name).weight  # type: ignore[assignment]
        setattr(model.get_submodule(owner), last, layer)
        long, short = model(tokens(600))[:, :100], model(tokens(600)[:, :100])
    torch.testing.assert_close(long, short, rtol=0, atol=1e-4)
    assert not torch.allclose(long, before, atol=1e-2)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("shape", [(), (32,)])
def test_a_scale_of_attention_may_be_learned(norm: Any, shape: tuple[int, ...]) -> None:
    """It had no gradient, and as a vector an error of PyTorch's."""
    model, found = built(norm=norm), []
    for block in model.blocks:
        block.attention_scale = nn.Parameter(torch.full(shape, 0.7))  # type: ignore[assignment]
    for implementation in (ops._fused, None):
        model.zero_grad()
        with mock.patch.object(ops, "_fused", implementation):
            model.loss(tokens(600), tokens(600)).backward()
        found.append([weight.grad for weight in model.parameters()])
    for by_kernels, by_torch in zip(*found, strict=True):
        assert by_kernels is not None
        torch.testing.assert_close(by_kernels, by_torch, rtol=1e-3, atol=1e-3)


def test_of_two_factors_one_may_be_learned() -> None:
    built()  # which loads the kernels
    x, y = (torch.randn(300, 32, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    learned = torch.tensor(0.3, requires_grad=True)
    for factors in ((learned, 0.5), (0.5, learned), (learned.view(1), learned.view(1))):
        results = []
        for by in (ops.implementation(x), torch_ops):
            _, normed = by.sum_and_rms_norm(x, y, *factors, 1e-5)
            results.append((normed, *torch.autograd.grad(normed[:, 0].sum(), learned)))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rate", [0, 1])
def test_rates_of_dropout_may_be_whole_numbers(rate: int) -> None:
    """The first rate of a process decided how later ones are read: it could end by 520 GB for threads."""
    built()  # which loads the kernels
    x = torch.ones(300, 32)
    assert torch.equal(Dropout(rate).train()(x), nn.Dropout(rate).train()(x))
    assert 0 < float((Dropout(0.5).train()(x) == 0).float().mean()) < 1


def changed_and_trained(change: Callable[[Any], object], name: str) -> Tensor:
    """The parameter of this name of a model that was changed so, after a step of AdamW that takes 0.1 off."""
    model = built()
    apply_change(model, change, 0, CPU)  # type: ignore[arg-type]
    weight = model.get_parameter(name)
    weight.grad = torch.ones_like(weight)
    AdamW([AdamWGroup({name: weight}, AdamWConfig(lr=0.1, weight_decay=0.0))]).step(1.0)
    return weight.detach()


def test_a_parameter_that_is_a_part_of_a_table_is_trained_alone() -> None:
    """AdamW took what lies in memory after its first number: half of it were columns that the model does not have."""
    table = torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    before = table.clone()
    name = "token_embedding.weight"
    weight = changed_and_trained(lambda m: setattr(m.token_embedding, "weight", nn.Parameter(table[:, :32])), name)
    assert torch.equal(table, before)
    torch.testing.assert_close(weight, before[:, :32] - 0.1)


def test_a_parameter_that_is_one_number_many_times() -> None:
    """AdamW wrote beyond its memory."""
    gain = nn.Parameter(torch.ones(1).expand(5000))
    weight = changed_and_trained(lambda m: setattr(m.blocks[0].mlp, "gain", gain), "blocks.0.mlp.gain")
    torch.testing.assert_close(weight, torch.full((5000,), 0.9))


def test_gradients_in_another_order_of_memory() -> None:
    weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(4)))
    exact = nn.Parameter(weight.detach().clone())
    config = AdamWConfig(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
    ours = AdamW([AdamWGroup({"w": weight}, config)])
    theirs = torch.optim.AdamW(
        [exact], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, foreach=False, fused=False
    )
    for step in range(3):
        exact.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        weight.grad = exact.grad.t().contiguous().t()
        ours.step(1.0)
        theirs.step()
    torch.testing.assert_close(weight.detach(), exact.detach())


@pytest.mark.parametrize("head", [Linear(32, 40, bias=False), Linear(16, 50, bias=False), Linear(32, 50)])
def test_a_head_by_which_the_loss_is_not_computed_is_refused(head: Linear) -> None:
    with pytest.raises(UserError, match="change_model made a head of"):
        apply_change(built(), lambda model: setattr(model, "head", head), 0, CPU)


@pytest.mark.parametrize("products", ["kernels", "library"])
def test_a_head_without_a_row_for_each_entry(products: Any) -> None:
    model = built()
    model.head = Linear(32, 40, bias=False)
    ops.multiply_by(products)
    with pytest.raises(ValueError, match="the head has 40 rows for 50 entries"):
        model.loss(tokens(600), tokens(600))
