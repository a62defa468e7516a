"""torch.compile in a run: what it is given; its warm-up leaves no trace, and it changes nothing but rounding."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import FLAGS, lines_of, open_tiny, tensors_of, train
from torch import Tensor

from gptlab.app.run import run_session
from gptlab.runtime.hardware.device import compiler_available
from gptlab.training import compilation as compilation_module
from gptlab.training.compilation import run_once
from gptlab.training.loop import fit


@pytest.mark.parametrize(
    "changes",
    [
        {"model__dropout": 0.3},
        {"optim__matrix_optimizer": "adamw", "model__norm": "layernorm"},
        {"runtime__dtype": "float16"},
    ],
    ids=["muon", "adamw", "float16"],
)
def test_warm_up_leaves_no_trace(folder: Path, changes: dict[str, Any]) -> None:
    opened = open_tiny(folder, **changes)
    state = opened.state
    passes = torch.zeros((), dtype=torch.int64)
    part = state.model.blocks[0].mlp  # as a caller's own may be
    part.register_buffer("passes", passes)
    part.register_buffer("mean", torch.zeros(2))

    def everything() -> dict[str, Tensor]:
        tensors = tensors_of(state)
        return {name: tensor.clone() for name, tensor in tensors.items()}

    before, before_json = everything(), state.to_json()
    warmed: list[bool] = []

    def loss_sum(*args: Tensor) -> Tensor:
        warmed.append(True)
        passes.add_(1)
        part.mean = 0.9 * part.mean + 1
        return state.model.loss(*args)

    def token_nats(*args: Tensor) -> Tensor:
        warmed.append(any(parameter.grad is not None for parameter in state.model.parameters()))
        return opened.passes.token_nats(*args)

    own = replace(opened.passes, loss_sum=loss_sum, token_nats=token_nats)
    run_once(state, own, opened.config, opened.eval_sequences)
    after = everything()
    assert warmed == [True, False], "a validation beside gradients takes more memory than any in the run"
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert state.to_json() == before_json
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_settings_of_the_compiler_and_the_gpu_allocator_are_passed_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both change GPU runs only; here that they reach torch, the user's own environment first."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that monkeypatch puts back what there was
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    options: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **given: options.append(given["options"]) or function)
    monkeypatch.setattr(compilation_module, "compiler_available", lambda device: True)
    changes = {"runtime__compile": "on", "runtime__allocator": "expandable_segments:True"}
    open_tiny(folder, **changes)
    assert options
    assert not any("coordinate_descent_tuning" in given for given in options)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    options.clear()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    open_tiny(folder, **changes, runtime__coordinate_descent_tuning=True)
    assert options
    assert all(given["coordinate_descent_tuning"] is True for given in options)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"


def test_compiled_kernels_never_come_from_a_folder_that_a_run_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch runs what it finds there, and a run's configuration may be a stranger's."""
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that monkeypatch puts back what there was
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(compilation_module, "compiler_available", lambda device: True)
    assert open_tiny(folder, runtime__compile="on", data__cache_dir=str(tmp_path / "strangers")).passes.compiled
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine" / "compile")


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="only there the compiler's options are known"
)
@pytest.mark.parametrize(
    ("compiler", "before", "after"),
    [
        ("exit 0", None, "1"),
        ('case "$*" in *-mamx-tile*) exit 1;; esac', None, None),  # an older one: Inductor has to try
        ("exit 0", "0", "0"),  # the user's own choice
    ],
)
def test_vectors_are_not_tried_where_the_compiler_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, before: str | None, after: str | None
) -> None:
    program = tmp_path / "g++"
    program.write_text(f"#!/bin/sh\n{compiler}\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", before or "")  # so that monkeypatch puts back what there was
    if before is None:
        monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK")
    compilation_module._skip_vector_probes()
    assert os.environ.get("TORCHINDUCTOR_VEC_ISA_OK") == after


def test_what_is_compiled_and_for_one_shape(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile is given, and that validation runs the blocks that training compiled."""
    compiled: list[Any] = []
    called: list[Any] = []

    def note(function: Any, *, dynamic: bool | None = None, options: Any = None) -> Any:
        compiled.append((function, dynamic))

        def run(*args: Any) -> Any:
            called.append(function)
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(compilation_module, "compiler_available", lambda device: True)
    opened = open_tiny(folder, runtime__compile="on", model__dropout=0.0)
    model, passes = opened.state.model, opened.passes
    assert passes.compiled
    assert compiled == [(part, False) for part in (*model.blocks, model.head_loss, model.logits)]
    tokens = torch.zeros(1, FLAGS["model.seq_len"], dtype=torch.int64)
    passes.loss_sum(tokens, tokens)
    assert called == [*model.blocks, model.head_loss]
    called.clear()
    passes.token_nats(tokens, tokens)
    assert called == [*model.blocks, model.logits]


@pytest.fixture
def quick_inductor() -> Iterator[None]:
    """No programs are compiled to try vectors that the processor says it has, no processes are started to compile two,
    loops are scalar, which takes a quarter less to compile, and no patterns are looked for, which takes a second: that
    Inductor's vectors add up and its patterns match is for PyTorch to test."""
    from torch._inductor import config

    # monkeypatch would take the entries away for good
    with config.patch({"pattern_matcher": False, "cpp.vec_isa_ok": True, "cpp.simdlen": 1, "compile_threads": 1}):
        yield


@pytest.mark.timeout(600)  # a C++ compiler on a busy machine
@pytest.mark.usefixtures("quick_inductor")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """torch.compile changes rounding and speed, nothing else: it is done before the first step."""
    if not compiler_available(torch.device("cpu")):
        pytest.skip("torch.compile needs a C++ compiler, and none was found")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    changes = {
        "model__n_layer": 1, "model__value_embeddings": "off", "sample__prompts": [], "runtime__dtype": "float64",
    }  # fmt: skip
    if backend == "inductor":  # few parts, since each is compiled, and no dropout, which Inductor draws otherwise
        off = ("model__residual_lambdas", "model__qk_norm", "model__embedding_norm")
        changes |= dict.fromkeys(off, False) | {"model__position": "learned", "model__logit_softcap": None}
        changes |= {"model__dropout": 0.0}
    plain = train(folder, f"uncompiled-{backend}", **changes)

    def fit_without_compiling(*parts: Any) -> Any:
        with torch.compiler.set_stance("fail_on_recompile"):
            return fit(*parts)

    monkeypatch.setattr(run_session, "fit", fit_without_compiling)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    compiled = train(folder, f"compiled-{backend}", runtime__compile="on", **changes)
    for kind, key in (("train", "loss"), ("eval", "val_loss")):
        for a, b in zip(lines_of(plain, kind), lines_of(compiled, kind), strict=True):
            # float64 sums in another order: measured 8e-13. In float32 it would be 1e-4, since Muon makes all
            # directions of a gradient equally long, also those that are nothing but rounding.
            assert a[key] == pytest.approx(b[key], rel=1e-9)
    assert "compiled in" in (compiled / "log.txt").read_text(encoding="utf-8")
