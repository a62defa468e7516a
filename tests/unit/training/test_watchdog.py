from __future__ import annotations

import contextlib
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from gptlab.config.run import RunConfig, RuntimeConfig
from gptlab.training.faults import FaultRecord, TrainingFailed, loss_fault
from gptlab.training.signals import Signals
from gptlab.training.step import collect_garbage, quiet_garbage

CONFIG = RunConfig(runtime=RuntimeConfig(max_loss=100.0))


@pytest.mark.parametrize("loss", [0.0, 1e-9, 3.7, 99.999, 100.0, -0.5])
def test_a_plausible_loss_passes(loss: float) -> None:
    assert loss_fault(loss, FaultRecord(), CONFIG) is None


@pytest.mark.parametrize("loss", [100.001, 1e30])
def test_a_broken_loss_ends_training_with_one_line(loss: float) -> None:
    with pytest.raises(TrainingFailed) as caught:
        loss_fault(loss, FaultRecord(), CONFIG)
    text = str(caught.value)
    assert f"{loss:.4g}" in text
    assert "\n" not in text


@contextlib.contextmanager
def training(
    answer: Callable[[str], None] = lambda name: None, stop_now: Callable[[str], None] | None = None
) -> Iterator[Signals]:
    with Signals(stop_now=stop_now) as signals, signals.training(answer):
        yield signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_and_a_second_sigterm_does_no_harm(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with training() as signals:
        assert not signals.requested
        assert signals.signal_name is None
        signal.raise_signal(number)
        assert signals.requested
        assert signals.signal_name == number.name
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals.signal_name == number.name, "the first one is what ended the run"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signals.requested, "still known after the context"


def test_the_first_signal_is_answered_and_a_second_interrupt_does_not_wait() -> None:
    """Contract: the answer does not wait for the main thread, and only Ctrl-C is somebody's impatience."""
    answered: list[str] = []
    insisted = threading.Event()
    with training(answered.append, lambda name: insisted.set()) as signals:
        signal.raise_signal(signal.SIGTERM)
        signals.wait_for_answer()
        assert answered == ["SIGTERM"]
        signal.raise_signal(signal.SIGTERM)
        assert not insisted.wait(0.1)
        signal.raise_signal(signal.SIGINT)
        assert insisted.wait(20)
    assert answered == ["SIGTERM"]


def test_without_a_way_to_end_the_process_a_second_interrupt_is_an_exception() -> None:
    """As in a notebook, whose process is not gptlab's to end."""
    with training():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_interrupt_that_torchrun_repeats_is_not_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends Ctrl-C to torchrun and its workers, and torchrun sends it to its workers again."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    insisted: list[str] = []
    with training(stop_now=insisted.append):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.1)
    with training() as signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert signals.requested
    assert insisted == []


def test_handlers_come_back_after_an_error_too() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), training():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_after_the_context_is_an_interrupt_again() -> None:
    # A job in the background of a shell starts with SIGINT ignored, and Python leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with training():
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_of_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def run() -> None:
        with training() as signals:
            seen.extend([signals.requested, signals.signal_name, signal.getsignal(signal.SIGTERM) is before])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False, None, True]
    assert signal.getsignal(signal.SIGTERM) is before


WAITING = """
import time
from gptlab.training.signals import Signals
with Signals() as signals, signals.training():
    print("ready", flush=True)
    step = 0
    while not signals.requested:
        time.sleep(0.2)
        step += 1
    print(signals.signal_name)
"""


@pytest.mark.skipif(os.name != "posix", reason="Windows cannot send SIGTERM to be handled")
def test_a_process_that_is_asked_to_end_finishes_its_step() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == "SIGTERM\n"
    assert process.returncode == 0


@pytest.fixture
def thaws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that a run froze are unfrozen after it; conftest.py keeps that from happening."""
    monkeypatch.setattr(gc, "unfreeze", inspect.unwrap(gc.unfreeze))
    gc.unfreeze()


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def cycle() -> Iterator[weakref.ref[_Cycle]]:
    """Garbage that only a collection finds."""
    yield weakref.ref(_Cycle())
    gc.collect()


@pytest.mark.usefixtures("thaws")
def test_no_collection_but_every_5000_steps() -> None:
    with quiet_garbage():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        garbage = weakref.ref(_Cycle())
        for step in range(1, 5000):
            collect_garbage(step)
        assert garbage() is not None
        collect_garbage(5000)
        assert garbage() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_setting_up_left_is_collected_at_entry(cycle: weakref.ref[_Cycle]) -> None:
    with quiet_garbage():
        assert cycle() is None


def test_the_collector_comes_back_after_an_error_and_stays_off_where_it_was_off() -> None:
    with pytest.raises(RuntimeError), quiet_garbage():
        raise RuntimeError
    assert gc.isenabled()
    gc.disable()
    try:
        with quiet_garbage():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
