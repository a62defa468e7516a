"""Bytes that tensors hold while operations run, real or without data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive and not resident, and the most there were."""

    def __init__(self, resident: Iterable[Tensor]) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._resident = {tensor.untyped_storage()._cdata for tensor in resident}
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resizes = patch.object(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_))

    def __enter__(self) -> LiveBytes:
        self._resizes.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizes.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in result if isinstance(result, list | tuple) else (result,):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        known = self._known.get(storage._cdata)
        if storage._cdata in self._resident:
            return
        if known is None or known() is not storage:
            key = self._known[storage._cdata] = weakref.ref(storage, self._freed)
            self._sizes[key] = 0
        self._resized(storage)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = self._known.get(storage._cdata)
        if key is not None and key() is storage:
            self._set(key, storage.nbytes())

    def _set(self, key: weakref.ref[torch.UntypedStorage], size: int) -> None:
        self.bytes += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.bytes)

    def _freed(self, key: weakref.ref[torch.UntypedStorage]) -> None:
        self.bytes -= self._sizes.pop(key)

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        return resize_
