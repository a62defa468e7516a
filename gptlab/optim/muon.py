"""Muon: momentum, orthogonalized (K. Jordan et al., 2024), over stacks of matrices of one shape.

    momentum   B <- m B + (1 - m) G
    direction  D  = (1 - m) G + m B             (Nesterov; else B)
    update     U  = orthogonalize(D)            NorMuon: rows or columns of U evened out
    weight     W <- W - lr (scale(shape) U + weight_decay W)

modded-nanogpt keeps the sum B <- m B + G and takes G + m B. At constant m that is this direction divided by (1 - m).
Orthogonalization ignores a factor, so the updates are the same. The mean is kept here because its size does not change
when m does (the momentum ramp of autoresearch and nanochat).

Decay is lr * weight_decay * W whatever the update scale, as in torch.optim.Muon; with `scaled_decay` the scale
multiplies it too, as in nanochat and autoresearch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from gptlab.config.optim import MuonConfig, UpdateScale
from gptlab.model.kernels import ops
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
    """Elements of NorMuon's second moment for each part of a matrix. One flat tensor holds all parts, because tall and
    wide ones (query and key of grouped-query attention) have moments of different shapes."""
    return [max(rows, cols) for rows in row_split]


def neuron_scale(update: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """NorMuon (arXiv:2510.05491), the form of modded-nanogpt and nanochat: what to multiply each neuron's update by.

    `update`: (stack, rows, cols), orthogonalized. `second_moment`: (stack, rows, 1) or (stack, 1, cols), the running
    mean of squares with decay `beta2`, updated in place; the factor has its shape. The Frobenius norm of every matrix
    stays what it was, which is why a moment that began at zero needs no bias correction.
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


Number = float | Tensor
"""A 0-d tensor where torch.compile must not make a constant of it."""
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function -> the same, compiled."""


def direction(mean: Tensor, gradient: Tensor, momentum: Number, nesterov: bool) -> tuple[Tensor, Tensor]:
    """The next running mean of the gradients, and what is to be orthogonalized. Elementwise: the tensors may be any
    parts of the matrices."""
    mean = torch.lerp(mean, gradient, 1.0 - momentum)
    return mean, torch.lerp(gradient, mean, momentum) if nesterov else mean


def orthogonal_update(
    stack: Tensor, second_moments: Tensor | None, config: MuonConfig, compute_dtype: torch.dtype
) -> Tensor:
    """The update U of each direction of a stack (n, rows, cols), times `shape_scale`. NorMuon takes one second moment
    for each direction, (n, rows, 1) or (n, 1, cols), and updates them in place."""
    update = orthogonalize(stack, config.orthogonalizer, config.iterations, dtype=compute_dtype)
    scale = shape_scale(config.update_scale, *update.shape[-2:])
    if second_moments is None or config.normuon_beta2 is None:
        return update.mul_(scale)
    if (kernels := ops.muon_kernels(update, second_moments)) is not None:
        kernels.even_out(update, second_moments, config.normuon_beta2, scale)
        return update
    return update.mul_(neuron_scale(update, second_moments, config.normuon_beta2) * scale)


def with_decay(
    update: Tensor, weight: Tensor, weight_decay: Number, config: MuonConfig, rows: int, cols: int
) -> Tensor:
    """The update with its weight decay. Elementwise: `update` and `weight` may be any part of a matrix (rows, cols)."""
    decay = weight_decay * decay_scale(config, rows, cols)
    return _sum(update, cautious(weight, update) if config.cautious_decay else weight, decay)


def decay_scale(config: MuonConfig, rows: int, cols: int) -> float:
    """The factor on the weight decay of a matrix of this shape."""
    return shape_scale(config.update_scale, rows, cols) if config.scaled_decay else 1.0


def _sum(x: Tensor, y: Tensor, factor: Number) -> Tensor:
    """x + factor y"""
    return torch.addcmul(x, y, factor) if isinstance(factor, Tensor) else torch.add(x, y, alpha=factor)


def kept_unless(made: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """`new`; `old` where `made` (0-d bool) is False, whatever `new` is."""
    return new if made is None else torch.where(made, new, old)


def _is_made(made: Tensor | None) -> bool:
    """Asked on CPUs only: to wait for a GPU's answer would hold up the next step."""
    return made is None or bool(made)


# --- what a step does to some matrices of one shape, or to the same rows of each: `Muon` and `ShardedMuon`


def move_means(
    means: list[Tensor], gradients: list[Tensor], momentum: Number, nesterov: bool, made: Tensor | None
) -> Tensor:
    """Move the running means of the gradients; returns what is to be orthogonalized, (n, rows, cols). `made` (0-d
    bool), here and below: where False, nothing moves."""
    if (kernels := ops.muon_kernels(*means)) is not None and _is_made(made):
        return cast(Tensor, kernels.directions(means, gradients, momentum, nesterov))
    old = torch.stack(means)
    # A mean that moves towards itself stays, and what follows is finite.
    new, directions = direction(old, kept_unless(made, torch.stack(gradients), old), momentum, nesterov)
    torch._foreach_copy_(means, new.unbind())
    return directions


def make_updates(
    directions: Tensor, second_moments: list[Tensor], config: MuonConfig, compute_dtype: torch.dtype,
    made: Tensor | None, orthogonal_update: Callable[..., Tensor] = orthogonal_update,
) -> Tensor:  # fmt: skip
    """`orthogonal_update` of whole matrices; moves the second moment of each. No moments without NorMuon."""
    new = torch.stack(second_moments) if second_moments else None
    update = orthogonal_update(directions, new, config, compute_dtype)
    if new is not None:
        torch._foreach_copy_(second_moments, kept_unless(made, new, torch.stack(second_moments)).unbind())
    return update


def step_weights(
    weights: list[Tensor], updates: Tensor, lr: Number, weight_decay: Number, config: MuonConfig,
    shape: tuple[int, int], made: Tensor | None,
) -> None:  # fmt: skip
    """Apply updates (n, rows here, cols) to rows of matrices of this shape."""
    of_each = updates.unbind()
    if (kernels := ops.muon_kernels(*weights, *of_each)) is not None and _is_made(made):
        decay = weight_decay * decay_scale(config, *shape)
        kernels.step(weights, of_each, lr, decay, config.cautious_decay)
        return
    old = torch.stack(weights)
    if config.weight_decay > 0.0:
        updates = with_decay(updates, old, weight_decay, config, *shape)
    torch._foreach_copy_(weights, kept_unless(made, _sum(old, updates, -lr), old).unbind())


class Stack(NamedTuple):
    """Weights, running means and second moments of n matrices of one shape."""

    weights: Tensor
    """(n, rows, cols)"""
    means: Tensor
    """(n, rows, cols)"""
    second_moments: Tensor | None
    """(n, rows, 1) or (n, 1, cols); None without NorMuon."""


def updated(
    stack: Stack, gradients: Tensor, rates: Sequence[Number], config: MuonConfig, compute_dtype: torch.dtype,
    made: Tensor | None,
) -> Stack:  # fmt: skip
    """The next stack, for torch.compile: as one function of its own. `rates`: learning rate, momentum, weight decay."""
    lr, momentum, weight_decay = rates
    weights, second_moments = stack.weights, None if stack.second_moments is None else stack.second_moments.clone()
    gradients = kept_unless(made, gradients, stack.means)
    means, to_orthogonalize = direction(stack.means, gradients, momentum, config.nesterov)
    update = orthogonal_update(to_orthogonalize, second_moments, config, compute_dtype)
    if config.weight_decay > 0.0:
        update = with_decay(update, weights, weight_decay, config, *weights.shape[1:])
    moments = None if second_moments is None else kept_unless(made, second_moments, cast(Tensor, stack.second_moments))
    return Stack(kept_unless(made, _sum(weights, update, -lr), weights), means, moments)


class Matrix(NamedTuple):
    """Rows of one parameter that are orthogonalized as one matrix: views of its weight and its state."""

    parameter: Parameter
    first_row: int
    momentum: Tensor
    """(rows, cols)"""
    second_moment: Tensor | None
    """(rows, 1) or (1, cols); None without NorMuon."""

    @property
    def weight(self) -> Tensor:
        """(rows, cols). Taken from the parameter at each step: `model.to()` and `copy.deepcopy` move its data."""
        return self.parameter.detach().narrow(0, self.first_row, len(self.momentum))

    @property
    def gradient(self) -> Tensor:
        return cast(Tensor, self.parameter.grad).narrow(0, self.first_row, len(self.momentum))


class Muon:
    """State of one parameter: NAME.momentum (its shape) and, with NorMuon, NAME.second_moment (flat, all parts)."""

    def __init__(
        self, parameters: Mapping[str, Parameter], config: MuonConfig, *, compute_dtype: torch.dtype,
        row_splits: Mapping[str, tuple[int, ...]],
    ) -> None:  # fmt: skip
        self.parameters = dict(parameters)
        given = row_splits if config.split_qkv else {}
        self.row_splits = {name: given.get(name, (len(p),)) for name, p in parameters.items()}
        self._config = config
        self._compute_dtype = compute_dtype
        self._updated: Callable[..., Stack] | None = None
        """`updated`, compiled."""
        self._state: dict[str, Tensor] = {}
        self._stacks: dict[tuple[int, int], list[Matrix]] = {}
        """By shape."""
        for name, parameter in parameters.items():
            self._add(name, parameter)

    def _add(self, name: str, parameter: Parameter) -> None:
        """Make the state of a parameter, and put its matrices on their stacks."""
        if parameter.ndim != 2:
            raise ValueError(f"Muon updates matrices, but {name} has shape {tuple(parameter.shape)}")
        weight, split = parameter.detach(), self.row_splits[name]
        rows, cols = weight.shape
        momentum = self._state[f"{name}.momentum"] = weight.new_zeros(weight.shape)
        seconds: list[Tensor | None] = [None] * len(split)
        if self._config.normuon_beta2 is not None:
            sizes = second_moment_sizes(split, cols)
            flat = self._state[f"{name}.second_moment"] = weight.new_zeros(sum(sizes))
            parts = zip(split, flat.split(sizes), strict=True)
            seconds = [part.unsqueeze(neuron_dim(rows, cols)) for rows, part in parts]
        first_row = 0
        for rows, m, second in zip(split, momentum.split(split), seconds, strict=True):
            self._stacks.setdefault((rows, cols), []).append(Matrix(parameter, first_row, m, second))
            first_row += rows

    def step(self, lr_scale: float, momentum: float, weight_decay_scale: float, made: Tensor | None = None) -> None:
        """`made`: as for `CombinedOptimizer.step`."""
        for shape in self._stacks:
            self.step_stack(shape, lr_scale, momentum, weight_decay_scale, made)

    @torch.no_grad()
    def step_stack(
        self, shape: tuple[int, int], lr_scale: float, momentum: float, weight_decay_scale: float,
        made: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Update the matrices of one shape (rows, cols), if there are any."""
        matrices, config = self._stacks.get(shape, []), self._config
        if not matrices:
            return
        weights, means = [one.weight for one in matrices], [one.momentum for one in matrices]
        gradients = [one.gradient for one in matrices]
        seconds = [one.second_moment for one in matrices if one.second_moment is not None]
        lr, weight_decay = config.lr * lr_scale, config.weight_decay * weight_decay_scale
        if self._updated is None:
            directions = move_means(means, gradients, momentum, config.nesterov, made)
            update = make_updates(directions, seconds, config, self._compute_dtype, made)
            step_weights(weights, update, lr, weight_decay, config, shape, made)
            return
        stack = Stack(torch.stack(weights), torch.stack(means), torch.stack(seconds) if seconds else None)
        rates = lr, momentum, weight_decay
        new = self._updated(stack, torch.stack(gradients), rates, config, self._compute_dtype, made)
        for live, stacked in zip((weights, means, seconds), new, strict=True):
            if stacked is not None:
                torch._foreach_copy_(live, stacked.unbind(0))

    def compile(self, compiled: Compile | None) -> None:
        """Fuse the update of a stack; None: no longer. Its rates then are 0-d tensors, so that nothing is compiled
        again as they move."""
        if compiled is None:
            self._updated = None
            return
        function = compiled(updated)

        def with_tensors(
            stack: Stack, gradients: Tensor, rates: Sequence[Number], config: MuonConfig, dtype: torch.dtype,
            made: Tensor | None,
        ) -> Stack:  # fmt: skip
            numbers = [rate if isinstance(rate, Tensor) else gradients.new_full((), rate) for rate in rates]
            made = gradients.new_ones((), dtype=torch.bool) if made is None else made
            return Stack(*function(stack, gradients, numbers, config, dtype, made))

        self._updated = with_tensors

    def state_tensors(self) -> dict[str, Tensor]:
        """The live tensors, by PARAMETER.MOMENT. They do not depend on how the matrices are stacked."""
        return dict(self._state)
