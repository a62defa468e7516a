"""A test that does not run is noticed: skips outside of a short list fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from byte_code import rewrite_test
from conftest import WITHOUT_COMPILER, may_skip
from forked import run_forked

TESTS = """
import pytest
def test_passes(): pass
@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_gpu(): pass
@pytest.mark.skipif(True, reason="no C++ compiler here")
def test_kernel(): pass
@pytest.mark.xfail
def test_expected(): assert False
def test_inside(): pytest.skip("not today")
def test_import(): pytest.importorskip("a_library_that_nobody_has")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere any reason may be that of the platform")
def test_only_what_the_machine_lacks_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And pytest takes the byte code that byte_code.py made, which it would otherwise have replaced by its own."""
    (tmp_path / "test_it.py").write_text(TESTS)
    made = rewrite_test(tmp_path / "test_it.py").stat()
    words = ["-p", "conftest", "-p", "no:cacheprovider", "-q", "-rA", "-c", os.devnull, "--rootdir", str(tmp_path)]

    def work() -> int:
        sys.dont_write_bytecode = False
        return pytest.main([*words, str(tmp_path)])

    done = run_forked(work, **{WITHOUT_COMPILER: "0"})
    failed = {
        line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR "))
    }
    assert failed == {"test_inside", "test_import", "test_kernel"}, done.stdout
    assert done.returncode == 1
    assert [path.stat().st_ino for path in (tmp_path / "__pycache__").iterdir()] == [made.st_ino]
    monkeypatch.setenv(WITHOUT_COMPILER, "1")
    assert may_skip("no C++ compiler here")
