"""Every random generator that training draws from: seeded together, captured and restored to the bit."""

from __future__ import annotations

import json
import random
from hashlib import blake2b
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed Python, NumPy's global generator, and torch on the CPU and on `device`. 0 <= seed < 2^63."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFF_FFFF, seed >> 32])  # its words are 32 bits wide
    # torch's CPU generator reads the lowest 32 bits only.
    seed_torch(seed if seed < 2**32 else fold_seed(seed), device)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch: on a CPU its generator, else every CUDA and MPS generator too.

    `torch.manual_seed` formats the call stack for each kind of GPU that is not in use: 0.6 ms of every micro-batch with
    dropout, where seeding takes 1 microsecond (docs/LOG.md, 2026-11-23).
    """
    (torch.default_generator if device.type == "cpu" else torch).manual_seed(seed)


def capture_rng(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of every generator as CPU tensors of bytes: uint8, one dimension, fit for safetensors.

    Keys: `python`, `numpy` (both JSON), `torch`, and where the device has generators of its own `cuda.0`, `cuda.1`,
    ... (all of this process's devices) or `mps`.
    """
    numpy_state: Any = np.random.get_state(legacy=False)
    words = {"key": numpy_state["state"]["key"].tolist(), "pos": int(numpy_state["state"]["pos"])}
    state = {"python": _to_bytes(random.getstate()), "numpy": _to_bytes({**numpy_state, "state": words})}
    return {**state, "torch": torch.get_rng_state(), **({} if device.type == "cpu" else _capture_gpus(device))}


def _capture_gpus(device: torch.device) -> dict[str, torch.Tensor]:
    if device.type == "mps":
        return {"mps": torch.mps.get_rng_state()}
    return {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}


def restore_rng(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put every generator back where `capture_rng` saw it. States of devices that this process does not have are
    ignored: a run may resume on other hardware (then not bit for bit, since it also rounds differently)."""
    version, words, gauss = _from_bytes(state["python"])
    random.setstate((version, tuple(words), gauss))
    numpy_state = _from_bytes(state["numpy"])
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)
    torch.set_rng_state(state["torch"].cpu())
    if device.type != "cpu":
        _restore_gpus(state, device)


def _restore_gpus(state: dict[str, torch.Tensor], device: torch.device) -> None:
    if device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"].cpu())
    elif device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in state:
                torch.cuda.set_rng_state(state[f"cuda.{index}"].cpu(), index)


def fold_seed(*values: int) -> int:
    """One seed, 0 <= seed < 2^63, from several integers (0 <= value < 2^64), such as (seed, step, micro-batch).

    BLAKE2b (RFC 7693) with an 8-byte digest over the values as 8-byte little-endian words; the digest is read
    little-endian and its lowest bit dropped. Order and count of the values matter, and the result is the same on every
    machine and Python version.
    """
    words = b"".join(value.to_bytes(8, "little") for value in values)
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little") >> 1


def _to_bytes(value: object) -> torch.Tensor:
    """JSON as a uint8 tensor; Python's floats (the spare Gaussian) read back bit for bit."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(tensor: torch.Tensor) -> Any:
    return json.loads(bytes(tensor.cpu().numpy()))
