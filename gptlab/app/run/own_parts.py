"""What a Python caller may give to a run beside its configuration: functions that watch it, and parts that replace its.

A watching function gets numbers, and may load or train other models. Afterwards the random generators, the kernels,
the number of threads and torch's gradient mode are put back: it cannot change the run. A part replaces what the
configuration would have made: run.json records its name and a fingerprint of its source and of the values that it
holds, and the run is resumed or repeated only with a part of that name.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from numbers import Number
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from gptlab.config.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from gptlab.config.run import RunConfig
    from gptlab.data.prepare import PreparedData
    from gptlab.data.rows import Pair, RowSource
    from gptlab.model.gpt import GPT
    from gptlab.optim.torch_optimizer import TorchOptimizer

_HOOKS = ("on_step", "on_eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnParts:
    on_step: Callable[[dict[str, Any]], object] | None = None
    """Gets each `train` line of metrics.jsonl as it is written."""
    on_eval: Callable[[dict[str, Any]], object] | None = None
    """Gets each `eval` line."""
    rows: Callable[[PreparedData, RunConfig], RowSource] | None = None
    """Makes the training rows."""
    optimizer: Callable[[GPT], torch.optim.Optimizer] | None = None
    """Makes the optimizer of all weights; the schedule multiplies its learning rates."""
    change_model: Callable[[GPT], None] | None = None
    """Changes the model that was built, before it is compiled and trained."""

    def __post_init__(self) -> None:
        for field in fields(self):
            part = getattr(self, field.name)
            if part is not None and not callable(part):
                raise UserError(f"{field.name} must be a function, this is {type(part).__name__}")

    def on_line(self, device: torch.device) -> Callable[[str, dict[str, Any]], None] | None:
        """Calls the function that watches lines of this kind, and puts back after it what other models change. None
        where nothing watches."""
        hooks = {"train": self.on_step, "eval": self.on_eval}
        if not any(hooks.values()):
            return None
        import torch

        from gptlab.model.kernels.ops import implementations_kept
        from gptlab.runtime.hardware.rng import capture_rng, restore_rng

        def call(kind: str, values: dict[str, Any]) -> None:
            if (hook := hooks.get(kind)) is not None:
                generators = capture_rng(device)
                try:
                    with implementations_kept(), torch.set_grad_enabled(torch.is_grad_enabled()):
                        hook(dict(values))
                finally:
                    restore_rng(generators, device)

        return call

    def make_rows(self, data: PreparedData, config: RunConfig) -> RowSource | None:
        """None where they are the configuration's. UserError for rows that cannot be trained on."""
        if self.rows is None:
            return None
        import numpy as np

        rows, length = self.rows(data, config), config.model.seq_len
        missing = [name for name in ("seq_len", "rows_per_epoch", "read", "target_counts") if not hasattr(rows, name)]
        if missing:
            raise UserError(f"rows must return a RowSource, this is {type(rows).__name__}, without {missing[0]}")
        if rows.seq_len != length or rows.rows_per_epoch < 1:
            raise UserError(
                f"rows returned {rows.rows_per_epoch:,} rows of {rows.seq_len} tokens: give at least one, of "
                f"model.seq_len = {length}"
            )
        checked = _CheckedRows(rows, data.tokenizer.vocab_size)
        checked.read(0, np.arange(1))
        return checked

    def of_state(self) -> dict[str, Callable[..., Any] | None]:
        """The arguments of `build_state` beside the configuration."""
        return {"change_model": self.change_model, "make_optimizer": self.optimizer and self._made_optimizer}

    def _made_optimizer(self, model: GPT, config: RunConfig) -> TorchOptimizer:
        from gptlab.optim.torch_optimizer import TorchOptimizer

        assert self.optimizer is not None
        return TorchOptimizer(self.optimizer(model), model)

    @property
    def replacing(self) -> dict[str, Callable[..., Any]]:
        """{argument: part}, of those that change the run."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _HOOKS}
        return {name: part for name, part in parts.items() if part is not None}

    def facts(self) -> dict[str, Any]:
        """For run.json."""
        hooks = [name for name in _HOOKS if getattr(self, name) is not None]
        parts = {name: _identity(part) for name, part in self.replacing.items()}
        return ({"own_parts": parts} if parts else {}) | ({"hooks": hooks} if hooks else {})

    def require_alone(self, world_size: int) -> None:
        """UserError for replaced parts in a run of several processes."""
        if world_size > 1 and self.replacing:
            raise UserError(f"{next(iter(self.replacing))} is for one process, but torchrun has started {world_size}")

    def require_those_of(self, path: object, record: Mapping[str, object], verb: str) -> list[str]:
        """Warnings where the source or a value of a part has changed since the run in `path`. UserError, which names
        what to give, where that run's parts have other names than these. `verb`: resume, repeat or load, which needs
        the model alone."""
        recorded = own_parts_of(record)
        if verb == "load":
            recorded = {name: part for name, part in recorded.items() if name == "change_model"}
        now = {name: _identity(part) for name, part in self.replacing.items()}
        every = ", ".join(f"{name}={part['name'].rpartition('.')[2]}" for name, part in sorted(recorded.items()))
        for name in sorted(recorded.keys() | now.keys()):
            then, here = recorded.get(name), now.get(name)
            if then is None:
                raise UserError(f"{path} was trained without {name}: leave it out to {verb} it")
            if here is None or here["name"] != then["name"]:
                given = "" if here is None else f", not {here['name']}"
                call = {"resume": "train(resume=", "repeat": "train(from_run=", "load": "load_run("}[verb]
                raise UserError(
                    f"{path} was trained with {name}={then['name']}{given}: {verb} it from Python, by "
                    f"gptlab.{call}{str(path)!r}, {every})"
                )
        changed = [name for name in now if now[name]["sha256"] != recorded[name]["sha256"]]
        return [
            f"the source of {name}, or a value that it holds, is not what {path} was trained with: not bit for bit"
            for name in changed
        ]


class _CheckedRows:
    """A caller's rows: kernels look up the tokens of each batch without another question."""

    def __init__(self, rows: RowSource, vocab_size: int) -> None:
        self._rows, self._vocab_size = rows, vocab_size
        self.seq_len, self.rows_per_epoch, self.target_counts = rows.seq_len, rows.rows_per_epoch, rows.target_counts

    def read(self, epoch: int, indices: np.ndarray) -> Pair:
        """UserError for what is no row of tokens."""
        import numpy as np

        read = self._rows.read(epoch, indices)
        try:
            inputs, targets = (np.asarray(tokens) for tokens in read)
        except (TypeError, ValueError):  # none, another number of them, rows of several lengths
            raise UserError("rows returned no inputs and targets: `read` returns an array of each") from None
        for kind, tokens, least in (("inputs", inputs, 0), ("targets", targets, -1)):
            is_whole = tokens.dtype.kind in "iu" and tokens.shape == (len(indices), self.seq_len)
            if not is_whole or tokens.min() < least or tokens.max() >= self._vocab_size:
                held = f"from {tokens.min()} to {tokens.max()}" if is_whole else f"of type {tokens.dtype}"
                raise UserError(
                    f"rows returned {kind} of shape {tokens.shape} {held}: a row has {self.seq_len} whole numbers from "
                    f"{least} to {self._vocab_size - 1} (-1: no target)"
                )
        return inputs, targets


def own_parts_of(record: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """The own parts in a run.json; empty where there are none."""
    parts = record.get("own_parts")
    if not isinstance(parts, dict):
        return {}
    return {
        str(name): {"name": str(part.get("name")), "sha256": part.get("sha256")}
        for name, part in parts.items()
        if isinstance(part, dict)
    }


def _identity(part: Callable[..., Any]) -> dict[str, Any]:
    """Name, and SHA-256 of the source and the values that the part holds (None where Python has no source, as for a
    function typed at a prompt)."""
    try:
        sha256 = hashlib.sha256(_source(part).encode()).hexdigest()
    except (OSError, TypeError, ValueError, RecursionError):
        sha256 = None
    target = _named(part)
    return {"name": f"{_module(target.__module__)}.{target.__qualname__}", "sha256": sha256}


def _module(name: str) -> str:
    """A module's name as another program imports it: that of the file for the program that was started, whose name is
    __main__."""
    file = getattr(sys.modules[name], "__file__", None) if name in ("__main__", "__mp_main__") else None
    return name if file is None else Path(file).stem


def _named(part: Callable[..., Any]) -> Any:
    """The function or class that `part` is or comes from."""
    function = part.func if isinstance(part, partial) else part
    return function if hasattr(function, "__qualname__") else type(function)


def _source(part: Callable[..., Any]) -> str:
    """The source of a function or class, followed by the values by which parts of one source differ: default and bound
    arguments, variables of the function around it, attributes. OSError, TypeError, ValueError or RecursionError where
    Python has none."""
    if isinstance(part, partial):
        return _source(part.func) + _text([part.args, part.keywords])
    cells = getattr(part, "__closure__", None) or ()
    owner = getattr(part, "__self__", part)
    held = [
        getattr(part, "__defaults__", None), getattr(part, "__kwdefaults__", None),
        [cell.cell_contents for cell in cells],
        None if isinstance(owner, type) else getattr(owner, "__dict__", None),
    ]  # fmt: skip
    return inspect.getsource(_named(part)) + "".join(_text(values) for values in held if values)


def _text(value: object) -> str:
    """A plain value or a function in full; anything else, such as a tensor, by its name or that of its type."""
    if value is None or isinstance(value, Number | str | bytes):
        return repr(value)
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, FunctionType | MethodType | partial):
        return _source(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))
