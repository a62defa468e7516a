"""The steps of a GPU, queued one ahead: on the CPU they make the run that waits for each, bit for bit; on the meta
device, which has no values, none of their operations asks for one."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from oracle_checkpoint import same_bits
from tiny_runs import (
    FakeClock,
    arguments,
    at_line,
    command,
    differences,
    lines_of,
    make_config,
    open_tiny,
    outcome,
    tensors_of,
    train,
)  # fmt: skip
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gptlab
from gptlab.app.run.session import Session
from gptlab.config.recipes import configure
from gptlab.data.loader import StepBatch
from gptlab.model.gpt import GPT, build_model
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.training import captured_steps
from gptlab.training import queued_steps as queued_module
from gptlab.training import step as step_module
from gptlab.training.faults import TrainingFailed
from gptlab.training.parallel.strategy import Strategy, whole_optimizer
from gptlab.training.queued_steps import queued_update
from gptlab.training.state import TrainState
from gptlab.training.step import Rates, gradients, rates_of_step

QUIET: dict[str, Any] = {"sample__prompts": [], "eval__every_steps": 6, "checkpoint__background": False}
BROKEN_GRADIENT = "blocks.0.mlp.up.weight"


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop takes the path of a GPU, while the model computes as on a CPU."""

    def build(*args: Any, **kwargs: Any) -> GPT:
        model = build_model(*args, **kwargs)
        model.platform = "cuda"
        return model

    monkeypatch.setattr("gptlab.training.state.build_model", build)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of data step 2 is NaN, the gradient of one weight in step 6 and the loss in step 7 infinite."""

    def spoilt(state: TrainState, batch: StepBatch, *args: Any) -> Tensor:
        loss = gradients(state, batch, *args)
        if batch.step in (2, 7):
            for parameter in state.model.parameters():
                parameter.grad = parameter.grad * math.nan  # type: ignore[operator]
            return loss * (math.nan if batch.step == 2 else math.inf)
        if batch.step == 6:
            gradient = dict(state.model.named_parameters())[BROKEN_GRADIENT].grad
            assert gradient is not None
            gradient.view(-1)[3] = math.inf
        return loss

    for module in (step_module, queued_module):
        monkeypatch.setattr(module, "gradients", spoilt)


class TestTheSameRun:
    """As one that waits for each step."""

    def test_with_everything_due(self, folder: Path, request: pytest.FixtureRequest) -> None:
        waits = train(folder, "waits")
        request.getfixturevalue("queued")
        assert differences(outcome(waits), outcome(train(folder, "queues"))) == []

    def test_skips_the_same_updates_and_names_the_same_weight(
        self, folder: Path, broken: None, request: pytest.FixtureRequest
    ) -> None:
        warnings = []
        for name in ("broken-waits", "broken-queues"):
            if name == "broken-queues":
                request.getfixturevalue("queued")
            code, out, _ = command(["train", *arguments(folder, name)])
            assert code == 0
            warnings.append([line for line in out.splitlines() if line.startswith("warning")])
        assert differences(*(outcome(folder / name) for name in ("broken-waits", "broken-queues"))) == []
        assert warnings[0] == warnings[1]
        assert [line.rpartition("gradient: ")[2] for line in warnings[1] if BROKEN_GRADIENT in line] == [
            BROKEN_GRADIENT
        ]

    def test_stopped_by_a_signal_and_resumed(self, folder: Path, request: pytest.FixtureRequest) -> None:
        whole = train(folder, "whole", **QUIET)
        request.getfixturevalue("queued")
        with at_line("train", 10, lambda: os.kill(os.getpid(), signal.SIGTERM)):
            assert gptlab.train(make_config(folder, "stopped", **QUIET)).exit_code == 75
        # Step 11 was under way when the signal came.
        assert [line["step"] for line in lines_of(folder / "stopped", "train")] == [*range(1, 12)]
        gptlab.train(resume=folder / "stopped")
        assert differences(outcome(whole), outcome(folder / "stopped")) == []

    def test_too_many_broken_steps_end_it(self, folder: Path, broken: None, queued: None) -> None:
        with pytest.raises(TrainingFailed, match="in step 8, after 1 consecutive skipped updates"):
            train(folder, "failed", faults__max_skipped_in_a_row=1, **QUIET)
        events = [(line["step"], line["what"]) for line in lines_of(folder / "failed", "event")]
        assert events == [(3, "skipped"), (7, "skipped"), (8, "failed")]


def test_one_step_ahead_until_something_is_due(folder: Path, queued: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are due after steps 4, 8 and 12, evaluations after 6 and 12."""
    order: list[str] = []

    def noted(state: TrainState, batch: StepBatch, *args: Any) -> Tensor:
        order.append(f"queue {batch.step + 1}")
        return gradients(state, batch, *args)

    monkeypatch.setattr(queued_module, "gradients", noted)
    write = MetricsLog.write

    def written(log: MetricsLog, kind: Any, /, **line: Any) -> None:
        order.append(f"{kind} {line['step']}")
        write(log, kind, **line)

    monkeypatch.setattr(MetricsLog, "write", written)
    train(folder, "order", steps=7, **QUIET)
    assert order == [
        "eval 0",
        "queue 1", "queue 2", "train 1", "queue 3", "train 2", "queue 4", "train 3", "train 4", "checkpoint 4",
        "queue 5", "queue 6", "train 5", "train 6", "eval 6",
        "queue 7", "train 7", "eval 7", "checkpoint 7",
    ]  # fmt: skip


def test_a_budget_in_seconds(folder: Path, queued: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one second, in which the host waits for the GPU: nine of them are a budget of nine seconds, and no tenth
    is begun."""
    place_of(make_config(folder, "never-made"))  # by the true clock
    with FakeClock.running() as clock:
        clock._charge(monkeypatch, "gptlab.training.queued_steps._figures", 1.0)
        run = train(folder, "budget", minutes=0.15, **QUIET)
    assert [line["step_seconds"] for line in lines_of(run, "train")] == [1.0] * 9


def test_norms_are_of_every_weight_also_of_one_without_gradient(folder: Path) -> None:
    """A broken step of a model with a weight that is not used ended with a traceback, as its name was looked for."""
    state, config = (session := open_tiny(folder)).state, session.config
    with state.loader:
        loss = gradients(state, next(state.loader), state.model.loss, config)
    weights = state.strategy.updated_weights()
    weights[4].grad = None
    expected = [0.0 if one.grad is None else one.grad.norm().item() for one in weights]
    state.optimizer.step = lambda *_: None  # type: ignore[method-assign]
    norm, *norms = queued_update(state, config, loss, rates_of_step(state, config, session.finish)).tolist()
    assert norms == pytest.approx(expected)
    assert norm == pytest.approx(math.hypot(*expected))


class Event:
    """Of a GPU, `at_ms` milliseconds after the first step began."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


def test_the_gpu_tells_how_long_each_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of 10 ms. The host sees the end of the first one after 19 ms, when it has queued the second, that of
    the second after 28 ms, and that of the third after 31 ms: it takes 19, 9 and 3 ms for them. Together they took as
    long as the host waited."""
    ends_ms, host = iter([10, 20, 30]), iter([0.0, 0.019, 0.028, 0.031])
    state: Any = SimpleNamespace(step=0, train_seconds=0.0, device=torch.device("cuda"))
    monkeypatch.setattr(
        queued_module, "replace", lambda state, **changes: SimpleNamespace(**{**vars(state), **changes})
    )
    monkeypatch.setattr(queued_module, "_event", lambda device: Event(0.0))
    monkeypatch.setattr(queued_module, "_queue", lambda *_: SimpleNamespace(copied=Event(next(ends_ms))))
    monkeypatch.setattr(queued_module, "_figures", lambda *_: [])
    monkeypatch.setattr(queued_module, "_step", lambda *values: values[-1])
    monkeypatch.setattr(queued_module, "time", SimpleNamespace(perf_counter=lambda: next(host)))
    seconds = []
    for one in queued_module.queued_steps(state, *[cast(Any, None)] * 3, due=lambda after: after.step >= 3):
        seconds.append(one)
        state.step += 1
    assert seconds == pytest.approx([0.010, 0.010, 0.011])


class CalledAgain:
    """Stands for a CUDA graph, which a CPU has not: a replay calls what was captured."""

    def __init__(self, function: Callable[[], None], pool: object) -> None:
        self.replay = function


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_steps, "_captured", CalledAgain)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def capture(session: Session, warn: Callable[[str], object] = pytest.fail, validate: Callable[[], None] = int) -> bool:
    """Whether the session's steps are captured from now on."""
    state = session.state
    captured = captured_steps.capture(state, state.model.loss, session.config, validate, warn)  # type: ignore[arg-type]
    state.captured = captured
    return captured is not None


def test_a_captured_step_trains_as_any_other(folder: Path, on_a_cpu: None) -> None:
    """Two micro-batches, dropout, clipping, warm-up: its tokens, seeds and rates are those of the step that it is
    called for. AdamW's rate, which is rounded to float32, changes the last digits."""
    figures: list[list[float]] = []
    for captures in (False, True):
        session = open_tiny(folder)
        state, config = session.state, session.config
        with state.loader:
            assert not captures or capture(session)
            for _ in range(4):
                queued = queued_module._queue(state, state.model.loss, config, session.finish)
                figures.append(queued.figures.tolist())
                state.step += 1
    assert len(set(map(tuple, figures[:4]))) == 4
    for plain, captured in zip(figures[:4], figures[4:], strict=True):
        assert captured == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("broken", ["no targets", "a weight"])
def test_a_captured_step_refuses_a_broken_update(folder: Path, on_a_cpu: None, broken: str) -> None:
    """No target counts, so that the mean loss is NaN; or a weight is infinite, and its gradients."""
    session = open_tiny(folder)
    state, config = session.state, session.config
    with state.loader:
        assert capture(session)
        assert state.captured is not None
        batch = next(state.loader)
        if broken == "no targets":
            batch = replace(batch, targets=torch.full_like(batch.targets, -1), target_tokens=0)
        else:
            next(state.model.parameters()).detach().fill_(math.inf)
        before = {name: tensor.clone() for name, tensor in tensors_of(state).items()}
        figures = state.captured(batch, rates_of_step(state, config, session.finish))
    assert math.isnan(figures[0])
    after = tensors_of(state)
    drawn = {"rng.torch"}
    assert [name for name in before.keys() - drawn if not same_bits({"": before[name]}, {"": after[name]})] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"eval__only": True}, {"faults__spike_factor": 3.0}, {"data__mask_documents": True},
        {"runtime__activation_checkpointing": True},
    ],
)  # fmt: skip
def test_no_step_in_which_the_host_has_a_part(folder: Path, on_a_cpu: None, changes: dict[str, Any]) -> None:
    assert not capture(open_tiny(folder, **changes))


def test_a_step_that_cannot_be_captured_is_launched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def invalid(function: Callable[[], None], pool: object) -> None:
        function()
        raise RuntimeError("capture invalidated\nfor many reasons")

    monkeypatch.setattr(captured_steps, "_captured", invalid)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    session, said = open_tiny(folder), list[str]()
    assert not capture(session, said.append)
    assert said == ["training without CUDA graphs, which is slower: capture invalidated"]
    assert all(parameter.grad is None for parameter in session.state.model.parameters())


def test_a_validation_without_room_beside_graphs_has_none(folder: Path, on_a_cpu: None) -> None:
    def validate() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    said: list[str] = []
    assert not capture(open_tiny(folder), said.append, validate)
    assert said == ["training without CUDA graphs, which is slower: CUDA out of memory"]


class Dispatched(TorchDispatchMode):
    """Notes each operation, and each copy to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        result = function(*args, **(kwargs or {}))
        devices = {one.device for one in (*args, result) if isinstance(one, Tensor) and one.ndim}
        assert len(devices) <= 1, f"{function} copies between {devices}"
        return result


@pytest.mark.parametrize(
    "recipe",
    ["quickstart", "nanogpt/gpt2-124m-tiny", "speedrun/muon-2024-10-tiny", "autoresearch-tiny", "nanochat-tiny"],
)
def test_a_step_asks_the_device_for_nothing(recipe: str) -> None:
    """Forward, backward, norm, clipping, update of every lineage on the meta device, as on a GPU in bfloat16. Tensors
    there have no values: reading one raises an error."""
    config = configure(recipe)
    config = replace(config, model=replace(config.model, vocab_size=512, dropout=0.0))
    with torch.device("meta"):
        model = GPT(config.model, torch.bfloat16, "cuda")
        tokens = torch.empty(2, 2, config.model.seq_len, dtype=torch.int64)
    strategy = Strategy(model, whole_optimizer(model, config), Group())
    state = TrainState(model, strategy.optimizer, strategy, cast(Any, None), torch.device("meta"))
    with Dispatched() as dispatched:
        loss = gradients(state, StepBatch(0, 0.0, tokens, tokens, (0, 1), tokens.numel()), model.loss, config)
        norms = queued_update(state, config, loss, Rates(1.0, 0.9, 1.0))
    assert norms.shape == (1 + len(strategy.updated_weights()),)
    assert "aten._local_scalar_dense.default" not in dispatched.names
    assert "aten._fused_adamw_.default" in dispatched.names
