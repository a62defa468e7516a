"""Another program on the machine must not make a run ten times slower, nor slow it down in silence."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from gptlab.runtime.hardware import cpu
from gptlab.runtime.hardware.cpu import MachineLoad, prepare_torch, threads_beside_others


class Machine:
    """A machine with a clock by hand: two cores, on which a run's steps and other programs use what they are given."""

    def __init__(self, *, cores: int = 2) -> None:
        self.now = self.others = 0.0
        self.load = ByHand(self, cores)

    def steps(self, count: int, seconds: float, *, others: float) -> list[str]:
        """What is said of `count` steps of `seconds` beside programs that use `others` cores."""
        said = []
        for _ in range(count):
            self.now += seconds
            self.others += others * seconds
            said.append(self.load.step(seconds))
        return [text for text in said if text is not None]


class ByHand(MachineLoad):
    """That of a `Machine`, by whose clock it goes."""

    def __init__(self, machine: Machine, cores: int) -> None:
        self.machine, self.asked_at = machine, 0.0
        super().__init__(2, cores=cores, clock=lambda: machine.now)

    def _cores_used(self) -> tuple[float, float]:
        elapsed, others = self.machine.now - self.asked_at, self.machine.others
        self.asked_at, self.machine.others = self.machine.now, 0.0
        others = others / elapsed if elapsed else 0.0
        return 2.0, 2.0 - others


class TestWarning:
    def test_a_quiet_machine_is_not_mentioned(self) -> None:
        machine = Machine()
        assert machine.steps(1000, 0.3, others=0.1) == []
        assert machine.steps(100, 0.5, others=0.1) == []  # within what a quiet machine does

    def test_more_threads_than_cores_do_not_make_it_busy(self) -> None:
        machine = Machine()
        machine.load.threads = 8
        assert machine.steps(1000, 0.3, others=0.1) == []

    def test_busy_from_the_start(self) -> None:
        [text] = Machine().steps(40, 0.5, others=1.0)
        assert text == "this machine is busy: other programs use 1.0 of its 2 cores; steps take 0.5 s"

    def test_busy_later_names_both_times(self) -> None:
        machine = Machine()
        machine.steps(80, 0.25, others=0.0)
        [text] = machine.steps(20, 2.5, others=1.7)
        assert text == "this machine is busy: other programs use 1.7 of its 2 cores; steps take 2.5 s, 0.25 s at best"

    def test_cores_to_spare_are_no_reason(self) -> None:
        assert Machine(cores=64).steps(200, 0.3, others=30.0) == []

    def test_slow_for_another_reason(self) -> None:
        machine = Machine(cores=64)
        machine.steps(100, 0.25, others=0.0)
        [text] = machine.steps(20, 1.0, others=0.0)
        assert text.startswith("this machine is slower than before: steps take 1 s, 0.25 s at best")

    def test_once_in_ten_minutes(self) -> None:
        machine = Machine()
        assert len(machine.steps(1190, 0.5, others=1.0)) == 1
        assert len(machine.steps(60, 0.5, others=1.0)) == 1


def test_cores_in_use_are_those_of_this_machine() -> None:
    """A loop of this process shows as about one core, and in what all programs use as at least as much."""
    load = MachineLoad(1)
    ends = time.process_time() + 0.3
    while time.process_time() < ends:
        sum(range(10_000))
    machine, own = load._cores_used()
    assert 0.02 < own < 1.5
    # The kernel counts in hundredths of a second, for each kind of time and core apart.
    assert machine > own / 2


class TestSpinning:
    def test_what_the_user_set_stays(self) -> None:
        for given in ({"GOMP_SPINCOUNT": "7", "KMP_BLOCKTIME": "3"}, {"OMP_WAIT_POLICY": "active"}):
            environment = {"THP_MEM_ALLOC_ENABLE": "0", **given}
            _without_torch(prepare_torch, environment)
            assert environment == {"THP_MEM_ALLOC_ENABLE": "0", **given}

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's runtime is that of torch on Linux")
    @pytest.mark.parametrize(
        "start",
        [
            "from gptlab.cli.main import main\nmain(['train', '--steps', 'x'])",
            "import gptlab, contextlib\nwith contextlib.suppress(Exception): gptlab.train(resume='no such run')",
        ],
    )
    def test_is_limited_before_torch_loads_its_runtime(self, start: str, tmp_path: Path) -> None:
        """As the runtime itself reports when torch loads it, by the command line and from Python."""
        variables = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        variables["OMP_DISPLAY_ENV"] = "verbose"
        # Alone, where it can be found, and without torch, whose import takes seconds.
        runtime = next(Path(torch.__file__).parent.glob("lib/libgomp*"), None)
        if runtime is not None:
            (tmp_path / "torch.py").write_text("raise ImportError")
            variables["PYTHONPATH"] = str(tmp_path)
        script = f"{start}\nimport " + (f"ctypes\nctypes.CDLL({str(runtime)!r})" if runtime else "torch")
        done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True)
        assert "GOMP_SPINCOUNT = '10000'" in done.stderr


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no large pages")
def test_tensors_of_the_command_are_on_large_pages() -> None:
    """Of the mapping that has a tensor's second half, as the kernel reports it (man 5 proc, smaps)."""
    script = """if True:
        from gptlab.cli.main import main
        main(["train", "--steps", "x"])
        import torch
        tensor = torch.ones(16 << 20)
        at = tensor.data_ptr() + tensor.nbytes // 2
        found = False
        for line in open("/proc/self/smaps"):
            if "-" in (span := line.split()[0]) and ":" not in span:
                first, last = (int(end, 16) for end in span.split("-"))
                found = first <= at < last
            elif found and line.startswith("VmFlags:"):
                print("hg" in line.split())
    """
    variables = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "True"


def _without_torch(call: object, environment: dict[str, str]) -> None:
    """`call(environment)` as in a process that has not loaded torch yet."""
    torch = sys.modules.pop("torch", None)
    try:
        call(environment)  # type: ignore[operator]
    finally:
        if torch is not None:
            sys.modules["torch"] = torch


@pytest.mark.skipif(
    sys.platform in ("darwin", "win32"), reason="torch's own choice is kept, or there is no load average"
)
@pytest.mark.parametrize(
    ("cores", "logical", "load", "now", "threads"),
    [
        (2, 2, 0.1, 2.0, None),  # for half a second only
        (2, 2, 1.0, 0.1, None),  # it has just ended
        (2, 2, 1.1, 1.0, 1),
        (2, 2, 0.4, 0.4, None),  # less than half a core
        (2, 2, 2.2, 2.0, 1),  # never none
        (8, 8, 3.0, 2.2, 6),
        (8, 16, 3.0, 2.2, None),  # hyperthreads take them
        (8, 16, 12.0, 12.0, 4),
        (1, 1, 1.0, 1.0, None),
        (2, 8, 9.0, 9.0, None),  # of eight cores this process may use two: whose load is it?
    ],
)
def test_other_programs_keep_the_cores_that_they_use(
    cores: int, logical: int, load: float, now: float, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load`: cores used in the last minute, `now`: by other programs in half a second; this one uses half a core."""
    physical = {16: 8}.get(logical, logical)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu, "usable_cores", lambda: cores)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True, n=logical: n if logical else physical)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 100 * (now + 0.5) / logical)
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda process: 50.0)
    assert threads_beside_others() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "0")  # says nothing
    assert threads_beside_others() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_beside_others() is None
