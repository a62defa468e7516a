"""SIGTERM and SIGINT before the first step: exit 75 within a moment, one line, nothing half-made; --resume works."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from tiny_runs import (
    Outcome,
    arguments,
    at_line,
    command,
    differences,
    killed_at,
    lines_of,
    make_config,
    outcome,
    start,
    train,
)

import gptlab
from gptlab.config.errors import UserError
from gptlab.runtime.files.cache import damage
from gptlab.training import loop, signals
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.signals import Signals, StoppedEarly, behind_signal
from gptlab.training.state import TrainState
from gptlab.training.step import TrainStep

posix = pytest.mark.skipif(os.name != "posix", reason="Windows sends no signals between processes")

WITHOUT_RUN = "stopped while preparing, before there was a run: the same command begins again"

HERE = """
import pkgutil, time
def wait(*args, **kwargs):
    print("HERE", flush=True)
    for _ in range(1000):
        time.sleep(0.1)
def here(name, *, before=lambda *a, **k: None):
    place, _, attribute = name.rpartition(".")
    setattr(pkgutil.resolve_name(place), attribute, lambda *a, **k: (before(*a, **k), wait()))
"""
"""`here(NAME)`: whoever calls NAME says HERE and is then busy for a long time, in Python."""

DEEP = """
import hashlib, threading
def wait(*args, **kwargs):
    threading.Timer(0.5, lambda: print("HERE", flush=True)).start()  # said from inside
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""
"""The same inside a library written in C, where no Python code runs that could raise: for minutes."""

GRACE = "from gptlab.training import signals; signals.GRACE_SECONDS = 0.5\n"

HALF_A_FILE = "before=lambda folder, *a, **k: (folder / 'train-00000.bin').write_bytes(b'half')"


@pytest.fixture(scope="module")
def expected(folder: Path) -> Outcome:
    return outcome(train(folder, "whole", steps=2))


def stopped(folder: Path, name: str, number: int, prelude: str) -> tuple[int, list[str], float]:
    """A run that gets a signal where its prelude says HERE: exit code, what it printed, seconds from signal to end.

    Both preludes are busy for longer than the minute after which this gives up: a run that ends has heard the signal.
    """
    process = start(["train", *arguments(folder, name, {"steps": 2})], prelude=prelude)
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        if line == "HERE\n":
            break
        printed.append(line)
    sent = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    return process.returncode, [*printed, *output.splitlines()], time.monotonic() - sent


@posix
class TestBeforeThereIsARun:
    @pytest.mark.parametrize(
        ("number", "moment"),
        [
            (signal.SIGINT, "here('gptlab.app.run.run_request.RunRequest.config')"),
            (signal.SIGTERM, f"here('gptlab.data.prepare._write_tokens', {HALF_A_FILE})"),
        ],
        ids=["configuring", "preparing"],
    )
    def test_it_ends_and_leaves_nothing(self, folder: Path, tmp_path: Path, number: int, moment: str) -> None:
        (tmp_path / "corpus").symlink_to(folder / "corpus")
        code, printed, _ = stopped(tmp_path, "r", number, HERE + moment)
        assert (code, printed[-1]) == (75, f"{signal.Signals(number).name}: {WITHOUT_RUN}")
        assert not any("Traceback" in line or "Error" in line for line in printed)
        assert not (tmp_path / "r").exists()
        for made in (tmp_path / "cache").glob("*/*"):
            assert made.name.endswith(".lock") or damage(made) is None, f"{made} is half-made"


AT_WARM_UP = "import gptlab.app.run.run_session; here('gptlab.app.run.run_session._warm_up')"


@posix
class TestBeforeTheFirstStep:
    @pytest.mark.parametrize(
        ("number", "moment"),
        [
            (signal.SIGTERM, AT_WARM_UP),
            (signal.SIGINT, DEEP + GRACE + AT_WARM_UP),
        ],
        ids=["compiling", "deep"],
    )
    def test_the_run_goes_on_as_if_nothing_had_been(
        self, folder: Path, expected: Outcome, number: int, moment: str, request: pytest.FixtureRequest
    ) -> None:
        run = folder / request.node.callspec.id
        code, printed, seconds = stopped(folder, run.name, number, HERE + moment)
        said = f"stopped before the first step; start it again with gptlab train --resume {run}"
        assert (code, printed[-1]) == (75, f"{signal.Signals(number).name}: {said}")
        assert seconds >= 0.5 or run.name != "deep"
        assert json.loads((run / "run.json").read_text())["status"] == "preempted"
        assert command(["train", "--resume", run])[0] == 0
        assert differences(expected, outcome(run)) == []


@posix
class TestDuringAStep:
    """The main thread is deep inside a library, where Python runs no handler."""

    SLOW = DEEP + (
        "from gptlab.training import compilation, step as step_module\n"
        "def slow(state, *args, work=step_module.gradients):\n"
        "    if state.step == 1: wait()\n"
        "    return work(state, *args)\n"
        "step_module.gradients = slow\n"
    )

    def test_ctrl_c_is_answered_at_once_and_a_second_one_does_not_wait(self, folder: Path) -> None:
        """Contract: exit code 75, the last checkpoint stays, and the resumed run is the undisturbed one."""
        run = folder / "impatient"
        process = start(
            ["train", *arguments(folder, run.name, {"steps": 2, "checkpoint.every_steps": 1})], prelude=self.SLOW
        )
        assert process.stdout is not None
        said = iter(process.stdout)
        assert any(line == "HERE\n" for line in said)
        process.send_signal(signal.SIGINT)
        answer = next(said)
        assert answer.startswith("SIGINT: stopping after this step; Ctrl-C again")
        assert process.poll() is None, "it waits for the step, as it says"
        process.send_signal(signal.SIGINT)
        (last,) = list(said)
        assert process.wait() == 75
        checkpoint = run / "checkpoints" / "step-00000001"
        assert last == (
            f"SIGINT again: stopped at once; the last checkpoint is {checkpoint}; "
            f"resume with gptlab train --resume {run}\n"
        )
        assert json.loads((run / "run.json").read_text())["status"] == "preempted"
        assert command(["train", "--resume", run])[0] == 0
        again = train(folder, "patient", steps=2, checkpoint__every_steps=1)
        assert differences(outcome(again), outcome(run)) == []


def raised(number: int) -> Callable[..., None]:
    return lambda *args, **kwargs: signal.raise_signal(number)


class TestInThisProcess:
    def test_whatever_a_library_makes_of_the_exception(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def translating(*args: object, **kwargs: object) -> None:
            try:
                signal.raise_signal(signal.SIGTERM)
            except BaseException as error:
                raise ImportError("numpy could not be imported") from error

        monkeypatch.setattr("gptlab.app.run.session.build_state", translating)
        code, out, err = command(["train", *arguments(folder, "translated")])
        assert (code, out.splitlines()[-1], err) == (75, f"SIGTERM: {WITHOUT_RUN}", "")

    @pytest.mark.parametrize(
        "place", ["gptlab.app.run.session.build_state", "gptlab.data.tokenizer.base.ByteTokenizer.save"]
    )
    def test_while_a_run_is_built_and_its_folder_made(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        monkeypatch.setattr(place, raised(signal.SIGTERM))
        code, out, _ = command(["train", *arguments(folder, "building")])
        assert (code, out.splitlines()[-1]) == (75, f"SIGTERM: {WITHOUT_RUN}")
        assert not (folder / "building").exists()

    def test_while_a_resumed_run_gets_ready(self, folder: Path, expected: Outcome) -> None:
        """Its log and metrics are being cut to what the checkpoint saw."""
        run = folder / "resumed"
        with killed_at("eval", 2):
            train(folder, "resumed", steps=2, checkpoint__every_steps=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gptlab.training.recorder.Recorder.cut_to", raised(signal.SIGINT))
            code, out, _ = command(["train", "--resume", run])
        assert (code, out.splitlines()[-1].partition(";")[0]) == (75, "SIGINT: stopped before the first step")
        assert command(["train", "--resume", run])[0] == 0
        evaluated = [json.loads(line) for line in expected.lines if '"eval"' in line]
        assert lines_of(run, "eval")[-1]["val_loss"] == evaluated[-1]["val_loss"]

    def test_before_a_resumed_run_is_opened(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It said that there was no run yet."""
        run = train(folder, "not-opened", steps=1)
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        monkeypatch.setattr("gptlab.app.run.train_run._import_torch", raised(signal.SIGTERM))
        code, out, err = command(["train", "--resume", run])
        said = f"SIGTERM: stopped while preparing; {run} is unchanged: the same command continues it"
        assert (code, out.splitlines()[-1], err) == (75, said, "")
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before

    @posix
    def test_a_lost_terminal_stops_it_after_its_step(self, folder: Path, expected: Outcome) -> None:
        run, before = folder / "hung-up", signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        try:
            with at_line("train", 1, lambda: signal.raise_signal(signal.SIGHUP)):
                code, out, _ = command(["train", *arguments(folder, run.name, {"steps": 2})])
        finally:
            signal.signal(signal.SIGHUP, before)
        said = f"SIGHUP: stopped after step 1, saved; resume with gptlab train --resume {run}"
        assert (code, out.splitlines()[-1]) == (75, said)
        assert command(["train", "--resume", run])[0] == 0
        assert differences(expected, outcome(run)) == []

    def test_or_if_it_swallows_it(self, folder: Path, expected: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
        def swallowing(*args: object) -> float:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            return 0.0

        with monkeypatch.context() as patch:
            patch.setattr("gptlab.app.run.run_session._warm_up", swallowing)
            code, out, _ = command(["train", *arguments(folder, "swallowed", {"steps": 2})])
        assert (code, "SIGINT: stopped before the first step" in out.splitlines()[-1]) == (75, True)
        assert command(["train", "--resume", folder / "swallowed"])[0] == 0
        assert differences(expected, outcome(folder / "swallowed")) == []

    def test_in_the_loop_before_the_first_step(self, folder: Path, expected: Outcome) -> None:
        """There is nothing to save; a checkpoint of step 0 would be a multiple of everything, and stay for good."""
        run, keep = folder / "step-0", {"steps": 2, "checkpoint.keep_every_steps": 1}
        with at_line("eval", 0, lambda: signal.raise_signal(signal.SIGTERM)):
            code, out, _ = command(["train", *arguments(folder, run.name, keep)])
        said = f"SIGTERM: stopped before the first step; start it again with gptlab train --resume {run}"
        assert (code, out.splitlines()[-1]) == (75, said)
        assert json.loads((run / "run.json").read_text())["status"] == "preempted"
        assert list_checkpoints(run / "checkpoints") == []
        assert command(["train", "--resume", run])[0] == 0
        assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000002"]
        assert differences(expected, outcome(run)) == []

    @pytest.mark.parametrize(
        "place",
        ["training.recorder.Recorder.finish_run", "app.run.run_session.next_commands"],
        ids=["summary", "text"],
    )
    def test_after_the_last_step_a_run_ends_as_it_would(
        self, folder: Path, expected: Outcome, monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        """It was marked as preempted, though all of it was there."""
        module, _, name = f"gptlab.{place}".rpartition(".")
        last = resolve_name(module)
        ends = getattr(last, name)
        monkeypatch.setattr(
            last, name, lambda *args, **also: (signal.raise_signal(signal.SIGINT), ends(*args, **also))[1]
        )
        run = folder / f"late-{name}"
        code, out, _ = command(["train", *arguments(folder, run.name, {"steps": 2})])
        assert (code, json.loads((run / "run.json").read_text())["status"]) == (0, "finished")
        assert "depth:" in out.splitlines()[-1]
        assert differences(expected, outcome(run)) == []

    @posix
    def test_a_pause_is_off_the_clock(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Ctrl-Z and fg: the fifteen seconds between them ended a run of twelve seconds, whose rates had not fallen.
        Slurm sends SIGCONT also where nothing was stopped."""
        seconds = [0.25, 15.0, 0.25, 0.75]
        real = loop.train_step

        def paused(state: TrainState, *rest: Any) -> TrainStep:
            step = real(state, *rest)
            if state.step in (1, 3):
                signal.raise_signal(signal.SIGCONT)
            return replace(step, seconds=seconds[state.step])

        monkeypatch.setattr(loop, "train_step", paused)
        gptlab.train(make_config(folder, "paused", steps=4))
        times = [(line["step_seconds"], line["train_seconds"]) for line in lines_of(folder / "paused", "train")]
        assert times == [(0.25, 0.25), (0.25, 0.5), (0.25, 0.75), (0.75, 1.5)]
        out = capsys.readouterr().out
        assert "step 00002: the process was paused; 14.8 s are off the clock" in out
        assert out.count("was paused") == 1
        assert signal.getsignal(signal.SIGCONT) == signal.SIG_DFL

    def test_from_python_it_is_an_interrupt_while_there_is_no_run(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gptlab.app.run.session.build_state", raised(signal.SIGINT))
        monkeypatch.setattr(signals.Signals, "_watch", lambda _: pytest.fail("it would end the user's program"))
        with pytest.raises(KeyboardInterrupt):
            gptlab.train(make_config(folder, "python"))


@pytest.fixture
def handlers() -> Iterator[None]:
    """An interrupt is an interrupt, whatever the shell that started the tests had set; all is as it was afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
class TestSignals:
    def test_the_first_signal_raises_and_more_do_nothing(self) -> None:
        with Signals() as early:
            with pytest.raises(StoppedEarly, match="SIGTERM"):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)  # while somebody cleans up
            assert early.stopped_early == "SIGTERM"
            with pytest.raises(StoppedEarly, match="SIGTERM"), early.training():
                pytest.fail("a library has swallowed the signal")

    @posix
    def test_under_nohup_a_lost_terminal_changes_nothing(self) -> None:
        former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with Signals() as early, early.training():
                signal.raise_signal(signal.SIGHUP)
                assert not early.requested
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        finally:
            signal.signal(signal.SIGHUP, former)

    @posix
    def test_the_one_that_slurm_is_often_told_to_send_before_its_time_is_over(self) -> None:
        """`#SBATCH --signal=USR1@120`: it killed the run."""
        former = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        try:
            with Signals(end_now=lambda name: None) as signals, signals.training():
                assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL, "it would end this process"
                signal.raise_signal(signal.SIGUSR1)
            assert signals.signal_name == "SIGUSR1"
            heard, answered = list[int](), list[str]()
            signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))  # a program's own
            with Signals() as signals, signals.training(answered.append):
                signal.raise_signal(signal.SIGUSR1)
                signal.raise_signal(signal.SIGTERM)
                assert wait_until(lambda: bool(answered))
            assert (signals.signal_name, heard, answered) == ("SIGTERM", [signal.SIGUSR1], ["SIGTERM"])
        finally:
            signal.signal(signal.SIGUSR1, former)

    def test_none_changes_an_end_that_is_settled(self) -> None:
        with Signals() as early:
            early.too_late()
            signal.raise_signal(signal.SIGTERM)
            assert early.stopped_early is None

    def test_nor_the_exit_code_of_a_process_that_is_about_to_exit(self) -> None:
        """A second Ctrl-C, or torchrun's SIGTERM to the other ranks when the first one has exited with a code that is
        not 0."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        former = [signal.getsignal(number) for number in numbers]
        with Signals(end_now=lambda name: None):
            pass
        assert [signal.getsignal(number) for number in numbers] == former, "nothing was settled"
        with Signals() as early:
            early.too_late()
        assert [signal.getsignal(number) for number in numbers] == former, "the process is a caller's"
        with Signals(end_now=lambda name: None) as early:
            early.too_late()
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN] * 2

    def test_nor_an_error_that_came_first(self) -> None:
        def behind(first: Exception) -> BaseException | None:
            try:
                with Signals():
                    try:
                        raise first
                    finally:
                        signal.raise_signal(signal.SIGTERM)
            except StoppedEarly as stop:
                return behind_signal(stop)
            return None

        wrong = UserError("the input is wrong")
        assert behind(wrong) is wrong
        assert isinstance(behind(KeyError("what a library gets along with")), StoppedEarly)

    def test_handlers_and_the_wakeup_descriptor_come_back(self) -> None:
        handler, descriptor = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(descriptor)
        for error in (None, RuntimeError):
            try:
                with Signals(print) as early:
                    assert signal.getsignal(signal.SIGINT) != handler
                    if error:
                        raise error
                    with early.training():
                        pass
            except RuntimeError:
                pass
            assert signal.getsignal(signal.SIGINT) == handler
            assert signal.set_wakeup_fd(descriptor) == descriptor

    @posix
    def test_who_cannot_be_reached_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(signals, "GRACE_SECONDS", 0.05)
        ended: list[str] = []
        with Signals(ended.append) as early:
            with pytest.raises(StoppedEarly):
                signal.raise_signal(signal.SIGINT)
            assert wait_until(lambda: bool(ended))
        with Signals(ended.append) as early:
            with early.training():
                pass
            with pytest.raises(StoppedEarly):
                signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(signals, "GRACE_SECONDS", 3600.0)  # the context is left before, on any machine
        with Signals(ended.append), pytest.raises(StoppedEarly):
            signal.raise_signal(signal.SIGTERM)
        assert wait_until(nobody_watches)
        assert ended == ["SIGINT"], "only the one whose context went on, and only before the first step"

    def test_outside_of_the_main_thread_nothing_is_installed(self) -> None:
        before, seen = signal.getsignal(signal.SIGTERM), []

        def run() -> None:
            with Signals(print) as early:
                with early.training():
                    pass
                seen.append(signal.getsignal(signal.SIGTERM) is before)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert seen == [True]


def nobody_watches() -> bool:
    return all(thread.name != "gptlab-signals" for thread in threading.enumerate())


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()
