"""The newest checkpoint of a run, as its manifest describes it: its weights and their shapes. Needs no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gptlab.report.run_facts import plain
from gptlab.runtime.files.plain_file import read_json_object
from gptlab.runtime.records.table import table
from gptlab.training.checkpoint.names import MANIFEST, list_checkpoints

Weight = tuple[str, tuple[int, ...]]
_MAX_LAYERS = 12
"""Numbers of equal layers that are listed."""


@dataclass(frozen=True)
class SavedModel:
    path: Path
    """The checkpoint's folder."""
    weights: list[Weight]
    """(name, shape) of each."""

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.weights)

    def shapes(self, rows: str, seq_len: str, n_embd: str, vocab_size: str) -> str:
        """A table of the weights in the order in which they are used, beside the shape of what flows; layers with equal
        weights once."""
        outer = [one for one in self.weights if not one[0].startswith("blocks.")]
        last = [one for one in outer if one[0].startswith(("head.", "final_norm."))]
        first = [one for one in outer if one not in last]
        flow = f"{rows} x {seq_len}"
        lines = [("", "weights", "what flows"), ("tokens", "", flow)]
        for name, shape in sorted(first, key=lambda one: "embedding.weight" not in one[0]):
            lines.append((plain(name), _times(shape), f"{flow} x {n_embd}" if name == "token_embedding.weight" else ""))
        for layers, weights in self._blocks():
            lines.append((f"layer {layers}", "", f"{flow} x {n_embd}"))
            lines += [(f"  {plain(name)}", _times(shape), "") for name, shape in weights]
        lines += [
            (plain(name), _times(shape), f"{flow} x {vocab_size}" if name == "head.weight" else "")
            for name, shape in last
        ]
        return table(lines, "<<<")

    def _blocks(self) -> Iterator[tuple[str, list[Weight]]]:
        by_layer: dict[int, list[Weight]] = {}
        for name, shape in self.weights:
            if found := re.fullmatch(r"blocks\.(\d{1,6})\.(.+)", name):
                by_layer.setdefault(int(found[1]), []).append((found[2], shape))
        alike: dict[str, list[int]] = {}
        for layer in sorted(by_layer):
            alike.setdefault(str(by_layer[layer]), []).append(layer)
        for layers in alike.values():
            yield ", ".join(map(str, layers[:_MAX_LAYERS])) + ", ..." * (len(layers) > _MAX_LAYERS), by_layer[layers[0]]


def newest_saved(checkpoints: Path) -> SavedModel | None:
    """None where there is no checkpoint. UserError where its manifest is damaged; what it says of weights that are none
    is skipped."""
    if not (saved := list_checkpoints(checkpoints)):
        return None
    model, weights = read_json_object(saved[-1] / MANIFEST).get("model"), list[Weight]()
    for name, tensor in model.items() if isinstance(model, dict) else ():
        shape = tensor.get("shape") if isinstance(tensor, dict) else None
        if isinstance(shape, list) and all(type(size) is int and 0 <= size < 1 << 50 for size in shape):
            weights.append((name, tuple(shape)))
    return SavedModel(saved[-1], weights)


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)
