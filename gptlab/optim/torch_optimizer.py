"""Any torch.optim.Optimizer in the place of Muon and AdamW, for `gptlab.train(optimizer=...)`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gptlab.config.errors import UserError
from gptlab.optim.combined import CombinedOptimizer

_STATE_VERSION = 1

_LOOKS_AT_ATTRIBUTES = 2
"""Steps before and after which attributes are compared: what the first one makes to count in is there in the second."""
_SAVED = {"state", "param_groups", "_need_device_dtype_check_for_fused"}
"""Attributes of an optimizer that a step may change; torch itself changes the last in the first step."""


class TorchOptimizer(CombinedOptimizer):
    """One of torch's optimizers for all weights of a model, with the methods of `CombinedOptimizer`, but no Muon or
    AdamW.

    Its learning rates are peaks: each step multiplies them by the schedule's. Its state is saved with every checkpoint,
    tensors as PARAMETER.NAME, with what it counts in its `param_groups`.
    """

    def __init__(self, inner: torch.optim.Optimizer, model: nn.Module) -> None:
        """UserError unless `inner` has exactly the weights of `model`, a rate for each group, a `step` without
        arguments, no lr_scheduler, and nothing that cannot be saved."""
        super().__init__(None, None)
        self.inner = inner
        self.parameters = dict(model.named_parameters())
        if not isinstance(inner, torch.optim.Optimizer):
            raise UserError(f"optimizer must return a torch.optim.Optimizer, this is {type(inner).__name__}")
        held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
        missing = [name for name, parameter in self.parameters.items() if id(parameter) not in held]
        if missing or len(held) != len(self.parameters):
            what = f"lacks {missing[0]}" if missing else "has parameters that are not the model's"
            raise UserError(f"optimizer must hold every weight of the model: {type(inner).__name__} {what}")
        kind = type(inner).__name__
        if hasattr(inner.step, "_wrapped_by_lr_sched"):
            raise UserError(
                f"optimizer: {kind} has a torch.optim.lr_scheduler, but the run's schedule sets its rates: leave it out"
            )
        if any("lr" not in group for group in inner.param_groups):
            raise UserError(f"optimizer: {kind} has a group without 'lr', which the schedule multiplies: give it one")
        if needed := [name for name, one in inspect.signature(inner.step).parameters.items() if _is_required(one)]:
            raise UserError(f"optimizer: {kind}.step needs {needed[0]}, but a training step computes gradients once")
        for one in _within(vars(inner).values()):
            if one.state is not inner.state:
                raise UserError(
                    f"optimizer: {kind} holds another optimizer, {type(one).__name__}, whose state would not be saved: "
                    f"set its `state` to that of {kind}"
                )
        self._peaks = [float(group["lr"]) for group in inner.param_groups]
        self._made = [deepcopy(_beside_weights(group)) for group in inner.param_groups]
        self._steps = 0
        self._counted()

    def step(self, lr_scale: float, momentum: float, weight_decay_scale: float, made: Tensor | None = None) -> None:
        """One update at `lr_scale` times the peak rates. The schedules of Muon do not apply. `made` (0-d bool): no
        update where False, which the host waits for."""
        if made is not None and not made:
            return
        for group, peak in zip(self.inner.param_groups, self._peaks, strict=True):
            group["lr"] = peak * lr_scale
        before = self._attributes() if self._steps < _LOOKS_AT_ATTRIBUTES else []
        self.inner.step()
        self._counted()  # what cannot be saved ends the first step, and not the first save
        self._require_savable_state()
        if before:
            self._require_kept_attributes(before)
        self._steps += 1

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """By PARAMETER.NAME; live. Empty before the first step."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.inner.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def state_json(self) -> dict[str, Any]:
        """The rest of its state, which JSON must be able to hold."""
        rest = {
            name: {key: v for key, v in self.inner.state.get(p, {}).items() if not isinstance(v, Tensor)}
            for name, p in self.parameters.items()
        }
        return {
            "version": _STATE_VERSION, "torch": type(self.inner).__name__, "state": rest, "groups": self._counted(),
        }  # fmt: skip

    def _counted(self) -> list[dict[str, Any]]:
        """What differs in each of the `param_groups` from when it was made, such as a number of steps, beside the
        learning rate. UserError for what JSON cannot hold."""
        groups = [
            {k: v for k, v in _beside_weights(group).items() if _is_changed(v, made.get(k))}
            for group, made in zip(self.inner.param_groups, self._made, strict=True)
        ]
        for key, value in (item for group in groups for item in group.items()):
            if not _json_holds(value):
                raise UserError(
                    f"optimizer: {type(self.inner).__name__} keeps a {type(value).__name__} as {key!r} in its "
                    "param_groups, where checkpoints hold finite numbers, strings and lists: keep it in its state"
                )
        return groups

    def _attributes(self) -> list[dict[str, object]]:
        """Of the optimizer and of those within it, what is neither saved nor torch's."""
        held = [self.inner, *_within(vars(self.inner).values())]
        return [{name: _compared(v) for name, v in vars(one).items() if name not in _SAVED} for one in held]

    def _require_kept_attributes(self, before: list[dict[str, object]]) -> None:
        """UserError for an attribute that a step changed. One that it makes, such as room to compute in, may stay."""
        for then, now in zip(before, self._attributes(), strict=False):
            for name in now:
                if then.get(name) is not None and now[name] != then[name]:
                    raise UserError(
                        f"optimizer: {type(self.inner).__name__} changes its attribute {name}, which checkpoints lack: "
                        "keep it in its state or param_groups"
                    )

    def _require_savable_state(self) -> None:
        """UserError for what `state_tensors` and `state_json` would leave out, or JSON cannot hold."""
        kind = type(self.inner).__name__
        for of, state in self.inner.state.items():
            if not isinstance(of, Tensor):
                raise UserError(f"optimizer: {kind} keeps state of {of!r}, which is no weight: keep it in param_groups")
            for key, value in state.items():
                if not isinstance(key, str):
                    raise UserError(f"optimizer: {kind} keeps state under {key!r}: use strings as keys")
                if not isinstance(value, Tensor) and not _json_holds(value):
                    raise UserError(
                        f"optimizer: {kind} keeps a {type(value).__name__} as {key!r} in its state, where checkpoints "
                        "hold what JSON does, and tensors, each under a key of its own"
                    )

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
        """Take over a saved state. UserError where it is another optimizer's."""
        kind = type(self.inner).__name__
        if saved.get("version") != _STATE_VERSION or saved.get("torch") != kind:
            raise UserError(f"optimizer state: saved by {saved.get('torch', 'gptlab')}, but this is {kind}")
        for name, parameter in self.parameters.items():
            prefix = f"{name}."  # no weight's name begins so: a parameter has no parameters
            own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            # As load_state_dict does: counters stay where they are, moments go where the weight is.
            state = {
                key: value.clone() if value.ndim == 0 else value.to(parameter.device, copy=True)
                for key, value in own.items()
            }
            self.inner.state[parameter] = {**state, **saved["state"].get(name, {})}
        # Not in checkpoints of the first version: groups.
        counted = saved.get("groups", [{} for _ in self._made])
        if len(counted) != len(self._made):
            raise UserError(f"optimizer state: of {len(counted)} param_groups, but this {kind} has {len(self._made)}")
        for group, made, changed in zip(self.inner.param_groups, self._made, counted, strict=True):
            group |= deepcopy(made) | changed


def _is_required(parameter: inspect.Parameter) -> bool:
    by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return by_position and parameter.default is parameter.empty


def _within(values: Iterable[object]) -> Iterator[torch.optim.Optimizer]:
    """The optimizers among these values, and in lists, tuples and dicts of them."""
    for value in values:
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif isinstance(value, list | tuple):
            yield from _within(value)
        elif isinstance(value, dict):
            yield from _within(value.values())


def _compared(value: object) -> object:
    """What differs after a change: numbers and text, tensors by their versions, arrays, lists and dicts of these. None
    for all else, for weights, and for a bool, which says that something is made and not how often."""
    if isinstance(value, Mapping):
        return {key: _compared(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_compared(held) for held in value]
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return repr(value) if isinstance(value, Number | str | bytes) and not isinstance(value, bool) else None


def _is_changed(value: object, made: object) -> bool:
    try:
        return isinstance(value, Tensor) or bool(value != made)
    except (RuntimeError, ValueError):  # an array, or a list of tensors
        return True


def _beside_weights(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def _json_holds(value: object) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
