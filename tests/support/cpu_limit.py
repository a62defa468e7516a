"""How long something may take, in seconds of processor time."""

from __future__ import annotations

import os


def cpu_limit(seconds: float) -> float:
    """The promise itself for `make test-timing`, on a quiet machine. Elsewhere ten times as long: a busy machine evicts
    caches, and what hangs or grows with the square of its input takes longer still."""
    return seconds if os.environ.get("GPTLAB_TEST_TIMING") == "1" else 10 * seconds
