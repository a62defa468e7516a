"""Memory of a micro-batch that torch.compile has compiled for a GPU, counted from the graphs of torch's partitioner.

The partitioner decides which tensors the forward pass keeps and what the backward pass computes again. It is asked for
one block of each kind, on the meta device; the head is counted by hand, since the graph of its slices is larger than
that of all blocks. Inductor then fuses operations: what only fused operations read is never in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_function, make_boxed_compiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OpOverload
from torch.func import functional_call

from gptlab.model.gpt import GPT
from gptlab.model.head import MAX_SLICES, SLICE_LOGITS, SLICES_IN_TURN
from gptlab.model.kernels import torch_attention

WORKSPACE = 2 * 32 * 2**20
"""What PyTorch gives cuBLAS on compute capability 9.0, elsewhere 8 MiB (PyTorch's CublasHandlePool.cpp), in each of two
threads: autograd has one of its own for the backward pass."""
_OWN_KERNELS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"}
"""Of aten, beside attention: they read and write memory. Everything else is fused with what is around it."""
_REDUCTION = 4
"""How many times smaller than what it reads the result of a reduction is, for the partitioner and here."""


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes of a forward and a backward pass, beside weights and the sum of earlier micro-batches' gradients."""

    kept: int
    """By the forward pass for the backward pass."""
    forward_peak: int
    """The most at one time."""
    backward_peak: int
    """With the gradients of one block at a time, which are added up before the next one computes."""
    first_backward_peak: int
    """Of the first micro-batch, whose gradients become the sum."""


def pass_memory(model: GPT, rows: int, *, recomputed: bool = False) -> PassMemory | None:
    """Count a micro-batch of `rows` sequences. `model`: on the meta device, built for the platform "cuda". None with
    FlexAttention, which does not run there.

    `recomputed`: with activation checkpointing.
    """
    config, width = model.config, model.compute_dtype.itemsize
    attends_by = torch_attention.choose(config, model.compute_dtype, model.platform)
    if attends_by == "flex":
        return None
    tokens, wide = rows * config.seq_len, max(width, 4)
    stream = tokens * config.n_embd * width  # the residual stream, or its gradient
    # FlashAttention takes as much memory with a window as without.
    windows = [None] * config.n_layer if attends_by == "varlen" else config.layer_windows()
    kinds = [(config.has_value_embedding(layer), window) for layer, window in enumerate(windows)]
    counted = {kind: _block(model, kinds.index(kind), rows, recomputed) for kind in dict.fromkeys(kinds)}
    blocks = [counted[kind] for kind in kinds]
    # The first block keeps x0, as its x, and the embedding's norm what goes into it.
    kept = sum(block.kept for block in blocks) + (stream if config.embedding_norm else 0)

    # The head keeps the input of the final norm, the gradient of its output, and the gradient of its own weights. At
    # its last slice there are also the norm's output, the weights in the compute type, the slice's logits, over which
    # their gradient is written, and each slice's product for the weights' gradient: one kernel adds them all up. Where
    # slices are not in turn (`model/head.py`), all logits are computed first, and then become products one by one.
    table = model.head.weight.numel()
    positions = min(tokens, max(SLICE_LOGITS // config.padded_vocab_size, -(-tokens // MAX_SLICES)))
    slices, logits, product = -(-tokens // positions), positions * config.padded_vocab_size * width, width * table
    of_each = product if SLICES_IN_TURN else max(product, logits)
    head_kept = 2 * stream + wide * table
    of_slices = slices * of_each + logits + product - of_each
    forward_peak = kept + head_kept + stream + width * table + of_slices

    # Backward, the last block first, beside what all others keep and, with x0, the sum of its gradients by later ones.
    # After it, a value embedding's gradient, in the type of its table, becomes the table's. The embedding's comes last.
    value = tokens * config.kv_heads * config.head_dim * width
    value_table = wide * config.padded_vocab_size * config.kv_heads * config.head_dim
    beside, of_x0 = kept, 0
    backward_peak, summed = stream + wide * table, wide * table
    first_backward_peak = stream + sum(weight.nbytes for weight in model.parameters())
    for (is_gated, _), block in zip(reversed(kinds), reversed(blocks), strict=True):
        beside -= block.kept
        forward_peak = max(forward_peak, beside + block.forward_peak)
        peak = block.backward_peak
        if is_gated:
            peak = max(peak, block.gradients + stream + value + value_table)
        backward_peak = max(backward_peak, beside + of_x0 + peak)
        first_backward_peak = max(first_backward_peak, beside + of_x0 + summed + peak)
        summed += block.gradients + (value_table if is_gated else 0)
        of_x0 = stream if config.residual_lambdas else 0
    return PassMemory(kept + head_kept, forward_peak, backward_peak, first_backward_peak)


@dataclass(frozen=True, slots=True)
class _Passes:
    """Bytes of a block's two graphs, without its weights."""

    kept: int
    forward_peak: int
    backward_peak: int
    gradients: int
    """Of its weights."""


def _block(model: GPT, layer: int, rows: int, recomputed: bool) -> _Passes:
    config, block = model.config, model.blocks[layer]
    own = dict([*block.named_parameters(), *block.named_buffers()])
    with torch.device("meta"):
        stream = partial(torch.zeros, rows, config.seq_len, dtype=model.compute_dtype, requires_grad=True)
        x, x0 = stream(config.n_embd), stream(config.n_embd)
        value = stream(config.kv_heads * config.head_dim) if config.has_value_embedding(layer) else None
    lambdas = (model.residual_lambdas[layer], model.x0_lambdas[layer]) if config.residual_lambdas else None
    rotary = (model.cos, model.sin) if config.position == "rope" else None

    def run(x: Tensor, value: Tensor | None, x0: Tensor, weights: dict[str, Tensor], *others: Any) -> Tensor:
        lambdas, rotary = others
        result: Tensor = functional_call(block, weights, (x, x0, lambdas, value, rotary))
        return result

    with functorch_config.patch(activation_memory_budget=0.0 if recomputed else 1.0):
        forward, backward = graphs(run, [x, value, x0, own, lambdas, rotary])
    # Of the arguments, x and the value embedding count here.
    resident = {node.name for node in forward.find_nodes(op="placeholder")[1 if value is None else 2 :]}
    return _Passes(
        kept=kept_bytes(forward, backward, resident),
        forward_peak=peak_bytes(forward, resident),
        backward_peak=peak_bytes(backward, resident),
        gradients=sum(weight.nbytes for weight in block.parameters()),
    )


def graphs(function: Callable[..., Tensor], arguments: Sequence[Any]) -> tuple[fx.Graph, fx.Graph]:
    """The forward and the backward graph that torch.compile would make of a function of tensors on the meta device, in
    tuples and dicts too."""
    made: list[fx.Graph] = []

    def partition(*args: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = min_cut_rematerialization_partition(*args, **options)
        made.extend((forward.graph, backward.graph))
        return forward, backward

    as_they_are = make_boxed_compiler(lambda module, _: module)
    aot_function(function, as_they_are, as_they_are, partition_fn=partition)(*arguments)
    forward, backward = made
    return forward, backward


def kept_bytes(forward: fx.Graph, backward: fx.Graph, resident: Container[str]) -> int:
    """What the backward pass takes from the forward pass, without the arguments that `resident` names."""
    taken = {node.name for node in backward.find_nodes(op="placeholder")}
    roots = {_root(node) for node in forward.output_node().all_input_nodes if node.name in taken}
    return sum(_bytes(root) for root in roots if root.name not in resident)


def peak_bytes(graph: fx.Graph, resident: Container[str], *, fused: bool = True) -> int:
    """The most at one time, without the arguments that `resident` names. Others are freed after their last use.

    `fused`: False where each operation writes its result, as an interpreter of the graph does.
    """
    written = {
        node
        for node in graph.nodes
        if _root(node) is node and node.name not in resident and (not fused or _is_written(node))
    }
    last_use = {node: node for node in written}
    for node in graph.nodes:
        if node in written or node.op == "output":
            last_use |= dict.fromkeys(_read(node, written), node)
    live = most = sum(_bytes(node) for node in written if node.op == "placeholder")
    for node in graph.nodes:
        if node not in written:
            continue
        freed = [_bytes(one) for one in written if last_use[one] is node]
        added = _bytes(node) if node.op == "call_function" else 0
        # A fused operation writes over what it is the last to read, if that is as large.
        in_place = fused and added in freed and not _is_kernel(node)
        most = max(most, live + (0 if in_place else added))
        live += added - sum(freed)
    return most


def _read(node: fx.Node, written: Container[fx.Node]) -> set[fx.Node]:
    """What is in memory of all that leads to a node."""
    found: set[fx.Node] = set()
    ahead, seen = [node], set()
    while ahead:
        for one in map(_root, ahead.pop().all_input_nodes):
            if one in written:
                found.add(one)
            elif one not in seen:
                seen.add(one)
                ahead.append(one)
    return found


def _root(node: fx.Node) -> fx.Node:
    """The node in whose memory this one lies, itself if it is no view."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    return isinstance(node.target, OpOverload) and (node.target.is_view or node.target._opname == "_unsafe_view")


def _is_written(node: fx.Node) -> bool:
    """Whether its result is in memory after fusion."""
    if node.op == "placeholder" or _is_kernel(node) or _is_read_from_memory(node):
        return True
    return _REDUCTION * _bytes(node) <= max(map(_bytes, node.all_input_nodes), default=0)


def _is_read_from_memory(node: fx.Node) -> bool:
    return any(
        _is_read_from_memory(user) if _is_view(user) else user.op == "output" or _is_kernel(user) for user in node.users
    )


def _is_kernel(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_kernel(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload):
        return False
    is_own = node.target.namespace not in ("aten", "prims")
    return is_own or _name(node) in _OWN_KERNELS or "attention" in _name(node)


def _name(node: fx.Node) -> str:
    return node.target._opname if isinstance(node.target, OpOverload) else ""


def _bytes(node: fx.Node) -> int:
    """Of several results, each is a node of its own."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
