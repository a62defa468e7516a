"""What computed a run is recorded, and a resume with another one says that it is not bit for bit."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import arguments, command, killed_at, train

from gptlab.app.run.repeat import implementations_changed as changed
from gptlab.config.errors import ConfigError
from gptlab.config.load import apply_overrides
from gptlab.config.run import RunConfig
from gptlab.model.kernels import fused, library, ops
from gptlab.model.kernels.library import Library, kernel_library
from gptlab.model.kernels.ops import implementations
from gptlab.runtime.hardware.device import compiler_available
from gptlab.training import compilation
from gptlab.training.checkpoint.load import load_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints

needs_compiler = pytest.mark.skipif(not compiler_available(torch.device("cpu")), reason="no C++ compiler here")

NOT_BIT_FOR_BIT = "close to, not bit for bit"


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are built as on a machine where the library cannot be."""
    monkeypatch.setattr(library, "kernel_library", lambda activations: Library())


def recorded(run: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((run / "run.json").read_text())["implementations"]
    return found


def of_checkpoint(run: Path) -> dict[str, str]:
    saved: dict[str, str] = load_checkpoint(list_checkpoints(run / "checkpoints")[-1]).state["implementations"]
    return saved


@needs_compiler
def test_run_and_checkpoint_name_the_library_by_its_hash(folder: Path) -> None:
    run = train(folder, "recorded", steps=1)
    built = kernel_library("float32")
    sha256 = hashlib.sha256(Path(built.functions._name).read_bytes()).hexdigest()
    assert recorded(run)["kernels"] == sha256[:32]
    assert recorded(run)["vectors"] == torch.backends.cpu.get_cpu_capability()
    assert recorded(run)["compile"] == "off"
    assert of_checkpoint(run) == recorded(run)


@needs_compiler
@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
def test_a_run_needs_the_kernels_of_one_type(folder: Path, monkeypatch: pytest.MonkeyPatch, activations: str) -> None:
    """Though logits are float32: the others would be built in the middle of a run."""
    asked = set()

    def noted(activations: library.Activations) -> Library:
        asked.add(activations)
        return kernel_library(activations)

    for module in (library, fused):
        monkeypatch.setattr(module, "kernel_library", noted)
    train(folder, activations, steps=2, eval__every_steps=1, runtime__dtype=activations, sample__from_validation=1)
    assert asked == {activations}


@pytest.mark.usefixtures("without_kernels")
def test_without_the_kernels_it_is_torch(folder: Path) -> None:
    assert recorded(train(folder, "torch", steps=1))["kernels"] == "none"


def test_types_that_the_kernels_are_not_for(folder: Path) -> None:
    assert recorded(train(folder, "double", steps=1, runtime__dtype="float64"))["kernels"] == "none"


@needs_compiler
def test_a_resumed_run_says_what_is_computed_otherwise(folder: Path, request: pytest.FixtureRequest) -> None:
    run = folder / "resumed"
    for kind, step in (("train", 5), ("train", 9)):
        with killed_at(kind, step):
            code, out, err = command(
                ["train", *arguments(folder, run.name)] if step == 5 else ["train", "--resume", run]
            )
    log = (run / "log.txt").read_text()
    assert NOT_BIT_FOR_BIT not in log, "by the same implementation"
    kernels = recorded(run)["kernels"]
    request.getfixturevalue("without_kernels")
    code, out, err = command(["train", "--resume", run])
    assert (code, err) == (0, "")
    (warning,) = (line for line in out.splitlines() if NOT_BIT_FOR_BIT in line)
    assert f"kernels: {kernels} -> none" in warning
    record = json.loads((run / "run.json").read_text())
    assert [resume["implementations"]["kernels"] for resume in record["resumes"]] == [kernels, "none"]
    assert (record["implementations"]["kernels"], of_checkpoint(run)["kernels"]) == (kernels, "none")


@needs_compiler
def test_so_does_one_that_repeats_another(folder: Path, request: pytest.FixtureRequest) -> None:
    origin = train(folder, "origin", steps=1)
    request.getfixturevalue("without_kernels")
    code, out, _ = command(["train", "--from", origin, "--run-dir", folder / "again"])
    assert code == 0
    assert any(" -> none" in line and NOT_BIT_FOR_BIT in line for line in out.splitlines())


def test_a_machine_without_a_compiler_says_so_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the kernels and torch.compile need one."""
    missing = Library(problem="no C++ compiler (g++ or clang++) was found")
    monkeypatch.setattr(library, "kernel_library", lambda activations: missing)
    monkeypatch.setattr("gptlab.model.kernels.ops.cxx_compiler", lambda: None)
    code, out, err = command(["train", *arguments(folder, "no compiler", {"runtime.compile": "auto", "steps": 1})])
    assert (code, err) == (0, "")
    (warning,) = (line for line in out.splitlines() if "slower" in line)
    assert "no C++ compiler (g++ or clang++) was found" in warning


def failing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: object, inputs: object, **options: object) -> Callable[..., Any]:
        raise RuntimeError("c++: error: out of order\nand more")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr("gptlab.training.compilation.compiler_available", lambda device: True)


class TestCompilerThatFails:
    @needs_compiler
    def test_a_cache_that_cannot_be_written_is_none(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was a traceback."""
        (tmp_path / "file").touch()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
        code, out, err = command(
            [
                "train",
                *arguments(folder, "unwritable", {"runtime.compile": "auto", "runtime.dtype": "float64", "steps": 1}),
            ]
        )
        assert (code, err) == (0, "")
        assert out.count("warning: training without torch.compile, which is slower: torch.compile needs a cache") == 1
        assert f"{tmp_path / 'file'} cannot be written" in out
        assert recorded(folder / "unwritable")["compile"] == "off"

    @pytest.mark.skipif(os.name == "nt", reason="needs a program in sh")
    def test_one_that_hangs_is_not_waited_for_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch.compile would wait without a limit."""
        (tmp_path / "c++").write_text("#!/bin/sh\nexec sleep 2\n")
        (tmp_path / "c++").chmod(0o755)
        monkeypatch.setenv("CXX", str(tmp_path / "c++"))
        monkeypatch.setattr(library, "_BUILD_TIMEOUT_SECONDS", 0.05)
        monkeypatch.setattr(ops, "_library", library.load_built([], []))
        monkeypatch.setattr(ops, "_fused", None)
        model = SimpleNamespace(compute_dtype=torch.float32)
        state: Any = SimpleNamespace(device=torch.device("cpu"), model=model)
        plain: Any = object()
        config = apply_overrides(RunConfig(), {"runtime.compile": "auto"})
        assert compilation._compiled(plain, state, config, pytest.fail) is plain
        assert "c++ did not finish within " in str(ops.missing_kernels(state.device, torch.float32))

    def test_on_an_apple_gpu_no_compiler_is_missed(self) -> None:
        """It was said to need a C++ compiler. Inductor writes Metal, as a prototype, and nobody measured it here."""
        state: Any = SimpleNamespace(device=torch.device("mps"), model=SimpleNamespace(compute_dtype=torch.float32))
        plain: Any = object()
        told: list[str] = []
        assert compilation._compiled(plain, state, RunConfig(), told.append) is plain
        assert len(told) == 1
        assert told[0].startswith("training without torch.compile: for Apple GPUs it is a prototype (https://github.")
        on = apply_overrides(RunConfig(), {"runtime.compile": "on"})
        with pytest.raises(ConfigError, match="prototype"):
            compilation._compiled(plain, state, on, told.append)

    def test_is_told_of_and_recorded(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is there and fails is no compiler: the run is that of one that never asked for it."""
        failing_compiler(monkeypatch)
        words = arguments(folder, "failing", {"runtime.compile": "auto", "runtime.dtype": "float64", "steps": 2})
        code, out, err = command(["train", *words])
        assert (code, err) == (0, "")
        told = [line for line in out.splitlines() if line.startswith("warning: training without torch.compile")]
        assert len(told) == 1
        assert "error: out of order" in told[0]
        assert recorded(folder / "failing")["compile"] == "off"
        losses = [
            json.loads(line)["loss"]
            for run in (folder / "failing", train(folder, "off", steps=2, runtime__dtype="float64"))
            for line in (run / "metrics.jsonl").read_text().splitlines()
            if json.loads(line)["kind"] == "train"
        ]
        assert losses[:2] == losses[2:]

    def test_is_an_error_where_it_is_demanded(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        failing_compiler(monkeypatch)
        words = arguments(folder, "demanded", {"runtime.compile": "on", "steps": 2})
        code, _, err = command(["train", *words])
        assert code == 2
        assert "runtime.compile" in err
        assert "error: out of order" in err


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [
        (None, ""),
        ({"kernels": "none"}, ""),
        ({"kernels": "12"}, "kernels: 12 -> none"),
        ({}, "kernels: None -> none"),
        ({"kernels": "none", "head": "triton"}, "head: triton -> None"),
        ("not a table", ""),
    ],
)
def test_what_changed(earlier: object, expected: str) -> None:
    assert changed(earlier, {"kernels": "none"}) == expected


def test_what_an_older_gptlab_recorded_is_named_as_a_difference() -> None:
    """Its checkpoint resumes, with the warning that says what is computed differently."""
    now = implementations(torch.device("cpu"), torch.float64)
    earlier = {"attention": "kernels 12", "linear": "torch", "vectors": now["vectors"]}
    assert changed(earlier, now) == "kernels: None -> none, attention: kernels 12 -> None, linear: torch -> None"
