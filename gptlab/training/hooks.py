"""metrics.jsonl with functions that see its lines as they are written, for `gptlab.train(on_step=..., on_eval=...)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gptlab.runtime.hardware.rng import capture_rng, restore_rng
from gptlab.runtime.records.metrics import Kind, MetricsLog

Hook = Callable[[dict[str, Any]], object]
"""Gets a copy of a line's fields."""


class HookedMetricsLog(MetricsLog):
    """Calls `hooks[kind]` with each line of that kind. What they draw from random generators is undone."""

    def __init__(self, path: Path, hooks: Mapping[str, Hook], device: torch.device) -> None:
        super().__init__(path)
        self._hooks = hooks
        self._device = device

    def write(self, kind: Kind, /, **fields: object) -> None:
        super().write(kind, **fields)
        hook = self._hooks.get(kind)
        if hook is None:
            return
        generators = capture_rng(self._device)
        try:
            hook(dict(fields))
        finally:
            restore_rng(generators, self._device)
