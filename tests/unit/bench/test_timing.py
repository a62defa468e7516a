"""How many steps are timed: as many as were asked for, or as few as are alike."""

from __future__ import annotations

from typing import Any

import pytest

from gptlab.bench import timing


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
    monkeypatch.setattr(timing, "whole_step", lambda *of_step: next(steps))
    nothing: Any = None
    found = timing.time_steps(
        nothing, nothing, nothing, max_steps=20, max_seconds=60, min_steps=3, by_parts=False, until_alike=True
    )
    assert found.whole_seconds == seconds[:timed]


def test_otherwise_as_many_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "whole_step", lambda *of_step: 1.0)
    nothing: Any = None
    found = timing.time_steps(nothing, nothing, nothing, max_steps=20, max_seconds=60, by_parts=False)
    assert found.whole_seconds == [1.0] * 20
