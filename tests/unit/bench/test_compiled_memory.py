"""Memory of compiled passes: against models of compiled blocks, by torch's partitioner, run on the meta device."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from gptlab.bench import compiled_memory
from gptlab.bench.compiled_memory import WORKSPACE, PassMemory, pass_memory, peak_bytes
from gptlab.bench.memory import activations_of_rows, count_memory, model_on_meta
from gptlab.bench.plan import figures, make_plan
from gptlab.cli.plan import _activations
from gptlab.config.load import apply_overrides
from gptlab.config.model import GPT2_SIZES, ModelConfig
from gptlab.config.recipes import configure
from gptlab.config.recipes.nanochat import nanochat
from gptlab.config.run import BatchConfig, RunConfig
from gptlab.model import head
from gptlab.model.gpt import GPT
from gptlab.model.kernels import fp8
from gptlab.model.kernels.fp8 import Fp8Linear, use_fp8
from gptlab.runtime.hardware.peak import Peak
from gptlab.runtime.hardware.place import Place
from gptlab.training import captured_steps
from gptlab.training.parallel.strategy import whole_optimizer

SLICES = 4  # of the head, instead of 16: its graph takes longest
ROWS = 32
# Two layers of nanochat's depth 20, and of GPT-2.
WIDE = replace(nanochat(depth=20).model, n_layer=2, vocab_size=2**15)
SMALL_GPT2 = replace(GPT2_SIZES["gpt2"], n_layer=2)


def tiny() -> RunConfig:
    """A run whose memory takes no time to count."""
    return apply_overrides(configure("nanochat-tiny"), {"model.vocab_size": 512, "model.n_layer": 1})


def on_meta(config: ModelConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config, torch.bfloat16, "cuda")


class Part(Module):
    """A module whose forward is some function of another."""

    def __init__(self, module: Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *arguments: Any) -> Tensor:
        return self.function(self.module, *arguments)


def in_graphs(module: Module, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, partitioned as torch.compile does it, then run one operation after the other."""
    part = Part(module, function)
    own = dict([*part.named_parameters(), *part.named_buffers()])

    def interpreted(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(arguments: list[Any]) -> Any:
            return fx.Interpreter(graph).boxed_run(arguments)  # frees each after its last use

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def pure(values: Sequence[Tensor], *arguments: Any) -> Any:
        return functional_call(part, dict(zip(own, values, strict=True)), arguments)

    run = aot_function(pure, interpreted, interpreted, partition_fn=min_cut_rematerialization_partition)
    return lambda *arguments: run(list(own.values()), *arguments)


class Compiled:
    """The loss of a model whose blocks, embedding and head are graphs of their own, as in training."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.tokens = torch.zeros(ROWS, model.config.seq_len, dtype=torch.int64, device="meta")
        self._blocks = [in_graphs(block, type(block).__call__) for block in model.blocks]
        self._embed, self._head_loss = in_graphs(model, GPT.embed), in_graphs(model, GPT.head_loss)
        self.loss()

    def loss(self) -> Tensor:
        return self._head_loss(self.model.hidden(self.tokens, self._blocks, self._embed), self.tokens)

    @property
    def resident(self) -> set[int]:
        own = (*self.model.parameters(), *self.model.buffers(), self.tokens)
        return {tensor.untyped_storage()._cdata for tensor in own}

    def kept(self) -> int:
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = self.loss()
        del loss
        return sum(storage.nbytes() for key, storage in storages.items() if key not in self.resident)


class LiveStorages(TorchDispatchMode):
    """The most bytes in storages that are alive at one time."""

    def __init__(self, resident: set[int]) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._resident, self._known = resident, dict[int, weakref.ref[torch.UntypedStorage]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, Tensor):
                self._note(one.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._resident or (key in self._known and self._known[key]() is storage):
            return
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

        def freed(_: object) -> None:
            self.bytes -= size

        self._known[key] = weakref.ref(storage, freed)


@pytest.fixture(autouse=True)
def few_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (head, fp8, compiled_memory):
        monkeypatch.setattr(module, "MAX_SLICES", SLICES)


@pytest.mark.parametrize(
    ("config", "in_fp8", "near"),
    [(WIDE, False, 0.001), (replace(WIDE, n_layer=1), True, 0.001), (SMALL_GPT2, False, 0.03)],
    ids=["nanochat", "fp8", "gpt2"],
)
def test_blocks_and_head_keep_what_the_model_keeps(config: ModelConfig, in_fp8: bool, near: float) -> None:
    """Of GPT-2, the last LayerNorm keeps its input in float32, where the graph does not say what LayerNorm is made of:
    2.4% of two layers."""
    model = on_meta(config)
    if in_fp8:
        use_fp8(model)
    memory = pass_memory(model, ROWS)
    assert memory is not None
    assert memory.kept == pytest.approx(Compiled(model).kept(), rel=near)


def test_peaks_of_two_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every storage that is alive, not fused, as an interpreter of the graphs runs them; beside the first one's
    gradients, those of a block at a time. Of so few logits the head's part does not show, but for its norm, which is
    not fused here: two streams in float32, 4% of the forward pass."""
    monkeypatch.setattr(compiled_memory, "peak_bytes", partial(peak_bytes, fused=False))
    model = on_meta(replace(WIDE, vocab_size=512))
    memory, compiled, peaks = pass_memory(model, ROWS), Compiled(model), list[int]()
    assert memory is not None
    with LiveStorages(compiled.resident) as live:
        for _ in range(2):
            earlier = live.peak = live.bytes
            loss = compiled.loss()
            peaks.append(live.peak - earlier)
            live.peak = live.bytes
            loss.backward()
            peaks.append(live.peak - earlier)
    first_forward, first_backward, forward, backward = peaks
    assert first_forward == pytest.approx(forward)
    assert memory.forward_peak == pytest.approx(forward, rel=0.05)
    assert memory.first_backward_peak == pytest.approx(first_backward, rel=0.001)
    assert memory.backward_peak == pytest.approx(backward, rel=0.001)


def test_peak_by_hand() -> None:
    """x, w and each result have 8 x 8 float32: 256 bytes. Fused, only the sum and the product are written, the sum over
    x."""

    def total(x: Tensor) -> Tensor:
        return x.exp() + x * 2

    def product(x: Tensor, w: Tensor) -> Tensor:
        return total(x) @ w

    x = w = torch.zeros(8, 8)
    pointwise = make_fx(total, tracing_mode="fake")(x).graph
    assert peak_bytes(pointwise, {}, fused=False) == 3 * 256  # x, exp and the multiple
    assert peak_bytes(pointwise, {}) == 256
    multiplied = make_fx(product, tracing_mode="fake")(x, w).graph
    assert peak_bytes(multiplied, {}) == 3 * 256
    assert peak_bytes(multiplied, {"w_1"}) == 2 * 256


def test_memory_of_a_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = PassMemory(kept=10**9, forward_peak=2 * 10**9, backward_peak=10**9, first_backward_peak=10**9)
    monkeypatch.setattr(compiled_memory, "pass_memory", lambda *_, **__: passes)
    config = tiny()
    assert config.micro_batches > 1
    model = on_meta(config.model)
    memory, plain = count_memory(model, config, compiled=True), count_memory(model, config)
    assert memory.compiled
    assert not plain.compiled
    assert replace(memory, activations=0, compiled=False) == replace(plain, activations=0)
    # The first micro-batch's gradients are there in the second's passes.
    assert memory.activations == passes.forward_peak + 2 * WORKSPACE  # of the passes, and of their CUDA graphs
    one = replace(config, batch=replace(config.batch, total_tokens=config.micro_tokens))
    assert count_memory(model, one, compiled=True).activations == memory.activations - memory.gradients

    evaluated = replace(config, eval=replace(config.eval, micro_sequences=4096))
    logits = 4096 * config.model.seq_len * 512 * (2 + 4)
    needed = memory.weights + memory.optimizer + logits + 2 * WORKSPACE
    assert count_memory(model, evaluated, compiled=True).device_total == needed
    monkeypatch.setattr(captured_steps, "MOST_FLOPS", 1.0)
    assert count_memory(model, evaluated, compiled=True).device_total == needed - WORKSPACE


def test_autoresearch_is_nanochat_in_another_size() -> None:
    """So the memory of its graphs is compared above."""
    model, wide = configure("autoresearch").model, nanochat(depth=20).model
    assert replace(model, n_layer=wide.n_layer, n_embd=wide.n_embd, n_head=wide.n_head) == wide


def test_a_layer_more_keeps_what_the_graph_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the lineage that is not compared above. At the ends its graph may keep residual streams more."""
    for module in (head, compiled_memory):
        monkeypatch.setattr(module, "MAX_SLICES", 1)
        monkeypatch.setattr(module, "SLICE_LOGITS", 2**40)
    kept = []
    for n_layer in (1, 2):
        model = on_meta(replace(configure("speedrun/muon-2024-10").model, n_layer=n_layer, vocab_size=512))
        memory = pass_memory(model, ROWS)
        assert memory is not None
        kept.append((memory.kept, Compiled(model).kept()))
    planned, in_graph = (two - one for one, two in zip(*kept, strict=True))
    assert planned == pytest.approx(in_graph, rel=0.05)


@pytest.mark.parametrize(("rows", "larger"), [(1, "update"), (8, "passes")])
def test_a_whole_uncompiled_step(rows: int, larger: str) -> None:
    """Every storage that is alive in a step on the meta device. With few rows, the update is what takes most."""
    model_config = replace(WIDE, vocab_size=512)
    batch = BatchConfig(total_tokens=rows * WIDE.seq_len, micro_sequences=rows)
    config = replace(configure("nanochat"), model=model_config, batch=batch)
    model = on_meta(model_config)
    memory = count_memory(model, config)
    optimizer = whole_optimizer(model, config)
    held = [*model.parameters(), *model.buffers(), *optimizer.state_tensors().values()]
    tokens = torch.zeros(rows, WIDE.seq_len, dtype=torch.int64, device="meta")
    with LiveStorages({tensor.untyped_storage()._cdata for tensor in held}) as live:
        model.loss(tokens, tokens).backward()
        of_passes, live.peak = live.peak, live.bytes
        optimizer.step(1.0, 0.9, 1.0, torch.ones((), dtype=torch.bool, device="meta"))
    assert (live.peak > of_passes) == (larger == "update")
    assert memory.device_total - memory.weights - memory.optimizer == pytest.approx(max(of_passes, live.peak), rel=0.01)


def test_recomputed_blocks_keep_what_goes_into_them() -> None:
    model = on_meta(replace(WIDE, n_layer=1))
    recomputed = pass_memory(model, ROWS, recomputed=True)
    stream = ROWS * WIDE.seq_len * WIDE.n_embd * 2
    assert recomputed is not None
    # x, the value embedding, and what goes into the embedding's norm; of the head, what goes into its norm, the
    # gradient, and the weights' in float32.
    assert recomputed.kept == 3 * stream + 2 * stream + 4 * model.head.weight.numel()
    # With one layer, all of it is there again in the backward pass.
    assert recomputed.backward_peak > 18 * stream


def test_activations_of_many_ranks_grow_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger growth of the two passes' peaks; uncompiled code where that is wanted, or all that can be counted."""

    def passes(_: object, rows: int, **__: object) -> PassMemory:
        return PassMemory(kept=0, forward_peak=70 + 10 * rows, backward_peak=50 + 30 * rows, first_backward_peak=0)

    monkeypatch.setattr(compiled_memory, "pass_memory", passes)
    config = tiny()
    rows, model = config.batch.micro_sequences, on_meta(config.model)
    assert activations_of_rows(model, config) == 30 * rows
    uncompiled = activations_of_rows(model, apply_overrides(config, {"runtime.compile": "off"}))
    assert uncompiled > 1000 * rows
    monkeypatch.setattr(compiled_memory, "pass_memory", lambda *_, **__: None)
    assert activations_of_rows(model, config) == uncompiled


def test_a_plan_counts_products_in_8_bits() -> None:
    """Its model is the one that the run would train."""
    config = apply_overrides(tiny(), {"runtime.fp8": True, "model.n_embd": 256, "model.n_head": 2})
    assert isinstance(model_on_meta(config, torch.bfloat16, "cuda").head, Fp8Linear)


def test_a_plan_for_a_gpu_counts_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_memory, "pass_memory", lambda *_, **__: PassMemory(10**9, 2 * 10**9, 10**9, 10**9))
    place = Place(torch.device("cuda", 0), torch.bfloat16, 1, Peak(None, "unknown"))
    for wanted, counted in (("auto", "compiled"), ("off", "uncompiled")):
        config = apply_overrides(tiny(), {"runtime.compile": wanted})
        plan = make_plan(config, place)
        shown = figures(plan, device_memory=None)
        assert shown["memory_counts"] == counted
        assert (", compiled" in _activations(plan)) == (counted == "compiled")
        parts = cast(dict[str, int], shown["memory_bytes_by_part"])
        assert shown["memory_bytes"] == sum(parts.values()) - parts["snapshot"]


def test_without_what_torch_has_now_uncompiled_code_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    model = on_meta(config.model)
    monkeypatch.setitem(sys.modules, "gptlab.bench.compiled_memory", None)
    assert count_memory(model, config, compiled=True) == count_memory(model, config)


def test_gradients_of_later_blocks_are_there_while_earlier_ones_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, with blocks so large that nothing else shows: the first block's pass beside the second's gradients."""
    block = compiled_memory._Passes(kept=10**15, forward_peak=0, backward_peak=7 * 10**15, gradients=3 * 10**15)
    monkeypatch.setattr(compiled_memory, "_block", lambda *_: block)
    with torch.device("meta"):
        model = GPT(SMALL_GPT2, torch.bfloat16, "cuda")
    passes = pass_memory(model, 1)
    assert passes is not None
    # Of the first micro-batch, 7 + 3, after 7 + 1 with what the first block still keeps.
    assert round(passes.first_backward_peak / 10**15, 3) == 10
    assert round(passes.backward_peak / 10**15, 3) == 8  # added up by then


@pytest.mark.parametrize("in_turn", [True, False])
def test_slices_of_the_head(monkeypatch: pytest.MonkeyPatch, in_turn: bool) -> None:
    """By hand, with blocks that keep nothing and so many tokens that a slice has more logits than weights have entries.
    Each slice's product waits for the sum. Not in turn, each slice's logits wait for its product."""
    monkeypatch.setattr(compiled_memory, "SLICES_IN_TURN", in_turn)
    block = compiled_memory._Passes(kept=0, forward_peak=0, backward_peak=0, gradients=0)
    monkeypatch.setattr(compiled_memory, "_block", lambda *_: block)
    with torch.device("meta"):
        model = GPT(SMALL_GPT2, torch.bfloat16, "cuda")
    width, entries = model.config.n_embd, model.config.padded_vocab_size
    rows = 2**16 * width // model.config.seq_len
    passes = pass_memory(model, rows)
    assert passes is not None
    tokens = rows * model.config.seq_len
    streams, tables = 3 * 2 * tokens * width, (4 + 2) * entries * width  # the weights' gradient, and the weights
    logits, product = 2 * tokens * entries // SLICES, 2 * entries * width
    waiting = SLICES * (product if in_turn else logits) + (logits if in_turn else product)
    assert passes.forward_peak == streams + tables + waiting
