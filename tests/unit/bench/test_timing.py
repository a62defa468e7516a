"""How many steps are timed: as many as were asked for, or as few as are alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gptlab.bench import timing
from gptlab.config.load import apply_overrides
from gptlab.config.run import RunConfig
from gptlab.runtime.hardware.device import Platform
from gptlab.runtime.hardware.place import place_of

FIELDS = {
    "model.n_layer": 1, "model.n_embd": 32, "model.n_head": 2, "model.seq_len": 32, "model.vocab_size": 300,
    "batch.micro_sequences": 2, "batch.total_tokens": 2 * 64, "runtime.device": "cpu", "runtime.dtype": "float32",
    "runtime.compile": "off", "runtime.threads": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "timed"),
    [
        ([1.0] * 30, 5),
        ([1.0, 2.0, 1.0, 1.05, 1.02, 1.09, 1.0] + [3.0] * 30, 7),  # of which the last five
        ([1.0, 1.2] * 15, 20),  # never alike: all that were asked for
    ],
)
def test_until_alike(seconds: list[float], timed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([9.0, *seconds])  # the first is not counted
    monkeypatch.setattr(timing, "whole_steps", lambda *of_step: [next(steps)])
    nothing: Any = None
    found = timing.time_steps(
        nothing, nothing, nothing, max_steps=20, max_seconds=60, min_steps=3, by_parts=False, until_alike=True
    )
    assert found.whole_seconds == seconds[:timed]


def test_otherwise_as_many_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "whole_steps", lambda *of_step: [1.0])
    nothing: Any = None
    found = timing.time_steps(nothing, nothing, nothing, max_steps=20, max_seconds=60, by_parts=False)
    assert found.whole_seconds == [1.0] * 20


def test_a_gpu_is_timed_on_steps_that_are_queued_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five at a time, and the rest: the host waits for none but the last before it goes on."""
    config = apply_overrides(RunConfig(), FIELDS)
    at_once: list[int] = []
    real = timing.whole_steps

    def counted(*of_steps: Any) -> list[float]:
        seconds = real(*of_steps)
        at_once.append(len(seconds))
        return seconds

    def trained(platform: Platform) -> list[Tensor]:
        state, passes = timing.made_up_run(config, place_of(config), print)
        state.model.platform = platform
        with state.loader:
            found = timing.time_steps(state, passes.loss_sum, config, max_steps=8, max_seconds=60, by_parts=False)
        assert (len(found.whole_seconds), state.step) == (8, 9)  # and one that is not timed
        return [weight.detach() for weight in state.model.parameters()]

    monkeypatch.setattr(timing, "whole_steps", counted)
    waits, queues = trained("cpu"), trained("cuda")
    assert at_once == [1] * 9 + [1, 5, 3]
    assert all(map(torch.equal, waits, queues))
