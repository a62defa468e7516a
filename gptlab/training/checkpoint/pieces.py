"""The pieces of a checkpoint that one of several ranks reads: the weights it needs, its share of the moments.

A checkpoint is verified before, file by file, each file by one of the ranks that see the same disk (load.py). So a rank
of W reads W-th parts of what would otherwise be read W times, and keeps in memory only what it copies at the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gptlab.runtime.files.tensor_file import FileRecord, data_positions, read_at
from gptlab.training.checkpoint.format import Manifest, StoredTensor, slice_key


class SavedTensor:
    """A tensor of a verified checkpoint, in the place of one in memory. It is read whenever it is used: whole as an
    argument of torch's functions (their protocol for other types: `__torch_function__`), or in part, as a slice of
    `reshape(-1)`, which is all that `TensorSlice.of` asks of a tensor."""

    def __init__(self, name: str, stored: StoredTensor, read: Callable[[str, str, int, Tensor], None]) -> None:
        """`read`: (file, key in the file, elements before the first one, what to fill)."""
        self.shape, self.dtype = torch.Size(stored.shape), stored.dtype
        self._name, self._stored, self._read = name, stored, read

    def reshape(self, shape: int) -> SavedTensor:
        assert shape == -1
        return self

    def __getitem__(self, elements: slice) -> Tensor:
        start, stop, _ = elements.indices(self.shape.numel())
        flat = torch.empty(stop - start, dtype=self.dtype)
        for piece in self._stored.slices:
            first, end = max(piece.start, start), min(piece.start + piece.elements, stop)
            if first < end:
                key = slice_key(self._name, self._stored.shape, piece.start, piece.elements)
                self._read(piece.file, key, first - piece.start, flat[first - start : end - start])
        return flat

    def cpu(self) -> Tensor:
        return self[:].view(self.shape)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*(arg.cpu() if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


def saved_tensors(path: Path, manifest: Manifest, kind: str, checked: Callable[..., Any]) -> dict[str, Tensor]:
    """The tensors of a kind in the verified checkpoint at `path`, of format version 2. `checked`: (path, file,
    manifest, what reads it) -> what that returns, errors of the file as those of the checkpoint."""
    assert manifest.index is not None
    positions: dict[str, Mapping[str, int]] = {}

    def read(file: str, key: str, skipped: int, into: Tensor) -> None:
        def read_file(name: Path, record: FileRecord) -> None:
            if file not in positions:
                positions[file] = data_positions(name, record, manifest.layout(file) or {})
            read_at(name, record, positions[file][key] + skipped * into.element_size(), into)

        checked(path, file, manifest, read_file)

    saved = {name: SavedTensor(name, stored, read) for name, stored in manifest.index[kind].items()}
    return cast(dict[str, Tensor], saved)


def shares(sizes: Mapping[str, int], n_ranks: int) -> list[list[str]]:
    """Files, by name, dealt out to ranks so that each reads about equally many bytes: the largest first, to the rank
    with the fewest."""
    dealt: list[list[str]] = [[] for _ in range(n_ranks)]
    busy = [0] * n_ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = busy.index(min(busy))
        dealt[rank].append(name)
        busy[rank] += sizes[name]
    return dealt
