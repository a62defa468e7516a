"""Device, dtype, threads and memory: what the machine has is found, what it has not is refused in one line."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig, RuntimeConfig
from gptlab.runtime.hardware import cpu as cpu_module
from gptlab.runtime.hardware import device as device_module
from gptlab.runtime.hardware import installed
from gptlab.runtime.hardware import place as place_module
from gptlab.runtime.hardware.cpu import set_threads, usable_cores
from gptlab.runtime.hardware.device import (
    compiler_available,
    device_name,
    peak_memory_mb,
    resolve_device,
    set_gpu_allocator,
    synchronize,
    unused_gpu,
)
from gptlab.runtime.hardware.peak import Peak
from gptlab.runtime.hardware.place import place_of, resolve_dtype

CPU = torch.device("cpu")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_auto_falls_back_to_the_cpu() -> None:
    assert resolve_device("auto") == CPU
    assert resolve_device("cpu") == CPU


@pytest.mark.usefixtures("two_gpus")
def test_cuda_gets_an_index_so_that_devices_compare_equal() -> None:
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.usefixtures("two_gpus")
def test_each_rank_has_the_gpu_of_its_local_rank() -> None:
    for name in ("auto", "cuda"):
        assert [resolve_device(name, rank) for rank in (0, 1)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(UserError, match="process 2 of this machine has no GPU of its own: torch sees 2"):
        resolve_device("cuda", 2)
    with pytest.raises(UserError, match="a device of its own"):
        resolve_device("cuda:0", 1)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "tpu", "cpu:1", "cuda:x", "auto:0"])
def test_unknown_and_absent_devices_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(UserError, match=r"runtime\.device") as error:
        resolve_device(name)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["cpu:", "auto:", "cuda:", "cuda:\N{SUPERSCRIPT TWO}"])
def test_half_a_name_means_no_gpu(name: str) -> None:
    with pytest.raises(UserError, match=r"only cuda takes a number, as in cuda:0"):
        resolve_device(name)


@pytest.mark.usefixtures("two_gpus")
def test_the_gpu_that_is_named_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch records events on the current one, and asks it for its capability."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert current == [1]


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_beyond_the_last_names_the_last() -> None:
    with pytest.raises(UserError, match="cuda:1"):
        resolve_device("cuda:7")


class TestAGpuThatTorchCannotUse:
    """One warning where the device is chosen, an error where it was asked for, both with the reason."""

    OLD_DRIVER = (
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
        "downloading and installing a new version.\nTraceback"
    )

    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        (tmp_path / "nvidiactl").touch()
        monkeypatch.setattr(installed, "_NVIDIA_SIGNS", (str(tmp_path / "absent"), str(tmp_path / "nvidiactl")))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that monkeypatch puts back what there was
        monkeypatch.delenv("PYTORCH_ALLOC_CONF")
        return tmp_path / "nvidiactl"

    def check(self, *words: str) -> None:
        """Of both ways to ask."""
        assert resolve_device("auto") == CPU
        warning = unused_gpu("auto")
        assert warning is not None
        with pytest.raises(UserError, match=r"runtime\.device") as refused:
            resolve_device("cuda")
        for text in (warning, str(refused.value)):
            assert "\n" not in text
            assert all(word in text for word in (*words, "pytorch.org")), text

    @pytest.mark.usefixtures("no_gpu", "driver")
    def test_the_wheel_is_for_cpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        self.check(f"torch {torch.__version__} is a build without CUDA")

    @pytest.mark.usefixtures("no_gpu", "driver")
    def test_the_driver_is_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def init() -> None:
            raise RuntimeError(self.OLD_DRIVER)

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "init", init)
        self.check("CUDA 13.0", "too old (found version 11040); update the driver")

    @pytest.mark.usefixtures("two_gpus", "driver")
    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize(
        ("built", "capability", "runs"),
        [
            ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", (6, 1), False),  # a GTX 1080 on torch 2.13 for CUDA 13
            ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", (8, 9), True),  # an RTX 4090: binaries of 8.6 run on 8.9
            ("sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", (12, 0), False),  # an RTX 5090 on torch for CUDA 12.6
            ("sm_80 sm_90 compute_90", (12, 0), True),  # by the driver's compiler
            ("sm_86", (8, 0), False),  # an A100: binaries of 8.6 are not for 8.0
            ("sm_90a", (9, 0), True),
            ("", (6, 1), True),  # nothing is known
        ],
    )
    def test_the_build_lacks_its_kernels(
        self, built: str, capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def asked(index: int) -> tuple[int, int]:
            assert index < 2
            warnings.warn("torch's own lines", stacklevel=2)
            return capability

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built.split())
        monkeypatch.setattr(torch.cuda, "get_device_capability", asked)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Chip")
        if runs:
            assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
            assert unused_gpu("auto") is None
            assert unused_gpu("auto", index=2) is None  # resolve_device refuses it
        else:
            self.check(f"built for {built}", f"NVIDIA Chip has compute capability {capability[0]}.{capability[1]}")

    @pytest.mark.usefixtures("two_gpus", "driver")
    def test_asks_after_the_allocator_is_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CUDA begins with the first question about a device, and torch's allocator reads its settings then."""

        def asked(index: int) -> tuple[int, int]:
            assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
            return (9, 0)

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", asked)
        assert unused_gpu("auto", "max_split_size_mb:64") is None

    @pytest.mark.usefixtures("no_gpu")
    def test_says_nothing_where_there_is_none_or_it_was_not_wanted(
        self, driver: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert unused_gpu("auto") is not None
        assert unused_gpu("cpu") is None
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert unused_gpu("auto") is None
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        driver.unlink()
        assert unused_gpu("auto") is None
        with pytest.raises(UserError, match="sees no CUDA device here"):
            resolve_device("cuda")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), torch.bfloat16),  # H100
        ((8, 0), torch.bfloat16),  # A100
        ((7, 5), torch.float16),  # T4
        ((7, 0), torch.float16),  # V100
        ((6, 1), torch.float32),  # GTX 1080: a 64th of the float32 rate in float16
    ],
)
def test_auto_dtype_on_cuda_follows_the_tensor_cores(
    capability: tuple[int, int], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype("auto", torch.device("cuda", 0)) == expected


BFLOAT16_IS_FASTER = {torch.float32: 2e-4, torch.bfloat16: 1e-4}
BFLOAT16_IS_SLOWER = {torch.float32: 2e-4, torch.bfloat16: 3e-4}


@pytest.mark.parametrize(
    ("capabilities", "seconds", "expected"),
    [
        ({"avx512_f": True, "avx512_bf16": True}, BFLOAT16_IS_FASTER, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": True}, BFLOAT16_IS_SLOWER, torch.float32),  # a Xeon whose AMX is hidden
        ({"avx512_f": True, "amx_bf16": True}, BFLOAT16_IS_FASTER, torch.bfloat16),
        ({"neon": True, "bf16": True}, BFLOAT16_IS_FASTER, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": False}, {}, torch.float32),  # emulated by oneDNN: nothing to time
        ({"avx2": True}, {}, torch.float32),
    ],
)
def test_auto_dtype_on_a_cpu_is_the_faster_one(
    capabilities: dict[str, bool],
    seconds: dict[torch.dtype, float],
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def products(size: int, device: torch.device, dtype: torch.dtype, deadline: float) -> list[float]:
        assert torch.get_num_threads() == 1  # several would wait for one another beside other programs
        return [1.0, seconds[dtype]]  # another program took the first

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(place_module, "product_times", products)
    place_module._is_faster_in_bfloat16.cache_clear()
    try:
        assert resolve_dtype("auto", CPU) == expected
    finally:
        place_module._is_faster_in_bfloat16.cache_clear()


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="the variables are those of x86")
def test_instructions_that_torch_may_not_use_do_not_count() -> None:
    """The processor's flags still name AMX and AVX512-BF16; products would take 100 times longer."""
    if not installed.cpu_lists_bfloat16():
        pytest.skip("this processor has no bfloat16 to lose")
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2"}
    code = (
        "import torch; from gptlab.runtime.hardware.place import resolve_dtype; "
        "print(resolve_dtype('auto', torch.device('cpu')))"
    )
    environment = {**os.environ, **limits}
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert output.stdout.strip() == "torch.float32"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_both_ways_to_ask_the_cpu_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    by_cpuinfo = installed.cpu_lists_bfloat16()
    assert place_module._cpu_has_bfloat16() == by_cpuinfo
    if not hasattr(torch.cpu, "get_capabilities"):
        return
    monkeypatch.setattr(torch, "cpu", types.SimpleNamespace())  # an older torch
    assert place_module._cpu_has_bfloat16() == by_cpuinfo


def test_cpuinfo_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    for text, expected in [
        ("flags\t\t: fpu avx512f avx512_bf16 sse2\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx512f avx512_vbmi\n", False),
        ("", False),
    ]:
        cpuinfo.write_text("processor\t: 0\n" + text)
        assert installed.cpu_lists_bfloat16(cpuinfo) is expected
    assert not installed.cpu_lists_bfloat16(tmp_path / "missing")


def test_named_dtypes_and_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("float32", "bfloat16", "float16", "float64"):
        assert resolve_dtype(name, CPU) == getattr(torch, name)
    with pytest.raises(UserError, match="float8"):
        resolve_dtype("float8", CPU)
    mps = torch.device("mps")
    with pytest.raises(UserError, match="double"):
        resolve_dtype("float64", mps)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False, raising=False)
    place_module._is_faster_in_bfloat16.cache_clear()
    assert resolve_dtype("auto", mps) == torch.float32
    place_module._is_faster_in_bfloat16.cache_clear()
    with pytest.raises(UserError, match="macOS 14"):
        resolve_dtype("bfloat16", mps)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: True, raising=False)
    assert resolve_dtype("bfloat16", mps) == torch.bfloat16


@pytest.mark.parametrize(
    ("seconds", "expected"), [(BFLOAT16_IS_FASTER, torch.bfloat16), (BFLOAT16_IS_SLOWER, torch.float32)]
)
def test_auto_dtype_on_an_apple_gpu_is_the_faster_one(
    seconds: dict[torch.dtype, float], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them have no bfloat16 units. Matrices of 256 would time how fast kernels are started."""

    def products(size: int, device: torch.device, dtype: torch.dtype, deadline: float) -> list[float]:
        assert (size, device.type) == (2048, "mps")
        return [seconds[dtype]]

    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: True, raising=False)
    monkeypatch.setattr(place_module, "product_times", products)
    place_module._is_faster_in_bfloat16.cache_clear()
    try:
        assert resolve_dtype("auto", torch.device("mps")) == expected
    finally:
        place_module._is_faster_in_bfloat16.cache_clear()


def test_device_name_is_a_product_not_a_kind() -> None:
    assert len(device_name(CPU)) > 2
    assert device_name(CPU) != "cpu"


def test_peak_memory_rises_with_an_allocation_and_stays() -> None:
    before = peak_memory_mb(CPU)
    ballast = []
    # Once, unless a machine short of memory takes the pages of shared libraries away meanwhile.
    while not ballast or (_resident_bytes() < (before + 108.0) * 2**20 and len(ballast) < 10):
        ballast.append(bytearray(int((before + 128.0) * 2**20) - _resident_bytes()))
        for i in range(0, len(ballast[-1]), 4096):  # touch each page
            ballast[-1][i] = 1
    del ballast
    # 64 MiB of tolerance: the allocator may have had touched pages to spare, and the kernel counts by thread (10 MiB
    # in a test process of 2 GiB).
    assert before + 64.0 < peak_memory_mb(CPU) < before + 264.0


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def test_synchronize_on_the_cpu_has_nothing_to_do() -> None:
    synchronize(CPU)


def test_compiler_needs_a_compiler_and_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(device_module.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(installed.shutil, "which", lambda command: "found" if command == "g++" else None)
    assert compiler_available(CPU)
    monkeypatch.setattr(installed.shutil, "which", lambda command: None)
    assert not compiler_available(CPU)
    monkeypatch.setattr(installed.shutil, "which", lambda command: "found" if command == "my-c++" else None)
    assert not compiler_available(CPU)
    monkeypatch.setenv("CXX", "my-c++")
    assert compiler_available(CPU)
    (tmp_path / "Python.h").unlink()
    assert not compiler_available(CPU)
    assert not compiler_available(torch.device("mps"))


def test_compiling_for_cuda_needs_triton_and_a_gpu_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(device_module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(installed.shutil, "which", lambda command: "found")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert compiler_available(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert not compiler_available(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(device_module.importlib.util, "find_spec", lambda name: None)
    assert not compiler_available(gpu)


@pytest.fixture
def own_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("own_threads")
def test_threads_wanted_are_threads_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set_threads(3) == torch.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    assert set_threads(None) == torch.get_num_threads() == 2
    assert set_threads(1) == 1  # what the run says goes before the environment
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    monkeypatch.setattr(cpu_module, "usable_cores", lambda: 4)
    if sys.platform != "darwin":
        assert set_threads(None) == torch.get_num_threads() == 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="CPU affinity is Linux's")
def test_cores_respect_the_affinity_of_the_process() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from gptlab.runtime.hardware.cpu import usable_cores; print(usable_cores())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "1"
    assert usable_cores() >= 1


def test_hyperthreads_of_one_core_count_once(tmp_path: Path) -> None:
    # Four logical CPUs on two cores, numbered as Linux does: 0 and 2 are siblings, 1 and 3 are.
    for cpu in range(4):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert cpu_module._physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert cpu_module._physical_cores({0, 2}, tmp_path) == 1
    assert cpu_module._physical_cores({0, 1}, tmp_path) == 2
    assert cpu_module._physical_cores({0, 9}, tmp_path) == 2  # nothing known of CPU 9: logical CPUs count


def test_each_run_of_a_process_has_its_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "peak_flops_per_second", lambda device, dtype: Peak(None, "unknown"))
    before = torch.get_num_threads()
    try:
        for wanted in (1, 2, 1):  # the third asks for what the first had
            place = place_of(RunConfig(runtime=RuntimeConfig(device="cpu", threads=wanted)))
            assert place.threads == torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(before)
        place_module._peak_once.cache_clear()


def test_the_tightest_cgroup_quota_counts(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/pod/container\n")
    container = tmp_path / "pod" / "container"
    container.mkdir(parents=True)
    (container / "cpu.max").write_text("max 100000\n")
    assert cpu_module._cgroup_quota(tmp_path, membership) is None
    (container.parent / "cpu.max").write_text("250000 100000\n")
    assert cpu_module._cgroup_quota(tmp_path, membership) == 2.5
    (container / "cpu.max").write_text("150000 100000\n")
    assert cpu_module._cgroup_quota(tmp_path, membership) == 1.5
    # Version 1 keeps each controller in a hierarchy of its own.
    membership.write_text("4:memory:/x\n3:cpu,cpuacct:/job\n")
    job = tmp_path / "cpu,cpuacct" / "job"
    job.mkdir(parents=True)
    (job / "cpu.cfs_quota_us").write_text("-1\n")
    (job / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_module._cgroup_quota(tmp_path, membership) is None
    (job / "cpu.cfs_quota_us").write_text("300000\n")
    assert cpu_module._cgroup_quota(tmp_path, membership) == 3.0
    assert cpu_module._cgroup_quota(tmp_path, tmp_path / "missing") is None


class TestAllocator:
    @pytest.fixture(autouse=True)
    def _an_nvidia_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(sys, "platform", "linux")
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
            monkeypatch.setenv(name, "")  # so that monkeypatch puts back what there was
            monkeypatch.delenv(name)

    def test_expandable_segments_unless_something_else_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_gpu_allocator(None)
        assert os.environ.pop("PYTORCH_ALLOC_CONF") == "expandable_segments:True"
        set_gpu_allocator("max_split_size_mb:64")
        assert os.environ.pop("PYTORCH_ALLOC_CONF") == "max_split_size_mb:64"
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
        set_gpu_allocator(None)
        set_gpu_allocator("max_split_size_mb:64")
        assert "PYTORCH_ALLOC_CONF" not in os.environ

    @pytest.mark.parametrize("missing", ["a GPU", "CUDA", "Linux"])
    def test_torchs_defaults_elsewhere(self, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
        changed = {
            "a GPU": (torch.cuda, "is_available", lambda: False), "CUDA": (torch.version, "cuda", None),
            "Linux": (sys, "platform", "win32"),
        }  # fmt: skip
        monkeypatch.setattr(*changed[missing])
        set_gpu_allocator(None)
        assert "PYTORCH_ALLOC_CONF" not in os.environ

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_torch_reads_the_variable(self) -> None:
        """In a process of its own, since torch reads it once."""
        program = (
            "import torch; from gptlab.runtime.hardware.device import set_gpu_allocator; set_gpu_allocator(None); "
            "x = torch.zeros(1, device='cuda'); print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
        assert done.stdout.strip() == "True"
