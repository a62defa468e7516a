"""Random generators: captured and restored to the bit, through safetensors; folded seeds do not collide."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gptlab.runtime.hardware.rng import capture_rng, fold_seed, restore_rng, seed_everything, seed_torch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _leave_generators_alone() -> object:
    before = capture_rng(CPU)
    yield
    restore_rng(before, CPU)


def draw() -> list[float]:
    """A little of everything; an odd number of Gaussians leaves one in reserve inside the generators."""
    return [
        random.random(), random.gauss(), random.randrange(10**9),
        float(np.random.rand()), float(np.random.randn()), float(np.random.permutation(1000)[0]),
        *torch.rand(3).tolist(), *torch.randn(17).tolist(),
    ]  # fmt: skip


def test_a_cpu_is_seeded_as_torch_seeds_it_and_no_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = (0, 5, 2**32 + 1, 2**63 - 1)
    expected = [torch.rand(3, generator=torch.manual_seed(seed)) for seed in seeds]
    for backend in (torch.cuda, torch.xpu, torch.mps, torch.mtia):
        monkeypatch.delattr(backend, "manual_seed_all", raising=False)
        monkeypatch.delattr(backend, "manual_seed", raising=False)
    for seed, drawn in zip(seeds, expected, strict=True):
        seed_torch(seed, CPU)
        assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("draws_before", [0, 1, 300])
def test_restored_generators_repeat_to_the_bit(draws_before: int, tmp_path: Path) -> None:
    seed_everything(7, CPU)
    for _ in range(draws_before):
        draw()
    state = capture_rng(CPU)
    expected = [draw() for _ in range(5)]
    assert expected[0] != expected[1]
    save_file(state, tmp_path / "rng.safetensors")
    seed_everything(8, CPU)
    restore_rng(load_file(tmp_path / "rng.safetensors"), CPU)
    assert [draw() for _ in range(5)] == expected


def test_every_part_of_the_state_counts() -> None:
    seed_everything(7, CPU)
    draw()
    state = capture_rng(CPU)
    expected = draw()
    other_seed = 8
    seed_everything(other_seed, CPU)
    draw()
    foreign = capture_rng(CPU)
    for name in state:
        restore_rng({**state, name: foreign[name]}, CPU)
        assert draw() != expected, f"{name} is captured but not restored"
    restore_rng(state, CPU)
    assert draw() == expected


def test_states_are_flat_bytes() -> None:
    for tensor in capture_rng(CPU).values():
        assert tensor.dtype == torch.uint8
        assert tensor.dim() == 1
        assert tensor.device == CPU


def test_capturing_draws_nothing() -> None:
    seed_everything(3, CPU)
    expected = draw()
    seed_everything(3, CPU)
    capture_rng(CPU)
    assert draw() == expected


def test_every_bit_of_the_seed_counts() -> None:
    for seed, other in [(0, 1), (5, 5 + 2**32), (5, 5 + 2**62), (0, 2**63 - 1)]:
        seed_everything(seed, CPU)
        first = (random.random(), float(np.random.rand()), torch.rand(1).item())
        seed_everything(other, CPU)
        second = (random.random(), float(np.random.rand()), torch.rand(1).item())
        assert all(a != b for a, b in zip(first, second, strict=True))


def test_states_of_absent_devices_are_passed_over() -> None:
    seed_everything(1, CPU)
    state = capture_rng(CPU)
    expected = draw()
    extra = {"cuda.0": torch.zeros(16, dtype=torch.uint8), "mps": torch.zeros(44, dtype=torch.uint8)}
    restore_rng({**state, **extra}, CPU)
    assert draw() == expected


def test_every_cuda_device_is_captured_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    states = [torch.full((16,), index, dtype=torch.uint8) for index in range(2)]
    restored: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: restored.update({index: state}))
    captured = capture_rng(gpu)
    assert {"cuda.0", "cuda.1"} <= captured.keys()
    restore_rng(captured, gpu)
    assert restored.keys() == {0, 1}  # the third device was not there before
    assert all(torch.equal(restored[index], states[index]) for index in range(2))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
        pytest.param(
            "mps", marks=pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no Apple GPU or CUDA device")
        ),
    ],
)
def test_generators_of_a_gpu_repeat_to_the_bit(device: str) -> None:
    gpu = torch.device(device)
    seed_everything(7, gpu)
    torch.rand(1000, device=gpu)
    state = capture_rng(gpu)
    expected = torch.rand(1000, device=gpu)
    seed_everything(8, gpu)
    restore_rng(state, gpu)
    assert torch.equal(torch.rand(1000, device=gpu), expected)


def test_fold_seed_by_hand() -> None:
    words = bytes([1, 0, 0, 0, 0, 0, 0, 0]) + bytes([0, 1, 0, 0, 0, 0, 0, 0])  # 1, then 256
    digest = hashlib.blake2b(words, digest_size=8).digest()
    assert fold_seed(1, 256) == sum(byte << (8 * i) for i, byte in enumerate(digest)) // 2


def test_fold_seed_separates_neighbours_and_fits_63_bits() -> None:
    seeds = {fold_seed(seed, step, micro) for seed in range(10) for step in range(100) for micro in range(10)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)
    # A uniform 63-bit number has its top bit set half of the time: 5000 +- 50, so 5 sigma is 250.
    assert abs(sum(seed >> 62 for seed in seeds) - 5000) < 250
    assert fold_seed(1, 2) != fold_seed(2, 1)
    assert fold_seed(1) != fold_seed(1, 0)
    torch.manual_seed(fold_seed(2**63 - 1, 2**64 - 1))  # torch takes every seed


def test_fold_seed_refuses_what_would_collide() -> None:
    for value in (-1, 2**64):
        with pytest.raises(OverflowError):
            fold_seed(value)
