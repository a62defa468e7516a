"""Settings of all tests, and which of them a machine may skip."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import stat
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# From here to the first test: the garbage collector would walk over all that is imported, again and again.
gc.disable()

_HANDLERS = {number: signal.getsignal(number) for number in signal.Signals if signal.getsignal(number) is not None}

# Each process computes with one thread: several test processes would fight over the cores, and a process that is forked
# from one with OpenMP's threads hangs in its first loop of several threads. OpenMP reads this as torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# How long an example takes says how busy the machine is, and nothing about what is tested.
settings.register_profile("gptlab", deadline=None, max_examples=30)
settings.load_profile("gptlab")

WITHOUT_COMPILER = "GPTLAB_TEST_WITHOUT_COMPILER"
"""Set to 1 where no C++ compiler is to be expected: without it, the tests of all kernels would vanish silently."""

_OF_THIS_MACHINE = re.compile(
    r"CUDA device|this processor has no|names processors of|torch without oneDNN|root reads|no namespaces"
    r"|no Docker daemon"
)
_COMPILER = re.compile(r"C\+\+ compiler")
_INSTALLED_BY_CI = re.compile(r"no (Chromium|zsh|fish|ARM processor to emulate)")
_IMPORT = re.compile(r"could not import")


def may_skip(reason: str) -> bool:
    """Whether a test may be skipped for this reason: no CUDA device, another processor, on other systems than Linux
    (which lacks nothing that a test needs) another platform, no Chromium, shell or ARM emulator outside of CI, or,
    where that is expected, no C++ compiler."""
    if _COMPILER.search(reason):
        return os.environ.get(WITHOUT_COMPILER) == "1"
    if _INSTALLED_BY_CI.search(reason):
        return os.environ.get("CI") != "true"
    if _IMPORT.search(reason):  # `make test` installs all of them
        return False
    return sys.platform != "linux" or _OF_THIS_MACHINE.search(reason) is not None


WITH_TRANSFORMERS = (
    "data/test_tokenizer.py", "data/test_tokenizer_gpt2.py", "model/test_export.py", "model/test_gpt2_weights.py",
    "model/test_import.py", "model/test_init_from.py",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out files, as `--dist loadfile` does, but all that import transformers to one process: with its models it
    takes 5 s of computing to import."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "transformers" if file.endswith(WITH_TRANSFORMERS) else file

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def _libraries_stay_frozen() -> Iterator[None]:
    """What the tests import is out of the garbage collector's sight from the first test on, and objects that a run
    froze stay frozen after it.

    Each run collects garbage before its first step. With torch and the libraries of the tests in memory, that takes a
    third of a second, in each of hundreds of runs. Between runs it is collected rarely, as the command has it
    (gptlab/cli/main.py): with Python's 700 new objects, a tenth of the computing of tests/unit/data, config and eval.
    """
    gc.freeze()  # the garbage of the imports, too: to look for it takes a third of a second
    gc.set_threshold(100_000)
    gc.enable()

    @functools.wraps(gc.unfreeze)
    def stay_frozen() -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", stay_frozen)
        yield


@pytest.fixture(autouse=True)
def _signals_are_heard() -> Iterator[None]:
    """A command that trained ignores signals until its process has ended. Here the process goes on."""
    yield
    for number, handler in _HANDLERS.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _no_power_is_lost() -> Iterator[None]:
    """Files and folders of tests do not have to reach the disk, which takes a millisecond for each of tens of
    thousands. Whether gptlab asks for it, and what it does where that fails, tests see by functions of their own in the
    place of this."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_IFMT(os.fstat(descriptor).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            real(descriptor)  # where it may be refused

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(scope="session", autouse=True)
def _found_out_once() -> Iterator[None]:
    """The runs of one process, and of those forked from it, share what each of hundreds would find out for itself: the
    snapshot of the code (every source hashed, git asked four times), the packages that are installed, the peak of the
    machine, which is also measured in a hundredth of a second instead of half a second."""
    from gptlab.runtime.records import provenance

    with pytest.MonkeyPatch.context() as patch:
        for name in ("take_code", "installed_distributions"):
            patch.setattr(provenance, name, functools.cache(getattr(provenance, name)))
        if "torch" in sys.modules:  # as soon as a test needs it
            from gptlab.runtime.hardware import peak, place

            measure = functools.partial(peak.measure_matmul_flops, seconds=0.01)
            patch.setattr(peak, "measure_matmul_flops", measure)
            patch.setattr(place, "peak_flops_per_second", functools.cache(peak.peak_flops_per_second))

            # For its log, torch.compile times the guards of each graph with a cold cache: it writes to 32 MB.
            from torch._C._dynamo import guards

            patch.setattr(guards, "profile_guard_manager", lambda *args: 0.0, raising=False)  # a private name
        yield


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the runs of a module, with a `corpus` and a CORE `bundle` in it."""
    from tiny_runs import write_bundle, write_corpus

    folder = tmp_path_factory.mktemp(request.module.__name__)
    write_corpus(folder / "corpus")
    write_bundle(folder / "bundle")
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not may_skip(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason}\nThis reason to skip a test is not one of those in tests/conftest.py."
    return report
