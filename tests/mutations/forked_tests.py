"""pytest on a private copy of the project, in processes that fork from one that has imported torch and the other
libraries: a second for each instead of five. gptlab itself is imported by each of them."""

from __future__ import annotations

import compileall
import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.process
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import Phase, settings

from .mutation import ROOT, Mutation, file_of_test

Outcome = Literal["failed", "passed", "skipped", "not run"]

LIMIT_SECONDS = 300.0
"""For the tests of one mutation, most of which take a second. Longer: the mutation made them hang."""

_PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")
"""Of pytest. The others that are installed would be loaded again by every process, and take longer than the tests."""
_LIBRARIES = (
    "torch", "numpy", "hypothesis", "safetensors.torch", "tokenizers", "tiktoken", "pyarrow.parquet", "tyro", "rich",
    "psutil", "filelock", "huggingface_hub", "yaml", *_PLUGINS,
)  # fmt: skip


def import_libraries() -> None:
    """What every forked process then has already. Nothing of gptlab: each imports its own copy."""
    for name in _LIBRARIES:
        importlib.import_module(name)
    assert "gptlab" not in sys.modules


class Tree:
    """A copy of what the tests read, in which a mutation may be made and is taken back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignore = shutil.ignore_patterns("__pycache__", ".*")
        for name in ("gptlab", "tests", "docs"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        for path in ROOT.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copy2(path, folder / path.name)
        # Byte code that is trusted by the hash of its source: a mutation may have the size and the second of the
        # original.
        compileall.compile_dir(
            folder / "gptlab", quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )

    def mutate(self, mutation: Mutation) -> None:
        path = self.folder / "gptlab" / mutation.file
        text = path.read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        self._mutated = path, text

    def restore(self) -> None:
        path, text = self._mutated
        path.write_text(text, encoding="utf-8")


@dataclass
class Run:
    """pytest under way in a process of its own."""

    tree: Tree
    tests: Sequence[str]
    process: multiprocessing.process.BaseProcess
    started: float

    @classmethod
    def start(cls, tree: Tree, tests: Sequence[str], *, keep_bytecode: bool = False) -> Run:
        """`keep_bytecode`: of the test modules, for the next runs in this tree."""
        arguments = (tree.folder, list(tests), keep_bytecode)
        process = multiprocessing.get_context("fork").Process(target=_run_tests, args=arguments)
        process.start()
        return cls(tree, tests, process, time.monotonic())

    @property
    def log(self) -> Path:
        return self.tree.folder / "log.txt"

    def wait(self, limit_seconds: float) -> dict[str, Outcome]:
        """How each of the tests ended. Whatever the process has started ends with it."""
        self.process.join(max(0.0, self.started + limit_seconds - time.monotonic()))
        hangs = self.process.exitcode is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        path = self.tree.folder / "outcomes.json"
        outcomes = json.loads(path.read_text()) if path.is_file() else {}
        return {test: outcomes.get(test, "failed" if hangs else "not run") for test in self.tests}


def _run_tests(folder: Path, tests: list[str], keep_bytecode: bool) -> None:
    os.setsid()
    output = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    path = folder / "outcomes.json"
    path.unlink(missing_ok=True)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = not keep_bytecode
    # A cache of its own: what a mutated gptlab leaves there is nothing that others should find. Compiled kernels are
    # named by their sources, and take a while to build.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "gptlab-mutations-compile"))
    os.environ |= {
        "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
        "GPTLAB_CACHE": str(folder / "cache"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    # To shrink a failure to its smallest example would take minutes.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutations", deadline=None, database=None, phases=phases)
    noted = _Outcomes()
    plugins = [word for plugin in _PLUGINS for word in ("-p", plugin)]
    options = ["-p", "no:cacheprovider", "--tb=short", f"--basetemp={folder / 'tmp'}", *plugins]
    options += ["--hypothesis-profile=mutations", "--hypothesis-seed=0"]
    files = [test.partition("::") for test in tests]
    words = [f"{file_of_test(file, folder).relative_to(folder)}::{name}" for file, _, name in files]
    pytest.main([*options, *words], plugins=[noted])
    gptlab = sys.modules.get("gptlab")
    assert gptlab is None or Path(str(gptlab.__file__)).is_relative_to(folder), gptlab
    path.write_text(json.dumps(noted.by_test))


class _Outcomes:
    """A plugin of pytest: the outcome of each test over all its parameters. Once one has failed, the rest are left
    out."""

    def __init__(self) -> None:
        self.by_test: dict[str, Outcome] = {}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.by_test.get(_test_of(item.nodeid)) == "failed":
            pytest.skip("failed with other parameters")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = _test_of(report.nodeid)
        former = self.by_test.get(test)
        if report.failed:
            self.by_test[test] = "failed"
        elif report.passed and report.when == "call" and former != "failed":
            self.by_test[test] = "passed"
        elif report.skipped and former is None:
            self.by_test[test] = "skipped"


def _test_of(node_id: str) -> str:
    return node_id.partition("[")[0].rpartition("/")[2]
