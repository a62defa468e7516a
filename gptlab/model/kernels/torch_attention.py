"""Attention on GPUs, and with document masks, by the fastest that this torch and the GPU have. One of these computes a
model's windows and document masks; layers with neither take torch's scaled_dot_product_attention.

varlen   FlashAttention over sequences of any lengths (`torch.nn.attention.varlen`), version 3 or 4 if installed
flex     FlexAttention, of which torch.compile makes a Triton kernel
blocks   matrix products (`blocked_attention`), which write their scores to memory: everywhere

Shapes: B sequences, T positions, H query heads, G key-value heads, D head width.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from gptlab.config.model import ModelConfig
from gptlab.model.attention import blocked_attention, offset_keys
from gptlab.runtime.hardware.device import Platform, compiler_available

if TYPE_CHECKING:
    from gptlab.data.document_capacity import DocumentCapacity

WIDEST_FLASH_HEAD = 192
"""FlashAttention 2 takes 256, but has no backward pass for more than this on compute capability 8.6, 8.9 and 12.0
(torch's sdp_utils.cpp)."""
KEY_MULTIPLE = 64
"""Slices of keys begin at multiples of this: matrix products on tensor cores read aligned rows at full speed."""
_NEWER_FLASH = {9: "FA3", 10: "FA4"}
"""By major compute capability, the FlashAttention that is made for it (torch.nn.attention)."""
_NEWER_FLASH_HEADS = (64, 96, 128)
"""The widths that version 4 takes for queries, keys and values alike; 3 takes more, slowly."""


def choose(config: ModelConfig, dtype: torch.dtype, platform: Platform) -> str:
    """What computes windows and document masks. Without a GPU here, for one of compute capability 8.0. If that is
    FlashAttention, it becomes the newest one that is installed."""
    if platform != "cuda" or config.dropout > 0:  # neither of the others has dropout
        return "blocks"
    is_here = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if is_here else (8, 0)
    flash_heads = config.head_dim % 8 == 0 and config.head_dim <= WIDEST_FLASH_HEAD
    if capability >= (8, 0) and dtype in (torch.bfloat16, torch.float16) and flash_heads and _varlen_suits(config):
        if is_here and config.head_dim in _NEWER_FLASH_HEADS:
            _activate_flash(_NEWER_FLASH.get(capability[0]))
        return "varlen"
    suits_flex = config.head_dim >= 16 and dtype != torch.float64
    return "flex" if suits_flex and is_here and compiler_available(torch.device("cuda")) else "blocks"


def _varlen_suits(config: ModelConfig) -> bool:
    """torch 2.12 brought grouped heads."""
    has_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return torch.version.hip is None and (has_groups or config.kv_heads == config.n_head)


def _activate_flash(version: str | None) -> None:
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is not None and version is not None and _active_flash() != version:
        with suppress(ImportError, RuntimeError, ValueError):  # not installed, or without what torch calls
            activate(version)


def _active_flash() -> str | None:
    current: str | None = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return current


def described(config: ModelConfig, dtype: torch.dtype, platform: Platform, documents: DocumentMask | None) -> str:
    """What computes a model's attention, with the version of FlashAttention, for run.json."""
    if documents is None and not any(config.layer_windows()):
        return "sdpa"
    by = choose(config, dtype, platform)
    return f"varlen {_active_flash() or 'FA2'}" if by == "varlen" else by


def attention(
    by: str,
    heads: Tensor | tuple[Tensor, Tensor, Tensor],  # (B, T, H + 2 G, D), or as of `prepare_heads_apart`
    n_head: int,
    window: int | None,
    dropout: float,
    documents: Tensor | None,
    key_offset: bool = False,
) -> Tensor:  # (B, T, H, D)
    """As `torch_ops.attention`, within documents if there are bounds of them (`DocumentMask.bounds`)."""
    if isinstance(heads, Tensor):
        n_kv_head = (heads.shape[2] - n_head) // 2
        heads = heads.split((n_head, n_kv_head, n_kv_head), dim=2)
    q, k, v = heads
    if key_offset:
        k = offset_keys(k, None if documents is None else first_tokens(documents, *k.shape[:2]))
    is_full = window is None and documents is None
    # A meta tensor cannot tell scaled_dot_product_attention of the GPU, and would be counted with a score for each pair
    # of tokens; varlen keeps what the GPU's kernel keeps.
    if by == "varlen" and (not is_full or q.is_meta):
        return _by_varlen(q, k, v, window, documents)
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    if is_full:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=n_head != k.shape[1])
    elif by == "flex":
        one_kernel = flex if torch.compiler.is_compiling() else torch.compile(flex, dynamic=False)
        y = one_kernel(q, k, v, window, documents)
    else:
        y = blocked_attention(q, k, v, window=window, dropout=dropout, first_seen=documents, key_multiple=KEY_MULTIPLE)
    return y.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class DocumentMask:
    """No token sees past the beginning of its document. A document begins where a row does, and at a BOS that follows
    another token."""

    by: str
    bos_id: int
    capacity: DocumentCapacity | None
    """The number of documents that the bounds are for. None: as many as there are; to count them waits for a GPU."""

    def bounds(self, tokens: Tensor) -> Tensor:
        """What `attention` takes, for tokens (B, T). By varlen: the first token of each document, counted over all
        rows, then B T up to the end, int32. By others: the first position of each token's document, (B, T) int64."""
        places, is_bos = torch.arange(tokens.shape[1], device=tokens.device), tokens == self.bos_id
        begins = (places == 0) | (is_bos & ~F.pad(is_bos[:, :-1], (1, 0)))
        if self.by != "varlen":
            return (places * begins).cummax(1).values
        number = begins.flatten().cumsum(0)  # of documents up to here
        if self.capacity is None:
            size = int(number[-1])
        else:
            size = max(self.capacity.documents, 2 * len(tokens))  # the rows of CORE may be more, and shorter
            torch._assert_async(number[-1] <= size, "more documents than DocumentCapacity has counted")
        bounds = tokens.new_full((size + 2,), tokens.numel(), dtype=torch.int32)
        # What begins nothing is written to a place after the last.
        where = torch.where(begins.flatten(), number - 1, size + 1)
        bounds.scatter_(0, where, torch.arange(tokens.numel(), device=tokens.device, dtype=torch.int32))
        return bounds[: size + 1]


def first_tokens(documents: Tensor, batch: int, n_tokens: int) -> Tensor:
    """Which tokens begin a document, (batch, n_tokens) bool, from `DocumentMask.bounds`."""
    if documents.ndim == 2:
        return documents == torch.arange(n_tokens, device=documents.device)
    # The end of all tokens, which is among the bounds, is dropped.
    begins = torch.zeros(batch * n_tokens + 1, dtype=torch.bool, device=documents.device)
    return begins.index_fill(0, documents.long(), True)[:-1].view(batch, n_tokens)


def _by_varlen(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, T, G, D)
    v: Tensor,
    window: int | None,
    documents: Tensor | None,
) -> Tensor:  # (B, T, H, D)
    batch, n_tokens = q.shape[:2]
    grouped: dict[str, Any] = {} if q.shape[2] == k.shape[2] else {"enable_gqa": True}
    if documents is None:
        documents = torch.arange(0, batch * n_tokens + 1, n_tokens, dtype=torch.int32, device=q.device)
    y = varlen_attn(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), documents, documents, n_tokens, n_tokens,
        window_size=(-1 if window is None else window - 1, 0), **grouped,
    )  # fmt: skip
    assert isinstance(y, Tensor)  # alone, since nothing else is asked for
    return y.view(q.shape)


def flex(q: Tensor, k: Tensor, v: Tensor, window: int | None, first_seen: Tensor | None) -> Tensor:
    """FlexAttention, uncompiled. Shapes as for `blocked_attention`."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n_tokens = q.shape[2]

    def seen(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = key <= query
        if window is not None:
            visible = visible & (key > query - window)
        return visible if first_seen is None else visible & (key >= first_seen[row, query])

    rows = None if first_seen is None else len(q)
    mask = create_block_mask(seen, rows, None, n_tokens, n_tokens, device=q.device)
    y = flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(y, Tensor)
    return y
