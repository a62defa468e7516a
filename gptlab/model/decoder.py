"""The model's forward pass for generation: one new token for each of several sequences at a time.

`GPT.forward` says what is computed and reads every prompt; here one token takes a third of its operations: weights are
cast and joined once, keys and values lie in memory that is allocated once, and no mask is needed where every sequence
has the same length. The tests hold the logits to those of `GPT.forward` for every option of the architecture.

Shapes: B rows (sequences), C channels, H query heads, G key-value heads, D head width, V vocabulary, S cache columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlab.model.attention import slow_channels
from gptlab.model.gpt import GPT, Block, RMSNorm
from gptlab.model.kernels import ops, torch_ops
from gptlab.model.kv_cache import KVCache

SPARE_COLUMNS = 64
"""Steps between two moves of the cache to its first columns: a move costs about as much as one step."""


class Decoder:
    """Rows end in the same column of the cache and begin in columns of their own, so that a step writes one column for
    all rows, whatever their lengths. A change of the model's weights shows here only in a new Decoder."""

    def __init__(self, model: GPT, rows: int) -> None:
        config = model.config
        self.model, self.rows = model, rows
        self._layers = [_Layer(model, layer) for layer in range(config.n_layer)]
        self._embedding = model.token_embedding.weight.detach()
        self._embedding_norm = None if model.embedding_norm is None else _norm(model.embedding_norm)
        self._final_norm = _norm(model.final_norm)
        self._head = model.head.weight.detach()[: model.vocab_size].to(model.compute_dtype)
        self._positions = None if model.position_embedding is None else model.position_embedding.weight.detach()
        if config.position == "rope":
            # x * (cos, cos) + (second half, first half of x) * (sin, -sin), which is `apply_rotary`.
            self._cos, self._sin = torch.cat((model.cos, model.cos), 1), torch.cat((model.sin, -model.sin), 1)
        columns = config.seq_len + SPARE_COLUMNS + 1  # with a key offset, half of a key stands in the next one
        shape = (config.n_layer, 2, rows, config.kv_heads, columns, config.head_dim)
        by_kernel = ops.decodes_by_kernel(self._head.device, model.compute_dtype)
        dtype = torch.float32 if by_kernel else model.compute_dtype
        self._cache = torch.zeros(shape, device=self._head.device, dtype=dtype)
        self._column = config.seq_len  # the next one to be written
        self._starts = [self._column] * rows
        self._kernel = None
        if by_kernel:
            from gptlab.model.kernels.decode_kernel import DecodeKernel

            rotary = (self._cos, self._sin) if config.position == "rope" else None
            self._kernel = DecodeKernel(model, self._layers, self._head, self._cache, rotary)

    def bytes_per_step(self, columns: int) -> int:
        """What a step reads where each row holds `columns` tokens: weights of products, keys and values."""
        seen = sum(min(layer.window or columns, columns) for layer in self._layers)
        weights = self._head.nbytes
        for layer in self._layers:
            weights += layer.heads.nbytes + layer.attention_out.nbytes + layer.up.nbytes + layer.mlp_out.nbytes
        return weights + seen * self._cache[0, :, :, :, 0].nbytes

    def length(self, row: int) -> int:
        """How many tokens the row holds: at most seq_len."""
        return self._column - self._starts[row]

    def read(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Let each of `rows` hold `tokens` (1 to seq_len of them), by the model's own forward pass. Returns logits (V,)
        for the token after them."""
        n_tokens, device = len(tokens), self._head.device
        cache = KVCache(self.model.config, 1, n_tokens, device, self.model.compute_dtype)
        with torch.inference_mode():
            logits = self.model(torch.tensor([tokens], device=device), cache=cache)[0, -1]
            for row in rows:
                keys, values = cache.filled()[:, :, 0].to(self._cache.dtype).unbind(1)  # each (layers, G, n_tokens, D)
                start, stop = self._column - n_tokens, self._column
                self._cache[:, 1, row, :, start:stop] = values
                self._cache[:, 0, row, :, start:stop] = keys
                if (slow := self._layers[0].slow) is not None:
                    self._cache[:, 0, row, :, start + 1 : stop + 1, slow] = keys[..., slow]
                self._starts[row] = start
        return logits

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each row. Returns logits (B, V) for the tokens after them, as `GPT.forward` does.

        A row that already holds seq_len tokens gets logits without meaning, until it is read again.
        """
        if self._column + 1 == self._cache.shape[4]:
            self._move_to_front()
        config = self.model.config
        positions = [min(self._column - start, config.seq_len - 1) for start in self._starts]
        if self._kernel is not None:
            logits = self._kernel.step(tokens, positions, self._starts, self._column)
        else:
            logits = self._step_by_torch(torch.tensor(tokens, device=self._head.device), positions)
        self._column += 1
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if config.logit_softcap is None else torch_ops.softcap(logits, config.logit_softcap)

    def _step_by_torch(self, ids: Tensor, positions: list[int]) -> Tensor:
        first, device = min(self._starts), ids.device
        where: slice | Tensor = slice(positions[0], positions[0] + 1)
        seen = None
        if max(self._starts) > first:  # rows of different lengths
            where = torch.tensor(positions, device=device)
            columns = torch.arange(first, self._column + 1, device=device)
            seen = (columns >= torch.tensor(self._starts, device=device)[:, None])[:, None, None]  # (B, 1, 1, S)
        x = F.embedding(ids, self._embedding)  # (B, C)
        if self._positions is not None:
            x = x + self._positions[where]
        x = x.to(self.model.compute_dtype)
        if self._embedding_norm is not None:
            x = self._embedding_norm(x)
        rotary = (self._cos[where, None], self._sin[where, None]) if self._positions is None else None
        x0 = x
        for layer, cache in zip(self._layers, self._cache, strict=True):
            x = layer.step(x, x0, ids, rotary, cache, first, self._column, seen)
        return F.linear(self._final_norm(x), self._head)

    def _move_to_front(self) -> None:
        """Keep the last seq_len columns: no row that is in use has more."""
        kept = self.model.config.seq_len
        for layer in self._cache:
            layer[..., : kept + 1, :] = layer[..., self._column - kept : self._column + 1, :].clone()
        self._starts = [max(0, start - (self._column - kept)) for start in self._starts]
        self._column = kept


class _Layer:
    """One block's weights in the compute type, and its computation for one token a row."""

    def __init__(self, model: GPT, layer: int) -> None:
        block, config, dtype = model.blocks[layer], model.config, model.compute_dtype
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        self.attention_norm, self.mlp_norm = _norm(block.attention_norm), _norm(block.mlp_norm)
        self.qk_norm = None if attention.qk_norm is None else _norm(attention.qk_norm)
        self.window, self.activation = attention.window, ops.ACTIVATIONS[mlp.activation]
        self.n_head, self.n_kv_head, self.head_dim = attention.n_head, attention.n_kv_head, attention.head_dim
        self.scale = 1.0 if config.attention_residual_scale is None else config.attention_residual_scale
        self.slow = slow_channels(self.head_dim, model.head.weight.device) if config.key_offset else None
        self.lambdas = None
        if config.residual_lambdas:
            self.lambdas = model.residual_lambdas[layer].item(), model.x0_lambdas[layer].item()
        products = (attention.qkv, attention.out, mlp.up, mlp.out)
        weights: list[Tensor] = [linear.weight.detach() for linear in products]
        biases: list[Tensor | None] = [linear.bias for linear in products]
        self.value_table = None
        if (gate := attention.value_gate) is not None:
            # The gate's logits are more rows of the same product, with zeros for the channels that it does not read.
            weights[0] = torch.cat((weights[0], F.pad(gate.weight.detach(), (0, config.n_embd - gate.in_features))))
            biases[0] = None if biases[0] is None else F.pad(biases[0], (0, gate.out_features))
            self.value_table = model.get_parameter(f"value_embeddings.{layer}.weight").detach()
        self.heads, self.attention_out, self.up, self.mlp_out = (weight.to(dtype) for weight in weights)
        self.heads_bias, self.attention_bias, self.up_bias, self.mlp_bias = (
            None if bias is None else bias.detach().to(dtype) for bias in biases
        )

    def step(
        self,
        x: Tensor,  # (B, C)
        x0: Tensor,  # (B, C)
        ids: Tensor,  # (B,)
        rotary: tuple[Tensor, Tensor] | None,  # each (1 or B, 1, D)
        cache: Tensor,  # (2, B, G, S, D)
        first: int,
        column: int,
        seen: Tensor | None,  # (B, 1, 1, column + 1 - first)
    ) -> Tensor:  # (B, C)
        if self.lambdas is not None:
            x = torch.add(x * self.lambdas[0], x0, alpha=self.lambdas[1])
        rows, n_rotated, n_heads = len(x), self.n_head + self.n_kv_head, self.n_head + 2 * self.n_kv_head
        flat = F.linear(self.attention_norm(x), self.heads, self.heads_bias)
        heads = flat[:, : n_heads * self.head_dim].view(rows, n_heads, self.head_dim)
        qk, v = heads[:, :n_rotated], heads[:, n_rotated:]
        if self.value_table is not None:
            gate = torch.sigmoid(flat[:, n_heads * self.head_dim :]).unsqueeze(2)
            value = F.embedding(ids, self.value_table).to(v.dtype).view_as(v)
            v = torch.addcmul(v, gate, value, value=2)
        if rotary is not None:
            qk = torch.addcmul(qk * rotary[0], qk.roll(self.head_dim // 2, 2), rotary[1])
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        keys, values = cache
        if self.slow is None:
            keys[:, :, column] = qk[:, self.n_head :]
        else:  # the slow channels of this column are already those of the token before
            keys[:, :, column + 1, self.slow] = qk[:, self.n_head :, self.slow].to(keys.dtype)
            keys[:, :, column, ~self.slow] = qk[:, self.n_head :, ~self.slow].to(keys.dtype)
        values[:, :, column] = v
        start = first if self.window is None else max(first, column + 1 - self.window)
        # Without a causal mask, the queries that share a key-value head are like positions of one head.
        y = F.scaled_dot_product_attention(
            qk[:, : self.n_head].to(v.dtype).reshape(rows, self.n_kv_head, -1, self.head_dim),
            keys[:, :, start : column + 1],
            values[:, :, start : column + 1],
            attn_mask=None if seen is None else seen[..., start - first :],
        )
        x = _residual(x, y.reshape(rows, -1), self.attention_out, self.attention_bias, self.scale)
        up = self.activation(F.linear(self.mlp_norm(x), self.up, self.up_bias))
        return _residual(x, up, self.mlp_out, self.mlp_bias, 1.0)


def _residual(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """x + scale * (y @ weight.T + bias)"""
    x = torch.addmm(x, y, weight.t(), alpha=scale)
    return x if bias is None else torch.add(x, bias, alpha=scale)


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """PyTorch's own RMSNorm, one operation, for gptlab's, which is five; a LayerNorm as it is."""
    if not isinstance(module, RMSNorm):
        return module
    eps = module.eps
    return lambda x: F.rms_norm(x, x.shape[-1:], eps=eps)
