"""Muon: momentum, orthogonalized (K. Jordan et al., 2024), over stacks of matrices of one shape.

    momentum   B <- m B + (1 - m) G
    direction  D  = (1 - m) G + m B             (Nesterov; else B)
    update     U  = orthogonalize(D)            NorMuon: rows or columns of U evened out
    weight     W <- W - lr (scale(shape) U + weight_decay W)

modded-nanogpt keeps the sum B <- m B + G and takes G + m B. At constant m that is this direction divided by (1 - m).
Orthogonalization removes the factor, so the updates are the same. The mean is kept here because its size does not
change when m does (the ramp of autoresearch and nanochat).

Decay is lr * weight_decay * W whatever the update scale, as in torch.optim.Muon; with `scaled_decay` the scale
multiplies it too, as in nanochat and autoresearch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gptlab.config.optim import MuonConfig, UpdateScale
from gptlab.optim.division import Leaf, Matrix, Moment, Segment
from gptlab.optim.orthogonalize import orthogonalize


def shape_scale(rule: UpdateScale, rows: int, cols: int) -> float:
    """The factor on an orthogonal update of this shape, whose mean square is 1 / max(rows, cols)."""
    if rule == "aspect":
        return math.sqrt(max(1.0, rows / cols))
    if rule == "max_side":
        return math.sqrt(max(rows, cols))  # a mean square of 1
    return 0.2 * math.sqrt(max(rows, cols))  # AdamW's usual root mean square


def neuron_dim(rows: int, cols: int) -> int:
    """The dimension that NorMuon averages squares over: a tall matrix has one moment a row, a wide one one a column."""
    return -1 if rows >= cols else -2


def second_moment_sizes(row_split: Sequence[int], cols: int) -> list[int]:
    """Numbers of NorMuon's state for each part of a matrix. One flat tensor holds them all, since parts may be tall and
    wide (query and key of grouped-query attention)."""
    return [max(rows, cols) for rows in row_split]


def neuron_scale(update: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """NorMuon (arXiv:2510.05491), the form of modded-nanogpt and nanochat: what to multiply each neuron's update by.

    Args:
        update: (stack, rows, cols), orthogonalized.
        second_moment: (stack, rows, 1) or (stack, 1, cols), running mean of squares; updated in place.
        beta2: its decay.

    Returns: a factor of second_moment's shape. The Frobenius norm of every matrix stays what it was, which is why a
    moment that began at zero needs no bias correction.
    """
    rows, cols = update.shape[-2:]
    squares = update.square().mean(dim=neuron_dim(rows, cols), keepdim=True)
    second_moment.lerp_(squares, 1.0 - beta2)
    scale = second_moment.clamp_min(1e-10).rsqrt()
    before = squares.sum(dim=(-2, -1), keepdim=True).sqrt()
    after = (squares * scale.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return scale * (before / after.clamp_min(1e-10))


def cautious(weight: Tensor, update: Tensor) -> Tensor:
    """The weights that this update already moves towards zero; the others as 0, free of decay (arXiv:2510.12402)."""
    # A float mask: torch.where, masked_fill and a product with a bool mask take 8 to 15 times as long on the CPU.
    return (update * weight).ge_(0.0).mul_(weight)


def directions(means: list[Tensor], gradients: list[Tensor], momentum: float, nesterov: bool) -> list[Tensor]:
    """Take the gradients into their running means, in place, and return what is to be orthogonalized. Any shapes:
    entry by entry."""
    torch._foreach_lerp_(means, gradients, 1.0 - momentum)
    return list(torch._foreach_lerp(gradients, means, momentum)) if nesterov else means


def orthogonal_update(
    stack: Tensor, second_moments: list[Tensor], config: MuonConfig, compute_dtype: torch.dtype
) -> Tensor:
    """The update U of each direction of a stack (n, rows, cols), times `shape_scale`. With NorMuon, one second moment
    for each, (rows, 1) or (1, cols), updated in place."""
    update = orthogonalize(stack, config.orthogonalizer, config.iterations, dtype=compute_dtype)
    scale = shape_scale(config.update_scale, *update.shape[-2:])
    if config.normuon_beta2 is None:
        return update.mul_(scale)
    moments = torch.stack(second_moments)
    update.mul_(neuron_scale(update, moments, config.normuon_beta2) * scale)
    torch._foreach_copy_(second_moments, moments.unbind(0))
    return update


def add_decay(update: Tensor, weight: Tensor, weight_decay: float, config: MuonConfig, rows: int, cols: int) -> None:
    """Add the decay of the weights to their update, in place: entry by entry, of matrices (rows, cols) or parts of
    them."""
    if weight_decay > 0.0:
        decay = weight_decay * shape_scale(config.update_scale, rows, cols) if config.scaled_decay else weight_decay
        update.add_(cautious(weight, update) if config.cautious_decay else weight, alpha=decay)


@dataclass(slots=True)
class Block:
    """Consecutive rows of one parameter that are orthogonalized as one matrix, with its share of the state."""

    name: str
    parameter: torch.nn.Parameter
    first_row: int
    rows: int
    momentum: Tensor
    """(rows, cols)"""
    second_moment: Tensor | None
    """(rows, 1) or (1, cols); None without NorMuon."""

    def weight(self) -> Tensor:
        return self.parameter.detach().narrow(0, self.first_row, self.rows)

    def gradient(self) -> Tensor:
        if self.parameter.grad is None:
            raise RuntimeError(f"{self.name} has no gradient")
        return self.parameter.grad.narrow(0, self.first_row, self.rows)


class Muon:
    """State of one parameter: NAME.momentum (its shape) and, with NorMuon, NAME.second_moment (its blocks', flat). With
    a `share`, only the blocks in it are updated, and have a state here."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        config: MuonConfig,
        *,
        compute_dtype: torch.dtype,
        row_splits: Mapping[str, tuple[int, ...]],
        share: Collection[Segment] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.row_splits = {
            name: row_split(name, tuple(p.shape), config, row_splits) for name, p in self.parameters.items()
        }
        self._config = config
        self._compute_dtype = compute_dtype
        self.leaves: list[Leaf] = []
        """Empty without a share."""
        self._moments: list[Moment] = []
        self._stacks = self._stacked_blocks(share)

    @torch.no_grad()
    def step(
        self,
        lr_scale: float,
        momentum: float,
        weight_decay_scale: float,
        moved: Callable[[str], None] = lambda stack: None,
    ) -> None:
        """`moved` is called behind each stack of matrices, with its `Matrix.stack`: the same ones in the same order
        whatever the share is."""
        lr = self._config.lr * lr_scale
        weight_decay = self._config.weight_decay * weight_decay_scale
        for (rows, cols, *_), blocks in self._stacks.items():
            if blocks:
                self._step_stack(blocks, lr, momentum, weight_decay)
            moved(f"{rows}x{cols}")

    def moments(self) -> list[Moment]:
        """The live tensors; they do not depend on how the matrices are stacked."""
        return list(self._moments)

    def state_kinds(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of the whole state, by PARAMETER.MOMENT."""
        kinds = {f"{name}.momentum": (tuple(p.shape), p.dtype) for name, p in self.parameters.items()}
        if self._config.normuon_beta2 is not None:
            for name, p in self.parameters.items():
                sizes = second_moment_sizes(self.row_splits[name], p.size(1))
                kinds[f"{name}.second_moment"] = ((sum(sizes),), p.dtype)
        return kinds

    def state_tensors(self) -> dict[str, Tensor]:
        """The live tensors, by PARAMETER.MOMENT."""
        return {moment.key: moment.tensor for moment in self._moments}

    def _step_stack(self, blocks: Sequence[Block], lr: float, momentum: float, weight_decay: float) -> None:
        config = self._config
        means, gradients = [block.momentum for block in blocks], [block.gradient() for block in blocks]
        stack = torch.stack(directions(means, gradients, momentum, config.nesterov))
        moments = [block.second_moment for block in blocks if block.second_moment is not None]
        update = orthogonal_update(stack, moments, config, self._compute_dtype)
        weights = [block.weight() for block in blocks]
        if weight_decay > 0.0:
            add_decay(update, torch.stack(weights), weight_decay, config, *update.shape[-2:])
        torch._foreach_add_(weights, update.unbind(0), alpha=-lr)

    def _stacked_blocks(self, share: Collection[Segment] | None) -> dict[tuple[Any, ...], list[Block]]:
        stacks: dict[tuple[Any, ...], list[Block]] = {}
        for name, parameter in self.parameters.items():
            blocks = self._whole_blocks(name) if share is None else self._owned_blocks(name, share)
            for rows in self.row_splits[name]:
                stacks.setdefault((rows, parameter.size(1), parameter.device, parameter.dtype), [])
            for block in blocks:
                stacks[(block.rows, parameter.size(1), parameter.device, parameter.dtype)].append(block)
        return stacks

    def _whole_blocks(self, name: str) -> list[Block]:
        """All blocks of a parameter, on one momentum and one second moment."""
        p = self.parameters[name]
        cols, split = p.size(1), self.row_splits[name]
        momentum = torch.zeros_like(p.detach())
        self._moments.append(Moment(f"{name}.momentum", tuple(p.shape), 0, momentum))
        second_moments: list[Tensor | None] = [None] * len(split)
        if self._config.normuon_beta2 is not None:
            sizes = second_moment_sizes(split, cols)
            flat = p.new_zeros(sum(sizes), requires_grad=False)
            self._moments.append(Moment(f"{name}.second_moment", tuple(flat.shape), 0, flat))
            parts = zip(split, flat.split(sizes), strict=True)
            second_moments = [part.unsqueeze(neuron_dim(rows, cols)) for rows, part in parts]
        first_rows = accumulate(split, initial=0)
        return [
            Block(name, p, first_row, rows, momentum.narrow(0, first_row, rows), second_moment)
            for first_row, rows, second_moment in zip(first_rows, split, second_moments, strict=False)
        ]

    def _owned_blocks(self, name: str, share: Collection[Segment]) -> list[Block]:
        """Those of a parameter that are in the share, each with moments of its own."""
        p = self.parameters[name]
        cols, split = p.size(1), self.row_splits[name]
        sizes = second_moment_sizes(split, cols)
        blocks = []
        for matrix, first, size in zip(
            matrices_of(name, cols, split), accumulate(sizes, initial=0), sizes, strict=False
        ):
            if matrix.segment not in share:
                continue
            leaf = Leaf.of(matrix.segment, p, (matrix.rows, cols))
            self.leaves.append(leaf)
            momentum = torch.zeros_like(leaf.own.detach())
            self._moments.append(Moment(f"{name}.momentum", tuple(p.shape), matrix.segment.start, momentum))
            second_moment = None
            if self._config.normuon_beta2 is not None:
                flat = p.new_zeros(size, requires_grad=False)
                self._moments.append(Moment(f"{name}.second_moment", (sum(sizes),), first, flat))
                second_moment = flat.unsqueeze(neuron_dim(matrix.rows, cols))
            blocks.append(Block(name, leaf.own, 0, matrix.rows, momentum, second_moment))
        return blocks


def matrices_of(name: str, cols: int, split: Sequence[int]) -> list[Matrix]:
    """The matrices that Muon orthogonalizes of a parameter, by the rows of each."""
    return [
        Matrix(name, first_row, rows, cols)
        for first_row, rows in zip(accumulate(split, initial=0), split, strict=False)
    ]


def row_split(
    name: str, shape: tuple[int, ...], config: MuonConfig, row_splits: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """Rows of each part of a matrix that is orthogonalized by itself. ValueError for what is none, or a split that does
    not fit."""
    if len(shape) != 2:
        raise ValueError(f"Muon updates matrices, but {name} has shape {shape}")
    rows = shape[0]
    if not config.split_qkv or name not in row_splits:
        return (rows,)
    split = tuple(row_splits[name])
    if sum(split) != rows or min(split) < 1:
        raise ValueError(f"the row split {split} of {name} does not add up to its {rows} rows")
    return split
