"""Broken steps: skipped updates and rewinds after spikes, against steps taken by hand that never had the data."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    FLAGS,
    arguments,
    at_line,
    command,
    differences,
    killed_at,
    lines_of,
    make_config,
    open_tiny,
    outcome,
    tensors_of,
    train,
)
from torch import Tensor

import gptlab
from gptlab.config.run import CheckpointConfig, FaultsConfig, RunConfig, RuntimeConfig
from gptlab.data.loader import StepBatch
from gptlab.data.packing import IGNORED
from gptlab.optim.gradient_norm import clip_gradients
from gptlab.training import step as step_module
from gptlab.training.checkpoint.load import load_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.faults import Fault, FaultRecord, TrainingFailed, loss_fault
from gptlab.training.state import TrainState
from gptlab.training.step import Update, gradients, rates_of_step, update

STEPS = 12  # of tiny_runs.FLAGS, with checkpoints at 4, 8 and 12
SMALL: dict[str, Any] = {
    "model.n_layer": 1,
    "model.value_embeddings": "off",
    "batch.total_tokens": 4 * 32,
    "eval.every_steps": 12,
    "eval.at_start": False,
    "sample.prompts": [],
}
"""Runs without what does not matter to a broken step, with one micro-batch a step."""
TWO_MICRO_BATCHES: dict[str, Any] = {"batch__total_tokens": 2 * 4 * 32}
SPIKES: dict[str, Any] = {"faults__spike_factor": 3.0, "faults__spike_window": 4}
"""The losses of these runs fall from 5.5 to 4: none of their own is a spike."""


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setitem(FLAGS, name, value)
        yield


@dataclass(frozen=True)
class Broken:
    """Data that breaks a step, by its place in the data order (from 0)."""

    loss: Mapping[int, float]
    """Factors on the loss of the step's last micro-batch."""
    gradient: Mapping[int, float]
    """Factors on its gradient alone, or what `parameter` gets."""
    parameter: str | None = None
    """The one whose gradient breaks, in one entry; None: all."""

    @contextlib.contextmanager
    def in_training(self) -> Iterator[None]:
        """Within the context, the loop's loss function does so."""

        def broken(state: TrainState, batch: Any, loss_sum: Any, config: RunConfig, *sums: Any) -> Tensor:
            calls = []

            def loss(*args: Tensor) -> Tensor:
                value = loss_sum(*args)
                calls.append(value)
                is_last = len(calls) == len(batch.micro_indices)
                if is_last and batch.step in self.loss:
                    value = value * self.loss[batch.step]
                if is_last and batch.step in self.gradient and self.parameter is None:
                    value.register_hook(lambda gradient: gradient * self.gradient[batch.step])
                return value

            mean = gradients(state, batch, loss, config, *sums)
            if self.parameter is not None and batch.step in self.gradient:
                grad = dict(state.model.named_parameters())[self.parameter].grad
                assert grad is not None
                grad.view(-1)[3] = self.gradient[batch.step]
            return mean

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_module, "gradients", broken)
            yield

    def __or__(self, other: Broken) -> Broken:
        return Broken({**self.loss, **other.loss}, {**self.gradient, **other.gradient}, self.parameter)


def broken_loss(*steps: int, factor: float = math.nan) -> Broken:
    return Broken(dict.fromkeys(steps, factor), {})


def broken_gradient(*steps: int, factor: float = math.nan, parameter: str | None = None) -> Broken:
    return Broken({}, dict.fromkeys(steps, factor), parameter)


@dataclass(frozen=True)
class Result:
    tensors: dict[str, Tensor]
    """Weights, moments and generators."""
    loss_ema: object
    scaler: Mapping[str, Any]

    @classmethod
    def of_run(cls, run: Path, step: int = STEPS) -> Result:
        saved = load_checkpoint(run / f"checkpoints/step-{step:08d}")
        return cls(saved.model | saved.optimizer, saved.state["loss_ema"], saved.state["scaler"])

    @classmethod
    def by_hand(cls, folder: Path, data: Iterable[int | None], **changes: Any) -> Result:
        """Step n with the data of step `data[n]`; None: nothing at all is computed."""
        return _by_hand(folder, tuple(data), tuple(changes.items()))

    def differences(self, other: Result) -> list[str]:
        """What is not the same, bit for bit."""
        assert self.tensors.keys() == other.tensors.keys()
        found = [name for name, tensor in self.tensors.items() if not torch.equal(tensor, other.tensors[name])]
        return found + [name for name in ("loss_ema", "scaler") if getattr(self, name) != getattr(other, name)]


@functools.cache
def _by_hand(folder: Path, data: tuple[int | None, ...], changes: tuple[tuple[str, Any], ...]) -> Result:
    session = open_tiny(folder, **dict(changes))
    state, config, finish = session.state, session.config, session.finish
    for step, data_step in enumerate(data):
        if data_step is not None:
            loss = float(gradients(state, state.loader.make(data_step), state.model.loss, config))
            done = update(state, config, rates_of_step(state, config, finish))
            assert isinstance(done, Update)
            state.loss_ema.update(loss)
        state.step = step + 1
    tensors = tensors_of(state)
    return Result(tensors, asdict(state.loss_ema), state.to_json()["scaler"])


def without(*steps: int) -> list[int | None]:
    return [None if step in steps else step for step in range(STEPS)]


def saved_steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(run / "checkpoints")]


class TestLeftOut:
    @pytest.mark.parametrize(
        ("name", "broken", "values"),
        [
            ("loss", broken_loss(0) | broken_loss(5, factor=math.inf), ["nan", "inf"]),
            ("gradient", broken_gradient(5), ["nan"]),
        ],
    )
    def test_as_if_the_batch_had_never_been(self, folder: Path, name: str, broken: Broken, values: list[str]) -> None:
        with broken.in_training():
            train(folder, name, faults__max_skipped_in_a_row=1, **TWO_MICRO_BATCHES)
        run, steps = folder / name, sorted([*broken.loss, *broken.gradient])
        by_hand = Result.by_hand(folder, without(*steps), **TWO_MICRO_BATCHES)
        assert Result.of_run(run).differences(by_hand) == []
        events = lines_of(run, "event")
        assert [(line["step"], line["data_step"]) for line in events] == [(step + 1, step) for step in steps]
        assert {(line["what"], line["reason"]) for line in events} == {("skipped", name)}
        assert [line["value"] for line in events] == values
        assert list(events[0])[:4] == ["kind", "step", "what", "value"]
        left = [step + 1 for step in range(STEPS) if step not in steps]
        assert [line["step"] for line in lines_of(run, "train")] == left
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["num_steps"], summary["skipped_updates"], summary["rewinds"]) == (STEPS, len(steps), 0)

    def test_a_step_without_a_counted_target(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The mean over no target is NaN, and so a fault like another; nothing divides by zero."""

        def empty(state: TrainState, batch: StepBatch, *args: Any) -> Tensor:
            if batch.step == 5:
                batch = replace(batch, targets=torch.full_like(batch.targets, IGNORED), target_tokens=0)
            return gradients(state, batch, *args)

        monkeypatch.setattr(step_module, "gradients", empty)
        run = train(folder, "no-targets")
        assert Result.of_run(run).differences(Result.by_hand(folder, without(5))) == []
        (event,) = lines_of(run, "event")
        assert (event["what"], event["reason"], event["value"], event["data_step"]) == ("skipped", "loss", "nan", 5)

    def test_the_comparison_notices_one_step(self, folder: Path) -> None:
        """And that what is compared is not the same for every run."""
        left_out = Result.by_hand(folder, without(5))
        assert len(left_out.differences(Result.by_hand(folder, without(6)))) > 10
        assert len(left_out.differences(Result.by_hand(folder, without()))) > 10

    def test_the_warning_names_step_and_parameter(self, folder: Path) -> None:
        name = "blocks.0.mlp.up.weight"
        with broken_gradient(5, factor=math.inf, parameter=name).in_training():
            code, out, _ = command(["train", *arguments(folder, "named")])
        assert code == 0
        assert Result.of_run(folder / "named").differences(Result.by_hand(folder, without(5))) == []
        assert [line for line in out.splitlines() if line.startswith("warning")] == [
            "warning: step 00006: the gradient norm is inf, though the loss is finite: update skipped "
            f"(1 consecutive, 1 total); first non-finite gradient: {name}"
        ]

    def test_resumed_across_it(self, folder: Path) -> None:
        with broken_loss(5, 8).in_training():
            whole = train(folder, "whole")
            with killed_at("event", 6):
                train(folder, "resumed")
            with killed_at("train", 10):
                gptlab.train(resume=folder / "resumed")
            gptlab.train(resume=folder / "resumed")
        assert differences(outcome(whole), outcome(folder / "resumed")) == []
        assert load_checkpoint(list_checkpoints(whole / "checkpoints")[-1]).state["faults"]["skipped"] == 2


class TestLimits:
    def test_the_last_good_checkpoint_stands(self, folder: Path) -> None:
        """Saved after each step and only the last kept, so that the good one would go while the run still hopes."""
        changes: dict[str, Any] = {"checkpoint.every_steps": 1, "checkpoint.keep_last": 1, "eval.every_steps": None}
        run = folder / "limit"
        with broken_loss(*range(6, 30)).in_training():
            code, _, err = command(["train", *arguments(folder, "limit", changes)])
            assert code == 3
            assert "the training loss is nan in step 10, after 3 consecutive skipped updates" in err
            events = [(line["step"], line["what"]) for line in lines_of(run, "event")]
            assert events == [(7, "skipped"), (8, "skipped"), (9, "skipped"), (10, "failed")]
            facts = json.loads((run / "run.json").read_text())
            assert facts["status"] == "failed"
            assert (facts["failure"]["step"], facts["failure"]["loss"]) == (10, "nan")
            # The weights of step 6 gave no loss yet that was one: 5 is the last that did.
            assert saved_steps(run) == [5, 9]
            assert command(["train", "--resume", run])[0] == 3
        by_hand = Result.by_hand(folder, range(5))
        assert Result.of_run(run, step=5).differences(by_hand) == []

    def test_a_run_that_failed_continues_with_another_limit(self, folder: Path) -> None:
        run = folder / "lifted"
        with broken_loss(*range(6, 11)).in_training():
            changes = {"checkpoint.every_steps": 1}
            assert command(["train", *arguments(folder, "lifted", changes)])[0] == 3
            code, out, err = command(["train", "--resume", run, "--faults.max-skipped-in-a-row", "5"])
        assert (code, err) == (0, "")
        assert "warning: faults.max_skipped_in_a_row = 5 (was 3) from step 9 on" in out
        (change,) = json.loads((run / "run.json").read_text())["config_changes"]
        assert (change["step"], change["fields"]) == (9, {"faults.max_skipped_in_a_row": [3, 5]})
        assert json.loads((run / "config.json").read_text())["faults"]["max_skipped_in_a_row"] == 5
        assert Result.of_run(run).differences(Result.by_hand(folder, without(*range(6, 11)))) == []

    def test_finite_gradients_of_a_loss_above_max_loss_end_it_at_once(self, folder: Path) -> None:
        with broken_loss(5, factor=1000.0).in_training(), pytest.raises(TrainingFailed, match="exploded"):
            train(folder, "exploded")
        (event,) = lines_of(folder / "exploded", "event")
        assert (event["what"], event["step"]) == ("failed", 6)


class TestFloat16:
    HALF: Mapping[str, Any] = {"runtime__dtype": "float16"}

    def test_loss(self, folder: Path) -> None:
        with broken_loss(5).in_training():
            train(folder, "half-loss", **self.HALF)
        assert Result.of_run(folder / "half-loss").differences(Result.by_hand(folder, without(5), **self.HALF)) == []
        assert len(lines_of(folder / "half-loss", "event")) == 1

    def test_a_gradient_is_taken_for_an_overflow(self, folder: Path) -> None:
        """Weights and moments as without the step; the scale goes down as always. It is no fault."""
        # In the last step: later gradients, scaled by half as much, differ where float16 is at its smallest numbers.
        with broken_gradient(11).in_training():
            run = train(folder, "half-gradient", **self.HALF)
        found = Result.of_run(run).differences(Result.by_hand(folder, without(11), **self.HALF))
        assert [name for name in found if not name.startswith("rng.")] == ["loss_ema", "scaler"]
        assert Result.of_run(run).scaler["scale"] == 2.0**15
        assert lines_of(run, "event") == []
        assert lines_of(run, "train")[-1]["grad_norm"] == "nan"

    def test_for_ever_is_a_fault_in_the_end(self, folder: Path) -> None:
        changes: dict[str, Any] = {"runtime.dtype": "float16", "steps": 40, "eval.every_steps": None}
        with broken_gradient(*range(1, 40)).in_training():
            assert command(["train", *arguments(folder, "half-for-ever", changes)])[0] == 3
        # From 2^16 down to 1 in steps 2 to 17, then 3 faults, and one too many.
        assert [line["step"] for line in lines_of(folder / "half-for-ever", "event")] == [18, 19, 20, 21]


SPIKED: dict[str, tuple[Broken, list[int | None], list[tuple[Any, ...]]]] = {
    # {name: (what breaks, the data of each step in the end, (step, to_step) of each event)}
    "after a checkpoint": (broken_loss(9, factor=50.0), [*range(8), *range(10, 14)], [(10, 8)]),
    "above max_loss": (broken_loss(9, factor=1e6), [*range(8), *range(10, 14)], [(10, 8)]),
    # The weights of step 8 were saved, but had given no loss before: it may be theirs.
    "right after a checkpoint": (broken_loss(8, factor=50.0), [*range(4), *range(9, 17)], [(9, 4)]),
    "again at once": (broken_loss(9, 10, factor=50.0), [*range(4), *range(11, 19)], [(10, 8), (9, 4)]),
    "again later": (broken_loss(9, 12, factor=50.0), [*range(8), *range(13, 17)], [(10, 8), (11, 8)]),
    "too many in a row": (
        broken_loss(8, 9, 10, 11), [*range(4), *range(12, 20)], [(9, None), (10, None), (11, None), (12, 4)],
    ),
    "no checkpoint yet": (broken_loss(3, factor=10.0), without(3), [(4, None)]),
}  # fmt: skip


def spiked(folder: Path, name: str) -> Path:
    """The run of SPIKED that nothing interrupts, trained once."""
    changes = SPIKES | ({"faults__spike_window": 3} if name == "no checkpoint yet" else {})
    if not (folder / name).exists():
        with SPIKED[name][0].in_training():
            train(folder, name, **changes)
    return folder / name


class TestSpikes:
    @pytest.mark.parametrize("name", SPIKED)
    def test_as_if_the_data_had_been_taken_out(self, folder: Path, name: str) -> None:
        _, data, events = SPIKED[name]
        run = spiked(folder, name)
        assert Result.of_run(run).differences(Result.by_hand(folder, data)) == []
        assert [(line["step"], line.get("to_step")) for line in lines_of(run, "event")] == events
        rewinds = [to for _, to in events if to is not None]
        summary = json.loads((run / "summary.json").read_text())
        assert summary["rewinds"] == len(rewinds)
        assert summary["skipped_updates"] == len(events) - len(rewinds)
        last = lines_of(run, "train")[-1]
        assert (last["step"], last["tokens"]) == (STEPS, STEPS * 4 * 32)
        # The seconds of what was done twice were spent.
        seconds = [line["train_seconds"] for line in lines_of(run, "train")]
        assert seconds == sorted(seconds)

    def test_off_unless_asked_for(self, folder: Path) -> None:
        with broken_loss(9, factor=5.0).in_training():
            run = train(folder, "off")
        assert lines_of(run, "event") == []
        assert [line["step"] for line in lines_of(run, "train")] == list(range(1, STEPS + 1))
        assert load_checkpoint(list_checkpoints(run / "checkpoints")[-1]).state["faults"]["losses"] == []

    def test_the_one_to_go_back_to_outlives_newer_ones(self, folder: Path) -> None:
        """Only the newest is kept, and a validation has just seen that its weights are fine; a spike in the first step
        behind it still needs the one before, since nothing has been trained from the newest yet."""
        changes = {"checkpoint__keep_last": 1, "checkpoint__keep_best": False, "eval__every_steps": 4}
        with broken_loss(8, factor=50.0).in_training():
            run = train(folder, "kept to go back to", **SPIKES, **changes)
        assert [(line["step"], line["to_step"]) for line in lines_of(run, "event")] == [(9, 4)]
        assert Result.of_run(run).differences(Result.by_hand(folder, [*range(4), *range(9, 17)])) == []
        assert saved_steps(run) == [8, 12], "and goes as soon as a newer one has proved good"

    def test_a_good_one_is_known_by_the_first_step_from_it(self, folder: Path) -> None:
        """good_step of each checkpoint: of the one before it, since its own weights have given no loss yet."""
        run = train(folder, "good steps", checkpoint__keep_last=9, **SPIKES)
        states = [load_checkpoint(path).state for path in list_checkpoints(run / "checkpoints")]
        assert [(state["step"], state["faults"]["good_step"]) for state in states] == [(4, None), (8, 4), (12, 8)]

    def test_later_checkpoints_go(self, folder: Path) -> None:
        """Resume takes the newest: it must not be one of steps that have been taken back."""
        seen: list[list[int]] = []
        look = at_line("event", 9, lambda: seen.append(saved_steps(folder / "later")))
        with broken_loss(8, factor=50.0).in_training(), look:
            train(folder, "later", **SPIKES)
        assert seen == [[4]]

    @pytest.mark.parametrize(
        ("name", "kills"), [("again at once", [("event", 9), ("train", 7)]), ("again later", [("train", 11)])]
    )
    def test_resumed_across_it(self, folder: Path, name: str, kills: list[tuple[str, int]]) -> None:
        run = folder / f"{name}, killed"
        with SPIKED[name][0].in_training():
            for kind, step in kills:
                with killed_at(kind, step):
                    gptlab.train(resume=run) if run.exists() else train(folder, run.name, **SPIKES)
            gptlab.train(resume=run)
        assert differences(outcome(spiked(folder, name)), outcome(run)) == []

    def test_a_checkpoint_that_a_signal_asked_for_is_none_to_go_back_to(self, folder: Path) -> None:
        """Otherwise the run would come out otherwise than without the signals."""
        run = folder / "signalled"
        with SPIKED["again at once"][0].in_training():
            with at_line("train", 9, lambda: signal.raise_signal(signal.SIGTERM)):
                assert gptlab.train(make_config(folder, run.name, **SPIKES)).exit_code == 75
            with at_line("event", 10, lambda: signal.raise_signal(signal.SIGTERM)):
                assert gptlab.train(resume=run).exit_code == 75
            assert gptlab.train(resume=run).exit_code == 0
        assert differences(outcome(spiked(folder, "again at once")), outcome(run)) == []

    def test_a_damaged_one_makes_it_the_one_before(self, folder: Path) -> None:
        def damage() -> None:
            weights = folder / "damaged/checkpoints/step-00000008/model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1] + b"?")

        with broken_loss(9, factor=50.0).in_training(), at_line("train", 9, damage):
            train(folder, "damaged", checkpoint__background=False, **SPIKES)  # so that it is there to be damaged
        assert [line["to_step"] for line in lines_of(folder / "damaged", "event")] == [4]
        assert "step-00000008 is damaged" in (folder / "damaged/log.txt").read_text(encoding="utf-8")
        by_hand = Result.by_hand(folder, [*range(4), *range(10, 18)])
        assert Result.of_run(folder / "damaged").differences(by_hand) == []

    def test_over_the_limit_it_ends(self, folder: Path) -> None:
        changes = {name.replace("__", "."): value for name, value in SPIKES.items()} | {"faults.max_rewinds": 1}
        with broken_loss(9, 12, factor=50.0).in_training():
            code, _, err = command(["train", *arguments(folder, "often", changes)])
        assert code == 3
        assert "after 1 rewinds (faults.max_rewinds)" in err
        assert saved_steps(folder / "often") == [4, 8]


class TestDecisions:
    """Functions of numbers that all ranks share."""

    CONFIG = RunConfig(runtime=RuntimeConfig(max_loss=50.0))

    def config(self, **fields: Any) -> RunConfig:
        faults = FaultsConfig(spike_factor=2.0, spike_window=3, **fields)
        return RunConfig(faults=faults, checkpoint=CheckpointConfig(every_steps=10))

    @pytest.mark.parametrize(
        ("loss", "losses", "expected"),
        [
            (8.0, [4.0, 9.0, 4.0], None),  # twice the median is no spike yet
            (8.1, [4.0, 9.0, 4.0], Fault("spike", 8.1, 4.0)),
            (99.0, [4.0, 4.0], None),  # the window is not full
            (math.inf, [4.0, 4.0, 4.0], Fault("loss", math.inf)),
            (3.0, [4.0, 9.0, 4.0], None),
        ],
    )
    def test_spike_by_hand(self, loss: float, losses: list[float], expected: Fault | None) -> None:
        assert loss_fault(loss, FaultRecord(losses=losses), self.config()) == expected

    @pytest.mark.parametrize(
        ("limits", "broken", "ends"),
        [
            ({"max_skipped_in_a_row": 0}, [5], 5),
            ({"max_skipped_in_a_row": 1}, [3, 5, 7, 8], 8),
            ({"max_skipped_in_a_row": 1}, [3, 5, 7, 9], None),
            ({"max_skipped": 2}, [3, 5, 7], 7),
            ({"max_skipped": 3}, [3, 5, 7], None),
        ],
    )
    def test_limits_in_a_row_and_in_all(self, limits: dict[str, int], broken: list[int], ends: int | None) -> None:
        config, record = RunConfig(faults=FaultsConfig(**limits)), FaultRecord()
        for step in range(STEPS):
            if step not in broken:
                record.add_loss(4.0, config.faults)
            elif step == ends:
                with pytest.raises(TrainingFailed, match=next(iter(limits))):
                    record.skip(Fault("loss", math.nan), math.nan, step, config)
                return
            else:
                record.skip(Fault("loss", math.nan), math.nan, step, config)
        assert ends is None

    def test_window_holds_the_last_losses(self) -> None:
        record = FaultRecord(skipped=2, skipped_in_a_row=2)
        for loss in (1.0, 2.0, 3.0, 4.0):
            record.add_loss(loss, self.config().faults)
        assert record == FaultRecord(skipped=2, losses=[2.0, 3.0, 4.0])
        assert FaultRecord(**json.loads(json.dumps(asdict(record)))) == record

    def test_without_spikes_a_high_loss_is_none(self) -> None:
        assert loss_fault(49.0, FaultRecord(losses=[1.0] * 200), self.CONFIG) is None
        with pytest.raises(TrainingFailed, match="exploded"):
            loss_fault(51.0, FaultRecord(), self.CONFIG)

    def test_nothing_is_counted_where_the_run_ends(self) -> None:
        record = FaultRecord(skipped=7, skipped_in_a_row=3)
        with pytest.raises(TrainingFailed, match="in step 9, after 3 consecutive skipped updates"):
            record.skip(Fault("loss", math.nan), math.nan, 9, self.CONFIG)
        assert record == FaultRecord(skipped=7, skipped_in_a_row=3)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_clipping_leaves_a_broken_gradient_to_be_found(self, value: float) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        parameters[0].grad, parameters[1].grad = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, value, 3.0])
        assert not math.isfinite(clip_gradients(parameters, 1.0))
        assert parameters[0].grad.tolist() == [1.0, 2.0, 3.0]
