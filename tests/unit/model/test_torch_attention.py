"""Attention on GPUs and with document masks: every way against brute force, and on the meta device the one that a GPU
takes, its windows, and the bytes that it keeps for the backward pass."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle_model
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from gptlab.config.model import ModelConfig
from gptlab.config.recipes import RECIPES
from gptlab.data.document_capacity import DocumentCapacity
from gptlab.model.gpt import GPT, build_model
from gptlab.model.kernels import torch_attention, torch_ops
from gptlab.runtime.hardware.device import Platform

CPU = torch.device("cpu")
BOS = 0
N_TOKENS = 149
WINDOWS = [None, 1, 2, 64, 65, 150]
HEADS = [(2, 2), (4, 2), (3, 1)]
WAYS = ["blocks", "varlen", "flex"]


def random_tokens() -> Tensor:
    """Rows that begin with BOS and without, documents of one token, a run of BOS as padding has it at its end."""
    tokens = torch.randint(1, 9, (2, N_TOKENS), generator=torch.Generator().manual_seed(1))
    tokens[0, [0, 1, 7, 8, 100]] = BOS
    tokens[1, [3, 5, 64, *range(140, N_TOKENS)]] = BOS
    return tokens


@pytest.mark.parametrize(("rotates", "normalizes", "adds"), [(1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_heads_apart_are_those_joined(rotates: bool, normalizes: bool, adds: bool) -> None:
    """Four query heads and two of keys and values, and the gradients."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads, angles = random(2, 9, 8, 6), random(9, 3)
    extra = [random(2, 9, 2), random(2, 9, 12)] if adds else [None, None]
    rest = (angles.cos(), angles.sin()) if rotates else None, 1e-2 if normalizes else None
    inputs = [x.requires_grad_() for x in (heads, *extra) if x is not None]
    expected = torch_ops.prepare_heads(heads, 4, *extra, *rest)
    found = torch.cat(torch_ops.prepare_heads_apart(heads, 4, *extra, *rest), dim=2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = random(*found.shape)
    mine, theirs = (torch.autograd.grad(y, inputs, upstream) for y in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_gpu_joins_no_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(RECIPES["nanochat-tiny"]().model, vocab_size=64)
    monkeypatch.delattr(torch_ops, "prepare_heads")
    with torch.device("meta"):
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        GPT(config, torch.bfloat16, "cuda").loss(tokens, tokens).backward()


def document_numbers(row: list[int]) -> list[int]:
    """For each token, how many documents began before it or at it: one at the start, and one at each BOS that does not
    follow another."""
    number, numbers = 0, []
    for place, token in enumerate(row):
        number += place == 0 or (token == BOS and row[place - 1] != BOS)
        numbers.append(number)
    return numbers


def brute_force(
    heads: Tensor, n_head: int, window: int | None, tokens: Tensor | None, key_offset: bool = False
) -> Tensor:
    """softmax(q . k / sqrt(D)) over what is visible, with the mask written out, in the type of `heads`."""
    batch, n_tokens, rows, width = heads.shape
    n_kv_head = (rows - n_head) // 2
    q, k, v = heads.split((n_head, n_kv_head, n_kv_head), dim=2)
    out = torch.empty_like(q)
    for b in range(batch):
        number = [1] * n_tokens if tokens is None else document_numbers(tokens[b].tolist())
        seen = torch.tensor(
            [
                [s <= t and t - s < (window or n_tokens) and number[s] == number[t] for s in range(n_tokens)]
                for t in range(n_tokens)
            ],
            device=heads.device,
        )
        for h in range(n_head):
            group = h // (n_head // n_kv_head)
            keys = k[b, :, group]
            if key_offset:  # document by document
                keys = torch.cat([oracle_model.offset_key(keys[at]) for at in places_of_each(number)])
            scores = (q[b, :, h] @ keys.T / width**0.5).masked_fill(~seen, -torch.inf)
            out[b, :, h] = scores.softmax(-1) @ v[b, :, group]
    return out


def places_of_each(numbers: list[int]) -> list[list[int]]:
    """The positions of each document, in order."""
    return [[at for at, found in enumerate(numbers) if found == number] for number in sorted(set(numbers))]


def as_documented(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, longest: int, longest_keys: int,
    *, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What torch's documentation says of `varlen_attn`, which has no kernel for CPUs: sequences follow each other, and
    a query sees window_size[0] keys before it (-1: all) and window_size[1] after it."""
    assert starts is key_starts
    assert starts.dtype == torch.int32
    assert starts[0] == 0
    assert starts[-1] == len(q)
    assert enable_gqa == (q.shape[1] != k.shape[1])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = torch.empty_like(q)
    before, after = window_size
    for start, stop in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        assert 0 <= stop - start <= longest == longest_keys
        places = torch.arange(stop - start)
        distance = places[:, None] - places[None, :]  # from key to query
        seen = (distance >= -after) & ((distance <= before) | (before < 0))
        scores = torch.einsum("thd,shd->hts", q[start:stop], k[start:stop]) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[start:stop] = torch.einsum("hts,shd->thd", weights, v[start:stop])
    return out


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All ways run on a CPU: varlen as it is documented, flex uncompiled."""
    monkeypatch.setattr(torch_attention, "varlen_attn", as_documented)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("key_offset", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n_head", "n_kv_head"), HEADS)
@pytest.mark.parametrize("by", WAYS)
def test_windows_and_documents_equal_brute_force(
    by: str, n_head: int, n_kv_head: int, masked: bool, key_offset: bool
) -> None:
    heads = torch.randn(2, N_TOKENS, n_head + 2 * n_kv_head, 4, dtype=torch.float64)
    tokens = random_tokens() if masked else None
    bounds = None if tokens is None else torch_attention.DocumentMask(by, BOS, None).bounds(tokens)
    for window in WINDOWS:
        with torch.no_grad():
            out = torch_attention.attention(by, heads, n_head, window, 0.0, bounds, key_offset)
        expected = brute_force(heads, n_head, window, tokens, key_offset)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12, msg=lambda m, w=window: f"window {w}: {m}")


def test_gradients_of_blocks_with_documents() -> None:
    heads = torch.randn(2, N_TOKENS, 8, 4, dtype=torch.float64, requires_grad=True)
    tokens, weight = random_tokens(), torch.randn(2, N_TOKENS, 4, 4, dtype=torch.float64)
    bounds = torch_attention.DocumentMask("blocks", BOS, None).bounds(tokens)
    found = torch_attention.attention("blocks", heads, 4, 70, 0.0, bounds)
    pairs = [torch.autograd.grad((y * weight).sum(), heads)[0] for y in (found, brute_force(heads, 4, 70, tokens))]
    torch.testing.assert_close(*pairs, rtol=1e-10, atol=1e-10)


def test_document_bounds_by_hand() -> None:
    """Two rows of six: the second begins in the middle of a document and ends with padding, which is one document."""
    tokens = torch.tensor([[BOS, 5, BOS, 7, 8, BOS], [4, 4, BOS, BOS, BOS, BOS]])
    of_each = [[0, 0, 2, 2, 2, 5], [0, 0, 2, 2, 2, 2]]
    assert torch_attention.DocumentMask("blocks", BOS, None).bounds(tokens).tolist() == of_each
    exact = torch_attention.DocumentMask("varlen", BOS, None).bounds(tokens)
    assert exact.tolist() == [0, 2, 5, 6, 8, 12]
    capacity = DocumentCapacity(BOS, 4, 6)
    padded = torch_attention.DocumentMask("varlen", BOS, capacity).bounds(tokens)
    assert padded.tolist() == [0, 2, 5, 6, 8, 12, 12, 12, 12]
    capacity.documents = 4
    with pytest.raises(RuntimeError, match="more documents than"):
        torch_attention.DocumentMask("varlen", BOS, capacity).bounds(tokens.repeat(1, 2))


def test_capacity_is_doubled_where_rows_hold_more_documents() -> None:
    """Of rows with 1, 4 and 3 documents: any may come twice, or beside others that are read for the next epoch."""
    capacity = DocumentCapacity(BOS, micro_sequences=2, seq_len=512)
    assert capacity.documents == 4
    rows = np.array([[5] * 8, [BOS, 1] * 4, [BOS, 1, BOS, BOS, 1, 1, BOS, 1]])
    capacity.add(rows[:1])
    assert capacity.documents == 4
    capacity.add(rows[2:])
    assert capacity.documents == 8
    capacity.add(rows[:2])
    assert capacity.documents == 8


SMALL = ModelConfig(n_layer=3, n_embd=32, n_head=2, seq_len=40, vocab_size=9, window_pattern="SSL", window_tokens=7)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("by", WAYS)
def test_masked_documents_are_computed_as_if_each_were_alone(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are rotations, of which only differences matter, so a document may begin anywhere."""
    model = build_model(replace(SMALL, init="gpt2"), device=CPU, compute_dtype=torch.float64, seed=1)
    monkeypatch.setattr(torch_attention, "choose", lambda *_: by)
    model.mask_documents(BOS)
    lengths = [11, 2, 19, 8]
    documents = [torch.cat((torch.tensor([BOS]), torch.randint(1, 9, (n - 1,)))) for n in lengths]
    with torch.no_grad():
        together = model(torch.cat(documents)[None])[0]
        alone = torch.cat([model(document[None])[0] for document in documents])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


class Recorded(TorchDispatchMode):
    """Notes the operators that reach the dispatcher, and the windows of attention; every tensor is on one device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.operators, self.windows = device, Counter[str](), list[Any]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).partition(".")[2].partition(".")[0]
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            assert not isinstance(tensor, Tensor) or tensor.device.type == self.device, name
        self.operators[name] += 1
        if name == "_varlen_attn":
            self.windows.append(args[9])
        return out


LINEAGES = ["nanochat", "autoresearch", "speedrun/muon-2024-10", "nanogpt/gpt2-124m"]


def gpu_model(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> GPT:
    with torch.device("meta"):
        return GPT(config, dtype, "cuda")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("recipe", LINEAGES)
def test_gpu_path_of_each_lineage_runs_on_the_meta_device(recipe: str, masked: bool) -> None:
    """Forward and backward: every layer reaches FlashAttention with its window, a full one only on the meta device or
    with document masks. Nothing waits for the device, and nothing is on another one."""
    config = replace(RECIPES[recipe]().model, n_layer=4, vocab_size=512)
    model = gpu_model(config)
    if masked:
        model.mask_documents(BOS, DocumentCapacity(BOS, 2, config.seq_len))
    tokens = torch.empty(2, config.seq_len, dtype=torch.int64, device="meta")
    with Recorded("meta") as recorded:
        model.loss(tokens, tokens).backward()
    expected = [[-1 if window is None else window - 1, 0] for window in config.layer_windows()]
    has_windows = config.window_pattern != "L"
    assert has_windows == (expected[0] != [-1, 0])
    assert recorded.windows == expected
    assert recorded.operators["_varlen_attn_backward"] == config.n_layer
    assert recorded.operators["_local_scalar_dense"] == 0
    described = torch_attention.described(config, torch.bfloat16, "cuda", model.document_mask)
    assert described == ("varlen FA2" if has_windows or masked else "sdpa")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_platform_decides_and_not_the_device(platform: Platform) -> None:
    config = ModelConfig(n_layer=2, n_embd=32, n_head=2, seq_len=16, vocab_size=10, window_pattern="L")
    with torch.device("meta"):
        model = GPT(config, torch.bfloat16, platform)
        tokens = torch.empty(2, 16, dtype=torch.int64)
    with Recorded("meta") as recorded:
        model.loss(tokens, tokens).backward()
    assert recorded.operators["_varlen_attn"] == (2 if platform == "cuda" else 0)


@pytest.mark.parametrize("window", [None, 257])
def test_bytes_kept_for_the_backward_pass(window: int | None) -> None:
    """Queries, keys and values, the output, and a float32 for each query: nothing that grows with the window."""
    batch, n_tokens, n_head, width = 4, 512, 6, 128
    has_groups = "enable_gqa" in inspect.signature(torch_attention.varlen_attn).parameters  # from torch 2.12 on
    n_kv_head = 2 if has_groups else n_head
    heads = torch.empty(
        batch, n_tokens, n_head + 2 * n_kv_head, width, dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = torch_attention.attention("varlen", heads * 1, n_head, window, 0.0, None)
    assert y.shape == (batch, n_tokens, n_head, width)
    numbers = batch * n_tokens * (n_head + 2 * n_kv_head + n_head) * width
    assert sum(kept.values()) == pytest.approx(2 * numbers + 4 * batch * n_tokens * n_head, rel=0.05)


@contextmanager
def machine(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, *, compiler: bool = True
) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        patch.setattr(torch_attention, "compiler_available", lambda device: compiler)
        yield


def without_groups(query: Tensor, window_size: tuple[int, int]) -> None:
    """torch 2.11's `varlen_attn`."""


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    half, wide = torch.bfloat16, torch.float32
    h128, h100, h256, h8 = (ModelConfig(n_embd=n, n_head=1) for n in (128, 100, 256, 8))
    choose = torch_attention.choose
    with machine(monkeypatch, None):  # planned for
        assert choose(h128, half, "cuda") == "varlen"
        assert choose(h128, wide, "cuda") == "blocks"
    assert choose(h128, half, "mps") == "blocks"
    with machine(monkeypatch, (9, 0)):
        assert [choose(config, half, "cuda") for config in (h128, h100, h256)] == ["varlen", "flex", "flex"]
        assert choose(replace(h128, dropout=0.1), half, "cuda") == "blocks"
        types = (torch.float16, wide, torch.float64)
        assert [choose(h128, dtype, "cuda") for dtype in types] == ["varlen", "flex", "blocks"]
        assert choose(h8, wide, "cuda") == "blocks"
        monkeypatch.setattr(torch_attention, "varlen_attn", without_groups)
        assert choose(h128, half, "cuda") == "varlen"
        grouped = replace(h128, n_head=2, n_kv_head=1)
        assert choose(grouped, half, "cuda") == "flex"
        with machine(monkeypatch, (9, 0), compiler=False):
            assert choose(grouped, half, "cuda") == "blocks"
    monkeypatch.undo()
    with machine(monkeypatch, (7, 5)):
        assert choose(h128, torch.float16, "cuda") == "flex"


def test_installed_flash_attention_is_activated_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 on Hopper alone; where it is not installed, torch's own."""
    flash = torch.nn.attention

    def choose(capability: tuple[int, int], width: int = 128) -> str:
        config = ModelConfig(n_embd=width, n_head=1, window_pattern="SL")
        with machine(monkeypatch, capability):
            return torch_attention.described(config, torch.bfloat16, "cuda", None)

    assert choose((9, 0)) == "varlen FA2"

    class Handle:
        def remove(self) -> None:
            pass

    implementations = {"FA3": Handle, "FA4": Handle}
    monkeypatch.setattr(flash._registry, "_FLASH_ATTENTION_IMPLS", implementations)
    try:
        assert choose((8, 0)) == "varlen FA2"
        assert choose((9, 0), width=32) == "varlen FA2"
        assert choose((9, 0)) == "varlen FA3"
        assert choose((10, 0)) == "varlen FA4"
    finally:
        flash.restore_flash_attention_impl()


class Slices(TorchDispatchMode):
    """Notes where slices of positions begin, of (B, H, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.starts = set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.slice.Tensor and args[1] == 2:
            self.starts.add(args[2])
        return function(*args, **(kwargs or {}))


def test_keys_begin_at_multiples() -> None:
    """Blocks of 128 queries; the windows of those from 256, 384, ... begin at keys 107, 235, ..., in 64, 192, ..."""
    with Slices() as slices:
        torch_attention.attention("blocks", torch.randn(1, 900, 3, 4), 1, 150, 0.0, None)
    assert slices.starts == {*range(0, 900, 128), *range(64, 705, 128)}


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@needs_gpu
@pytest.mark.parametrize(
    ("by", "dtype", "error"),
    [
        ("varlen", torch.bfloat16, 2e-2),  # 8 bits of mantissa in the output and in the weights
        ("varlen", torch.float16, 3e-3),  # 11 bits
        ("flex", torch.bfloat16, 2e-2),
        ("flex", torch.float32, 5e-3),  # TF32: 11 bits
        ("blocks", torch.float64, 1e-10),
    ],
)
@pytest.mark.timeout(1800)  # FlexAttention's kernel is compiled for each case
def test_on_a_gpu(by: str, dtype: torch.dtype, error: float) -> None:
    """FlashAttention, FlexAttention's kernel and the blocks see what they should, forward and backward."""
    config = ModelConfig(n_embd=128, n_head=2, n_kv_head=1)
    has_groups = by != "varlen" or torch_attention._varlen_suits(config)
    heads = [pair for pair in HEADS if has_groups or pair[0] == pair[1]]
    for (n_head, n_kv_head), window, masked in itertools.product(heads, [None, 1, 37, 150, 400], [False, True]):
        assert_sees_what_it_should(by, dtype, error, n_head, n_kv_head, window, masked)


def assert_sees_what_it_should(
    by: str, dtype: torch.dtype, error: float, n_head: int, n_kv_head: int, window: int | None, masked: bool
) -> None:
    exact = torch.randn(2, N_TOKENS, n_head + 2 * n_kv_head, 64, dtype=torch.float64)
    tokens = random_tokens() if masked else None
    outs, gradients = [], []
    for heads in (exact.requires_grad_(), exact.detach().to("cuda", dtype).requires_grad_()):
        if heads is exact:
            y = brute_force(heads, n_head, window, tokens)
        else:
            bounds = None if tokens is None else torch_attention.DocumentMask(by, BOS, None).bounds(tokens.cuda())
            y = torch_attention.attention(by, heads, n_head, window, 0.0, bounds)
        y.square().sum().backward()
        assert heads.grad is not None
        outs.append(y.detach().double().cpu())
        gradients.append(heads.grad.double().cpu())
    for found, expected in ((outs[1], outs[0]), (gradients[1], gradients[0])):
        case = f"{n_head} heads, {n_kv_head} of keys and values, window {window}, masked: {masked}"
        assert (found - expected).norm() < error * expected.norm(), case


@gpu
@needs_gpu
def test_a_real_gpu_takes_flash_attention_and_says_which() -> None:
    """Once it is active, the version that run.json names computes a window, forward and backward."""
    if torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a CUDA device of compute capability 8.0")
    config = ModelConfig(n_embd=128, n_head=2, window_pattern="SL")
    described = torch_attention.described(config, torch.bfloat16, "cuda", None)
    newer = torch_attention._NEWER_FLASH.get(torch.cuda.get_device_capability()[0])
    assert described in ("varlen FA2", f"varlen {newer}")
    assert_sees_what_it_should("varlen", torch.bfloat16, 2e-2, 2, 2, 37, False)


@gpu
@needs_gpu
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_on_a_gpu_without_waiting(masked: bool) -> None:
    """A compiled model of windows (and documents) gives the uncompiled loss, and is not compiled again for other
    documents. Neither one waits for the device."""
    config = replace(SMALL, n_embd=128, seq_len=256, window_tokens=65)
    model = build_model(config, device=torch.device("cuda"), compute_dtype=torch.bfloat16, seed=1)
    batches = [torch.randint(9 * number, (4, 256), device="cuda") % 9 for number in (1, 2, 3)]
    if masked:
        capacity = DocumentCapacity(BOS, 4, 256)
        for tokens in batches:
            capacity.add(tokens.cpu().numpy())
        model.mask_documents(BOS, capacity)
    compiled = torch.compile(model.loss, dynamic=False)
    expected = [float(model.loss(tokens, tokens).detach()) for tokens in batches]
    compiled(batches[0], batches[0]).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            found = [compiled(tokens, tokens) for tokens in batches]
            model.loss(batches[1], batches[1]).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close([float(x) for x in found], expected, rtol=1e-3, atol=0)


GPU_MODEL = """
import os, torch
from gptlab.model.gpt import GPT, ModelConfig
with torch.device("meta"):
    GPT(ModelConfig(n_layer=1, n_embd=64, n_head=1, vocab_size=8), torch.bfloat16, "cuda")
print(os.environ["TORCHINDUCTOR_CACHE_DIR"], end="")
"""


def test_what_a_gpu_compiles_is_kept_in_the_users_cache(tmp_path: Path) -> None:
    """torch's varlen imports the compiler, which names a temporary folder for it."""
    others = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", GPU_MODEL], env=others | {"GPTLAB_CACHE": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.stdout == str(tmp_path / "compile"), done.stderr
