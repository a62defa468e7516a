"""Which functions torch.compile is given, by the platform that is planned for: nothing is compiled here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import make_config
from torch import Tensor

from gptlab.app.run.own_parts import OwnParts
from gptlab.app.run.session import open_session
from gptlab.config.run import RunConfig
from gptlab.eval.bits_per_byte import token_nats
from gptlab.runtime.hardware.device import Platform
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.processes.distributed import Group, World
from gptlab.runtime.records.console import QuietConsole
from gptlab.training.compilation import make_passes, warm_up
from gptlab.training.parallel.fsdp_copies import OneCopy
from gptlab.training.parallel.fsdp_muon import ShardedMatrix, ShardedMuon
from gptlab.training.parallel.strategy import COMPILES_CHECKPOINTS
from gptlab.training.state import TrainState


def share_matrices(state: TrainState, config: RunConfig, group: Group) -> None:
    """Give the optimizer the Muon of fully sharded processes; rank 0 has all rows."""
    assert state.optimizer.muon is not None
    nowhere_else = (0,) * (group.size - 1)
    matrices = [ShardedMatrix(name, p, (len(p), *nowhere_else)) for name, p in state.optimizer.muon.parameters.items()]
    state.optimizer.muon = ShardedMuon(
        matrices, config.optim.muon, compute_dtype=torch.float64, row_splits={}, group=OneCopy(group, group.size)
    )


BLOCKS = {"Block": 1, "GPT.head_loss": 1, "GPT.logits": 1}
ON_GPUS = {"updated": 1, "GPT.embed": 1, "GPT.look_up": 1, **BLOCKS}
BLOCK = "partial" if COMPILES_CHECKPOINTS else "Block.forward"  # torch's checkpoint, or what is within
RECOMPUTED = {name if name != "Block" else BLOCK: count for name, count in ON_GPUS.items()}  # of torch's checkpoint


@pytest.mark.parametrize(
    ("platform", "ranks", "kind", "expected"),
    [
        ("cuda", 1, "data", ON_GPUS),
        ("cuda", 1, "recomputed", RECOMPUTED),
        ("cuda", 2, "data", ON_GPUS),
        ("cuda", 2, "sharded", {"orthogonal_update": 1, "GPT.embed": 1, **BLOCKS}),  # a table's hooks stay as they are
        ("cuda", 2, "exact", ON_GPUS),
        ("cpu", 1, "data", BLOCKS),
        ("cpu", 2, "sharded", BLOCKS),
    ],
    ids=[
        "a GPU",
        "a GPU with activation checkpointing",
        "several GPUs",
        "several GPUs, sharded",
        "several GPUs with the bits of one",
        "a CPU",
        "a CPU, sharded",
    ],
)
def test_what_is_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, platform: Platform, ranks: int, kind: str, expected: dict[str, int]
) -> None:
    """Each part of the model by itself, whatever the number of processes: a compiled graph draws the dropout of all
    that it holds. On GPUs also the embedding, the value embeddings, and Muon."""
    config = make_config(
        folder, "never-made", runtime__compile="on", model__dropout=0.0,
        parallel__exact_any_world_size=kind == "exact", runtime__activation_checkpointing=kind == "recomputed",
    )  # fmt: skip
    session = open_session(config, place_of(config), QuietConsole())
    session.state.model.platform = platform
    session.state.strategy.group = group = Group(World(0, ranks))
    if kind == "sharded":
        share_matrices(session.state, session.config, group)
        session.state.strategy.is_sharded = True
    names: dict[str, int] = {}

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        name = getattr(function, "__qualname__", type(function).__name__)
        names[name] = names.get(name, 0) + 1
        assert options["dynamic"] is False
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    passes = make_passes(session.state, session.config, pytest.fail)
    assert names == expected
    tokens = torch.zeros(2, config.model.seq_len, dtype=torch.int64)
    assert torch.equal(passes.loss_sum(tokens, tokens), session.state.model.loss(tokens, tokens))
    logits = session.state.model(tokens)
    assert torch.equal(passes.token_nats(tokens, tokens), token_nats(logits, tokens))


def test_more_graphs_of_a_function_than_torch_permits_by_itself(folder: Path) -> None:
    """Rows are halved and sizes are tried in one process, and each has graphs of its own."""
    config = make_config(folder, "never-made", runtime__compile="on")
    make_passes(open_session(config, place_of(config), QuietConsole()).state, config, pytest.fail)
    made: list[object] = []

    def count(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        made.append(module)
        return module.forward

    doubled = torch.compile(lambda x: 2 * x, dynamic=False, backend=count)
    for size in range(1, 11):
        doubled(torch.ones(size))
    assert len(made) == 10


def test_value_embeddings_share_a_graph(folder: Path) -> None:
    config = make_config(folder, "never-made", model__n_layer=6, model__value_embeddings=True, model__dropout=0.0)
    model = open_session(config, place_of(config), QuietConsole()).state.model
    made: list[object] = []

    def count(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        made.append(module)
        return module.forward

    look_up = torch.compile(model.look_up, dynamic=False, backend=count)
    tokens = torch.zeros(2, config.model.seq_len, dtype=torch.int64)
    assert torch.equal(model.hidden(tokens, look_up=look_up), model.hidden(tokens))
    assert len(model.value_embeddings) == 3
    assert len(made) == 1


def fails(*args: Any) -> None:
    raise OSError("no linker")


CPP_ERROR = """\
CppCompileError: C++ compile error

Command:
g++ /tmp/x.cpp -o /tmp/x.so

Output:
/tmp/x.cpp:1:10: fatal error: no_such.h: No such file or directory
compilation terminated.
"""


def does_not_compile(*args: Any) -> None:
    raise OSError(CPP_ERROR)


def gives_zeros(loss: Tensor) -> Tensor:
    """As torch 2.11 compiled the loss of the head."""
    return loss.detach() + 0.0 * loss


@pytest.mark.parametrize(
    ("sharded", "result", "problem"),
    [
        (False, fails, "no linker"),
        (True, fails, "no linker"),
        (False, does_not_compile, "/tmp/x.cpp:1:10: fatal error: no_such.h: No such file or directory"),
        (False, gives_zeros, f"torch {torch.__version__} compiled a backward pass whose gradients are all zero"),
    ],
)
def test_a_gpu_whose_compiler_fails_trains_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool, result: Callable[..., Any], problem: str
) -> None:
    """Muon's update included, which is compiled beside the passes."""

    def broken(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda *args: result(function(*args))

    config = make_config(folder, "never-made", runtime__dtype="float64", runtime__compile="auto")
    session = open_session(config, place_of(config), QuietConsole())
    state = session.state
    state.model.platform = "cuda"
    if sharded:
        share_matrices(state, session.config, state.strategy.group)
    monkeypatch.setattr(torch, "compile", broken)
    passes = make_passes(state, session.config, pytest.fail)
    assert passes.compiled
    warnings: list[str] = []
    warm_up(state, passes, session.config, session.eval_sequences, warnings.append)
    assert warnings == [f"training without torch.compile, which is slower: torch.compile failed: {problem}"]
    assert not passes.compiled


def test_an_own_optimizer_on_a_gpu_whose_compiler_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no Muon to compile, and the warm-up does not step it."""
    config = make_config(folder, "never-made", runtime__dtype="float64", runtime__compile="auto")
    own = OwnParts(optimizer=lambda model: torch.optim.AdamW(model.parameters()))
    session = open_session(config, place_of(config), QuietConsole(), parts=own)
    session.state.model.platform = "cuda"
    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    passes = make_passes(session.state, session.config, pytest.fail)
    warnings: list[str] = []
    warm_up(session.state, passes, session.config, session.eval_sequences, warnings.append)
    assert warnings == ["training without torch.compile, which is slower: torch.compile failed: no linker"]
    assert session.state.optimizer.state_tensors() == {}


@pytest.mark.parametrize("more_rows", [0, 1])
def test_a_validation_of_other_rows_keeps_nothing_for_a_backward_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch, more_rows: int
) -> None:
    """With as many rows as in training, it runs what training compiled. With more, that took a training's memory. The
    rows are those in force: a warm-up for which memory was too small halves them."""
    config = make_config(folder, "never-made", runtime__compile="on")
    session = open_session(config, place_of(config), QuietConsole())
    keeps: list[bool] = []
    session.state.model.blocks[0].register_forward_hook(lambda *_: keeps.append(torch.is_grad_enabled()))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    passes = make_passes(session.state, config, pytest.fail)
    session.state.loader.cut(1, config.batch.total_tokens // config.model.seq_len)
    tokens = torch.zeros(1 + more_rows, config.model.seq_len, dtype=torch.int64)
    with torch.no_grad():
        passes.token_nats(tokens, tokens)
    assert keeps == [more_rows == 0]
