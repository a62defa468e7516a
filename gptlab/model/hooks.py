"""Whether calling a module runs anything but its class's forward: hooks, a patched forward, a compiled call."""

from __future__ import annotations

from torch import nn


def has_hooks(part: nn.Module) -> bool:
    """Whether hooks run with it."""
    return bool(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
    )  # fmt: skip


def is_hooked(part: nn.Module) -> bool:
    """Whether a call of this module runs hooks, or something else than its class's forward."""
    return has_hooks(part) or "forward" in part.__dict__ or bool(part._compiled_call_impl)


def all_are_hooked() -> bool:
    """Whether a global hook runs with every module of this process."""
    return nn.modules.module._has_any_global_hook()


def is_by_weight(layer: nn.Module) -> bool:
    """Whether calling it only multiplies by its weight and adds its bias, as `Linear` of `gpt` does."""
    is_own = type(layer).forward is getattr(type(layer), "by_weight", None)
    return is_own and not is_hooked(layer) and not all_are_hooked()
