"""Saves in the background: of the step that asked for them, whole or not at all, in order, and hardly waited for."""

from __future__ import annotations

import concurrent.futures
import errno
import hashlib
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    FakeClock,
    Outcome,
    arguments,
    at_line,
    command,
    differences,
    lines_of,
    make_config,
    outcome,
    train,
)

import gptlab
from gptlab.runtime.records.metrics import MetricsLog, read_metrics
from gptlab.training import step as step_module
from gptlab.training.checkpoint import saver as saver_module
from gptlab.training.checkpoint.background import BackgroundSaver, ConcurrentSaver
from gptlab.training.checkpoint.format import CheckpointError, whole_slices
from gptlab.training.checkpoint.load import load_checkpoint, verify_checkpoint
from gptlab.training.checkpoint.names import checkpoint_path, list_checkpoints
from gptlab.training.checkpoint.write import save_checkpoint
from gptlab.training.state import TrainState

CPU = torch.device("cpu")
# A test that waits for something that never comes fails after this, on any machine.
PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def blocking(folder: Path) -> Path:
    """A run that waited for each of its saves."""
    return train(folder, "blocking", checkpoint__background=False, checkpoint__keep_last=9)


@pytest.fixture(scope="module")
def expected(blocking: Path) -> Outcome:
    return outcome(blocking)


def in_background() -> bool:
    return threading.current_thread().name.startswith("gptlab-save")


def when_saving(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[int], None], *, after: Callable[[int], None] = lambda step: None
) -> None:
    """`action(step)` comes before every save in the background, `after(step)` behind it, on the thread that writes."""

    def save(folder: Path, step: int, **parts: Any) -> Path:
        if in_background():
            action(step)
        path = save_checkpoint(folder, step, **parts)
        if in_background():
            after(step)
        return path

    monkeypatch.setattr(saver_module, "save_checkpoint", save)


def when_updated(monkeypatch: pytest.MonkeyPatch, action: Callable[[TrainState], None]) -> None:
    """`action(state)` comes behind every update of the weights; `state.step` does not count it yet."""
    update = step_module.update

    def update_and_act(state: TrainState, *args: Any) -> Any:
        result = update(state, *args)
        action(state)
        return result

    monkeypatch.setattr(step_module, "update", update_and_act)


@pytest.fixture
def saves_end_with_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step lasts until a save that is under way is at its end, so that the next step is what comes next."""
    submitted: list[concurrent.futures.Future[Any]] = []
    submit = BackgroundSaver.submit

    def noting(saver: BackgroundSaver, work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        submitted.append(submit(saver, work))
        return submitted[-1]

    monkeypatch.setattr(BackgroundSaver, "submit", noting)
    when_updated(monkeypatch, lambda state: assert_true(not concurrent.futures.wait(submitted).not_done))


class TestSnapshot:
    """The writer is held back until training has gone on by two steps."""

    def test_it_is_the_steps_own(
        self, folder: Path, blocking: Path, expected: Outcome, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_on = threading.Event()
        seen: dict[str, Any] = {}

        def look(state: TrainState) -> None:
            if state.step == 5:  # the sixth update is done
                copies = [{one.name: one.tensor.clone() for one in kind} for kind in state.slices()]
                seen["weights"], seen["moments"] = copies
                seen["lines"] = read_metrics(folder / "held/metrics.jsonl")
                seen["stands"] = [path.name for path in list_checkpoints(folder / "held/checkpoints")]
                go_on.set()

        when_saving(monkeypatch, lambda step: step != 4 or assert_true(go_on.wait(PATIENCE_SECONDS)))
        when_updated(monkeypatch, look)
        run = train(folder, "held", checkpoint__keep_last=9)

        saved, then = (load_checkpoint(checkpoint_path(path / "checkpoints", 4)) for path in (run, blocking))
        assert saved.model.keys() == then.model.keys()
        assert saved.optimizer.keys() == then.optimizer.keys()
        for name, tensor in (then.model | then.optimizer).items():
            assert torch.equal((saved.model | saved.optimizer)[name], tensor), name
        assert all(not torch.equal(seen["weights"][name], saved.model[name]) for name in saved.model)
        assert any(not torch.equal(seen["moments"][name], saved.optimizer[name]) for name in saved.optimizer)
        assert (saved.step, saved.state["step"], saved.state["loader"]) == (4, 4, {"next_step": 4})
        clocks = {"train_seconds", "metrics_bytes", "log_bytes", "off_clock", "marks", "run"}
        assert {k: v for k, v in saved.state.items() if k not in clocks} == {
            k: v for k, v in then.state.items() if k not in clocks
        }
        # Nothing was claimed before it was true, and then everything stands where it stands without a thread.
        assert (seen["stands"], seen["lines"][-1]["step"]) == ([], 4)
        assert all(line["kind"] != "checkpoint" for line in seen["lines"])
        assert differences(expected, outcome(run)) == []

    def test_a_kill_while_it_is_written_leaves_the_former_one(
        self, folder: Path, expected: Outcome, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The writer of step 8 never comes to its end, and what training noted meanwhile is lost with the process."""
        run = folder / "stuck"
        with monkeypatch.context() as patch:
            when_saving(patch, lambda step: step != 8 or raise_(Lost()))
            with pytest.raises(Lost):
                gptlab.train(make_config(folder, "stuck"))
        assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000004"]
        assert gptlab.train(resume=run).exit_code == 0
        assert differences(expected, outcome(run)) == []


class Lost(BaseException):
    """Ends the thread that writes, and then the run, as no error does."""


def raise_(error: BaseException) -> None:
    raise error


def assert_true(value: bool) -> None:
    assert value


class TestOrder:
    def test_a_second_save_waits_for_the_first(
        self, folder: Path, expected: Outcome, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A disk that is not done with a save before training waits for it, for 500 s by the test's clock. How long
        training stood still is told, and no part of its clock."""
        writing: list[int] = []
        waited_for = {step: threading.Event() for step in range(2, 13, 2)}
        wait = ConcurrentSaver.wait

        def begin(step: int) -> None:
            assert writing == [], "one at a time"
            writing.append(step)
            assert waited_for[step].wait(PATIENCE_SECONDS)

        with FakeClock.running() as clock:

            def waiting(saves: Any, state: TrainState) -> None:
                if saves.pending is not None:
                    clock.now += 500.0
                    waited_for[saves.pending.request.step].set()
                wait(saves, state)

            monkeypatch.setattr(ConcurrentSaver, "wait", waiting)
            when_saving(monkeypatch, begin, after=writing.remove)
            code, out, _ = command(["train", *arguments(folder, "slow", {"checkpoint.every_steps": 2})])
        assert code == 0
        run = folder / "slow"
        # Saved in the background: steps 2 to 10. Before steps 4 to 12 the one before it is waited for.
        assert [line for line in out.splitlines() if "waited" in line] == [
            f"checkpoint of step {step}: waited 500.0s for that of step {step - 2}, which was not written yet"
            for step in range(4, 13, 2)
        ]
        kinds = [(line["kind"], line["step"]) for line in read_metrics(run / "metrics.jsonl")]
        for step in range(2, 12, 2):
            assert kinds.index(("checkpoint", step)) == kinds.index(("train", step + 1)) - 1
        finished = outcome(run)
        assert {name: finished.tensors[name].tolist() for name in finished.tensors} == {
            name: tensor.tolist() for name, tensor in expected.tensors.items()
        }
        assert [line["step_seconds"] for line in lines_of(run, "train")] == [1.0] * 12

    @pytest.mark.parametrize("kind", ["signal", "end", "broken"])
    def test_whatever_ends_the_run_waits_for_it(
        self, folder: Path, expected: Outcome, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        """The save of step 8 begins to write only while the run is about to end."""
        run = folder / f"ends-{kind}"
        changes: dict[str, Any] = {"steps": 9} if kind == "end" else {}
        if kind == "broken":
            when_updated(monkeypatch, lambda state: raise_(RuntimeError("broken")) if state.step == 9 else None)
        when_saving(monkeypatch, lambda step: time.sleep(0.3))
        words = ["train", *arguments(folder, run.name, changes)]
        if kind == "broken":
            with pytest.raises(RuntimeError, match="broken"):
                command(words)
        elif kind == "signal":
            with at_line("train", 9, lambda: signal.raise_signal(signal.SIGTERM)):
                assert command(words)[0] == 75
        else:
            assert command(words)[0] == 0
        last = 8 if kind == "broken" else 9
        assert list_checkpoints(run / "checkpoints")[-1].name == f"step-{last:08}"
        for path in list_checkpoints(run / "checkpoints"):
            verify_checkpoint(path)
        lines = [(line["kind"], line["step"]) for line in read_metrics(run / "metrics.jsonl")]
        assert lines.index(("checkpoint", 8)) == lines.index(("train", 8)) + 1
        assert ("train", 9) in lines or kind == "broken"
        if kind != "end":
            monkeypatch.undo()
            assert command(["train", "--resume", run])[0] == 0
            assert differences(expected, outcome(run)) == []

    def test_lines_behind_a_save_wait_for_its_line(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        with MetricsLog(path) as metrics:
            metrics.write("train", step=1)
            position = metrics.position()
            metrics.hold()
            metrics.write("train", step=2)
            assert metrics.position() == position == path.stat().st_size
            metrics.release(lambda: metrics.write("checkpoint", step=1))
            metrics.write("train", step=3)
            metrics.hold()
            metrics.write("train", step=4)
        assert [(line["kind"], line["step"]) for line in read_metrics(path)] == [
            ("train", 1), ("checkpoint", 1), ("train", 2), ("train", 3), ("train", 4),
        ]  # fmt: skip


class TestStall:
    @pytest.mark.parametrize("background", [True, False])
    def test_training_waits_for_a_copy_of_each_tensor_and_for_no_file(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, saves_end_with_a_step: None, background: bool
    ) -> None:
        """What takes long in a save is counted, wherever it is done: bytes hashed, files opened, flushed, renamed."""
        in_training: set[str] = set()
        behind: set[str] = set()
        copied: list[int] = []
        saving: list[int] = []

        def note(owner: Any, name: str) -> None:
            work = getattr(owner, name)

            def noting(*args: Any, **keywords: Any) -> Any:
                if in_background():
                    behind.add(name)
                elif saving and threading.current_thread() is threading.main_thread():
                    in_training.add(name)
                return work(*args, **keywords)

            monkeypatch.setattr(owner, name, noting)

        for owner, name in ((os, "open"), (os, "fsync"), (os, "rename"), (io, "open"), (hashlib, "sha256")):
            note(owner, name)
        snapshot, checkpoint = BackgroundSaver.snapshot, saver_module.CheckpointSaver.checkpoint

        def counting_snapshot(saver: BackgroundSaver, *kinds: Any) -> Any:
            copied.extend(sum(part.tensor.nbytes for part in kind) for kind in kinds)
            return snapshot(saver, *kinds)

        def noted(saves: Any, state: TrainState, **how: Any) -> None:
            # Without the last, which is always waited for.
            saving.extend([state.step] * (state.step < 5))
            checkpoint(saves, state, **how)
            saving.clear()

        monkeypatch.setattr(BackgroundSaver, "snapshot", counting_snapshot)
        monkeypatch.setattr(saver_module.CheckpointSaver, "checkpoint", noted)
        run = train(
            folder, f"stall-{background}", steps=5, checkpoint__every_steps=1, checkpoint__keep_last=1,
            checkpoint__keep_best=False, checkpoint__background=background, eval__every_steps=None, sample__prompts=[],
        )  # fmt: skip
        counted = {"open", "fsync", "rename", "sha256"}
        assert (in_training, behind) == ((set(), counted) if background else (counted, set()))
        saved = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])
        each = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in (saved.model, saved.optimizer)]
        assert copied == (each * 4 if background else [])


class TestFailure:
    @pytest.mark.parametrize(
        ("call", "number"), [("mkdir", errno.EROFS), ("fsync", errno.ENOSPC), ("rename", errno.EFBIG)]
    )
    @pytest.mark.usefixtures("saves_end_with_a_step")
    def test_it_surfaces_at_the_next_step(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
    ) -> None:
        (tmp_path / "corpus").symlink_to(folder / "corpus")
        real = getattr(os, call)
        full = threading.Event()

        def refuse(*args: Any, **keywords: Any) -> Any:
            if full.is_set() and in_background():
                raise OSError(number, os.strerror(number))
            return real(*args, **keywords)

        monkeypatch.setattr(os, call, refuse)
        with at_line("train", 6, full.set):
            code, _, err = command(["train", *arguments(tmp_path, "run")])
        run = tmp_path / "run"
        assert code == 2
        assert "cannot save the checkpoint of step 8" in err or "cannot write" in err
        assert os.strerror(number) in err
        assert err.count("\n") == 1
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000004"]
        verify_checkpoint(run / "checkpoints/step-00000004")
        *_, last, failed = read_metrics(run / "metrics.jsonl")
        assert (last["kind"], last["step"]) == ("train", 9)
        assert (failed["kind"], failed["what"], failed["step"]) == ("event", "failed", 9)

    @pytest.mark.usefixtures("saves_end_with_a_step")
    def test_a_run_that_is_told_to_bear_it_goes_on(
        self, folder: Path, expected: Outcome, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(step: int) -> None:
            if step == 4:
                raise CheckpointError("the disk is full")

        when_saving(monkeypatch, refuse)
        changes = {"checkpoint.on_failure": "continue"}
        code, _, err = command(["train", *arguments(folder, "borne", changes)])
        assert (code, err) == (0, "")
        shown = (folder / "borne" / "log.txt").read_text().splitlines()
        warned = shown.index("warning: the disk is full; training continues")
        assert "step 00005" in shown[warned - 1]
        borne = outcome(folder / "borne")
        without = [line for line in expected.lines if line != '{"kind": "checkpoint", "step": 4, "tokens": 1024}']
        assert borne.lines == without
        assert len(without) == len(expected.lines) - 1
        assert all(torch.equal(borne.tensors[name], expected.tensors[name]) for name in expected.tensors)

    @pytest.mark.usefixtures("saves_end_with_a_step")
    def test_a_best_one_that_was_not_saved_is_not_the_best_saved(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        when_saving(monkeypatch, lambda step: raise_(CheckpointError("full")) if step == 6 else None)
        changes = {"steps": 8, "checkpoint__every_steps": 3, "checkpoint__on_failure": "continue"}
        run = train(folder, "best", **changes)
        state = load_checkpoint(list_checkpoints(run / "checkpoints")[-1]).state
        assert state["best"]["step"] >= 6
        assert state["best_saved"]["step"] != 6

    @pytest.mark.usefixtures("saves_end_with_a_step")
    def test_one_that_was_not_saved_is_not_the_last_good_one(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rewind would find nothing there, and retention would keep nothing for it."""
        when_saving(monkeypatch, lambda step: raise_(CheckpointError("full")) if step == 6 else None)
        changes: dict[str, Any] = {
            "checkpoint__every_steps": 3, "checkpoint__on_failure": "continue", "faults__spike_factor": 50.0,
        }  # fmt: skip
        run = train(folder, "good", steps=8, **changes)
        state = load_checkpoint(list_checkpoints(run / "checkpoints")[-1]).state
        assert state["faults"]["good_step"] == 3

    @pytest.mark.usefixtures("saves_end_with_a_step")
    def test_a_bug_is_no_warning(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        when_saving(monkeypatch, lambda step: raise_(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            gptlab.train(make_config(folder, "bug", checkpoint__on_failure="continue"))

    def test_no_memory_for_the_copy(self, folder: Path, expected: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(saver: BackgroundSaver, *kinds: object) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")

        monkeypatch.setattr(BackgroundSaver, "reserve", refuse)
        when_saving(monkeypatch, lambda step: pytest.fail("without a copy, nothing may be saved in the background"))
        code, out, _ = command(["train", *arguments(folder, "poor")])
        assert code == 0
        warnings = [line for line in out.splitlines() if line.startswith("warning")]
        assert warnings == [
            "warning: no memory for a copy of the state, so training will wait for every save: DefaultCPUAllocator: "
            "can't allocate memory"
        ]
        assert differences(expected, outcome(folder / "poor")) == []


class Snapshots:
    """Of tensors by name, as a saver takes them."""

    def __init__(self, device: torch.device) -> None:
        self.saver = BackgroundSaver(device, concurrent.futures.ThreadPoolExecutor(1))

    def reserve(self, tensors: dict[str, torch.Tensor]) -> None:
        self.saver.reserve(whole_slices(tensors))

    def take(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (taken,) = self.saver.snapshot(whole_slices(tensors))
        return {part.name: part.tensor for part in taken}


class TestSnapshots:
    def test_values_of_then_in_memory_that_is_used_again(self) -> None:
        snapshots = Snapshots(CPU)
        base = torch.arange(12.0).reshape(3, 4)
        tensors = {"view": base.T, "half": torch.randn(5).bfloat16(), "scalar": torch.tensor(3.0)}
        snapshots.reserve(tensors)
        first = snapshots.take(tensors)
        assert all(torch.equal(first[name], tensor) and first[name].is_contiguous() for name, tensor in tensors.items())
        addresses = {name: tensor.data_ptr() for name, tensor in first.items()}
        base += 1
        assert not torch.equal(first["view"], base.T)
        second = snapshots.take(tensors)
        assert torch.equal(second["view"], base.T)
        assert {name: tensor.data_ptr() for name, tensor in second.items()} == addresses

    def test_generators_change_their_length(self) -> None:
        snapshots = Snapshots(CPU)
        for length in (3, 5, 2):
            bits = torch.arange(length, dtype=torch.uint8)
            assert torch.equal(snapshots.take({"rng": bits})["rng"], bits)

    def test_parameters_need_no_graph(self) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        assert not Snapshots(CPU).take({"p": parameter})["p"].requires_grad

    @pytest.mark.gpu
    def test_from_a_gpu(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        device = torch.device("cuda")
        snapshots, tensor = Snapshots(device), torch.randn(1000, 1000, device=device)
        snapshots.reserve({"x": tensor})
        there, copy = tensor.cpu(), snapshots.take({"x": tensor})["x"]
        assert copy.is_pinned()
        tensor.zero_()
        assert torch.equal(copy, there)
