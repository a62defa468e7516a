"""What a run does with a step that broke: how often it goes on, and whether it goes back to before a loss spike."""

from __future__ import annotations

from dataclasses import dataclass

from gptlab.config.errors import require, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    max_skipped_in_a_row: int = 3
    """Updates left out one after the other, for a loss or gradient that is not finite, before the next such step ends
    the run with exit code 3. 0: the first one does."""
    max_skipped: int | None = None
    """The same for all of a run, in a row or not. None: as many as come."""
    spike_factor: float | None = None
    """A training loss above so many times the median of the last ones is a spike: the run goes back to its last good
    checkpoint and goes on with the data behind the spike. None: it never does."""
    spike_window: int = 128
    """Steps in that median; before there are so many, nothing is a spike."""
    max_rewinds: int = 10
    """Times that a run goes back, at most; the next spike ends it with exit code 3."""

    def __post_init__(self) -> None:
        for name in ("max_skipped_in_a_row", "max_skipped", "max_rewinds"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"faults.{name}", value, "must not be negative", 0)
        require_positive("faults.spike_window", self.spike_window)
        require(
            self.spike_factor is None or self.spike_factor > 1, "faults.spike_factor", self.spike_factor,
            "must be greater than 1, or every step would be a spike", 2.0,
        )  # fmt: skip
