"""Blocks computed in one call are those that their parts compute, and blocks of which that is not so are left to their
parts."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gptlab
from gptlab.config.model import ModelConfig
from gptlab.model.gpt import GPT, MLP, Block, LayerNorm, Linear, RMSNorm, build_model
from gptlab.model.kernels import blocks, ops
from gptlab.model.kv_cache import KVCache
from gptlab.runtime.hardware.device import compiler_available

CPU = torch.device("cpu")
GATED = ModelConfig(
    n_layer=3, n_embd=64, n_head=4, n_kv_head=2, seq_len=80, vocab_size=50, position="rope", qk_norm=True,
    window_pattern="SL", value_embeddings=True, residual_lambdas=True, logit_softcap=15.0,
)  # fmt: skip
CLASSIC = ModelConfig(
    n_layer=2, n_embd=32, n_head=2, seq_len=80, vocab_size=50, norm="layernorm", position="learned", bias=False,
    qk_norm=False, residual_lambdas=False, activation="gelu", value_embeddings=False, tied_head=True,
)  # fmt: skip
MODELS = {
    "gated": GATED,
    "classic": CLASSIC,
    "key offset": replace(GATED, key_offset=True, value_embeddings=False),
    "scaled attention": replace(
        CLASSIC, norm="rmsnorm", attention_residual_scale=0.3, position="rope", activation="relu2"
    ),
}

pytestmark = pytest.mark.skipif(not compiler_available(CPU), reason="no C++ compiler here")


def built(config: ModelConfig, dtype: torch.dtype = torch.float32) -> GPT:
    model = build_model(config, device=CPU, compute_dtype=dtype, seed=1)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):  # none is zero, as some are at first
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    return model


def tokens(rows: int = 4) -> Tensor:
    return torch.randint(50, (rows, 80), generator=torch.Generator().manual_seed(0))


def in_one_call(compute: Callable[[], object]) -> bool:
    """Whether all blocks are computed so."""
    with mock.patch.object(blocks, "_Blocks", wraps=blocks._Blocks) as whole:
        compute()
    return bool(whole.apply.called)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_bits_are_those_of_the_parts(kind: str, dtype: torch.dtype) -> None:
    """A hook, or activation checkpointing, changes no bit."""
    model, found = built(MODELS[kind], dtype), []
    for hooks in (False, True):
        model.zero_grad()
        if hooks:
            model.blocks[0].get_submodule("mlp").register_forward_hook(lambda *_: None)
        assert in_one_call(lambda: model.loss(tokens(), tokens().roll(-1, 1)).backward()) == (not hooks)
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, whole in found[0].items():
        apart = found[1][name]
        assert whole is not None
        assert apart is not None
        assert torch.equal(whole, apart), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gated", "classic"])
def test_bits_do_not_depend_on_the_number_of_threads(kind: str, dtype: torch.dtype) -> None:
    model, found = built(MODELS[kind], dtype), []
    threads = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            model.zero_grad()
            assert in_one_call(lambda: model.loss(tokens(12), tokens(12).roll(-1, 1)).backward())
            found.append([weight.grad for weight in model.parameters()])
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        assert one is not None
        assert three is not None
        assert torch.equal(one, three)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gated", "classic"])
def test_validation_computes_the_same_in_less_memory(kind: str, dtype: torch.dtype) -> None:
    """It took that of a training step, for all blocks at once."""
    model = built(replace(MODELS[kind], n_layer=7), dtype)
    expected = model.hidden(tokens()).detach()
    with mock.patch.object(blocks, "_layout", side_effect=blocks._layout) as layout, torch.no_grad():
        assert in_one_call(lambda: model(tokens()))
        assert torch.equal(model.hidden(tokens()), expected)
    context, *others = layout.call_args.args
    without, _ = blocks._layout(context, *others)
    context.keeps = True
    assert without < blocks._layout(context, *others)[0] / 3


def test_activation_checkpointing_and_second_derivatives() -> None:
    """Checkpointing saves other tensors than the function does."""
    model = built(GATED)
    x0 = torch.randn(4, 80, 64, generator=torch.Generator().manual_seed(5), requires_grad=True)

    def hidden(x0: Tensor) -> Tensor:
        return model.hidden(tokens(), embed=lambda *_: x0)

    gradients = []
    for call in (hidden, partial(torch.utils.checkpoint.checkpoint, hidden, use_reentrant=False)):
        used = [x0, *model.blocks.parameters(), model.residual_lambdas, model.x0_lambdas]
        gradients.append(torch.autograd.grad(call(x0).square().sum(), used))
    assert in_one_call(lambda: hidden(x0))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    (first,) = torch.autograd.grad(hidden(x0).square().sum(), x0, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_gradients_of_two_passes_add_up() -> None:
    model, found = built(GATED), []
    for retained in (False, True):
        model.zero_grad()
        loss = model.loss(tokens(), tokens())
        loss.backward(retain_graph=retained)
        if retained:
            loss.backward()
        found.append([weight.grad for weight in model.parameters()])
    for once, twice in zip(*found, strict=True):
        assert once is not None
        assert twice is not None
        assert torch.equal(2 * once, twice)


def test_the_text_that_the_kernel_was_written_for() -> None:
    """Whoever changes how a block is computed has the kernel compute that too, and then names the text here."""
    digits = hashlib.sha256(blocks.computed_text(GPT).encode()).hexdigest()[:16]
    assert digits == blocks.WRITTEN_FOR, f"once block_kernel.cpp computes the same: WRITTEN_FOR = {digits!r}"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("gpt.py", "mlp(x, self.up, ACTIVATIONS[self.activation], self.out)", "self.out(self.up(x).sin())"),
        ("gpt.py", "x + self.dropout(self.mlp(normed))", "x - self.dropout(self.mlp(normed))"),
        ("gpt.py", "y = self.dropout(self.attention(", "y = 2 * self.dropout(self.attention("),
        ("kernels/ops.py", "F.linear(x, weight.to(x.dtype)", "2 * F.linear(x, weight.to(x.dtype)"),
        ("kernels/fused.py", 'relu2" or "gelu', 'relu2" and "gelu'),
    ],
)
def test_who_edits_the_text_gets_what_it_says(file: str, old: str, new: str, tmp_path: Path) -> None:
    """An edited MLP had no effect on a CPU."""
    shutil.copytree(Path(gptlab.__file__).parent, tmp_path / "gptlab")
    edited = tmp_path / "gptlab/model" / file
    text = edited.read_text(encoding="utf-8")
    assert text.count(old) == 1
    edited.write_text(text.replace(old, new), encoding="utf-8")
    program = "from gptlab.model import gpt; from gptlab.model.kernels import blocks as b"
    program += "; assert not b._is_written_for(gpt.GPT)"
    subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )


def hooked(name: str, kind: str) -> Callable[[Block], object]:
    return lambda one: getattr(one.get_submodule(name), f"register_{kind}")(lambda *_: None)


class OwnMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class OwnBlock(Block):
    pass


class OwnAttention(nn.Module):
    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x


def set_part(path: str, part: object) -> Callable[[Block], None]:
    owner, _, name = path.rpartition(".")
    return lambda one: setattr(one.get_submodule(owner), name, part)


def outside_modules(path: str, instead: object = None) -> Callable[[Block], None]:
    """What PyTorch keeps among parameters or modules becomes an attribute like others, as with flat parameters of FSDP:
    `instead`, or the same tensor."""

    def change(one: Block) -> None:
        owner, _, name = path.rpartition(".")
        was = getattr(one.get_submodule(owner), name)
        delattr(one.get_submodule(owner), name)
        setattr(one.get_submodule(owner), name, was.detach().clone() if instead is None else instead)

    return change


CHANGES: dict[str, Callable[[Block], object]] = {
    "hooked": hooked("mlp", "forward_hook"),
    "hooked before": hooked("attention.qkv", "forward_pre_hook"),
    "hooked backward": hooked("attention", "full_backward_hook"),
    "hooked norm": hooked("mlp_norm", "forward_hook"),
    "hooked dropout": hooked("dropout", "forward_hook"),
    "own forward": lambda one: setattr(one.mlp, "forward", lambda x: x),
    "patched": lambda one: mock.patch.object(MLP, "forward", lambda self, x: x).start(),
    "own block": lambda one: setattr(one, "__class__", OwnBlock),
    "patched activation": lambda one: mock.patch.dict(ops.ACTIVATIONS, {"gelu": torch.sin}).start(),
    "own part": set_part("mlp", OwnMLP(CLASSIC)),
    "own part without parts": set_part("mlp", nn.Identity()),
    "own attention without parts": set_part("attention", OwnAttention()),
    "own layer": set_part("attention.out", nn.Linear(32, 32, bias=False)),
    "bias": lambda one: setattr(one.mlp.up, "bias", nn.Parameter(torch.ones(128))),
    "other norm": set_part("mlp_norm", RMSNorm(1e-5)),
    "other eps": lambda one: setattr(one.mlp_norm, "eps", 0.1),
    "other activation": lambda one: setattr(one.mlp, "activation", "gelu_tanh"),
    "rounded weight": lambda one: setattr(one.mlp.up, "weight", nn.Parameter(one.mlp.up.weight.bfloat16())),
    "transposed weight": lambda one: setattr(
        one.mlp.up, "weight", nn.Parameter(one.mlp.up.weight.t().contiguous().t())
    ),
    "own attention": lambda one: setattr(one.attention, "attend", lambda heads, n_head, *_: heads[:, :, :n_head]),
    "no norm's weight": set_part("attention_norm", LayerNorm(32, elementwise_affine=False)),
    "dropout": set_part("dropout", nn.Dropout(0.5)),
    "dropout of weights": lambda one: setattr(one.attention, "dropout", 0.5),
    "compiled": lambda one: one.compile(backend="eager"),
    **{f"{path} elsewhere": outside_modules(path) for path in (
        "attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.out.weight", "mlp_norm.weight",
    )},
    "bias elsewhere": lambda one: (delattr(one.mlp.up, "bias"), setattr(one.mlp.up, "bias", torch.ones(128))),
    "norm's bias elsewhere": lambda one: (delattr(one.mlp_norm, "bias"), setattr(one.mlp_norm, "bias", torch.ones(32))),
    "function for a layer": outside_modules("attention.out", lambda y: y),
    "function for a part": outside_modules("mlp", lambda x: x),
    "function for no dropout": outside_modules("dropout", lambda x: x),
    "norm of heads elsewhere": set_part("attention.qk_norm", SimpleNamespace(eps=1e-5)),
    "layer for a part": set_part("mlp", Linear(32, 32, bias=False)),
    "norm for a layer": set_part("attention.out", RMSNorm(1e-5)),
    "part for no dropout": set_part("dropout", RMSNorm(1e-5)),
    "scale that is trained": lambda one: setattr(one, "attention_scale", torch.ones((), requires_grad=True)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_computed_part_by_part(change: str) -> None:
    """Whatever its parts make of it."""
    model = built(CLASSIC)
    CHANGES[change](model.blocks[0])  # type: ignore[arg-type]
    found: list[Any] = []

    def compute() -> None:
        try:
            found.append(model.loss(tokens(), tokens()))
        except AttributeError:
            found.append(None)

    try:
        assert not in_one_call(compute)
    finally:
        mock.patch.stopall()
    assert (found[0] is None) == (change == "no norm's weight")


def test_blocks_of_a_callers_own() -> None:
    model = built(CLASSIC)
    model.blocks[1] = OwnAttention()
    assert not in_one_call(lambda: model(tokens()))
    model = built(GATED)
    model.blocks = model.blocks[:2]  # fewer than there are weights of the residual stream
    assert not in_one_call(lambda: model.loss(tokens(), tokens()).backward())
    model = built(CLASSIC)
    assert in_one_call(lambda: model(tokens()))
    model.blocks[1].mlp.up.weight = model.blocks[0].mlp.up.weight  # type: ignore[union-attr]
    assert not in_one_call(lambda: model(tokens()))


def test_another_norm_in_a_later_block() -> None:
    """Its two moments a row had the room of one."""
    model, found = built(replace(CLASSIC, norm="rmsnorm", position="rope")), []
    later: Any = model.blocks[-1]
    later.attention_norm, later.mlp_norm = LayerNorm(32, eps=1e-6), LayerNorm(32, eps=1e-6)
    for apart in (False, True):
        model.zero_grad()
        with mock.patch.object(blocks, "hidden", return_value=None) if apart else nullcontext():
            model.loss(tokens(), tokens().roll(-1, 1)).backward()
        found.append([weight.grad for weight in model.parameters()])
    for whole, by_parts in zip(*found, strict=True):
        assert whole is not None
        assert by_parts is not None
        assert torch.equal(whole, by_parts)


def test_hooks_of_all_modules() -> None:
    model, seen = built(CLASSIC), []
    with nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1)):
        assert not in_one_call(lambda: model(tokens()))
    assert len(seen) > len(model.blocks)


def test_saved_tensor_hooks_that_change_what_is_kept() -> None:
    """The gradients were NaN."""
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x if x.dtype == torch.int64 else x.half(), lambda x: x if x.dtype == torch.int64 else x.float()
    ):
        loss = built(CLASSIC).loss(tokens(), tokens())
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            loss.backward()


def test_dropout_is_none_in_evaluation() -> None:
    model = built(replace(CLASSIC, dropout=0.3))
    assert not in_one_call(lambda: model(tokens()))
    model.eval()
    assert in_one_call(lambda: model(tokens()))
    for drops in (model.blocks[0].dropout, model.blocks[0].attention):
        assert isinstance(drops, nn.Module)
        drops.train()  # for several answers to one question
        assert not in_one_call(lambda: model(tokens()))
        drops.eval()
    assert in_one_call(lambda: model(tokens()))
    model.blocks[0].dropout = nn.Dropout(0.3)  # a caller's, which may be of any kind
    assert not in_one_call(lambda: model(tokens()))


def test_no_table_is_looked_up_twice() -> None:
    """Where the last block is computed part by part, values of the first ones were looked up in vain."""
    for change in (hooked("mlp", "forward_hook"), set_part("attention.value_gate", None)):
        model = built(GATED)
        change(model.blocks[2])  # type: ignore[arg-type]
        with mock.patch.object(model, "look_up", wraps=model.look_up) as look_up:
            model(tokens())
        assert look_up.call_count == len(model.value_embeddings)


def test_what_only_the_parts_take() -> None:
    model = built(GATED)
    assert in_one_call(lambda: model(tokens()))
    assert not in_one_call(lambda: model(tokens(3)))  # fewer than 256 positions
    cache = KVCache(model.config, 4, 80, CPU, torch.float32)
    with torch.no_grad():
        assert not in_one_call(lambda: model(tokens(), cache=cache))
    assert not in_one_call(lambda: model.hidden(tokens(), blocks=list(model.blocks)))
    assert not in_one_call(lambda: model.hidden(tokens(), look_up=model.look_up))
    ops.multiply_by("library")
    assert not in_one_call(lambda: model(tokens()))
    ops.multiply_by("kernels")
    with mock.patch.object(model, "look_up", lambda table, tokens: table(tokens).bfloat16()):
        assert not in_one_call(lambda: model(tokens()))
    model.cos, model.sin = model.cos.double(), model.sin.double()
    assert not in_one_call(lambda: model(tokens()))
    model = built(replace(CLASSIC, residual_lambdas=True))
    assert not in_one_call(lambda: model(tokens()))  # no lineage has LayerNorm with weights of the residual stream
