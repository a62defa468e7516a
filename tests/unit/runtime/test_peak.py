"""Peak FLOP/s: the vendor's figure for exactly this product, a measurement, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from gptlab.runtime.hardware import peak as peak_module
from gptlab.runtime.hardware.device import resolve_device, unused_gpu
from gptlab.runtime.hardware.peak import Peak, measure_matmul_flops, peak_flops_per_second, table_peak_flops
from gptlab.runtime.hardware.place import resolve_dtype

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# The table once more, from how the chips are built: multiprocessors (AMD: compute units), dense tensor-core FLOP per
# clock in each (float32 accumulation), boost clock in GHz, from the vendors' architecture papers.
ARCHITECTURE = {
    "NVIDIA H200": (132, 4096, 1.83),
    "NVIDIA GH200 480GB": (132, 4096, 1.83),
    "NVIDIA H100 80GB HBM3": (132, 4096, 1.83),
    "NVIDIA H100 PCIe": (114, 4096, 1.62),
    "NVIDIA A100-SXM4-80GB": (108, 2048, 1.41),
    "NVIDIA A100-PCIE-40GB": (108, 2048, 1.41),
    "NVIDIA A100 80GB PCIe": (108, 2048, 1.41),
    "NVIDIA A30": (56, 2048, 1.44),
    "NVIDIA A40": (84, 1024, 1.74),
    "NVIDIA A10": (72, 1024, 1.695),
    "NVIDIA A10G": (80, 512, 1.71),
    "NVIDIA RTX A6000": (84, 1024, 1.80),
    "NVIDIA L4": (58, 1024, 2.04),
    "NVIDIA L40": (142, 512, 2.49),
    "NVIDIA L40S": (142, 1024, 2.49),
    "NVIDIA RTX 6000 Ada Generation": (142, 1024, 2.505),
    "NVIDIA GeForce RTX 3090": (82, 512, 1.695),
    "NVIDIA GeForce RTX 3090 Ti": (84, 512, 1.86),
    "NVIDIA GeForce RTX 4080": (76, 512, 2.505),
    "NVIDIA GeForce RTX 4090": (128, 512, 2.52),
    "NVIDIA GeForce RTX 5080": (84, 512, 2.617),
    "NVIDIA GeForce RTX 5090": (170, 512, 2.407),
    "Tesla V100-SXM2-16GB": (80, 1024, 1.53),
    "Tesla V100-PCIE-32GB": (80, 1024, 1.38),
    "Tesla T4": (40, 1024, 1.59),
    "AMD Instinct MI355X": (256, 4096, 2.4),
    "AMD Instinct MI350X": (256, 4096, 2.2),
    "AMD Instinct MI325X": (304, 2048, 2.1),
    "AMD Instinct MI300X": (304, 2048, 2.1),
    "AMD Instinct MI300A": (228, 2048, 2.1),
    "AMD Instinct MI250X": (110, 1024, 1.7),  # one of the card's two dies: what torch calls a device
    "AMD Instinct MI250": (104, 1024, 1.7),
    "AMD Instinct MI210": (104, 1024, 1.7),
}


@pytest.mark.parametrize("name", ARCHITECTURE)
def test_table_agrees_with_the_chip(name: str) -> None:
    units, flops_per_clock, gigahertz = ARCHITECTURE[name]
    # 1.2%: data sheets round, and the T4's and V100's to whole numbers (112 for 113).
    assert table_peak_flops(name, FP16) == pytest.approx(units * flops_per_clock * gigahertz * 1e9, rel=0.012)


def test_every_row_is_reachable_by_a_real_name() -> None:
    names = [*ARCHITECTURE, "NVIDIA B200", "NVIDIA GB200", "NVIDIA H200 NVL", "NVIDIA H100 NVL"]
    assert len({table_peak_flops(name, FP16) for name in names} - {None}) == len({*peak_module._TERAFLOPS.values()})


def test_a_name_inside_another_is_no_match() -> None:
    assert table_peak_flops("NVIDIA A10", BF16) == 125e12
    assert table_peak_flops("NVIDIA A100-SXM4-40GB", BF16) == 312e12
    assert table_peak_flops("NVIDIA L4", BF16) == 121e12
    assert table_peak_flops("NVIDIA L40S", BF16) == 362.05e12
    assert table_peak_flops("NVIDIA H100 NVL", BF16) == 835.5e12
    assert table_peak_flops("NVIDIA H200", BF16) == 989.5e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H20",  # not an H200
        "Quadro RTX 6000",  # Turing, not Ada
        "NVIDIA RTX A4000",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA GeForce RTX 3080",  # two chips are sold under this name
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100-SXM-64GB",  # Leonardo's own chip
        "NVIDIA A40-12Q",
        "GRID T4-16Q",
        "Tesla V100S-PCIE-32GB",
        "AMD Instinct MI250X / MI250",
        "AMD EPYC 9654 96-Core Processor",
        "Apple M2 GPU",
        "",
    ],
)
def test_the_table_is_silent_rather_than_wrong(name: str) -> None:
    assert table_peak_flops(name, FP16) is None


def test_types_without_tensor_cores_have_no_figure() -> None:
    assert table_peak_flops("Tesla T4", BF16) is None
    assert table_peak_flops("NVIDIA H100 80GB HBM3", FP32) is None


@pytest.mark.parametrize("n_threads", [1, 4])
def test_measurement_is_the_rate_of_the_products_and_keeps_its_time(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None], n_threads: int
) -> None:
    """By a clock that only products move: each thread does 80 GFLOP/s."""
    clock = [0.0]
    longest = [0.0]

    def product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        seconds = 2 * len(left) ** 3 / (80e9 * torch.get_num_threads())
        clock[0] += seconds
        longest[0] = max(longest[0], seconds)

    threads(n_threads)
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert measure_matmul_flops(CPU, FP32, seconds=0.3) == pytest.approx(n_threads * 80e9)
    assert 0.0 < clock[0] <= 0.3 + 2 * longest[0], "products in hand are finished"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_the_faster_of_a_cpus_two_libraries_counts_in_float32(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    """With torch.mm alone, MFU was above 100% on a Zen 5."""
    mm = torch.mm

    def slow(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return mm(left, right, out=out)

    threads(1)
    monkeypatch.setattr(torch, "mm", slow)
    by_mm = 2 * 256**3 / 0.05  # 0.7 GFLOP/s
    assert measure_matmul_flops(CPU, FP32, seconds=0.05) > 2 * by_mm
    assert measure_matmul_flops(CPU, torch.float64, seconds=0.05) < by_mm, "which oneDNN does not multiply"


def test_a_cpus_float16_products_are_those_of_linear_layers(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    """With the right matrix as it lies otherwise, MFU was up to 261%."""
    mm, clock = torch.mm, [0.0]

    def product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        clock[0] += 2 * len(left) ** 3 / (1e9 if right.is_contiguous() else 14e9)
        return mm(left.float(), right.float())

    threads(1)
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert measure_matmul_flops(CPU, FP16, seconds=0.05) == pytest.approx(14e9)


def test_measuring_draws_nothing_from_the_training_generators() -> None:
    before = torch.get_rng_state()
    measure_matmul_flops(CPU, FP32, seconds=0.02)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's threads for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("slower_together", "cores", "expected"),
    [
        (1.0, 4, 400e9),
        (1.25, 4, 320e9),
        (1.5, 4, 400 / 1.5 * 1e9),
        (2.0, 4, 400e9),
        (25.0, 4, 400e9),
        (2.0, 2, 200e9),
        (25.0, 2, 200e9),
    ],
    ids=["quiet", "one clock for all", "still by itself", "busy", "very busy", "two threads a core", "and busy"],
)
def test_a_busy_machine_counts_as_so_many_times_one_thread(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None], slower_together: float, cores: int, expected: float
) -> None:
    """Each of four threads does 100 GFLOP/s; all together, so many times less than four would."""

    def products(size: int, device: torch.device, dtype: torch.dtype, deadline: float) -> list[float]:
        rate = 100e9 if torch.get_num_threads() == 1 else 4 * 100e9 / slower_together
        return [2 * size**3 / rate]

    threads(4)
    monkeypatch.setattr(peak_module, "usable_cores", lambda: cores)
    monkeypatch.setattr(peak_module, "product_times", products)
    assert measure_matmul_flops(CPU, FP32, seconds=0.01) == pytest.approx(expected)
    assert torch.get_num_threads() == 4


def test_one_thread_is_measured_once(monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]) -> None:
    threads(1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda n: pytest.fail("measured twice"))
        assert measure_matmul_flops(CPU, FP32, seconds=0.01) > 0


def test_a_slow_machine_is_not_asked_for_large_products(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    threads(1)
    sizes: list[int] = []

    def slow(size: int, device: torch.device, dtype: torch.dtype, deadline: float) -> list[float]:
        sizes.append(size)
        return [0.1 * (size / 256) ** 3]  # 0.34 GFLOP/s

    monkeypatch.setattr(peak_module, "product_times", slow)
    assert measure_matmul_flops(CPU, FP32, seconds=0.5) == pytest.approx(2 * 256**3 / 0.1)
    assert set(sizes) == {256}


def test_source_says_where_the_figure_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_module, "measure_matmul_flops", lambda device, dtype: 8.5e11)
    assert peak_flops_per_second(CPU, BF16) == Peak(8.5e11, "measured")
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(peak_module, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert peak_flops_per_second(gpu, BF16) == Peak(312e12, "table")
    monkeypatch.setattr(peak_module, "device_name", lambda device: "Some GPU of 2031")
    assert peak_flops_per_second(gpu, BF16) == Peak(8.5e11, "measured")

    def refuses(device: torch.device, dtype: torch.dtype) -> float:
        raise RuntimeError("not implemented for this type")

    monkeypatch.setattr(peak_module, "measure_matmul_flops", refuses)
    assert peak_flops_per_second(gpu, BF16) == Peak(None, "unknown")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_can_be_used_and_reaches_what_its_data_sheet_says() -> None:
    """Large products of a GPU that cools well reach 0.6 to 0.9 of it. An entry of another product, or one with
    sparsity (twice the rate), is outside of these bounds."""
    assert unused_gpu("auto") is None
    gpu = resolve_device("auto")
    known = table_peak_flops(torch.cuda.get_device_name(gpu), BF16)
    if known is None:
        pytest.skip("no entry for this CUDA device")
    assert 0.45 * known < measure_matmul_flops(gpu, BF16, seconds=2.0) < 1.02 * known


@pytest.mark.gpu
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
        pytest.param(
            "mps",
            marks=pytest.mark.skipif(
                not torch.backends.mps.is_available(), reason="needs an Apple GPU, or a CUDA device"
            ),
        ),
    ],
)
def test_the_dtype_that_is_chosen_multiplies_fastest_on_a_real_gpu(device: str) -> None:
    """By compute capability on CUDA, by a measurement on Apple's. 10% is how much two measurements may differ."""
    gpu = resolve_device(device)
    chosen = resolve_dtype("auto", gpu)
    rates = {dtype: measure_matmul_flops(gpu, dtype, seconds=1.0) for dtype in {FP32, BF16, chosen}}
    assert rates[chosen] > 0.9 * max(rates.values())
