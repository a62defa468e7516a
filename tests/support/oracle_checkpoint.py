"""A small checkpoint's contents, and the comparison of two of them bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlab.training.checkpoint.load import load_checkpoint
from gptlab.training.checkpoint.write import save_checkpoint


def small_contents(seed: int) -> dict[str, Any]:
    """Keyword arguments of `save_checkpoint`; different for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"head.weight": torch.randn(7, 5, generator=generator), "scale": torch.randn((), generator=generator)},
        "optimizer": {"head.weight.momentum": torch.randn(7, 5, generator=generator)},
        "state": {"seed": seed, "loss": 1 / (seed + 3)},
    }


def save_small(checkpoints_dir: Path, step: int, seed: int | None = None) -> Path:
    return save_checkpoint(checkpoints_dir, step, **small_contents(step if seed is None else seed))


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Also tells -0.0 from 0.0 and one NaN from another, which == does not."""
    return set(ours) == set(theirs) and all(
        ours[name].dtype == theirs[name].dtype
        and ours[name].shape == theirs[name].shape
        and raw_bytes(ours[name]) == raw_bytes(theirs[name])
        for name in ours
    )


def raw_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` and its content, hidden ones included; folders as empty entries."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def holds(path: Path, seed: int) -> bool:
    loaded, saved = load_checkpoint(path), small_contents(seed)
    return (
        same_bits(loaded.model, saved["model"])
        and same_bits(loaded.optimizer, saved["optimizer"])
        and loaded.state == saved["state"]
    )


def flip(path: Path) -> None:
    """Alter one bit near the end, the size stays."""
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def fail_on_damage(line: str) -> None:
    raise AssertionError(f"no damage expected: {line}")
