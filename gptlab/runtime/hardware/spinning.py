"""How long the threads of a parallel loop spin before they sleep: short, so that a busy machine stays usable."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

# A thread that waits for the others spins, since waking takes tens of microseconds. GNU's runtime spins for 300,000
# rounds: beside another program it then spins away the very time slices that the thread it waits for needs. Beside
# two busy loops 60 steps of nanogpt/shakespeare-char-cpu took 16.8 s, with 10,000 rounds 3.9 s and without spinning
# 6.1 s; alone 25.2, 27.5 and 35 ms a step (docs/LOG.md, 2026-11-22).
GNU_SPIN_ROUNDS = 10_000
# Intel's and LLVM's runtimes (torch on Windows and macOS) count milliseconds, 200 by default; 1 is the least.
KMP_BLOCK_MILLISECONDS = 1


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what OpenMP's runtimes read when torch loads them, unless the user has set how threads wait. Without effect
    once torch is loaded."""
    if "torch" in sys.modules or "OMP_WAIT_POLICY" in environment:
        return
    environment.setdefault("GOMP_SPINCOUNT", str(GNU_SPIN_ROUNDS))
    if "KMP_LIBRARY" not in environment:
        environment.setdefault("KMP_BLOCKTIME", str(KMP_BLOCK_MILLISECONDS))
