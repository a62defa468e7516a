"""Keys and values of the tokens seen so far, a pair of tensors per layer, for generation."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from gptlab.config.model import ModelConfig


class KVCache:
    """Room for `max_tokens` positions of `batch_size` sequences; `length` of them are filled."""

    def __init__(
        self, config: ModelConfig, batch_size: int, max_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.n_layer, 2, batch_size, config.kv_heads, max_tokens, config.head_dim)
        self._store = torch.zeros(shape, device=device, dtype=dtype)
        self.max_tokens = max_tokens
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, G, T, D) after the filled positions. Returns all keys and values so far, these included.

        `length` changes only in `advance`, to be called once all layers have stored the same tokens.
        """
        stop = self.length + k.shape[2]
        if stop > self.max_tokens:
            raise ValueError(f"the cache has room for {self.max_tokens} tokens, not for {stop}")
        keys, values = self._store[layer]
        keys[:, :, self.length : stop] = k
        values[:, :, self.length : stop] = v
        return keys[:, :, :stop], values[:, :, :stop]

    def advance(self, n_tokens: int) -> None:
        self.length += n_tokens

    def filled(self) -> Tensor:
        """Keys and values so far, (layers, 2, B, G, length, D): a view."""
        return self._store[..., : self.length, :]

    def repeated(self, batch_size: int, more_tokens: int) -> KVCache:
        """A cache of `batch_size` sequences that each hold what the only one here holds, with room for more."""
        layers, pair, _, heads, _, width = self._store.shape
        other = copy.copy(self)
        other.max_tokens = self.length + more_tokens
        other._store = self._store.new_zeros(layers, pair, batch_size, heads, other.max_tokens, width)
        other.filled()[:] = self.filled()
        return other
