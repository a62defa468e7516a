"""Settings of all tests, and which of them a machine may leave out."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is, and nothing about what is tested.
settings.register_profile("gptlab", deadline=None)
settings.load_profile("gptlab")

WITHOUT_COMPILER = "GPTLAB_TEST_WITHOUT_COMPILER"
"""Set to 1 where no C++ compiler is to be expected: without it, the tests of all kernels would vanish silently."""

_OF_THIS_MACHINE = re.compile(r"CUDA device|this processor has no|names processors of|torch without oneDNN|root reads")
_COMPILER = re.compile(r"C\+\+ compiler")
_IMPORT = re.compile(r"could not import")


def may_skip(reason: str) -> bool:
    """Whether a test may be skipped for this reason: no CUDA device, another processor, on other systems than Linux
    (which lacks nothing that a test needs) another platform, or, where that is expected, no C++ compiler."""
    if _COMPILER.search(reason):
        return os.environ.get(WITHOUT_COMPILER) == "1"
    if _IMPORT.search(reason):  # `make test` installs all of them
        return False
    return sys.platform != "linux" or _OF_THIS_MACHINE.search(reason) is not None


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
