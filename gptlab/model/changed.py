"""A model whose parts a Python caller replaces (`change_model`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gptlab.config.errors import UserError
from gptlab.model.gpt import GPT, MLP, Attention, Block, LayerNorm, Linear, RMSNorm
from gptlab.model.kernels.ops import implementations_kept
from gptlab.runtime.hardware.rng import capture_rng, fold_seed, restore_rng, seed_everything

_READ_FOR_WEIGHTS: dict[type[nn.Module], tuple[str, ...]] = {
    MLP: ("up", "out"), Block: ("attention_norm", "mlp_norm"), Attention: ("qk_norm",), GPT: ("head",),
}  # fmt: skip
"""{module: its parts whose `forward` is not always called}: kernels take their weights, or what else they hold."""
_GPTLABS = (Linear, RMSNorm, LayerNorm, type(None))


def apply_change(model: GPT, change: Callable[[GPT], None], seed: int, device: torch.device) -> None:
    """Have `change` replace parts of the model. It draws from generators that depend on the run's seed alone, and that
    nothing else draws from. UserError for a change that training would not follow."""
    generators = capture_rng(device)
    seed_everything(fold_seed(seed, 1), device)
    with implementations_kept():
        returned: object = change(model)  # type: ignore[func-returns-value]
    restore_rng(generators, device)
    if returned is not None:
        raise UserError("change_model returned something: it changes the model that it is given, and returns None")
    model.is_replaced = True
    model.to(device)
    for weight in model.parameters():  # a view of other memory: optimizers take what lies there, one after the other
        weight.data = weight.detach().contiguous()
    _require_called(model)
    _require_head(model)
    if frozen := next((name for name, weight in model.named_parameters() if not weight.requires_grad), None):
        raise UserError(f"change_model froze {frozen}: every parameter is trained; make it a buffer instead")
    model.saved_shapes = _saved_shapes(model)


def require_saved_shapes(model: GPT) -> None:
    """UserError where a part has other weights or persistent buffers than after the change, or of other shapes: no
    checkpoint of them could be loaded."""
    was, now = model.saved_shapes, _saved_shapes(model)
    if was == now:
        return
    name = next(name for name in {**was, **now} if was.get(name) != now.get(name))
    before, after = (str(tuple(shapes[name])) if name in shapes else "not there" for shapes in (was, now))
    raise UserError(
        f"change_model: {name} was {before} at first and is {after} after a step, but a checkpoint is loaded into the "
        "model as change_model makes it: keep its shape, or register it with persistent=False"
    )


def _saved_shapes(model: GPT) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _require_head(model: GPT) -> None:
    """UserError for a head from whose weights alone the loss is not computed."""
    rows, channels = model.head.weight.shape
    if rows < model.vocab_size or channels != model.config.n_embd or model.head.bias is not None:
        raise UserError(
            f"change_model made a head of {rows} x {channels} weights{' and a bias' * (model.head.bias is not None)}: "
            f"the loss needs {model.vocab_size} rows or more, of {model.config.n_embd}, and takes no bias"
        )


def _require_called(model: GPT) -> None:
    """UserError for a part whose `forward` would not be called, and is not gptlab's or is hooked."""
    for path, module in model.named_modules():
        for name in _READ_FOR_WEIGHTS.get(type(module), ()):
            part = getattr(module, name)
            own = part is not None and (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
            if own or type(part) not in _GPTLABS:
                around = f"replace {path}, which calls it" if path else "the loss is computed from its weights"
                raise UserError(
                    f"change_model replaced or hooked {path + '.' if path else ''}{name}, whose forward is not always "
                    f"called: {around}"
                )
