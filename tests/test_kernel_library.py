"""The kernels in C++: when they are built, and what happens where they cannot be."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gptlab.model import kernel_library
from gptlab.runtime.device import compiler_available, cxx_compiler

needs_compiler = pytest.mark.skipif(not compiler_available(torch.device("cpu")), reason="no C++ compiler here")


@needs_compiler
def test_a_machine_that_compiles_has_them() -> None:
    assert kernel_library.kernel_library() is not None


@needs_compiler
def test_a_damaged_library_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiler = cxx_compiler()
    assert compiler is not None
    sources, flags = kernel_library._SOURCES, kernel_library._FLAGS
    path = kernel_library.library_path(compiler, sources, flags)
    path.parent.mkdir()
    path.write_bytes(b"\x7fELF, and nothing else")
    assert isinstance(kernel_library.load_built(compiler, sources, flags), ctypes.CDLL)
    assert os.listdir(path.parent) == [path.name]


@needs_compiler
@pytest.mark.parametrize("changed", ["a source", "a header", "an option"])
def test_whatever_they_are_made_of_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    """A library of other sources, or of other options, is never taken for these."""
    compiler = cxx_compiler()
    assert compiler is not None
    source, header = tmp_path / "a.cpp", tmp_path / "a.h"
    source.write_text("1")
    header.write_text("1")
    monkeypatch.setattr(kernel_library, "_HEADERS", (header,))
    before = kernel_library.library_path(compiler, [source], ["-O3"])
    if changed != "an option":
        (source if changed == "a source" else header).write_text("2")
    after = kernel_library.library_path(compiler, [source], ["-O2" if changed == "an option" else "-O3"])
    assert before != after


@pytest.mark.parametrize("lack", ["no compiler", "no folder"])
def test_without_them_models_compute_all_the_same(tmp_path: Path, lack: str) -> None:
    """In a process of its own, which has neither built nor loaded them."""
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "TORCHINDUCTOR_CACHE_DIR")}
    if lack == "no compiler":
        environment["PATH"] = str(tmp_path)
    else:
        (tmp_path / "file").write_text("in the way")
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "file")
    program = (
        "import torch\nfrom gptlab.config.model import ModelConfig\nfrom gptlab.model.gpt import build_model\n"
        "config = ModelConfig(n_layer=1, n_embd=16, n_head=1, seq_len=64, vocab_size=5)\n"
        "model = build_model(config, device=torch.device('cpu'), compute_dtype=torch.float32, seed=1)\n"
        "logits = model(torch.zeros(1, 64, dtype=torch.int64))\n"
        "block = model.blocks[0]\n"
        "print(block.attention.by_kernel, block.mlp.up.by_kernel, logits.isfinite().all().item())"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]
